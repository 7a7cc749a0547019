"""An encoder with random weights and a data set with texts of varied lengths, both made without a
network.

    python benchmarks/made.py OUT [--quick]

OUT/model has the size of bert-base-uncased (``--quick``: one layer, width 32). OUT/data is a BEIR
folder with the splits train and test. Its texts are cut from the running text of invented_set.py,
with log-normal lengths: most passages have 40 to 250 words, a few 400.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from invented_set import invented_files
from transformers import AutoConfig, AutoModel

from contaccum.encoder import wordpiece_tokenizer
from contaccum.formats.records import write_beir_folder
from contaccum.runtime.files import whole_folder

BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VOCABULARY = 4000  # learned word pieces; the embedding table has bert-base-uncased's 30,522 rows


def running_text() -> list[str]:
    """Return the words of all passages of the set of invented words, in order."""
    lines = invented_files()["corpus.jsonl"].splitlines()
    return " ".join(json.loads(line)["text"] for line in lines).split()


def write_encoder(
    folder: Path, family: str, sizes: dict[str, Any], texts: list[str], vocabulary: int
) -> None:
    """Write an encoder folder with random weights and a tokenizer learned from texts."""
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(family, pad_token_id=0, **sizes)).save_pretrained(
        folder
    )
    wordpiece_tokenizer(texts, vocabulary).save_pretrained(folder)


def varied_texts(
    words: list[str], count: int, middle: float, most: int, random: np.random.Generator
) -> list[str]:
    """Return ``count`` pieces of running text with log-normal lengths around ``middle`` words, at
    most ``most``."""
    lengths = np.clip(random.lognormal(np.log(middle), 0.6, count), 3, most).astype(int)
    starts = random.integers(0, len(words) - most, count)
    return [
        " ".join(words[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]


def write_data(folder: Path, pairs: int) -> None:
    """Write a BEIR folder; the first tenth of the queries is the test split."""
    folder.mkdir(parents=True)
    words, random = running_text(), np.random.default_rng(0)
    queries = varied_texts(words, pairs, 12, 60, random)
    passages = varied_texts(words, pairs, 100, 400, random)
    judged = [(f"q{number}", f"p{number}", 1) for number in range(pairs)]
    write_beir_folder(
        folder,
        [{"_id": f"p{number}", "title": "", "text": text} for number, text in enumerate(passages)],
        [{"_id": f"q{number}", "text": text} for number, text in enumerate(queries)],
        {"train": judged[pairs // 10 :], "test": judged[: pairs // 10]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="new folder")
    parser.add_argument("--quick", action="store_true", help="a tiny encoder and 400 pairs")
    args = parser.parse_args()
    sizes = SMALL | {"vocab_size": VOCABULARY} if args.quick else BASE | {"vocab_size": 30_522}
    words = running_text()
    lines = [" ".join(words[start : start + 100]) for start in range(0, len(words), 100)]
    with whole_folder(args.out) as unfinished:
        write_encoder(unfinished / "model", "bert", sizes, lines, VOCABULARY)
        write_data(unfinished / "data", 400 if args.quick else 4000)
    print(f"encoder and data in {args.out}")


if __name__ == "__main__":
    main()

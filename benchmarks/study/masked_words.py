"""Train an encoder with random weights to predict masked words, and nothing else.

    python benchmarks/study/masked_words.py MODEL OUT --corpora SET [SET ...] [--steps 1200]

The encoder has the shape and the tokenizer of MODEL, a BERT. It learns from the passages of BEIR
folders, cut into pieces of 64 tokens; 1,200 steps take 45 to 60 minutes of one CPU core. --seed
draws the weights, the masks and the order of the pieces.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    set_seed,
)

from contaccum.config.commands import DataPolicy
from contaccum.data.dataset import open_dataset
from contaccum.retrieval.encode import Texts

TOKENS, PIECES, RATE, WARMUP = 64, 32, 5e-4, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpora", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [text for folder in args.corpora for text in passages(folder)]
    pieces = tokenizer(texts, truncation=True, max_length=TOKENS, return_overflowing_tokens=True)[
        "input_ids"
    ]
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
    mask = DataCollatorForLanguageModeling(tokenizer)
    print(f"{len(texts):,} passages, {len(pieces):,} pieces", flush=True)
    began, order, mean = time.process_time(), list[int](), math.log(tokenizer.vocab_size)
    for step in range(args.steps):
        if len(order) < PIECES:
            order += torch.randperm(len(pieces)).tolist()
        chosen, order = order[:PIECES], order[PIECES:]
        batch = mask([{"input_ids": pieces[number]} for number in chosen])
        labels = batch.pop("labels")
        masked = labels != -100
        hidden = model.base_model(**batch).last_hidden_state[masked]
        loss = cross_entropy(model.cls(hidden), labels[masked])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = (step + 1) / (args.steps + 1)
        optimizer.param_groups[0]["lr"] = RATE * min(done / WARMUP, 1 - done)
        optimizer.step()
        optimizer.zero_grad()
        mean = 0.99 * mean + 0.01 * loss.item()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:,} of {args.steps:,}: loss {mean:.3f}", flush=True)
    model.base_model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    spent = time.process_time() - began
    print(
        f"{args.steps:,} steps of {PIECES} pieces, {spent:.0f} CPU s, loss {mean:.3f}: {args.out}"
    )


def passages(folder: str) -> list[str]:
    """Return the passages of a BEIR folder, each with its title."""
    texts = Texts("passage", open_dataset(folder, policy=DataPolicy(repair=True)).corpus)
    return texts.read(0, texts.rows)[1]


if __name__ == "__main__":
    main()

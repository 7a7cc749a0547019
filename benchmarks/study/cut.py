"""Cuts a BEIR folder down so that scoring takes seconds: a split's judged passages and a fixed random sample of the others.

    python benchmarks/study/cut.py BEIR_DIR OUT [--held_out Q] [--sample P]

writes OUT/train (all passages, the train split), OUT/dev and OUT/test (each its own judged passages and P others). --held_out
takes Q random queries out of the train split for dev, where the folder has no dev split. Fewer passages than the whole corpus
make retrieval easier: scores on a cut compare with each other, not with published ones. Repeated ids: the last text counts.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

Qrels = list[tuple[str, str, str]]


def rows_by_id(path: Path) -> dict[str, dict[str, Any]]:
    """Records in the order of their ids' first lines."""
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    return {row["_id"]: row for row in rows}


def read_qrels(path: Path) -> Qrels:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [(query, passage, grade) for query, passage, grade in (line.split("\t") for line in lines if line)]


def write(folder: Path, split: str, corpus: list[dict], queries: list[dict], qrels: Qrels) -> None:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in qrels)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="BEIR folder with the splits train and test, and dev unless --held_out"
    )
    parser.add_argument("out", type=Path, help="folder to write; left as it is where it is there")
    parser.add_argument("--held_out", type=int, default=0, help="train queries to make dev of")
    parser.add_argument("--sample", type=int, default=400, help="passages without a judgement in the split; -1: all")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.out.exists():
        return
    if not (chosen.source / "corpus.jsonl").is_file():
        sys.exit(f"{chosen.source}: no corpus.jsonl there, expected a BEIR folder")
    corpus, queries = (rows_by_id(chosen.source / f"{name}.jsonl") for name in ("corpus", "queries"))
    splits = {path.stem: read_qrels(path) for path in sorted((chosen.source / "qrels").glob("*.tsv"))}
    dice = random.Random(chosen.seed)
    if chosen.held_out:
        names = sorted({query for query, _, _ in splits["train"]})
        held = set(dice.sample(names, chosen.held_out))
        splits["dev"] = [row for row in splits["train"] if row[0] in held]
        splits["train"] = [row for row in splits["train"] if row[0] not in held]
    part = chosen.out.with_name(f"{chosen.out.name}.part")
    for split in ("train", "dev", "test"):
        qrels = splits[split]
        kept = {passage for _, passage, _ in qrels}
        if split == "train":
            kept |= set(corpus)
        else:
            others = sorted(set(corpus) - kept)
            kept |= set(others if chosen.sample < 0 else dice.sample(others, min(chosen.sample, len(others))))
        asked = {query for query, _, _ in qrels}
        write(
            part / split,
            split,
            [row for name, row in corpus.items() if name in kept],
            [row for name, row in queries.items() if name in asked],
            qrels,
        )
    part.rename(chosen.out)


if __name__ == "__main__":
    main()

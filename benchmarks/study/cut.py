"""Reduce a BEIR folder so that evaluation takes seconds: judged passages of a split and a fixed
random sample of the others.

    python benchmarks/study/cut.py DIR OUT [--held_out Q] [--sample P] [--disjoint]

DIR is a BEIR folder, or one in DPR's format with psgs_w100.tsv, NAME-train.json and NAME-dev.json,
which becomes the test split. The script writes OUT/train (all passages, the train split), and
OUT/dev and OUT/test (their judged passages and P others). --held_out moves Q random queries from
the train split to dev, for a folder without a dev split. --disjoint divides the queries again, so
that no judged passage, and no title, is in two splits. A smaller corpus makes retrieval easier:
compare scores on the same cut only, not with published ones. Of repeated ids the last text counts.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

Qrels = list[tuple[str, str, str]]
Rows = dict[str, dict[str, Any]]


def rows_by_id(path: Path) -> Rows:
    """Return records in the order of their ids' first lines."""
    rows = (
        json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()
    )
    return {row["_id"]: row for row in rows}


def read_qrels(path: Path) -> Qrels:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [
        (query, passage, grade)
        for query, passage, grade in (line.split("\t") for line in lines if line)
    ]


def read_beir(source: Path) -> tuple[Rows, Rows, dict[str, Qrels]]:
    """Return passages, queries and judgements by split."""
    corpus, queries = (rows_by_id(source / f"{name}.jsonl") for name in ("corpus", "queries"))
    return (
        corpus,
        queries,
        {path.stem: read_qrels(path) for path in sorted((source / "qrels").glob("*.tsv"))},
    )


def read_dpr(source: Path) -> tuple[Rows, Rows, dict[str, Qrels]]:
    """Return passages, queries and judgements by split; the first positive of a question is its
    judgement."""
    lines = (source / "psgs_w100.tsv").read_text(encoding="utf-8").split("\n")[1:]
    passages = (line.split("\t") for line in lines if line)
    corpus = {
        name: {"_id": name, "title": title.strip(), "text": text.strip()}
        for name, text, title in passages
    }
    queries: Rows = {}
    splits: dict[str, Qrels] = {}
    for split, part in (("train", "train"), ("test", "dev")):
        file = next(source.glob(f"*-{part}.json"))
        for number, row in enumerate(json.loads(file.read_text(encoding="utf-8"))):
            name = f"{split}{number}"
            queries[name] = {"_id": name, "text": row["question"]}
            splits.setdefault(split, []).append(
                (name, str(row["positive_ctxs"][0]["passage_id"]), "1")
            )
    return corpus, queries, splits


def divide(corpus: Rows, splits: dict[str, Qrels], dice: random.Random) -> dict[str, Qrels]:
    """Return new splits that share no judged passage and no title of one.

    Each split has at most as many queries as before,
    but train gets all that are left.

    Queries are connected if they have a judged passage or its title in common. Connected queries
    stay together.
    """
    rows = [row for split in ("train", "dev", "test") for row in splits[split]]
    parent: dict[str, str] = {}

    def root(node: str) -> str:
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    for query, passage, _ in rows:
        parent[root(f"query {query}")] = root(f"passage {corpus[passage].get('title') or passage}")
    connected: dict[str, list[str]] = {}
    for query in sorted({query for query, _, _ in rows}):
        connected.setdefault(root(f"query {query}"), []).append(query)
    components = list(connected.values())
    dice.shuffle(components)
    split_of: dict[str, str] = {}
    for split in ("test", "dev"):
        room = len({query for query, _, _ in splits[split]})
        for component in components:
            if component[0] not in split_of and len(component) <= room:
                room -= len(component)
                split_of |= dict.fromkeys(component, split)
    new: dict[str, Qrels] = {"train": [], "dev": [], "test": []}
    for row in rows:
        new[split_of.get(row[0], "train")].append(row)
    return new


def write(folder: Path, split: str, corpus: list[dict], queries: list[dict], qrels: Qrels) -> None:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(row) for row in qrels)]
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="folder with the splits train and test, and dev unless --held_out"
    )
    parser.add_argument("out", type=Path, help="folder to write; nothing is done if it exists")
    parser.add_argument("--held_out", type=int, default=0, help="train queries to make dev of")
    parser.add_argument(
        "--sample", type=int, default=400, help="passages without a judgement in the split; -1: all"
    )
    parser.add_argument(
        "--disjoint", action="store_true", help="divide the queries again; splits share no passage"
    )
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.out.exists():
        return
    read = {"corpus.jsonl": read_beir, "psgs_w100.tsv": read_dpr}
    found = next((name for name in read if (chosen.source / name).is_file()), None)
    if found is None:
        sys.exit(
            f"{chosen.source}: no corpus.jsonl and no psgs_w100.tsv; it must be a BEIR folder or "
            "one in DPR's format"
        )
    corpus, queries, splits = read[found](chosen.source)
    dice = random.Random(chosen.seed)
    if chosen.held_out:
        names = sorted({query for query, _, _ in splits["train"]})
        held = set(dice.sample(names, chosen.held_out))
        splits["dev"] = [row for row in splits["train"] if row[0] in held]
        splits["train"] = [row for row in splits["train"] if row[0] not in held]
    if chosen.disjoint:
        splits = divide(corpus, splits, dice)
    part = chosen.out.with_name(f"{chosen.out.name}.part")
    for split in ("train", "dev", "test"):
        qrels = splits[split]
        kept = {passage for _, passage, _ in qrels}
        if split == "train":
            kept |= set(corpus)
        else:
            others = sorted(set(corpus) - kept)
            kept |= set(
                others
                if chosen.sample < 0
                else dice.sample(others, min(chosen.sample, len(others)))
            )
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

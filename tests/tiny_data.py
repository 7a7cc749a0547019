"""Write small data sets for tests."""

import gzip
import json
from pathlib import Path


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*records: object) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def write_gzip(path: Path, content: str) -> Path:
    return write(path, gzip.compress(content.encode()))


def beir(
    folder: Path,
    qrels: str | None = None,
    split: str = "train",
    passages: int = 6,
    queries: int = 3,
) -> Path:
    """Passages p0.., queries q0..; unless given, query n has the positive p<n> and the hard
    negative p<n + 1>."""
    corpus = ({"_id": f"p{n}", "title": f"title {n}", "text": f"text {n}"} for n in range(passages))
    write(folder / "corpus.jsonl", lines(*corpus))
    write(
        folder / "queries.jsonl",
        lines(*({"_id": f"q{n}", "text": f"query {n}"} for n in range(queries))),
    )
    if qrels is None:
        qrels = "".join(f"q{n}\tp{n}\t1\nq{n}\tp{n + 1}\t0\n" for n in range(queries))
    write(folder / "qrels" / f"{split}.tsv", "query-id\tcorpus-id\tscore\n" + qrels)
    return folder


def context(key: object, text: str = "", **more: object) -> dict:
    return {"title": f"title {key}", "text": text or f"text {key}", "passage_id": key, **more}


def dpr(
    question: str,
    positives: list,
    negatives: list = [],  # noqa: B006
    others: list = [],  # noqa: B006
    **more: object,
) -> dict:
    return {
        "question": question,
        "answers": ["a"],
        "positive_ctxs": positives,
        "negative_ctxs": others,
        "hard_negative_ctxs": negatives,
        **more,
    }

"""Validates a data set of any form by reading all of it, and says what is in it."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from contaccum.data.arrow import PASSAGE_COLUMNS, column_batches
from contaccum.data.corpus import load_questions, open_corpus, open_queries
from contaccum.data.examples import ExampleTable, load_examples
from contaccum.data.formats import kind_of_data
from contaccum.data.sources import resolve
from contaccum.data.tables import JudgedSplit, judged_split, keep_answerable, qrels_file, splits_of
from contaccum.errors import InputError

Stats = dict[str, Any]


def check(
    path: str | Path, split: str | None = None, strict: bool = False, repair: bool = False, max_bad_records: int = 0
) -> Stats:
    """Read all of a data set and return its statistics; ``split`` names one split of a BEIR folder, None means all.

    Whatever training, by a teacher's scores too, or evaluation would refuse raises the same InputError here, whatever they
    would warn of gives the same warning; ``strict``, ``repair`` and ``max_bad_records`` as in ``load_retrieval_set``. Lengths
    are in words (between white space).
    """
    source = path
    path, repair = resolve(path, split or "train", repair)
    kind = kind_of_data(path, max_bad_records)
    if kind == "beir":
        about = _beir(path, split, strict, repair, max_bad_records)
    elif kind == "corpus":
        corpus = open_corpus(path, repair, max_bad_records)
        about = _passages(corpus.table) | _left_out(corpus.left_out)
    elif kind == "queries":
        if path.name.removesuffix(".gz") != "queries.jsonl":
            warnings.warn(
                f"{path}: is taken for queries, for no record has a title; a search takes such a file for passages, and so does "
                "this check where it is called corpus.jsonl",
                stacklevel=2,
            )
        queries = open_queries(path, None, repair, max_bad_records)
        about = _queries(queries.texts.values()) | _left_out(queries.left_out)
    elif kind == "questions":
        about = _questions(path, max_bad_records)
    else:
        about = _examples(load_examples(path, strict, repair, max_bad_records, scores=True))
    return {"path": str(source), "kind": kind, **about}


def _left_out(records: int) -> Stats:
    return {"bad records left out": records} if records else {}


def _beir(path: Path, split: str | None, strict: bool, repair: bool, max_bad_records: int) -> Stats:
    splits = [split] if split else splits_of(path)
    if not splits:
        raise InputError(f"{path}: holds no qrels/<split>.tsv, expected at least one split")
    corpus = open_corpus(path, repair, max_bad_records)
    queries = open_queries(path, None, repair, max_bad_records)
    judged = {name: judged_split(path, name, repair, max_bad_records) for name in splits}
    named = Counter(query for each in judged.values() for query in each.qrels)
    return {
        **_passages(corpus.table),
        **_queries(queries.texts.values()),
        "queries without a judgement": len(queries.texts.keys() - named.keys()),
        "queries in several splits": sum(count > 1 for count in named.values()),
        **_left_out(corpus.left_out + queries.left_out),
        "splits": {name: _split(path, name, each, strict) for name, each in judged.items()},
    }


def _split(path: Path, name: str, judged: JudgedSplit, strict: bool) -> Stats:
    source, qrels = qrels_file(path, name), judged.qrels
    kept = keep_answerable(source, qrels, strict)
    counts = Counter(grade for grades in qrels.values() for grade in grades.values())
    return {
        "queries": len(qrels),
        "queries without a positive": len(qrels) - len(kept),
        "judgements": counts.total(),
        "repeated judgements": judged.judgements - counts.total(),
        "judgements by grade": {str(grade): counts[grade] for grade in sorted(counts)},
        "positives per query": _spread([sum(grade > 0 for grade in grades.values()) for grades in kept.values()]),
        **_left_out(judged.left_out.get(f"qrels/{source.name}", 0)),
    }


def _examples(examples: ExampleTable) -> Stats:
    lengths = examples.positives.lengths
    scored = 0
    if examples.teacher is not None:
        scored = int(
            np.count_nonzero(~np.isnan(examples.teacher.positives[examples.positives.offsets[:-1][lengths > 0]]))
        )
    return {
        "examples": len(lengths),
        "queries without a positive": int(np.count_nonzero(lengths == 0)),
        **({"examples with a teacher's scores": scored} if scored else {}),
        "words per query": _spread(_words(examples.queries["text"])),
        **_passages(examples.passages),
        "positives per query": _spread(lengths),
        "hard negatives per query": _spread(examples.negatives.lengths),
        "other negatives per query": _spread(examples.further.lengths),
        **_left_out(examples.left_out),
    }


def _passages(corpus: Dataset) -> Stats:
    words: list[int] = []
    untitled = 0
    contents: set[int] = set()
    for batch in column_batches(corpus, PASSAGE_COLUMNS):
        words += _words(batch["text"])
        untitled += batch["title"].count("")
        contents.update(map(hash, zip(batch["title"], batch["text"], strict=True)))
    return {
        "passages": len(corpus),
        "words per passage": _spread(words),
        "passages without a title": untitled,
        "passages that repeat another's text": len(corpus) - len(contents),
    }


def _queries(texts: Iterable[str]) -> Stats:
    words = _words(texts)
    return {"queries": len(words), "words per query": _spread(words)}


def _questions(path: Path, max_bad_records: int) -> Stats:
    questions, left_out = load_questions(path, max_bad_records)
    return {
        "questions": len(questions),
        "words per question": _spread(_words(question.text for question in questions)),
        "answers per question": _spread([len(question.answers) for question in questions]),
        **_left_out(left_out),
    }


def _words(texts: Iterable[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def _spread(values: Sequence[int] | np.ndarray) -> Stats:
    return {
        "min": int(np.min(values)),
        "median": float(np.median(values)),
        "mean": round(float(np.mean(values)), 2),
        "max": int(np.max(values)),
    }


def render(stats: Stats) -> str:
    """The statistics of ``check`` as lines for people."""
    return "\n".join([f"{stats['path']}: {stats['kind']}", *_lines(stats, "  ")])


def _lines(stats: Stats, indent: str) -> list[str]:
    lines = []
    for name, value in stats.items():
        if name in ("path", "kind"):
            continue
        if not isinstance(value, dict):
            lines.append(f"{indent}{name:<38}{value:>12,}")
        elif all(isinstance(part, dict) for part in value.values()):
            for key, part in value.items():
                lines += [f"{indent}split {key}", *_lines(part, indent + "  ")]
        else:
            parts = "   ".join(f"{key} {part:,g}" for key, part in value.items())
            lines.append(f"{indent}{name:<38}{parts}")
    return lines

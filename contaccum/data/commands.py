"""The commands ``data check`` and ``data convert``.

Conversion keeps the ids of queries and passages, but a conversion of a file to BEIR prepends
``query-`` to a query id that is also a passage id (see ``beir_query_ids``). If a format has no
field for an id, conversion writes an extra field (``query_id``, ``pos_id`` or ``neg_id``). This
package reads the extra fields; other tools ignore them. JSONL has no titles: the title and the text
of a passage become one string.

Only DPR files have ``negative_ctxs``. A conversion from DPR to DPR keeps them. A conversion to BEIR
writes them to the corpus, without a grade. JSONL and Tevatron have no field for them, so they are
dropped. Teacher scores are written only to JSONL and Tevatron: BEIR has no field for teacher
scores, and in DPR the field ``score`` is a search score.
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from datasets import Dataset

from contaccum.catalog import unread_splits
from contaccum.config.commands import DataPolicy, Form, TrainingKind
from contaccum.data.corpus import (
    beir_records,
    build_corpus,
    corpus_file,
    queries_file,
    read_query_texts,
)
from contaccum.data.dataset import DEFAULT_POLICY, RetrievalDataset, open_dataset
from contaccum.data.examples import ExampleTable, build_examples, with_name
from contaccum.data.identity import text_hash
from contaccum.data.retrieval_set import (
    JudgedSplit,
    Qrels,
    judged_split,
    keep_answerable,
    qrels_file,
    read_grades,
    splits_of,
    unknown_queries,
    warn_of_own_ids,
)
from contaccum.data.tables import PASSAGE_COLUMNS, column_batches
from contaccum.errors import InputError, joined_errors
from contaccum.formats.dpr import read_questions
from contaccum.formats.readers import has_answers
from contaccum.formats.records import (
    Example,
    Passage,
    whole_records,
    without_blanks,
    write_beir_folder,
)
from contaccum.formats.training import FORMATS, example_line, framed
from contaccum.runtime.files import sweep, whole_folder
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted

Stats = dict[str, Any]
IN_TRAIN = "queries answered by a passage that is also a positive in train"


def check(path: str | Path, split: str | None = None, policy: DataPolicy = DEFAULT_POLICY) -> Stats:
    """Read a whole data set and return its statistics.

    split: split of a BEIR folder; None: all splits.

    Invalid data causes the same errors and warnings as in training and evaluation, but the
    InputError lists the first MOST_ERRORS invalid records. Teacher scores are checked too. Text
    lengths are counted in words.
    """
    data = open_dataset(path, split or "train", policy)
    _warn_of_unread_splits(data)
    try:
        return {"path": str(data.name), "kind": data.kind, **_statistics(data, split)}
    except InputError as error:
        # the traceback would keep the line, which may have many megabytes
        first = error.with_traceback(None)
    errors = _all_errors(data, split)
    if len(errors) < 2:
        raise first
    # the name that the user gave, instead of the path in the cache
    name = str(data.name)
    named = [InputError(with_name(str(error), data.path, name)) for error in errors]
    raise joined_errors(named, name) from first


def _warn_of_unread_splits(data: RetrievalDataset) -> None:
    """Warn about splits of a table that are not read, if the split is the default."""
    if data.split == "train" and (unread := unread_splits(data.name, data.split)):
        warnings.warn(
            f"{data.name}: only the split {data.split} is read, not {', '.join(unread)}; to read "
            f"another, name it, as in hub:NAME::{unread[0]}",
            stacklevel=3,
        )


def _statistics(data: RetrievalDataset, split: str | None) -> Stats:
    if data.kind == "corpus":
        return _passages(data.corpus)
    if data.kind == "queries":
        return _texts("query", "queries", data.queries.values())
    if data.kind == "questions":
        counts = [len(question.answers) for question in data.questions]
        texts = [question.text for question in data.questions]
        return {**_texts("question", "questions", texts), "answers per question": _spread(counts)}
    if data.kind != "beir":
        examples = data.examples()
        return {
            "rows": len(examples.queries) + examples.merged,
            **_texts("query", "different queries", examples.queries["text"][:]),
            **_passages(examples.passages, merged=True),
            **_examples(examples),
        }
    splits = [split] if split else splits_of(data.path)
    if not splits:
        raise InputError(
            f"{data.path}: qrels/<split>.tsv not found; a data set needs at least one split"
        )
    judged = {name: judged_split(data.path, name, data.policy) for name in splits}
    judged_ids = set().union(*(judgements.qrels for judgements in judged.values()))
    in_splits = Counter(
        text
        for judgements in judged.values()
        for text in {text_hash(judgements.queries[query]) for query in judgements.qrels}
    )
    stats = {name: _split(judgements, data.policy.strict) for name, judgements in judged.items()}
    if train := judged.get("train"):
        trained = set().union(*_positive_texts(train).values())
        for name, judgements in judged.items():
            if name != "train":
                stats[name][IN_TRAIN] = sum(
                    not trained.isdisjoint(texts) for texts in _positive_texts(judgements).values()
                )
    of_all = {
        "queries without a judgement": len(data.queries.keys() - judged_ids),
        "queries in several splits": sum(count > 1 for count in in_splits.values()),
    }
    return {
        **_passages(data.corpus),
        **_texts("query", "queries", data.queries.values()),
        **({} if split else of_all),
        "splits": stats,
    }


def _split(judged: JudgedSplit, strict: bool) -> Stats:
    warn_of_own_ids(judged.source, keep_answerable(judged.source, judged.qrels, strict))
    grades = Counter(grade for grades in judged.qrels.values() for grade in grades.values())
    return {
        "queries": len(judged.qrels),
        "judgements by grade": {str(grade): grades[grade] for grade in sorted(grades)},
        **_examples(judged.examples(repair=True)),
    }


def _positive_texts(judged: JudgedSplit) -> dict[str, set[int]]:
    """Return the hashes of the texts of each query's positives."""
    return {
        query: {
            int(judged.passage_hashes[judged.rows[passage]])
            for passage, grade in grades.items()
            if grade > 0 and passage in judged.rows
        }
        for query, grades in judged.qrels.items()
    }


def _examples(examples: ExampleTable) -> Stats:
    positives = examples.positives.lengths
    first = examples.positives.offsets[:-1][positives > 0]
    counts = {
        "queries without a positive": int(np.count_nonzero(positives == 0)),
        "negatives with the text of a positive": examples.copies,
        "examples with a teacher's scores": int(
            np.count_nonzero(~np.isnan(examples.positives.scores[first]))
        ),
        "examples with scores of only some passages": examples.half_scored,
    }
    return {
        **{name: count for name, count in counts.items() if count},
        "positives per query": _spread(positives),
        "hard negatives per query": _spread(examples.negatives.lengths),
        "other negatives per query": _spread(examples.others.lengths),
    }


def _passages(corpus: Dataset, merged: bool = False) -> Stats:
    """Return statistics of passages. merged: whether equal ones were stored as one."""
    words: list[int] = []
    untitled = 0
    contents: set[int] = set()
    for batch in column_batches(corpus, PASSAGE_COLUMNS):
        words += [len(text.split()) for text in batch["text"]]
        untitled += batch["title"].count("")
        contents.update(text_hash(passage.content) for passage in Passage.of_columns(batch))
    return {
        "different passages" if merged else "passages": len(corpus),
        "words per passage": _spread(words),
        "passages without a title": untitled,
        **({} if merged else {"passages that repeat another's text": len(corpus) - len(contents)}),
    }


def _texts(what: str, plural: str, texts: Iterable[str]) -> Stats:
    words = [len(text.split()) for text in texts]
    return {plural: len(words), f"words per {what}": _spread(words)}


def _spread(values: Sequence[int] | np.ndarray) -> Stats:
    return {
        "min": int(np.min(values)),
        "median": float(np.median(values)),
        "mean": round(float(np.mean(values)), 2),
        "max": int(np.max(values)),
    }


def _all_errors(data: RetrievalDataset, split: str | None) -> list[InputError]:
    """Read the files of an invalid data set again, and return the errors of all records."""
    errors: list[InputError] = []
    repair = data.policy.repair

    def collect(read: Callable, *arguments: object) -> None:
        """Read one file. An error that ends the reading is added to those of the records."""
        try:
            read(*arguments, errors.append)
        except InputError as error:
            errors.append(error)

    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were given before
        if data.kind in ("beir", "corpus"):
            collect(build_corpus, corpus_file(data.path), repair, Path(folder))
        if data.kind in ("beir", "queries"):
            collect(read_query_texts, queries_file(data.path), repair, None)
        if data.kind == "questions":
            collect(lambda on_error: list(read_questions(data.path, on_error)))
        if data.kind in FORMATS:
            collect(build_examples, data.path, Path(folder))
        if data.kind == "beir":
            splits = [split] if split else splits_of(data.path)
            files = [qrels_file(data.path, split) for split in splits]
            for file in files:
                collect(read_grades, file)
            if not errors:  # else a record with the id may be among the invalid ones
                for file in files:
                    queries = queries_file(data.path)
                    errors += unknown_queries(file, read_grades(file), data.queries, queries)
    return errors


def render(stats: Stats) -> str:
    """Return the statistics as text for the console."""
    text: str = yaml.safe_dump(stats, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return text.rstrip()


def convert(
    source: str | Path,
    target: str | Path,
    to: Form,
    split: str = "train",
    splits: str | None = None,
    seed: int = 0,
    policy: DataPolicy = DEFAULT_POLICY,
) -> str:
    """Convert ``source`` to the format ``to``, and return a text with what was written.

    ``source`` is a BEIR folder or a file of training examples.

    split: split to read from a BEIR folder, and name of the split in a new BEIR folder. A
    conversion from BEIR to BEIR writes the whole corpus, all queries and also the other splits;
    every other conversion writes only the queries and passages of the examples. From BEIR, passages
    with a grade above 0 become positives, and other judged passages become negatives. To BEIR,
    positives get grade 1 and negatives get grade 0, but from BEIR to BEIR the grades are copied.
    Teacher scores are checked and written, or dropped with a warning if ``to`` has no field for
    teacher scores. splits: shares of the splits train, dev and test of a new BEIR folder, such as
    0.8,0.1,0.1; None: all queries go to ``split``. seed: see ``splits_of_queries``.

    Raises InputError if ``target`` exists; for ``beir``, it may be an empty folder. Also raises
    InputError for wrong ``splits``, such as one that ``source`` has already, and if an id that is
    written to BEIR has a tab, a line break or NUL.
    """
    shares = _shares(splits, to, seed)
    target = Path(target)
    with suppress(OSError):  # a leftover of a killed process may belong to another user
        sweep(target.parent, target.name, shared=True)
    if target.exists() and not (to == "beir" and target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target}: already exists; choose a new path")
    data = open_dataset(source, split, policy)
    _warn_of_unread_splits(data)
    others = []  # splits to copy
    if to == "beir" and data.kind == "beir":
        others = [name for name in splits_of(data.path) if name != split]
    if shares and (existing := [name for name in others if name in shares]):
        raise InputError(
            f"--splits {splits} makes a split {existing[0]}, but {source} has one; use a share of "
            f"0 for {existing[0]}, which keeps its split"
        )
    # the ids of queries with the same text are kept
    found = data.examples(merge=False)
    if to == "beir":
        found = found.with_beir_ids()
    if found.positives.scored and to in ("beir", "dpr"):
        warnings.warn(
            f"{source}: teacher scores are dropped, because {to} has no field for them",
            stacklevel=2,
        )
        found.positives.scores.fill(np.nan)
    elif half := found.half_scored:
        warnings.warn(
            f"{source}: teacher scores of {counted(half, 'query')} are dropped, because some of "
            "the passages have none",
            stacklevel=2,
        )
    if data.kind == to == "dpr" and has_answers(data.path):
        warnings.warn(f"{source}: answers of questions are dropped", stacklevel=2)
    examples = progress_bar(len(found), "converting", "examples", found)
    if to != "beir":
        return _write_examples(target, examples, to)
    answerable = np.flatnonzero(found.positives.lengths)
    if shares is None:
        split_of = [split] * len(answerable)
    else:
        split_of = splits_of_queries(found.query_hashes[answerable], shares, seed, str(source))
    grades: dict[str, list[tuple[str, str, int]]] = {name: [] for name in shares or [split]}
    for name, example in zip(split_of, examples, strict=True):
        grades[name] += grades_of([example], found.qrels)
    queries = {record["_id"]: record for record in beir_records(found.queries.select(answerable))}
    if data.kind == "beir":
        for key, text in data.queries.items():
            queries.setdefault(key, {"_id": key, "text": text})
    for name in others:
        qrels = read_grades(qrels_file(data.path, name))
        grades[name] = [(key, *graded) for key in qrels for graded in qrels[key].items()]
    with whole_folder(target) as folder:
        write_beir_folder(folder, beir_records(found.passages), queries.values(), grades)
    lines = [f"{target}: {counted(len(found.passages), 'passage')}"]
    for name, rows in grades.items():
        count = len({query for query, *_ in rows})
        lines.append(f"{name}: {counted(count, 'query')}, {counted(len(rows), 'judgement')}")
    return "\n".join(lines)


def _write_examples(target: Path, examples: Iterable[Example], to: TrainingKind) -> str:
    """Write examples to a file. Return a line with their number.

    Passages with an empty text are left out, and so are queries without another positive, because
    training refuses them.
    """
    written: Counter[str] = Counter()
    empty: Counter[str] = Counter()

    def lines() -> Iterator[bytes]:
        for example in examples:
            kept = without_blanks(example)
            empty["passage"] += len(example.positives) - len(kept.positives)
            empty["passage"] += len(example.negatives) - len(kept.negatives)
            if not kept.positives:
                empty["query"] += 1
                continue
            written["query"] += 1
            written["positive"] += len(kept.positives)
            written["hard negative"] += len(kept.negatives)
            yield example_line(kept, to)

    with whole_records(target) as file:
        file.writelines(framed(lines(), to))
    if empty["passage"]:
        warnings.warn(
            f"{target}: left out {counted(empty['passage'], 'judgement')} of passages with an "
            f"empty text, and {counted(empty['query'], 'query')} without another positive",
            stacklevel=3,
        )
    queries, positives, negatives = (
        counted(written[name], name) for name in ("query", "positive", "hard negative")
    )
    return f"{target}: {queries} with {positives} and {negatives}"


def _shares(splits: str | None, to: Form, seed: int) -> dict[str, float] | None:
    """Read the shares of train, dev and test, such as 0.8,0.1,0.1. Splits of share 0 are left out.

    Raise InputError for other texts, and for a seed without ``splits``.
    """
    if splits is None:
        if seed:
            raise InputError(f"--seed {seed} has no effect without --splits; leave it out")
        return None
    if to != "beir":
        raise InputError(f"--splits {splits} was given with --to {to}; it needs --to beir")
    try:
        numbers = [float(number) for number in splits.split(",")]
    except ValueError:
        numbers = []
    valid = len(numbers) == 3 and min(numbers) >= 0 and abs(sum(numbers) - 1) < 1e-6
    if not valid:
        raise InputError(
            f"--splits {splits}: expected the shares of train, dev and test, three numbers that "
            "add up to 1, such as 0.8,0.1,0.1"
        )
    named = zip(("train", "dev", "test"), numbers, strict=True)
    return {name: share for name, share in named if share > 0}


def splits_of_queries(
    hashes: np.ndarray, shares: dict[str, float], seed: int, source: str
) -> list[str]:
    """Return the split of each query, at random but with the given shares of different texts.

    hashes: of the queries' texts, (n,) int64. Equal texts get the same split, and the order of the
    queries does not matter. shares: split -> share. source: name of the data for errors. Raises
    InputError if a split would have no query.
    """
    texts = sorted(set(hashes.tolist()))
    random.Random(seed).shuffle(texts)
    split_of: dict[int, str] = {}
    total = 0.0
    for split, share in shares.items():
        first = len(split_of)
        total += share
        part = texts[first : round(total * len(texts))]
        if not part:
            raise InputError(
                f"{source}: has {counted(len(texts), 'different query')}, too few for a split "
                f"{split} with a share of {share:g}; raise this share in --splits, or give "
                "more queries"
            )
        split_of.update(dict.fromkeys(part, split))
    return [split_of[text] for text in hashes.tolist()]


def grades_of(
    examples: Iterable[Example], qrels: Qrels | None = None
) -> Iterator[tuple[str, str, int]]:
    """Yield (query id, passage id, grade).

    Without ``qrels``, the grade is 1 for a positive and 0 for a hard negative.
    """
    for (key, _), positives, negatives, *_ in examples:
        if qrels is not None:
            yield from ((key, passage, grade) for passage, grade in qrels[key].items())
            continue
        for grade, passages in ((1, positives), (0, negatives)):
            yield from ((key, passage.id, grade) for passage in passages)

"""The commands ``data check`` and ``data convert``.

Conversion keeps the ids of queries and passages. If a format has no field for an id, conversion
writes an extra field (``query_id``, ``pos_id`` or ``neg_id``). This package reads the extra fields;
other tools ignore them. JSONL has no titles: the title and the text of a passage become one string.

Only DPR files have ``negative_ctxs``. A conversion from DPR to DPR keeps them. A conversion to BEIR
writes them to the corpus, without a grade. JSONL and Tevatron have no field for them, so they are
dropped. Teacher scores are written only to JSONL and Tevatron: BEIR has no field for teacher
scores, and in DPR the field ``score`` is a search score.
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
from datasets import Dataset
from tqdm import tqdm

from contaccum.config import DataPolicy
from contaccum.data.corpus import (
    beir_records,
    build_corpus,
    corpus_file,
    queries_file,
    read_query_texts,
)
from contaccum.data.dataset import DEFAULT_POLICY, RetrievalDataset, open_dataset
from contaccum.data.examples import ExampleTable, build_examples
from contaccum.data.identity import text_hash
from contaccum.data.retrieval_set import (
    JudgedSplit,
    judged_split,
    keep_answerable,
    qrels_file,
    read_grades,
    splits_of,
    unknown_query,
    warn_of_own_ids,
)
from contaccum.data.tables import PASSAGE_COLUMNS, column_batches
from contaccum.errors import InputError
from contaccum.formats.dpr import read_questions
from contaccum.formats.records import (
    Example,
    Passage,
    Question,
    plain_id,
    plain_split,
    record_line,
    whole_records,
    write_beir_folder,
)
from contaccum.formats.training import Form, example_record, framed
from contaccum.runtime.files import sweep, whole_folder

Stats = dict[str, Any]


def check(path: str | Path, split: str | None = None, policy: DataPolicy = DEFAULT_POLICY) -> Stats:
    """Read a whole data set and return its statistics.

    split: split of a BEIR folder; None: all splits.

    Invalid data causes the same errors and warnings as in training and evaluation, but the
    InputError lists all invalid records. Teacher scores are checked too. Text lengths are counted
    in words.
    """
    data = open_dataset(path, split or "train", policy)
    try:
        return _statistics(data, split)
    except InputError as error:
        # the traceback would keep the line, which may have many megabytes
        first = error.with_traceback(None)
    errors = _all_errors(data, split)
    if len(errors) < 2:
        raise first
    sentences = [str(error).replace(f"{data.path}:", f"{data.name}:", 1) for error in errors]
    raise InputError("\n  ".join([f"{data.name}: {len(sentences)} errors", *sentences])) from first


def _statistics(data: RetrievalDataset, split: str | None) -> Stats:
    about: Stats = {"path": str(data.name), "kind": data.kind}
    if data.kind == "beir":
        return about | _beir(data, split)
    if data.kind == "corpus":
        return about | _passages(data.corpus)
    if data.kind == "questions":
        return about | _questions(data.questions)
    if data.kind != "queries":
        return about | _examples(data.examples(scores=True))
    if data.path.name.removesuffix(".gz") not in ("queries.jsonl", "queries.tsv"):
        warnings.warn(
            f"{data.path}: this check read the file as queries, because its first records have no "
            "title. But a search would read it as passages. To check it as passages, rename it to "
            "corpus.jsonl (a TSV file: to collection.tsv).",
            stacklevel=3,
        )
    return about | _queries(data.queries)


def _all_errors(data: RetrievalDataset, split: str | None) -> list[InputError]:
    """Read the files of an invalid data set again, and return the errors of all records."""
    errors: list[InputError] = []
    repair = data.policy.repair
    with TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were given before
        folder = Path(temporary)

        def collect(read: Callable, *arguments: object) -> None:
            """Read one file.

            Invalid records go to ``errors``; an error that ends the reading is added to them.
            """
            try:
                read(*arguments)
            except InputError as error:
                errors.append(error)

        if data.kind in ("beir", "corpus"):
            collect(build_corpus, corpus_file(data.path), repair, folder, errors.append)
        if data.kind in ("beir", "queries"):
            collect(read_query_texts, queries_file(data.path), repair, None, errors.append)
        if data.kind == "questions":
            collect(lambda: list(read_questions(data.path, errors.append)))
        if data.kind in ("dpr", "jsonl", "tevatron"):
            collect(build_examples, data.path, True, folder, errors.append)
        if data.kind == "beir":
            splits = [split] if split else splits_of(data.path)
            qrels = [qrels_file(data.path, split) for split in splits]
            for file in qrels:
                collect(read_grades, file, errors.append)
            if not errors:  # else a record with the id may be among the invalid ones
                for file in qrels:
                    errors += _unknown_queries(data, file)
    return errors


def _unknown_queries(data: RetrievalDataset, source: Path) -> Iterator[InputError]:
    """Yield an error for each query id of a qrels file that is not in the file of queries."""
    for query, line in read_grades(source).query_lines.items():
        if query not in data.queries:
            yield unknown_query(source, line, query, queries_file(data.path))


def _beir(data: RetrievalDataset, split: str | None) -> Stats:
    splits = [split] if split else splits_of(data.path)
    if not splits:
        raise InputError(
            f"{data.path}: qrels/<split>.tsv not found; a data set needs at least one split"
        )
    corpus = data.corpus
    queries = data.queries
    judged = {name: judged_split(data.path, name, data.policy) for name in splits}
    named = Counter(query for judgements in judged.values() for query in judgements.qrels)
    return {
        **_passages(corpus),
        **_queries(queries),
        "queries without a judgement": len(queries.keys() - named.keys()),
        "queries in several splits": sum(count > 1 for count in named.values()),
        "splits": {name: _split(data, name, judged[name]) for name in splits},
    }


def _split(data: RetrievalDataset, name: str, judged: JudgedSplit) -> Stats:
    source = qrels_file(data.path, name)
    qrels = judged.qrels
    kept = keep_answerable(source, qrels, data.policy.strict)
    warn_of_own_ids(source, kept)
    same_text = _negatives_with_positive_text(judged)
    counts = Counter(grade for grades in qrels.values() for grade in grades.values())
    if judged.unknown:
        warnings.warn(
            f"{judged.unknown_judgements()}. Evaluation counts these passages as not found; "
            "training refuses them without --repair.",
            stacklevel=4,
        )
    return {
        "queries": len(qrels),
        "queries without a positive": len(qrels) - len(kept),
        "judgements": counts.total(),
        "repeated judgements": judged.judgements - counts.total(),
        **({"negatives with the text of a positive": same_text} if same_text else {}),
        "judgements by grade": {str(grade): counts[grade] for grade in sorted(counts)},
        "positives per query": _spread(
            [sum(grade > 0 for grade in grades.values()) for grades in kept.values()]
        ),
    }


def _negatives_with_positive_text(judged: JudgedSplit) -> int:
    """Return the number of passages with a grade of 0 or less whose text is that of a positive."""
    count = 0
    for grades in judged.qrels.values():
        hashes = {
            key: judged.passage_hashes[judged.rows[key]] for key in grades if key in judged.rows
        }
        positives = {hashes[key] for key in hashes if grades[key] > 0}
        count += sum(grades[key] <= 0 and hashes[key] in positives for key in hashes)
    return count


def _examples(examples: ExampleTable) -> Stats:
    lengths = examples.positives.lengths
    first = examples.positives.offsets[:-1][lengths > 0]
    scored = int(np.count_nonzero(~np.isnan(examples.positives.scores_or_nan[first])))
    return {
        "examples": len(lengths),
        **({"records with the query of another": examples.merged} if examples.merged else {}),
        "queries without a positive": int(np.count_nonzero(lengths == 0)),
        **({"examples with a teacher's scores": scored} if scored else {}),
        "words per query": _spread(_words(examples.queries["text"][:])),
        **_passages(examples.passages),
        "positives per query": _spread(lengths),
        "hard negatives per query": _spread(examples.negatives.lengths),
        "other negatives per query": _spread(examples.others.lengths),
    }


def _passages(corpus: Dataset) -> Stats:
    words: list[int] = []
    untitled = 0
    contents: set[int] = set()
    for batch in column_batches(corpus, PASSAGE_COLUMNS):
        words += _words(batch["text"])
        untitled += batch["title"].count("")
        contents.update(text_hash(passage.content) for passage in Passage.of_columns(batch))
    return {
        "passages": len(corpus),
        "words per passage": _spread(words),
        "passages without a title": untitled,
        "passages that repeat another's text": len(corpus) - len(contents),
    }


def _queries(texts: dict[str, str]) -> Stats:
    return {"queries": len(texts), "words per query": _spread(_words(texts.values()))}


def _questions(questions: Sequence[Question]) -> Stats:
    return {
        "questions": len(questions),
        "words per question": _spread(_words(question.text for question in questions)),
        "answers per question": _spread([len(question.answers) for question in questions]),
    }


def _words(texts: Iterable[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def _spread(values: Sequence[int] | np.ndarray) -> Stats:
    least, most = int(np.min(values)), int(np.max(values))
    return {
        "min": least,
        "median": float(np.median(values)),
        "mean": round(float(np.mean(values)), 2),
        "max": most,
    }


def render(stats: Stats) -> str:
    """Return the statistics as text for the console."""
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


def convert(
    source: str | Path,
    target: str | Path,
    to: Form,
    split: str = "train",
    splits: str | None = None,
    seed: int = 0,
    policy: DataPolicy = DEFAULT_POLICY,
) -> None:
    """Convert ``source`` to the format ``to``.

    ``source`` is a BEIR folder or a file of training examples.

    split: split to read from a BEIR folder, and name of the split in a new BEIR folder. A
    conversion from BEIR to BEIR writes the whole corpus; every other conversion writes only the
    passages of the examples. From BEIR, passages with a grade above 0 become positives, and other
    judged passages become negatives. To BEIR, positives get grade 1 and negatives get grade 0.
    Teacher scores are checked and written, or dropped with a warning if ``to`` has no field for
    teacher scores. splits: shares of the splits train, dev and test of a new BEIR folder, such as
    0.8,0.1,0.1; None: all queries go to ``split``. seed: see ``divide``.

    Raises InputError if ``target`` exists; for ``beir``, it may be an empty folder. Also raises
    InputError for wrong ``splits``, and if an id that is written to BEIR has a tab, a line break or
    NUL.
    """
    if to not in get_args(Form):
        raise InputError(f"unknown format {to!r}; choose one of {', '.join(get_args(Form))}")
    if to == "beir":
        plain_split(split)
    shares = None if splits is None else _shares(splits, to)
    target = Path(target)
    _sweep(target)
    if target.exists() and not (to == "beir" and target.is_dir() and not any(target.iterdir())):
        raise InputError(f"{target}: already exists; choose a new path")
    found = open_dataset(source, split, policy).examples(scores=True)
    if found.positives.scores is not None and to in ("beir", "dpr"):
        warnings.warn(
            f"{source}: teacher scores are dropped, because {to} has no field for them",
            stacklevel=2,
        )
        found = replace(found, positives=replace(found.positives, scores=None))
    examples = tqdm(found, desc="converting", unit=" examples", disable=None)
    if to == "beir":
        answerable = np.flatnonzero(found.positives.lengths)
        kept = found.queries.select(answerable)
        grades: Mapping[str, Iterable[tuple[str, str, int]]]
        if shares is None:
            grades = {split: grades_of(examples)}
        else:
            split_of = divide(found.query_hashes[answerable], shares, seed, str(source))
            divided: dict[str, list[tuple[str, str, int]]] = {name: [] for name in shares}
            for name, example in zip(split_of, examples, strict=True):
                divided[name] += grades_of([example])
            grades = divided
        corpus, queries = map(_plain, beir_records(found.passages)), map(_plain, beir_records(kept))
        with whole_folder(target) as folder:
            write_beir_folder(folder, corpus, queries, grades)
    else:
        with whole_records(target) as file:
            file.writelines(
                framed((record_line(example_record(example, to)) for example in examples), to)
            )


def _shares(splits: str, to: Form) -> dict[str, float]:
    """Read the shares of train, dev and test, such as 0.8,0.1,0.1. Splits of share 0 are left out.

    Raise InputError for other texts.
    """
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


def divide(hashes: np.ndarray, shares: dict[str, float], seed: int, source: str) -> list[str]:
    """Return the split of each query, at random but with the given shares of the different texts.

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
                f"{source}: has {len(texts)} different queries, too few for a split {split} with "
                f"a share of {share:g}; raise this share in --splits, or give more queries"
            )
        split_of.update(dict.fromkeys(part, split))
    return [split_of[text] for text in hashes.tolist()]


def _sweep(target: Path) -> None:
    """Remove unfinished files and folders next to ``target``.

    They are from processes that were killed.
    """
    with suppress(OSError):  # a file may belong to another user
        sweep(target.parent, target.name, shared=True)


def _plain(record: dict[str, str]) -> dict[str, str]:
    plain_id(record["_id"])
    return record


def grades_of(examples: Iterable[Example]) -> Iterator[tuple[str, str, int]]:
    """Yield (query id, passage id, grade): 1 for a positive, 0 for a hard negative."""
    for (key, _), positives, negatives, *_ in examples:
        for grade, passages in ((1, positives), (0, negatives)):
            yield from ((key, passage.id, grade) for passage in passages)

"""Compute the answer accuracy of DPR: the share of questions whose answer occurs in one of the first k passages.

A passage contains an answer if its text (not its title) contains the tokens of the answer, one directly after the other. For this
test, the text and the answer are normalized (Unicode NFD), split into words and single symbols, and lower-cased. In some data
sets, such as CuratedTREC, an answer is a regular expression. A passage contains such an answer if the expression matches the
text of the passage. Source: Karpukhin et al. 2020, "Dense Passage Retrieval", section 5, and the code of that paper.
"""

import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import regex
from datasets import Dataset
from tqdm.auto import tqdm

from contaccum.config.commands import DataPolicy, EncoderConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
from contaccum.evaluation.metrics import Metrics, cutoffs_within, metrics_of, save_metrics
from contaccum.formats.records import Question
from contaccum.retrieval.retriever import DEFAULTS, Retriever
from contaccum.retrieval.runs import Run, rows_of
from contaccum.runtime.checks import refuse_input_as_output
from contaccum.runtime.processes import ALONE, Processes

CUTOFFS = (1, 5, 20, 100)
MATCHES = ("string", "regex")
SECONDS_PER_MATCH = 1.0  # maximum time of a pattern on one passage; some patterns would never end
SECONDS_PER_PATTERN = 10.0  # maximum time of a pattern on all passages of its question
LONGEST_PATTERN = 2000  # maximum number of characters of a pattern
LARGEST_PATTERN = 100_000  # maximum number of characters after repetitions are expanded (a{3} to aaa)

_BATCH = 64  # number of questions that a process gets at a time
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_SYNTAX = regex.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}|.", regex.DOTALL)
_RECURSION = regex.compile(r"\(\?(?:R|[+-]?\d+|&|P>)")  # a recursive pattern can take gigabytes of memory
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


class Batch(NamedTuple):
    """Some questions, and the passages that the run has for these questions."""

    questions: list[tuple[str, Question]]  # query id and question
    hits: list[list[int]]  # for each question, the indices of its passages in ``texts``, best passage first
    texts: list[str]  # texts of the passages, each passage once
    match: str  # string or regex


def token_string(text: str) -> str:
    """Return the lower-cased tokens of a text, with a space before, between and after them. Return "" if there are none.

    A substring search for an answer then matches whole tokens only.
    """
    tokens = [token.lower() for token in _TOKEN.findall(normalize("NFD", text))]
    return f" {' '.join(tokens)} " if tokens else ""


def first_hits(batch: Batch) -> tuple[list[int | None], int]:
    """Find the first passage that contains an answer, for each question of a batch.

    Return two values: the rank of this passage for each question (from 1; None if no passage contains an answer), and the number
    of answers that are empty or not a valid regular expression. If ``batch.match`` is not ``regex``, they are not counted: the
    number is 0.
    """
    texts = [token_string(text) if batch.match == "string" else normalize("NFD", text) for text in batch.texts]
    ranks: list[int | None] = []
    unusable = 0
    for (question_id, question), hits in zip(batch.questions, batch.hits, strict=True):
        if batch.match == "string":
            needles = [needle for answer in question.answers if (needle := token_string(answer))]
            found = (rank for rank, hit in enumerate(hits, 1) if any(needle in texts[hit] for needle in needles))
        else:
            patterns = [
                pattern for answer in question.answers if (pattern := _pattern(answer, question_id)) is not None
            ]
            unusable += len(question.answers) - len(patterns)
            spent = dict.fromkeys(patterns, 0.0)
            found = (rank for rank, hit in enumerate(hits, 1) if _matches(patterns, texts[hit], question_id, spent))
        ranks.append(next(found, None))
    return ranks, unusable


def _pattern(answer: str, question_id: str) -> "regex.Pattern[str] | None":
    """Compile an answer to a regular expression. Return None if the answer is empty or not a valid pattern.

    Raises InputError if the pattern is too long, repeats too much or is recursive, because it could need too much time or memory.
    """
    fault = None
    if len(answer) > LONGEST_PATTERN:
        fault = f"has {len(answer):,} characters; at most {LONGEST_PATTERN:,} are allowed"
    elif (size := _expanded_size(answer)) > LARGEST_PATTERN:
        fault = f"has {size:,} characters after repetitions are expanded (a{{3}} to aaa); at most {LARGEST_PATTERN:,} are allowed"
    elif _RECURSION.search(answer):
        fault = "refers to itself; recursion is not allowed"
    if fault:
        raise InputError(f"question {question_id}: its answer pattern {answer[:60]!r} {fault}")
    try:
        return regex.compile(normalize("NFD", answer), _FLAGS) if answer else None
    except (regex.error, RecursionError, ValueError):  # ValueError: a flag that contradicts _FLAGS, such as (?a)
        return None


def _expanded_size(pattern: str) -> int:
    """Return the number of characters of a pattern after every repetition is expanded: a{2,3} counts as aaa."""
    sizes, last = [0], 0
    for token in _SYNTAX.findall(pattern):
        if token == "(":
            sizes.append(0)
        elif token == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif token[0] == "{" and len(token) > 1:
            count = max((int(number) for number in regex.findall(r"\d+", token)), default=1)
            sizes[-1] += last * max(0, count - 1)
            last *= count
        else:
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _matches(
    patterns: list["regex.Pattern[str]"], text: str, question_id: str, spent: dict["regex.Pattern[str]", float]
) -> bool:
    """Return whether any pattern matches the text. Add the time of each search without a match to ``spent`` (pattern -> seconds).

    Raises InputError if a search needs too much time.
    """
    for pattern in patterns:
        start = time.monotonic()
        try:
            if pattern.search(text, timeout=min(SECONDS_PER_MATCH, SECONDS_PER_PATTERN - spent[pattern])):
                return True
        except TimeoutError as error:
            raise InputError(
                f"question {question_id}: its answer pattern {pattern.pattern!r} took more than {SECONDS_PER_MATCH:g} s on one "
                f"passage, or {SECONDS_PER_PATTERN:g} s on all passages of the question. Simplify nested repetitions such as "
                "(a+)+."
            ) from error
        spent[pattern] = min(spent[pattern] + time.monotonic() - start, SECONDS_PER_PATTERN - 0.001)
    return False


def answer_accuracy(
    questions: Sequence[Question],
    run: Run,
    corpus: Dataset,
    *,
    match: str = "string",
    cutoffs: Sequence[int] = CUTOFFS,
    processes: int = 1,
) -> Metrics:
    """Compute the answer accuracy of a run: ``top5`` is the share of questions whose answer occurs in the first 5 passages.

    run: its query ids are the positions of the questions in ``questions``, from 0. A question without passages counts as wrong.
    match: ``string``, or ``regex`` if the answers are regular expressions. cutoffs: numbers of passages; 5 gives ``top5``.
    processes: number of processes that test passages in parallel. Raises InputError if the corpus lacks a passage of the run, if
    no query id of the run is the position of a question, or if a pattern needs too much time or memory.
    """
    if match not in MATCHES:
        raise InputError(f"match is {match!r}; expected one of {', '.join(MATCHES)}")
    ids = [str(number) for number in range(len(questions))]
    if not questions or not set(run) & set(ids):
        raise InputError(
            f"the run has none of the {len(questions)} questions; its query ids must be numbers from 0 to {len(ids) - 1}"
        )
    batches = _batches(list(zip(ids, questions, strict=True)), run, corpus, match, max(cutoffs))
    ranks: list[int | None] = []
    unusable = 0
    with tqdm(total=len(questions), desc="answers", unit="question", disable=None, leave=False) as bar:
        for more, bad in _each(batches, processes):
            ranks += more
            unusable += bad
            bar.update(len(more))
    if unusable:
        warnings.warn(f"{unusable} answers are empty or not a regular expression; they match no passage", stacklevel=2)
    found = [{f"top{cutoff}": float(rank is not None and rank <= cutoff) for cutoff in cutoffs} for rank in ranks]
    return metrics_of(dict(zip(ids, found, strict=True)))


def _batches(
    questions: list[tuple[str, Question]], run: Run, corpus: Dataset, match: str, depth: int
) -> Iterator[Batch]:
    found = {key: [passage_id for passage_id, _ in run.get(key, [])[:depth]] for key, _ in questions}
    rows = rows_of(corpus, {passage_id for hits in found.values() for passage_id in hits})
    for start in range(0, len(questions), _BATCH):
        group = questions[start : start + _BATCH]
        needed = sorted({rows[passage_id] for question_id, _ in group for passage_id in found[question_id]})
        number = {row: index for index, row in enumerate(needed)}
        hits = [[number[rows[passage_id]] for passage_id in found[question_id]] for question_id, _ in group]
        yield Batch(group, hits, list(corpus[needed]["text"]) if needed else [], match)


def _each(batches: Iterator[Batch], processes: int) -> Iterator[tuple[list[int | None], int]]:
    """Yield the result of ``first_hits`` for each batch, in the given order. At most two batches per process are in memory."""
    if processes == 1:
        yield from map(first_hits, batches)
        return
    # spawn, not fork: a forked process may hang if torch or faiss has started threads
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting: deque[Future[tuple[list[int | None], int]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(first_hits, batch))
            if len(waiting) >= 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def evaluate_questions(
    choice: EncoderConfig | str | Path,
    questions: str | Path,
    passages: str | Path,
    *,
    k: int = 100,
    settings: SearchConfig = DEFAULTS,
    match: str = "string",
    processes: int = 1,
    policy: DataPolicy = DEFAULT_POLICY,
    output: str | Path | None = None,
    group: Processes = ALONE,
) -> Metrics:
    """Search the passages for each question of a DPR file, and compute the answer accuracy.

    questions, passages: names or paths of the two files. k: number of passages per question. Of the cutoffs 1, 5, 20 and
    100, those above k are skipped. match, processes: see ``answer_accuracy``. output: file to write the metrics to. choice,
    group, policy: see ``contaccum.search``.
    """
    cutoffs = cutoffs_within(CUTOFFS, k)
    choice = EncoderConfig.of(choice)
    refuse_input_as_output(output, questions, passages, choice.model, settings.embeddings, settings.index_dir)
    with group.main_first():
        sources = {questions: open_dataset(questions, policy=policy), passages: open_dataset(passages, policy=policy)}
        read, corpus = sources[questions].questions, sources[passages].corpus
    queries = {str(number): question.text for number, question in enumerate(read)}
    run = Retriever.open(choice, corpus, settings, group).search(queries, k)
    metrics = answer_accuracy(read, run, corpus, match=match, cutoffs=cutoffs, processes=processes)
    left_out = {str(name): sum(source.left_out.values()) for name, source in sources.items() if source.left_out}
    return save_metrics(metrics, output, {"model": choice.model, "data": questions, "passages": passages}, left_out)

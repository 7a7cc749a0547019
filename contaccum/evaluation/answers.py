"""Answer accuracy as DPR counts it: the share of questions with an answer among the first k passages.

An answer is found when its words stand in the passage's text one after the other (the title does not count), both
sides brought to Unicode NFD, cut into words and single signs, and lower-cased; or, for answers that are patterns
(CuratedTREC), when the regular expression matches. Source: Karpukhin et al. 2020, "Dense Passage Retrieval", section
5, and their code.
"""

import unicodedata
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, NamedTuple

import regex
from tqdm.auto import tqdm

from contaccum.data.records import Question
from contaccum.errors import InputError
from contaccum.evaluation.beir import Metrics, cuts_within, metrics_of
from contaccum.options import SearchSettings
from contaccum.processes import ALONE, Processes
from contaccum.retrieval.encode import Encoder
from contaccum.retrieval.runs import Run
from contaccum.retrieval.search import DEFAULTS, retrieve, rows_of

if TYPE_CHECKING:
    from datasets import Dataset

CUTS = (1, 5, 20, 100)
MATCHES = ("string", "regex")
SECONDS_PER_MATCH = 1.0  # a pattern that takes longer on one passage backtracks without end

_BATCH = 64  # questions handed to a process at a time
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


class Batch(NamedTuple):
    """Questions with the passages found for them, each text once."""

    questions: list[tuple[str, Question]]  # with their ids
    hits: list[list[int]]  # for each question, numbers in texts, best first
    texts: list[str]
    match: str


def token_string(text: str) -> str:
    """A text's lower-cased tokens with a space around each, so that a sequence of tokens is found as a substring."""
    tokens = [token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text))]
    return f" {' '.join(tokens)} " if tokens else ""


def first_hits(batch: Batch) -> tuple[list[int | None], int]:
    """For each question the rank, from 1, of the first passage with an answer; and how many patterns are unusable.

    A function of the module, so that a process started afresh can be handed it.
    """
    prepare = token_string if batch.match == "string" else _normalise
    texts = [prepare(text) for text in batch.texts]
    ranks: list[int | None] = []
    unusable = 0
    for (question_id, question), hits in zip(batch.questions, batch.hits, strict=True):
        if batch.match == "string":
            needles = [needle for answer in question.answers if (needle := token_string(answer))]
            found = (rank for rank, hit in enumerate(hits, 1) if any(needle in texts[hit] for needle in needles))
        else:
            patterns = [pattern for answer in question.answers if (pattern := _pattern(answer)) is not None]
            unusable += len(question.answers) - len(patterns)
            found = (rank for rank, hit in enumerate(hits, 1) if _matches(patterns, texts[hit], question_id))
        ranks.append(next(found, None))
    return ranks, unusable


def _normalise(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _pattern(answer: str) -> "regex.Pattern[str] | None":
    """The compiled answer, or None for one that is empty or no regular expression (as in DPR, it matches nothing)."""
    try:
        return regex.compile(_normalise(answer), _FLAGS) if answer else None
    except regex.error:
        return None


def _matches(patterns: list["regex.Pattern[str]"], text: str, question_id: str) -> bool:
    for pattern in patterns:
        try:
            if pattern.search(text, timeout=SECONDS_PER_MATCH):
                return True
        except TimeoutError as error:
            raise InputError(
                f"question {question_id}: its answer pattern {pattern.pattern!r} took more than "
                f"{SECONDS_PER_MATCH:g} s on one passage, expected a pattern that does not backtrack without end"
            ) from error
    return False


def question_ids(questions: Sequence[Question]) -> list[str]:
    """Questions carry no id: the place in the file, counted from 0, stands for it in runs and metrics."""
    return [str(number) for number in range(len(questions))]


def answer_accuracy(
    questions: Sequence[Question],
    run: Run,
    corpus: "Dataset",
    *,
    match: str = "string",
    cuts: Sequence[int] = CUTS,
    processes: int = 1,
) -> Metrics:
    """``top1``, ``top5``, … : share of questions with an answer in the text of one of the first k passages of the run.

    The run's query ids are those of ``question_ids``; a question without results counts 0. The figures do not depend
    on ``processes``. Raises InputError for a passage that the corpus lacks, a run of other questions, and a pattern
    that takes too long; warns, with a count, of answers that are no regular expression.
    """
    if match not in MATCHES:
        raise InputError(f"match is {match!r}, expected one of {', '.join(MATCHES)}")
    ids = question_ids(questions)
    if not questions or not set(run) & set(ids):
        raise InputError(
            f"the run answers none of the {len(questions)} questions, expected query ids from 0 to {len(ids) - 1}"
        )
    batches = _batches(list(zip(ids, questions, strict=True)), run, corpus, match, max(cuts))
    ranks: list[int | None] = []
    unusable = 0
    with tqdm(total=len(questions), desc="answers", unit="question", disable=None, leave=False) as bar:
        for more, bad in _each(batches, processes):
            ranks += more
            unusable += bad
            bar.update(len(more))
    if unusable:
        warnings.warn(f"{unusable} answers are empty or no regular expression; they match nothing", stacklevel=2)
    return metrics_of(
        {
            question_id: {f"top{cut}": float(rank is not None and rank <= cut) for cut in cuts}
            for question_id, rank in zip(ids, ranks, strict=True)
        }
    )


def _batches(
    questions: list[tuple[str, Question]], run: Run, corpus: "Dataset", match: str, depth: int
) -> Iterator[Batch]:
    """Questions in groups, with the texts of the passages found for them, read from the corpus group by group."""
    found = {
        question_id: [passage_id for passage_id, _ in run.get(question_id, [])[:depth]] for question_id, _ in questions
    }
    rows = rows_of(corpus, {passage_id for hits in found.values() for passage_id in hits})
    for start in range(0, len(questions), _BATCH):
        group = questions[start : start + _BATCH]
        needed = sorted({rows[passage_id] for question_id, _ in group for passage_id in found[question_id]})
        number = {row: place for place, row in enumerate(needed)}
        hits = [[number[rows[passage_id]] for passage_id in found[question_id]] for question_id, _ in group]
        yield Batch(group, hits, list(corpus[needed]["text"]) if needed else [], match)


def _each(batches: Iterator[Batch], processes: int) -> Iterator[tuple[list[int | None], int]]:
    """Results in the batches' order; with several processes, at most two batches wait for each."""
    if processes == 1:
        yield from map(first_hits, batches)
        return
    # spawn: a fork of a process that runs torch's or faiss's threads may hang
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting: deque[Future[tuple[list[int | None], int]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(first_hits, batch))
            if len(waiting) >= 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def evaluate_answers(
    encoder: Encoder,
    questions: Sequence[Question],
    corpus: "Dataset",
    k: int = 100,
    settings: SearchSettings = DEFAULTS,
    *,
    match: str = "string",
    processes: int = 1,
    group: Processes = ALONE,
) -> Metrics:
    """Encode, search and count answers, at the cuts that k reaches; ``group`` as in ``retrieve``."""
    cuts = cuts_within(CUTS, k)
    queries = dict(zip(question_ids(questions), (question.text for question in questions), strict=True))
    run = retrieve(encoder, queries, corpus, k, settings, group)
    return answer_accuracy(questions, run, corpus, match=match, cuts=cuts, processes=processes)

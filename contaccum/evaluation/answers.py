"""Compute DPR's answer accuracy: the share of questions with an answer in the first k passages.

A passage contains an answer if its text (not its title) contains the tokens of the answer, one
directly after the other. For this test, the text and the answer are normalized (Unicode NFD), split
into words and single symbols, and lower-cased. In some data sets, such as CuratedTREC, an answer is
a regular expression. A passage contains such an answer if the expression matches the text of the
passage. Source: Karpukhin et al. 2020, "Dense Passage Retrieval", section 5, and the code of that
paper.
"""

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

import regex
from datasets import Dataset

from contaccum.config.commands import DataPolicy, EncoderConfig, Match, SearchConfig
from contaccum.config.declare import PositiveInt
from contaccum.config.load import converted
from contaccum.data.corpus import find_rows
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.errors import InputError
from contaccum.evaluation.metrics import Metrics, metrics_of, save_metrics
from contaccum.formats.records import Question
from contaccum.retrieval.encode import Texts
from contaccum.retrieval.retriever import DEFAULTS, Retriever
from contaccum.retrieval.runs import Run
from contaccum.runtime.checks import refuse_other_file
from contaccum.runtime.processes import ALONE, Processes
from contaccum.runtime.progress import progress_bar
from contaccum.runtime.units import counted

CUTOFFS = (1, 5, 20, 100)
SECONDS_PER_MATCH = 1.0  # maximum time of a pattern on one passage; some patterns would never end

_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE


def token_string(text: str) -> str:
    """Return the lower-cased tokens of a text, with a space before, between and after them.

    Return "" if there are none.

    A substring search for an answer then matches whole tokens only.
    """
    tokens = [token.lower() for token in _TOKEN.findall(normalize("NFD", text))]
    return f" {' '.join(tokens)} " if tokens else ""


def contains(text: str, pattern: str, question_id: str) -> bool:
    """Return whether an answer that is a regular expression matches a text.

    An invalid pattern matches nothing, as in DPR. Unlike in DPR, an empty one matches nothing
    either. Raises InputError if the search takes longer than ``SECONDS_PER_MATCH``.
    """
    try:
        expression = regex.compile(normalize("NFD", pattern), _FLAGS)
        return pattern != "" and bool(expression.search(text, timeout=SECONDS_PER_MATCH))
    except TimeoutError as error:
        raise InputError(
            f"question {question_id}: its answer pattern {pattern!r} took more than "
            f"{SECONDS_PER_MATCH:g} s on one passage. Simplify nested repetitions such as (a+)+."
        ) from error
    except (regex.error, ValueError):  # ValueError: a flag that contradicts _FLAGS, such as (?a)
        return False


def answer_accuracy(
    questions: Sequence[Question],
    run: Run,
    corpus: Dataset,
    *,
    match: Match = "string",
    cutoffs: Sequence[int] = CUTOFFS,
) -> Metrics:
    """Compute DPR's answer accuracy of a run.

    ``top5`` is the share of questions whose answer occurs in the first 5 passages.

    run: its query ids are the positions of the questions in ``questions``, from 0. A question
    without passages counts as wrong. match: ``string``, or ``regex`` if the answers are regular
    expressions. cutoffs: numbers of passages; 5 gives ``top5``. Raises InputError if a pattern
    takes more than a second on one passage.
    """
    found = {passage_id for hits in run.values() for passage_id, _ in hits}
    row_of = find_rows(corpus, found)
    per_query: dict[str, dict[str, float]] = {}
    no_tokens = []  # questions whose answers are found in no passage; in DPR, in every one
    bar = progress_bar(len(questions), "matching answers", "questions", questions)
    for number, question in enumerate(bar):
        key = str(number)
        rows = [row_of[passage_id] for passage_id, _ in run.get(key, [])[: max(cutoffs)]]
        needles = [tokens for answer in question.answers if (tokens := token_string(answer))]
        if match == "string" and not needles:
            no_tokens.append(key)
        first_rank = float("inf")
        for rank, text in enumerate(corpus[rows]["text"] if rows else [], start=1):
            if match == "string":
                searched = token_string(text)
                answered = any(needle in searched for needle in needles)
            else:
                searched = normalize("NFD", text)
                answered = any(contains(searched, answer, key) for answer in question.answers)
            if answered:
                first_rank = rank
                break
        per_query[key] = {f"top{cutoff}": float(first_rank <= cutoff) for cutoff in cutoffs}
    if no_tokens:
        warnings.warn(
            f"{counted(len(no_tokens), 'question')} without a letter, digit or symbol in an answer "
            f"count as wrong (first: question {no_tokens[0]})",
            stacklevel=2,
        )
    return metrics_of(per_query)


def _fingerprint(questions: Sequence[Question], corpus: Dataset, match: Match) -> str:
    """Return a hash of the questions, the answers, the passages and the kind of ``match``."""
    asked = [[question.text, question.answers] for question in questions]
    content = json.dumps([asked, Texts("passage", corpus).fingerprint, match])
    return hashlib.sha256(content.encode()).hexdigest()


def evaluate_questions(
    model: EncoderConfig | str | Path,
    questions: str | Path,
    passages: str | Path,
    *,
    k: int = 100,
    match: Match = "string",
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
    output: str | Path | None = None,
    group: Processes = ALONE,
) -> Metrics:
    """Search the passages for each question of a DPR file, and compute the answer accuracy.

    questions, passages: names or paths of the two files. k: number of passages per question. Of the
    cutoffs 1, 5, 20 and 100, those above k are skipped. match: see ``answer_accuracy``. output:
    file to write the metrics to. model, group, policy: see ``contaccum.search``.
    """
    converted(Match, match, "match")
    k = converted(PositiveInt, k, "k")
    cutoffs = [cutoff for cutoff in CUTOFFS if cutoff <= k]
    model = EncoderConfig.of(model)
    refuse_other_file(output, "metrics")
    with group.main_first():
        read = open_dataset(questions, policy=policy).questions
        corpus = open_dataset(passages, policy=policy).corpus
    queries = {str(number): question.text for number, question in enumerate(read)}
    retriever = Retriever.open(model, corpus, settings, group)
    run = retriever.search(queries, k)
    metrics = answer_accuracy(read, run, corpus, match=match, cutoffs=cutoffs)
    about = {
        "model": model.model,
        "data": questions,
        "passages": passages,
        "precision": retriever.precision,
        "test_content": _fingerprint(read, corpus, match),
    }
    return save_metrics(metrics, output if group.is_main else None, about)

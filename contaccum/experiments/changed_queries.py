"""Find the queries that differ most between two systems, with their best passages."""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from contaccum.config import DataPolicy
from contaccum.data.corpus import find_rows
from contaccum.data.dataset import open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.errors import InputError
from contaccum.evaluation.significance import ROUNDING, QueryScores, compared_runs
from contaccum.experiments.run_records import Difference, RunGroup, ordered_groups

SHOWN_QUERIES = 20  # number of queries that gained most, and of queries that lost most
SHOWN_CHARACTERS = 300  # longer texts are shortened


class ShownPassage(NamedTuple):
    """Passage in a ranking. Title and text are empty if the data set cannot be read."""

    id: str
    title: str
    text: str
    grade: int  # 0: not relevant, or not judged


class ShownRanking(NamedTuple):
    """First passages that a system found for a query."""

    system: str
    value: float  # metric of the query, mean over seeds
    passages: list[ShownPassage]


@dataclass
class ChangedQuery:
    """Query with different values of the metric."""

    id: str
    text: str  # empty if the data set cannot be read
    difference: float  # first system minus second system
    rankings: list[ShownRanking]  # of the two systems


class ChangedPair(NamedTuple):
    """Two compared systems, and the queries on which they differ most."""

    system: str
    reference: str
    gained: list[ChangedQuery]  # the system is better; largest gain first
    lost: list[ChangedQuery]  # the system is worse; largest loss first


class ChangedQueries(NamedTuple):
    """Content of the section "Queries that changed" of a report."""

    notes: list[str]
    pairs: list[ChangedPair]


def changed_queries(
    groups: Sequence[RunGroup], found: Sequence[Difference], metric: str
) -> ChangedQueries:
    """Return the queries that gained and lost most, for each pair of compared systems.

    The first passages come from the runs' files of metrics, their texts from the data sets that
    these files name. If a data set cannot be read, or was changed, only ids are shown, and a note
    says why.

    found: significance tests, whose pairs are used. Without tests, the best system is compared with
    each other one.
    """
    pairs = [(one.group, one.reference) for one in found]
    if not pairs:
        scored = [group for group in ordered_groups(groups, metric) if group.per_query()]
        pairs = [(scored[0], other) for other in scored[1:]]
    repair = any(run.config.get("data.repair") for group in groups for run in group.runs)

    @cache
    def open_data(name: str, split: str) -> RetrievalSet:
        with warnings.catch_warnings():
            # the evaluation has shown the warnings about this data set
            warnings.simplefilter("ignore")
            return open_dataset(name, split, DataPolicy(repair=repair)).retrieval_set

    notes = [
        f"The {SHOWN_QUERIES} queries that gained most in {metric}, and the {SHOWN_QUERIES} that "
        "lost most. A value is the mean over the compared seeds. The passages are those that the "
        "model of the first seed ranked first."
    ]
    changed = []
    for group, reference in pairs:
        runs, others = compared_runs(group.per_query(), reference.per_query())
        values, reference_values = query_values(runs, metric), query_values(others, metric)
        differences = {
            key: values[key] - reference_values[key] for key in values if key in reference_values
        }
        ordered = sorted(differences, key=lambda key: differences[key])
        lost = [key for key in ordered[:SHOWN_QUERIES] if differences[key] < -ROUNDING]
        gained = [key for key in ordered[::-1][:SHOWN_QUERIES] if differences[key] > ROUNDING]
        shown = {key: ChangedQuery(key, "", differences[key], []) for key in [*gained, *lost]}
        for system, system_values in ((group, values), (reference, reference_values)):
            metrics = next(run.metrics for run in system.runs if run.metrics and run.per_query)
            first_passages: dict[str, dict[str, int]] = metrics.get("first_passages", {})
            contents: dict[str, tuple[str, str]] = {}  # passage id -> title and text
            try:
                data = open_data(metrics.get("data", ""), metrics.get("split", "test"))
                if metrics.get("test_content") not in (None, data.fingerprint()):
                    raise InputError(f"{metrics['data']}: the data changed after the evaluation")
                ids = {passage for key in shown for passage in first_passages.get(key, {})}
                rows = find_rows(data.corpus, ids)
                table = data.corpus.select(list(rows.values()))
                texts = zip(table["title"], table["text"], strict=True)
                contents = dict(zip(rows, texts, strict=True))
                for key, query in shown.items():
                    query.text = one_line(data.queries.get(key, ""))
            except InputError as error:
                notes.append(f"{system.label}: only ids are shown, without texts. {error}")
            for key, query in shown.items():
                passages = []
                for passage, grade in first_passages.get(key, {}).items():
                    title, text = contents.get(passage, ("", ""))
                    passages.append(ShownPassage(passage, one_line(title), one_line(text), grade))
                query.rankings.append(ShownRanking(system.label, system_values[key], passages))
        changed.append(
            ChangedPair(
                group.label,
                reference.label,
                [shown[key] for key in gained],
                [shown[key] for key in lost],
            )
        )
    return ChangedQueries(list(dict.fromkeys(notes)), changed)


def query_values(runs: list[QueryScores], metric: str) -> dict[str, float]:
    """Return the metric of each test query, as the mean over runs: query id -> value."""
    return {
        query: statistics.mean(run[query][metric] for run in runs)
        for query in runs[0]
        if all(metric in run.get(query, {}) for run in runs)
    }


def one_line(text: str) -> str:
    """Return a text as one line of at most SHOWN_CHARACTERS characters."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"

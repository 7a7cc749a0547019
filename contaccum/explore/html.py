"""Build the HTML of the page: rankings, judged passages, lists of queries, highlighted words.

Texts of the data set are not trusted. Each text must go through ``safe`` before it is put into the HTML.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

from contaccum.errors import InputError
from contaccum.retrieval.retriever import WORDS, words_of
from contaccum.retrieval.runs import RankedPassage

Grades = Mapping[str, int]
"""Passage id -> grade. A grade above 0 means relevant."""


def grades_of_text(text: str, queries: Mapping[str, str], qrels: Mapping[str, Grades]) -> dict[str, int]:
    """Return the grades of the passages that were judged for a query with this text: passage id -> grade.

    Differences in case and white space are ignored. The result is empty if no judged query has this text. If several queries have
    this text, each passage gets its highest grade.
    """
    wanted, grades = text.casefold().split(), dict[str, int]()
    for query_id, other in queries.items():
        if other.casefold().split() == wanted:
            for passage_id, grade in qrels[query_id].items():
                grades[passage_id] = max(grade, grades.get(passage_id, grade))
    return grades


def losses(scores: Sequence[Mapping[str, Mapping[str, float]]], metric: str) -> dict[str, list[float]]:
    """Return query id -> values of a metric: [value] for one system, [first, second, first minus second] for two systems.

    Queries are sorted by the last value in their list, lowest first. So with two systems, the queries where the first system
    loses most come first. scores: for each system, query id -> metric -> value. All systems must have the same queries. Raises
    InputError if the metric was not computed.
    """
    known = next(iter(scores[0].values()), {metric: 0.0})
    if metric not in known:
        raise InputError(f"metric {metric!r} was not computed; choose one of {', '.join(known)}")
    found = {query: [system[query][metric] for system in scores] for query in scores[0]}
    if len(scores) > 1:
        found = {query: [left, right, left - right] for query, (left, right) in found.items()}
    return dict(sorted(found.items(), key=lambda item: item[1][-1]))


def relevant_among(grades: Grades, hits: Sequence[RankedPassage]) -> str:
    """Return a sentence that says how many of the relevant passages in ``grades`` are among the hits."""
    relevant = {passage_id for passage_id, grade in grades.items() if grade > 0}
    found = relevant & {hit.id for hit in hits}
    return f"{len(found)} of {len(relevant)} relevant passages are among these {len(hits)}"


def shared_words(query: str, text: str) -> list[tuple[int, int]]:
    """Return the positions (start, end) of every word in ``text`` that is also a word of the query."""
    wanted = set(words_of([query])[0])
    # some letters become two letters in lower case, which shifts the positions of later letters
    ends = [0, *accumulate(len(letter.lower()) for letter in text)]
    found = (word.span() for word in re.finditer(WORDS["token_pattern"], text.lower()) if word[0] in wanted)
    return [(bisect_right(ends, start) - 1, bisect_left(ends, stop)) for start, stop in found]


STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
CHOOSE = """
element.addEventListener('click', event => {
  const button = event.target.closest('button[data-query]');
  if (button) trigger('select', {query: button.dataset.query});
});
"""
"""JavaScript that sends the id of a query when its button is clicked."""


def safe(text: str) -> str:
    """Escape HTML markup and template placeholders in a text."""
    return escape(text).replace("{", "&#123;").replace("$", "&#36;")


def styled(*parts: str) -> str:
    """Join pieces of HTML into one element, to which the style sheet of the page applies."""
    return f'<div class="shown">{"".join(parts)}</div>'


def columns(rankings: Sequence[str]) -> str:
    """Return HTML that shows rankings side by side, or below each other on a narrow screen."""
    return f'<div class="columns">{"".join(rankings)}</div>'


def note(sentence: str) -> str:
    """Return a sentence as an HTML paragraph. For an empty sentence, return an empty string."""
    return f'<p class="note">{safe(sentence)}</p>' if sentence else ""


def heading(text: str) -> str:
    return f"<h2>{safe(text)}</h2>"


def ranking(label: str, query: str, hits: Sequence[RankedPassage], grades: Grades, about: str = "") -> str:
    """Return HTML that shows the passages of one system. Words of the query are highlighted.

    label: name of the system. about: sentence above the passages.
    """
    sentences = [about] if about else []
    if grades:
        sentences.append(relevant_among(grades, hits))
    if not hits:
        sentences.append("no passage was found")
    items = "".join(_hit(rank, query, hit, grades.get(hit.id)) for rank, hit in enumerate(hits, 1))
    return f'<section class="system"><h3>{safe(label)}</h3>{note("; ".join(sentences))}<ol>{items}</ol></section>'


def _hit(rank: int, query: str, hit: RankedPassage, grade: int | None) -> str:
    kind = "" if grade is None else " relevant" if grade > 0 else " irrelevant"
    verdict = "relevant" if grade and grade > 0 else "judged not relevant"
    judged = "" if grade is None else f'<span class="grade">{verdict} (grade {grade})</span>'
    title = f'<span class="title">{_highlighted(query, hit.title)}</span>' if hit.title else ""
    meta = "".join(f"<span>{part}</span>" for part in (f"rank {rank}", f"score {hit.score:.4f}", safe(hit.id)))
    return (
        f'<li class="hit{kind}" data-id="{safe(hit.id)}">{title}<div class="meta">{meta}{judged}</div>'
        f"<details><summary>{_highlighted(query, hit.text)}</summary></details></li>"
    )


def _highlighted(query: str, text: str) -> str:
    """Return the text as HTML. Words that are also in the query are marked."""
    parts, end = [], 0
    for start, stop in shared_words(query, text):
        parts += [safe(text[end:start]), f"<mark>{safe(text[start:stop])}</mark>"]
        end = stop
    return "".join(parts) + safe(text[end:])


def judged(
    grades: Grades, rankings: Mapping[str, Sequence[tuple[str, float]]], titles: Mapping[str, str], k: int
) -> str:
    """Return an HTML table of the judged passages of a query: title, id, grade, and the rank in each ranking.

    The passages are sorted by grade (highest first), then by id. rankings: name of a system -> its k best passages. The rank of
    a passage that a ranking lacks is "> k".
    """
    ranks = {label: {found: rank for rank, (found, _) in enumerate(hits, 1)} for label, hits in rankings.items()}
    rows = []
    for passage_id, grade in sorted(grades.items(), key=lambda item: (-item[1], item[0])):
        title = f'{safe(titles[passage_id])} <span class="note">{safe(passage_id)}</span>'
        cells = {label: str(own.get(passage_id, f"> {k}")) for label, own in ranks.items()}
        rows.append(_row(title, {"grade": str(grade)} | cells))
    return _table(["judged passage", "grade", *rankings], rows)


def lost(found: Sequence[tuple[str, list[float]]], queries: Mapping[str, str], labels: Sequence[str]) -> str:
    """Return an HTML table of queries and their metric values. Each query is a button.

    found: (query id, metric values) of each row, from ``losses``. queries: query id -> text. labels: names of the systems.
    """
    rows = []
    for query_id, values in found:
        cells = {label: f"{value:.3f}" for label, value in zip(labels, values, strict=False)}
        if len(labels) > 1:
            cells["difference"] = f"{values[-1]:+.3f}"
        button = f'<button data-query="{safe(query_id)}">{safe(queries[query_id])}</button>'
        rows.append(_row(button, cells))
    return _table(["query", *labels, *["difference"][: len(labels) - 1]], rows)


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    header = "".join(f"<th>{safe(column)}</th>" for column in columns)
    return f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(first: str, values: Mapping[str, str]) -> str:
    """Return an HTML table row. first: HTML of the first cell. values: name of a column -> text of its cell."""
    cells = "".join(f'<td data-column="{safe(column)}">{safe(value)}</td>' for column, value in values.items())
    return f"<tr><td>{first}</td>{cells}</tr>"

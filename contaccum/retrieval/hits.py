"""Passages that were found, as lines for a terminal or a file."""

from collections.abc import Mapping, Sequence
from unicodedata import combining, east_asian_width

from contaccum.retrieval.search import Hit

MARKS = {True: "+", False: "-"}
"""Before the score of a passage that is judged: relevant, or not."""


def render_hits(hits: Sequence[Hit], grades: Mapping[str, int] | None = None, width: int | None = None) -> str:
    """Two lines a passage: rank, mark where it is judged, score, id and title; its text. ``width``: columns of a terminal."""
    lines = []
    for rank, hit in enumerate(hits, start=1):
        mark = MARKS[grades[hit.id] > 0] if grades and hit.id in grades else " "
        lines += [f"{rank:3d} {mark} {hit.score:7.4f}  {hit.id}  {hit.title}", f"      {hit.text}"]
    return "\n".join(cut(line, width) for line in lines)


def cut(text: str, width: int | None) -> str:
    """A text as one line, no wider than ``width`` columns; what would move a terminal's cursor or colour it becomes a space."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    if width is None or sum(map(_columns, line)) <= width:
        return line
    used, end = 0, 0
    while used + _columns(line[end]) <= width - 1:  # a column is left for the dots
        used, end = used + _columns(line[end]), end + 1
    return line[:end] + "…"


def _columns(letter: str) -> int:
    return 0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1

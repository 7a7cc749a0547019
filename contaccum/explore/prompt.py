"""One query after another from a prompt, or from a pipe: each is answered by its best passages."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

from contaccum import api
from contaccum.data.tables import RetrievalSet, load_searchable
from contaccum.errors import InputError
from contaccum.explore.marks import grades_of_text, relevant_among
from contaccum.launch import process_place
from contaccum.options import ModelChoice, SearchSettings
from contaccum.retrieval.hits import cut, render_hits
from contaccum.retrieval.search import Hit, with_texts

PROMPT = "query> "


def converse(
    choice: ModelChoice,
    data: str,
    split: str = "test",
    k: int = 10,
    settings: SearchSettings = api.DEFAULTS,
    repair: bool = False,
    max_bad_records: int = 0,
) -> None:
    """Print the k best passages for every query that is typed, until an empty line or the end of the input.

    Encoder, vectors or index and corpus are loaded once. Where the data is judged and a query is one of its split's, the judged
    passages are marked. Raises InputError for what ``load_searchable`` and the search refuse, and under several processes.
    """
    if (world := process_place()[1]) > 1:
        raise InputError(f"--interactive reads one prompt, but {world} processes were started, expected one")
    if k < 1:
        raise InputError(f"k is {k}, expected at least 1")
    judged = load_searchable(data, split, repair, max_bad_records)
    finder = api.open_finder(choice, judged.corpus, settings)
    for query in typed(sys.stdin):
        hits = with_texts(judged.corpus, finder.find({"query": query}, k)["query"])
        print(render_answer(query, hits, judged, _width(sys.stdout)), end="\n\n", flush=True)


def typed(source: TextIO) -> Iterator[str]:
    """The queries that come, without white space around them, up to an empty line or the end; a terminal is prompted."""
    lines = _prompted() if source.isatty() else iter(source)
    for line in lines:
        if not line.strip():
            return
        yield line.strip()


def _prompted() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401  (what is typed can be edited and called back)
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return


def _width(target: TextIO) -> int | None:
    return shutil.get_terminal_size().columns if target.isatty() else None


def render_answer(query: str, hits: list[Hit], judged: RetrievalSet, width: int | None) -> str:
    """The passages, and how many of the relevant ones are among them where the query is a judged one."""
    grades = grades_of_text(query, judged.queries, judged.qrels)
    lines = [render_hits(hits, grades, width) if hits else "no passage was found"]
    if grades:
        here, there = relevant_among(grades, hits)
        lines.append(cut(f"{here} of {there} relevant passages are among these {len(hits)}", width))
    return "\n".join(lines)

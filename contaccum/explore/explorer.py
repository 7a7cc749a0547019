"""What each page of the browser's view shows, as HTML, for the retrievers that were chosen. Knows no web server."""

from collections.abc import Sequence
from dataclasses import dataclass

from contaccum.data.tables import RetrievalSet
from contaccum.errors import InputError
from contaccum.explore import html
from contaccum.explore.marks import grades_of_text, judged_passages, losses
from contaccum.explore.sides import Side
from contaccum.retrieval.search import with_texts

PAGE = 50
"""Queries of a page of the list."""


@dataclass(frozen=True)
class Explorer:
    """Retrievers over one data set."""

    sides: Sequence[Side]
    data: RetrievalSet
    split: str

    def side(self, label: str) -> Side:
        """The side of that label."""
        return next(side for side in self.sides if side.name == label)

    def chosen(self, left: str, right: str | None) -> list[Side]:
        """The sides that are compared: two, or one where both are the same."""
        return [self.side(label) for label in dict.fromkeys((left, right)) if label]

    @property
    def metrics(self) -> list[str]:
        """The names of what was computed for every judged query."""
        return list(next(iter(self.sides[0].scores.values()))) if self.data.queries else []

    @property
    def pages(self) -> int:
        """Of the list of queries."""
        return -(-len(self.data.queries) // PAGE)

    def answer(self, query: str, left: str, right: str | None, k: int) -> str:
        """The best passages for a query text."""
        if not query.strip():
            return html.page(html.note("Type a query."))
        grades = grades_of_text(query, self.data.queries, self.data.qrels)
        sentence = f"A query of the split {self.split}: its judged passages are marked." if grades else ""
        sides = self.chosen(left, right)
        found = [html.ranking(side.name, query, side.ask(query.strip(), k), grades) for side in sides]
        return html.page(html.note(sentence), html.beside(found))

    def lost(self, left: str, right: str | None, metric: str, page: int) -> str:
        """One page, from 1, of the judged queries, those first on which the left side lost most."""
        sides = self.chosen(left, right)
        found = losses(sides[0].scores, sides[1].scores if len(sides) > 1 else None, metric)
        start = PAGE * (page - 1)
        what = f"{metric} of {left} less that of {right}" if len(sides) > 1 else f"{metric} of {left}"
        about = f"{what}, lowest first: queries {start + 1} to {min(start + PAGE, len(found))} of {len(found)}"
        rows = html.lost(found[start : start + PAGE], self.data.queries, [side.name for side in sides])
        return html.page(html.note(about), rows)

    def query_page(self, query_id: str, left: str, right: str | None, metric: str, k: int) -> str:
        """A judged query: where its judged passages stand, and the rankings. InputError for a query that the split lacks."""
        if query_id not in self.data.queries:
            raise InputError(f"query {query_id!r} is not in the split {self.split}")
        sides, query, grades = self.chosen(left, right), self.data.queries[query_id], self.data.qrels[query_id]
        passages = judged_passages(grades, [side.run[query_id] for side in sides])
        read = with_texts(self.data.corpus, [(passage.id, 0.0) for passage in passages])
        titles = {hit.id: hit.title or hit.text for hit in read}
        names = [side.name for side in sides]
        found = [
            html.ranking(
                side.name, query, side.ranking(query_id, k), grades, f"{metric} {side.scores[query_id][metric]:.4f}"
            )
            for side in sides
        ]
        return html.page(
            html.heading(query),
            html.note(f"query {query_id} of the split {self.split}"),
            html.judged(passages, titles, names, self.sides[0].k),
            html.beside(found),
        )

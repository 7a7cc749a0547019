"""The parts of the page as HTML. Every text of the data is a stranger's: ``safe`` is the only way in."""

from collections.abc import Mapping, Sequence
from html import escape

from contaccum.explore.marks import Grades, JudgedPassage, Loss, pieces, relevant_among
from contaccum.retrieval.search import Hit

STYLE = """
.gradio-container { width: 100% !important; max-width: 76rem !important; margin: 0 auto !important; }
.gradio-container input { text-overflow: ellipsis; }
.shown { font-size: 1rem; line-height: 1.5; color: var(--body-text-color); overflow-wrap: anywhere;
  --soft: #57606a; --found: #ffe08a; --found-ink: #3a2a00; --good: #1a7f37; --bad: #b3261e; }
.dark .shown { --soft: #b6bec8; --found: #6b5300; --found-ink: #fff3cf; --good: #57c878; --bad: #ff8a80; }
.shown h2 { font-size: 1.15rem; font-weight: 600; margin: .5rem 0; }
.shown h3 { font-size: 1rem; font-weight: 600; margin: 1rem 0 0; }
.shown p { margin: .25rem 0 .75rem; }
.shown .note, .shown .meta { color: var(--soft); font-size: .875rem; }
.shown .beside { display: grid; gap: 0 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); }
.shown .side { min-width: 0; }
.shown ol { list-style: none; margin: 0; padding: 0; }
.shown li { margin: 0; padding: .6rem 0 .6rem .75rem; border-top: 1px solid var(--border-color-primary);
  border-left: 3px solid transparent; }
.shown li.relevant { border-left-color: var(--good); }
.shown li.irrelevant { border-left-color: var(--bad); }
.shown .title { font-weight: 600; }
.shown .meta { display: flex; flex-wrap: wrap; gap: 0 .9rem; font-variant-numeric: tabular-nums; }
.shown .relevant .grade { color: var(--good); font-weight: 600; }
.shown .irrelevant .grade { color: var(--bad); font-weight: 600; }
.shown summary { cursor: pointer; display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 4; overflow: hidden; }
.shown details[open] > summary { display: block; }
.shown mark { background: var(--found); color: var(--found-ink); border-radius: .2rem; padding: 0 .1rem; }
.shown table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
.shown th, .shown td { text-align: right; padding: .4rem 0 .4rem 1rem; vertical-align: top; overflow-wrap: break-word;
  border-top: 1px solid var(--border-color-primary); }
.shown th { font-weight: 600; color: var(--soft); border-top: 0; min-width: 6rem; max-width: 12rem; }
.shown th:first-child, .shown td:first-child { text-align: left; padding-left: 0; max-width: none; overflow-wrap: anywhere; }
.shown button { font: inherit; color: inherit; background: none; border: 0; padding: .1rem 0; text-align: left; cursor: pointer;
  text-decoration: underline; text-underline-offset: .2em; text-decoration-color: var(--border-color-accent); }
.shown button:hover { text-decoration-color: currentColor; }
@media (max-width: 40rem) {
  /* a row becomes a block: what stands in the first column, and below it each value with its column's name */
  .shown thead { display: none; }
  .shown tr { display: block; border-top: 1px solid var(--border-color-primary); padding: .4rem 0; }
  .shown td { display: inline-block; border: 0; padding: 0 1rem 0 0; }
  .shown td:first-child { display: block; }
  .shown td[data-column]::before { content: attr(data-column) " "; color: var(--soft); }
}
"""
CHOOSE = """
element.addEventListener('click', event => {
  const button = event.target.closest('button[data-query]');
  if (button) trigger('select', {query: button.dataset.query});
});
"""
"""What a list of queries does when one of them is clicked."""


def safe(text: str) -> str:
    """A text that a page shows as it is: no markup, and nothing that a template would fill in."""
    return escape(text).replace("{", "&#123;").replace("$", "&#36;")


def page(*parts: str) -> str:
    """Parts under each other, in the page's style."""
    return f'<div class="shown">{"".join(parts)}</div>'


def beside(sides: Sequence[str]) -> str:
    """Rankings beside each other, or under each other where the screen is narrow."""
    return f'<div class="beside">{"".join(sides)}</div>'


def note(sentence: str) -> str:
    """A sentence about what follows, where there is one."""
    return f'<p class="note">{safe(sentence)}</p>' if sentence else ""


def heading(text: str) -> str:
    """What a page is about."""
    return f"<h2>{safe(text)}</h2>"


def ranking(label: str, query: str, hits: Sequence[Hit], grades: Grades, about: str = "") -> str:
    """One retriever's passages: rank, title, score, grade where judged, and the text with the words that BM25 matches."""
    sentences = [about] if about else []
    if grades:
        here, there = relevant_among(grades, hits)
        sentences.append(f"{here} of {there} relevant passages are among these {len(hits)}")
    if not hits:
        sentences.append("no passage was found")
    items = "".join(_hit(rank, query, hit, grades.get(hit.id)) for rank, hit in enumerate(hits, 1))
    return f'<section class="side"><h3>{safe(label)}</h3>{note("; ".join(sentences))}<ol>{items}</ol></section>'


def _hit(rank: int, query: str, hit: Hit, grade: int | None) -> str:
    kind = "" if grade is None else " relevant" if grade > 0 else " irrelevant"
    judged = "" if grade is None else f'<span class="grade">{_words(grade)}</span>'
    title = f'<span class="title">{_marked(query, hit.title)}</span>' if hit.title else ""
    meta = "".join(f"<span>{part}</span>" for part in (f"rank {rank}", f"score {hit.score:.4f}", safe(hit.id)))
    return (
        f'<li class="hit{kind}" data-id="{safe(hit.id)}">{title}<div class="meta">{meta}{judged}</div>'
        f"<details><summary>{_marked(query, hit.text)}</summary></details></li>"
    )


def _words(grade: int) -> str:
    return f"relevant (grade {grade})" if grade > 0 else f"judged not relevant (grade {grade})"


def _marked(query: str, text: str) -> str:
    return "".join(
        f"<mark>{safe(piece.text)}</mark>" if piece.marked else safe(piece.text) for piece in pieces(query, text)
    )


def judged(passages: Sequence[JudgedPassage], titles: Mapping[str, str], labels: Sequence[str], k: int) -> str:
    """The judged passages of a query with the rank that each retriever gives them, of its k best."""
    rows = [
        _row(
            f'{safe(titles[passage.id])} <span class="note">{safe(passage.id)}</span>',
            {"grade": str(passage.grade)}
            | {label: str(rank or f"> {k}") for label, rank in zip(labels, passage.ranks, strict=True)},
        )
        for passage in passages
    ]
    return _table(["judged passage", "grade", *labels], rows)


def lost(found: Sequence[Loss], queries: Mapping[str, str], labels: Sequence[str]) -> str:
    """Queries as buttons that ``CHOOSE`` listens to, each with its values."""
    rows = []
    for loss in found:
        values = {labels[0]: f"{loss.left:.3f}"}
        if loss.right is not None:
            values |= {labels[1]: f"{loss.right:.3f}", "difference": f"{loss.difference:+.3f}"}
        button = f'<button data-query="{safe(loss.query_id)}">{safe(queries[loss.query_id])}</button>'
        rows.append(_row(button, values))
    return _table(["query", *labels, *["difference"][: len(labels) - 1]], rows)


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{safe(column)}</th>" for column in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _row(first: str, values: Mapping[str, str]) -> str:
    """A row of a table; ``first`` is HTML, the values are texts by column."""
    cells = "".join(f'<td data-column="{safe(column)}">{safe(value)}</td>' for column, value in values.items())
    return f"<tr><td>{first}</td>{cells}</tr>"

"""One self-contained HTML page of sections: style, tables and figures inside, nothing loaded, everything escaped."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from contaccum.study.plots import Plot
from contaccum.study.tables import Table

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6570; --line: #d9dee3; --paper: #ffffff; --band: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa5b1; --line: #363d45; --paper: #14171a; --band: #1d2227; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; }
.note, figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--paper); }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
tbody tr:hover td { background: var(--band); }
@media (max-width: 40rem) {
  /* the column that stays while the others scroll must leave them room */
  th:first-child, td:first-child { white-space: normal; min-width: 7rem; max-width: 9rem; overflow-wrap: anywhere; }
}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; }
figure svg, figure img { width: 100%; height: auto; display: block; }
.keys { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; padding: 0; margin: .75rem 0; font-size: .9rem; }
.keys span { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .4rem; }
"""


class Section(NamedTuple):
    """A heading with sentences and tables under it."""

    title: str
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    after: Sequence[str] = ()
    """Sentences on how the figures are made."""


def html(title: str, sections: Sequence[Section], plots: Sequence[Plot], keys: Sequence[tuple[str, str]]) -> str:
    """The page. keys: label and colour of what the figures show."""
    body = [f"<h1>{escape(title)}</h1>"]
    for number, section in enumerate(sections):
        body.append(_section(section))
        if number == 0 and plots:
            body.append(_figures(plots, keys))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", *(f"<p>{escape(note)}</p>" for note in section.notes)]
    parts += [_table(table) for table in section.tables]
    parts += [f'<p class="note">{escape(note)}</p>' for note in section.after]
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.heads)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in table.rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>'


def _figures(plots: Sequence[Plot], keys: Sequence[tuple[str, str]]) -> str:
    chips = "".join(f'<li><span style="background: {colour}"></span>{escape(label)}</li>' for label, colour in keys)
    shown = "\n".join(
        f'<figure id="{plot.name}">{plot.svg}<figcaption>{escape(plot.caption)}.</figcaption></figure>'
        for plot in plots
    )
    return f'<h2>Figures</h2>\n<ul class="keys">{chips}</ul>\n<div class="figures">\n{shown}\n</div>'


def markdown(title: str, sections: Sequence[Section], plots: Sequence[Plot], folder: str) -> str:
    """The same as Markdown, its figures as files in ``folder``."""
    parts = [f"# {title}"]
    for number, section in enumerate(sections):
        parts += [
            f"## {section.title}",
            *section.notes,
            *(table.markdown() for table in section.tables),
            *section.after,
        ]
        if number == 0 and plots:
            parts += [
                "## Figures",
                *(f"![{plot.caption}]({folder}/{plot.name}.png)\n\n{plot.caption}." for plot in plots),
            ]
    return "\n\n".join(parts) + "\n"

"""The page in the browser: what is chosen and typed goes to the explorer, whose HTML is shown. Only this file imports gradio."""

import os
import socket
import sys
import threading
from types import ModuleType
from typing import Any

from contaccum.data.tables import load_searchable
from contaccum.errors import InputError
from contaccum.explore import html
from contaccum.explore.explorer import Explorer
from contaccum.explore.sides import open_sides
from contaccum.launch import process_place
from contaccum.options import ExploreOptions, ModelChoice, SearchSettings

SHOWN = (5, 10, 20, 50)
"""Passages of a ranking that can be asked for at once."""


def load_gradio() -> ModuleType:
    """The gradio module, told to send nothing to anybody; InputError naming what to install."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise InputError(f'contaccum explore needs gradio ({error}): pip install "contaccum[explore]"') from error
    return gradio


def explore(
    options: ExploreOptions,
    choice: ModelChoice,
    settings: SearchSettings,
    repair: bool = False,
    max_bad_records: int = 0,
) -> None:
    """Encode what is not encoded yet, then serve the page until the process is stopped; its address is printed.

    choice: how the models are loaded. Raises InputError without gradio, for a port that cannot be had, and for what the data, the
    models and the search refuse.
    """
    if (world := process_place()[1]) > 1:
        raise InputError(f"explore serves one page, but {world} processes were started, expected one")
    _refuse_taken(options.host, options.port)
    load_gradio()
    if options.k < 1:
        raise InputError(f"--k is {options.k}, expected at least 1")
    data = load_searchable(options.data, options.split, repair, max_bad_records)
    sides = open_sides(options.models, choice, data, options.k, settings, options.embeddings)
    for side in sides if data.queries else ():
        print(f"contaccum: {side.name}: ranking {len(data.queries)} queries", file=sys.stderr)
        assert side.scores
    serve(Explorer(sides, data, options.split), options.host, options.port)


def _refuse_taken(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--host {host} --port {port}: cannot be listened to ({error}), expected a free port"
        ) from error


def serve(explorer: Explorer, host: str, port: int) -> None:
    """Serve the page until a signal; nothing is loaded from or sent to anywhere else."""
    blocks = build(explorer)
    theme = load_gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    blocks.launch(
        server_name=host, server_port=port, share=False, quiet=True, prevent_thread_lock=True, ssr_mode=False, pwa=False,
        mcp_server=False, enable_monitoring=False, footer_links=[], theme=theme, css=html.STYLE,
    )  # fmt: skip
    try:
        print(blocks.local_url, flush=True)
        threading.Event().wait()
    finally:
        blocks.close(verbose=False)


def build(explorer: Explorer) -> Any:
    """The page: choices above, and below them a tab for a query and one for the judged queries."""
    gr = load_gradio()
    labels = [side.name for side in explorer.sides]
    with gr.Blocks(title="contaccum explore", analytics_enabled=False) as blocks:
        several = len(labels) > 1
        with gr.Row():
            two = {"filterable": False, "visible": several, "min_width": 240}  # a phone has them under each other
            left = gr.Dropdown(labels, value=labels[0], label="model", elem_id="left", **two)
            right = gr.Dropdown(labels, value=labels[several], label="beside", elem_id="right", **two)
            shown = gr.Dropdown(SHOWN, value=10, label="passages", elem_id="shown", filterable=False)
        with gr.Tab("Ask"):
            _ask_tab(gr, explorer, [left, right, shown])
        if explorer.data.queries:
            with gr.Tab(f"Queries of {explorer.split}"):
                _queries_tab(gr, explorer, [left, right, shown])
    return blocks


def _ask_tab(gr: Any, explorer: Explorer, choices: list[Any]) -> None:
    query = gr.Textbox(label="query", elem_id="query", submit_btn="Search", max_lines=1)
    answer = gr.HTML(explorer.answer("", "", None, 0), elem_id="answer", apply_default_css=False)
    for event in (query.submit, *(choice.change for choice in choices)):
        event(explorer.answer, [query, *choices], answer)


def _queries_tab(gr: Any, explorer: Explorer, choices: list[Any]) -> None:
    left, right, shown = choices
    default = "ndcg@10" if "ndcg@10" in explorer.metrics else explorer.metrics[0]
    chosen = gr.State("")
    metric = gr.Dropdown(explorer.metrics, value=default, label="metric", elem_id="metric", filterable=False)
    with gr.Column() as listing:
        page = gr.Slider(1, max(2, explorer.pages), value=1, step=1, label="page", visible=explorer.pages > 1)
        first = explorer.lost(left.value, right.value, default, 1)
        listed = gr.HTML(first, elem_id="lost", js_on_load=html.CHOOSE, apply_default_css=False)
    with gr.Column(visible=False) as single:
        back = gr.Button("All queries", elem_id="back", size="sm")
        shown_query = gr.HTML(elem_id="query-page", apply_default_css=False)

    def list_queries(left: str, right: str, metric: str, page: int) -> str:
        return explorer.lost(left, right, metric, page)

    def show(query: str, left: str, right: str, metric: str, k: int) -> Any:
        return explorer.query_page(query, left, right, metric, k) if query else ""

    def choose(event: gr.EventData, *values: Any) -> tuple[Any, ...]:
        return event.query, show(event.query, *values), gr.update(visible=False), gr.update(visible=True)

    def leave() -> tuple[Any, ...]:
        return "", gr.update(visible=True), gr.update(visible=False)

    listed.select(choose, [left, right, metric, shown], [chosen, shown_query, listing, single])
    back.click(leave, None, [chosen, listing, single])
    for choice in (left, right, metric, page):
        choice.change(list_queries, [left, right, metric, page], listed)
    for choice in (left, right, metric, shown):
        choice.change(show, [chosen, left, right, metric, shown], shown_query)

"""Show search results on a page in the browser (gradio), or at a prompt in the terminal."""

import ipaddress
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from contaccum.config.commands import DataPolicy, EncoderConfig, ExploreConfig, SearchConfig
from contaccum.data.dataset import DEFAULT_POLICY, open_dataset
from contaccum.data.retrieval_set import RetrievalSet
from contaccum.errors import InputError
from contaccum.explore import html
from contaccum.explore.explorer import MAX_QUERY, Explorer, open_systems
from contaccum.explore.html import grades_of_text, relevant_among
from contaccum.formats.records import not_utf8
from contaccum.retrieval.retriever import DEFAULTS, Retriever
from contaccum.retrieval.runs import RankedPassage, read_passages, render_passages, truncate_line
from contaccum.runtime.launch import require_one_process

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SHOWN = (5, 10, 20, 50)
"""Choices on the page for the number of passages per query."""
PROMPT = "query> "
MAX_BODY = 64 << 10  # maximum size of a request in bytes; a query of MAX_QUERY characters needs at most half of this

_PATHS = {
    "GET": re.compile(
        r"/|/(?:config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)/?|/(?:assets|static|svelte)/[\w./@-]+"
        r"|/gradio_api/(?:info|startup-events|app_id|queue/data|theme\.css|heartbeat/\w+)/?"
    ),
    "POST": re.compile(r"/gradio_api/(?:queue/join|reset|cancel)/?"),
}
_PATHS["HEAD"] = _PATHS["GET"]


def load_gradio() -> ModuleType:
    """Import gradio and turn off its analytics. Raises InputError with the install command if gradio is missing."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise InputError(f'contaccum explore needs gradio ({error}). Run: pip install "contaccum[explore]"') from error
    return gradio


def explore(
    options: ExploreConfig,
    choice: EncoderConfig,
    settings: SearchConfig,
    policy: DataPolicy = DEFAULT_POLICY,
) -> None:
    """Encode the corpus for each model, print the address of the page, and serve the page until the process is stopped.

    choice: settings for loading every model. Raises InputError if gradio is missing, if the port is in use, or if data, models or
    search settings are invalid.
    """
    require_one_process("explore")
    try:
        with socket.create_server((options.host, options.port)) as probe:
            port = probe.getsockname()[1]  # for port 0, a port that the system chose
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--host {options.host} --port {options.port}: the server cannot listen there ({error}); choose another host or port"
        ) from error
    load_gradio()
    data = open_dataset(options.data, options.split, policy).searchable_set
    systems = open_systems(options.models, choice, data, options.k, settings, options.embeddings)
    for system in systems if data.queries else ():
        print(f"contaccum: {system.name}: ranking {len(data.queries)} queries", file=sys.stderr)
        assert system.scores  # computes the rankings and metrics before the page is served
    serve(Explorer(systems, data, options.split), options.host, port)


def serve(explorer: Explorer, host: str, port: int) -> None:
    """Print the address of the page, and serve the page until the process is stopped."""
    blocks = build(explorer)
    theme = load_gradio().themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    blocks.launch(
        server_name=host, server_port=port, share=False, quiet=True, prevent_thread_lock=True, ssr_mode=False, pwa=False,
        mcp_server=False, enable_monitoring=False, footer_links=[], theme=theme, css=html.STYLE,
        app_kwargs={"middleware": [(Gate, (), {"host": host})], "openapi_url": None},
    )  # fmt: skip
    try:
        print(blocks.local_url, flush=True)
        threading.Event().wait()
    finally:
        blocks.close(verbose=False)


def build(explorer: Explorer) -> Any:
    """Build the page (``gradio.Blocks``): menus, a tab for typed queries, and a tab for the judged queries of the split."""
    gr = load_gradio()
    labels = [system.name for system in explorer.systems]
    with gr.Blocks(title="contaccum explore", analytics_enabled=False) as blocks:
        several = len(labels) > 1
        with gr.Row():
            # with this minimum width, a phone shows the menus below each other
            two = {"filterable": False, "visible": several, "min_width": 240}
            left = gr.Dropdown(labels, value=labels[0], label="model", elem_id="left", **two)
            right = gr.Dropdown(labels, value=labels[several], label="compare with", elem_id="right", **two)
            shown = gr.Dropdown(SHOWN, value=10, label="passages", elem_id="shown", filterable=False)
        with gr.Tab("Ask"):
            query = gr.Textbox(label="query", elem_id="query", submit_btn="Search", max_lines=1, max_length=MAX_QUERY)
            answer = gr.HTML(explorer.answer("", "", None, 0), elem_id="answer", apply_default_css=False)
            for event in (query.submit, left.change, right.change, shown.change):
                event(explorer.answer, [query, left, right, shown], answer)
        if explorer.data.queries:
            with gr.Tab(f"Queries of {explorer.split}"):
                _queries_tab(gr, explorer, [left, right, shown])
    return blocks


def _queries_tab(gr: Any, explorer: Explorer, choices: list[Any]) -> None:
    left, right, shown = choices
    default = "ndcg@10" if "ndcg@10" in explorer.metrics else explorer.metrics[0]
    chosen = gr.State("")
    metric = gr.Dropdown(explorer.metrics, value=default, label="metric", elem_id="metric", filterable=False)
    with gr.Column() as listing:
        pages = explorer.list_pages
        number = gr.Slider(1, max(2, pages), value=1, step=1, label="page", visible=pages > 1)
        first = explorer.lost(left.value, right.value, default, 1)
        listed = gr.HTML(first, elem_id="lost", js_on_load=html.CHOOSE, apply_default_css=False)
    with gr.Column(visible=False) as single:
        back = gr.Button("All queries", elem_id="back", size="sm")
        shown_query = gr.HTML(elem_id="query-page", apply_default_css=False)

    def show(query: str, left: str, right: str, metric: str, k: int) -> Any:
        return explorer.show_query(query, left, right, metric, k) if query else ""

    def choose(event: gr.EventData, *values: Any) -> tuple[Any, ...]:
        return event.query, show(event.query, *values), gr.update(visible=False), gr.update(visible=True)

    def leave() -> tuple[Any, ...]:
        return "", gr.update(visible=True), gr.update(visible=False)

    listed.select(choose, [left, right, metric, shown], [chosen, shown_query, listing, single])
    back.click(leave, None, [chosen, listing, single])
    for choice in (left, right, metric, number):
        choice.change(explorer.lost, [left, right, metric, number], listed)
    for choice in (left, right, metric, shown):
        choice.change(show, [chosen, left, right, metric, shown], shown_query)


class Gate:
    """ASGI middleware that refuses all requests except those that the page sends.

    Gradio has endpoints that the page does not need, such as file uploads, and answers requests from other web sites. The gate
    accepts only small requests to this server, for a known path, from a page of this server.
    """

    def __init__(self, app: "ASGIApp", host: str) -> None:
        """host: address or name that the server listens on."""
        self.app = app
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Pass an accepted request to the app. Answer a refused request with an error."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            if refusal := self.refusal(scope["method"], scope["path"], dict(scope["headers"])):
                from starlette.responses import PlainTextResponse  # a dependency of gradio

                status, sentence = refusal
                # the body of the request is not read, so the connection cannot be used again
                await PlainTextResponse(sentence, status, {"connection": "close"})(scope, receive, send)
            else:
                await self.app(scope, receive, send)
        else:  # the page uses no web socket
            await send({"type": "websocket.close", "code": 1008})

    def refusal(self, method: str, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Return the HTTP status and an error sentence if the request is refused, or None if it is accepted.

        headers: lower-case header name -> value.
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if not self.is_our_name(host):
            return (
                421,
                f"{host!r} is not a name of this server. Use its IP address, or start the server with --host NAME.",
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        foreign = bool(origin) and origin.partition("://")[2] != host
        site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
        if foreign or (method == "POST" and site not in ("same-origin", "none")):
            return 403, "Requests from other web sites are not allowed."
        if not (paths := _PATHS.get(method)) or not paths.fullmatch(path):
            return 404, "This address does not exist, or it does not accept this HTTP method."
        if method == "POST":
            length = headers.get(b"content-length", b"").decode("latin-1")
            if b"transfer-encoding" in headers or not re.fullmatch(r"\d{1,9}", length):
                return 411, "The request needs a Content-Length."
            if int(length) > MAX_BODY:
                return 413, f"The request has {length} bytes; at most {MAX_BODY} are allowed."
        return None

    def is_our_name(self, host: str) -> bool:
        """Return whether a Host header contains a name of this server, or any IP address. The port is ignored.

        IP addresses are accepted, because an attack by DNS rebinding needs a host name.
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def converse(
    choice: EncoderConfig,
    data: str,
    split: str = "test",
    k: int = 10,
    settings: SearchConfig = DEFAULTS,
    policy: DataPolicy = DEFAULT_POLICY,
) -> None:
    """Read queries from the standard input, and print the k best passages of each query.

    An empty line or the end of the input stops the loop. Model, vectors and corpus are loaded once. If a query is in the split,
    its judged passages are marked. Raises InputError if data or settings are invalid, or if several processes were started.
    """
    require_one_process("--interactive")
    judged = open_dataset(data, split, policy).searchable_set
    retriever = Retriever.open(choice, judged.corpus, settings)
    for query in typed():
        hits = read_passages(judged.corpus, retriever.search({"query": query}, k)["query"])
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(render_answer(query, hits, judged, width), end="\n\n", flush=True)


def typed() -> Iterator[str]:
    """Yield the queries from the standard input, one per line, until an empty line or the end. In a terminal, show a prompt."""
    prompt = PROMPT if sys.stdin.isatty() else ""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() then supports editing and history)
    try:
        while query := input(prompt).strip():
            yield query
    except EOFError:
        print(end="\n" if prompt else "")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: {not_utf8(error)}") from error


def render_answer(query: str, hits: list[RankedPassage], judged: RetrievalSet, width: int | None) -> str:
    """Format the passages as text. For a judged query, add how many relevant passages were found."""
    grades = grades_of_text(query, judged.queries, judged.qrels)
    lines = [render_passages(hits, grades, width) if hits else "no passage was found"]
    if grades:
        lines.append(truncate_line(relevant_among(grades, hits), width))
    return "\n".join(lines)

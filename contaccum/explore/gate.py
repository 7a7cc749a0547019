"""Check every request to the page of ``contaccum explore`` before gradio sees it.

Gradio has endpoints that the page does not need, such as file uploads, and answers requests from other web sites. The gate
accepts only requests that the page itself sends: small requests to this server, for a known path, from a page of this server.
"""

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

MAX_BODY = 64 << 10  # maximum size of a request in bytes; a query of MAX_QUERY characters needs at most half of this
MAX_QUERY = 2000  # maximum number of characters of a query

_PATHS = {
    "GET": re.compile(
        r"/|/(?:config|theme\.css|favicon\.ico|robots\.txt|manifest\.json)/?|/(?:assets|static|svelte)/[\w./@-]+"
        r"|/gradio_api/(?:info|startup-events|app_id|queue/data|theme\.css|heartbeat/\w+)/?"
    ),
    "POST": re.compile(r"/gradio_api/(?:queue/join|reset|cancel)/?"),
}
_PATHS["HEAD"] = _PATHS["GET"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Gate:
    """ASGI middleware that refuses all requests except those that the page sends."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], host: str) -> None:
        """host: address or name that the server listens on."""
        self.app = app
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an accepted request to the app. Answer a refused request with an error."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            if refusal := self.refusal(scope["method"], scope["path"], dict(scope["headers"])):
                await _answer(send, *refusal)
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
            return 421, f"This server has no name {host!r}. Use its address, or start it with --host NAME."
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
        if (origin and urlsplit(origin).netloc != host) or (method == "POST" and site not in ("same-origin", "none")):
            return 403, "Requests from other web sites are not allowed."
        if not (paths := _PATHS.get(method)) or not paths.fullmatch(path):
            return 404, "The page has no such address."
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


async def _answer(send: Send, status: int, sentence: str) -> None:
    body = sentence.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    # the body of the request is not read, so the connection cannot be used again
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})

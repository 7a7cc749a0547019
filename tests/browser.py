"""Drives a headless Chromium through its DevTools protocol, over a pipe: no driver, no other
package, no open port.

https://chromedevtools.github.io/devtools-protocol: JSON messages that end with a zero byte, to
file descriptor 3, from 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
"""Seconds for what a page is waited for; far more than it takes."""


def find_chromium() -> str | None:
    """The browser of this machine: $CHROMIUM, else the first of the usual names; nothing where
    there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def opened(chromium: str, profile: Path) -> Iterator["Page"]:
    """An empty page of a browser of its own, which is gone at the end."""
    our_read, its_write = os.pipe()
    its_read, our_write = os.pipe()
    # the shell puts the ends where the browser expects them
    call = (
        f'exec "$0" "$@" 3<&{its_read} 4>&{its_write}',
        chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-pipe", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={profile}", "about:blank",
    )  # fmt: skip
    said = (profile.parent / "chromium.log").open("wb")
    browser = subprocess.Popen(
        ["bash", "-c", *call], pass_fds=(its_read, its_write), stdout=said, stderr=said
    )
    os.close(its_read)
    os.close(its_write)
    try:
        yield Page(our_read, our_write)
    finally:
        os.close(our_write)
        browser.terminate()
        browser.wait()
        os.close(our_read)
        said.close()


class Page:
    """One page: what is done in it, and what it has said and asked for since it was opened."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._last = read, write, 0
        self._rest = b""
        self._messages: deque[dict[str, Any]] = deque()
        self._session: str | None = None
        self.errors: list[str] = []
        """Errors on the console, exceptions, and requests that failed."""
        self.requests: list[str] = []
        """The addresses of all requests but data: and blob: ones."""
        (target,) = [
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        ]
        attach = {"targetId": target["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    @property
    def hosts(self) -> set[str]:
        """Every host and port that was asked for anything."""
        return {urlsplit(address).netloc for address in self.requests}

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._last:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _next(self) -> dict[str, Any]:
        while not self._messages:
            ready, _, _ = select.select([self._read], [], [], PATIENCE)
            assert ready, f"the browser says nothing for {PATIENCE} s"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser is gone"
            *whole, self._rest = (self._rest + data).split(b"\0")
            self._messages += map(json.loads, whole)
        return self._messages.popleft()

    def _note(self, event: dict[str, Any]) -> None:
        method, found = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent" and urlsplit(
            found["request"]["url"]
        ).scheme not in ("data", "blob"):
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "assert"):
            self.errors.append(json.dumps(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(json.dumps(found["entry"]))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Return as soon as an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, (
                f"{script} does not come true; the page reads: {self.text('body')[:2000]}"
            )
            time.sleep(0.05)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def text(self, selector: str) -> str:
        """What is to be read in the first element that a selector names."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector: str) -> list[str]:
        """The same of all of them."""
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
        )

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which is scrolled into sight."""
        find = f"document.querySelector({json.dumps(selector)})"
        self.wait(f"!!{find} && {find}.offsetParent !== null")
        box = self.run(
            f"(() => {{ const e = {find}; e.scrollIntoView({{block: 'center'}}); const b = "
            "e.getBoundingClientRect(); return {x: b.x + b.width / 2, y: b.y + b.height / 2}; "
            "})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def type(self, selector: str, text: str) -> None:
        """Click into a field, replace what stands there, and press Enter."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                windowsVirtualKeyCode=13,
                text="\r",
            )

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The screen's size in CSS pixels, and whether the reader asked for dark colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def scrolls_sideways(self) -> bool:
        return self.run("document.documentElement.scrollWidth > window.innerWidth")

    def picture(self, path: Path, whole: bool = False) -> Path:
        """A PNG of what is seen, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

"""A headless Chromium that tests drive by the DevTools protocol over two pipes: a page is opened, asked and pictured."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support import genuine

_PATIENCE_S = 90.0


class Browser:
    """One page of one browser. `console`: what it said of errors, and of what the page was not allowed to do."""

    def __init__(self, process: subprocess.Popen[bytes], to_it: int, from_it: int) -> None:
        self._process, self._to, self._from = process, to_it, from_it
        self._number, self._buffer = 0, b""
        self.console: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = str(self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _call(self, method: str, params: dict[str, Any], **more: str) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **more}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])
            self._note(found)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to the page. Events that come meanwhile are noted."""
        return self._call(method, params, sessionId=self._session)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._from, 1 << 20) if ready else b""
            assert piece, f"the browser does not answer (status {self._process.poll()})"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.console.append(str(params["entry"]["text"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(str(details.get("exception", {}).get("description") or details["text"]))

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )
        self.call("Page.navigate", url="about:blank")  # what the page before still asks for is not this one's
        self.until("location.href === 'about:blank'")
        self.console.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page, of a promise what it gives."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Ask until an expression is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            value = self.run(expression)
            if value:
                return value
            assert time.monotonic() < deadline, (expression, self.console, self.run("document.body.innerText"))
            time.sleep(0.05)

    def key(self, key: str) -> None:
        """Press a key: `j`, `Enter`."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27}.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def picture(self, path: Path) -> None:
        """What is seen now, as PNG."""
        found = self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose files lie in `folder`. Raises genuine.Unavailable."""
    program, environment = genuine.chromium()
    command_read, to_it = os.pipe()
    from_it, answer_write = os.pipe()

    def pipes() -> None:
        # The protocol's: 3 is read, 4 is written. Away from both first, for they may be among ours.
        read, write = os.dup(command_read), os.dup(answer_write)
        while read in (3, 4) or write in (3, 4):
            read, write = os.dup(read), os.dup(write)
        os.dup2(read, 3)
        os.dup2(write, 4)

    options = [
        "--remote-debugging-pipe",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--headless"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [str(program), *options, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            env={**os.environ, "HOME": str(folder), **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=pipes, close_fds=False,  # noqa: PLW1509 - it only moves descriptors
        )  # fmt: skip
    os.close(command_read)
    os.close(answer_write)
    try:
        yield Browser(process, to_it, from_it)
    finally:
        os.close(to_it)  # it ends when nobody can command it any more
        os.close(from_it)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

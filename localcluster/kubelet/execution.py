"""`kubectl exec`: a command's streams over a WebSocket, as kubelet serves them (v5.channel.k8s.io, v4.channel.k8s.io).

The first byte of each message is its channel. https://github.com/kubernetes/enhancements, KEP 4006.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import select
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from typing import Any

import websocket

JsonObject = dict[str, Any]
Start = Callable[[Sequence[int], bool], "subprocess.Popen[bytes]"]
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_CHUNK_BYTES = 32 * 1024
_LOOK_SECONDS = 0.2


class NoWebSocket(Exception):
    """The request can't become a WebSocket of ours; the message says why."""


def accept(headers: Message) -> list[tuple[str, str]]:
    """The headers that accept the upgrade. Raises NoWebSocket."""
    key = headers.get("Sec-WebSocket-Key", "")
    if headers.get("Upgrade", "").lower() != "websocket" or not key:
        raise NoWebSocket("exec is served over WebSockets alone: use kubectl 1.31 or newer, or `localcluster exec`")
    offered = [name.strip() for name in headers.get("Sec-WebSocket-Protocol", "").split(",")]
    chosen = next((name for name in PROTOCOLS if name in offered), None)
    if chosen is None:
        raise NoWebSocket(f"of the protocols {', '.join(offered)} none is served; these are: {', '.join(PROTOCOLS)}")
    proof = base64.b64encode(hashlib.sha1(key.encode() + _KEY, usedforsecurity=False).digest()).decode()
    return [
        ("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", proof),
        ("Sec-WebSocket-Protocol", chosen),
    ]  # fmt: skip


class Session:
    """One command and its client. `over`: the container has ended, so must this."""

    def __init__(self, connection: socket.socket, query: Mapping[str, str], over: Callable[[], bool]) -> None:
        self._connection, self._over = connection, over
        self._terminal = query.get("tty") in ("1", "true")
        self._wanted = {name for name in ("stdin", "stdout", "stderr") if query.get(name) in ("1", "true")}
        self._sending = threading.Lock()
        self._gone = False
        self._input = -1
        self._outputs: dict[int, int] = {}  # our end -> channel
        self._streams: list[int] = []

    def run(self, start: Start) -> None:
        """Start the command, pass everything on, and tell how it ended."""
        self._open()
        try:
            process = start(self._streams, self._terminal)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is to read it
            self._finish({"status": "Failure", "reason": "InternalError", "message": str(error)})
            return
        finally:
            for stream in set(self._streams):
                os.close(stream)
        reader = threading.Thread(target=self._read, name="exec stdin", daemon=True)
        reader.start()
        try:
            self._pass_on(process)
        except BaseException:
            _kill(process)
            raise
        finally:
            self._finish(_verdict(process))
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)

    def _open(self) -> None:
        if self._terminal:
            own, theirs = os.openpty()
            self._input, self._outputs, self._streams = own, {own: STDOUT}, [theirs] * 3
            return
        stdin, self._input = os.pipe()
        pairs = [os.pipe(), os.pipe()]
        self._outputs = dict(zip((own for own, _ in pairs), (STDOUT, STDERR), strict=True))
        self._streams = [stdin, *(theirs for _, theirs in pairs)]
        if "stdin" not in self._wanted:
            self._close_input()

    def _close_input(self) -> None:
        if self._terminal:
            with contextlib.suppress(OSError):
                os.write(self._input, b"\x04")
        elif self._input >= 0:
            os.close(self._input)
            self._input = -1

    def _send(self, channel: int, data: bytes, opcode: int = websocket.ABNF.OPCODE_BINARY) -> None:
        frame = websocket.ABNF.create_frame(bytes([channel]) + data if channel >= 0 else data, opcode)
        frame.mask_value = 0  # a server's frames are not masked
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(frame.format())

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        self._send(STDOUT, b"")  # tells the client that the connection is made
        open_ends = dict(self._outputs)
        while open_ends:
            for end in select.select(list(open_ends), [], [], _LOOK_SECONDS)[0]:
                try:
                    data = os.read(end, _CHUNK_BYTES)
                except OSError:  # a terminal whose last user is gone
                    data = b""
                if data:
                    self._send(open_ends[end], data)
                else:
                    open_ends.pop(end)
            if self._over() or self._gone:
                _kill(process)
            if process.poll() is not None and not select.select(list(open_ends), [], [], 0)[0]:
                break

    def _read(self) -> None:
        """Everything that the client sends, until it goes."""

        def receive(count: int) -> bytes:
            data = self._connection.recv(count)
            if not data:
                raise ConnectionError
            return data

        frames = websocket.frame_buffer(receive, skip_utf8_validation=True)
        try:
            while True:
                frame = frames.recv_frame()
                data = frame.data if isinstance(frame.data, bytes) else frame.data.encode()
                if frame.opcode == websocket.ABNF.OPCODE_PING:
                    self._send(-1, data, websocket.ABNF.OPCODE_PONG)
                elif frame.opcode == websocket.ABNF.OPCODE_CLOSE:
                    break
                elif data:
                    self._take(data[0], data[1:])
        except (OSError, websocket.WebSocketException, ValueError, struct.error):
            pass
        self._gone = True

    def _take(self, channel: int, data: bytes) -> None:
        if channel == STDIN and self._input >= 0:
            with contextlib.suppress(OSError):  # a command that has closed it
                while data:
                    data = data[os.write(self._input, data) :]
        elif channel == RESIZE and self._terminal:
            size = json.loads(data)
            rows, columns = int(size["Height"]), int(size["Width"])
            fcntl.ioctl(self._input, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        elif channel == CLOSE and data[:1] == bytes([STDIN]):
            self._close_input()

    def _finish(self, status: JsonObject) -> None:
        self._send(ERROR, json.dumps({"metadata": {}, **status}).encode())
        self._send(-1, struct.pack("!H", 1000), websocket.ABNF.OPCODE_CLOSE)
        for end in {*self._outputs, *([self._input] if self._input >= 0 else [])}:
            os.close(end)
        self._input = -1


def _kill(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(b"KILL\n")
        process.stdin.flush()


def _verdict(process: subprocess.Popen[bytes]) -> JsonObject:
    """How it ended, as the API says it."""
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    state = json.loads(lines[-1]) if lines else {"phase": "failed", "error": "its monitor ended", "exit_code": 128}
    code = state["exit_code"]
    if state["phase"] == "failed":
        return {"status": "Failure", "reason": "InternalError", "message": state["error"]}
    if not code:
        return {"status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code)}
    message = f"command terminated with non-zero exit code {code}"
    return {"status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": {"causes": [cause]}}

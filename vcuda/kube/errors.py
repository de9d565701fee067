"""What can go wrong with the API server. Whoever catches KubeError has caught it all."""

from __future__ import annotations

from vcuda.printable import told

MOST_SAID = 200  # characters of what a server says: it goes into a log's line


class KubeError(Exception):
    """A request failed, or could not be made. `status`: the HTTP status, if an answer came."""

    status: int | None = None

    def __init__(self, message: str = "") -> None:
        """`message` may quote a server: a proxy's page is of any length and form."""
        super().__init__(told(message))


class ApiError(KubeError):
    """The server answered with an error, so nothing that was asked for was done.

    `message` is told in one line, of MOST_SAID characters at most.
    """

    status: int

    def __init__(self, status: int, message: str, who: str = "the API server") -> None:
        super().__init__(f"{who} answered {status}: {told(' '.join(message.split()), MOST_SAID)}")
        self.status = status


class ApiUnreachable(KubeError):
    """No whole answer came: whether the request took effect is unknown."""


class NoConfiguration(KubeError):
    """There is no usable kubeconfig and no service account; the message says which, and why."""


class BadName(KubeError, ValueError):
    """What should go into a URL is not the name of a Kubernetes object. Nothing was sent."""

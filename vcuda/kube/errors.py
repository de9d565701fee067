"""What can go wrong with the API server. Whoever catches KubeError has caught it all."""

from __future__ import annotations

MOST_SAID = 200  # characters of what a server says: it goes into a log's line


class KubeError(Exception):
    """A request failed, or could not be made. `status`: the HTTP status, if an answer came."""

    status: int | None = None


class ApiError(KubeError):
    """The server answered with an error, so nothing that was asked for was done.

    `message` may be of any length and form: it is told in one line, of MOST_SAID characters at most.
    """

    status: int

    def __init__(self, status: int, message: str, who: str = "the API server") -> None:
        super().__init__(f"{who} answered {status}: {' '.join(message.split())[:MOST_SAID]}")
        self.status = status


class ApiUnreachable(KubeError):
    """No whole answer came: whether the request took effect is unknown."""


class NoConfiguration(KubeError):
    """There is no usable kubeconfig and no service account; the message says which, and why."""


class BadName(KubeError, ValueError):
    """What should go into a URL is not the name of a Kubernetes object. Nothing was sent."""

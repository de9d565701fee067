"""API errors: each is a Kubernetes Status object with its HTTP code and stable reason."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]


class ApiError(Exception):
    """A request that is refused. `reason` is the machine-readable Status reason."""

    def __init__(self, code: int, reason: str, message: str, details: JsonObject | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}

    def status(self) -> JsonObject:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "details": self.details, "code": self.code,
        }  # fmt: skip


def bad_request(message: str) -> ApiError:
    """What can't be parsed, or is not valid."""
    return ApiError(400, "BadRequest", message)


def not_found(resource: str, name: str) -> ApiError:
    """`resource` is its plural name, such as "pods"."""
    return ApiError(404, "NotFound", f'{resource} "{name}" not found', {"name": name, "kind": resource})


def already_exists(resource: str, name: str) -> ApiError:
    """A creation under a name that is taken."""
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists', {"name": name, "kind": resource})


def conflict(resource: str, name: str, why: str) -> ApiError:
    """A write whose version or UID is another than the object's."""
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource} "{name}": {why}',
        {"name": name, "kind": resource},
    )


def expired(version: int) -> ApiError:
    """A watch from a version that is no longer known."""
    return ApiError(410, "Expired", f"too old resource version: {version}; list again")


def invalid(kind: str, name: str, causes: list[tuple[str, str]]) -> ApiError:
    """422 with one cause per (field, message)."""
    text = "; ".join(f"{field}: {message}" for field, message in causes)
    details = {
        "name": name, "kind": kind,
        "causes": [{"reason": "FieldValueInvalid", "field": field, "message": message} for field, message in causes],
    }  # fmt: skip
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details)

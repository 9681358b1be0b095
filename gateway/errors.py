"""Errors of the gateway.

Each knows the HTTP status it is answered with; a dialect words it in its own shape. They survive
pickling (they cross Ray) and subclass the matching built-in::

    GatewayError                                      500
    ├── GatewayConfigError(ValueError)                 –    the gateway cannot start as configured
    ├── PortInUseError(OSError)                        –    gateway.port is taken
    ├── RequestError(ValueError)                      400   a field of the request (`.param`)
    │   ├── ContextLengthError                        400   the prompt does not fit
    │   └── BodyTooLargeError                         413
    ├── PathError(LookupError)                        404   (or 405)
    ├── TrajectoryConflictError(RuntimeError)         409   the trajectory is registered otherwise
    ├── TrajectoryClosedError(RuntimeError)           410   complete, aborted, or dropped
    ├── EngineError(RuntimeError)                     502   the engine answered nonsense
    │   ├── EngineUnavailableError(ConnectionError)   503   no engine answered
    │   └── EngineTimeoutError(TimeoutError)          504
    └── PoolUnavailableError(ConnectionError)         503   the Step could not be stored
"""

from __future__ import annotations

from typing import ClassVar


class GatewayError(Exception):
    """Base of all errors that the gateway raises."""

    status: int = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    @property
    def param(self) -> str | None:
        """The request's field that is at fault, if one is."""
        return None

    def headers(self) -> dict[str, str]:
        """Of the HTTP answer, beside the usual ones."""
        return {}

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class GatewayConfigError(GatewayError, ValueError):
    """The gateway cannot start as configured."""


class PortInUseError(GatewayError, OSError):
    """`gateway.port` is taken."""


class RequestError(GatewayError, ValueError):
    """A request's field is malformed or unsupported: `RequestError(message, param)`."""

    status = 400
    kind = "invalid_request_error"

    @property
    def param(self) -> str | None:
        return self.args[1] if len(self.args) > 1 else None


class ContextLengthError(RequestError):
    """The prompt leaves no room for a response."""

    code = "context_length_exceeded"


class BodyTooLargeError(RequestError):
    """The request's body exceeds `gateway.max_body_bytes`."""

    status = 413


class PathError(GatewayError, LookupError):
    """No such path, or not with this method."""

    status = 404
    kind = "invalid_request_error"


class TrajectoryConflictError(GatewayError, RuntimeError):
    """The trajectory exists with another prompt_uid, channel or outcome."""

    status = 409
    kind = "invalid_request_error"
    code = "trajectory_conflict"


class TrajectoryClosedError(GatewayError, RuntimeError):
    """The trajectory takes no more Steps."""

    status = 410
    kind = "invalid_request_error"
    code = "trajectory_closed"


class EngineError(GatewayError, RuntimeError):
    """An engine's answer cannot be used."""

    status = 502
    code = "engine_error"


class EngineUnavailableError(EngineError, ConnectionError):
    """No engine could be reached within the allowed tries."""

    status = 503
    code = "engine_unavailable"


class EngineTimeoutError(EngineError, TimeoutError):
    """The call took longer than `gateway.request_timeout_s`."""

    status = 504
    code = "engine_timeout"


class PoolUnavailableError(GatewayError, ConnectionError):
    """The DataPool did not store the Step; nothing was acknowledged."""

    status = 503
    code = "pool_unavailable"

"""Errors of the gateway.

Each knows the HTTP status it is answered with; a dialect words it in its own shape. They survive
pickling (they cross Ray) and subclass the matching built-in::

    GatewayError                                      500
    ├── GatewayConfigError(ValueError)                 –    the gateway cannot start as configured
    ├── PortInUseError(OSError)                        –    gateway.port is taken
    ├── RequestError(ValueError)                      400   a field of the request (`.param`)
    │   ├── ContextLengthError                        400   the prompt does not fit
    │   ├── TrajectoryLimitError                      400   no turns or tokens left
    │   ├── BodyTooLargeError                         413
    │   ├── MediaTypeError                            415   the body is not said to be JSON
    │   ├── HeaderTooLargeError                       431
    │   ├── PreviousResponseError                     400   `previous_response_id` is not stored
    │   └── UnknownItemError                          404   nor is this response or item
    ├── AuthenticationError(PermissionError)          401   no key, or none that is known
    ├── PermissionDeniedError(PermissionError)        403   the key is not for this
    │   ├── HostError                                 403   the request is for another host
    │   └── OriginError                               403   it comes from another site's page
    ├── PathError(LookupError)                        404   (or 405)
    ├── BodyTimeoutError(TimeoutError)                408   the request's body did not arrive
    ├── HeaderTimeoutError(TimeoutError)              408   nor did its headers
    ├── TooManyConnectionsError(RuntimeError)         503   of this peer, without a key
    ├── TrajectoryConflictError(RuntimeError)         409   the trajectory is registered otherwise
    ├── TrajectoryClosedError(RuntimeError)           410   complete, aborted, or dropped
    ├── RateLimitedError(RuntimeError)                429   no room within the time to queue
    ├── EngineError(RuntimeError)                     502   the engine answered nonsense
    │   ├── EngineUnavailableError(ConnectionError)   503   no engine answered
    │   └── EngineTimeoutError(TimeoutError)          504
    └── PoolUnavailableError(ConnectionError)         503   the DataPool did not answer
        ├── ChannelFullError                          503   the channel takes no new group now
        └── PoolStorageError                          503   its journal cannot be written or read
"""

from __future__ import annotations

from math import ceil
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
    """The prompt leaves no room for a response: (message, param, tokens of the prompt, limit)."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, n: int, context: int, *, at_least: bool = False) -> ContextLengthError:
        """For a prompt of `n` tokens, or of more."""
        return cls(
            f"This model's maximum context length is {context} tokens. However, your messages "
            f"resulted in {'at least ' if at_least else ''}{n} tokens. Please reduce the length of "
            "the messages.",
            "messages",
            n,
            context,
        )

    @property
    def tokens(self) -> tuple[int, int] | None:
        """Of the prompt, and the limit, where they are known."""
        return (self.args[2], self.args[3]) if len(self.args) == 4 else None


class TrajectoryLimitError(RequestError):
    """The trajectory has all the turns or tokens it may have."""

    code = "trajectory_limit_exceeded"


class BodyTooLargeError(RequestError):
    """The request's body exceeds `gateway.max_body_bytes`."""

    status = 413


class MediaTypeError(RequestError):
    """The request's body is not said to be JSON. Not read as such on purpose: a web page could send
    a form to a server on loopback."""

    status = 415


class HeaderTooLargeError(RequestError):
    """The request's headers exceed `gateway.max_header_bytes`."""

    status = 431


class PreviousResponseError(RequestError):
    """`previous_response_id` names no response that is stored here."""

    code = "previous_response_not_found"


class UnknownItemError(RequestError):
    """No response or item of this id is stored here."""

    status = 404


class AuthenticationError(GatewayError, PermissionError):
    """The request carries no key, or none that is known."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class PermissionDeniedError(GatewayError, PermissionError):
    """The key is known, but not for this endpoint or trajectory."""

    status = 403
    kind = "permission_error"
    code = "permission_denied"


class HostError(PermissionDeniedError):
    """The request's Host is no name of this gateway."""

    code = "host_not_allowed"


class OriginError(PermissionDeniedError):
    """The request's Origin is another site's page."""

    code = "origin_not_allowed"


class PathError(GatewayError, LookupError):
    """No such path, or not with this method."""

    status = 404
    kind = "invalid_request_error"


class BodyTimeoutError(GatewayError, TimeoutError):
    """The request's body did not arrive within `gateway.body_timeout_s`."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"

    def headers(self) -> dict[str, str]:
        # What still comes of the body is not read.
        return {"connection": "close"}


class HeaderTimeoutError(GatewayError, TimeoutError):
    """The request's headers did not arrive within `gateway.header_timeout_s`."""

    status = 408
    kind = "invalid_request_error"
    code = "request_timeout"


class TooManyConnectionsError(GatewayError, RuntimeError):
    """A peer has `gateway.max_unauthenticated_connections`."""

    status = 503
    code = "too_many_connections"

    def headers(self) -> dict[str, str]:
        return {"retry-after": "1"}


class TrajectoryConflictError(GatewayError, RuntimeError):
    """The trajectory exists with another prompt_uid, channel or outcome."""

    status = 409
    kind = "invalid_request_error"
    code = "trajectory_conflict"

    def headers(self) -> dict[str, str]:
        """The SDKs would try a 409 again."""
        return {"x-should-retry": "false"}


class TrajectoryClosedError(GatewayError, RuntimeError):
    """The trajectory takes no more Steps."""

    status = 410
    kind = "invalid_request_error"
    code = "trajectory_closed"


class RateLimitedError(GatewayError, RuntimeError):
    """No room within `gateway.queue_timeout_s`: `RateLimitedError(message, retry_after_s)`."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    @property
    def retry_after_s(self) -> float:
        return float(self.args[1]) if len(self.args) > 1 else 1.0

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(ceil(self.retry_after_s))}


class EngineError(GatewayError, RuntimeError):
    """An engine's answer cannot be used: (what an agent may read, what only the log may hold)."""

    status = 502
    code = "engine_error"

    @property
    def detail(self) -> str:
        """Addresses, files and the engine's own words."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class EngineUnavailableError(EngineError, ConnectionError):
    """No engine could be reached within the allowed tries."""

    status = 503
    code = "engine_unavailable"

    def headers(self) -> dict[str, str]:
        return {"retry-after": "5"}  # one that is started again loads its model first


class EngineTimeoutError(EngineError, TimeoutError):
    """The call took longer than `gateway.request_timeout_s`."""

    status = 504
    code = "engine_timeout"


class PoolUnavailableError(GatewayError, ConnectionError):
    """The DataPool did not store the Step; nothing was acknowledged."""

    status = 503
    code = "pool_unavailable"
    retry_after_s: ClassVar[int] = 1

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s)}


class ChannelFullError(PoolUnavailableError):
    """The channel holds all that it may (`overflow: block`) until something is leased."""

    code = "channel_full"
    retry_after_s = 5


class PoolStorageError(PoolUnavailableError):
    """The DataPool's journal cannot be written or read; mostly, its disk is full."""

    code = "pool_storage_error"
    retry_after_s = 10

"""Errors of the gateway.

Each knows the HTTP status it is answered with; a dialect words it in its own shape. They survive
pickling (they cross Ray) and subclass the matching built-in::

    GatewayError                                      500
    ├── GatewayConfigError(ValueError)                 –    the gateway cannot start as configured
    ├── PortInUseError(OSError)                        –    gateway.port is taken
    ├── RequestError(ValueError)                      400   a field of the request (`.param`)
    │   ├── ContextLengthError                        400   the prompt does not fit
    │   ├── TrajectoryLimitError                      400   no turns left
    │   ├── BodyTooLargeError                         413
    │   ├── MediaTypeError                            415   the body is not said to be plain JSON
    │   ├── HeaderTooLargeError                       431
    │   ├── PictureFoundError                         400   a picture, and only text is taken
    │   ├── PreviousResponseError                     400   `previous_response_id` is not stored
    │   └── UnknownItemError                          404   nor is this response or item
    ├── AuthenticationError(PermissionError)          401   no key, or none that is known
    ├── PermissionDeniedError(PermissionError)        403   the key is not for this
    │   ├── HostError                                 403   the request is for another host
    │   └── OriginError                               403   it comes from another site's page
    ├── PathError(LookupError)                        404   (or 405)
    ├── ClientTimeoutError(TimeoutError)              408   headers or body did not arrive
    ├── TooManyConnectionsError(RuntimeError)         503   of this peer, without a key
    ├── ReplicaUnavailableError(ConnectionError)      503   it may still know what was deleted
    ├── FileDeletionError(OSError)                    503   a file of the run may still hold it
    ├── RateLimitedError(RuntimeError)                429   no room within the time to queue
    ├── EngineError(RuntimeError)                     502   the engine answered nonsense
    │   ├── EngineUnavailableError(ConnectionError)   503   no engine answered
    │   └── EngineTimeoutError(TimeoutError)          504
    └── PoolError                                           as `_ANSWERS` has it

Trajectories that are closed, or registered otherwise, and a pool that does not answer are the
pool's own errors (`datapool/errors.py`), whichever of the two found it out. `from_pool` says how a
client is told them: 409, 410, 503, …
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Final, NamedTuple

from stepwell.datapool import errors as pool


class GatewayError(Exception):
    """Base of all errors that the gateway raises. Subclasses name what differs from it."""

    status: int = 500
    kind: str = "server_error"
    code: str | None = None
    retry_after_s: float | None = None
    more_headers: Mapping[str, str] = {}
    """Headers of the HTTP response beside the usual ones."""

    def __init_subclass__(
        cls,
        status: int | None = None,
        kind: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        cls.status = status or cls.status
        cls.kind = kind or cls.kind
        cls.code = code or cls.code
        cls.retry_after_s = retry_after_s or cls.retry_after_s
        cls.more_headers = headers or cls.more_headers

    @property
    def param(self) -> str | None:
        """The request's field that is at fault, if one is."""
        return None

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return dict(self.more_headers)
        return {"retry-after": str(ceil(self.retry_after_s)), **self.more_headers}

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class GatewayConfigError(GatewayError, ValueError):
    """The gateway cannot start as configured."""


class PortInUseError(GatewayError, OSError):
    """`gateway.port` is taken."""


class RequestError(GatewayError, ValueError, status=400, kind="invalid_request_error"):
    """A request's field is malformed or unsupported: `RequestError(message, param)`."""

    @property
    def param(self) -> str | None:
        return self.args[1] if len(self.args) > 1 else None


class ContextLengthError(RequestError, code="context_length_exceeded"):
    """The prompt leaves no room for a response: (message, param, tokens of the prompt, limit)."""

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
        """Tokens of the prompt, and the limit; None: they are not known."""
        return (self.args[2], self.args[3]) if len(self.args) == 4 else None


class TrajectoryLimitError(RequestError, code="trajectory_limit_exceeded"):
    """The trajectory has all the turns or tokens it may have."""


class BodyTooLargeError(RequestError, status=413):
    """The request's body exceeds `gateway.max_body_bytes`."""


class MediaTypeError(RequestError, status=415):
    """The request's body is not said to be JSON, or is compressed. Not read as JSON on purpose: a
    web page could send a form to a server on loopback."""


class HeaderTooLargeError(RequestError, status=431):
    """The request's headers exceed `Tuning.max_header_bytes`."""


class PictureFoundError(RequestError):
    """A body holds a picture. Where the model takes pictures they are taken out of the body, which
    is then read again; anywhere else this is the answer."""

    @classmethod
    def at(cls, where: str) -> PictureFoundError:
        return cls(
            f"{where} is a picture, and only text is taken here; send text, or serve a model with "
            "vision (docs/images.md)",
            where,
        )


class PreviousResponseError(RequestError, code="previous_response_not_found"):
    """`previous_response_id` names no response that is stored here."""


class UnknownItemError(RequestError, status=404):
    """No response or item of this id is stored here."""


class AuthenticationError(
    GatewayError,
    PermissionError,
    status=401,
    kind="authentication_error",
    code="invalid_api_key",
    headers={"www-authenticate": "Bearer"},
):
    """The request carries no key, or none that is known."""


class PermissionDeniedError(
    GatewayError, PermissionError, status=403, kind="permission_error", code="permission_denied"
):
    """The key is known, but not for this endpoint or trajectory."""


class HostError(PermissionDeniedError, code="host_not_allowed"):
    """The request's Host is no name of this gateway."""


class OriginError(PermissionDeniedError, code="origin_not_allowed"):
    """The request's Origin is another site's page."""


class PathError(GatewayError, LookupError, status=404, kind="invalid_request_error"):
    """No such path, or not with this method."""


class ClientTimeoutError(
    GatewayError,
    TimeoutError,
    status=408,
    kind="invalid_request_error",
    code="request_timeout",
    headers={"connection": "close"},  # what still comes of the request is not read
):
    """The request's headers or its body did not arrive in time."""


class TooManyConnectionsError(
    GatewayError, RuntimeError, status=503, code="too_many_connections", retry_after_s=1
):
    """A peer has `Tuning.max_unauthenticated_connections` without a key."""


class ReplicaUnavailableError(
    GatewayError, ConnectionError, status=503, code="replica_unavailable", retry_after_s=1
):
    """A trajectory is deleted, but another replica may still have its stored responses."""


class FileDeletionError(GatewayError, OSError, status=503, code="file_deletion_failed"):
    """A trajectory is deleted from the pool, but the archive or the trainer's copies may still hold
    it."""


class RateLimitedError(
    GatewayError,
    RuntimeError,
    status=429,
    kind="rate_limit_error",
    code="rate_limit_exceeded",
    retry_after_s=1,  # whoever is refused has waited already, and may queue again at once
):
    """No room within `gateway.queue_timeout_s`: `RateLimitedError(message, retry_after_s)`."""

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(ceil(self.args[1]))} if len(self.args) > 1 else super().headers()


class EngineError(GatewayError, RuntimeError, status=502, code="engine_error"):
    """An engine's answer cannot be used: (what an agent may read, what only the log may hold)."""

    @property
    def detail(self) -> str:
        """Addresses, files and the engine's own words."""
        return str(self.args[1]) if len(self.args) > 1 else ""


class EngineUnavailableError(
    EngineError,
    ConnectionError,
    status=503,
    code="engine_unavailable",
    retry_after_s=5,  # one that is started again loads its model first
):
    """No engine could be reached within the allowed tries."""


class EngineTimeoutError(EngineError, TimeoutError, status=504, code="engine_timeout"):
    """The call took longer than `gateway.request_timeout_s`."""


# -- the pool's -------------------------------------------------------------------------------


class PoolSilentError(pool.PoolUnavailableError):
    """The pool did not answer in time, or at all; whether it applied the call is not known. Its
    message names no nodes and files."""


UNAVAILABLE: Final = (pool.PoolUnavailableError, pool.PoolFullError, pool.JournalError)
"""Errors after which nothing is acknowledged, and the very same may be sent again."""


class PoolError(GatewayError):
    """An error of the pool as clients are told it; the table below has its status and words."""


class _Answer(NamedTuple):
    """Answer to an error of the pool; `{}` are its own words. Failures of the pool are told without
    addresses and files."""

    status: int
    code: str
    words: str = "{}"
    retry_after_s: float | None = None
    headers: Mapping[str, str] = {}
    kind: str = "server_error"


_CONFLICT = _Answer(
    409,
    "trajectory_conflict",
    headers={"x-should-retry": "false"},  # the SDKs would try a 409 again
    kind="invalid_request_error",
)
_CLOSED = _Answer(410, "trajectory_closed", kind="invalid_request_error")
_ANSWERS: Final[Mapping[type[pool.DataPoolError], _Answer]] = {
    pool.UnknownPictureError: _Answer(404, "unknown_picture", kind="invalid_request_error"),
    pool.PoolFullError: _Answer(
        503, "channel_full", "the DataPool takes no new group now: {}", retry_after_s=5
    ),
    PoolSilentError: _Answer(503, "pool_unavailable", retry_after_s=1),
    pool.PoolUnavailableError: _Answer(
        503,
        "pool_unavailable",
        "the DataPool cannot be reached; see the gateway's log",
        retry_after_s=1,
    ),
    pool.JournalFullError: _Answer(
        503,
        "pool_storage_error",
        "the DataPool's disk is full, so nothing can be stored; free space there and try again",
        retry_after_s=10,
    ),
    pool.JournalError: _Answer(
        503,
        "pool_storage_error",
        "the DataPool's journal cannot be used; see the gateway's log",
        retry_after_s=10,
    ),
    pool.NotOwnerError: _Answer(403, "permission_denied", kind="permission_error"),
    pool.TrajectoryClosedError: _CLOSED,
    pool.TrajectoryCompletedError: _CLOSED._replace(code="trajectory_completed"),
    pool.GroupClosedError: _CLOSED,
    pool.StepConflictError: _CONFLICT,
    pool.StepIndexError: _CONFLICT,
    pool.TrajectoryConflictError: _CONFLICT,
    pool.GroupConflictError: _CONFLICT,
    pool.ChannelShutDownError: _CONFLICT,
    pool.LeaseExpiredError: _CONFLICT,
    pool.LeaseClosedError: _CONFLICT,
}
"""The answer to each error that the pool raises, or the gateway in its place; of an error whose
class is not here, that of its base. Any other is the fault of what was sent (400)."""


def from_pool(e: pool.DataPoolError) -> GatewayError:
    """The error that a client is told for `e`."""
    answer = next((_ANSWERS[kind] for kind in type(e).__mro__ if kind in _ANSWERS), None)
    if answer is None:
        return RequestError(str(e), None)
    told = PoolError(answer.words.format(e))
    told.status, told.kind, told.code = answer.status, answer.kind, answer.code
    told.retry_after_s, told.more_headers = answer.retry_after_s, dict(answer.headers)
    return told

"""Errors of the engines and training backends.

Each names the replica or field, its value and the remedy, survives pickling (they cross Ray) and
also subclasses the matching built-in::

    BackendError
    ├── EngineError
    │   ├── EngineStartError(RuntimeError)          an engine process did not come up
    │   ├── EngineUnavailableError(ConnectionError) nobody answers at the engine's address
    │   ├── EngineTimeoutError(TimeoutError)        it answers, but not in time
    │   ├── EngineRequestError(ValueError)          it refused the request (HTTP 4xx)
    │   └── EngineInternalError(RuntimeError)       it failed at the request (HTTP 5xx)
    ├── WeightUpdateError(RuntimeError)             a weight publication did not commit
    ├── SupersededError(RuntimeError)               another version was committed meanwhile
    ├── VersionNotKeptError(LookupError)         a version's weights are not on disk any more
    ├── BackendConfigError(ValueError)              no such backend or engine, or not so configured
    ├── BatchError(ValueError)                      steps or indices that no batch can be made of
    ├── MaskError(ValueError)                       no exact loss mask of these messages
    ├── PictureError(ValueError)                    a picture that is not read, and why
    ├── NonFiniteUpdateError(ArithmeticError)       too many updates in a row were not finite
    ├── RankError(RuntimeError)                     a rank of a sharded backend died or failed alone
    └── UnsupportedByBackendError(NotImplementedError)  a method that this plug-in does not have
"""

from __future__ import annotations

from pathlib import Path


class BackendError(Exception):
    """Base of all errors that engines, weight publication and training backends raise."""


class EngineError(BackendError):
    """Base of the errors about an inference engine."""


class EngineStartError(EngineError, RuntimeError):
    """An engine process did not come up; the message ends with the last lines of its log."""


class EngineUnavailableError(EngineError, ConnectionError):
    """The engine's address does not answer: it is down, restarting, or the url is wrong. `refused`:
    its machine answers that nobody listens there, so the process is gone."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine is reachable but did not answer within the time limit."""


class EngineRequestError(EngineError, ValueError):
    """The engine refused a request.

    `status` is the HTTP status. `what` says it without an address, for those who must not know one;
    `words` are the engine's own.
    """

    def __init__(self, message: str, *, status: int = 400, what: str = "", words: str = "") -> None:
        super().__init__(message)
        self.status, self.what, self.words = status, what, words


class EngineInternalError(EngineError, RuntimeError):
    """The engine failed at a request, or its answer makes no sense (`status` 200). Fields as of
    `EngineRequestError`."""

    def __init__(self, message: str, *, status: int = 500, what: str = "", words: str = "") -> None:
        super().__init__(message)
        self.status, self.what, self.words = status, what, words


class WeightUpdateError(BackendError, RuntimeError):
    """A publication was not committed. `replica` is the url it failed on and `serving` maps every
    replica's url to the version it was left with (None: unreachable or left paused)."""

    def __init__(
        self,
        message: str,
        *,
        replica: str | None = None,
        serving: dict[str, int | None] | None = None,
    ) -> None:
        super().__init__(message)
        self.replica = replica
        self.serving = dict(serving or {})


class SupersededError(BackendError, RuntimeError):
    """Another version was committed than the one that the publisher has seen: a roll-back.
    `version` is its number."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version

    def __str__(self) -> str:
        return f"version {self.version} was committed meanwhile"


class WeightsNotWrittenError(BackendError, OSError):
    """A version's files could not be written; the versions before it are as they were."""


class VersionNotKeptError(BackendError, LookupError):
    """The weights of a version are not on disk any more, or never were."""


class BackendConfigError(BackendError, ValueError):
    """There is no such training backend or kind of engine here, or it cannot be built so."""


class BatchError(BackendError, ValueError):
    """Steps or indices that no training batch can be made of."""


def take_out(trajectory_uid: str) -> str:
    """Remedy for a step by which a run would end again at each start."""
    return (
        "If the step was submitted by hand, take out its group: stepwell data delete --trajectory "
        f"{trajectory_uid!r} RUN"
    )


class NonFiniteUpdateError(BackendError, ArithmeticError):
    """Too many optimizer updates in a row had a loss or gradient that is not finite."""


class RankError(BackendError, RuntimeError):
    """A rank of a sharded training backend died or failed alone; all of them were stopped."""


class MaskError(BackendError, ValueError):
    """No exact loss mask can be made of these messages; a wrong one is never returned."""


class PictureError(BackendError, ValueError):
    """A picture is refused; the message is the reason, for the one who sent it."""


class UnsupportedByBackendError(BackendError, NotImplementedError):
    """The training backend does not implement the method."""


def checkpoint_remedy(checkpoint: Path) -> str:
    """The end of an error about a damaged checkpoint: what a user does about it."""
    return (
        f"delete {checkpoint} to resume from an older checkpoint, or set run.resume=never to start "
        "over"
    )

"""Errors of the trainer.

Every error names the field or id, its value and the remedy, survives pickling and subclasses
the matching built-in::

    TrainerError
    ├── ConfigError(ValueError)               a key, type or value in the run's configuration
    ├── CheckpointError(RuntimeError)         a checkpoint that cannot be written or read
    │   └── NoCheckpointError(LookupError)        the one that was named is not there
    ├── DataError(ValueError)                 a data set, or a saved position in one
    │   ├── ReadOnlyDataError(RuntimeError)       groups for a data source that takes none
    │   └── GroupShapeError(AssertionError)       groups that are not what a data source gave
    ├── DataExhaustedError(LookupError)       all epochs of a data set were handed out
    ├── RewardError(ValueError)               why a score is missing; never taken for 0
    │   ├── RewardLoadError                       the configured reward is no reward function
    │   ├── RewardCrashError(RuntimeError)        it raised
    │   ├── RewardTimeoutError(TimeoutError)      it took too long
    │   └── RewardValueError                      it returned something that is no score
    ├── ToolConfigError(ValueError)           a tool that cannot be made; the run does not start
    ├── ToolError(ValueError)                 said to the model, in the tool message, as it stands
    ├── ToolUnavailableError(RuntimeError)    ends the rollout: aborted with this reason, not scored
    ├── VersionError(LookupError)             a step's policy version was never published
    ├── ColumnError(LookupError, ValueError)  a token column is missing or has the wrong length
    ├── StarvedError(TimeoutError)            no group became ready for too long
    ├── RolloutError(RuntimeError)            no agent can be run (import, gateway)
    ├── HarnessError(RuntimeError)            a rollout's command failed, or cannot be graded
    ├── InfrastructureError(RuntimeError)     the machine failed a rollout; it is made again
    └── RayEndedError(ConnectionError)        the Ray of the run has ended under it
"""

from __future__ import annotations

INTERRUPTED = "interrupted by the user"
"""Message of a task's cancellation that ends a run as its user asks, which may save; any other
cancellation means that a part of the run is gone."""


def shown(value: object) -> str:
    """Return the text of an exception, or of another value, of foreign code; empty if it has none:
    its `__str__` fails, or it is an integer of more digits than Python writes."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - foreign code
        return ""


def first_of(error: BaseException) -> BaseException:
    """Return the error that a task group has wrapped; of several, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class TrainerError(Exception):
    """Base of all errors that the trainer raises."""


class ConfigError(TrainerError, ValueError):
    """The configuration is wrong; one line per problem: key, value, remedy."""


class CheckpointError(TrainerError, RuntimeError):
    """A checkpoint cannot be written, or what is on disk is not a checkpoint of this run."""


class NoCheckpointError(CheckpointError, LookupError):
    """The checkpoint that was named is not there."""


class DataError(TrainerError, ValueError):
    """A data set cannot be read, or a saved state does not belong to it."""


class ReadOnlyDataError(DataError, RuntimeError):
    """Groups were added to a data source that takes none; slime raises the second base."""


class GroupShapeError(DataError, AssertionError):
    """Samples that were added to a data source are no groups of its size; slime raises the second
    base."""


class DataExhaustedError(TrainerError, LookupError):
    """All `epochs` of the source have been handed out."""


class RolloutError(TrainerError, RuntimeError):
    """No rollout can be run at all; the failure of one is an abort reason, not an error."""


class HarnessError(TrainerError, RuntimeError):
    """The agent failed, or what it left cannot be graded: the rollout is lost, and has no score."""


class InfrastructureError(TrainerError, RuntimeError):
    """The machine, a container or a service failed a rollout, not its agent: the attempt is made
    again and not counted."""


class RewardError(TrainerError, ValueError):
    """A trajectory has no (finite) reward; missing is not zero, so it cannot be trained on."""


class RewardLoadError(RewardError):
    """The configured reward is no reward function."""


class RewardCrashError(RewardError, RuntimeError):
    """The reward function raised."""


class RewardTimeoutError(RewardError, TimeoutError):
    """The reward function took too long."""


class RewardValueError(RewardError):
    """The reward function returned something that is no score."""


class ToolConfigError(TrainerError, ValueError):
    """A tool cannot be found or made."""


class ToolError(TrainerError, ValueError):
    """The call was wrong or came to nothing; the message is for the model to read. Whatever else a
    tool raises is said to the model too, with its type."""


class ToolUnavailableError(TrainerError, RuntimeError):
    """The tool does not work at all: the rollout is void, through no fault of the policy. For where
    going on would train the model on a failure of the machinery."""


class VersionError(TrainerError, LookupError):
    """A step carries a policy version that this run never published."""


class ColumnError(TrainerError, LookupError, ValueError):
    """A per-token or per-step column is missing or has the wrong length."""


class StarvedError(TrainerError, TimeoutError):
    """Training waits for data that does not come; the message says what the pool is waiting for."""


class RayEndedError(TrainerError, ConnectionError):
    """The Ray that the run started has ended; run the same command again."""

"""Errors of the DataPool.

Every error names the field or id, its value and the remedy, survives pickling (they cross Ray)
and also subclasses the matching built-in::

    DataPoolError
    ├── InvalidStepError(ValueError)          a Step that cannot be trained on
    ├── InvalidRequestError(ValueError)       an argument outside its range
    ├── StepConflictError(ValueError)         same (trajectory_uid, step_index), other content
    ├── UnknownBaseError(KeyError)            a step relative to one that is not stored
    ├── StepIndexError(ValueError)            contradicts the trajectory's is_last step
    ├── TrajectoryConflictError(ValueError)   trajectory_uid used under two prompt_uids
    ├── TrajectoryClosedError(ValueError)     contradicts how the trajectory was closed before
    ├── UnknownTrajectoryError(KeyError)
    ├── GroupConflictError(ValueError)        prompt_uid declared again, with other numbers
    ├── GroupClosedError(ValueError)          the group has left the pool, or is leased
    ├── UnknownGroupError(KeyError)
    ├── UnknownLeaseError(KeyError)
    ├── LeaseExpiredError(TimeoutError)       its groups went back to the pool
    ├── LeaseClosedError(ValueError)          ack after nack, or nack after ack
    ├── PoolFullError(TimeoutError)           no admission credit within timeout_s
    ├── ChannelShutDownError(RuntimeError)    no group can be opened any more
    ├── SelectionError(ValueError)            an order or filter failed, or does not exist
    ├── ExportError(ValueError)               a file that is no export, or a value that fits in none
    ├── JournalError(OSError)                 the journal cannot be read or written:
    │   ├── JournalFullError(OSError)           the disk is full; what was to be written is kept
    │   ├── JournalCorruptError(OSError)        the file is damaged
    │   ├── JournalVersionError(OSError)        another version wrote it
    │   ├── JournalLockedError(OSError)         another process has it open
    │   └── JournalFencedError(OSError)         a successor of this process has taken it over
    ├── ReplayError(ValueError)               the journal's rows contradict each other
    ├── PoolUnavailableError(ConnectionError) the actor cannot be reached
    └── PoolReplacedError(ConnectionError)    the pool is another one than before, or its journal is

What is merely late (a step for a group that was served meanwhile) is no error: it is the outcome
"late", because a producer can do nothing about it.
"""

from __future__ import annotations


class DataPoolError(Exception):
    """Base of all errors that the DataPool raises. Made from one message, so that it pickles."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a message should read the same everywhere.
        return Exception.__str__(self)


class InvalidStepError(DataPoolError, ValueError):
    """A Step's field is malformed."""


class InvalidRequestError(DataPoolError, ValueError):
    """An argument of a pool operation is outside its range."""


class StepConflictError(DataPoolError, ValueError):
    """A step with this trajectory_uid and step_index is stored with other content."""


class UnknownBaseError(DataPoolError, KeyError):
    """A step was sent relative to one that the pool does not hold; the client sends it whole."""


class StepIndexError(DataPoolError, ValueError):
    """The step's index contradicts the trajectory's `is_last` step."""


class TrajectoryConflictError(DataPoolError, ValueError):
    """The trajectory_uid belongs to another prompt_uid."""


class TrajectoryClosedError(DataPoolError, ValueError):
    """The trajectory was already completed or aborted, in a way that contradicts this call."""


class UnknownTrajectoryError(DataPoolError, KeyError):
    """The channel never saw this trajectory_uid."""


class GroupConflictError(DataPoolError, ValueError):
    """The group is already declared with other parameters."""


class GroupClosedError(DataPoolError, ValueError):
    """The group was acked or dropped, or is leased to a consumer."""


class UnknownGroupError(DataPoolError, KeyError):
    """The channel never saw this prompt_uid."""


class UnknownLeaseError(DataPoolError, KeyError):
    """The pool never gave out this lease_id (or its state did not survive a restart)."""


class LeaseExpiredError(DataPoolError, TimeoutError):
    """The lease ran out; its groups went back to the pool and may be with another consumer."""


class LeaseClosedError(DataPoolError, ValueError):
    """The lease was already acked or nacked, and this call says the opposite."""


class PoolFullError(DataPoolError, TimeoutError):
    """The channel holds `max_outstanding_groups` open and ready groups."""


class ChannelShutDownError(DataPoolError, RuntimeError):
    """The channel was shut down: it takes steps and serves what is ready, but opens no group."""


class SelectionError(DataPoolError, ValueError):
    """A selection is misconfigured, or one of its functions failed or answered nonsense."""


class ExportError(DataPoolError, ValueError):
    """A trajectory that no row can carry, or a file that is not a whole export of ours."""


class JournalError(DataPoolError, OSError):
    """The journal could not be read or written."""


class JournalFullError(JournalError):
    """The disk took no more; what was to be written is kept and goes with the next transaction."""


class JournalCorruptError(JournalError):
    """What the file holds is not what was written to it."""


class JournalVersionError(JournalError):
    """The file was written by another version of this schema."""


class JournalLockedError(JournalError):
    """A live process has the folder open."""


class JournalFencedError(JournalError):
    """This process was declared dead, and its successor writes the journal now."""


class ReplayError(DataPoolError, ValueError):
    """The journal's rows contradict each other."""


class PoolUnavailableError(DataPoolError, ConnectionError):
    """The pool's actor is dead, restarting or was never started."""


class PoolReplacedError(DataPoolError, ConnectionError):
    """The pool has another journal than before, or an older copy of it."""

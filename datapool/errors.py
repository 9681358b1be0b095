"""Errors of the DataPool.

Every error names the field or id, its value and the remedy, survives pickling (they cross Ray)
and also subclasses the matching built-in::

    DataPoolError
    ├── InvalidStepError(ValueError)          a field of a Step is malformed
    ├── InvalidRequestError(ValueError)       an argument of an operation is outside its range
    ├── StepConflictError(ValueError)         same (trajectory_uid, step_index), other content
    ├── UnknownBaseError(KeyError)            a step relative to one that is not stored; the client
    │                                         sends it whole
    ├── UnknownPictureError(KeyError)         a step refers to pictures that are not stored; the
    │                                         client sends them, and the step again
    ├── StepIndexError(ValueError)            contradicts the trajectory's is_last step
    ├── TrajectoryConflictError(ValueError)   trajectory_uid used under two prompt_uids
    ├── NotOwnerError(PermissionError)        a trajectory or group has another owner
    ├── TrajectoryClosedError(ValueError)     contradicts how the trajectory was closed before
    │   └── TrajectoryCompletedError(ValueError)  it was completed, and is to be ended otherwise
    ├── UnknownTrajectoryError(KeyError)      the channel never saw it
    ├── GroupConflictError(ValueError)        prompt_uid declared again, with other numbers
    ├── GroupClosedError(ValueError)          the group was acked or dropped, or is leased
    ├── UnknownGroupError(KeyError)           the channel never saw it
    ├── UnknownLeaseError(KeyError)           the pool never gave it out, or forgot it in a restart
    ├── LeaseExpiredError(TimeoutError)       its groups went back to the pool
    ├── LeaseClosedError(ValueError)          ack after nack, or nack after ack
    ├── PoolFullError(TimeoutError)           no admission credit within timeout_s
    ├── ChannelShutDownError(RuntimeError)    takes steps and serves what is ready; opens no group
    ├── SelectionError(ValueError)            an order or filter failed, or does not exist
    ├── ExportError(ValueError)               a file that is no export, or a value that fits in none
    ├── DamagedFileError(ValueError)          a file of ours is not what was written
    ├── JournalError(OSError)                 the journal cannot be read or written:
    │   ├── NoJournalError(OSError)             there is none in the folder that was named
    │   ├── JournalFullError(OSError)           the disk is full; what was to be written is kept,
    │   │                                       and goes with the next transaction
    │   ├── JournalCorruptError(OSError)        the file is damaged
    │   ├── JournalVersionError(OSError)        another version wrote it
    │   ├── JournalLockedError(OSError)         another process has it open
    │   └── JournalFencedError(OSError)         a successor of this process has taken it over
    ├── ReplayError(ValueError)               the journal's rows contradict each other
    ├── PoolUnavailableError(ConnectionError) the actor is dead, restarting or was never started
    └── PoolReplacedError(ConnectionError)    the pool has another journal than before, or an older
                                              copy of it

What is merely late (a step for a group that was served meanwhile) is no error: it is the outcome
"late", because a producer can do nothing about it.
"""

from __future__ import annotations

import re
from typing import Final


class DataPoolError(Exception):
    """Base of all errors that the DataPool raises. Made from one message, so that it pickles."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument; a message should read the same everywhere.
        return Exception.__str__(self)


class InvalidStepError(DataPoolError, ValueError): ...


class InvalidRequestError(DataPoolError, ValueError): ...


class StepConflictError(DataPoolError, ValueError): ...


class UnknownBaseError(DataPoolError, KeyError): ...


class UnknownPictureError(DataPoolError, KeyError):
    """Pictures are not stored, whose digests end the message."""

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(re.findall("[0-9a-f]{64}", str(self).rpartition(LACKS)[2]))


LACKS: Final = "which are not stored here: "
"""Before the digests in the message of an `UnknownPictureError`."""


class StepIndexError(DataPoolError, ValueError): ...


class TrajectoryConflictError(DataPoolError, ValueError): ...


class NotOwnerError(DataPoolError, PermissionError):
    """A trajectory or group has another owner (`types.OWNER`) than the one that asks."""


class TrajectoryClosedError(DataPoolError, ValueError): ...


class TrajectoryCompletedError(TrajectoryClosedError): ...


class UnknownTrajectoryError(DataPoolError, KeyError): ...


class GroupConflictError(DataPoolError, ValueError): ...


class GroupClosedError(DataPoolError, ValueError): ...


class UnknownGroupError(DataPoolError, KeyError): ...


class UnknownLeaseError(DataPoolError, KeyError): ...


class LeaseExpiredError(DataPoolError, TimeoutError): ...


class LeaseClosedError(DataPoolError, ValueError): ...


class PoolFullError(DataPoolError, TimeoutError): ...


class ChannelShutDownError(DataPoolError, RuntimeError): ...


class SelectionError(DataPoolError, ValueError): ...


class ExportError(DataPoolError, ValueError): ...


class DamagedFileError(DataPoolError, ValueError): ...


class JournalError(DataPoolError, OSError): ...


class NoJournalError(JournalError): ...


class JournalFullError(JournalError): ...


class JournalCorruptError(JournalError): ...


class JournalVersionError(JournalError): ...


class JournalLockedError(JournalError): ...


class JournalFencedError(JournalError): ...


class ReplayError(DataPoolError, ValueError): ...


class PoolUnavailableError(DataPoolError, ConnectionError): ...


class PoolReplacedError(DataPoolError, ConnectionError): ...

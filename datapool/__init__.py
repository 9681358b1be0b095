"""The DataPool: a store of Steps that serves complete GRPO groups, once each.

`types.py` holds the nouns, `pool.py` the logic, `actor.py` and `client.py` the way to it over Ray.
Imports nothing of ours and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datapool.config import ChannelConfig, PoolConfig
from datapool.errors import (
    ChannelShutDownError,
    DataPoolError,
    ExportError,
    GroupClosedError,
    GroupConflictError,
    InvalidRequestError,
    InvalidStepError,
    JournalCorruptError,
    JournalError,
    JournalFullError,
    JournalLockedError,
    JournalVersionError,
    LeaseClosedError,
    LeaseExpiredError,
    PoolFullError,
    PoolUnavailableError,
    ReplayError,
    SelectionError,
    StepConflictError,
    StepIndexError,
    TrajectoryClosedError,
    TrajectoryConflictError,
    UnknownBaseError,
    UnknownGroupError,
    UnknownLeaseError,
    UnknownTrajectoryError,
)
from datapool.pool import DataPool
from datapool.records import SubmitOutcome, TrajectoryOutcome
from datapool.types import TRAIN, VAL, Group, Lease, Step, Trajectory, VersionSpan

if TYPE_CHECKING:
    from datapool.actor import DataPoolActor, start_data_pool
    from datapool.client import DataPoolClient

__all__ = [
    "TRAIN",
    "VAL",
    "ChannelConfig",
    "ChannelShutDownError",
    "DataPool",
    "DataPoolActor",
    "DataPoolClient",
    "DataPoolError",
    "ExportError",
    "Group",
    "GroupClosedError",
    "GroupConflictError",
    "InvalidRequestError",
    "InvalidStepError",
    "JournalCorruptError",
    "JournalError",
    "JournalFullError",
    "JournalLockedError",
    "JournalVersionError",
    "Lease",
    "LeaseClosedError",
    "LeaseExpiredError",
    "PoolConfig",
    "PoolFullError",
    "PoolUnavailableError",
    "ReplayError",
    "SelectionError",
    "Step",
    "StepConflictError",
    "StepIndexError",
    "SubmitOutcome",
    "Trajectory",
    "TrajectoryClosedError",
    "TrajectoryConflictError",
    "TrajectoryOutcome",
    "UnknownBaseError",
    "UnknownGroupError",
    "UnknownLeaseError",
    "UnknownTrajectoryError",
    "VersionSpan",
    "start_data_pool",
]


def __getattr__(name: str) -> Any:
    # What needs Ray is imported on first use: an engine's process reads `datapool.types` and
    # should not pay for Ray.
    if name == "DataPoolClient":
        from datapool.client import DataPoolClient

        return DataPoolClient
    if name in ("DataPoolActor", "start_data_pool"):
        from datapool import actor

        return getattr(actor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

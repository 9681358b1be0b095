"""The DataPool: a store of Steps that serves complete GRPO groups, once each.

`types.py` holds the nouns, `core/` the logic, `store/` the journal, `remote/` the way to it over
Ray.
Imports nothing of ours and no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.core.pool import DataPool
from stepwell.datapool.errors import (
    ChannelShutDownError,
    DataPoolError,
    ExportError,
    GroupClosedError,
    GroupConflictError,
    InvalidRequestError,
    InvalidStepError,
    JournalCorruptError,
    JournalError,
    JournalFencedError,
    JournalFullError,
    JournalLockedError,
    JournalVersionError,
    LeaseClosedError,
    LeaseExpiredError,
    PoolFullError,
    PoolReplacedError,
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
from stepwell.datapool.ops import SubmitOutcome, TrajectoryOutcome
from stepwell.datapool.types import TRAIN, VAL, Group, Lease, Step, Trajectory, VersionSpan

if TYPE_CHECKING:
    from stepwell.datapool.files.transfer import export_channel, import_channel
    from stepwell.datapool.remote.actor import DataPoolActor
    from stepwell.datapool.remote.client import DataPoolClient
    from stepwell.datapool.remote.start import connect, start_data_pool, start_shards

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
    "JournalFencedError",
    "JournalFullError",
    "JournalLockedError",
    "JournalVersionError",
    "Lease",
    "LeaseClosedError",
    "LeaseExpiredError",
    "PoolConfig",
    "PoolFullError",
    "PoolReplacedError",
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
    "connect",
    "export_channel",
    "import_channel",
    "start_data_pool",
    "start_shards",
]


_NEEDS_RAY = {
    "DataPoolActor": "remote.actor",
    "DataPoolClient": "remote.client",
    "connect": "remote.start",
    "export_channel": "files.transfer",
    "import_channel": "files.transfer",
    "start_data_pool": "remote.start",
    "start_shards": "remote.start",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: an engine's process reads `types` and should not pay for Ray.
    if name in _NEEDS_RAY:
        return getattr(import_module(f"{__name__}.{_NEEDS_RAY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The DataPool: a store of Steps that serves complete GRPO groups, once each.

    types ops questions codec      nouns, and what can be asked of a pool
    core/ selection store/         what a pool does, and where it is kept
    remote/ inspect/ files/        the ways to it, what it shows, what goes in and out as files

Imports nothing of ours and no torch. What talks to a pool is imported on first use: who only needs
the nouns loads neither Ray nor an event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepwell.datapool.config import ChannelConfig, PoolConfig
from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.types import TRAIN, VAL, Group, Lease, Step, Trajectory, VersionSpan

if TYPE_CHECKING:
    from stepwell.datapool.core.pool import DataPool
    from stepwell.datapool.files.transfer import export_channel, import_channel
    from stepwell.datapool.remote.client import DataPoolClient
    from stepwell.datapool.remote.start import client_of, connect, start_data_pool, start_shards

__all__ = [
    "TRAIN",
    "VAL",
    "ChannelConfig",
    "DataPool",
    "DataPoolClient",
    "DataPoolError",
    "Group",
    "Lease",
    "PoolConfig",
    "Step",
    "Trajectory",
    "VersionSpan",
    "client_of",
    "connect",
    "export_channel",
    "import_channel",
    "start_data_pool",
    "start_shards",
]


_HOMES = {
    "core.pool": ("DataPool",),
    "files.transfer": ("export_channel", "import_channel"),
    "remote.client": ("DataPoolClient",),
    "remote.start": ("client_of", "connect", "start_data_pool", "start_shards"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value

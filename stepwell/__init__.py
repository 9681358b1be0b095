"""Stepwell: point any agent's `base_url` at it and get a better model.

    import stepwell

    await stepwell.train(stepwell.load_config("quickstart", ["run.name=mine"]))

    async with stepwell.connect("runs/mine") as pool:      # from any other process
        print(await pool.get_statistics("train"))

`__all__` is the public API. What it names is imported on first use: `import stepwell` loads neither
torch nor Ray. Rewards and tools have packages of their own, `stepwell.trainer.rewards` and
`stepwell.trainer.tools`; errors beyond the bases are in each room's `errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepwell.version import __version__

if TYPE_CHECKING:
    from stepwell.backends.base import LossFn, LossOutput, TokenBatch, TrainingBackend
    from stepwell.backends.config import EngineConfig
    from stepwell.backends.engines.commands import CommandLine, Launch
    from stepwell.backends.errors import BackendError
    from stepwell.backends.rows import TokenRow, build_rows
    from stepwell.config.load import load_config
    from stepwell.config.run import RunConfig
    from stepwell.datapool import (
        ChannelConfig,
        DataPool,
        DataPoolClient,
        DataPoolError,
        Group,
        Lease,
        PoolConfig,
        Step,
        Trajectory,
        VersionSpan,
        client_of,
        export_channel,
        import_channel,
        start_data_pool,
    )
    from stepwell.datapool.config import SelectionConfig
    from stepwell.errors import RunUnavailableError
    from stepwell.gateway.errors import GatewayError
    from stepwell.run.connection import connect
    from stepwell.run.train import train
    from stepwell.trainer.errors import ConfigError, TrainerError

__all__ = [
    "BackendError",
    "ChannelConfig",
    "CommandLine",
    "ConfigError",
    "DataPool",
    "DataPoolClient",
    "DataPoolError",
    "EngineConfig",
    "GatewayError",
    "Group",
    "Launch",
    "Lease",
    "LossFn",
    "LossOutput",
    "PoolConfig",
    "RunConfig",
    "RunUnavailableError",
    "SelectionConfig",
    "Step",
    "TokenBatch",
    "TokenRow",
    "TrainerError",
    "TrainingBackend",
    "Trajectory",
    "VersionSpan",
    "__version__",
    "build_rows",
    "client_of",
    "connect",
    "export_channel",
    "import_channel",
    "load_config",
    "start_data_pool",
    "train",
]

_HOMES = {
    "stepwell.backends.base": ("LossFn", "LossOutput", "TokenBatch", "TrainingBackend"),
    "stepwell.backends.config": ("EngineConfig",),
    "stepwell.backends.engines.commands": ("CommandLine", "Launch"),
    "stepwell.backends.errors": ("BackendError",),
    "stepwell.backends.rows": ("TokenRow", "build_rows"),
    "stepwell.config.run": ("RunConfig",),
    "stepwell.run.connection": ("connect",),
    "stepwell.datapool": (
        "DataPool",
        "DataPoolClient",
        "client_of",
        "export_channel",
        "import_channel",
        "start_data_pool",
    ),
    "stepwell.datapool.config": ("ChannelConfig", "PoolConfig", "SelectionConfig"),
    "stepwell.datapool.errors": ("DataPoolError",),
    "stepwell.datapool.types": ("Group", "Lease", "Step", "Trajectory", "VersionSpan"),
    "stepwell.errors": ("RunUnavailableError",),
    "stepwell.gateway.errors": ("GatewayError",),
    "stepwell.config.load": ("load_config",),
    "stepwell.run.train": ("train",),
    "stepwell.trainer.errors": ("ConfigError", "TrainerError"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_nearest(name)}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _nearest(name: str) -> str:
    from difflib import get_close_matches  # for a mistake alone

    close = [] if name.startswith("_") else get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""

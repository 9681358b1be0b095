"""Kinds of engines by name (`engine.kind`): how one is started, and how it is asked.

    engine.kind: vllm ──► ENGINES ──┬─ a class of `api.Engine`, whose `command_line` starts it
                 sglang             └─ a function (EngineConfig, Launch) -> CommandLine: what it
                                       starts speaks SGLang's API
    connect(config, url) ──► Engine

A name is built in, an installed package's, or a dotted path (`registry.py`). Does not own what a
run sends to an engine, nor command lines (`commands.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import Engine
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.commands import Builder, CommandLine, Launch
from stepwell.backends.errors import BackendConfigError, BackendError, EngineStartError
from stepwell.backends.registry import ENGINE_NAMES, Registry, first_line

Kind: TypeAlias = type[Engine] | Builder


def engine_class(kind: str) -> type[Engine]:
    """Return the class that asks engines of `kind`.

    Raises:
        BackendConfigError: there is no such kind here, or it cannot be imported.
    """
    if kind in ENGINE_NAMES.reserved:
        return EngineClient
    found = ENGINES.load(kind)
    return _class(found) or EngineClient


def connect(config: EngineConfig, url: str, **how: Any) -> Engine:
    """Return the engine at `url`, of the kind that `config` names.

    Args:
        how: further arguments of `Engine`: `timeout_s`, `connections`.

    Raises:
        BackendConfigError: there is no such kind here, or `engine.options` are not its own.
    """
    kind = engine_class(config.kind)
    return kind(url, options=kind.own_options(config.options), **how)


def command_line(config: EngineConfig, launch: Launch) -> CommandLine:
    """Build the command line of an engine of `config.kind`, built in or a plug-in's.

    Raises:
        EngineStartError: what it needs is not there.
        BackendConfigError: there is no such kind here, or its builder fails.
    """
    found = ENGINES.load(config.kind)
    of_class = _class(found)
    build: Builder = found if of_class is None else of_class.command_line  # type: ignore[assignment]  # a class is no builder
    try:
        line = build(config, launch)
    except BackendError:
        raise
    except Exception as e:  # a plug-in's code
        raise BackendConfigError(
            f"engine.kind is {config.kind!r}, whose builder failed: {type(e).__name__}: {e}; "
            "`stepwell backends` names its package"
        ) from e
    if not isinstance(line, CommandLine):
        raise BackendConfigError(
            f"engine.kind is {config.kind!r}, whose builder returned {line!r:.80}; it should "
            "return a CommandLine"
        )
    return line


def _lacks(name: str, kind: Kind) -> str | None:
    """A command line is made for a model that is not there: builders look at the machine only."""
    of_class = _class(kind)
    if of_class is not None and not can_launch(of_class):
        return None
    config = EngineConfig(kind=name, model_path=Path("model"))
    try:
        command_line(config, Launch(port=1, model_path="model"))
    except EngineStartError as e:
        return str(e)
    return None


def _class(kind: Kind) -> type[Engine] | None:
    return kind if isinstance(kind, type) and issubclass(kind, Engine) else None


def can_launch(kind: type[Engine]) -> bool:
    """Return true if Stepwell can start such engines; others are attached to by `engine.urls`."""
    return kind.command_line.__func__ is not Engine.command_line.__func__  # type: ignore[attr-defined]  # classmethods


ENGINES: Registry[Kind] = Registry(
    ENGINE_NAMES,
    wanted="function (EngineConfig, Launch) -> CommandLine, nor a class of api.Engine",
    fits=lambda found: issubclass(found, Engine) if isinstance(found, type) else callable(found),
    lacks=_lacks,
    about=first_line,
)

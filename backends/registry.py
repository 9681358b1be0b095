"""Training backends and engines by name: built in, or brought by an installed package.

A package adds its own by entry points (`examples/plugin/` is one)::

    [project.entry-points."stepwell.backends"]     # a TrainingBackend
    jsonl = "stepwell_jsonl:JsonLines"
    [project.entry-points."stepwell.engines"]      # a function that makes an engine's command line,
    background = "stepwell_background:background"  # or a class that asks it (`engines/api.py`)

    trainer.backend: jsonl ──┬─ built in ────────────┐
    engine.kind: background ─┼─ an entry point ──────┼─► module:Name, imported on first use
                             └─ module:Name itself ──┘

Owns: the names, what is known of each without using it (`survey`), and the errors of a wrong name,
a broken plug-in and a name claimed twice. Does not own: what is registered, nor what a plug-in has
to be; `BACKENDS` in `base.py` and `ENGINES` in `engines/kinds.py` say that. Importing this loads
no torch and no plug-in.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar

from stepwell.backends.errors import BackendConfigError
from stepwell.datapool.own_loop import ENDS

T = TypeVar("T")

State = Literal["ready", "missing", "broken", "claimed twice"]


@dataclass(frozen=True, slots=True)
class Found:
    """One name, as `stepwell backends` shows it."""

    name: str
    source: str
    """`built in`, the package and its version, or how many packages."""
    state: State
    about: str
    """A line on what it is; empty if it could not be imported."""
    problem: str = ""
    """Why it is not `ready`, and the remedy."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one kind of plug-in. Imports none of them."""

    group: str
    """Group of the entry points."""
    key: str
    """Configuration key that takes such a name; error messages begin with it."""
    built_in: dict[str, str]
    """Name -> `module:Name`."""
    reserved: Mapping[str, str] = field(default_factory=dict)
    """Names that need no code -> a line about each."""

    def entries(self) -> dict[str, list[EntryPoint]]:
        """Every name -> all that claim it; more than one is an error on use."""
        found: dict[str, list[EntryPoint]] = {}
        for name, path in (self.built_in | dict.fromkeys(self.reserved, "")).items():
            found[name] = [EntryPoint(name, path, self.group)]
        for entry in _installed_now(self.group):
            found.setdefault(entry.name, []).append(entry)
        return found

    def entry(self, name: str) -> EntryPoint:
        """Return the entry point of `name`, which is registered or a dotted path.

        Raises:
            BackendConfigError: it is unknown, or several packages claim it.
        """
        path = self.built_in.get(name)
        if path is not None and not _was_claimed(self.group, name, tuple(sys.path)):
            return EntryPoint(name, path, self.group)
        entries = self.entries()
        claims = entries.get(name, [])
        if len(claims) > 1:
            raise BackendConfigError(self.twice(name, claims))
        if claims:
            return claims[0]
        if ":" in name or "." in name.strip("."):
            path = name if ":" in name else ":".join(name.rsplit(".", 1))
            return EntryPoint(name, path, self.group)
        near = difflib.get_close_matches(name, entries, n=2, cutoff=0.5)
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise BackendConfigError(
            f"{self.key} is {name!r}; {guess}choose {', '.join(entries)} or give a dotted path "
            "module:Name; `stepwell backends` tells about each"
        )

    def twice(self, name: str, claims: list[EntryPoint]) -> str:
        """The error of a name that several packages have."""
        owners = ", ".join(f"{self.origin(c)} ({c.value or 'no code'})" for c in claims)
        return (
            f"{self.key} {name!r} is claimed by more than one: {owners}; uninstall all packages "
            "but one, or give the dotted path of the one you mean"
        )

    def origin(self, entry: EntryPoint) -> str:
        """The package that an entry is from."""
        if entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
        return "built in"

    def remedy(self, entry: EntryPoint) -> str:
        """Return the remedy for an entry that cannot be used."""
        if entry.dist is not None:
            return f"mend or uninstall the package {entry.dist.name}"
        return f"choose {', '.join(self.entries())}, or mend the dotted path"


@dataclass(frozen=True, slots=True)
class Registry(Generic[T]):
    """The names of one kind of plug-in, and what such a plug-in has to be."""

    names: Names
    wanted: str
    """Requirement on an entry, in words; `fits` checks it."""
    fits: Callable[[Any], bool]
    lacks: Callable[[str, T], str | None]
    """Function of a name and its plug-in: what this machine lacks for it, with the remedy; None:
    nothing."""
    about: Callable[[T], str]
    """A line on what it is."""

    def load(self, name: str) -> T:
        """Import what is registered under `name`, or stands at the dotted path `module:Name`.

        Raises:
            BackendConfigError: it is unknown, claimed twice, cannot be imported or is something
                else; the message names the package at fault and the remedy.
        """
        return self._load(self.names.entry(name))

    def survey(self) -> list[Found]:
        """All names, each imported and tried; one that is broken is shown as such."""
        return [self._look(name, claims) for name, claims in self.names.entries().items()]

    def _load(self, entry: EntryPoint) -> T:
        whose = f"{self.names.key} {entry.name!r}"
        if entry.name != entry.value:
            whose += f" ({self.names.origin(entry)}: {entry.value})"
        try:
            found = entry.load()
        except ENDS:
            raise
        except BaseException as e:  # importing it runs foreign code
            raise BackendConfigError(
                f"{whose} cannot be imported: {_line(e)}; {self.names.remedy(entry)}"
            ) from e
        if not self.fits(found):
            raise BackendConfigError(f"{whose} is no {self.wanted}; {self.names.remedy(entry)}")
        return found  # type: ignore[no-any-return]  # `fits` has seen it

    def _look(self, name: str, claims: list[EntryPoint]) -> Found:
        if len(claims) > 1:
            text = self.names.twice(name, claims)
            return Found(name, f"{len(claims)} packages", "claimed twice", "", text)
        source = self.names.origin(claims[0])
        if name in self.names.reserved:
            return Found(name, source, "ready", self.names.reserved[name])
        try:
            found = self._load(claims[0])
            lacking, about = self.lacks(name, found), self.about(found)
        except BackendConfigError as e:
            return Found(name, source, "broken", "", str(e))
        except Exception as e:  # noqa: BLE001  # foreign code; the list goes on
            text = f"{self.names.key} {name!r}: {_line(e)}; {self.names.remedy(claims[0])}"
            return Found(name, source, "broken", "", text)
        if lacking is not None:
            return Found(name, source, "missing", about, lacking)
        return Found(name, source, "ready", about)


def _installed_now(group: str) -> tuple[EntryPoint, ...]:
    return _installed(group, tuple((path, _changed(path)) for path in sys.path))


@functools.lru_cache(maxsize=64)
def _installed(group: str, path: tuple[tuple[str, int | None], ...]) -> tuple[EntryPoint, ...]:
    """Entry points of the packages on this `path`. To find them reads a file of every package, some
    10 ms, and a configuration asks for them dozens of times; a folder where one was installed or
    uninstalled since is a path that has `_changed`."""
    return tuple(entry_points(group=group))


@functools.lru_cache(maxsize=256)
def _was_claimed(group: str, name: str, path: tuple[str, ...]) -> bool:
    """A package on this `path` had the name when it was asked for first. Built-in ones are looked
    up for every batch and every check of an engine: whoever claims one later is told at the next
    start."""
    return any(entry.name == name for entry in _installed_now(group))


def _changed(folder: str) -> int | None:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None  # not there, which is as good a state as any


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


def first_line(found: Any) -> str:
    """First line of the docstring of `found`; empty without one."""
    return (inspect.getdoc(found) or "").partition("\n")[0]


BACKEND_NAMES = Names(
    group="stepwell.backends",
    key="trainer.backend",
    built_in={
        "torch": "stepwell.backends.torch.backend:TorchBackend",
        "verl": "stepwell.backends.verl.backend:VerlBackend",
        "slime": "stepwell.backends.slime.backend:SlimeBackend",
        "trl": "stepwell.backends.trl.backend:TrlBackend",
        "tinker": "stepwell.backends.tinker.backend:TinkerBackend",
    },
)

ENGINE_NAMES = Names(
    group="stepwell.engines",
    key="engine.kind",
    built_in={
        "embedded": "stepwell.backends.engines.commands:embedded",
        "sglang": "stepwell.backends.engines.sglang:command",
        "vllm": "stepwell.backends.engines.vllm:VllmEngine",
        "dynamo": "stepwell.backends.engines.dynamo:DynamoEngine",
    },
    reserved={"attach": "Servers at engine.urls that somebody else runs."},
)

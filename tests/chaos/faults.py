"""This module plans the faults of a scenario from its seed and does them to processes, so that a
seed gives the same faults in the same order (at about the same moments) again.

    kill     SIGKILL
    stop     SIGSTOP, SIGCONT after `seconds`: a machine that was suspended, a full GC, a swap storm
    fill     the journal's disk has not a byte left for `seconds` (`lives.SmallDisk`)
    cut      two machines do not reach each other for `seconds` (`machines.py`)

Owns: the plan, finding the process of a part. Does not own: the run (`lives.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import psutil

Action: TypeAlias = Literal["kill", "stop", "fill", "cut"]

PARTS = ("pool", "gateway", "engine", "engine_server", "worker", "driver", "raylet", "gcs")
ACTORS = {
    "pool": "ray::DataPoolActor",
    "gateway": "ray::GatewayReplica",
    "engine_server": "ray::EngineServer",
    "worker": "ray::RolloutWorker",
}
"""Part -> title that Ray gives its process."""
DAEMONS = {"raylet": "raylet", "gcs_server": "gcs"}
"""Program of one of Ray's own processes -> part."""
ENGINE = "stepwell.backends.engines.embedded"
STOP_S = (3.0, 15.0)
LONG_STOP_S = 40.0
DELAY_S = (0.0, 5.0)
"""From the moment that is waited for to the fault."""
IN_A_ROW = 0.35
"""Share of the faults that come without waiting until the run trains again."""


@dataclass(frozen=True, slots=True)
class Fault:
    action: Action
    part: str
    seconds: float
    """Duration of the fault; 0 for a kill."""
    delay_s: float
    pick: float
    """In [0, 1): which process, where a part has several."""
    settles: bool
    """The run is let alone until it trains again."""

    def __str__(self) -> str:
        return f"{self.action} {self.part}" + (f" {self.seconds:.1f} s" * (self.seconds > 0))


def plan(
    seed: str, n: int, kinds: Sequence[tuple[Action, str]], long_stops: Iterable[str] = ()
) -> list[Fault]:
    """`n` faults of these kinds, each kind its share; `long_stops` of these parts among them."""
    dice = random.Random(seed)
    places = dice.sample(range(n), min(n, len(long := list(long_stops))))
    longs = dict(zip(places, long, strict=False))
    faults: list[Fault] = []
    deck: list[tuple[Action, str]] = []
    for i in range(n):
        deck = deck or dice.sample(list(kinds), len(kinds))
        kind: tuple[Action, str] = ("stop", longs[i]) if i in longs else deck.pop()
        seconds = LONG_STOP_S if i in longs else dice.uniform(*STOP_S)
        faults.append(
            Fault(
                *kind,
                0.0 if kind[0] == "kill" else seconds,
                dice.uniform(*DELAY_S),
                dice.random(),
                settles=i == n - 1 or dice.random() >= IN_A_ROW,
            )
        )
    return faults


def part_of(process: psutil.Process) -> str | None:
    """Return the part that this process is; None: it is no part, or it is gone."""
    try:
        line = process.cmdline()
        if not line or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    if ENGINE in line:
        return "engine"
    if (daemon := DAEMONS.get(line[0].rpartition("/")[2])) is not None:
        return daemon
    return next((part for part, title in ACTORS.items() if line[0].startswith(title)), None)


def find(part: str, processes: Iterable[psutil.Process], pick: float) -> psutil.Process | None:
    """A process of `part` among these."""
    found = sorted((p for p in processes if part_of(p) == part), key=lambda p: p.pid)
    return found[int(pick * len(found))] if found else None


def attempt(action: Callable[[], object]) -> bool:
    """False: the process was gone before."""
    try:
        action()
    except psutil.NoSuchProcess:
        return False
    return True

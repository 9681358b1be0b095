"""This module chooses the engine of each call so that a trajectory stays where its prefix is cached
and no call goes to an engine that is ill or has old weights.

    up ──a check of its health fails──► ailing  asked only if no other is up (paused ones fail it)
    up ──N bad answers in a row──► open ──open_s──► probed by a check ──well──► up
                                     ▲                  └──ill──┘
    any ──connection fails──► down ──answers again──► up, if it has the fleet's weight version
                                           └────────► behind, until it has

*Behind*: an engine that was down, or whose version went backwards, may have restarted with old
weights. It gets no traffic until it reports the highest version seen anywhere. One that lags
without having been down is in the middle of a rolling update: it is used, and its Steps carry their
true version. When every engine that answers has been behind for `engine_version_grace_s`, the
newest of them are used: the trainer may have rolled back, or nobody else is left. This is counted
(`used_behind`).

A *canary* has a version that is not committed: the trainer tries it out on one engine. It serves
`canary_share` of the trajectories that begin meanwhile, and no other one while there is another
engine; those that it serves stay with it. Its version is not the fleet's: an engine that comes back
with what is committed is not behind. When nobody is a canary any more, all are alike again.

A trajectory stays on its engine while that is up. A new one, or one that has to move, goes to the
engine that rendezvous hashing names, or to the next choice if that one is much busier than the
least busy.

Pure state: every method that depends on time takes `now`; nothing here waits or does I/O. It does
not own requests (`client.py`) or checks (`checks.py`).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias

from stepwell.gateway.config import REMEMBERED, TUNING, Tuning
from stepwell.gateway.limits import Deadline

State: TypeAlias = Literal["up", "ailing", "open", "behind", "down"]

MAX_BACKOFF_S = 5.0
MUCH_BUSIER = (2, 16)
"""An engine is passed over that has more than `a × least + b` calls in flight."""


def backoff_s(
    failures: int, base_s: float, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Seconds to wait after the `failures`-th failure: doubling, at most 5, and spread over the
    upper half, so that calls that failed together do not come back together."""
    longest = min(base_s * 2 ** (failures - 1), MAX_BACKOFF_S)
    return uniform(longest / 2, longest)


class Asked(NamedTuple):
    """State of an engine, as it was known when a check asked it."""

    epoch: int
    version: int | None


@dataclass(slots=True, eq=False)
class Engine:
    """One engine. Written by `Fleet` only, but for `in_flight`."""

    url: str
    in_flight: set[Deadline] = field(default_factory=set)
    """Deadlines with which the engine's calls in flight can be ended."""
    reachable: bool = True
    well: bool = True
    """The last check of its health passed."""
    returned: bool = False
    """It was down, or went back in versions, since it last had the fleet's version."""
    version: int | None = None
    """The newest it reported since it last went backwards; None: it reports none."""
    canary: bool = False
    """`version` is not committed."""
    epoch: int = 0
    """Counts breakdowns."""
    failures: int = 0
    """Bad answers in a row."""
    open_until: float = -math.inf
    """Time up to which no check makes it well again, after too many of them."""
    silent: int = 0
    """Checks in a row that got no answer in time."""
    why: str = ""
    """The last failure."""

    def asked(self) -> Asked:
        return Asked(self.epoch, self.version)


_IS_CANARY = attrgetter("canary")


class _Home(NamedTuple):
    """The engine of a trajectory, and that engine's version if it was a canary."""

    engine: Engine
    canary: int | None


class Fleet:
    """The engines and where each trajectory is at home."""

    def __init__(
        self,
        urls: Iterable[str],
        tuning: Tuning = TUNING,
        *,
        canary_share: float = 0.0,
        remembered: int = REMEMBERED,
    ) -> None:
        self.version: int | None = None
        """The highest weight version seen, canaries' left out."""
        self.used_behind = 0
        """Calls sent to an engine that is behind, for want of a better one."""
        self._engines = [*map(Engine, urls)]
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        """Homes of trajectories, those asked for last at the end."""
        self._remembered = remembered
        self._canary_share = canary_share
        self._tuning = tuning
        self._all_behind_since: float | None = None

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    # -- routing ------------------------------------------------------------------------------

    def pick(self, affinity: str, now: float, avoid: Collection[Engine] = ()) -> Engine | None:
        """The engine for a call, one of `avoid` only if there is no other; None: none may be used
        now."""
        home = self._homes.get(affinity)
        engine = None if home is None else home.engine
        canaries: Collection[int | None] = ()
        if True in map(_IS_CANARY, self._engines):
            canaries = {e.version for e in self._engines if e.canary and e.reachable}
        # Version that the trajectory is to be of: a canary's or not, or whichever (None).
        tries: bool | None = None
        if canaries:
            begins = _share(affinity) < self._canary_share
            tries = begins if home is None else home.canary in canaries
        if (
            engine is None
            or engine in avoid
            or self.state(engine) != "up"
            or tries not in (None, engine.canary)
        ):
            candidates = self._candidates(now)
            candidates = [e for e in candidates if e not in avoid] or candidates
            candidates = [e for e in candidates if tries in (None, e.canary)] or candidates
            if not candidates:
                return None
            if engine is None or engine not in candidates:
                engine = _rendezvous(affinity, candidates)
            self.used_behind += self.state(engine) == "behind"
        canary = engine.version if engine.canary else None
        if home is None or home.engine is not engine or home.canary != canary:
            self._homes[affinity] = _Home(engine, canary)
            if len(self._homes) > self._remembered:
                self._homes.popitem(last=False)
        self._homes.move_to_end(affinity)
        return engine

    def has_candidate(self, now: float, avoid: Collection[Engine] = ()) -> bool:
        """True if `pick` would find an engine outside `avoid`."""
        return any(e not in avoid for e in self._candidates(now))

    def _candidates(self, now: float) -> list[Engine]:
        answering = [e for e in self if self.state(e) not in ("down", "open")]
        current = [e for e in answering if self.state(e) != "behind"]
        if current:
            self._all_behind_since = None
            return [e for e in current if e.well] or current
        if not answering:
            return []
        if self._all_behind_since is None:
            self._all_behind_since = now
        if now - self._all_behind_since < self._tuning.engine_version_grace_s:
            return []
        newest = max(e.version or 0 for e in answering)
        return [e for e in answering if e.version == newest]

    def state(self, engine: Engine) -> State:
        if not engine.reachable:
            return "down"
        if engine.failures >= self._tuning.engine_circuit_failures:
            return "open"  # it answered badly so often that it gets no calls
        if (
            engine.returned
            and engine.version is not None
            and self.version is not None
            and engine.version < self.version
        ):
            return "behind"
        return "up" if engine.well else "ailing"

    def is_open(self, engine: Engine) -> bool:
        """It answered badly so often that it gets no calls, whether or not it can be reached."""
        return engine.failures >= self._tuning.engine_circuit_failures

    def probe_in(self, engine: Engine, now: float) -> float:
        """Seconds until a check may find an open engine well; infinite while it is not open."""
        return max(engine.open_until - now, 0.0) if self.is_open(engine) else math.inf

    # -- what calls saw -----------------------------------------------------------------------

    def succeeded(self, engine: Engine, version: int | None, *, canary: bool = False) -> None:
        """A call was answered; the engine has `version` now, as a canary or not."""
        engine.failures = 0
        is_known = version == engine.version == self.version and not (canary or engine.canary)
        if version is not None and not is_known:
            self._saw(engine, version, canary)

    def answered_badly(self, engine: Engine, now: float, why: str) -> None:
        """A 5xx, a 429, or nonsense."""
        engine.why = why
        engine.failures += 1
        engine.open_until = now + self._tuning.engine_circuit_open_s

    def broke(self, engine: Engine, now: float, why: str) -> None:
        """A connection could not be made or broke: no traffic until a check succeeds."""
        engine.epoch += 1
        self._lost(engine)
        self.answered_badly(engine, now, why)

    # -- what checks saw ----------------------------------------------------------------------

    def check_passed(
        self,
        engine: Engine,
        now: float,
        *,
        asked: Asked,
        version: int | None,
        canary: bool = False,
    ) -> bool:
        """The engine says that it has `version` (None: it does not say), as a canary or not. False:
        it broke since it was asked, so that this may be from before."""
        if engine.epoch != asked.epoch:
            return False
        engine.reachable = True
        engine.silent = 0
        if version is None:
            engine.returned = False  # nothing to hold it to
        else:
            if asked.version is not None and version < asked.version:
                engine.returned = True
                engine.version, engine.canary = version, canary
            self._saw(engine, version, canary)
            if self.version is not None and version >= self.version:
                engine.returned = False
        self._candidates(now)  # starts or ends the time in which all are behind
        return True

    def check_failed(self, engine: Engine, now: float, why: str, *, refused: bool) -> None:
        """Nobody listens there (`refused`), or the answer did not come in time.

        One late answer is no reason to leave an engine, two are; after three, calls in flight
        are given up: its machine or its network is gone without a word.
        """
        engine.why = why
        engine.silent = 0 if refused else engine.silent + 1
        if refused or engine.silent >= 2:
            self._lost(engine)
        if engine.silent >= 3:
            for deadline in engine.in_flight:
                deadline.reschedule(now)
            engine.in_flight.clear()
        engine.open_until = now + self._tuning.engine_circuit_open_s

    def health(self, engine: Engine, now: float, *, well: bool, why: str = "") -> None:
        """Note what a health check said after a passed check; the probe of an open circuit."""
        engine.well = well
        engine.why = why or engine.why
        if not well:
            engine.open_until = now + self._tuning.engine_circuit_open_s
        elif self.is_open(engine) and now >= engine.open_until:
            engine.failures = 0

    def _lost(self, engine: Engine) -> None:
        engine.reachable = False
        engine.returned = True

    def _saw(self, engine: Engine, version: int, canary: bool) -> None:
        if engine.version is None or version > engine.version:
            engine.version, engine.canary = version, canary
        elif version == engine.version and not canary:
            engine.canary = False  # committed meanwhile; what a canary had begun ends later
        if not canary and (self.version is None or version > self.version):
            self.version = version

    # -- words --------------------------------------------------------------------------------

    def why_none(self) -> str:
        """Why `pick` found no engine."""
        if not self._engines:
            return "there is no engine; see engine.kind and engine.urls"
        return "no engine may be used: " + "; ".join(f"{e.url} {self._words(e)}" for e in self)

    def _words(self, engine: Engine) -> str:
        state = self.state(engine)
        if state == "behind":
            return f"came back with weight version {engine.version} while others had {self.version}"
        why = f" ({engine.why})" if engine.why else ""
        return ("failed several times in a row" if state == "open" else f"is {state}") + why

    def statistics(self) -> dict[str, Any]:
        engines = [
            {
                "url": e.url,
                "state": self.state(e),
                "version": e.version,
                "canary": e.canary,
                "in_flight": len(e.in_flight),
            }
            for e in self
        ]
        return {"version": self.version, "used_behind": self.used_behind, "engines": engines}


def _rendezvous(affinity: str, engines: list[Engine]) -> Engine:
    factor, slack = MUCH_BUSIER
    limit = factor * min(len(e.in_flight) for e in engines) + slack
    free = [e for e in engines if len(e.in_flight) <= limit]
    return max(free, key=lambda e: _hash(f"{affinity}\0{e.url}"))


def _share(affinity: str) -> float:
    """A number in [0, 1) that is always the same for a trajectory, at any gateway."""
    return _hash(affinity, b"canary") / 2**64


def _hash(text: str, purpose: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=purpose).digest())

"""Which engine a call goes to: health, affinity, circuit breakers and weight versions.

An engine as the gateway sees it::

    up ──/health fails──► ailing       asked only if no other is up (a paused SGLang fails /health)
    up ──N bad answers in a row──► open ──open_s──► half-open ──a check succeeds──► up
                                     ▲                  └──it fails──┘  (open_s doubles)
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

Pure state: every method that depends on time takes `now`; nothing here waits or does I/O. Does not
own: requests (`engine.py`), checks (`engine_checks.py`).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

State: TypeAlias = Literal["up", "ailing", "open", "behind", "down"]

MAX_BACKOFF_S = 5.0
MAX_OPEN_S = 30.0
MUCH_BUSIER = (2, 16)
"""An engine is passed over that has more than `a × least + b` calls in flight."""


def backoff_s(
    failures: int, base_s: float, uniform: Callable[[float, float], float] = random.uniform
) -> float:
    """Seconds to wait after the `failures`-th failure: doubling, at most 5, and spread over the
    upper half, so that calls that failed together do not come back together."""
    longest = min(base_s * 2 ** (failures - 1), MAX_BACKOFF_S)
    return uniform(longest / 2, longest)


class Circuit:
    """Circuit breaker: opens after `threshold` failures in a row."""

    __slots__ = ("_failures", "_open_s", "_threshold", "_trips", "_until", "state")

    def __init__(self, threshold: int, open_s: float) -> None:
        self.state: Literal["closed", "open", "half_open"] = "closed"
        self._threshold = threshold
        self._open_s = open_s
        self._failures = 0
        self._trips = 0
        self._until = 0.0

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.state == "half_open" or (
            self.state == "closed" and self._failures >= self._threshold
        ):
            self.state = "open"
            self._until = now + min(self._open_s * 2**self._trips, MAX_OPEN_S)
            self._trips += 1

    def succeeded(self) -> None:
        self.state = "closed"
        self._failures = self._trips = 0

    def probe_in(self, now: float) -> float:
        """Seconds until a probe is due; infinite while closed."""
        return math.inf if self.state == "closed" else max(self._until - now, 0.0)

    def try_half_open(self, now: float) -> bool:
        """Whether a probe is due or under way; its result is `failed` or `succeeded`."""
        if self.state == "open" and now >= self._until:
            self.state = "half_open"
        return self.state == "half_open"


class Deadline(Protocol):
    """`asyncio.Timeout`, as far as it is needed to give a call up."""

    def reschedule(self, when: float | None) -> None: ...


class Asked(NamedTuple):
    """What was known of an engine when a check asked it."""

    epoch: int
    version: int | None


class Engine:
    """One engine. Written by `Fleet` only, but for `in_flight`."""

    __slots__ = (
        "canary",
        "circuit",
        "epoch",
        "in_flight",
        "reachable",
        "returned",
        "silent",
        "url",
        "version",
        "well",
        "why",
    )

    def __init__(self, url: str, circuit: Circuit) -> None:
        self.url = url
        self.circuit = circuit
        self.in_flight: set[Deadline] = set()
        self.reachable = True
        self.well = True
        """`/health` answered 200."""
        self.returned = False
        """It was down, or went back in versions, since it last had the fleet's version."""
        self.version: int | None = None
        """The newest it reported since it last went backwards; None: it reports none."""
        self.canary = False
        """That version is not committed."""
        self.epoch = 0
        """Counts breakdowns."""
        self.silent = 0
        """Checks in a row that got no answer in time."""
        self.why = ""
        """The last failure."""

    def asked(self) -> Asked:
        return Asked(self.epoch, self.version)


class _Home(NamedTuple):
    """Where a trajectory is, and with which canary's version, if any."""

    engine: Engine
    canary: int | None

    @classmethod
    def of(cls, engine: Engine) -> _Home:
        return cls(engine, engine.version if engine.canary else None)


class Fleet:
    """The engines and where each trajectory is at home."""

    def __init__(
        self,
        urls: Iterable[str],
        *,
        circuit_failures: int,
        circuit_open_s: float,
        version_grace_s: float,
        remembered: int,
        canary_share: float = 0.0,
    ) -> None:
        self.version: int | None = None
        """The highest weight version seen, canaries' left out."""
        self.used_behind = 0
        """Calls sent to an engine that is behind, for want of a better one."""
        self._engines = [Engine(url, Circuit(circuit_failures, circuit_open_s)) for url in urls]
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._canary_share = canary_share
        self._remembered = remembered
        self._version_grace_s = version_grace_s
        self._all_behind_since: float | None = None

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    # -- routing ------------------------------------------------------------------------------

    def pick(self, affinity: str, now: float, avoid: Collection[Engine] = ()) -> Engine | None:
        """The engine for a call, one of `avoid` only if there is no other; None: none may be used
        now."""
        known = self._homes.get(affinity)
        home = known.engine if known is not None else None
        suits = self._suits(affinity, known)
        if home is not None and home not in avoid and self.state(home) == "up" and suits(home):
            self._homes[affinity] = _Home.of(home)
            self._homes.move_to_end(affinity)
            return home
        candidates = self._candidates(now)
        candidates = [e for e in candidates if e not in avoid] or candidates
        candidates = [e for e in candidates if suits(e)] or candidates
        if not candidates:
            return None
        engine = home if home in candidates else None
        if engine is None:
            engine = _rendezvous(affinity, candidates)
        if self._is_behind(engine):
            self.used_behind += 1
        self._homes[affinity] = _Home.of(engine)
        self._homes.move_to_end(affinity)
        if len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return engine

    def _suits(self, affinity: str, home: _Home | None) -> Callable[[Engine], bool]:
        """Which engines are of the version that a trajectory is to be of."""
        canaries = {e.version for e in self if e.canary and e.reachable}
        if not canaries:
            return lambda engine: True
        if home is None:
            tries_it = _share(affinity) < self._canary_share
        else:
            tries_it = home.canary in canaries
        return lambda engine: engine.canary is tries_it

    def has_candidate(self, now: float, avoid: Collection[Engine] = ()) -> bool:
        """Whether `pick` would find an engine outside `avoid`."""
        return any(e not in avoid for e in self._candidates(now))

    def _candidates(self, now: float) -> list[Engine]:
        answering = [e for e in self if e.reachable and e.circuit.state == "closed"]
        current = [e for e in answering if not self._is_behind(e)]
        if current:
            self._all_behind_since = None
            return [e for e in current if e.well] or current
        if not answering:
            return []
        if self._all_behind_since is None:
            self._all_behind_since = now
        if now - self._all_behind_since < self._version_grace_s:
            return []
        newest = max(e.version or 0 for e in answering)
        return [e for e in answering if e.version == newest]

    def state(self, engine: Engine) -> State:
        if not engine.reachable:
            return "down"
        if engine.circuit.state != "closed":
            return "open"
        if self._is_behind(engine):
            return "behind"
        return "up" if engine.well else "ailing"

    def _is_behind(self, engine: Engine) -> bool:
        return (
            engine.returned
            and engine.version is not None
            and self.version is not None
            and engine.version < self.version
        )

    # -- what calls saw -----------------------------------------------------------------------

    def succeeded(self, engine: Engine, version: int | None, *, canary: bool = False) -> None:
        """A call was answered; `version` sampled its last token, as a canary or not."""
        engine.circuit.succeeded()
        if version is not None:
            self._saw(engine, version, canary)

    def answered_badly(self, engine: Engine, now: float, why: str) -> None:
        """A 5xx, a 429, or nonsense."""
        engine.why = why
        engine.circuit.failed(now)

    def broke(self, engine: Engine, now: float, why: str) -> None:
        """A connection could not be made or broke: no traffic until a check succeeds."""
        engine.why = why
        engine.epoch += 1
        engine.reachable = False
        engine.returned = True
        engine.circuit.failed(now)

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
        before = asked.version
        engine.reachable = True
        engine.silent = 0
        if version is None:
            engine.returned = False  # nothing to hold it to
        else:
            if before is not None and version < before:
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
            engine.reachable = False
            engine.returned = True
        if engine.silent >= 3:
            for deadline in engine.in_flight:
                deadline.reschedule(now)
            engine.in_flight.clear()
        if engine.circuit.try_half_open(now):
            engine.circuit.failed(now)

    def health(self, engine: Engine, now: float, *, well: bool, why: str = "") -> None:
        """What `/health` said after a passed check; the probe of a half-open circuit."""
        engine.well = well
        if why:
            engine.why = why
        if engine.circuit.try_half_open(now):
            if well:
                engine.circuit.succeeded()
            else:
                engine.circuit.failed(now)

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
        return {
            "version": self.version,
            "used_behind": self.used_behind,
            "engines": [
                {
                    "url": e.url,
                    "state": self.state(e),
                    "version": e.version,
                    "canary": e.canary,
                    "in_flight": len(e.in_flight),
                }
                for e in self
            ],
        }


def _rendezvous(affinity: str, engines: list[Engine]) -> Engine:
    if len(engines) > 1:
        factor, slack = MUCH_BUSIER
        limit = factor * min(len(e.in_flight) for e in engines) + slack
        engines = [e for e in engines if len(e.in_flight) <= limit]
    return max(engines, key=lambda e: _score(affinity, e.url))


def _share(affinity: str) -> float:
    """A number in [0, 1) that is always the same for a trajectory, at any gateway."""
    digest = hashlib.blake2b(affinity.encode(), digest_size=8, person=b"canary").digest()
    return int.from_bytes(digest) / 2**64


def _score(affinity: str, url: str) -> bytes:
    return hashlib.blake2b(f"{affinity}\0{url}".encode(), digest_size=8).digest()

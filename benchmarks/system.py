"""One run of a bench, the base of what it compares, gateways and stores, and the way to compare it.

All systems of a bench run at once and take turns on the same work in every round. Differences and
ratios are taken within a round: what else the machine does meets all of them. Medians over rounds.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from benchmarks.checks import BenchResult

T = TypeVar("T")


class System(ABC):
    """A program beside others. `running` before anything else; what it starts ends with it."""

    name: str
    pids: Sequence[int] = ()
    """Processes that serve, or hold what is stored; none: the client does it all."""

    @abstractmethod
    def running(self, *world: Any) -> AbstractAsyncContextManager[None]:
        """Serve inside the block.

        Args:
            world: what the systems of a bench share, such as the engine behind all gateways.
        """


SystemT = TypeVar("SystemT", bound=System)
SizeT = TypeVar("SizeT")


@dataclass(kw_only=True)
class Bench(Generic[SystemT, SizeT]):
    """One run: the sections of a bench fill its report, one after the other."""

    systems: Sequence[SystemT]
    """Programs that are compared."""
    size: SizeT
    """Amount of work that is measured."""
    report: BenchResult = field(default_factory=BenchResult)


def paired(of: Sequence[T], to: Sequence[T], compare: Callable[[T, T], float]) -> float:
    """Median over the rounds of `compare`, of two samples of the same round."""
    return statistics.median(compare(a, b) for a, b in zip(of, to, strict=True))

"""What a bench returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and the bound it must keep: an upper one, unless `upper` is False."""

    value: float
    bound: float
    upper: bool = True

    @property
    def holds(self) -> bool:
        return self.value <= self.bound if self.upper else self.value >= self.bound


@dataclass(frozen=True, slots=True)
class BenchResult:
    checks: dict[str, Check]
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "bench": name,
            "checks": {
                key: {"value": c.value, "bound": c.bound, "holds": c.holds}
                for key, c in self.checks.items()
            },
            "figures": self.figures,
        }

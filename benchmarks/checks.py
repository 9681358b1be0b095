"""What a bench returns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.trainer.errors import ConfigError


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
    """Filled by the sections of a bench, one after the other."""

    checks: dict[str, Check] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def without_bounds(self) -> BenchResult:
        """Every check as a mere figure: what a quick run measures says nothing about a bound."""
        values = {name: check.value for name, check in self.checks.items()}
        return BenchResult(figures={**self.figures, **values})

    def as_json(self, name: str) -> dict[str, Any]:
        return {
            "bench": name,
            "checks": {
                key: {"value": c.value, "bound": c.bound, "holds": c.holds}
                for key, c in self.checks.items()
            },
            "figures": self.figures,
        }


def chosen_sections(only: Sequence[str], sections: Collection[str]) -> set[str]:
    """Those named in `only`, or all.

    Raises:
        ConfigError: `only` names another.
    """
    for name in only:
        if name not in sections:
            raise ConfigError(f"only is {name!r}; choose from {', '.join(sections)}")
    return set(only or sections)

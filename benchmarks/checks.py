"""Result of a bench, and the sections that it consists of."""

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
    """Filled by the sections of a bench, one after the other. A figure may be a table, a list of
    rows."""

    checks: dict[str, Check] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def at_most(self, name: str, value: float, bound: float) -> None:
        self.checks[name] = Check(value, bound)

    def at_least(self, name: str, value: float, bound: float) -> None:
        self.checks[name] = Check(value, bound, upper=False)

    def zero(self, **values: float) -> None:
        """Check values that must be 0; one below it is as wrong as one above."""
        self.checks.update({name: Check(abs(value), 0) for name, value in values.items()})

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


def chosen_sections(only: Sequence[str], sections: Collection[str]) -> list[str]:
    """Return the sections named in `only`, or all, in the order in which they run.

    Raises:
        ConfigError: `only` names another.
    """
    for name in only:
        if name not in sections:
            raise ConfigError(f"only is {name!r}; choose from {', '.join(sections)}")
    return [name for name in sections if name in only or not only]

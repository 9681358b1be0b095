"""Output of `stepwell backends`: training backends, engines, policy losses, advantage estimators
and off-policy methods by name.

    Training backends  trainer.backend=NAME

      torch  ready    built in                Trains a transformers model on a CPU or GPUs.
      jsonl  ready    stepwell-example 0.1.0  Writes each prompt's group as a file of JSON lines.
      trees  broken   boosted 2.0

      backend 'trees' (boosted 2.0: boosted:Trees) cannot be imported: ModuleNotFoundError: …

Does not own the names and what is found out about them (`backends/registry.py`,
`trainer/algorithms/registry.py`).
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stepwell.backends.base import BACKENDS
from stepwell.backends.engines.kinds import ENGINES
from stepwell.backends.registry import Found
from stepwell.trainer.algorithms.registry import ESTIMATORS, METHODS, POLICY_LOSSES

_STYLES = {"ready": "green", "missing": "yellow", "broken": "red", "claimed twice": "red"}


def survey() -> list[tuple[str, str, list[Found]]]:
    """Return for each kind its title, the key that takes its names, and the plug-ins found."""
    return [
        ("Training backends", "trainer.backend=NAME", BACKENDS.survey()),
        ("Engines", "engine.kind=NAME", ENGINES.survey()),
        ("Policy losses", "algorithm.loss.policy=NAME", POLICY_LOSSES.survey()),
        ("Advantage estimators", "algorithm.adv_estimator=NAME", ESTIMATORS.survey()),
        ("Off-policy methods", "algorithm.off_policy.method=NAME", METHODS.survey()),
    ]


def show_plugins(console: Console) -> None:
    """A table for each kind of plug-in, and below it what is wrong with any."""
    for title, key, found in survey():
        console.print(Text.assemble((title, "bold"), "  ", (key, "dim")), end="\n\n")
        console.print(Padding(_table(found), (0, 0, 1, 2)))
        for f in found:
            if f.state != "ready":  # never wrapped: it may hold a command to copy
                console.print(Text(f"  {f.problem}\n", _STYLES[f.state]), soft_wrap=True)


def _table(found: list[Found]) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in ("name", "state", "source", "about"):
        table.add_column()
    for f in found:
        state = Text(f.state, _STYLES[f.state], no_wrap=True)
        name = Text(f.name, "bold", no_wrap=True)
        table.add_row(name, state, Text(f.source, "dim"), Text(f.about))
    return table

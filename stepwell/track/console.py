"""The console of a run: a line per optimizer step and a summary at the end, logged, too."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from stepwell.track.output import has_no_reader, print_nowhere

if TYPE_CHECKING:
    from stepwell.trainer.validation import Evaluation

log = logging.getLogger(__name__)

_UNSAFE = ("Cc", "Cf", "Cs", "Zl", "Zp")
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as block characters, from 0 to 1 or as far as all values reach."""
    low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    return "".join(_BARS[round((v - low) / (high - low) * 7)] for v in values[-width:])


def safe(text: str) -> str:
    """`text` in one line, with its control, direction and line characters shown: an agent's output
    moves no cursor and looks like no line of ours."""
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in _UNSAFE else c for c in text)


def all_safe(value: Any) -> Any:
    """`value` with every text in its lists and mappings `safe`."""
    match value:
        case str():
            return safe(value)
        case Mapping():
            return {all_safe(key): all_safe(item) for key, item in value.items()}
        case list() | tuple():
            return [all_safe(item) for item in value]
        case _:
            return value


class Terminal(Console):
    """A console whose reader may go before the end, as `head`, a `tee` that was interrupted and a
    terminal that was closed do: whoever prints goes on."""

    def print(self, *objects: Any, **how: Any) -> None:
        try:
            super().print(*objects, **how)
        except OSError as e:
            if not has_no_reader(e):
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        print_nowhere()


class Display:
    """Shows how the run called `name` goes on; `quiet` has no line for a step."""

    def __init__(self, name: str, mode: Literal["plain", "quiet"]) -> None:
        self.console = Terminal(highlight=False)
        self._name = name
        self._mode = mode

    def status(self, text: str, *, always: bool = False) -> None:
        log.info(text)  # a warning would be on the terminal a second time
        if always or self._mode == "plain":
            # Never wrapped: what was printed is searched by line.
            self.console.print(f"[{self._name}] {text}", markup=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any]) -> None:
        tool_use, no_signal = record["tool_use"], record.get("groups/no_signal")
        tools = "" if tool_use is None else f"tool use {tool_use:.2f}  "
        flat = "" if no_signal is None else f"no signal {no_signal:.0%}  "
        reward = f"reward {record['reward/mean']:.3f}  " if "reward/mean" in record else ""
        sft = f"sft loss {record['sft/loss']:.4f}  " if reward and "sft/loss" in record else ""
        ready = f"ready {record['pool/ready']}  " if "pool/ready" in record else ""
        self.status(
            f"step {record['step']:>4}  {reward}{tools}{flat}"
            f"{_loss(record)}  {sft}{ready}"
            f"{record['tokens_per_s']:.0f} tok/s  v{record['policy_version']}"
            f"{_failures(record)}"
        )
        if warning := record.get("warning"):
            self.status(f"warning: {warning}")

    def evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """A line for each step that was evaluated. Of live traffic one look finds several versions,
        whose windows overlap (`Pooled`): the newest is said."""
        for evaluation in {each.step: each for each in evaluations}.values():
            use = evaluation.tool_use
            tools = "" if use is None else f", tool use {use:.2f}"
            told = f"evaluation at step {evaluation.step}: {evaluation.describe()}{tools}"
            self.status(told, always=True)

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        """The last screen: what changed, how long it took, where the files are."""
        table = Table(
            title=f"{self._name}: before and after", title_justify="left", box=SIMPLE_HEAD
        )
        table.add_column("")
        table.add_column("before", justify="right")
        table.add_column("after", justify="right")
        for label, key in (
            ("evaluation score", "eval"),
            ("episodes that call a tool", "tool_use"),
        ):
            values = (summary[f"{key}_before"], summary[f"{key}_after"])
            if None not in values:
                table.add_row(label, *(f"{value:.2f}" for value in values))
        if table.row_count:
            self.console.print(table)
        turns, share = summary["steps_per_trajectory_mean"], summary["off_policy_share"]
        trained = f"{summary['trajectories_trained']} trajectories"
        if turns is not None:  # conversations that SFT trains have no turns
            trained += f" of {turns:.2f} steps on average"
        parts = [
            f"{summary['optimizer_steps']} optimizer steps in {summary['wall_s']:.0f} s",
            trained,
            *([] if share is None else [f"{share:.0%} of steps off-policy"]),
            f"peak memory {summary['peak_memory_gb']:.1f} GB",
        ]
        self.console.print(f"  {', '.join(parts)}", soft_wrap=True)
        if summary["rewards"]:
            self.console.print(f"  reward {sparkline(summary['rewards'])}")
        if losses := summary.get("sft_loss"):
            self.console.print(f"  SFT loss {losses[0]:.3f} → {losses[-1]:.3f}")
        if finding := summary.get("finding"):
            self.status(f"warning: {finding}", always=True)
        for name, text in (
            ("summary.json", "the figures"),
            ("metrics.jsonl", "one object per optimizer step"),
            ("reward.png", "the plot"),
            ("weights", "the published models"),
        ):
            self.console.print(f"  {folder / name}  [dim]{text}[/dim]", soft_wrap=True)


def _loss(record: Mapping[str, Any]) -> str:
    lag = f"lag {record['staleness/mean']:.2f}  " if "staleness/mean" in record else ""
    if "loss" in record:
        return f"{lag}loss {record['loss']:+.4f}"
    if "critic/loss" in record:
        return f"{lag}warm-up of the critic, loss {record['critic/loss']:.4f}"
    return "not trained"


def _failures(record: Mapping[str, Any]) -> str:
    failed = record.get("rollouts/failed", 0)
    return f"  ({failed} rollouts failed)" if failed else ""

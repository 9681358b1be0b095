"""The console of a run: a live table on a terminal, a line per optimizer step elsewhere. The lines
are logged, too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

log = logging.getLogger(__name__)

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as block characters, from 0 to 1 or as far as all values reach."""
    low, high = min(0.0, *values, 0.0), max(1.0, *values, 1.0)
    return "".join(_BARS[round((v - low) / (high - low) * 7)] for v in values[-width:])


class Display:
    """Shows progress; a context manager so that the terminal is restored whatever happens."""

    def __init__(
        self, name: str, total: int | None, mode: Literal["auto", "rich", "plain", "quiet"]
    ) -> None:
        self.console = Console(highlight=False)
        if mode == "auto":
            mode = "rich" if self.console.is_terminal else "plain"
        self._mode = mode
        self._name = name
        self._status = "starting"
        self._rewards: list[float] = []
        self._last: Mapping[str, Any] = {}
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task(name, total=total)
        self._live = Live(console=self.console, refresh_per_second=4, get_renderable=self.render)

    def __enter__(self) -> Self:
        if self._mode == "rich":
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def status(self, text: str) -> None:
        """A phase outside the steps: starting, evaluating, saving."""
        self._status = text
        log.info(text)
        if self._mode == "plain":
            self._line(text)

    def resume_at(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def step(self, record: Mapping[str, Any]) -> None:
        self._last = record
        self._status = "training"
        self._rewards.append(float(record["reward/mean"]))
        self._progress.update(self._task, completed=record["step"])
        tool_use, no_signal = record["tool_use"], record.get("groups/no_signal")
        tools = "" if tool_use is None else f"tool use {tool_use:.2f}  "
        flat = "" if no_signal is None else f"no signal {no_signal:.0%}  "
        ready = f"ready {record['pool/ready']}  " if "pool/ready" in record else ""
        line = (
            f"step {record['step']:>4}  reward {record['reward/mean']:.3f}  {tools}{flat}"
            f"lag {record['staleness/mean']:.2f}  "
            f"{_loss(record)}  {ready}"
            f"{record['tokens_per_s']:.0f} tok/s  v{record['policy_version']}"
            f"{_failures(record)}"
        )
        log.info(line)
        if self._mode == "plain":
            self._line(line)
        if warning := record.get("warning"):
            log.info("warning: %s", warning)  # a warning would be on the terminal a second time
            if self._mode != "quiet":
                self._line(f"warning: {warning}")

    def evaluation(self, step: int, score: float, tool_use: float | None) -> None:
        tools = "" if tool_use is None else f", tool use {tool_use:.2f}"
        line = f"evaluation at step {step}: score {score:.3f}{tools}"
        log.info(line)
        self._line(line)

    def _line(self, text: str) -> None:
        # Never wrapped: a log is searched by line.
        self.console.print(f"[{self._name}] {text}", markup=False, soft_wrap=True)

    def summary(self, summary: Mapping[str, Any], folder: Path) -> None:
        """The last screen: what changed, how long it took, where the files are."""
        self._live.stop()  # its last frame stays above
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
        share = summary["off_policy_share"]
        self.console.print(
            f"  {summary['optimizer_steps']} optimizer steps in {summary['wall_s']:.0f} s, "
            f"{summary['trajectories_trained']} trajectories of "
            f"{summary['steps_per_trajectory_mean'] or 0:.2f} steps on average, "
            f"{0 if share is None else share:.0%} of steps off-policy, "
            f"peak memory {summary['peak_memory_gb']:.1f} GB",
            soft_wrap=True,
        )
        self.console.print(f"  reward {sparkline(summary['rewards'])}")
        for name, text in (
            ("summary.json", "the figures"),
            ("metrics.jsonl", "one object per optimizer step"),
            ("reward.png", "the plot"),
            ("weights", "the published models"),
        ):
            self.console.print(f"  {folder / name}  [dim]{text}[/dim]", soft_wrap=True)

    def render(self) -> Group:
        table = Table.grid(padding=(0, 3))
        r = self._last
        if r:
            table.add_row("reward", f"{r['reward/mean']:.3f}  {sparkline(self._rewards)}")
            if r["tool_use"] is not None:
                table.add_row("tool use", f"{r['tool_use']:.2f}")
            if (share := r.get("groups/no_signal")) is not None:
                table.add_row("no signal", f"{share:.0%} of groups: all rewards equal")
            table.add_row(
                "staleness",
                f"mean {r['staleness/mean']:.2f}  max {r['staleness/max']:.2f} versions, "
                f"{r['off_policy_share']:.0%} of steps off-policy",
            )
            table.add_row(
                "queue",
                f"{r['pool/ready']} ready, {r['pool/open']} open, {r['pool/leased']} leased"
                f"{_failures(r)}",
            )
            table.add_row(
                "speed",
                f"{r['tokens_per_s']:.0f} tokens/s, step {r['time/step_s']:.2f} s "
                f"(waited {r['time/wait_s']:.2f} s for data)",
            )
            table.add_row("policy", f"version {r['policy_version']}, {_loss(r)}")
        return Group(self._progress, Text(f"  {self._status}", style="dim"), table)


def _loss(record: Mapping[str, Any]) -> str:
    if "loss" in record:
        return f"loss {record['loss']:+.4f}"
    return f"warm-up of the critic, loss {record['critic/loss']:.4f}"


def _failures(record: Mapping[str, Any]) -> str:
    failed = record.get("rollouts/failed", 0)
    return f"  ({failed} rollouts failed)" if failed else ""

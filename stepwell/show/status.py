"""This module shows how a run is doing on one screen: `stepwell status`, and again and again in
`stepwell top`.

    read_status(view) ──► one JSON object: parts, pool, gateway, trainer   `--json`
    status_screen(…)  ──► the same for people

Shows what others count (`get_statistics`, the gateway's `/statistics`, metrics.jsonl) and counts
nothing. Does not own finding the run (`show/run.py`).
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.types import TRAIN
from stepwell.gateway.ui.alerts import UNRECORDED
from stepwell.run.folder import ANSWER_S
from stepwell.show.run import RunView
from stepwell.track.console import all_safe, sparkline

COLOURS = {"up": "green", "alive": "green", "ended": "dim", "ailing": "yellow", "behind": "yellow"}

# -- what there is -----------------------------------------------------------------------------


async def read_status(view: RunView) -> dict[str, Any]:
    """Return the run's status as JSON values. A part that does not answer has an `error`."""
    run, records = view.run, view.records()
    try:
        async with asyncio.timeout(ANSWER_S):  # a pool that restarts is waited for much longer
            pool = await view.pool.get_statistics()
    except (DataPoolError, TimeoutError) as e:
        pool = {"error": str(e) or f"no answer in {ANSWER_S:g} s"}
    # A run that was found by the address of its Ray may have its folder on another machine.
    disk = shutil.disk_usage(view.folder) if view.folder.is_dir() else None
    return {
        "run": run.name,
        "folder": str(view.folder),
        "state": "alive" if view.lives() else "ended",
        "pid": run.pid,
        "host": run.host,
        "started_at": run.started_at.isoformat(),
        "at": datetime.now(UTC).isoformat(),
        "gateways": await _gateways(view),
        "pool": pool,
        "trainer": {
            "pid": view.trainer_pid,
            "of": run.config.get("trainer", {}).get("total_steps"),
            "last": records[-1] if records else None,
            "rewards": [r.get("reward/mean") for r in records],
        },
        "evaluations": await asyncio.to_thread(_evaluations, view),
        "disk": disk and {"free_bytes": disk.free, "total_bytes": disk.total},
    }


async def _gateways(view: RunView) -> list[dict[str, Any]]:
    gateway = view.run.gateway
    if gateway is None or not view.is_alive:
        return []

    def ask(url: str) -> dict[str, Any]:
        try:
            return {"url": url, **gateway.ask(url, "/statistics")}
        except OSError as e:
            return {"url": url, "error": str(e)}

    return list(await asyncio.gather(*(asyncio.to_thread(ask, url) for url in gateway.urls)))


def _evaluations(view: RunView) -> list[dict[str, Any]]:
    """The first and the last one; of live traffic those of enough rollouts, each of the last
    versions together."""
    of_one = ("score", "score_low", "score_high", "rollouts", "version")
    of_several = ("score", "low", "high", "rollouts", "oldest_version")
    keys = ["val/step", *(f"val/{name}" for name in of_one)]
    figures = view.files.series([*keys, *(f"val/pooled/{name}" for name in of_several)])
    found = []
    for i, step in enumerate(figures["val/step"]):
        if step is None:
            continue
        one = {name: figures[f"val/{name}"][i] for name in of_one}
        several = {name: figures[f"val/pooled/{name}"][i] for name in of_several}
        is_pooled = several["rollouts"] is not None
        of = several if is_pooled else one
        found.append(
            {
                "step": int(step),
                "score": of["score"],
                "low": of["low" if is_pooled else "score_low"],
                "high": of["high" if is_pooled else "score_high"],
                "rollouts": int(of["rollouts"]),
                "version": _whole(one["version"]),
                "oldest_version": _whole(
                    several["oldest_version"] if is_pooled else one["version"]
                ),
            }
        )
    enough = [each for each in found if each["score"] is not None] or found
    return enough[:1] + enough[1:][-1:]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


# -- for people --------------------------------------------------------------------------------


def status_screen(
    status: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> RenderableType:
    """
    Args:
        before: an earlier status, to show rates since; None: none are shown.
    """
    status = all_safe(status)
    rates = _Rates(status, before)
    parts = Table.grid(padding=(0, 2))
    parts.add_column(no_wrap=True, style="bold")
    parts.add_column()
    is_here = status["disk"] is not None
    elsewhere = (
        "" if is_here else ", not on this machine: neither its trainer nor its figures are seen"
    )
    for name, text in (
        ("folder", Text(f"{status['folder']}{elsewhere}")),
        *(("gateway", _gateway(each, rates)) for each in status["gateways"]),
        *(("engine", _engine(each)) for each in _engines(status)),
        ("trainer", _trainer(status) if is_here else None),
        ("reward", _reward(status)),
        ("waits", _waits(status)),
        ("disk", _disk(status["disk"]) if is_here else None),
    ):
        if text:
            parts.add_row(name, text)
    lines: list[RenderableType] = [_title(status), "", parts, ""]
    pool = status["pool"]
    if "error" in pool:
        lines.append(Text(f"the pool does not answer: {pool['error']}", "red"))
    else:
        lines += [_channels(pool, rates), *_reasons(pool)]
    return Group(*lines)


def _title(status: Mapping[str, Any]) -> Text:
    since = datetime.fromisoformat(status["started_at"])
    where = f"  process {status['pid']} on {status['host']}, since {since:%Y-%m-%d %H:%M} UTC"
    if status["state"] == "ended":
        where = (
            f"  was process {status['pid']} on {status['host']}, from {since:%Y-%m-%d %H:%M} UTC"
        )
    return Text.assemble(
        (status["run"], "bold"), "  ", (status["state"], COLOURS[status["state"]]), (where, "dim")
    )


def _gateway(gateway: Mapping[str, Any], rates: _Rates) -> Text:
    if "error" in gateway:
        return Text.assemble(gateway["url"], "  ", (f"does not answer: {gateway['error']}", "red"))
    calls, limits = gateway["calls"], gateway["limits"]
    latency = gateway["added_latency"]
    said = [
        f"{calls.get('calls', 0):,} calls{rates.of_gateway(gateway['url'])}",
        f"{limits['running']} running",
        *([f"{limits['waiting']} waiting"] if limits["waiting"] else []),
        *([f"{calls['failed']:,} failed"] if calls.get("failed") else []),
    ]
    if latency["calls"]:
        said.append(f"adds {latency['p50_ms']:.0f} ms, p99 {latency['p99_ms']:.0f}")
    text = Text.assemble(gateway["url"], "  ", ("up", "green"), "  ", _together(said))
    if share := gateway["recording"]["unrecorded_share"]:
        few = share < UNRECORDED
        text.append(f" · {'a few' if few else f'{share:.1%}'} not recorded", "" if few else "red")
    return text


def _engines(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the engines, as the first gateway that answers sees them."""
    found = (g["engine"]["engines"] for g in status["gateways"] if "engine" in g)
    return next(found, [])


def _engine(engine: Mapping[str, Any]) -> Text:
    state = engine["state"]
    return Text.assemble(
        engine["url"],
        "  ",
        (state, COLOURS.get(state, "red")),
        f"  version {engine['version']}{' (canary)' * engine['canary']} · "
        f"{engine['in_flight']} in flight",
    )


def _trainer(status: Mapping[str, Any]) -> Text:
    trainer, train = status["trainer"], status["pool"].get(TRAIN, {})
    last = trainer["last"]
    text = Text()
    if trainer["pid"] is None and status["state"] == "alive":
        text.append("nobody trains  ", "yellow")
        if train and not train["has_consumer"]:
            text.append(
                f"{train['ready']:,} groups wait for a first trainer "
                f"(stepwell train --attach {shlex.quote(status['folder'])})  ",
                "yellow",
            )
    if last is None:
        return text.append("no optimizer step yet")
    of = f" of {trainer['of']}" if trainer["of"] is not None else ""
    said = [f"step {last['step']}{of}", f"version {last['policy_version']}"]
    for key, name, form in (
        ("reward/mean", "reward", "{:.3f}"),
        ("loss", "loss", "{:+.4f}"),
        ("staleness/mean", "lag", "{:.2f}"),
        ("groups/no_signal", "no signal", "{:.0%}"),
        ("tokens_per_s", "", "{:,.0f} tok/s"),
    ):
        if last.get(key) is not None:
            said.append(f"{name} {form.format(last[key])}".strip())
    return text.append(_together(said))


def _reward(status: Mapping[str, Any]) -> Text:
    text = Text(sparkline([r for r in status["trainer"]["rewards"] if r is not None]))
    scores = [_evaluation(each) for each in status["evaluations"]]
    if scores:
        text.append(f"{'  ' * bool(text)}evaluation {' → '.join(scores)}")
    return text


def _evaluation(each: Mapping[str, Any]) -> str:
    version, oldest = each["version"], each["oldest_version"]
    versions = "" if version is None else f", v{version}"
    if version != oldest is not None:
        versions = f", v{oldest}-{version}"
    if each["score"] is None:
        return f"of {each['rollouts']} rollouts, too few to say{versions}"
    within = "" if each["low"] is None else f" ({each['low']:.2f} to {each['high']:.2f})"
    return f"{each['score']:.3f}{within} of {each['rollouts']}{versions} at step {each['step']}"


def _waits(status: Mapping[str, Any]) -> Text:
    last = status["trainer"]["last"] or {}
    said = []
    if (share := last.get("wait/trainer_starved")) is not None:
        said.append(f"the trainer waits for groups {share:.0%} of its time")
    if (share := last.get("wait/generation_saturated")) is not None:
        said.append(f"generation for the trainer {share:.0%}")
    return Text(_together(said))


def _disk(disk: Mapping[str, int]) -> Text:
    free = disk["free_bytes"] / disk["total_bytes"]
    return Text(
        f"{disk['free_bytes'] / 1e9:,.0f} GB free ({free:.0%})", "red" if free < 0.05 else ""
    )


def _channels(pool: Mapping[str, Any], rates: _Rates) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("groups")
    for name in ("open", "ready", "held", "leased", "acked", "dropped", "tokens", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, counts in pool.items():
        groups = counts["groups"]
        table.add_row(
            name,
            f"{groups['open']:,}",
            f"{counts['ready']:,}",
            f"{groups['held']:,}",
            f"{groups['leased']:,}",
            f"{groups['acked']:,}{rates.of_channel(name)}",
            Text(f"{groups['dropped']:,}", "yellow" if groups["dropped"] else ""),
            f"{counts['tokens']['stored']:,}",
            f"{counts['memory_bytes'] / 1e6:,.1f} MB",
        )
    return table


def _reasons(pool: Mapping[str, Any]) -> list[RenderableType]:
    """Why groups were dropped, and why the oldest ones are still open."""
    lines: list[RenderableType] = []
    for name, counts in pool.items():
        for title, reasons in (
            ("dropped", counts["groups"]["drop_reasons"]),
            ("aborted", counts["trajectories"]["abort_reasons"]),
        ):
            if reasons:
                told = sorted(reasons.items(), key=lambda item: -item[1])
                said = _together(f"{reason} {n:,}" for reason, n in told)
                lines.append(Text.assemble((f"{title} in {name}  ", "bold"), said))
        for group in counts["oldest_open"][:3]:
            lines.append(
                Text.assemble(
                    (f"open in {name}  ", "bold"),
                    f"{group['prompt_uid']}  {group['why']} ({group['age_s']:.0f} s)",
                )
            )
    return ["", *lines] if lines else []


def _together(figures: Iterable[str]) -> str:
    """Figures in a row; a line breaks between them only."""
    return " · ".join(figure.replace(" ", "\u00a0") for figure in figures)


class _Rates:
    """Per second, between two statuses."""

    def __init__(self, now: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        self._now, self._before = now, before
        self._s = 0.0
        if before is not None:
            at = [datetime.fromisoformat(each["at"]) for each in (before, now)]
            self._s = (at[1] - at[0]).total_seconds()

    def of_gateway(self, url: str) -> str:
        """` (N/s)` of the calls of one replica, or nothing."""

        def calls(status: Mapping[str, Any]) -> int | None:
            found = (g["calls"] for g in status["gateways"] if g["url"] == url and "calls" in g)
            return next((each.get("calls", 0) for each in found), None)

        return self._of(calls)

    def of_channel(self, name: str) -> str:
        """` (N/s)` of the groups that were acked in a channel, or nothing."""
        return self._of(lambda status: status["pool"].get(name, {}).get("groups", {}).get("acked"))

    def _of(self, count: Callable[[Mapping[str, Any]], int | None]) -> str:
        """Nothing of what did not answer at one of both times: it would be a rate since its
        start."""
        if self._before is None or self._s <= 0:
            return ""
        before, now = count(self._before), count(self._now)
        if before is None or now is None:
            return ""
        return f" ({max(0, now - before) / self._s:,.1f}/s)"


# -- live --------------------------------------------------------------------------------------


async def watch(view: RunView, console: Console, interval_s: float) -> None:
    """Show the status until cancelled. The rates are those of the last ten seconds."""
    seen: list[Mapping[str, Any]] = []
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            status = await read_status(view)
            seen = [*seen[-max(1, round(10 / interval_s)) :], status]
            keys = Text(f"\nevery {interval_s:g} s · Ctrl-C ends it", "dim")
            live.update(Group(status_screen(status, seen[0]), keys), refresh=True)
            await asyncio.sleep(max(0.1, interval_s - (time.monotonic() - began)))

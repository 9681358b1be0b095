"""This module says what is wrong with a run now, since when, with the evidence and what to do, so
that nobody has to know which number of which page to look at.

    figures of gateway, pool and trainer ──► a tick ──► alerts: title, why, since, where to look
    events, counts of calls ──Recent──► those of the last ten minutes ──┘

An alert is over with what it is about: rates are those of the last ten minutes, and figures of a
trainer that is gone are no news. `alerts` is pure. Thresholds are here and nowhere else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from stepwell.datapool.inspect.events import Event
from stepwell.datapool.types import VAL

STARVING_S: Final = 120.0
"""An open group of this age with nothing running, which no deadline ends, is starving."""
GAP: Final = 0.1
"""max |log π - log μ| of on-policy tokens; float32 on both sides stays below 0.01."""
UNRECORDED: Final = 1e-3
"""Share of the calls: one call for a closed conversation in thousands is no fault."""
SOLVED: Final = 0.9
"""Mean reward from which on groups without a signal are solved: rewards are 0 to 1 then."""
WAITING: Final = 0.5
"""Share of a step's wall time."""
DROPPED: Final = 0.2
"""Share of the groups that ended, …"""
ENOUGH: Final = 20
"""… once so many have."""
NO_TRAINER_S: Final = 60.0
"""Seconds without a lease, and without somebody who waits for one, after which there is no
trainer. One that trains has leases until its checkpoint."""
WINDOW_S: Final = 600.0
"""Seconds that rates are of."""
SAMPLE_S: Final = 10.0
"""Seconds between two samples of counts."""
STALE_STEPS: Final = 5.0
"""Optimizer steps' time, and …"""
STALE_S: Final = 120.0
"""… seconds at least, after which the last record is of a trainer that is gone."""


class Alert(NamedTuple):
    key: str
    """Names what is wrong while its figures change."""
    severity: str
    """`error` or `warning`"""
    title: str
    why: str
    page: str = "overview"
    """Page of the evidence."""
    params: Mapping[str, Any] = {}
    """Its parameters."""


class Recent:
    """Memory of the last `WINDOW_S`: groups that ended, calls, and since when each alert is on."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, str, str]] = deque()
        """Time, channel, and `acked` or why it was dropped."""
        self._leased_at: dict[str, float] = {}
        self._calls: deque[tuple[float, int, Counter[str]]] = deque()
        self._since: dict[str, float] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Note events that were not seen before."""
        for event in events:
            if event.kind == "leased":
                self._leased_at[event.channel] = event.time
            elif event.kind in ("acked", "dropped"):
                how = "acked" if event.kind == "acked" else f"dropped {event.data['reason']}"
                self._ended.append((event.time, event.channel, how))

    def of_channels(self, names: Iterable[str], now: float) -> dict[str, dict[str, Any]]:
        """Groups of each channel that ended in the window, and its last lease."""
        while self._ended and self._ended[0][0] < now - WINDOW_S:
            self._ended.popleft()
        found: dict[str, Any] = {
            name: {"acked": 0, "dropped": Counter(), "leased_at": self._leased_at.get(name)}
            for name in names
        }
        for _, name, how in self._ended:
            if name in found and how == "acked":
                found[name]["acked"] += 1
            elif name in found:
                found[name]["dropped"][how.removeprefix("dropped ")] += 1
        return found

    def of_calls(self, stored: int, unrecorded: Mapping[str, int], now: float) -> dict[str, Any]:
        """Calls of the window; `seconds` None: since the gateway was started, as nobody looked
        before."""
        if not self._calls or now - self._calls[-1][0] >= SAMPLE_S:
            self._calls.append((now, stored, Counter(unrecorded)))
        while len(self._calls) > 1 and self._calls[1][0] <= now - WINDOW_S:
            self._calls.popleft()
        at, before, causes = self._calls[0]
        if now - at < WINDOW_S:
            return {"stored": stored, "unrecorded": dict(unrecorded), "seconds": None}
        left = dict(Counter(unrecorded) - causes)
        return {"stored": stored - before, "unrecorded": left, "seconds": now - at}

    def dated(self, found: Iterable[Alert], now: float) -> list[dict[str, Any]]:
        """The alerts with the time at which each was first seen without an end since."""
        every = list(found)
        self._since = {each.key: self._since.get(each.key, now) for each in every}
        return [{**each._asdict(), "since": self._since[each.key]} for each in every]


def alerts(tick: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield an alert for each thing that is wrong in one tick (`live.py`). Of a run that is over,
    only what its last step was wrong with."""
    metrics = tick.get("metrics") or {}
    if (why := tick.get("metrics_error")) is not None:
        yield Alert("metrics", "error", "The trainer's figures cannot be read", why, "batches")
    if tick.get("is_over"):
        yield from _numbers(metrics)
        return
    yield from _gateway(tick.get("gateway") or {})
    yield from _calls(tick.get("calls") or {})
    if tick.get("pool") is None:
        why = tick.get("pool_error") or "see the gateway's log"
        yield Alert("pool", "error", "The pool does not answer", why, "pool")
    step_s = metrics.get("time/step_s") or 0.0
    is_gone = (tick.get("metrics_age_s") or 0.0) > max(STALE_S, STALE_STEPS * step_s)
    for name, channel in (tick.get("pool") or {}).items():
        recent = (tick.get("recent") or {}).get(name) or {}
        yield from _channel(name, channel, recent, tick["at"], is_gone=is_gone)
    if not is_gone:
        yield from _numbers(metrics)
        yield from _trainer(metrics)


def _gateway(gateway: Mapping[str, Any]) -> Iterator[Alert]:
    for engine in gateway.get("engine", {}).get("engines", []):
        if engine["state"] in ("down", "open"):
            yield Alert(
                f"engine {engine['url']}",
                "error",
                f"Engine {engine['url']} is {'down' if engine['state'] == 'down' else 'failing'}",
                "its calls go to other engines, or wait; see logs/engine*.log in the run's folder",
            )
        elif engine["state"] == "behind":
            yield Alert(
                f"engine {engine['url']}",
                "warning",
                f"Engine {engine['url']} has old weights",
                f"it serves version {engine['version']} and gets calls only if no other can",
            )


def _calls(calls: Mapping[str, Any]) -> Iterator[Alert]:
    causes: Mapping[str, int] = calls.get("unrecorded") or {}
    n = sum(causes.values())
    if not n or (share := n / (n + calls["stored"])) < UNRECORDED:
        return
    told = ", ".join(f"{count} {why}" for why, count in causes.items())
    since = "since the gateway was started"
    if calls["seconds"] is not None:
        since = f"in the last {calls['seconds'] / 60:.0f} minutes"
    title = f"{_share(share)} of the calls are not stored"
    yield Alert("unrecorded", "warning", title, f"{told}, {since}")


def _share(share: float) -> str:
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def _channel(
    name: str,
    channel: Mapping[str, Any],
    recent: Mapping[str, Any],
    now: float,
    *,
    is_gone: bool,
) -> Iterator[Alert]:
    for group in channel.get("oldest_open", []):
        has_end = group["deadline_in_s"] is not None
        if group["age_s"] > STARVING_S and not group["running"] and not has_end:
            yield Alert(
                f"starving {name}",
                "warning",
                f"Group {group['prompt_uid']} in {name} is starving",
                f"open for {group['age_s']:.0f} s: {group['why']}",
                "group",
                {"prompt_uid": group["prompt_uid"], "channel": name},
            )
            break  # the oldest; the others are listed under Groups
    if (
        name != VAL
        and channel.get("ready")
        and not _has_trainer(channel, recent, now, is_gone=is_gone)
    ):
        leased_at = recent.get("leased_at")
        last = "none was ever leased"
        if leased_at is not None:
            last = f"the last one was leased {_minutes(now - leased_at)} ago"
        elif channel["has_consumer"]:
            last = "none was leased lately"
        yield Alert(
            f"no trainer {name}",
            "warning",
            f"No trainer takes groups of {name}",
            f"{channel['ready']:,} groups are ready and {last}: start one with stepwell train "
            "--attach and the run's folder",
            "pool",
        )
    dropped: Mapping[str, int] = recent.get("dropped") or {}
    n_dropped = sum(dropped.values())
    ended = n_dropped + recent.get("acked", 0)
    if ended >= ENOUGH and n_dropped / ended > DROPPED:
        reasons = sorted(dropped.items(), key=lambda item: -item[1])
        causes = ", ".join(f"{n} {why}" for why, n in reasons)
        yield Alert(
            f"dropped {name}",
            "warning",
            f"{n_dropped / ended:.0%} of the groups of {name} were dropped",
            f"{causes}, of {ended} that ended in the last {WINDOW_S / 60:.0f} minutes",
            "groups",
            {"view": "gone", "channel": name},
        )


def _has_trainer(
    channel: Mapping[str, Any], recent: Mapping[str, Any], now: float, *, is_gone: bool
) -> bool:
    """
    Args:
        is_gone: the trainer of this run writes no records any more; its leases may last on.
    """
    if channel.get("waiting", {}).get("consumers"):
        return True
    if channel["leases"]["active"] and not is_gone:
        return True
    leased_at = recent.get("leased_at")
    return leased_at is not None and now - leased_at < NO_TRAINER_S


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _numbers(metrics: Mapping[str, Any]) -> Iterator[Alert]:
    at = f"at optimizer step {metrics.get('step')}"
    page, params = "batch", {"step": metrics.get("step")}
    gap = metrics.get("log_prob_gap")
    if gap is not None and gap > GAP:
        yield Alert(
            "gap",
            "error",
            f"Engine and trainer disagree: log-prob gap {gap:.3g}",
            f"{at}: on-policy tokens should have the same log-probs on both sides; compare dtype, "
            "temperature and weights of the two",
            page,
            params,
        )
    # Of a critic's warm-up, and where no token is trained, there is no count: nothing is wrong.
    if metrics.get("skipped") and "skipped_updates" in metrics:
        title = "The last optimizer step was skipped"
        yield Alert("skipped", "error", title, f"{at}: a gradient was not finite", page, params)


def _trainer(metrics: Mapping[str, Any]) -> Iterator[Alert]:
    of = f"of step {metrics.get('step')}"
    page, params = "batch", {"step": metrics.get("step")}
    if (share := metrics.get("wait/trainer_starved") or 0) > WAITING:
        why = "generation is the bottleneck: more engines, more concurrency, or a smaller batch"
        title = f"The trainer waits for groups {share:.0%} of the time"
        yield Alert("trainer waits", "warning", title, f"{of}: {why}", page, params)
    if (share := metrics.get("wait/generation_saturated") or 0) > WAITING:
        why = "training is the bottleneck: what is generated meanwhile would be too old"
        title = f"Generation waits for the trainer {share:.0%} of the time"
        yield Alert("generation waits", "warning", title, f"{of}: {why}", page, params)
    mean = metrics.get("reward/mean")
    is_solved = mean is not None and SOLVED <= mean <= 1
    if (share := metrics.get("groups/no_signal") or 0) > WAITING and not is_solved:
        why = "all their rollouts have the same reward: choose harder or easier tasks, or filter"
        title = f"{share:.0%} of the groups teach nothing"
        yield Alert("no signal", "warning", title, f"{of}: {why}", page, params)

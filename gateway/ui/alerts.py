"""This module says what is wrong with a run now, with the reason and what to do, so that nobody has
to know which number of which page to look at.

    figures of gateway, pool and trainer ──► alerts: severity, title, why

Pure. Thresholds are here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from stepwell.datapool.types import VAL

STARVING_S: Final = 120.0
"""An open group of this age with nothing running is starving."""
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


class Alert(NamedTuple):
    severity: str
    """`error` or `warning`"""
    title: str
    why: str


def alerts(tick: Mapping[str, Any]) -> Iterator[Alert]:
    """Yield an alert for each thing that is wrong in one tick (`live.py`)."""
    yield from _gateway(tick.get("gateway") or {})
    if tick.get("pool") is None:
        why = tick.get("pool_error") or "see the gateway's log"
        yield Alert("error", "The pool does not answer", why)
    for name, channel in (tick.get("pool") or {}).items():
        yield from _channel(name, channel)
    yield from _trainer(tick.get("metrics") or {})


def _gateway(gateway: Mapping[str, Any]) -> Iterator[Alert]:
    for engine in gateway.get("engine", {}).get("engines", []):
        if engine["state"] in ("down", "open"):
            yield Alert(
                "error",
                f"Engine {engine['url']} is {'down' if engine['state'] == 'down' else 'failing'}",
                "its calls go to other engines, or wait; see logs/engine*.log in the run's folder",
            )
        elif engine["state"] == "behind":
            yield Alert(
                "warning",
                f"Engine {engine['url']} has old weights",
                f"it serves version {engine['version']} and gets calls only if no other can",
            )
    recording = gateway.get("recording", {})
    if (share := recording.get("unrecorded_share") or 0) >= UNRECORDED:
        causes = ", ".join(f"{n} {why}" for why, n in recording["unrecorded"].items())
        yield Alert("warning", f"{_rate(share)} of the calls are not stored", causes)


def _rate(share: float) -> str:
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def _channel(name: str, channel: Mapping[str, Any]) -> Iterator[Alert]:
    for group in channel.get("oldest_open", []):
        if group["age_s"] > STARVING_S and not group["running"]:
            yield Alert(
                "warning",
                f"Group {group['prompt_uid']} in {name} is starving",
                f"open for {group['age_s']:.0f} s: {group['why']}",
            )
            break  # the oldest; the others are listed under Groups
    if name != VAL and channel.get("ready") and not channel["has_consumer"]:
        yield Alert(
            "warning",
            f"Nobody has leased of {name} yet",
            f"{channel['ready']:,} groups are ready and wait for a trainer: start one with "
            "stepwell train --attach, and the run's folder",
        )
    groups = channel["groups"]
    ended = groups["dropped"] + groups["acked"]
    if ended >= ENOUGH and groups["dropped"] / ended > DROPPED:
        reasons = sorted(groups["drop_reasons"].items(), key=lambda item: -item[1])
        causes = ", ".join(f"{n} {why}" for why, n in reasons)
        title = f"{groups['dropped'] / ended:.0%} of the groups of {name} were dropped"
        yield Alert("warning", title, causes)


def _trainer(metrics: Mapping[str, Any]) -> Iterator[Alert]:
    gap = metrics.get("log_prob_gap")
    if gap is not None and gap > GAP:
        yield Alert(
            "error",
            f"Engine and trainer disagree: log-prob gap {gap:.3g}",
            "on-policy tokens should have the same log-probs on both sides; compare dtype, "
            "temperature and weights of the two",
        )
    if metrics.get("skipped"):
        yield Alert("error", "The last optimizer step was skipped", "a gradient was not finite")
    if (share := metrics.get("wait/trainer_starved") or 0) > WAITING:
        why = "generation is the bottleneck: more engines, more concurrency, or a smaller batch"
        yield Alert("warning", f"The trainer waits for groups {share:.0%} of the time", why)
    if (share := metrics.get("wait/generation_saturated") or 0) > WAITING:
        why = "training is the bottleneck: what is generated meanwhile would be too old"
        yield Alert("warning", f"Generation waits for the trainer {share:.0%} of the time", why)
    mean = metrics.get("reward/mean")
    is_solved = mean is not None and SOLVED <= mean <= 1
    if (share := metrics.get("groups/no_signal") or 0) > WAITING and not is_solved:
        why = "all their rollouts have the same reward: choose harder or easier tasks, or filter"
        yield Alert("warning", f"{share:.0%} of the groups teach nothing", why)

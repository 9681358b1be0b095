"""Rules of the dashboard's alerts, each in situations that were recorded from real runs
(`tests/ui/record.py`), bad and good; and at their thresholds, in these with other figures."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from stepwell.datapool.inspect.events import Event
from stepwell.gateway.ui.alerts import SAMPLE_S, WINDOW_S, Recent, alerts
from tests.ui.record import SITUATIONS

RECORDED = {
    "training": [],  # a quickstart run in the middle
    "no_trainer_yet": ["no trainer train", "dropped train"],  # stepwell serve, and agents
    "calls_not_stored": ["unrecorded", "dropped train"],  # a slow pool; a trainer was attached
    "trainer_just_killed": ["dropped train"],  # for a minute it may be in a long step
    "trainer_gone": ["no trainer train", "dropped train"],  # it was killed two minutes ago
    "engine_down": ["engine", "no trainer train"],  # it was killed a second ago
    # A declared group that nobody runs, beside traffic that nobody trains on.
    "starving": ["starving train", "no trainer train", "dropped train"],
}


def recorded(name: str, **changes: Any) -> dict[str, Any]:
    """A situation; `changes`: other values, by their path with `__` between names."""
    found: dict[str, Any] = json.loads((SITUATIONS / f"{name}.json").read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        inside = found
        for parent in parents:
            inside = inside[parent]
        inside[last] = value
    return found


def keys(tick: dict[str, Any]) -> list[str]:
    return [alert.key.split(" http")[0] for alert in alerts(tick)]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_situation_has_the_alerts_that_are_so(name: str) -> None:
    assert keys(recorded(name)) == RECORDED[name]


@pytest.mark.parametrize(
    ("state", "title"),
    [("up", None), ("down", "is down"), ("open", "is failing"), ("behind", "has old weights")],
)
def test_an_engine_is_told_in_the_state_that_it_is_in(state: str, title: str | None) -> None:
    tick = recorded("engine_down")
    tick["gateway"]["engine"]["engines"][0]["state"] = state
    titles = [alert.title for alert in alerts(tick) if alert.key.startswith("engine")]
    assert [text.split("35497 ")[1] for text in titles] == [title] * (title is not None)


def test_a_pool_that_does_not_answer_is_told_with_its_reason() -> None:
    tick = recorded("training", pool=None, pool_error="the pool's process is gone")
    (found,) = alerts(tick)
    assert (found.key, found.why) == ("pool", "the pool's process is gone")


def test_a_group_that_takes_conversations_until_its_deadline_is_not_starving() -> None:
    """With `groups.within_s` of 900 s, between two of its conversations."""
    tick = recorded("starving")
    (group, *_) = tick["pool"]["train"]["oldest_open"]
    group |= {"complete": 3, "age_s": 500.0, "deadline_in_s": 400.0}
    assert "starving train" not in keys(tick)


def metric(**figures: float) -> dict[str, Any]:
    tick = recorded("training")
    tick["metrics"] |= figures
    return tick


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"log_prob_gap": 0.009}, []),
        ({"log_prob_gap": 0.7}, ["gap"]),
        ({"skipped": 0.0}, []),
        ({"skipped": 1.0}, ["skipped"]),
        ({"wait/trainer_starved": 0.49}, []),
        ({"wait/trainer_starved": 0.9}, ["trainer waits"]),
        ({"wait/generation_saturated": 0.4}, []),
        ({"wait/generation_saturated": 0.8}, ["generation waits"]),
        ({"groups/no_signal": 0.88, "reward/mean": 0.97}, []),  # solved
        ({"groups/no_signal": 0.88, "reward/mean": 0.03}, ["no signal"]),
        ({"groups/no_signal": 0.3, "reward/mean": 0.03}, []),
    ],
)
def test_figures_of_the_last_step_are_alerts_beyond_their_threshold(
    figures: dict[str, float], expected: list[str]
) -> None:
    assert keys(metric(**figures)) == expected


def test_an_update_that_had_nothing_to_train_the_policy_on_is_no_alert() -> None:
    tick = metric(skipped=1.0)
    del tick["metrics"]["skipped_updates"]
    assert keys(tick) == []


def test_figures_of_a_trainer_that_is_gone_are_no_news() -> None:
    tick = metric(log_prob_gap=0.7, **{"wait/trainer_starved": 0.9})
    assert keys(tick | {"metrics_age_s": 3600.0}) == []
    slow = tick | {"metrics_age_s": 3600.0, "metrics": tick["metrics"] | {"time/step_s": 1800.0}}
    assert keys(slow) == ["gap", "trainer waits"], "a step of half an hour is not over yet"
    assert keys(tick | {"is_over": True}) == ["gap"], "of a run that is over, what was broken"


@pytest.mark.parametrize(
    ("unrecorded", "stored", "title"),
    [
        ({"closed": 1}, 2999, None),
        ({"closed": 6}, 2994, "0.2% of the calls are not stored"),
        ({"pool_failure": 50}, 50, "50% of the calls are not stored"),
    ],
)
def test_calls_that_are_not_stored_are_told_from_a_tenth_of_a_percent_on(
    unrecorded: dict[str, int], stored: int, title: str | None
) -> None:
    calls = {"stored": stored, "unrecorded": unrecorded, "seconds": None}
    found = list(alerts(recorded("training", calls=calls)))
    assert [alert.title for alert in found] == [title] * (title is not None)
    if found:
        assert "since the gateway was started" in found[0].why


def test_an_alert_says_why_since_when_and_where_its_evidence_is() -> None:
    recent = Recent()
    bad, good = recorded("trainer_gone"), recorded("training")
    (first, *_) = recent.dated(alerts(bad), 100.0)
    assert (first["key"], first["since"], first["page"]) == ("no trainer train", 100.0, "pool")
    assert "the last one was leased" in first["why"]
    (again, dropped) = recent.dated(alerts(bad), 160.0)
    assert again["since"] == 100.0
    assert (dropped["page"], dropped["params"]["view"]) == ("groups", "gone")
    assert "max_queue_size" in dropped["why"]
    assert "in the last 10 minutes" in dropped["why"]
    assert recent.dated(alerts(good), 170.0) == [], "it is over"
    assert recent.dated(alerts(bad), 180.0)[0]["since"] == 180.0, "and begins anew"


def test_what_was_dropped_long_ago_is_no_alert() -> None:
    recent = Recent()
    times = [100.0 + i for i in range(40)]
    recent.add(
        Event(i, at, "dropped", "train", f"p{i}", data={"reason": "stale"})
        for i, at in enumerate(times)
    )
    recent.add([Event(99, 150.0, "leased", "train", "q")])
    tick = recorded("training")
    counts = recent.of_channels(["train"], 200.0)
    assert counts["train"]["leased_at"] == 150.0
    assert keys(tick | {"recent": copy.deepcopy(counts)}) == ["dropped train"]
    later = recent.of_channels(["train"], 140.0 + WINDOW_S)
    assert sum(later["train"]["dropped"].values()) == 0
    assert keys(tick | {"recent": later}) == []


def test_calls_that_were_not_stored_long_ago_are_no_alert() -> None:
    recent = Recent()
    tick = recorded("training")
    first = recent.of_calls(1000, {"pool_failure": 500}, 0.0)
    assert keys(tick | {"calls": first}) == ["unrecorded"]
    at = 0.0
    while at < WINDOW_S + 2 * SAMPLE_S:
        at += SAMPLE_S
        counts = recent.of_calls(1000 + int(at), {"pool_failure": 500}, at)
    assert counts["unrecorded"] == {}
    assert counts["seconds"] == pytest.approx(WINDOW_S, abs=SAMPLE_S)
    assert keys(tick | {"calls": counts}) == []

"""The engine that a call goes to: pure state, no HTTP, no waiting."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stepwell.gateway.config import Tuning
from stepwell.gateway.engine.fleet import MAX_BACKOFF_S, Engine, Fleet, backoff_s


def fleet(n: int = 3, version_grace_s: float = 10.0, **options: Any) -> Fleet:
    tuning = Tuning(
        engine_circuit_failures=3,
        engine_circuit_open_s=1.0,
        engine_version_grace_s=version_grace_s,
    )
    return Fleet([f"http://e{i}" for i in range(n)], tuning, **{"remembered": 10_000, **options})


def check(
    f: Fleet, engine: Engine, version: int | None, now: float = 0.0, canary: bool = False
) -> None:
    assert f.check_passed(engine, now, asked=engine.asked(), version=version, canary=canary)
    f.health(engine, now, well=True)


def homes(f: Fleet, n: int = 600) -> dict[str, str]:
    picked = {a: f.pick(a, 0.0) for a in map(str, range(n))}
    return {a: e.url for a, e in picked.items() if e is not None}


class Call(asyncio.Timeout):
    """A call in flight, as a fleet knows it."""

    def __init__(self) -> None:
        super().__init__(None)
        self.ended_at: float | None = None

    def reschedule(self, when: float | None) -> None:
        self.ended_at = when


# -- back-off and circuit --------------------------------------------------------------------


@given(st.integers(1, 40), st.floats(0, 10), st.floats(0, 1))
def test_back_off_doubles_is_bounded_and_spread_over_the_upper_half(
    failures: int, base: float, dice: float
) -> None:
    longest = min(base * 2 ** (failures - 1), MAX_BACKOFF_S)
    got = backoff_s(failures, base, lambda a, b: a + dice * (b - a))
    assert longest / 2 <= got <= longest <= MAX_BACKOFF_S


def test_an_engine_is_open_after_bad_answers_in_a_row_only() -> None:
    f = fleet(1)
    [engine] = f
    for _ in range(5):
        f.answered_badly(engine, 0.0, "500")
        f.answered_badly(engine, 0.0, "500")
        f.succeeded(engine, 1)
    assert f.state(engine) == "up"
    for _ in range(3):
        f.answered_badly(engine, 0.0, "500")
    assert f.state(engine) == "open"


def test_an_open_engine_is_up_when_a_check_that_is_due_finds_it_well() -> None:
    f = fleet(1)
    [engine] = f
    assert f.probe_in(engine, 10.0) == math.inf
    for _ in range(3):
        f.answered_badly(engine, 10.0, "500")
    assert f.probe_in(engine, 10.25) == 0.75
    f.health(engine, 10.5, well=True)  # not due: it says nothing
    assert f.state(engine) == "open"
    f.health(engine, 11.0, well=False)
    assert f.probe_in(engine, 11.0) == 1.0
    f.health(engine, 12.0, well=True)
    assert f.state(engine) == "up"


@given(st.lists(st.sampled_from(["fail", "succeed", "wait", "probe"]), max_size=60))
def test_an_engine_is_open_only_after_enough_failures_since_the_last_success(
    events: list[str],
) -> None:
    f = fleet(1)
    [engine] = f
    now, since = 0.0, 0
    for event in events:
        if event == "fail":
            f.answered_badly(engine, now, "500")
            since += 1
        elif event == "succeed":
            f.succeeded(engine, None)
            since = 0
        elif event == "wait":
            now += 1.0
        else:
            f.health(engine, now, well=False)
        assert f.is_open(engine) == (since >= 3)


# -- affinity --------------------------------------------------------------------------------


def test_a_trajectory_stays_on_its_engine_and_trajectories_are_spread() -> None:
    f = fleet(4)
    first = homes(f)
    assert homes(f) == first
    assert homes(fleet(4)) == first  # another gateway process decides alike
    counts = Counter(first.values())
    assert len(counts) == 4
    assert all(90 < n < 215 for n in counts.values())


def test_with_one_engine_more_few_trajectories_move_and_only_to_that() -> None:
    before, after = homes(fleet(3)), homes(fleet(4))
    moved = [a for a in before if after[a] != before[a]]
    assert {after[a] for a in moved} == {"http://e3"}
    assert len(moved) < len(before) * 0.35


@given(st.integers(2, 6), st.integers(0, 200), st.text(max_size=5))
def test_a_trajectory_passes_a_much_busier_engine_over_unless_it_is_its_home(
    n: int, busy: int, affinity: str
) -> None:
    f = fleet(n)
    home = f.pick(affinity, 0.0)
    assert home is not None
    home.in_flight |= {Call() for _ in range(busy)}
    assert f.pick(affinity, 0.0) is home
    newcomer = fleet(n)
    chosen = next(e for e in newcomer if e.url == home.url)
    chosen.in_flight |= {Call() for _ in range(busy)}
    got = newcomer.pick(affinity, 0.0)
    assert got is not None
    assert (got is chosen) == (busy <= 16)


def test_an_engine_that_a_call_failed_on_is_avoided_unless_it_is_the_only_one() -> None:
    f = fleet(2)
    home = f.pick("t", 0.0)
    assert home is not None
    other = f.pick("t", 0.0, {home})
    assert other is not None
    assert other is not home
    assert f.pick("t", 0.0) is other  # the call's prefix is there now
    assert f.pick("t", 0.0, {home, other}) in (home, other)


def test_homes_that_were_not_used_for_long_are_forgotten() -> None:
    f = fleet(2, remembered=10)
    homes(f, 100)
    assert len(f._homes) == 10


# -- health ----------------------------------------------------------------------------------


def test_an_engine_whose_connection_broke_gets_no_traffic_until_a_check_passes() -> None:
    f = fleet(2)
    home = f.pick("t", 0.0)
    assert home is not None
    f.broke(home, 0.0, "reset")
    assert f.state(home) == "down"
    assert f.pick("t", 0.0) is not home
    check(f, home, None)
    assert f.state(home) == "up"


def test_an_engine_that_answers_badly_several_times_in_a_row_is_left_alone_for_a_while() -> None:
    f = fleet(2)
    bad = next(iter(f))
    for _ in range(3):
        f.answered_badly(bad, 0.0, "answered 500")
    assert f.state(bad) == "open"
    assert "http://e0" not in homes(f).values()
    f.health(bad, 0.5, well=True)
    assert f.state(bad) == "open"  # the probe was not due
    f.health(bad, 1.0, well=False, why="/health answered 503")
    assert f.state(bad) == "open"
    f.health(bad, 3.0, well=True)
    assert f.state(bad) == "up"


def test_an_engine_that_fails_health_is_used_only_if_no_other_is_up() -> None:
    f = fleet(2)
    first, second = f
    f.health(first, 0.0, well=False)
    assert f.state(first) == "ailing"
    assert set(homes(f).values()) == {second.url}
    f.health(second, 0.0, well=False)
    after = homes(f)
    assert set(after.values()) == {second.url}  # all are at home there by now
    assert f.pick("new one", 0.0) is not None


def test_one_late_answer_is_forgiven_and_three_give_calls_in_flight_up() -> None:
    f = fleet(1)
    [engine] = f
    call = Call()
    engine.in_flight.add(call)
    f.check_failed(engine, 1.0, "timeout", refused=False)
    assert f.state(engine) == "up"
    f.check_failed(engine, 2.0, "timeout", refused=False)
    assert f.state(engine) == "down"
    assert call.ended_at is None
    f.check_failed(engine, 3.0, "timeout", refused=False)
    assert call.ended_at == 3.0


def test_an_engine_that_refuses_connections_is_down_at_once_and_finishes_what_it_has() -> None:
    f = fleet(1)
    [engine] = f
    call = Call()
    engine.in_flight.add(call)
    for now in (1.0, 2.0, 3.0, 4.0):
        f.check_failed(engine, now, "refused", refused=True)
        assert f.state(engine) == "down"
    assert call.ended_at is None
    assert f.pick("t", 5.0) is None
    assert "http://e0 is down (refused)" in f.why_none()


# -- weight versions -------------------------------------------------------------------------


def test_an_engine_that_lags_in_a_rolling_update_is_used() -> None:
    f = fleet(3)
    for engine in f:
        check(f, engine, 4)
    first = next(iter(f))
    check(f, first, 5)
    assert f.version == 5
    assert [f.state(e) for e in f] == ["up", "up", "up"]


def test_an_engine_that_came_back_with_old_weights_waits_until_it_has_the_current_ones() -> None:
    f = fleet(2)
    first, second = f
    for engine in f:
        check(f, engine, 5)
    f.broke(first, 0.0, "reset")
    check(f, first, 0)
    assert f.state(first) == "behind"
    assert set(homes(f).values()) == {second.url}
    f.succeeded(second, 6)  # an update meanwhile: learnt from a reply
    check(f, first, 5)
    assert f.state(first) == "behind"
    check(f, first, 6)
    assert f.state(first) == "up"


def test_an_engine_that_restarted_unnoticed_is_found_by_its_version_going_backwards() -> None:
    f = fleet(2)
    first, _ = f
    for engine in f:
        check(f, engine, 5)
    check(f, first, 4)
    assert f.state(first) == "behind"


def test_an_answer_from_before_an_update_is_no_version_going_backwards() -> None:
    f = fleet(1)
    [engine] = f
    check(f, engine, 4)
    asked = engine.asked()
    f.succeeded(engine, 5)  # a reply overtakes the check's answer
    f.check_passed(engine, 0.0, asked=asked, version=4)
    assert f.state(engine) == "up"
    assert engine.version == 5


def test_an_engine_that_lagged_and_then_broke_waits_for_the_current_version() -> None:
    f = fleet(2)
    first, second = f
    check(f, first, 4)
    check(f, second, 5)
    assert f.state(first) == "up"
    f.broke(first, 0.0, "reset")
    check(f, first, 4)
    assert f.state(first) == "behind"


def test_an_answer_from_before_a_connection_broke_says_nothing() -> None:
    f = fleet(1)
    [engine] = f
    asked = engine.asked()
    f.broke(engine, 0.0, "reset")
    assert not f.check_passed(engine, 0.0, asked=asked, version=5)
    assert f.state(engine) == "down"
    assert f.version is None


def test_when_all_engines_are_behind_the_newest_are_used_after_the_grace() -> None:
    f = fleet(3)
    a, b, c = f
    for engine in f:
        check(f, engine, 7)
        f.broke(engine, 0.0, "reset")
    check(f, a, 5, now=100.0)
    check(f, b, 6, now=101.0)
    check(f, c, 6, now=101.0)
    assert f.pick("t", 109.9) is None
    assert "came back with weight version 5 while others had 7" in f.why_none()
    picked = {e.url for t in range(50) if (e := f.pick(f"t{t}", 110.0)) is not None}
    assert picked == {b.url, c.url}
    assert f.statistics()["used_behind"] == 50
    check(f, a, 7, now=120.0)
    assert {f.pick(f"t{t}", 120.0) for t in range(50)} == {a}
    # The next time begins anew.
    f.broke(a, 200.0, "reset")
    assert f.pick("t", 200.0) is None
    assert f.pick("t", 210.0) is not None


def with_canary(share: float = 0.2) -> tuple[Fleet, list[Engine]]:
    """Four engines at 6, of which the last tries 7 out; and what was begun before."""
    f = fleet(4, canary_share=share)
    engines = list(f)
    for engine in engines:
        check(f, engine, 6)
    homes(f, 300)
    check(f, engines[3], 7, canary=True)
    return f, engines


def test_a_canary_gets_its_share_of_what_begins_and_nothing_of_what_had_begun() -> None:
    f, engines = with_canary()
    picked = homes(f, 3000)
    before = {a: url for a, url in picked.items() if int(a) < 300}
    new = Counter(url == engines[3].url for a, url in picked.items() if int(a) >= 300)
    assert engines[3].url not in before.values(), "also those that were at home there"
    assert 0.16 < new[True] / new.total() < 0.24
    assert homes(f, 3000) == picked, "each stays with its version"


def test_a_canary_that_is_committed_is_an_engine_like_any_other() -> None:
    f, engines = with_canary()
    during = homes(f)
    for engine in engines:
        check(f, engine, 7)
    assert homes(f) == during, "nothing moves"
    check(f, engines[3], 8, canary=True)
    assert engines[3].url not in homes(f).values(), "what began with 7 does not try out 8"


def test_an_engine_that_comes_back_beside_a_canary_with_what_is_committed_is_used() -> None:
    f, engines = with_canary()
    f.broke(engines[0], 1.0, "reset")
    check(f, engines[0], 6, 2.0)
    assert f.state(engines[0]) == "up"
    f.broke(engines[1], 1.0, "reset")
    check(f, engines[1], 5, 2.0)
    assert f.state(engines[1]) == "behind"


def test_a_canary_that_restarts_at_what_is_committed_goes_on_and_one_that_is_older_waits() -> None:
    f, engines = with_canary()
    f.broke(engines[3], 1.0, "reset")
    check(f, engines[3], 6, 2.0)
    assert f.state(engines[3]) == "up"
    assert not engines[3].canary
    assert engines[3].url in homes(f, 2000).values()
    f, engines = with_canary()
    for engine in engines[:3]:
        check(f, engine, 8)  # taken back: 8 has the weights of 6
    f.broke(engines[3], 1.0, "reset")
    check(f, engines[3], 7, 2.0, canary=True)
    assert f.state(engines[3]) == "behind"
    check(f, engines[3], 8, 3.0)
    assert f.state(engines[3]) == "up"


def test_when_only_the_canary_is_left_it_serves_all_and_without_it_the_others_do() -> None:
    f, engines = with_canary()
    for engine in engines[:3]:
        f.broke(engine, 1.0, "reset")
    assert set(homes(f).values()) == {engines[3].url}
    f, engines = with_canary(share=0.9)
    f.broke(engines[3], 1.0, "reset")
    assert engines[3].url not in homes(f, 2000).values()
    assert len(homes(f, 2000)) == 2000


def test_a_call_tells_of_a_canary_before_a_check_does() -> None:
    f = fleet(2)
    a, b = f
    check(f, a, 6)
    check(f, b, 6)
    f.succeeded(b, 7, canary=True)
    assert b.canary
    assert f.version == 6
    f.succeeded(b, 7)
    assert not b.canary
    assert f.version == 7


def test_an_engine_without_versions_is_held_to_none() -> None:
    f = fleet(2)
    first, second = f
    check(f, second, 4)
    check(f, first, 5)
    f.broke(second, 0.0, "reset")
    check(f, second, None)
    assert f.state(second) == "up"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(["check", "broke", "refused", "late", "bad", "reply", "ill"]),
            st.integers(0, 4),
        ),
        max_size=60,
    )
)
def test_no_call_ever_goes_to_an_engine_that_is_down_open_or_behind_within_the_grace(
    events: list[tuple[int, str, int]],
) -> None:
    f = fleet(3, version_grace_s=1e9)
    engines = list(f)
    for now, (i, event, version) in enumerate(events):
        engine = engines[i]
        if event == "check":
            check(f, engine, version, float(now))
        elif event == "broke":
            f.broke(engine, now, "reset")
        elif event in ("refused", "late"):
            f.check_failed(engine, now, event, refused=event == "refused")
        elif event == "bad":
            f.answered_badly(engine, now, "500")
        elif event == "reply":
            f.succeeded(engine, version)
        else:
            f.health(engine, now, well=False)
        got = f.pick("t", now)
        states = {f.state(e) for e in f}
        if got is None:
            assert states <= {"down", "open", "behind"}
        else:
            assert f.state(got) == ("up" if "up" in states else "ailing")


def test_no_engine_at_all_says_which_option_to_set() -> None:
    f = fleet(0)
    assert f.pick("t", 0.0) is None
    assert "engine.urls" in f.why_none()

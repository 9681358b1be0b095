"""The pool's benches as they are run, on little data: what they report and that content is exact.

The quick runs start Ray and every system that is installed; their timings are asserted nowhere.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.checks import BenchResult
from benchmarks.pool import (
    FULL,
    MODES,
    QUICK,
    BareActor,
    BareSocket,
    BareSteps,
    PoolBench,
    Stepwell,
    run,
)
from benchmarks.pool.measure import CONCURRENT, ONE_AT_A_TIME, PIPELINED, Rate, ratio
from benchmarks.pool.transfer_queue import is_installed
from benchmarks.pool.workload import (
    ROLLOUTS,
    STEPS_PER_FETCH,
    TURNS,
    Call,
    check_exact,
    small_calls,
    workload_a,
)
from stepwell.trainer.errors import ConfigError

OURS = [f"Stepwell ({level})" for level in ("none", "process", "power")]
HOW = [f"Stepwell (process), {how}" for how in ("2 shards", "4 shards", "bare handle")]


@pytest.fixture(scope="module")
def quick() -> BenchResult:
    # Every system's content is checked inside: a step that came back changed, twice or not at all
    # ends the run with an error.
    return asyncio.run(run(quick=True))


@pytest.mark.long
def test_every_system_is_measured_in_every_mode(quick: BenchResult) -> None:
    rows = {row.pop("system"): row for row in map(dict, quick.figures["systems"])}
    assert [*OURS, BareActor.name] == list(rows)[:4]
    names = {f"{figure}_{mode.name}" for figure in ("steps_per_s", "cpu_us") for mode in MODES}
    compared = 4 + is_installed()
    memory = {f"{what}_bytes_per_step" for what in ("rss", "private", "written")}
    for system in list(rows)[:compared]:
        assert rows[system].keys() == names | memory
        assert all(rows[system][name] > 0 for name in names), system
    others = [BareSocket.name, *HOW, BareSteps.name]
    assert list(rows)[compared:] == others
    for system in others:
        assert rows[system].keys() == names
        assert all(rows[system][name] > 0 for name in names), system


@pytest.mark.long
def test_leases_and_submits_are_measured_at_every_size(quick: BenchResult) -> None:
    rows = quick.figures["pool_sizes"]
    assert [row["stored_steps"] for row in rows] == list(QUICK.sizes)
    for row in rows:
        assert row["lease_128_p50_ms"] > 0
        assert row["submit_16_p50_ms"] > 0


@pytest.mark.long
def test_a_quick_run_reports_the_ratios_and_bounds_none(quick: BenchResult) -> None:
    assert quick.checks == {}
    for name in (
        "process_by_bare_one_at_a_time",
        "process_by_bare_both_one_at_a_time",
        "process_by_bare_pipelined",
        "two_shards_by_one",
        "four_shards_by_one",
        "handle_by_bare_pipelined",
        "handle_by_bare_one_at_a_time",
        "ack_bytes_per_step",
        "none_by_bare_pipelined",
        "process_concurrent_by_bare_one_by_one",
        "process_concurrent_by_socket",
        "bare_of_steps_by_bare_pipelined",
        "written_by_payload_process",
        "conversion_128_ms",
    ):
        assert quick.figures[name] > 0
    assert json.loads(json.dumps(quick.as_json("pool")))["bench"] == "pool"


def test_a_full_run_measures_what_the_claims_are_about() -> None:
    assert FULL.sizes == (1_000, 100_000, 1_000_000)
    assert FULL.stored >= 20_000
    assert FULL.stored % STEPS_PER_FETCH == 0
    assert all(mode.groups * ROLLOUTS * TURNS % STEPS_PER_FETCH == 0 for mode in MODES)


def test_a_section_runs_only_the_systems_that_it_compares() -> None:
    bench = PoolBench(QUICK)
    assert [s.name for s in bench.of(["shards"])] == [OURS[1], *HOW[:2]]
    assert [s.name for s in bench.of(["acks", "handle"])] == [
        *OURS[:2],
        HOW[2],
        BareActor.name,
        BareSteps.name,
    ]
    assert bench.of(["latency", "conversion", "recovery"]) == []


def test_a_section_that_does_not_exist_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"throughputs.*choose from memory, acks"):
        asyncio.run(run(quick=True, only=["throughputs"]))


@pytest.mark.long
def test_recovery_is_measured_on_both_workloads(quick: BenchResult) -> None:
    rows = {row["stored"]: row for row in quick.figures["recovery"]}
    assert rows.keys() == {"small steps", "workload A"}
    for row in rows.values():
        assert row["steps"] == QUICK.recovered[0]
        assert 0 < row["recovery_s"] < row["first_answer_s"]


# -- workload A ------------------------------------------------------------------------------


def test_workload_a_is_the_issues_workload() -> None:
    calls = list(workload_a(2, "w"))
    assert len(calls) == 2 * ROLLOUTS * TURNS
    for call in calls:
        assert len(call.prompt_ids) == 512 + 300 * call.step_index
        assert len(call.response_ids) == len(call.log_probs) == 128
        assert call.is_last == (call.step_index == 3)
    for group in ("w-0", "w-1"):
        first = [c.prompt_ids for c in calls if c.prompt_uid == group and c.step_index == 0]
        assert len(first) == ROLLOUTS
        assert all(prompt == first[0] for prompt in first)


def test_every_prompt_extends_its_parents_prompt_and_response() -> None:
    for calls in (list(workload_a(1, "w")), list(small_calls(3, "s"))):
        by_key = {call.key: call for call in calls}
        children = [call for call in calls if call.parent_index is not None]
        assert len(children) == len(calls) * (TURNS - 1) // TURNS
        for call in children:
            assert call.parent_index is not None
            parent = by_key[(call.trajectory_uid, call.parent_index)]
            known = parent.prompt_ids + parent.response_ids
            assert call.prompt_ids[: len(known)] == known


def test_a_call_survives_being_a_step() -> None:
    for call in workload_a(1, "w"):
        assert Call.of(call.step()) == call


# -- exactness and ratios --------------------------------------------------------------------


def test_exact_content_in_any_order_passes() -> None:
    calls = list(small_calls(1, "s"))
    check_exact(calls, calls[::-1])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda calls: calls[1:],
        lambda calls: [*calls, calls[0]],
        lambda calls: [calls[0]._replace(response_ids=[1]), *calls[1:]],
        lambda calls: [calls[0]._replace(metadata={}), *calls[1:]],
        lambda calls: [calls[0]._replace(step_index=9), *calls[1:]],
    ],
    ids=["lost", "twice", "other tokens", "no metadata", "another step"],
)
def test_content_that_is_not_exact_ends_the_run(spoil) -> None:
    calls = list(small_calls(1, "s"))
    with pytest.raises(RuntimeError, match="came back"):
        check_exact(calls, spoil(calls))


def test_a_ratio_is_taken_within_each_round() -> None:
    ours, bare = Stepwell("none"), BareActor()
    rates = {
        # The machine was ten times slower in the second round, for both.
        ours.name: {
            PIPELINED.name: [Rate(r, 1.0) for r in (400.0, 40.0, 300.0)],
            CONCURRENT.name: [],
        },
        bare.name: {ONE_AT_A_TIME.name: [Rate(r, 9.0) for r in (200.0, 20.0, 100.0)]},
    }
    assert ratio(rates, (ours, PIPELINED), (bare, ONE_AT_A_TIME)) == 2.0

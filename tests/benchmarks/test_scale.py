"""The simulation of `python -m benchmarks scale`: its servers, its engines, the part it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks import BenchResult
from benchmarks.scale import (
    ARCHIVED,
    FULL,
    GIVEN,
    QWEN3_4B,
    Costs,
    Engine,
    Fleet,
    Given,
    _bytes_in,
    _trajectory,
    check_against_the_bench,
    deployment,
    measure_pool,
    needs,
    simulate,
    sized,
)
from stepwell.backends.torch.memory import ModelShape
from tests.datapool.test_archive import Archived

COSTS = Costs([0], [0.001], 0.0001, 5000.0, 3.0)
SHAPE = ModelShape.of(QWEN3_4B)


def calls_per_s(n_agents: int, fleet: Fleet, costs: Costs, step_s: float, tool_s: float) -> float:
    seen, _ = simulate(
        n_agents,
        fleet,
        costs,
        Given(tool_s=tool_s, response=10),
        step_s=lambda n: step_s,
        holds=64,
        prefill_s=lambda context, new: 0.0,
        seconds=(5.0, 20.0),
    )
    return seen.calls / 20


def test_agents_that_never_wait_get_what_the_slowest_part_gives() -> None:
    slow_gateway = Costs([0], [0.01], 0.001, 0.0, 0.0)
    assert calls_per_s(32, Fleet(engines=1), slow_gateway, 1e-6, 0) == pytest.approx(100, rel=0.02)
    two = Fleet(gateways=2, engines=1)
    assert calls_per_s(32, two, slow_gateway, 1e-6, 0) == pytest.approx(200, rel=0.02)
    slow_pool = Costs([0], [0.001], 0.02, 0.0, 0.0)
    assert calls_per_s(32, two, slow_pool, 1e-6, 0) == pytest.approx(50, rel=0.02)


def test_few_agents_come_as_often_as_their_tools_and_the_engine_let_them() -> None:
    # A turn: 10 steps of 0.1 s, a tool of 1 s, 1.1 ms of ours.
    rate = calls_per_s(10, Fleet(engines=2), COSTS, 0.1, 1.0)
    assert rate == pytest.approx(10 / 2.0011, rel=0.05)


def test_an_engine_advances_all_that_it_holds_and_lets_others_wait() -> None:
    engine = Engine(step_s=lambda n: 0.1 * n, holds=2)
    engine.add(0.0, agent=1, tokens=10)
    assert engine.next_end() == pytest.approx(1.0)
    engine.add(0.5, agent=2, tokens=10)  # half of the first is done; both take 0.2 s a token
    engine.add(0.5, agent=3, tokens=1)
    assert engine.next_end() == pytest.approx(1.5)
    assert engine.end(1.5) == 1
    assert engine.next_end() == pytest.approx(1.7), "the third took its place"
    assert engine.end(1.7) == 3
    assert engine.busy_s == pytest.approx(0.5 * 0.5 + 1.2)


def test_the_first_bottleneck_moves_from_engines_to_the_gateway() -> None:
    few = deployment(100, Fleet(1, 1, 1, 4), COSTS, SHAPE)
    assert few.fullest().startswith("engine")
    assert few.shown()["first bottleneck"].startswith("engine")
    many = deployment(400, Fleet(1, 1, 40, 40), Costs([0], [0.05], 0.0001, 5000.0, 3.0), SHAPE)
    assert many.fullest() == many.fullest("gateway", "pool") == "gateway"


def test_a_fleet_that_is_found_has_reserves_in_each_part_and_no_more_gateways_than_it_needs() -> (
    None
):
    fleet = sized(200, COSTS, SHAPE)
    row = deployment(200, fleet, COSTS, SHAPE)
    assert max(row.used.values()) <= FULL
    assert (fleet.gateways, fleet.shards) == (1, 1)
    told = needs(row, COSTS)
    assert told["tokens/s"] == pytest.approx(row.calls_per_s * 750)
    assert told["journal MB/s"] == pytest.approx(row.calls_per_s * 5000 / 1e6)


def test_it_gives_the_calls_that_the_gateways_bench_measured() -> None:
    result = BenchResult()
    check_against_the_bench(result)
    assert len(result.checks) == 6
    assert all(check.holds for check in result.checks.values()), result.checks


async def test_a_step_of_more_tokens_costs_the_journal_more_bytes() -> None:
    _, small = await measure_pool(8, 8, steps=64)
    _, large = await measure_pool(500, 250, steps=64)
    assert 100 < small < large < 20_000


def test_the_archives_share_of_the_journal_is_the_measured_one(tmp_path: Path) -> None:
    run = Archived(tmp_path)
    calls = [
        call
        for group in range(64)
        for call in _trajectory(f"{group}", 0, 8, GIVEN.new_tokens, GIVEN.response)
    ]
    for call in calls:
        run.pool("submit_step", call.step())
    journal = _bytes_in(tmp_path / "pool")
    for _ in range(64):
        run.pool("ack", run.pool("lease_batch", 1).lease_id)
    while run.archive():
        pass
    files = _bytes_in(tmp_path / "archive" / "trajectories")
    run.pool.journal.close()
    assert files / journal == pytest.approx(ARCHIVED, rel=0.05)

"""Every key of `async_training` and `sampling` does what its docstring says, in a real loop."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.config.load import load_config
from stepwell.datapool.config import ChannelConfig
from stepwell.datapool.selection import GroupInfo
from stepwell.datapool.types import TRAIN
from stepwell.trainer.batches import TrainedChannel
from stepwell.trainer.config import SamplingConfig
from stepwell.trainer.errors import ConfigError, StarvedError
from stepwell.trainer.ledger import audit
from stepwell.trainer.sampling import (
    SURPLUS,
    GroupFilter,
    Pace,
    credit_limit,
    drops_surplus,
)
from tests.builders import group, until
from tests.trainer.small_run import pool_config, small_config, small_run

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"

SYNC = "async_training.mode=sync"
ONE_STEP_OFF = "async_training.mode=one_step_off"
ASYNC = "async_training.mode=async"


async def begun(pace: Pace, *uids: str) -> list[str]:
    """Return the `uids` that may be begun now."""
    admitted = []
    for uid in uids:
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await pace.admit(uid)
                admitted.append(uid)
    return admitted


# ── credit ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_window_begins_as_many_groups_as_it_has_credit_for() -> None:
    pace = Pace(2)
    assert await begun(pace, "a", "b", "c") == ["a", "b"]
    pace.leased(["a"])
    assert await begun(pace, "c") == []  # training takes, and the window stays what it is
    pace.open_window()
    assert await begun(pace, "c", "d") == ["c"]  # b is left over from the window before
    assert pace.left == ["b", "c"]


async def test_a_dropped_group_is_replaced_once() -> None:
    pace = Pace(1)
    assert await begun(pace, "a") == ["a"]
    assert pace.lost("a")
    assert not pace.lost("a")
    assert not pace.lost("someone else's")
    assert await begun(pace, "b", "c") == ["b"]


async def test_whoever_waits_for_credit_is_woken_by_a_refund_and_by_a_window() -> None:
    pace = Pace(1)
    await pace.admit("a")
    waiting = [asyncio.create_task(pace.admit(uid)) for uid in "bc"]
    await asyncio.sleep(0)
    pace.refund(1)
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [t.done() for t in waiting] == [True, False]
    pace.leased(["a", "b"])
    pace.open_window()
    await waiting[1]


async def test_groups_of_a_former_process_count_as_begun() -> None:
    pace = Pace(2)
    pace.adopt(["old"])
    assert await begun(pace, "a", "b") == ["a"]


async def test_without_windows_credit_does_not_run_out() -> None:
    pace = Pace(None)
    assert len(await begun(pace, *map(str, range(100)))) == 100


@given(
    limit=st.integers(1, 5),
    moves=st.lists(st.sampled_from(["begin", "lease", "lose", "window"]), max_size=60),
)
def test_never_more_than_a_window_is_left_unless_something_was_leased(
    limit: int, moves: list[str]
) -> None:
    async def play() -> None:
        pace, begun_in_window, lost_in_window, left_before = Pace(limit), 0, 0, 0
        for number, move in enumerate(moves):
            if move == "begin":
                begun_in_window += len(await begun(pace, str(number)))
            elif move == "window":
                pace.open_window()
                begun_in_window, lost_in_window, left_before = 0, 0, len(pace.left)
            elif pace.left and move == "lease":
                pace.leased(pace.left[:1])
            elif pace.left:
                pace.lost(pace.left[0])
                lost_in_window += 1
            assert left_before + begun_in_window - lost_in_window <= limit
            assert len(pace.left) <= limit
        # What credit there is can be used up, to the last group.
        pace.open_window()
        free = limit - len(pace.left)
        assert len(await begun(pace, *(f"x{i}" for i in range(limit + 1)))) == free

    asyncio.run(play())


# ── what follows from the configuration ──────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("overrides", "limit", "drops"),
    [
        ([ASYNC], None, False),
        ([SYNC], 2, True),
        ([SYNC, "async_training.trigger_parameter_sync_step=3"], 6, True),
        ([SYNC, "async_training.partial_rollout=true"], 2, False),
        ([SYNC, "sampling.over_sampling_batch_size=5"], 5, True),
        ([ONE_STEP_OFF], 4, False),
        ([ONE_STEP_OFF, "sampling.over_sampling_batch_size=3"], 5, False),
    ],
)
def test_credit_is_the_window_its_surplus_and_the_windows_ahead(
    tmp_path: Path, overrides: list[str], limit: int | None, drops: bool
) -> None:
    config = small_config(tmp_path, *overrides)
    assert (
        credit_limit(config.async_training, config.sampling, config.trainer.train_batch_size)
        == limit
    )
    assert drops_surplus(config.async_training) == drops


@pytest.mark.parametrize(
    ("overrides", "max_staleness", "on_stale"),
    [
        ([ASYNC], None, "drop"),
        ([SYNC], 0, "return"),
        ([SYNC, "async_training.partial_rollout=true"], None, "drop"),
        ([ONE_STEP_OFF], 1, "return"),
        ([ONE_STEP_OFF, "pool.channels.train.max_staleness=0"], 0, "return"),
        ([ASYNC, "pool.channels.train.max_staleness=3"], 3, "drop"),
    ],
)
def test_a_mode_with_windows_bounds_the_age_of_what_is_served(
    tmp_path: Path, overrides: list[str], max_staleness: int | None, on_stale: str
) -> None:
    channel = pool_config(small_config(tmp_path, *overrides)).channel(TRAIN)
    assert (channel.max_staleness, channel.on_stale) == (max_staleness, on_stale)


def test_the_channel_gets_the_limits_and_the_filters_after_its_own(tmp_path: Path) -> None:
    channel = pool_config(
        small_config(
            tmp_path,
            "async_training.max_queue_size=3",
            "pool.channels.train.selection.filters=[all_wrong]",
            "sampling.filters=[nonzero_std]",
        )
    ).channel(TRAIN)
    assert channel.max_queue_size == 3
    assert channel.max_outstanding_groups == 8
    assert channel.selection.filters == ("all_wrong", "zero_variance")
    assert ChannelConfig.model_validate(channel.model_dump()) == channel


def test_a_filter_that_does_not_exist_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    config = small_config(tmp_path, "sampling.filters=[nonzero_sdt]")
    with pytest.raises(ConfigError, match=r"sampling.filters.*'nonzero_sdt'.*zero_variance"):
        pool_config(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.max_outstanding_groups=1"],
            r"max_outstanding_groups is 1, but a batch takes .* 2 × 1 = 2 groups.*raise it to 2",
        ),
        (
            ["async_training.max_queue_size=3", "async_training.require_batches=2"],
            r"max_queue_size is 3, but a batch takes .* 2 × 2 = 4 groups.*raise it to 4",
        ),
        (
            [SYNC, "async_training.require_batches=2"],
            r"mode is 'sync' .* make trigger_parameter_sync_step a multiple of require_batches",
        ),
        (
            ["sampling.over_sampling_batch_size=4"],
            r"over_sampling_batch_size is 4 with async_training.mode 'async'.*max_outstanding_gr",
        ),
        (
            [SYNC, "sampling.over_sampling_batch_size=9"],
            r"over_sampling_batch_size is 9; .* = 2, and rollout.max_outstanding_groups = 8",
        ),
        ([SYNC, "sampling.over_sampling_batch_size=1"], r"over_sampling_batch_size is 1; it lies"),
        (
            [
                "trainer.keep_best=1",
                "validation.every=3",
                "async_training.trigger_parameter_sync_step=2",
            ],
            r"keep_best is 1 with validation.every 3.*make validation.every a multiple",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(tmp_path, *overrides)


# ── the filter of scored groups ──────────────────────────────────────────────────────────────────


def test_groups_whose_rewards_are_all_equal_are_dropped_and_counted() -> None:
    judge = GroupFilter(SamplingConfig(filters=["nonzero_std"]))
    even, odd, one = group(1.0, 1.0), group(0.0, 1.0), group(0.5)
    assert judge.keep([even, odd, one, group(0.0, 0.0, 0.0)]) == [odd, one]
    assert judge.dropped == {"zero_variance": 2}
    assert judge.metrics() == {"sampling/filtered": 2.0, "sampling/filtered/zero_variance": 2.0}


def slime_keeps_hard_ones(args: Any, samples: list[Any]) -> bool:
    return sum(s.reward for s in samples) < 1.5


def test_filters_are_named_by_dotted_path_and_the_first_that_objects_decides() -> None:
    judge = GroupFilter(
        SamplingConfig(
            filters=["all_wrong(0.0)", f"slime_filter({__name__}:slime_keeps_hard_ones)"]
        ),
        MODEL,
    )
    hard = group(0.0, 1.0)
    assert judge.keep([group(0.0, 0.0), hard, group(1.0, 1.0)]) == [hard]
    assert judge.dropped == {"all_wrong": 1, "slime_keeps_hard_ones": 1}


def test_without_filters_every_group_is_kept() -> None:
    groups = [group(1.0, 1.0), group(0.0)]
    assert GroupFilter(SamplingConfig(filters=[])).keep(groups) == groups


shown: list[GroupInfo] = []


def looks(info: GroupInfo) -> None:
    shown.append(info)


def test_a_filter_sees_of_a_leased_group_what_the_pool_would_show_it() -> None:
    judge = GroupFilter(SamplingConfig(filters=[f"{__name__}:looks"]))
    assert judge.keep([group(0.0, 2.0, n_rollouts=2, policy_version=3)])
    info = shown.pop()
    assert (info.reward_mean, info.reward_std) == (1.0, 1.0)
    assert (info.oldest_version, info.newest_version, info.n_steps) == (3, 3, 2)


# ── modes ────────────────────────────────────────────────────────────────────────────────────────


async def test_sync_trains_only_on_tokens_of_the_weights_it_has(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path, SYNC)) as run:
        records = await run.train()
    assert [r["staleness/max"] for r in records] == [0.0] * 4
    assert run.versions == [[0], [1], [2], [3]]
    assert [run.rollouts.begun[v] for v in range(4)] == [2] * 4  # a window each, no more


async def test_one_step_off_generates_a_window_ahead_and_never_more(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path, ONE_STEP_OFF)) as run:
        records = await run.train()
    assert [r["staleness/max"] for r in records] == [0.0, 1.0, 1.0, 1.0]
    assert run.versions == [[0], [0], [1], [2]]
    assert [run.rollouts.begun[v] for v in range(4)] == [4, 2, 2, 2]


async def test_async_generation_does_not_wait_for_publications(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path, ASYNC)) as run:
        records = await run.train()
    assert run.rollouts.begun[0] > 4  # ahead by what is outstanding: a window is 2
    assert max(r["staleness/max"] for r in records) > 1


async def test_a_straggler_of_one_step_off_is_not_trained_once_it_is_too_old(
    tmp_path: Path,
) -> None:
    late = asyncio.Event()
    config = small_config(tmp_path, ONE_STEP_OFF, "sampling.over_sampling_batch_size=3")
    hold = {"train1": late}
    async with small_run(config, hold=lambda task, _: hold.get(task["instance_id"])) as run:
        training = asyncio.create_task(run.train())
        await run.engine.serves(3)
        late.set()
        hold.clear()  # issued again, it does not hang again
        await training
        reasons = await run.drop_reasons()
    assert all(r["staleness/max"] <= 1 for r in run.records)
    if run.rollouts.begun_tasks.count("train1") > 1:
        assert reasons["stale"] >= 1


# ── publication and batches ──────────────────────────────────────────────────────────────────────


async def test_weights_are_published_every_so_many_updates(tmp_path: Path) -> None:
    config = small_config(tmp_path, "async_training.trigger_parameter_sync_step=2")
    async with small_run(config) as run:
        records = await run.train()
        assert run.trainer.progress.published == {0: 0, 1: 2, 2: 4}
    assert [r["policy_version"] for r in records] == [0, 1, 1, 2]
    assert [c for c in run.engine.calls if c.startswith("load")] == ["load 1", "load 2"]


async def test_batches_taken_at_once_are_updates_with_one_proximal_policy(tmp_path: Path) -> None:
    config = small_config(tmp_path, "async_training.require_batches=2")
    async with small_run(config) as run:
        records = await run.train()
    assert len(records) == 4
    assert run.backend.scored == 2
    prox = [float(c["prox_log_probs"][0]) for c in run.backend.columns]
    assert prox == pytest.approx([-0.5, -0.5, -0.52, -0.52])
    assert [r["groups"] for r in records] == [2] * 4
    uids = [{s.prompt_uid for s in steps} for steps in run.backend.steps]
    assert not uids[0] & uids[1]


@pytest.mark.parametrize(("partial", "pauses"), [("true", ["pause retract"]), ("false", [])])
async def test_partial_rollout_interrupts_generation_at_a_publication(
    tmp_path: Path, partial: str, pauses: list[str]
) -> None:
    config = small_config(tmp_path, f"async_training.partial_rollout={partial}")
    async with small_run(config) as run:
        await run.train(1)
    assert run.engine.calls == [*pauses, "load 1", *(["continue"] if pauses else [])]


@pytest.mark.parametrize("use", ["true", "false"])
async def test_the_behaviour_policy_is_the_engines_or_recomputed(tmp_path: Path, use: str) -> None:
    config = small_config(tmp_path, ASYNC, f"async_training.use_rollout_log_probs={use}")
    async with small_run(config) as run:
        await run.train(3)
    columns = run.backend.columns[2]  # two updates later: log π has moved
    behaviour = columns["rollout_log_probs"]
    engine = torch.full_like(behaviour, -0.5)
    assert torch.equal(behaviour, engine if use == "true" else columns["prox_log_probs"])
    assert not torch.equal(columns["prox_log_probs"], engine)


@pytest.mark.parametrize(("threshold", "share"), [(0.1, [0.0, 1.0]), (0.6, [0.0, 0.0])])
async def test_steps_beyond_the_staleness_threshold_are_off_policy(
    tmp_path: Path, threshold: float, share: list[float]
) -> None:
    config = small_config(
        tmp_path,
        SYNC,
        "async_training.trigger_parameter_sync_step=2",
        f"async_training.staleness_threshold={threshold}",
    )
    async with small_run(config) as run:
        records = await run.train(2)
    assert [r["staleness/mean"] for r in records] == [0.0, 0.5]
    assert [r["off_policy_share"] for r in records] == share
    weights = run.backend.columns[1]["weights"]
    assert bool((weights < 1).all()) == (share[1] == 1.0)  # kept, but down-weighted


async def test_beyond_the_queue_size_the_oldest_ready_group_is_dropped(tmp_path: Path) -> None:
    async with small_run(small_config(tmp_path, "async_training.max_queue_size=2")) as run:
        async with run.producer.running(limit=5) as generation:
            await generation
        assert await run.drop_reasons() == {"max_queue_size": 3}
        lease = await run.pool.lease_batch(channel=TRAIN, batch_size=2)
    assert lease is not None
    assert [g.metadata["task"]["instance_id"] for g in lease.groups] == ["train3", "train4"]


# ── over-sampling ────────────────────────────────────────────────────────────────────────────────


async def test_without_over_sampling_a_window_waits_for_its_stragglers(tmp_path: Path) -> None:
    late = asyncio.Event()
    hang = {"train1": late}
    async with small_run(
        small_config(tmp_path, SYNC), hold=lambda task, _: hang.get(task["instance_id"])
    ) as run:
        training = asyncio.create_task(run.train(1))

        async def trainer_waits() -> bool:
            return bool((await run.pool.get_statistics(TRAIN))["waiting"]["consumers"])

        await until(trainer_waits)
        await until(lambda: run.rollouts.ended == ["train0"])
        assert run.rollouts.begun_tasks == ["train0", "train1"]
        assert run.records == []
        late.set()
        await training
    assert len(run.records) == 1


async def test_with_over_sampling_a_window_is_trained_without_its_stragglers(
    tmp_path: Path,
) -> None:
    hang = {"train1": asyncio.Event()}
    async with small_run(
        small_config(tmp_path, SYNC, "sampling.over_sampling_batch_size=3"),
        hold=lambda task, _: hang.get(task["instance_id"]),
    ) as run:
        await run.train(1)
    trained = {s.prompt_uid.rpartition("-")[0] for s in run.backend.steps[0]}
    assert trained == {"train0", "train2"}


async def test_what_a_window_leaves_over_is_dropped_and_its_prompts_are_issued_again(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, SYNC, "sampling.over_sampling_batch_size=3")
    hang = {"train1": asyncio.Event()}  # the second time it ends
    async with small_run(config, hold=lambda task, _: hang.pop(task["instance_id"], None)) as run:
        await run.train()
        assert (await run.drop_reasons())[SURPLUS] == 4  # one a window
    assert run.rollouts.cancelled == ["train1"]
    assert run.rollouts.begun_tasks.count("train1") >= 2
    assert all(r["staleness/max"] == 0 for r in run.records)
    result = audit(config.run.dir / "ledger.jsonl", [f"train{i}" for i in range(200)])
    assert result.skipped == result.doubled == ()
    assert result.trained == 8
    assert result.returned == result.dropped[SURPLUS] == 4


async def test_with_partial_rollout_what_a_window_leaves_over_goes_on_under_the_next_weights(
    tmp_path: Path,
) -> None:
    late = asyncio.Event()
    config = small_config(
        tmp_path,
        SYNC,
        "sampling.over_sampling_batch_size=3",
        "async_training.partial_rollout=true",
    )
    hang = {"train1": late}
    async with small_run(config, hold=lambda task, _: hang.get(task["instance_id"])) as run:
        training = asyncio.create_task(run.train())
        await run.engine.serves(1)
        late.set()
        await training
        assert SURPLUS not in await run.drop_reasons()
    assert run.rollouts.begun_tasks.count("train1") == 1
    mixed = [s for steps in run.backend.steps for s in steps if s.version_spans]
    assert {s.prompt_uid.rpartition("-")[0] for s in mixed} == {"train1"}
    assert mixed[0].version_spans[0].version == 0


# ── dynamic sampling ─────────────────────────────────────────────────────────────────────────────


def easy(task: Mapping[str, Any], index: int) -> float:
    """Every second prompt is solved by every rollout."""
    return 1.0 if int(task["instance_id"].removeprefix("train")) % 2 else float(index)


@pytest.mark.parametrize("mode", [SYNC, ONE_STEP_OFF, ASYNC])
async def test_groups_that_teach_nothing_are_replaced_before_they_are_trained(
    tmp_path: Path, mode: str
) -> None:
    config = small_config(tmp_path, mode, "sampling.filters=[nonzero_std]")
    async with small_run(config, reward=easy) as run:
        records = await run.train()
        reasons = await run.drop_reasons()
    assert [r["groups"] for r in records] == [2] * 4
    assert [r["reward/mean"] for r in records] == [0.5] * 4
    assert reasons["zero_variance"] >= 3  # they were among the groups before the eighth good one
    assert reasons.keys() <= {"zero_variance", "stale"}


def unscored(task: Mapping[str, Any], index: int) -> None:
    return None


def score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any
) -> float:
    """Reward like that of `easy`: the even questions are solved by one of two rollouts."""
    number = int(ground_truth)
    score.calls[number] = score.calls.get(number, 0) + 1  # type: ignore[attr-defined]
    return 1.0 if number % 2 or score.calls[number] % 2 else 0.0  # type: ignore[attr-defined]


score.calls = {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
async def test_groups_that_the_trainer_scores_are_filtered_after_the_lease_and_replaced(
    tmp_path: Path, mode: str
) -> None:
    score.calls.clear()  # type: ignore[attr-defined]
    config = small_config(
        tmp_path, mode, "sampling.filters=[nonzero_std]", f"rollout.reward={__name__}:score"
    )
    async with small_run(config, reward=unscored) as run:
        records = await run.train()
    assert [r["groups"] for r in records] == [2] * 4
    assert [r["reward/mean"] for r in records] == [0.5] * 4
    assert records[-1]["sampling/filtered/zero_variance"] >= 7
    result = audit(config.run.dir / "ledger.jsonl", [f"train{i}" for i in range(200)])
    assert result.skipped == result.doubled == ()
    assert result.trained == 8


async def test_a_batch_that_is_never_whole_ends_with_an_error_if_refills_are_limited(
    tmp_path: Path,
) -> None:
    config = small_config(
        tmp_path,
        "sampling.filters=[all_correct(0.0)]",
        "sampling.max_refills=3",
        f"rollout.reward={__name__}:score",
    )
    async with small_run(config, reward=unscored) as run:
        with pytest.raises(
            StarvedError, match=r"filled up sampling.max_refills = 3 times.*'all_correct': 8"
        ):
            await run.train()


async def test_a_run_whose_groups_are_all_filtered_says_so(tmp_path: Path) -> None:
    """Without a limit it fills its batch up for ever, and no optimizer step shows a figure."""
    config = small_config(
        tmp_path,
        "sampling.filters=[all_correct(0.0)]",
        f"rollout.reward={__name__}:score",
        train=40,  # 20 batches
    )
    told: list[str] = []
    async with small_run(config, reward=unscored, notify=told.append) as run:
        assert await run.train() == []
    said = re.findall(r"a batch was filled up (\d+) times and has 0 of 2 groups", "\n".join(told))
    assert said == ["4", "8", "16"]
    assert any("left out so far: 10 × all_correct. " in line for line in told)


async def test_a_batch_that_does_not_come_says_of_how_many_groups_it_is(tmp_path: Path) -> None:
    keys = ("async_training.require_batches=2", "trainer.starvation_timeout_s=0.01")
    never = asyncio.Event()
    async with small_run(small_config(tmp_path, *keys), hold=lambda task, channel: never) as run:
        with pytest.raises(StarvedError, match=r"no 4 groups became ready within trainer\.starv"):
            await run.train()


async def test_a_batch_is_waited_for_as_long_as_more_of_its_groups_become_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents may need longer for a batch than for a group."""
    holds = {f"train{i}": asyncio.Event() for i in range(2, 200)}
    config = small_config(tmp_path, "trainer.train_batch_size=4", "trainer.total_steps=1")
    take, taken = TrainedChannel.take, 0

    async def slow(channel: TrainedChannel, size: int) -> Any:
        nonlocal taken
        taken += 1
        if taken == 2:
            for i in (2, 3):
                holds[f"train{i}"].set()
        if taken == 3:
            return await take(channel, size)

        async def is_ready() -> bool:
            return bool((await run.pool.get_statistics(TRAIN))["groups"]["ready"] == 2 * taken)

        await until(is_ready)
        raise StarvedError("too slow")

    monkeypatch.setattr(TrainedChannel, "take", slow)
    async with small_run(config, hold=lambda task, _: holds.get(task["instance_id"])) as run:
        assert [r["groups"] for r in await run.train()] == [4]
    assert taken == 3


async def test_groups_that_another_lease_took_became_ready_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refill of a batch stands behind the lease of the next batch."""
    take, taken = TrainedChannel.take, 0

    async def overtaken(channel: TrainedChannel, size: int) -> Any:
        nonlocal taken
        taken += 1
        if taken > 2:
            return await take(channel, size)
        assert await run.pool.lease_batch(batch_size=4, timeout_s=60) is not None
        await until(is_full)
        raise StarvedError("the other one took them")

    async def is_full() -> bool:
        return bool((await run.pool.get_statistics(TRAIN))["groups"]["ready"] == 8)

    monkeypatch.setattr(TrainedChannel, "take", overtaken)
    keys = ("trainer.train_batch_size=4", "trainer.total_steps=1")
    async with small_run(small_config(tmp_path, *keys)) as run:
        assert [r["groups"] for r in await run.train()] == [4]
    assert taken == 3


def test_groups_with_a_long_deadline_are_waited_for(tmp_path: Path) -> None:
    """A harness has 39 minutes by default, and the run ended after 10."""
    wait = small_config(tmp_path, "trainer.starvation_timeout_s=null").starvation_timeout_s
    assert wait == 600
    long = ("trainer.starvation_timeout_s=null", "rollout.group_deadline_s=2340")
    assert small_config(tmp_path, *long).starvation_timeout_s == 2340
    short = ("trainer.starvation_timeout_s=60", "rollout.group_deadline_s=2340")
    assert small_config(tmp_path, *short).starvation_timeout_s == 60


@pytest.mark.slow
async def test_the_last_batch_of_the_data_is_trained_though_it_cannot_be_filled_up(
    tmp_path: Path,
) -> None:
    score.calls.clear()  # type: ignore[attr-defined]
    config = small_config(
        tmp_path,
        SYNC,
        "sampling.filters=[nonzero_std]",
        f"rollout.reward={__name__}:score",
        train=6,  # 3 of which are kept: a batch and a half
    )
    async with small_run(config, reward=unscored) as run:
        records = await run.train()
    assert [r["groups"] for r in records] == [2, 1]


def test_the_presets_can_be_had() -> None:
    for preset in ("quickstart", "smollm2"):
        with suppress(ConfigError):  # a model that is not there says so last
            load_config(preset)


# ── the end of the data ──────────────────────────────────────────────────────────────────────────

RETURNS = (
    ASYNC,
    "pool.channels.train.on_stale=return",
    "pool.channels.train.max_staleness=0",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(SYNC, "sampling.over_sampling_batch_size=6"), RETURNS, (ONE_STEP_OFF,)]
)
async def test_prompts_that_come_back_after_the_last_was_drawn_are_trained(
    tmp_path: Path, options: Sequence[str]
) -> None:
    config = small_config(tmp_path, *options, train=6)
    async with small_run(config) as run:
        records = await run.train()
    assert [r["groups"] for r in records] == [2] * 3
    result = audit(config.run.dir / "ledger.jsonl", [f"train{i}" for i in range(6)])
    assert result.skipped == result.doubled == result.waiting == ()
    assert result.trained == 6


async def test_a_batch_that_the_data_cannot_fill_ends_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, SYNC, "sampling.over_sampling_batch_size=3", train=5)
    async with small_run(config) as run:
        records = await run.train()
    assert len(records) == 2
    assert audit(config.run.dir / "ledger.jsonl").trained == 4

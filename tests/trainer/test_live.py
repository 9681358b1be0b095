"""A trainer over groups that agents bring by themselves: nothing is issued, nothing is lost."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwell.config.run import RunConfig
from stepwell.datapool import DataPoolClient, PoolConfig, VersionSpan
from stepwell.datapool.errors import JournalCorruptError
from stepwell.datapool.store.salvage import salvage, settle_doubtful
from stepwell.datapool.types import TRAIN, VAL
from stepwell.trainer import batches
from stepwell.trainer.ledger import audit
from stepwell.trainer.samples import read_samples, samples_path
from tests.builders import step_of
from tests.datapool.conftest import newest_segment
from tests.trainer.small_run import RecordingBackend, SmallRun, small_config, small_run


def live_config(folder: Path, *overrides: str) -> RunConfig:
    """Nobody's agents: no tasks, and no end."""
    config = small_config(folder, "trainer.checkpoint_every=2", *overrides)
    rollout = config.rollout.model_copy(update={"agent": None})
    return config.model_copy(update={"data": None, "rollout": rollout})


async def brings(
    pool: DataPoolClient,
    *,
    version: int = 0,
    rewards: Sequence[float | None] = (0.0, 1.0),
    channel: str = TRAIN,
    newer: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    of_each: Mapping[str, Any] | None = None,
    of_steps: Mapping[str, Any] | None = None,
) -> str:
    """A group, as an agents' service declares it; returns its prompt_uid.

    Args:
        newer: the version that sampled the last token.
        metadata: the group's.
        of_each: the metadata of each of its trajectories.
        of_steps: that of each of their Steps.
    """
    metadata = metadata or {"task": {"theirs": True}}
    uid = uuid.uuid4().hex[:8]
    spans = () if newer is None else (VersionSpan(version, 0, 1), VersionSpan(newer, 1, 2))
    step = {"policy_version": version, "version_spans": spans, "metadata": dict(of_steps or {})}
    await pool.open_group(uid, len(rewards), channel=channel, metadata=dict(metadata))
    for i, reward in enumerate(rewards):
        only = step_of(f"{uid}-{i}", uid, **step)
        await pool.submit_step(only, channel)
        await pool.complete_trajectory(f"{uid}-{i}", reward, channel, metadata=dict(of_each or {}))
    return uid


def trained(run: SmallRun) -> list[str]:
    return sorted({s.prompt_uid for steps in run.backend.steps for s in steps})


async def test_groups_that_come_by_themselves_are_trained_once_each(tmp_path: Path) -> None:
    async with small_run(live_config(tmp_path)) as run:
        uids = [await brings(run.pool) for _ in range(8)]
        records = await run.train(4)
        assert (await run.pool.get_statistics(TRAIN))["groups"]["acked"] == 8
    assert trained(run) == sorted(uids)
    assert [r["groups"] for r in records] == [2] * 4
    found = audit(tmp_path / "ledger.jsonl")
    assert (found.trained, found.doubled, found.in_flight) == (8, (), ())


@pytest.mark.parametrize(
    "metadata",
    [{"tool_calls": [{"name": "add"}]}, {"tool_calls": "add"}, {"messages": 3}, {"messages": "hi"}],
)
async def test_steps_of_others_may_say_anything_of_tools_and_messages(
    tmp_path: Path, metadata: dict[str, Any]
) -> None:
    async with small_run(live_config(tmp_path)) as run:
        for _ in range(2):
            await brings(run.pool, of_steps=metadata)
        (record,) = await run.train(1)
    assert "tool_calls/mean" not in record
    assert record["reward/mean"] == 0.5


async def test_a_trainer_waits_for_traffic_as_long_as_it_takes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "REPORT_S", 0.01)
    told: list[str] = []
    said = asyncio.Event()

    def notify(text: str) -> None:
        told.append(text)
        said.set()

    config = live_config(tmp_path, "trainer.starvation_timeout_s=0.01")
    async with small_run(config, notify=notify) as run:
        await brings(run.pool)
        training = asyncio.create_task(run.train(1))
        await said.wait()
        assert not training.done()
        await brings(run.pool)
        await training
    assert (
        "waiting for 2 groups of traffic: 1 are ready, 0 open with 0 open trajectories;" in told[0]
    )


def unmarked(args: Any, samples: list[Any]) -> bool:
    return "odd" not in samples[0].metadata


async def test_a_batch_that_is_filled_up_says_how_many_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.trainer.batches.REPORT_S", 0.1)
    said: asyncio.Queue[str] = asyncio.Queue()
    config = live_config(tmp_path, f"sampling.filters=[slime_filter({__name__}:unmarked)]")
    async with small_run(config, notify=said.put_nowait) as run:
        await brings(run.pool, of_each={"odd": True})
        await brings(run.pool)
        training = asyncio.create_task(run.train(1))
        assert "waiting for 1 groups of traffic: 0 are ready" in await said.get()
        await brings(run.pool)
        await training


async def test_a_trainer_that_waits_for_open_conversations_says_what_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.trainer.batches.REPORT_S", 0.1)
    said: asyncio.Queue[str] = asyncio.Queue()
    config = live_config(tmp_path, "trainer.starvation_timeout_s=0.01")
    async with small_run(config, notify=said.put_nowait) as run:
        await run.pool.open_trajectory("t", "p")
        training = asyncio.create_task(run.train(1))
        assert "(each until POST /v1/complete_trajectory)" in await said.get()
        training.cancel()


async def test_what_a_killed_trainer_had_leased_is_trained_by_the_next_one_once(
    tmp_path: Path,
) -> None:
    """It is killed after update 3, with a checkpoint of update 2."""
    async with small_run(live_config(tmp_path)) as run:
        uids = [await brings(run.pool) for _ in range(10)]
        training = asyncio.create_task(run.train())
        await run.trained(3)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        pool, lost = run.pool, run.trainer.progress.version
    async with small_run(live_config(tmp_path), pool=pool, backend=RecordingBackend()) as run:
        assert await run.trainer.resume()
        assert run.trainer.progress.updates == 2
        await run.train(5)
        assert (await pool.get_statistics(TRAIN))["groups"]["dropped"] == 0
        assert run.trainer.progress.version > lost
    found = audit(tmp_path / "ledger.jsonl")
    assert (found.trained, found.doubled, found.in_flight) == (10, (), ())
    assert len(trained(run)) == 6
    assert set(trained(run)) <= set(uids)


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("from_end", [60, 700, 3000, 9000])
async def test_what_was_acked_is_not_trained_again_after_a_salvage_even_if_it_is_released(
    tmp_path: Path, how: str, from_end: int
) -> None:
    """60 groups are trained and acked, then a bit of the journal flips near its end, or that
    is cut off."""
    folder, config = tmp_path / "pool", live_config(tmp_path)
    async with (
        DataPoolClient.local(PoolConfig(), folder) as pool,
        small_run(config, pool=pool) as run,
    ):
        old = [await brings(pool) for _ in range(60)]
        await run.train(30)
        assert (await pool.get_statistics(TRAIN))["groups"]["acked"] == 60
    path = newest_segment(folder)
    data = bytearray(path.read_bytes())
    data[-from_end] ^= 4
    data = data[:-from_end] if how == "cut" else data
    path.write_bytes(data)
    with pytest.raises(JournalCorruptError):
        async with DataPoolClient.local(PoolConfig(), folder):
            pass
    salvage(folder)
    settle_doubtful(folder, [], release=True)
    backend = RecordingBackend()
    async with (
        DataPoolClient.local(PoolConfig(), folder) as pool,
        small_run(config, pool=pool, backend=backend) as run,
    ):
        assert await run.trainer.resume()
        new = [await brings(pool) for _ in range(2)]
        await run.train(31)
    assert trained(run) == sorted(new)
    assert audit(tmp_path / "ledger.jsonl").doubled == ()
    assert not {*old} & {*trained(run)}


async def test_a_model_that_was_trained_on_tasks_is_trained_on_by_traffic(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    async with small_run(small_config(tmp_path / "tasks")) as run:
        await run.train(4)
    async with small_run(live_config(tmp_path)) as run:
        assert await run.trainer.resume(tmp_path / "tasks" / "checkpoints" / "step_4")
        uids = [await brings(run.pool) for _ in range(2)]
        (record,) = await run.train(5)
        assert run.backend.updates == 5
    assert record["step"] == 5
    assert trained(run) == sorted(uids)


async def test_what_a_lost_policy_version_sampled_is_trained_as_off_policy(tmp_path: Path) -> None:
    """Its weights are gone with the trainer that was killed; its log-probs are with the steps."""
    async with small_run(live_config(tmp_path)) as run:
        for _ in range(4):
            await brings(run.pool)
        await run.train(2)
        pool = run.pool
        await pool.advance_version(5)
    async with small_run(live_config(tmp_path), pool=pool) as run:
        await run.trainer.resume()
        assert run.trainer.progress.version == 6
        uids = [await brings(pool, version=5), await brings(pool, version=6)]
        (record,) = await run.train(3)
    assert trained(run) == sorted(uids)
    assert record["off_policy_share"] == 0.5
    assert record["staleness/max"] == 1.0


async def test_held_out_traffic_is_evaluated_by_the_version_that_answered_it(
    tmp_path: Path,
) -> None:
    async with small_run(live_config(tmp_path)) as run:
        await brings(run.pool, channel=VAL, rewards=(0.0, 0.5))
        await brings(run.pool, channel=VAL, rewards=(1.0,), version=1)
        await brings(run.pool, channel=VAL, rewards=(1.0,), version=0, newer=1)
        run.trainer.progress.version = run.trainer.progress.published[1] = 1
        found = await run.trainer.evaluate([])
        assert [(e.version, e.score, e.rollouts, e.mixed) for e in found] == [
            (0, 0.25, 2, 0),
            (1, 1.0, 1, 1),
        ]
        assert await run.trainer.evaluate([]) == []  # nothing came since
        assert [e.version for e in run.trainer.progress.evaluations] == [0, 1]
        assert (await run.pool.get_statistics(VAL))["groups"]["acked"] == 3


async def test_a_second_look_at_one_step_keeps_the_table_of_the_first(tmp_path: Path) -> None:
    """A run whose last step was looked at looks again at its end."""
    async with small_run(live_config(tmp_path)) as run:
        await brings(run.pool, channel=VAL, rewards=(0.0, 0.5))
        await run.trainer.evaluate([])
        await brings(run.pool, channel=VAL, rewards=(1.0,))
        await run.trainer.evaluate([])
    rows = read_samples(samples_path(tmp_path, 0))
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.5]


async def test_a_damaged_table_of_an_earlier_look_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is for people, who are told of it; the traffic that is evaluated does not come again."""
    async with small_run(live_config(tmp_path)) as run:
        await brings(run.pool, channel=VAL, rewards=(0.0, 0.5))
        await run.trainer.evaluate([])
        table = samples_path(tmp_path, 0)
        damaged = table.read_bytes().replace(b'"reward":0.5', b'"reward":0.6')
        table.write_bytes(damaged)
        await brings(run.pool, channel=VAL, rewards=(1.0,))
        (evaluation,) = await run.trainer.evaluate([])
        assert (await run.pool.get_statistics(VAL))["groups"]["acked"] == 2
    assert evaluation.score == 1.0
    assert table.read_bytes() == damaged
    assert "the samples of the evaluation at step 0 are not written" in caplog.text
    assert f"{table} is damaged (the line at byte {len(damaged.splitlines(True)[0])}" in caplog.text


async def test_held_out_traffic_stays_leased_for_as_long_as_its_reward_takes(
    tmp_path: Path,
) -> None:
    (tmp_path / "judge.py").write_text(
        "import asyncio\nasync def score(*given):\n    await asyncio.sleep(0.6)\n    return 1.0\n"
    )
    reward = f"rollout.reward={tmp_path / 'judge.py'}:score"
    config = live_config(tmp_path, reward, "pool.channels={val: {lease_s: 0.2}}")
    async with small_run(config) as run:
        await brings(run.pool, rewards=(None, None), channel=VAL)
        (evaluation,) = await run.trainer.evaluate([])
        assert (evaluation.rollouts, evaluation.score) == (2, 1.0)
        assert (await run.pool.get_statistics(VAL))["groups"]["acked"] == 1
        assert await run.trainer.evaluate([]) == []


async def test_versions_with_little_traffic_are_evaluated_together_and_not_compared_before(
    tmp_path: Path,
) -> None:
    async with small_run(live_config(tmp_path)) as run:
        found = []
        for version in range(6):
            run.trainer.progress.published[version] = version
            run.trainer.progress.version = version
            for i in range(10):
                reward = float(i < 4 + version)
                await brings(run.pool, channel=VAL, rewards=(reward,), version=version)
            found += await run.trainer.evaluate([])
        run.trainer.checkpoints.folder.mkdir()
        run.trainer.rank(found)
        ranked = run.trainer.checkpoints.scores()
    assert ranked == pytest.approx({2: 0.5, 3: 0.6, 4: 0.7, 5: 0.8}), "0 and 1 say too little"
    assert [e.score for e in found] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    pooled = [e.pooled for e in found if e.pooled is not None]
    assert [(p.rollouts, p.oldest_version) for p in pooled] == [
        (10, 0),
        (20, 0),
        (30, 0),
        (30, 1),
        (30, 2),
        (30, 3),
    ]
    assert pooled[-1].score == pytest.approx(0.8)
    low, high = pooled[-1].low, pooled[-1].high
    assert low is not None
    assert high is not None
    assert 0.6 < low < 0.8 < high < 0.95
    assert [e.comparable_score for e in found[:2]] == [None, None]
    assert "10 rollouts of version 0, too few to compare" in found[0].describe()
    assert "30 rollouts of versions 3 to 5" in found[5].describe()
    assert "val/pooled/score" not in found[0].as_metrics()
    assert found[5].as_metrics()["val/pooled/score"] == pytest.approx(0.8)


async def test_held_out_traffic_outlives_a_trainer(tmp_path: Path) -> None:
    async with small_run(live_config(tmp_path)) as run:
        await brings(run.pool, channel=VAL)
        assert await run.pool.lease_batch(channel=VAL) is not None  # by one that is killed now
        await run.trainer.resume()
        (evaluation,) = await run.trainer.evaluate([])
    assert evaluation.rollouts == 2


async def test_traffic_that_nobody_scores_is_not_taken_and_what_is_scored_late_is(
    tmp_path: Path,
) -> None:
    async with small_run(live_config(tmp_path)) as run:
        late = await brings(run.pool, rewards=(None, None))
        uids = [await brings(run.pool) for _ in range(3)]
        await run.train(1)
        assert late not in trained(run)
        for i in range(2):
            await run.pool.set_reward(f"{late}-{i}", float(i))
        await run.train(2)
    assert trained(run) == sorted([*uids, late])


@pytest.mark.parametrize(
    ("metadata", "of_each"),
    [
        ({"task": "text"}, {}),
        ({"task": ["a list"]}, {}),
        ({"stepwell_task": "no JSON"}, {}),
        ({"stepwell_task": "[1]"}, {}),
        ({"task": {"metadata": "x", "messages": ["y"], "data_source": ["z"]}}, {}),
        ({"task": {"messages": [{"role": "user", "content": [1, {"text": 2}]}]}}, {}),
        ({"task": {"messages": 1}}, {}),
        ({"channel": "sft"}, {}),
        ({}, {"reward_extra_info": None}),
        ({}, {"reward_extra_info": [1]}),
    ],
)
async def test_what_agents_send_as_metadata_ends_no_run(
    tmp_path: Path, metadata: dict[str, Any], of_each: dict[str, Any]
) -> None:
    config = live_config(tmp_path, "rollout.overlong_buffer={len: 1, max_resp_len: 1}")
    async with small_run(config) as run:
        uids = [await brings(run.pool, metadata=metadata, of_each=of_each) for _ in range(2)]
        (record,) = await run.train(1)
        await brings(run.pool, channel=VAL, metadata=metadata, of_each=of_each)
        (evaluation,) = await run.trainer.evaluate([])
    assert trained(run) == sorted(uids)
    assert record["groups"] == 2
    assert not any("sft_coef" in columns for columns in run.backend.columns)
    assert evaluation.rollouts == 2

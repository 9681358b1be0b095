"""slime's rollout function over HTTP: a slime run's arguments and data source, a real gateway and
pool, and the rollouts that `/start_rollout` begins."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stepwell.backends.errors import BatchError
from stepwell.backends.slime.backend import post_process_rewards
from stepwell.backends.slime.sample import sample_class
from stepwell.trainer.errors import ConfigError, DataError, StarvedError
from stepwell.trainer.slime import buffer
from stepwell.trainer.slime.buffer import generate_agent_rollout, generate_rollout
from stepwell.trainer.slime.data_source import RolloutDataSourceWithBuffer
from tests.backends.slime_itself import HAS_SLIME
from tests.builders import until
from tests.gateway.conftest import serving, worlds  # noqa: F401 - a fixture
from tests.gateway.test_rollout_buffer import Consumer, rollouts, statistics
from tests.trainer.test_slime_rollout import slime_args

REWARD = "tests.gateway.scripted_reward:exact"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "POLL_S", 0.1)


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., tuple[Namespace, RolloutDataSourceWithBuffer]]:
    """Arguments and data source of a slime run with the gateway of a world."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"say {i}", "label": "fine"} for i in range(3)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(url: str, **given: Any) -> tuple[Namespace, RolloutDataSourceWithBuffer]:
        args = slime_args(
            **{
                "rollout_buffer_url": url,
                "rollout_task_type": "external",
                "fetch_trajectory_retry_times": 0,
                "prompt_data": str(prompts),
                "input_key": "prompt",
                "label_key": "label",
                "rollout_max_response_len": 64,
                "num_epoch": 1,
                **given,
            }
        )
        return args, RolloutDataSourceWithBuffer(args)

    return make


async def test_a_slime_run_starts_its_rollout_and_trains_what_comes(
    worlds: Callable[..., Any],  # noqa: F811
    run_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
):
    key = "a-key-of-32-characters-or-there"
    monkeypatch.setenv("STEPWELL_ADMIN_KEY", key)
    world = await worlds("chatml", reward_fn=REWARD, admin_keys=(key,))
    args, source = run_of(world.url, rollout_task_type="math")
    source.update_metadata({"0": [1]})  # a checkpoint's: the group of instance 1 was trained
    made = await generate_agent_rollout(args, 1, source)
    samples, metrics = made.groups, made.metrics
    assert [len(g) for g in samples] == [2, 2]
    assert {s.metadata["instance_id"] for g in samples for s in g} == {0, 2}
    sample = samples[0][0]
    assert isinstance(sample, sample_class())
    step = world.stored(sample.metadata["trajectory_uid"])[0]
    assert sample.tokens == step.token_ids.tolist()
    assert sample.loss_mask == [1] * len(step.response_ids)
    assert sample.rollout_log_probs == pytest.approx(step.rollout_log_probs.tolist())
    assert sample.status == sample_class().Status.COMPLETED
    assert (sample.reward, sample.label) == (1.0, "fine")
    assert [s.group_index for g in samples for s in g] == [0, 0, 1, 1]
    assert metrics["stepwell/samples_without_log_probs"] == 0
    assert sorted(source.get_metadata()["1"]) == [0, 2]
    with pytest.raises(StarvedError, match="is finished, and 2 groups are missing"):
        await generate_agent_rollout(args, 2, source)


async def test_a_resumed_run_makes_no_group_again_that_any_epoch_has_trained(
    worlds: Callable[..., Any],  # noqa: F811
    run_of: Callable[..., Any],
):
    """Four groups of three instances: one of them was trained twice."""
    before, after = [await worlds("chatml", reward_fn=REWARD) for _ in range(2)]
    given = {"rollout_task_type": "math", "num_epoch": 2}
    args, source = run_of(before.url, **given)
    for rollout_id in range(2):
        await generate_agent_rollout(args, rollout_id, source)
    args, resumed = run_of(after.url, **given)
    resumed.update_metadata(source.get_metadata())
    samples = await generate_agent_rollout(args, 2, resumed)
    by_rollout = resumed.get_metadata()
    made = [name for own in by_rollout.values() for name in own]
    assert sorted(made, key=str) == [0, 0, 1, 1, 2, 2]
    assert [s.metadata["instance_id"] for s in samples][::2] == by_rollout["2"]
    with pytest.raises(StarvedError, match="is finished, and 2 groups are missing"):
        await generate_agent_rollout(args, 3, resumed)


async def test_text_only_rollouts_have_no_log_probs_and_raw_rewards_come_along(
    worlds: Callable[..., Any],  # noqa: F811
    run_of: Callable[..., Any],
):
    world = await worlds("chatml")
    consumer = Consumer(world.url)
    args, source = run_of(world.url)

    async def write(instance: int) -> None:
        for i in range(2):
            talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "fine"}]
            item = {"uid": f"{instance}-{i}", "instance_id": instance, "messages": talk}
            more = {"reward": i - 0.5, "raw_reward": i, "extra_info": {"finish_reason": "length"}}
            assert (await consumer.post("/buffer/write", item | more))[0] == 200

    rollout = asyncio.create_task(generate_agent_rollout(args, 0, source))
    await write(0)
    await write(1)
    flat = await rollout
    metrics = flat.metrics
    assert metrics["stepwell/samples_without_log_probs"] == 4
    assert metrics["stepwell/untrained_tokens/no_log_probs"] == 0
    assert all(s.rollout_log_probs is None for s in flat)
    assert all(s.status == sample_class().Status.TRUNCATED for s in flat)
    assert [s.metadata["raw_reward"] for s in flat] == [0, 1, 0, 1]
    _, normalised = post_process_rewards(args, flat)
    assert normalised == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, abs=1e-4)

    # Beside groups with log-probs slime cannot leave out the correction for some.
    await write(2)
    await rollouts(world, "p")
    samples = await generate_agent_rollout(args, 1, source)
    assert [s.remove_sample for s in samples] == [True, True, False, False]
    assert samples.metrics["stepwell/untrained_tokens/no_log_probs"] == 2 * len(
        world.ids("fine", close=False)
    )

    args.use_tis = True
    await write(3)
    await write(4)
    with pytest.raises(BatchError, match="use_tis is set"):
        await generate_agent_rollout(args, 2, source)


async def test_what_the_buffer_refuses_is_told_at_once_and_failures_so_often_as_is_borne(
    worlds: Callable[..., Any],  # noqa: F811
    run_of: Callable[..., Any],
):
    world = await worlds("chatml")
    args, source = run_of(world.url, rollout_task_type="poems")
    with pytest.raises(ConfigError, match="there is no rollout generator"):
        await generate_agent_rollout(args, 0, source)
    args, source = run_of("http://127.0.0.1:9", fetch_trajectory_retry_times=2)
    with pytest.raises(StarvedError, match="failed 3 times in this rollout"):
        await generate_agent_rollout(args, 0, source)
    with pytest.raises(ConfigError, match="evaluation"):
        await generate_agent_rollout(args, 0, source, evaluation=True)
    with pytest.raises(ConfigError, match="rollout_buffer_url is not set"):
        await generate_agent_rollout(slime_args(), 0, source)
    args.agent_rollout_buffer_url = "http://127.0.0.1:10"
    with pytest.raises(ConfigError, match="they are two names of one address: set one"):
        await generate_agent_rollout(args, 0, source)


async def test_what_came_before_a_failure_is_kept_and_only_the_rest_is_asked_for(
    worlds: Callable[..., Any],  # noqa: F811
    run_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
):
    world = await worlds("chatml")
    args, source = run_of(world.url)
    await rollouts(world, "p")
    # slime calls it without an event loop of its own.
    failing = asyncio.create_task(asyncio.to_thread(generate_rollout, args, 0, source))
    await until(lambda: statistics(world).get("delivered_groups"), 60)

    async def away(*args: Any) -> None:
        raise ConnectionError("scripted")

    with monkeypatch.context() as patch:
        patch.setattr(world.pool, "lease_batch", away)
        with pytest.raises(StarvedError, match="503"):
            await failing

    assert source.get_buffer_length() == 0
    await rollouts(world, "q")
    samples = await generate_agent_rollout(args, 0, source)
    assert [s.metadata["prompt_uid"] for s in samples] == ["p", "p", "q", "q"]
    assert source.get_metadata() == {"0": ["p", "q"]}


async def test_what_is_beyond_a_batch_is_trained_with_the_next(
    run_of: Callable[..., Any],
):
    """A buffer of another make serves all that it has."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    sampled = {"tokens": [1, 2], "response_length": 1, "loss_mask": [1]}
    items = [
        {"uid": f"{i}", "instance_id": i // 2, "messages": messages, "reward": 1, "extra_info": {}}
        | sampled
        for i in range(6)
    ]
    answers = [items, [{**item, "instance_id": 3} for item in items[:2]]]

    async def serve(request: Request) -> JSONResponse:
        data = {"data": answers.pop(0), "meta_info": {}}
        return JSONResponse({"success": True, "data": data})

    async def start(request: Request) -> JSONResponse:
        return JSONResponse({})

    routes = [
        Route("/get_rollout_data", serve, methods=["POST"]),
        Route("/start_rollout", start, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes)) as url:
        args, source = run_of(url)
        assert [s.index for s in await generate_agent_rollout(args, 0, source)] == [0, 0, 1, 1]
        assert source.get_metadata() == {"0": [0, 1]}
        assert [s.index for s in await generate_agent_rollout(args, 1, source)] == [2, 2, 3, 3]
        answers.append(items[:3])
        with pytest.raises(DataError, match="1 items of instance_id 1, but n_samples_per_prompt"):
            await generate_agent_rollout(args, 2, source)


async def test_the_function_that_slime_names_returns_what_its_controllers_take(
    worlds: Callable[..., Any],  # noqa: F811
    run_of: Callable[..., Any],
):
    world = await worlds("chatml")
    args, source = run_of(world.url, rollout_batch_size=1)
    await rollouts(world, "p")
    made = await asyncio.to_thread(generate_rollout, args, 0, source)
    if HAS_SLIME:  # today's has an output class, with metrics
        assert made.metrics["stepwell/samples_without_log_probs"] == 0
        (made,) = made.samples
    assert isinstance(made, list)
    assert [s.index for s in made] == ["p", "p"]

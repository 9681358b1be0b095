"""slime's Agent Rollout by its document: its functions, files, options and shapes,
against a real gateway and a real Rollout Buffer's answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from stepwell.backends.masks import MultiTurnLossMaskGenerator
from stepwell.backends.slime.backend import post_process_rewards
from stepwell.backends.slime.sample import SlimeSample, sample_class
from stepwell.trainer.errors import ConfigError, DataError, StarvedError
from stepwell.trainer.slime import buffer
from stepwell.trainer.slime.buffer import (
    generate_agent_rollout,
    get_rollout_data,
    log_raw_info,
    start_rollout,
)
from stepwell.trainer.slime.data_source import RolloutDataSourceWithBuffer
from tests.gateway.conftest import QUICKSTART, serving, worlds  # noqa: F401 - a fixture
from tests.gateway.test_rollout_buffer import Consumer
from tests.trainer.test_slime_rollout import slime_args

Sample = sample_class()

PROMPTS = (
    '{"instance_id": "math_001", "prompt": [{"role":"user","content":"Solve x^2 + 5x + 6 = 0"}]}\n'
    '{"instance_id": "math_002", "prompt": [{"role":"user","content":"Prove the theorem"}]}\n'
)
REQUIRED = ("uid", "instance_id", "messages", "reward", "extra_info")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "POLL_S", 0.05)


@pytest.fixture
def prompt_data(tmp_path: Path) -> Path:
    path = tmp_path / "instance_id.jsonl"
    path.write_text(PROMPTS)
    return path


@pytest.fixture
def args_of(prompt_data: Path) -> Callable[..., Namespace]:
    """The document's options as slime's parser leaves them."""

    def make(url: str, **given: Any) -> Namespace:
        return slime_args(
            **{
                "agent_rollout_buffer_url": url,
                "rollout_task_type": "external",
                "fetch_trajectory_retry_times": 0,
                "prompt_data": str(prompt_data),
                "input_key": "prompt",
                "loss_mask_type": "qwen",
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
                "rollout_max_response_len": 64,
                "rollout_temperature": 1.0,
                "num_rollout": 3000,
                "hf_checkpoint": str(QUICKSTART),
                "custom_reward_post_process_path": None,
                "use_wandb": False,
                **given,
            }
        )

    return make


def item(uid: str, instance: str, reward: float = 1.0, **more: Any) -> dict[str, Any]:
    """Check the fields of an item of `/get_rollout_data`."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"fine {uid}"}]
    extra = {"timestamp": "12.5", **more}
    return dict(zip(REQUIRED, (uid, instance, messages, reward, extra), strict=True))


async def write(url: str, n: int, instance: str, rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
    """A group of rollouts from outside, `n` its number."""
    for i, reward in enumerate(rewards):
        sent = item(f"{n}-{i}", instance, reward)
        assert (await Consumer(url).post("/buffer/write", sent))[0] == 200


class Scripted:
    """A Rollout Buffer that is not ours: its answers in turn, then the last one again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.started: list[dict[str, Any]] = []

    async def get(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Response):
            return found
        if isinstance(found, asyncio.Event):
            await found.wait()
            return JSONResponse({})
        return JSONResponse(found)

    async def start(self, request: Request) -> Response:
        self.started.append(await request.json())
        return JSONResponse({"message": "Rollout started"})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/get_rollout_data", self.get, methods=["POST"]),
                Route("/start_rollout", self.start, methods=["POST"]),
            ]
        )


def answer(*items: dict[str, Any], **info: Any) -> dict[str, Any]:
    data = {"data": list(items), "meta_info": info}
    return {"success": bool(items), "message": "", "data": data}


# ── the tool and the files ───────────────────────────────────────────────────────────────────────


def test_the_tool_gives_every_row_without_one_an_instance_id(tmp_path: Path) -> None:
    data = tmp_path / "dapo-math-17k.jsonl"
    rows = [{"prompt": "é"}, {"prompt": "b", "instance_id": "math_0"}, {"prompt": "c"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tool = [sys.executable, "-m", "stepwell.gateway.slime_buffer.assign_instance_id"]
    done = subprocess.run(
        [*tool, "--input_path", str(data)], capture_output=True, text=True, check=True
    )
    written = tmp_path / "dapo-math-17k_processed.jsonl"
    assert str(written) in done.stdout
    got = [json.loads(line) for line in written.read_text().splitlines()]
    assert [row["instance_id"] for row in got] == ["math_1", "math_0", "math_2"]
    assert [row["prompt"] for row in got] == ["é", "b", "c"]

    other = tmp_path / "other.jsonl"
    more = ["--input_path", str(data), "--task_type", "code", "--output_path", str(other)]
    subprocess.run([*tool, *more], check=True, capture_output=True)
    assert [json.loads(line)["instance_id"] for line in other.read_text().splitlines()] == [
        "code_0",
        "math_0",
        "code_1",
    ]


@pytest.mark.parametrize(
    ("lines", "more", "problem"),
    [
        ('{"a": 1}\n[1]\n', (), "data.jsonl:2 is no JSON object"),
        ('{"a": 1}\n{\n', (), "data.jsonl:2 is no JSON object"),
        ('{"a": 1}\n', ("--output_path", "{file}"), "--output_path is the input itself"),
    ],
)
def test_the_tool_writes_nothing_if_it_cannot_read_all(
    tmp_path: Path, lines: str, more: tuple[str, ...], problem: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stepwell.gateway.slime_buffer.assign_instance_id",
            "--input_path",
            str(data),
            *(m.format(file=data) for m in more),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert problem in done.stderr
    assert data.read_text() == lines
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


# ── start_rollout ────────────────────────────────────────────────────────────────────────────────


async def test_the_documented_payload_starts_a_rollout_over_the_documented_file(
    worlds: Callable[..., Any],  # noqa: F811
    prompt_data: Path,
):
    world = await worlds("chatml", reward_fn="tests.gateway.scripted_reward:exact")
    payload = {
        "num_process": 1024,
        "num_epoch": 3,
        "remote_engine_url": world.url,
        "task_type": "math",
        "input_file": str(prompt_data),
        "num_repeat_per_sample": "2",
        "max_tokens": 64,
        "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9},
        "tokenizer_path": "/path/to/tokenizer",
        "skip_instance_ids": ["math_001", "math_001"],
    }
    consumer = Consumer(world.url)
    status, said = await consumer.post("/start_rollout", payload)
    assert (status, said) == (200, {"message": "Rollout started"})
    names: list[str] = []
    while len(names) < 8:  # three epochs of two instances, without two groups of the first
        items, _ = await get_rollout_data(world.url, 2)
        names += [i["instance_id"] for i in items]
        assert all(set(REQUIRED) <= set(i) for i in items)
    with pytest.raises(StarvedError, match="is finished"):
        await get_rollout_data(world.url)
    asked = {json.dumps(i["messages"][0]["content"]) for i in items}
    assert asked <= {'"Solve x^2 + 5x + 6 = 0"', '"Prove the theorem"'}
    # Another group of an instance that was served goes by a name of its own.
    assert sum(name == "math_002" for name in names) == 2
    assert {request["sampling_params"]["top_p"] for request in world.engine.requests} == {0.9}


async def test_start_rollout_sends_slimes_arguments_and_what_was_trained_before(
    args_of: Callable[..., Namespace], prompt_data: Path
):
    there = Scripted(answer())
    async with serving(there.app()) as url:
        args = args_of(
            url,
            rollout_num_process=1024,
            num_epoch=3,
            sglang_router_ip="sglang-router",
            sglang_router_port=3000,
            rollout_task_type="math",
            n_samples_per_prompt=8,
            rollout_max_response_len=8192,
            rollout_temperature=0.8,
            rollout_top_p=0.9,
        )
        metadata = {"0": ["id1"], "1": ["id2"]}
        said = await asyncio.to_thread(start_rollout, url, args, metadata)
    assert said == {"message": "Rollout started"}
    assert there.started == [
        {
            "num_process": "1024",
            "num_epoch": "3",
            "remote_engine_url": "http://sglang-router:3000",
            "remote_buffer_url": url,
            "task_type": "math",
            "input_file": str(prompt_data),
            "num_repeat_per_sample": "8",
            "max_tokens": "8192",
            "sampling_params": {"max_tokens": 8192, "temperature": 0.8, "top_p": 0.9},
            "tokenizer_path": str(QUICKSTART),
            "skip_instance_ids": ["id1", "id2"],
        }
    ]


def test_a_start_that_nobody_answers_is_tried_as_often_as_is_borne(
    args_of: Callable[..., Namespace],
) -> None:
    args = args_of("http://127.0.0.1:9", fetch_trajectory_retry_times=2)
    with pytest.raises(StarvedError, match="failed 3 times"):
        start_rollout("http://127.0.0.1:9", args, {})


# ── get_rollout_data ─────────────────────────────────────────────────────────────────────────────


async def test_get_rollout_data_asks_until_there_are_items_and_returns_them_with_meta_info():
    there = Scripted(answer(), answer(item("a", "id1"), finished_groups=["id1"], mine=7))
    async with serving(there.app()) as url:
        items, meta_info = await get_rollout_data(api_base_url=url)
        assert items == [item("a", "id1")]
        assert meta_info == {"finished_groups": ["id1"], "mine": 7}
        await get_rollout_data(url, num=4)
    assert there.bodies == [{}, {}, {"batch_size": 4}]
    expected = {"api_base_url": inspect.Parameter.empty, "num": None, "timeout": 100.0}
    signature = inspect.signature(get_rollout_data)
    assert {p.name: p.default for p in signature.parameters.values()} == expected


async def test_get_rollout_data_raises_what_the_document_says():
    with pytest.raises(aiohttp.ClientError):
        await get_rollout_data("http://127.0.0.1:9")
    lacking = item("a", "id1")
    del lacking["extra_info"]
    for wrong in ({"data": []}, answer(lacking)):
        async with serving(Scripted(wrong).app()) as url:
            with pytest.raises(ValueError, match="answered"):
                await get_rollout_data(url)
    failing = Scripted(JSONResponse({"detail": "no disk"}, status_code=500))
    async with serving(failing.app()) as url:
        with pytest.raises(aiohttp.ClientError, match="no disk"):
            await get_rollout_data(url)
    silent = asyncio.Event()
    async with serving(Scripted(silent).app()) as url:
        with pytest.raises(asyncio.TimeoutError):
            await get_rollout_data(url, timeout=0.05)
        silent.set()


# ── generate_agent_rollout ───────────────────────────────────────────────────────────────────────


async def test_a_rollout_starts_collects_logs_and_returns_samples(
    worlds: Callable[..., Any],  # noqa: F811
    args_of: Callable[..., Namespace],
    caplog: pytest.LogCaptureFixture,
):
    world = await worlds("chatml")
    args = args_of(world.url)
    data_buffer = RolloutDataSourceWithBuffer(args)
    rollout = asyncio.create_task(
        generate_agent_rollout(args, rollout_id=0, data_buffer=data_buffer, evaluation=False)
    )
    await write(world.url, 0, "math_001")
    await write(world.url, 1, "math_002")
    with caplog.at_level("INFO"):
        samples = await rollout
    assert isinstance(samples, list)
    assert all(type(sample) is Sample for sample in samples)
    assert [(s.index, s.prompt, s.reward) for s in samples] == [
        ("math_001", "0-0", 0.0),
        ("math_001", "0-1", 1.0),
        ("math_002", "1-0", 0.0),
        ("math_002", "1-1", 1.0),
    ]
    for sample in samples:
        step = world.stored(sample.metadata["trajectory_uid"])[0]
        assert sample.tokens == step.token_ids.tolist()
        assert sample.response_length == len(sample.loss_mask) == len(step.response_ids)
        assert sample.metadata["raw_reward"] == sample.reward
        assert sample.metadata["timestamp"] == "12.5"
    assert "'rollout/no_filter/total_samples': 4" in caplog.text
    assert "'rollout/no_filter/avg_reward': 0.5" in caplog.text
    assert data_buffer.get_metadata() == {"0": ["math_001", "math_002"]}
    with pytest.raises(ConfigError, match="evaluation"):
        await generate_agent_rollout(args, 1, data_buffer, evaluation=True)


async def test_what_a_resumed_run_trained_is_skipped_and_a_rollout_starts_once(
    args_of: Callable[..., Namespace],
):
    groups = [[item(f"{g}{i}", f"id{g}") for i in range(2)] for g in range(4)]
    there = Scripted(*(answer(*group, finished_groups=["gone"]) for group in groups))
    async with serving(there.app()) as url:
        args = args_of(url)
        first = RolloutDataSourceWithBuffer(args)
        await generate_agent_rollout(args, 0, first)
        await generate_agent_rollout(args, 1, first)
        resumed = RolloutDataSourceWithBuffer(args)
        resumed.update_metadata(first.get_metadata())
        await generate_agent_rollout(args, 2, resumed)
    assert first.get_metadata() == {
        "0": ["id0", "id1", "gone", "gone"],
        "1": ["id2", "id3", "gone", "gone"],
    }
    assert [s["skip_instance_ids"] for s in there.started] == [
        [],
        ["id0", "id1", "gone", "gone", "id2", "id3", "gone", "gone"],
    ]


async def test_failures_are_counted_over_a_rollout_and_minus_one_bears_any_number(
    args_of: Callable[..., Namespace], caplog: pytest.LogCaptureFixture
):
    def script() -> Scripted:
        fail = JSONResponse({}, status_code=503)
        one, two = ([item(f"{g}{i}", g) for i in range(2)] for g in "ab")
        return Scripted(fail, answer(*one), fail, fail, answer(*two))

    async with serving(script().app()) as url:
        args = args_of(url, fetch_trajectory_retry_times=2)
        with pytest.raises(StarvedError, match=r"failed 3 times in this rollout .* 503"):
            await generate_agent_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    caplog.clear()
    async with serving(script().app()) as url:
        args = args_of(url)
        del args.fetch_trajectory_retry_times  # its default is -1
        samples = await generate_agent_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    assert [s.index for s in samples] == ["a", "a", "b", "b"]
    (told,) = [r.message for r in caplog.records if " failed " in r.message]
    assert told.startswith(f"{url} failed 1 times in this rollout (the last: 503: {{}}); trying")
    assert told.endswith("--fetch-trajectory-retry-times is -1"), "and again after a minute"


async def test_items_of_messages_alone_are_tokenised_by_the_loss_mask_type(
    args_of: Callable[..., Namespace], tmp_path: Path
):
    custom = tmp_path / "my_masks.py"
    custom.write_text(
        "from stepwell.backends.masks import MultiTurnLossMaskGenerator\n\n"
        "class CustomTaskLossMaskGenerator(MultiTurnLossMaskGenerator):\n"
        "    def get_custom_multi_turn_loss_mask(self, messages):\n"
        "        ids, _ = self.gen_multi_turn_loss_mask_qwen(messages)\n"
        "        return ids, [0] * (len(ids) - 1) + [1]\n\n"
        "    def get_loss_mask(self, messages):\n"
        "        if self.tokenizer_type == 'custom_task':\n"
        "            return self.get_custom_multi_turn_loss_mask(messages)\n"
        "        return super().get_loss_mask(messages)\n"
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    expected = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen")
    for name, trained in (
        ("qwen", None),
        (f"{custom}:CustomTaskLossMaskGenerator(custom_task)", [1]),
    ):
        there = Scripted(answer(*(item(f"u{i}", "a") for i in range(2))))
        async with serving(there.app()) as url:
            args = args_of(url, rollout_batch_size=1, loss_mask_type=name)
            samples = await generate_agent_rollout(args, 0, RolloutDataSourceWithBuffer(args))
        for sample in samples:
            ids, mask = expected.get_loss_mask(item(sample.prompt, "a")["messages"])
            (length,) = expected.get_response_lengths([mask])
            assert sample.tokens == ids
            assert sample.loss_mask == (trained or mask[-length:])
            assert sample.response_length == len(sample.loss_mask)
    async with serving(Scripted(answer(item("u", "a"), item("v", "a"))).app()) as url:
        args = args_of(url, rollout_batch_size=1, loss_mask_type="custom_task")
        with pytest.raises(ConfigError, match="loss_mask_type is 'custom_task': is 'custom_task'"):
            await generate_agent_rollout(args, 0, RolloutDataSourceWithBuffer(args))


async def test_the_documents_own_consumer_makes_samples_of_our_items(
    worlds: Callable[..., Any],  # noqa: F811
):
    """The data processing phase, record by record, with its calls."""
    from transformers import AutoTokenizer

    world = await worlds("quickstart")
    await Consumer(world.url).start()
    await write(world.url, 0, "math_001")
    results, all_meta_info = [], []
    while len(results) < 2:
        data, meta_info = await get_rollout_data(api_base_url=world.url)
        results.extend(data)
        if meta_info:
            all_meta_info.append(meta_info)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    for record in results:
        mask_generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen")
        token_ids, loss_mask = mask_generator.get_loss_mask(record["messages"])
        response_length = mask_generator.get_response_lengths([loss_mask])[0]
        sample = SlimeSample(
            index=record["instance_id"],
            prompt=record["uid"],
            tokens=token_ids,
            response_length=response_length,
            reward=record["reward"],
            truncated=False,
            loss_mask=loss_mask[-response_length:],
            metadata={**record["extra_info"], "raw_reward": record["raw_reward"]},
        )
        step = world.stored(record["uid"])[0]
        assert sample.tokens[: step.n_tokens] == step.token_ids.tolist()
        assert sample.loss_mask == [1] * response_length
    assert all_meta_info[0]["total_samples"] == 2
    assert all_meta_info[0]["avg_reward"] == 0.5


# ── the data buffer's filter ─────────────────────────────────────────────────────────────────────


def custom_buffer_filter(
    args: Any, rollout_id: Any, buffer: list[list[Any]], num_samples: int
) -> list[list[Any]]:
    """slime's documented filter: the best groups; it takes none out."""
    return sorted(buffer, key=lambda group: group[0].reward, reverse=True)[:num_samples]


async def test_every_rollout_fetches_a_batch_of_new_items_whatever_the_filter_leaves(
    worlds: Callable[..., Any],  # noqa: F811
    args_of: Callable[..., Namespace],
):
    world = await worlds("chatml")
    args = args_of(world.url, buffer_filter_path=f"{__name__}.custom_buffer_filter")
    data_buffer = RolloutDataSourceWithBuffer(args)
    trained = []
    for rollout_id in range(3):
        rollout = asyncio.create_task(generate_agent_rollout(args, rollout_id, data_buffer))
        for n in (2 * rollout_id, 2 * rollout_id + 1):
            await write(world.url, n, f"id{n}", (n / 10, n / 10))
        async with asyncio.timeout(60):
            samples = await rollout
        trained.append([s.index for s in samples][::2])
        assert len(samples) == 4
        assert data_buffer.get_buffer_length() == 2 * (rollout_id + 1)
    assert trained == [["id1", "id0"], ["id3", "id2"], ["id5", "id4"]]
    delivered = world.gateway.statistics()["rollout_buffer"]
    assert delivered["delivered_groups"] == 6


async def test_the_default_filter_takes_the_latest_batch(args_of: Callable[..., Namespace]):
    groups = [[item(f"{g}{i}", f"id{g}") for i in range(2)] for g in range(2)]
    async with serving(Scripted(*(answer(*group) for group in groups)).app()) as url:
        args = args_of(url)
        data_buffer = RolloutDataSourceWithBuffer(args)
        old = [[Sample(tokens=[1, 2], response_length=1, reward=0.0) for _ in range(2)]]
        data_buffer.add_samples(old)
        samples = await generate_agent_rollout(args, 0, data_buffer)
    assert [s.index for s in samples] == ["id0", "id0", "id1", "id1"]
    assert samples.metrics["stepwell/buffered_groups"] == data_buffer.get_buffer_length() == 1


def first_alone(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    return [buffer.pop()]


async def test_a_filter_that_returns_too_few_groups_trains_no_prompt_that_nobody_rolled_out(
    args_of: Callable[..., Namespace],
):
    groups = [[item(f"{g}{i}", f"id{g}") for i in range(2)] for g in range(2)]
    async with serving(Scripted(*(answer(*group) for group in groups)).app()) as url:
        args = args_of(url, buffer_filter_path=f"{__name__}.first_alone")
        with pytest.raises(DataError, match=r"first_alone', which returned 1 of 2 groups"):
            await generate_agent_rollout(args, 0, RolloutDataSourceWithBuffer(args))


# ── rewards and logs ─────────────────────────────────────────────────────────────────────────────


NORMALISED = """
TASK_TYPE = "normalised"


def run_rollout(data):
    pass


def transform_group(group, task_type):
    instance_id, items = group
    mean = sum(item["reward"] for item in items) / len(items)
    for item in items:
        item["raw_reward"] = item["reward"]
        item["reward"] -= mean
    return instance_id, items
"""


async def test_rewards_that_the_buffer_normalises_are_not_normalised_again(
    worlds: Callable[..., Any],  # noqa: F811
    args_of: Callable[..., Namespace],
    tmp_path: Path,
):
    path = tmp_path / "normalised_generator.py"
    path.write_text(NORMALISED)
    world = await worlds("chatml", rollout_generators=(str(path),))
    # `--disable-rewards-normalization` stores this.
    args = args_of(
        world.url,
        rewards_normalization=False,
        rollout_task_type="normalised",
        rollout_batch_size=1,
    )
    await write(world.url, 0, "id0", (0.0, 1.0))
    samples = await generate_agent_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    raw, rewards = post_process_rewards(args, samples)
    assert raw == rewards == [-0.5, 0.5]
    assert [s.metadata["raw_reward"] for s in samples] == [0.0, 1.0]


LOGGED: list[Any] = []


def my_log_raw_info(args: Any, all_meta_info: list[dict[str, Any]], rollout_id: int) -> None:
    LOGGED.append((args.rollout_batch_size, [dict(m) for m in all_meta_info], rollout_id))


async def test_the_log_function_is_ones_own_if_it_is_named(args_of: Callable[..., Namespace]):
    there = Scripted(answer(*(item(f"u{i}", "a") for i in range(2)), mine=7))
    async with serving(there.app()) as url:
        args = args_of(
            url, rollout_batch_size=1, stepwell_log_raw_info=f"{__name__}:my_log_raw_info"
        )
        await generate_agent_rollout(args, 5, RolloutDataSourceWithBuffer(args))
        assert LOGGED == [(1, [{"mine": 7}], 5)]
        args.stepwell_log_raw_info = f"{__name__}:nothing"
        with pytest.raises(ConfigError, match=r"stepwell_log_raw_info is .*nothing', which cannot"):
            await generate_agent_rollout(args, 6, RolloutDataSourceWithBuffer(args))
    assert len(there.started) == 1


@pytest.mark.parametrize(("by_train_step", "step"), [(False, 7), (True, 14)])
def test_raw_info_goes_to_wandb_under_the_prefix_of_rollouts(
    args_of: Callable[..., Namespace],
    monkeypatch: pytest.MonkeyPatch,
    by_train_step: bool,
    step: int,
) -> None:
    import wandb

    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "log", sent.append)
    args = args_of(
        "http://x",
        use_wandb=True,
        use_tensorboard=False,
        wandb_always_use_train_step=by_train_step,
        global_batch_size=2,
    )
    infos = [{"total_samples": 75, "avg_reward": 1.0}, {"total_samples": 25, "avg_reward": 0.0}]
    assert log_raw_info(args, [*infos, {"finished_groups": []}], 7) is None  # type: ignore[func-returns-value]
    assert sent == [
        {
            "rollout/no_filter/total_samples": 100,
            "rollout/no_filter/avg_reward": 0.75,
            "rollout/step": step,
        }
    ]
    log_raw_info(args, [], 8)
    assert len(sent) == 1

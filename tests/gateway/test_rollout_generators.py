"""`/start_rollout` runs generators: the built-in client loop, and modules of the form that slime
documents (THUDM/slime, slime_plugins/rollout_buffer/README.md), in processes of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stepwell.backends import processes
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.errors import GatewayConfigError, RequestError
from stepwell.gateway.slime_buffer.generators import Generator, GeneratorError
from tests.builders import until
from tests.gateway.test_rollout_buffer import Consumer, pool_groups, rollout, rollouts, statistics
from tests.helpers import PanicError

ECHO = '''
import json, urllib.request

TASK_TYPE = "echo"

def run_rollout(data):
    """As slime's: reads its file, writes an item per repeat to the buffer that it was told."""
    for instance, line in enumerate(open(data["input_file"])):
        if instance in (data["skip_instance_ids"] or []):
            continue
        question = json.loads(line)["prompt"]
        for i in range(int(data["num_repeat_per_sample"])):
            messages = [{"role": "user", "content": question},
                        {"role": "assistant", "content": question}]
            item = {"uid": f"{question}-{i}", "instance_id": instance, "messages": messages,
                    "reward": float(i), "extra_info": {"task": data["task_type"]}}
            request = urllib.request.Request(
                data["remote_buffer_url"] + "/buffer/write", json.dumps(item).encode(),
                {"content-type": "application/json"})
            urllib.request.urlopen(request).read()

def is_valid_group(group, min_valid_group_size, task_type):
    instance_id, items = group
    return all(i["messages"][-1]["content"].strip() != "bad" for i in items)

def transform_group(group, task_type):
    instance_id, items = group
    mean = sum(i["reward"] for i in items) / len(items)
    for i in items:
        i["raw_reward"], i["reward"] = i["reward"], i["reward"] - mean
    return instance_id, items

def get_group_data_meta_info(groups):
    return {"total_samples": sum(map(len, groups.values())), "avg_reward": 0.5, "tasks": ["echo"]}
'''

REWARD = "tests.gateway.scripted_reward:exact"
KEY = "a-key-of-32-characters-or-there"

SLEEPER = """
import multiprocessing, os, pathlib, time

TASK_TYPE = "sleeper"

def sleep(folder):
    (pathlib.Path(folder) / f"pid-{os.getpid()}").touch()
    time.sleep(600)

def run_rollout(data):
    child = multiprocessing.Process(target=sleep, args=(data["folder"],))
    child.start()
    sleep(data["folder"])
"""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"say {word}", "label": "fine"} for word in ("one", "bad", "three")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def ended(world: Any) -> str:
    """Wait until the rollout ends and return what became of it."""
    await until(lambda: statistics(world)["generator"] != "running", 60)
    return str(statistics(world)["generator"])


async def served(consumer: Consumer, n: int) -> list[dict[str, Any]]:
    """Items, until there are `n`."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while len(found) < n:
            found += await consumer.items()
            await asyncio.sleep(0.1)
    assert len(found) == n
    return found


# -- the built-in loop ----------------------------------------------------------------------------


async def test_the_client_loop_rolls_out_a_file_through_the_gateway_token_for_token(
    worlds: Callable[..., Any], prompts: str
):
    world = await worlds("chatml", reward_fn=REWARD, admin_keys=(KEY,))
    consumer = Consumer(world.url, key=KEY)
    answer = await consumer.start(
        task_type="math",
        input_file=prompts,
        remote_engine_url=f"{world.engine.url}/v1",
        num_epoch="2",
        num_process="3",
        skip_instance_ids=[1, 1],
    )
    assert answer == {"message": "Rollout started"}
    items = await served(consumer, 8)
    assert await ended(world) == "finished"
    assert sorted({i["instance_id"] for i in items if isinstance(i["instance_id"], int)}) == [0, 2]
    for item in items:
        assert item["reward"] == item["raw_reward"] == 1.0
        assert item["rollout_log_probs"] is not None
        assert item["extra_info"]["label"] == "fine"
        assert item["extra_info"]["finish_reason"] == "stop"
        assert item["extra_info"]["temperature"] == 0.8
        assert item["messages"][0]["content"] == item["extra_info"]["prompt"]
        assert item["messages"][-1] == {"role": "assistant", "content": "fine"}
    world.check_exact()
    assert {r["sampling_params"]["temperature"] for r in world.engine.requests} == {0.8}
    answer = await consumer.poll()
    assert answer["success"] is False
    assert answer["message"] == "No data available to read; the rollout is finished"


async def test_empty_lines_of_a_file_are_no_prompts(worlds: Callable[..., Any], tmp_path: Path):
    """The data source reads the same file, and does so; some editors begin it with a mark."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '\ufeff{"prompt": "é", "label": "fine"}\n\n{"prompt": "say", "label": "fine"}\n \n'
    )
    world = await worlds("chatml", reward_fn=REWARD)
    consumer = Consumer(world.url)
    await consumer.start(
        task_type="chat", input_file=str(path), remote_engine_url=None, num_epoch=1
    )
    items = await served(consumer, 4)
    assert {i["instance_id"] for i in items} == {0, 2}
    assert await ended(world) == "finished"


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
async def test_a_thought_is_scored_with_its_answer(
    worlds: Callable[..., Any], tmp_path: Path, family: str
):
    """DeepScaleR's rule, slime's for its Agent Rollout: the box behind `</think>` counts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2 + 2?", "label": "4"}\n')
    world = await worlds(family, reward_fn="stepwell.trainer.rewards.maths:deepscaler")
    begin = "" if family == "deepseek" else "<think>\n"
    for answer in ("4", "5"):
        world.say(f"{begin}Is it \\boxed{{4}}?\n</think>\n\nIt is \\boxed{{{answer}}}.")
    consumer = Consumer(world.url)
    await consumer.start(
        task_type="math", input_file=str(path), remote_engine_url=None, num_epoch=1
    )
    items = await served(consumer, 2)
    assert sorted(item["reward"] for item in items) == [0.0, 1.0]


async def test_calls_for_another_engine_come_back_as_messages(
    worlds: Callable[..., Any], prompts: str
):
    other = await worlds("chatml")
    world = await worlds("chatml", reward_fn=REWARD)
    consumer = Consumer(world.url)
    await consumer.start(
        task_type="chat", input_file=prompts, remote_engine_url=other.url, num_epoch=1
    )
    items = await served(consumer, 6)
    assert await ended(world) == "finished"
    assert {i["instance_id"] for i in items} == {0, 1, 2}
    assert all(i["rollout_log_probs"] is None and i["reward"] == 1.0 for i in items)
    response = items[0]["tokens"][-items[0]["response_length"] :]
    assert response == world.ids("fine")
    assert world.engine.requests == []
    assert len(other.engine.requests) == 6


@pytest.mark.slow
async def test_rollouts_that_fail_are_told_and_leave_no_open_trajectory(
    worlds: Callable[..., Any], prompts: str
):
    world = await worlds("chatml", reward_fn="statistics:mean")  # takes none of the fields
    consumer = Consumer(world.url)
    await consumer.start(task_type="chat", input_file=prompts, remote_engine_url=None, num_epoch=1)
    state = await ended(world)
    assert state.startswith(
        "failed (RolloutError: 6 of 6 rollouts failed; the last: RequestError: "
    )
    status, answer = await consumer.post("/get_rollout_data", {})
    assert status == 500
    assert "6 of 6 rollouts failed" in answer["error"]["message"]
    groups = await pool_groups(world)
    assert groups["open"] == groups["ready"] == 0
    # Whoever starts it anew is served again.
    await consumer.start()
    assert (await consumer.poll())["success"] is False


async def test_groups_that_cannot_be_opened_are_told(worlds: Callable[..., Any], prompts: str):
    other = await worlds("chatml", admin_keys=[KEY])  # refuses who has no key of it
    world = await worlds("chatml", reward_fn=REWARD, public_url=other.url)
    consumer = Consumer(world.url)
    await consumer.start(task_type="chat", input_file=prompts, remote_engine_url=None, num_epoch=1)
    state = await ended(world)
    assert state.startswith("failed (RolloutError: 6 of 6 rollouts failed; the last: RolloutError")
    assert "answered 401" in state


async def test_a_group_that_is_asked_for_again_has_the_same_name(
    worlds: Callable[..., Any], prompts: str
):
    names: list[str] = []

    async def busy(request: web.Request) -> web.Response:
        names.append((await request.json())["prompt_uid"])
        return web.Response(status=503 if len(names) == 1 else 400)

    app = web.Application()
    app.router.add_post("/v1/groups", busy)
    async with TestServer(app) as other:
        world = await worlds("chatml", reward_fn=REWARD, public_url=str(other.make_url("")))
        consumer = Consumer(world.url)
        await consumer.start(
            task_type="chat", input_file=prompts, remote_engine_url=None, num_epoch=1
        )
        assert (await ended(world)).startswith("failed")
    assert len(names) == 4
    assert len(set(names)) == 3


async def test_a_process_that_cannot_be_started_does_not_count_as_running(
    worlds: Callable[..., Any], prompts: str, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more processes")

    world = await worlds("chatml", reward_fn=REWARD)
    payload = {"task_type": "chat", "input_file": prompts, "num_repeat_per_sample": "2"}
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", refuse)
        status, _ = await Consumer(world.url).post("/start_rollout", payload)
        assert status == 500
    assert statistics(world)["generator"] != "running"


@pytest.mark.parametrize(
    ("change", "options", "problem"),
    [
        ({}, {"reward_fn": None}, "gateway.reward_fn is null"),
        (
            {"input_file": "/no/such.jsonl"},
            {},
            "input_file is '/no/such.jsonl', which cannot be read",
        ),
        ({"input_file": "deep.jsonl"}, {}, "deep.jsonl', which cannot be read"),
        ({"input_file": None}, {}, "input_file is missing"),
        ({"num_process": "many"}, {}, "num_process is 'many'"),
        ({"task_type": "poems"}, {}, "there is no rollout generator, and nothing was started"),
    ],
)
async def test_a_rollout_that_cannot_start_is_refused_and_nothing_runs(
    worlds: Callable[..., Any],
    prompts: str,
    change: dict[str, Any],
    options: dict[str, Any],
    problem: str,
):
    world = await worlds("chatml", **{"reward_fn": REWARD, **options})
    if change.get("input_file") == "deep.jsonl":
        deep = Path(prompts).with_name("deep.jsonl")
        deep.write_text("[" * 100_000)
        change = {"input_file": str(deep)}
    payload = {"task_type": "math", "input_file": prompts, "num_repeat_per_sample": "2", **change}
    status, answer = await Consumer(world.url).post("/start_rollout", payload)
    assert status == 400
    assert problem in answer["error"]["message"]
    assert statistics(world)["generator"] == "none"
    assert statistics(world)["num_repeat_per_sample"] is None


# -- modules of one's own -------------------------------------------------------------------------


@pytest.fixture
async def echo(worlds: Callable[..., Any], tmp_path: Path) -> Any:
    path = tmp_path / "echo_generator.py"
    path.write_text(ECHO)
    return await worlds("chatml", rollout_generators=(str(path),))


async def test_a_generator_module_of_slimes_form_runs_and_its_functions_are_used(
    echo: Any, prompts: str, tmp_path: Path
):
    consumer = Consumer(echo.url)
    await consumer.start(task_type="echo", input_file=prompts)
    assert await ended(echo) == "finished"
    (answer,) = [await consumer.poll()]
    items, meta = answer["data"]["data"], answer["data"]["meta_info"]
    # "bad" is refused by is_valid_group; "say bad" is not.
    assert [(i["instance_id"], i["reward"], i["raw_reward"]) for i in items[:2]] == [
        (0, -0.5, 0.0),
        (0, 0.5, 1.0),
    ]
    assert len(items) == 6
    assert meta["total_samples"] == 6
    assert meta["tasks"] == ["echo"]
    assert meta["finished_groups"] == [0, 1, 2]

    (tmp_path / "bad.jsonl").write_text('{"prompt": "bad"}\n')
    await consumer.start(
        task_type=str(tmp_path / "echo_generator.py"), input_file=str(tmp_path / "bad.jsonl")
    )
    assert await ended(echo) == "finished"
    assert (await consumer.poll())["success"] is False
    assert (await pool_groups(echo))["drop_reasons"] == {"is_valid_group": 1}


async def test_items_that_a_generator_makes_anew_keep_the_reward_before_it(
    worlds: Callable[..., Any], prompts: str, tmp_path: Path
):
    path = tmp_path / "anew_generator.py"
    anew = """
def transform_group(group, task_type):
    kept = ("uid", "instance_id", "messages", "extra_info")
    return group[0], [{**{k: i[k] for k in kept}, "reward": i["reward"] - 0.5} for i in group[1]]
"""
    path.write_text(ECHO + anew)
    world = await worlds("chatml", rollout_generators=(str(path),))
    consumer = Consumer(world.url)
    await consumer.start(task_type=str(path), input_file=prompts)
    assert await ended(world) == "finished"
    items = (await consumer.poll())["data"]["data"]
    assert items
    assert all(item["raw_reward"] == item["reward"] + 0.5 for item in items)


FINISHED = """
TASK_TYPE = "finished"


def run_rollout(data):
    pass


def is_valid_group(group, min_valid_group_size, task_type):
    instance_id, items = group
    is_finished = len(items) >= min_valid_group_size
    return is_finished and len({item["reward"] for item in items}) > 1, is_finished
"""


async def test_a_group_that_a_generator_calls_finished_and_not_valid_is_dropped(
    worlds: Callable[..., Any], tmp_path: Path
):
    """The form of slime's Rollout Buffer when Agent Rollout was documented."""
    path = tmp_path / "finished_generator.py"
    path.write_text(FINISHED)
    world = await worlds("chatml", rollout_generators=(str(path),))
    consumer = Consumer(world.url)
    await consumer.start(task_type="finished")
    await rollouts(world, "same")
    await rollout(world, "differ", "d0", 0.0)
    await rollout(world, "differ", "d1", 1.0)
    assert [i["instance_id"] for i in await consumer.items()] == ["differ", "differ"]
    assert statistics(world)["dropped_groups"] == {"is_valid_group": 1}


async def test_after_a_restart_a_generator_judges_what_there_is_and_its_end_is_told(
    worlds: Callable[..., Any], tmp_path: Path
):
    path = tmp_path / "finished_generator.py"
    path.write_text(FINISHED)
    options: Any = {"rollout_generators": (str(path),), "run_dir": tmp_path}
    world = await worlds(**options)
    await Consumer(world.url).start(task_type="finished")
    await rollouts(world, "same")
    for reward in (0.0, 1.0):
        await rollout(world, "differ", f"d{reward}", reward)
    world = await worlds(pool=world.pool, **options)
    consumer = Consumer(world.url)
    assert [i["instance_id"] for i in await consumer.items()] == ["differ", "differ"]
    assert statistics(world)["dropped_groups"] == {"is_valid_group": 1}
    status, answer = await consumer.post("/get_rollout_data", {})
    assert status == 500
    assert "POST /start_rollout" in answer["error"]["message"]


async def test_a_function_of_a_generator_that_fails_is_told_and_no_group_is_lost(
    worlds: Callable[..., Any], tmp_path: Path
):
    path = tmp_path / "broken_generator.py"
    path.write_text(
        "TASK_TYPE = 'broken'\ndef run_rollout(data): raise KeyError('no dataset')\n"
        "def is_valid_group(group, size, task_type): raise OSError('disk')\n"
    )
    world = await worlds("chatml", rollout_generators=(str(path),))
    consumer = Consumer(world.url)
    await consumer.start(task_type="broken")
    assert await ended(world) == "failed (KeyError: 'no dataset')"
    await rollouts(world, "p")
    status, answer = await consumer.post("/get_rollout_data", {})
    assert status == 500
    assert "is_valid_group of the rollout generator" in answer["error"]["message"]
    await consumer.start()
    assert [i["uid"] for i in await consumer.items()] == ["p-0", "p-1"]


@pytest.mark.parametrize("error", [SystemExit("bad"), PanicError("bad")])
def test_what_a_generator_raises_ends_nobody_else(error: BaseException) -> None:
    def fails(*given: Any) -> None:
        raise error

    generator = Generator("mine.py", fails, is_valid_group=fails, check_rollout=fails)
    with pytest.raises(RequestError, match="nothing was started: bad"):
        generator.check({})
    with pytest.raises(GeneratorError, match=r"is_valid_group .* failed \(\w+: bad\)"):
        generator.call("is_valid_group", [], 1, "mine")


def alive(folder: Path) -> list[int]:
    pids = [int(p.name.removeprefix("pid-")) for p in folder.glob("pid-*")]
    return [pid for pid in pids if psutil.pid_exists(pid) and _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def all_end(folder: Path) -> None:
    """A signal is sent before its process is gone."""
    await until(lambda: not alive(folder), 10)


async def test_a_rollout_and_all_its_processes_end_with_another_start_or_the_gateway(
    worlds: Callable[..., Any], tmp_path: Path
):
    path = tmp_path / "sleeper_generator.py"
    path.write_text(SLEEPER)
    world = await worlds("chatml", rollout_generators=(str(path),))
    consumer = Consumer(world.url)

    async def start(thinking: object = 1) -> list[int]:
        await consumer.start(task_type="sleeper", folder=str(tmp_path), thinking=thinking)
        await until(lambda: len(alive(tmp_path)) >= 2)
        return alive(tmp_path)

    pids = await start()
    assert await start() == pids  # the same payload: its answer was lost
    before, pids = pids, await start(thinking=True)
    assert not set(before) & set(pids)
    assert (await consumer.poll())["data"]["meta_info"] == {"generator": "running"}
    await consumer.start()
    assert statistics(world)["generator"] == "stopped"
    await all_end(tmp_path)
    assert not set(await start()) & set(pids)
    child = world.gateway.rollout_buffer._process._child
    assert child.pid in processes._guard._groups, "a gateway that is killed takes it along"
    await world.gateway.rollout_buffer.close()
    await all_end(tmp_path)


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (("no.such.module",), "No module named 'no'"),
        ((__name__,), "it has no TASK_TYPE"),
        (("{echo}", "{echo}"), "whose TASK_TYPE 'echo' is that of"),
        (("{former}",), "it has filter_item, which slime called until July 2025 and calls no more"),
    ],
)
def test_a_generator_that_cannot_be_loaded_fails_before_serving(
    tokenizer_of: Callable[..., Any], tmp_path: Path, paths: tuple[str, ...], problem: str
):
    echo = tmp_path / "echo_generator.py"
    echo.write_text(ECHO)
    former = tmp_path / "former_generator.py"
    former.write_text(f"{FINISHED}\ndef filter_item(item, task_type): return True\n")
    given = tuple(p.format(echo=echo, former=former) for p in paths)
    config = GatewayConfig(rollout_generators=given)
    with pytest.raises(GatewayConfigError, match=r"gateway\.rollout_generators holds") as e:
        create_app(config, Wiring(), None, tokenizer_of("chatml"))  # type: ignore[arg-type]
    assert problem in str(e.value)

"""The managers: what goes into one call, where it runs, how often, and what is missing after."""

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stepwell.config.load import load_config
from stepwell.trainer.config import OverlongBufferConfig, RewardConfig
from stepwell.trainer.errors import (
    ConfigError,
    RewardCrashError,
    RewardLoadError,
    RewardTimeoutError,
    RewardValueError,
)
from stepwell.trainer.rewards.base import RewardResult, RewardSample
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.rewards.overlong import overlong_penalty
from tests.helpers import gone

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info, **kwargs)"
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file and names its function `score`."""

    def write(code: str) -> str:
        path = tmp_path / f"reward_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return f"{path}:score"

    return write


@asynccontextmanager
async def managing(**config: Any) -> AsyncIterator[Any]:
    manager = RewardManager(RewardConfig(**config))
    try:
        yield manager
    finally:
        await manager.aclose()


async def outcomes(samples: Sequence[RewardSample], **config: Any) -> list[Any]:
    async with managing(**config) as manager:
        scored: list[Any] = await manager.score(samples)
        return scored


def sample(
    answer: str = "4", truth: Any = "4", source: str = "any", group: str = "g"
) -> RewardSample:
    return RewardSample(source, answer, truth, {"id": answer}, group)


def scores(results: Sequence[Any]) -> list[float | type]:
    return [r.score if isinstance(r, RewardResult) else type(r) for r in results]


# ── which function, which call ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("manager", ["naive", "auto", "parallel"])
async def test_each_sample_is_scored_by_its_own_call(write: Write, manager: str) -> None:
    function = write(
        f"def score{SIGNATURE}:\n"
        "    return {'score': len(solution_str), 'source': data_source, 'truth': ground_truth,\n"
        "            'id': extra_info['id'], **kwargs}\n"
    )
    samples = [sample("a" * n, n, f"s{n}") for n in range(5)]
    results = await outcomes(samples, function=function, manager=manager, kwargs={"level": 2})
    assert results == [
        RewardResult(float(n), {"source": f"s{n}", "truth": n, "id": "a" * n, "level": 2})
        for n in range(5)
    ]


@pytest.mark.parametrize("manager", ["naive", "auto", "parallel", "batch"])
async def test_a_function_may_run_a_loop_of_its_own(write: Write, manager: str) -> None:
    """verl's documented `async_code_execution_reward` runs a loop of its own."""
    one = "lambda answer: asyncio.sleep(0, float(len(answer)))"
    if manager == "batch":
        arguments, result = (
            "(data_sources, solution_strs, ground_truths, extra_infos)",
            ("[loop.run_until_complete(one(answer)) for answer in solution_strs]"),
        )
    else:
        arguments, result = SIGNATURE, "loop.run_until_complete(one(solution_str))"
    function = write(
        f"import asyncio\none = {one}\ndef score{arguments}:\n"
        f"    loop = asyncio.get_event_loop()\n    return {result}\n"
    )
    found = await outcomes([sample("a"), sample("ab")], function=function, manager=manager)
    assert scores(found) == [1.0, 2.0]


async def test_the_function_is_chosen_by_the_data_source(write: Write) -> None:
    half = write(f"def score{SIGNATURE}: return kwargs.get('value', 0.5)\n")
    results = await outcomes(
        [sample(source="math"), sample(source="mine"), sample(source="other")],
        function="exact_match",
        by_data_source={"math": half, "mine": {"function": half, "kwargs": {"value": 0.25}}},
    )
    assert scores(results) == [0.5, 0.25, 1.0]


async def test_a_data_source_without_a_function_is_missing_and_the_others_are_scored() -> None:
    results = await outcomes(
        [sample(source="known"), sample(source="new")], by_data_source={"known": "exact_match"}
    )
    assert scores(results) == [1.0, RewardValueError]
    assert "'new': name its function in rollout.reward.by_data_source" in str(results[1])


async def test_batch_gives_the_function_the_lists_of_all(write: Write) -> None:
    function = write(
        f"def score{SIGNATURE}:\n"
        "    n = len(solution_str)\n"
        "    assert len(data_source) == len(ground_truth) == len(extra_info) == n\n"
        "    return [{'score': int(s), 'n': n} for s in solution_str]\n"
    )
    whole = await outcomes([sample(str(n)) for n in range(5)], function=function, manager="batch")
    assert whole == [RewardResult(float(n), {"n": 5}) for n in range(5)]


async def test_batch_asks_again_only_for_what_is_missing() -> None:
    results = await outcomes(
        [sample("1"), sample("none"), sample("2")],
        function=f"{__file__}:half_missing",
        manager="batch",
    )
    assert scores(results) == [3.0, 1.0, 3.0]  # the number of answers in the call that scored


def half_missing(
    sources: list[str], answers: list[str], truths: list[Any], infos: list[Any]
) -> list[float | None]:
    return [None if a == "none" and len(answers) > 1 else float(len(answers)) for a in answers]


async def test_a_batch_function_that_returns_too_few_scores_is_missing_for_all(
    write: Write,
) -> None:
    function = write(f"def score{SIGNATURE}: return [1.0]\n")
    results = await outcomes([sample(), sample()], function=function, manager="batch")
    assert scores(results) == [RewardValueError, RewardValueError]
    assert "return a list of 2 scores" in str(results[0])


async def test_a_group_function_sees_its_whole_group_and_no_other(write: Write) -> None:
    function = write(
        f"def score{SIGNATURE}:\n"
        "    longest = max(map(len, solution_str))\n"
        "    return [float(len(s) == longest) for s in solution_str]\n"
    )
    answers = [("a", "x"), ("bb", "y"), ("bb", "x"), ("a", "y"), ("a", "z")]
    samples = [sample(a, group=g) for a, g in answers]
    results = await outcomes(samples, function=function, manager="group")
    assert scores(results) == [0.0, 1.0, 1.0, 0.0, 1.0]


async def test_a_group_is_asked_again_as_a_whole(write: Write) -> None:
    function = write(
        "calls = []\n"
        f"def score{SIGNATURE}:\n"
        "    calls.append(len(solution_str))\n"
        "    return [1.0, None] if len(calls) == 1 else [float(sum(calls))] * 2\n"
    )
    results = await outcomes([sample(), sample()], function=function, manager="group")
    assert scores(results) == [4.0, 4.0]


# ── what is missing ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("manager", ["naive", "parallel", "batch", "group"])
async def test_a_reward_that_raises_is_called_again_and_then_missing(
    write: Write, tmp_path: Path, manager: str
) -> None:
    calls = tmp_path / "calls"
    function = write(
        f"def score{SIGNATURE}:\n"
        f"    print(file=open({str(calls)!r}, 'a'))\n"
        "    raise ValueError('the disc is full')\n"
    )
    results = await outcomes([sample()], function=function, manager=manager, max_attempts=3)
    assert scores(results) == [RewardCrashError]
    place = rf"raised ValueError at {re.escape(str(tmp_path))}/.*\.py:3: the disc is full"
    assert re.search(place, str(results[0]))
    assert len(calls.read_text()) == 3


@pytest.mark.parametrize("manager", ["naive", "parallel", "batch"])
async def test_a_failure_that_cannot_say_what_it_is_is_a_missing_score(
    write: Write, manager: str
) -> None:
    function = write(
        "class NoText(Exception):\n"
        "    def __str__(self): return self.message\n"
        f"def score{SIGNATURE}:\n"
        "    raise NoText\n"
    )
    (result,) = await outcomes([sample()], function=function, manager=manager, max_attempts=1)
    assert isinstance(result, RewardCrashError)
    assert re.search(r"raised NoText at .*\.py:4$", str(result))


@pytest.mark.parametrize("manager", ["naive", "parallel", "batch"])
async def test_a_number_that_is_too_long_to_show_is_a_missing_score(
    write: Write, manager: str
) -> None:
    """Python writes no integer of more than 4300 digits."""
    returned = "[10**5000]" if manager == "batch" else "10**5000"
    function = write(f"def score{SIGNATURE}: return {returned}\n")
    (result,) = await outcomes([sample()], function=function, manager=manager, max_attempts=1)
    assert isinstance(result, RewardValueError)
    assert "returned a value of type int; return a number within" in str(result)


@pytest.mark.parametrize("manager", ["naive", "parallel"])
async def test_a_failure_that_passes_costs_nothing(write: Write, manager: str) -> None:
    function = write(
        "calls = []\n"
        f"def score{SIGNATURE}:\n"
        "    calls.append(1)\n"
        "    return None if len(calls) < 3 else 1.0\n"
    )
    results = await outcomes([sample()], function=function, manager=manager, max_attempts=3)
    assert scores(results) == [1.0]


async def test_one_failure_does_not_touch_the_others(write: Write) -> None:
    function = write(f"def score{SIGNATURE}: return 1 / int(solution_str)\n")
    results = await outcomes([sample("1"), sample("0"), sample("2")], function=function)
    assert scores(results) == [1.0, RewardCrashError, 0.5]


async def test_no_more_calls_run_at_once_than_allowed() -> None:
    running: list[int] = []

    async with managing(function="exact_match", concurrency=2, manager="naive") as manager:

        async def counted(*args: Any) -> float:
            running.append(1)
            most = len(running)
            await asyncio.sleep(0.001)
            running.pop()
            return float(most)

        manager._default._reward = counted
        results = await manager.score([sample() for _ in range(8)])
    assert max(scores(results)) == 2.0


async def test_a_thread_that_hangs_is_left_behind_and_the_score_is_missing() -> None:
    released = threading.Event()

    def hangs(*args: Any) -> float:
        released.wait(60)
        return 1.0

    async with managing(function="exact_match", timeout_s=0.05, max_attempts=1) as manager:
        manager._default._reward = hangs
        results = await manager.score([sample()])
    released.set()
    assert scores(results) == [RewardTimeoutError]


# ── processes ────────────────────────────────────────────────────────────────────────────────────

HANGS_FOR_TWO = (
    "import os, pathlib, subprocess, sys, time\n"
    f"def score{SIGNATURE}:\n"
    "    pids = pathlib.Path(extra_info['dir'])\n"
    "    if solution_str == 'hang':\n"
    "        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "        (pids / 'pids').write_text(f'{os.getpid()} {child.pid}')\n"
    "        time.sleep(600)\n"
    "    return 1.0\n"
)


async def written(path: Path) -> None:
    for _ in range(6000):
        if path.exists() and path.read_text():  # noqa: ASYNC240 - a test may block
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} was never written")


async def test_a_process_that_hangs_is_killed_with_all_that_it_started(
    write: Write, tmp_path: Path
) -> None:
    info = {"dir": str(tmp_path)}
    samples = [RewardSample("any", a, None, info) for a in ("fine", "hang", "fine")]
    results = await outcomes(
        samples,
        function=write(HANGS_FOR_TWO),
        manager="parallel",
        timeout_s=5.0,
        max_attempts=1,
    )
    assert scores(results) == [1.0, RewardTimeoutError, 1.0]
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert await gone(pid)


async def test_a_call_that_is_cancelled_ends_its_process(write: Write, tmp_path: Path) -> None:
    info = {"dir": str(tmp_path)}
    async with managing(function=write(HANGS_FOR_TWO), manager="parallel") as manager:
        scoring = asyncio.create_task(manager.score([RewardSample("any", "hang", None, info)]))
        await written(tmp_path / "pids")
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            assert await gone(pid)
        assert scores(await manager.score([RewardSample("any", "fine", None, info)])) == [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("death", ["os._exit(3)", "sys.exit()", "os.kill(os.getpid(), 9)"])
async def test_a_process_that_dies_is_a_missing_score_and_is_replaced(
    write: Write, death: str
) -> None:
    function = write(
        f"import os, sys\ndef score{SIGNATURE}:\n    {death} if solution_str == 'die' else 0\n"
        "    return float(os.getpid())\n"
    )
    results = await outcomes([sample("die"), sample("live")], function=function, manager="parallel")
    assert scores(results[:1]) == [RewardCrashError]
    assert "its process died" in str(results[0])
    assert results[1].score != os.getpid()


async def test_what_a_function_prints_or_cannot_pickle_breaks_no_call(write: Write) -> None:
    function = write(
        f"def score{SIGNATURE}:\n"
        "    print('debug', flush=True)\n"
        "    return {'score': 1.0, 'open': open(__file__)} if solution_str == 'file' else 1.0\n"
    )
    results = await outcomes([sample("file"), sample("4")], function=function, manager="parallel")
    assert scores(results) == [RewardCrashError, 1.0]


async def test_what_cannot_be_sent_to_a_process_is_a_missing_score(write: Write) -> None:
    function = write(f"def score{SIGNATURE}: return 1.0\n")
    with open(__file__) as unpicklable:  # noqa: ASYNC230 - never read
        results = await outcomes(
            [sample(truth=unpicklable), sample()], function=function, manager="parallel"
        )
    assert scores(results) == [RewardCrashError, 1.0]


async def test_an_async_function_and_a_class_run_in_a_process_too(write: Write) -> None:
    function = write(
        "import asyncio\n"
        "class score:\n"
        "    def __init__(self, value): self.value = value\n"
        "    async def __call__(self, *args):\n"
        "        await asyncio.sleep(0)\n"
        "        return self.value\n"
    )
    results = await outcomes(
        [sample(), sample()], function=function, manager="parallel", kwargs={"value": 0.5}
    )
    assert scores(results) == [0.5, 0.5]


async def test_the_process_ends_with_its_owner_however_that_dies(
    write: Write, tmp_path: Path
) -> None:
    """The worker is in the middle of a call, and the owner is killed."""
    import subprocess
    import sys

    function = write(HANGS_FOR_TWO)
    code = (
        "from stepwell.trainer.rewards.worker import RewardProcess\n"
        f"RewardProcess({function!r}, {{}}).score(600, 'it', 'any', 'hang', None, "
        f"{{'dir': {str(tmp_path)!r}}})\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220
    await written(tmp_path / "pids")
    owner.kill()
    owner.wait()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert await gone(pid)


async def test_built_ins_that_compute_run_in_processes_by_themselves() -> None:
    async with managing(function="math", by_data_source={"words": "f1"}) as m:
        results = await m.score([sample(r"\boxed{8/2}"), sample("red", "red fox", "words")])
        busy = [p.pid for p in m._default._all if p.pid is not None]
        assert len(busy) == 1
        assert not hasattr(m._by_source["words"], "_all")
    assert scores(results) == [1.0, pytest.approx(2 / 3)]
    assert await gone(busy[0])


# ── DAPO's over-long penalty ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (500, -1.0)]
)
def test_the_overlong_penalty_grows_over_the_last_tokens(length: int, penalty: float) -> None:
    assert overlong_penalty(length, OverlongBufferConfig(max_resp_len=100, len=40)) == penalty


@given(st.integers(0, 300), st.integers(1, 200), st.floats(0, 10))
def test_the_overlong_penalty_is_monotone_and_bounded(a: int, cache: int, factor: float) -> None:
    config = OverlongBufferConfig(max_resp_len=200, len=cache, penalty_factor=factor)
    assert -factor <= overlong_penalty(a + 1, config) <= overlong_penalty(a, config) <= 0


# ── the section ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kwargs": {"level": 1}}, "kwargs level are for function, which is missing"),
        ({"manager": "rate_limited"}, "use auto, and set concurrency"),
        ({"function": "f1", "manager": "parrallel"}, "should be 'auto', 'naive', 'parallel'"),
        ({"function": "f1", "timeout_s": 0}, "greater than 0"),
        ({"function": "f1", "fn": "f1"}, "Extra inputs"),
    ],
)
def test_a_wrong_section_is_refused_with_the_remedy(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig(**config)


def test_a_name_alone_is_a_section() -> None:
    assert RewardConfig.model_validate("math") == RewardConfig(function="math")


@pytest.mark.parametrize("function", ["no_such", "remote"])
def test_a_function_that_cannot_be_had_is_an_error_at_the_start(function: str) -> None:
    with pytest.raises(RewardLoadError):
        RewardManager(RewardConfig(function=function, manager="parallel"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.reward=math", RewardConfig(function="math")),
        ("rollout.reward.function=f1", RewardConfig(function="f1")),
        ("rollout.reward=null", None),
    ],
)
def test_a_run_takes_a_name_or_a_section_for_its_reward(override: str, expected: Any) -> None:
    assert load_config("quickstart", [override]).rollout.reward == expected


def test_a_wrong_key_of_a_runs_reward_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.reward\.manger .* did you mean 'manager'"):
        load_config("quickstart", ["rollout.reward.function=f1", "rollout.reward.manger=naive"])

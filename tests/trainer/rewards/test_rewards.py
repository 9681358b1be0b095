"""Rewards: found by name, path or file; a score is a number, and a failure is never 0."""

import asyncio
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.trainer.config import ReasoningGymSource
from stepwell.trainer.data.tasks import open_tasks
from stepwell.trainer.errors import (
    RewardCrashError,
    RewardError,
    RewardLoadError,
    RewardTimeoutError,
    RewardValueError,
)
from stepwell.trainer.rewards.loading import BUILT_IN, load_reward
from tests.helpers import PanicError
from tests.trainer.rewards.scoring import score_with

SIGNATURE = "(data_source, solution_str, ground_truth, extra_info, **kwargs)"
WriteReward = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteReward:
    def write(code: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(code)
        return path

    return write


# ── finding it ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_is_found_by_name(name: str) -> None:
    needed = {
        "remote": {"url": "http://rm"},
        "remote_rm": {"rm_url": "http://rm"},
        "llm_judge": {"base_url": "http://llm", "model": "m"},
        "reward_model": {"url": "http://rm", "prompt": "{question}"},
    }
    assert load_reward(name, needed.get(name)).__module__ == BUILT_IN[name].partition(":")[0]


def test_every_built_in_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "design" / "rewards.md").read_text()
    assert not [name for name in BUILT_IN if f"`{name}`" not in page]


@pytest.mark.parametrize("sep", [":", "."])
def test_a_reward_is_found_by_dotted_path(sep: str) -> None:
    from stepwell.trainer.rewards.reasoning_gym import partial_score

    assert load_reward(f"stepwell.trainer.rewards.reasoning_gym{sep}partial_score") is partial_score


async def test_a_reward_is_found_in_a_file(write: WriteReward) -> None:
    path = write(f"def length{SIGNATURE}:\n    return len(solution_str)\n")
    assert await score_with(load_reward(f"{path}:length"), "any", "four", None) == 4.0


def test_a_file_that_is_not_there_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(RewardLoadError, match=r"there is no file .*mine.py"):
        load_reward(f"{tmp_path}/mine.py:score")


def test_a_missing_function_is_refused_with_those_that_are_there(write: WriteReward) -> None:
    path = write(f"import os\ndef length{SIGNATURE}: ...\ndef _hidden(): ...\n")
    with pytest.raises(RewardLoadError, match=r"no function 'lenght'; it has length$"):
        load_reward(f"{path}:lenght")


def test_a_refusal_names_no_secret() -> None:
    kwargs = {"url": "nowhere", "headers": {"Authorization": "Bearer s3cret"}}
    with pytest.raises(RewardLoadError, match=r"kwargs url, headers .*begins with http") as e:
        load_reward("remote", kwargs)
    assert "s3cret" not in str(e.value)


def test_a_file_or_module_that_fails_to_import_is_refused_with_the_cause(
    write: WriteReward,
) -> None:
    with pytest.raises(RewardLoadError, match="ZeroDivisionError"):
        load_reward(f"{write('1 / 0')}:score")
    with pytest.raises(RewardLoadError, match="No module named 'no_such_module'"):
        load_reward("no_such_module:score")


def test_a_function_with_another_signature_is_refused_when_loaded(write: WriteReward) -> None:
    with pytest.raises(RewardLoadError, match=r"cannot be called as wrong\(data_source"):
        load_reward(f"{write('def wrong(answer): ...')}:wrong")


def test_a_class_is_made_with_the_kwargs_and_a_function_is_called_with_them(
    write: WriteReward,
) -> None:
    path = write(
        f"def scaled{SIGNATURE}: return kwargs['factor']\n"
        "class Scaled:\n"
        "    def __init__(self, factor): self.factor = factor\n"
        "    def __call__(self, a, b, c, d): return self.factor\n"
    )
    for name in ("scaled", "Scaled"):
        assert load_reward(f"{path}:{name}", {"factor": 3})("any", "answer", None, {}) == 3
    with pytest.raises(RewardLoadError, match="cannot be made with kwargs level "):
        load_reward(f"{path}:Scaled", {"level": 1})


@pytest.mark.parametrize("name", ["", "exact", ":score", "module:"])
def test_a_name_that_names_nothing_is_refused_with_the_forms_there_are(name: str) -> None:
    with pytest.raises(RewardLoadError, match=r"exact_match, f1.*file.py:function"):
        load_reward(name)


# ── calling it ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("result", [0.5, {"score": 0.5, "note": "half"}])
async def test_a_number_or_a_dict_with_one_is_a_score(result: Any) -> None:
    def plain(*args: Any, **kwargs: Any) -> Any:
        return result

    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return result

    class Judge:
        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return result

    for reward in (plain, coroutine, Judge()):
        assert await score_with(reward, "any", "answer", None) == 0.5


async def test_the_task_and_further_arguments_reach_the_function() -> None:
    seen: list[Any] = []

    def reward(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **kwargs: Any
    ) -> float:
        seen.extend([data_source, solution_str, ground_truth, extra_info, kwargs])
        return 1.0

    await score_with(reward, "sums", "4", ["4"], {"level": 1}, strict=True)
    assert seen == ["sums", "4", ["4"], {"level": 1}, {"strict": True}]


async def test_a_sync_reward_does_not_block_the_event_loop() -> None:
    released = threading.Event()

    def waits(*args: Any, **kwargs: Any) -> float:
        return float(released.wait(30))

    scoring = asyncio.create_task(score_with(waits, "any", "answer", None))
    await asyncio.sleep(0)
    released.set()  # reached only if the loop still turns while the reward waits
    assert await scoring == 1.0


async def test_a_reward_that_raises_is_missing_not_zero() -> None:
    def broken(*args: Any, **kwargs: Any) -> float:
        raise KeyError("answer")

    with pytest.raises(RewardCrashError, match=r"on 'sums' raised KeyError at .*:\d+: 'answer'"):
        await score_with(broken, "sums", "4", None)


async def test_a_reward_that_hangs_is_missing_not_zero() -> None:
    async def hangs(*args: Any, **kwargs: Any) -> float:
        await asyncio.Event().wait()
        return 0.0

    with pytest.raises(RewardTimeoutError, match=r"no score within 0\.01 s"):
        await score_with(hangs, "sums", "4", None, timeout_s=0.01)


async def test_a_timeout_inside_the_reward_is_its_crash_not_our_limit() -> None:
    async def asks_a_judge(*args: Any, **kwargs: Any) -> float:
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardCrashError, match="the judge did not answer"):
        await score_with(asks_a_judge, "sums", "4", None)


@pytest.mark.parametrize("result", [None, "1.0", float("nan"), float("inf"), {"reward": 1.0}, []])
async def test_what_is_no_number_is_missing_not_zero(result: Any) -> None:
    with pytest.raises(RewardValueError, match=r"return a number within ±1e\+09, or a dict"):
        await score_with(lambda *a, **k: result, "sums", "4", None)


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(), KeyboardInterrupt()])
async def test_a_reward_that_would_end_the_process_is_only_missing(error: BaseException) -> None:
    def ends(*args: Any, **kwargs: Any) -> float:
        raise error

    with pytest.raises(RewardCrashError, match=type(error).__name__):
        await score_with(ends, "sums", "4", None)


@pytest.mark.parametrize("error", [SystemExit, PanicError])
async def test_a_coroutine_that_would_end_the_process_is_only_missing(
    error: type[BaseException],
) -> None:
    async def ends(*args: Any, **kwargs: Any) -> float:
        raise error("no such unit")

    with pytest.raises(RewardCrashError, match=f"{error.__name__}.*no such unit"):
        await score_with(ends, "sums", "4", None)


async def test_cancelling_is_not_taken_for_a_failure() -> None:
    started = asyncio.Event()

    async def hangs(*args: Any, **kwargs: Any) -> float:
        started.set()
        await asyncio.Event().wait()
        return 0.0

    scoring = asyncio.create_task(score_with(hangs, "any", "4", None))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


@pytest.mark.parametrize(
    "kind", [RewardLoadError, RewardCrashError, RewardTimeoutError, RewardValueError]
)
def test_every_failure_is_one_reward_error_and_survives_pickling(kind: type[RewardError]) -> None:
    error = pickle.loads(pickle.dumps(kind("why")))
    assert isinstance(error, RewardError)
    assert str(error) == "why"


# ── built-ins ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("12", 1.0),
        (" 12\n", 1.0),
        ("12.0", 1.0),
        ("x12", 0.0),
        ("the answer is 12", 0.0),
        ("", 0.0),
        ("21", 0.0),
    ],
)
async def test_reasoning_gym_pays_for_the_right_answer_only(answer: str, expected: float) -> None:
    assert await score_with(load_reward("reasoning_gym"), "chain_sum", answer, "12") == expected


async def test_the_verifiers_own_partial_credit_is_there_for_those_who_want_it() -> None:
    reward = load_reward("stepwell.trainer.rewards.reasoning_gym:partial_score")
    assert await score_with(reward, "chain_sum", "x12", "12") == pytest.approx(2 / 3)


async def test_a_verifier_that_reads_metadata_gets_it_from_the_task() -> None:
    import reasoning_gym

    problem = reasoning_gym.create_dataset("countdown", size=1, seed=3)[0]
    reward = load_reward("reasoning_gym")
    right = problem["metadata"]["expression"]
    assert await score_with(reward, "countdown", right, problem["answer"], problem) == 1.0
    assert await score_with(reward, "countdown", "1 + 1", problem["answer"], problem) == 0.0


@pytest.mark.parametrize(
    ("dataset", "params"),
    [
        ("arc_agi", {}),
        ("rearc", {}),
        ("word_ladder", {"min_word_length": 5, "max_word_length": 5}),
    ],
)
async def test_the_right_answer_to_a_task_is_right_whatever_its_data_set(
    dataset: str, params: dict[str, Any]
) -> None:
    source = {"kind": "reasoning_gym", "dataset": dataset, "size": 1, "params": params}
    task = open_tasks(ReasoningGymSource.model_validate(source))[0]
    reward = load_reward("reasoning_gym")
    assert await score_with(reward, dataset, task["answer"], task["answer"], task) == 1.0


async def test_data_that_reasoning_gym_does_not_know_is_missing_not_zero() -> None:
    with pytest.raises(RewardValueError, match="no data set of that name"):
        await score_with(load_reward("reasoning_gym"), "my_data", "12", "12")


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (" Paris\n", "Paris", 1.0),
        ("new  york", "new york", 1.0),
        ("paris", "Paris", 0.0),
        ("4", 4, 1.0),
        ("four", ["4", "four"], 1.0),
        ("five", ["4", "four"], 0.0),
    ],
)
async def test_exact_match_compares_as_written(answer: str, truth: Any, expected: float) -> None:
    assert await score_with(load_reward("exact_match"), "any", answer, truth) == expected


async def test_exact_match_without_a_right_answer_is_missing_not_zero() -> None:
    with pytest.raises(RewardValueError, match="has none"):
        await score_with(load_reward("exact_match"), "any", "4", None)

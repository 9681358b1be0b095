"""The reward `code` on a SandboxFusion server, by verl's `sandbox_fusion.url` and
`max_concurrent`."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from stepwell.trainer.config import RewardConfig
from stepwell.trainer.errors import RewardCrashError, RewardTimeoutError
from stepwell.trainer.rewards.base import RewardResult, RewardSample
from stepwell.trainer.rewards.manager import RewardManager
from tests.trainer.rewards.sandbox_server import SandboxServer, sandbox

TWICE = {"inputs": ["1\n", "2\n", ["3"]], "outputs": ["2\n", "4", ["6"]]}
CALL = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [[3], 7]}


async def outcomes(server: SandboxServer, *samples: RewardSample, **config: Any) -> list[Any]:
    given = {"sandbox_fusion": server.url, **config}
    manager = RewardManager(RewardConfig.model_validate(given))
    try:
        return await manager.score(samples)
    finally:
        await manager.aclose()


def program(code: str, truth: Any, source: str = "apps") -> RewardSample:
    return RewardSample(source, f"Thus\n```python\n{code}\n```", truth, {})


@pytest.mark.parametrize(
    ("code", "truth", "score"),
    [
        ("print(int(input()) * 2)", TWICE, 1.0),
        ("print(2)", TWICE, 1 / 3),
        ("def add(a, b): return a + b", CALL, 1.0),
        ("class Solution:\n    def add(self, a: List[int], b): return a + b", CALL, 1.0),
        ("def f(x): return 2 * x", {"assert_case": ["assert f(1) == 2", "assert 0"]}, 0.5),
        ("raise SystemExit(3)", TWICE, 0.0),
        ("print(", TWICE, 0.0),
    ],
)
async def test_every_form_of_tests_is_run_there(code: str, truth: Any, score: float) -> None:
    """No function is named: it is the usual one of the data source, as in verl."""
    async with sandbox() as server:
        (outcome,) = await outcomes(server, program(code, truth))
    assert outcome.score == pytest.approx(score)
    body = server.bodies[0]
    assert body["language"] == "python"
    assert (body["run_timeout"], body["memory_limit_MB"]) == (10.0, 1024)
    assert all(
        str(want).strip() not in body["code"] for want in truth.get("outputs", ()) if want == 7
    )


async def test_a_program_that_takes_too_long_has_failed() -> None:
    kwargs = {"limits": {"wall_s": 0.2, "memory_mb": 256}}
    async with sandbox() as server:
        (outcome,) = await outcomes(
            server, program("while True: pass", TWICE), function="code", kwargs=kwargs
        )
    assert outcome.score == 0.0
    assert {(b["run_timeout"], b["memory_limit_MB"]) for b in server.bodies} == {(0.2, 256)}


async def test_so_many_programs_run_at_once_whatever_the_number_of_answers() -> None:
    config: dict[str, Any] = {
        "by_data_source": {"taco": {"function": "code", "kwargs": {"continuous": False}}},
        "sandbox_fusion": {"url": "", "max_concurrent": 2},
    }
    async with sandbox() as server:
        config["sandbox_fusion"]["url"] = f"{server.url}/run_code"
        answers = [program("print(2)", TWICE, source) for source in ("apps", "taco") * 3]
        found = await outcomes(server, *answers, **config)
    assert [round(o.score, 3) for o in found] == [0.333, 0.0] * 3
    assert server.most_running == 2


async def test_a_server_that_fails_costs_a_score_and_never_pays_0() -> None:
    broken = {"status": "SandboxError", "message": "no space left", "run_result": None}
    answer = program("print(int(input()) * 2)", TWICE)
    async with sandbox(broken, broken) as server:
        (missing,) = await outcomes(server, answer)
    assert isinstance(missing, RewardCrashError)
    assert "ran no program: SandboxError: no space left" in str(missing)
    async with sandbox(504) as server:  # asked again
        (outcome,) = await outcomes(server, answer)
    assert isinstance(outcome, RewardResult)
    assert outcome.score == 1.0
    async with sandbox(422, 422) as server:
        (missing,) = await outcomes(server, answer)
    assert isinstance(missing, RewardCrashError)
    (missing,) = await outcomes(server, answer, timeout_s=0.3, max_attempts=1)  # nobody is there
    assert isinstance(missing, RewardTimeoutError)
    assert "gave no answer" in str(missing)


async def test_an_answer_waits_for_its_place_as_long_as_it_takes() -> None:
    config: dict[str, Any] = {"timeout_s": 4.0, "max_attempts": 1}
    answer = program("import time\ntime.sleep(1)\nprint(4)", {"inputs": [""], "outputs": ["4"]})
    async with sandbox() as server:
        config["sandbox_fusion"] = {"url": server.url, "max_concurrent": 1}
        found = await outcomes(server, *[answer] * 5, **config)
    assert [o.score for o in found] == [1.0] * 5, found
    assert server.most_running == 1


async def test_waiting_for_the_server_fails_no_test() -> None:
    answer = program("print(int(input()) * 2)", TWICE)
    kwargs = {"total_s": 0.5}
    async with sandbox(503) as server:  # asked again after a second
        (outcome,) = await outcomes(server, answer, function="code", kwargs=kwargs)
    assert outcome.score == 1.0
    slow = {"status": "Finished", "execution_time": 0.6, "return_code": 0, "stdout": "2"}
    async with sandbox({"status": "Success", "run_result": slow}) as server:
        (outcome,) = await outcomes(server, answer, function="code", kwargs=kwargs)
    assert (outcome.score, outcome.extra["passed"]) == (pytest.approx(1 / 3), 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sandbox_fusion": "localhost:8080"}, "sandbox_fusion"),
        ({"sandbox_fusion": {"url": "http://s", "max_concurrent": 0}}, "max_concurrent"),
        ({"function": "math", "sandbox_fusion": "http://s"}, "no function is 'code'"),
    ],
)
def test_a_sandbox_that_nobody_uses_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RewardConfig.model_validate(config)

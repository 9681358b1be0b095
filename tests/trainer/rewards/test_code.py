"""The reward `code`: programs run against the tests of the usual data sets, in processes that can
do no harm. Forms of the truth: PRIME and verl 0.9 (`verl/utils/reward_score/prime_code`,
`sandbox_fusion`), MBPP's and HumanEval's cards; written anew."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from stepwell.trainer import sandbox
from stepwell.trainer.errors import RewardCrashError, RewardLoadError, RewardValueError
from stepwell.trainer.rewards.loading import load_reward
from stepwell.trainer.sandbox import namespaces_work
from tests.builders import until
from tests.helpers import gone


async def paid(answer: str, truth: Any, info: Any = None, **kwargs: Any) -> dict[str, Any]:
    result: Any = load_reward("code", kwargs)("apps", answer, truth, info or {})
    said: dict[str, Any] = await result
    return said


TWICE = {"inputs": ["1\n", "2\n", ["3"]], "outputs": ["2\n", "4", ["6"]]}
CALL = {"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [[3], 7]}
TWELVE = {"inputs": [f"{k}\n" for k in range(1, 13)], "outputs": [str(k) for k in range(1, 13)]}
BESIDE_A_HELPER = {
    "prompt": 'def enc(s):\n    return s[::-1]\n\n\ndef dec(s):\n    """Undoes enc."""\n',
    "test": "def check(candidate):\n    assert candidate(enc('ab')) == 'ab'\n",
    "entry_point": "dec",
}
HUMAN_EVAL = {
    "prompt": 'def inc(x: List[int]) -> List[int]:\n    """Adds 1."""\n',
    "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n",
    "entry_point": "inc",
}


NESTED = """
import sys
def add(a, b):
    sys.setrecursionlimit(100_000)
    for _ in range(5_000):
        a = [a]
    return a
"""


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("print(int(input()) * 2)", TWICE, 1.0),
        ("print(int(input()) * 2, '  ')\n[None]", json.dumps(TWICE), 1.0),
        ("print(int(input()) + 2 if 0 else 2)", {"input_output": json.dumps(TWICE)}, 1 / 3),
        ("if __name__ == '__main__':\n    print(int(input()) * 2)", TWICE, 1.0),
        ("print(1/3)", {"inputs": [""], "outputs": ["0.33333333"]}, 1.0),
        ("print('4 ' * 20_000)", {"inputs": [""], "outputs": ["4 " * 20_000]}, 1.0),
        ("print('中 ' * 20_000)", {"inputs": [""], "outputs": ["中 " * 20_000]}, 1.0),
        ("print(10**9 + 8)", {"inputs": [""], "outputs": ["1000000007"]}, 0.0),
        ("def add(a, b): return a + b", CALL, 1.0),
        ("class Solution:\n    def add(self, a: List[int], b): return a + b", CALL, 1.0),
        ("def add(a, b): return (a + b) if a == 1 else {}", CALL, 0.5),
        ("def other(a): ...", CALL, 0.0),
        (NESTED, CALL, 0.0),
        ("def f(x): return 2 * x", ["assert f(1) == 2", "assert f(2) == 4"], 1.0),
        ("def f(x): return 2 * x", {"assert_case": ["assert f(1) == 3"]}, 0.0),
        ("x = open(0).read()\ndef f(x): return 2 * x", ["assert f(1) == 3"], 0.0),
        ("import sys\nx = sys.stdin.read()\ndef f(x): return 2 * x", ["assert f(1) == 2"], 1.0),
        ("def f(x): return 2 * x", {"test_list": ["assert f(z) == 4"], "test_imports": ["z=2"]}, 1),
        ("def f(x): return 2 * x", "assert f(1) == 2\nassert f(2) == 4", 1.0),
        ("    return [y + 1 for y in x]", HUMAN_EVAL, 1.0),
        ("def inc(x):\n    return x", HUMAN_EVAL, 0.0),
        ("def dec(s): return s[::-1]", BESIDE_A_HELPER, 1.0),
        (
            "from __future__ import annotations\ndef dec(s: str): return s[::-1]",
            {**BESIDE_A_HELPER, "prompt": BESIDE_A_HELPER["prompt"] + "n = int(input())\n"},
            1.0,
        ),
        ("def add(a, b): return 10**400", {**CALL, "inputs": [[1, 2]], "outputs": [3.0]}, 0.0),
        ("import numpy\ndef add(a, b): return numpy.int64(a + b)", CALL, 1.0),
        ("def add(a, b): return a + b", {**CALL, "inputs": [[0.1, 0.2]], "outputs": [0.3]}, 1.0),
        ("def add(a, b): return a + b", {**CALL, "inputs": [[0.1, 0.2]], "outputs": [0.31]}, 0.0),
        (
            "def add(a, b): return {'sum': a + b}",
            {**CALL, "outputs": [{"sum": 3}, {"sum": 8}]},
            0.5,
        ),
        ("n = int(input())\nprint(n if n < 12 else 0)", TWELVE, 11 / 12),
        ("n = int(input())\nprint(n if n < 3 else 0)", TWELVE, 0.2),
    ],
)
async def test_a_program_is_paid_for_the_tests_it_passes(
    answer: str, truth: Any, score: float
) -> None:
    assert (await paid(answer, truth))["score"] == pytest.approx(score)


@pytest.mark.parametrize("given", ["1\ntwo", "[" * 100_000])
async def test_arguments_that_are_no_json_are_the_tasks_fault(given: str) -> None:
    truth = {**CALL, "inputs": [given], "outputs": [3]}
    with pytest.raises(RewardValueError, match=r"'apps' has the tests .*: set label_key"):
        await paid("def add(a, b): return a + b", truth)


@pytest.mark.parametrize(
    "answer",
    [
        "<think>```python\nf = 1\n```</think>Thus\n```python\ndef f(): return 4\n```\nDone.",
        "```python\ndef f(): return 4\n```\nprints\n```\n4\n```",
        "1. In a list:\n\n   ```python\n   def f():\n       return 4\n\n   ```\n2. Done.",
        "Beside ```print```:\n```python\ndef f(): return 4\n```",
        "```\nf = 1\n```\n```\nfrom __future__ import annotations\ndef f(): return 4",
    ],
)
async def test_the_last_block_of_an_answer_is_its_program(answer: str) -> None:
    assert await paid(answer, ["assert f() == 4"]) == {
        "score": 1.0,
        "acc": True,
        "passed": 1,
        "tests": 1,
    }


@pytest.mark.parametrize(
    "said",
    [
        "print('on the way', file=sys.stderr)",
        "import warnings; warnings.warn('odd')",
        "if sys is 3: pass",
        "import atexit; atexit.register(sys.stderr.write, 'bye')",
    ],
)
@pytest.mark.parametrize("truth", [TWICE, ["assert int(2) == 2"]])
async def test_what_a_program_says_on_stderr_is_not_its_output(said: str, truth: Any) -> None:
    program = f"import sys\n{said}\n" + ("print(int(input()) * 2)" if truth is TWICE else "")
    assert (await paid(program, truth))["score"] == 1.0


async def test_tests_may_lie_in_the_tasks_metadata() -> None:
    info = {"entry_point": "inc", "prompt": HUMAN_EVAL["prompt"], "test_setup_code": "one = 1"}
    truth = "def check(c):\n    assert c([1]) == [1 + one]"
    assert (await paid("    return [y + 1 for y in x]", truth, info))["score"] == 1.0


async def test_without_continuous_only_a_whole_solution_pays() -> None:
    half = await paid("print(2)", TWICE, continuous=False)
    assert half == {"score": 0.0, "acc": False, "passed": 1, "tests": 3}


@pytest.mark.parametrize(
    "answer",
    [
        "import os; os._exit(0)",
        "raise SystemExit",
        "def f(): raise KeyboardInterrupt",
        "f = [0] * 10**10",
        "while True: print('x' * 10000)",
        "def f(:",
    ],
)
async def test_what_ends_before_the_tests_do_has_failed_them(answer: str) -> None:
    assert (await paid(answer, ["assert f() == 4"]))["score"] == 0.0


async def test_what_a_program_leaves_is_removed_however_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nf = int"
    assert (await paid(deep, ["assert f() == 0"]))["score"] == 1.0
    assert os.listdir(tmp_path) == []


async def test_time_is_limited_for_one_test_and_for_all() -> None:
    loop = ["while True: pass", ["assert f() == 4"]]
    limits = {"cpu_s": 1, "wall_s": 3}
    assert (await paid(*loop, limits=limits))["score"] == 0.0
    slow = {"inputs": [""] * 4, "outputs": ["4"] * 4}
    first = await paid("import time; print(4); time.sleep(1)", slow, total_s=0.5)
    assert first == {"score": 0.25, "acc": False, "passed": 1, "tests": 4}


async def test_what_has_left_the_process_group_holds_no_answer_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without namespaces, a process that left the group keeps the pipe that is read open."""
    monkeypatch.setattr(sandbox, "namespaces_work", lambda: False)
    child = "os.setsid(); open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    program = f"import os, time\nif not os.fork(): {child}"
    try:
        async with asyncio.timeout(20):
            ended = await sandbox.run(program, tmp_path, sandbox.SandboxConfig(wall_s=2))
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert "not finished within 2 s" in ended.failure


async def test_a_program_reaches_neither_us_nor_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STEPWELL_TEST_SECRET", "s3cret")
    tests = [
        "import os; assert 'STEPWELL_TEST_SECRET' not in os.environ",
        "import os; assert not os.listdir('.'); open('a', 'w').write('1')",
        "import os; assert not os.listdir('.')",  # of the test before nothing is left
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        if namespaces_work():
            tests.append(
                "import socket\n"
                f"try: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)\n"
                "except OSError: ok = True\n"
                "assert ok"
            )
        said = await paid("x = 1", tests)
    assert said["passed"] == len(tests)


@pytest.mark.parametrize("isolated", [True, False])
async def test_a_program_ends_with_who_runs_it_however_that_dies(
    tmp_path: Path, isolated: bool
) -> None:
    """The trainer, or the process that scores for it, is killed while an answer sleeps."""
    answer = f"import time; open({str(tmp_path / 'up')!r}, 'w').write('1'); time.sleep(600)"
    code = (
        "import asyncio, pathlib\n"
        "from stepwell.trainer import sandbox\n"
        f"{'' if isolated else 'sandbox.namespaces_work = lambda: False'}\n"
        f"limits = sandbox.SandboxConfig(wall_s=600)\n"
        f"asyncio.run(sandbox.run({answer!r}, pathlib.Path({str(tmp_path)!r}), limits))\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220
    await until(lambda: (tmp_path / "up").exists())
    running = [p.pid for p in psutil.Process(owner.pid).children(recursive=True)]
    assert running
    owner.kill()
    owner.wait()
    assert all([await gone(pid) for pid in running])


async def test_a_sandbox_that_cannot_be_had_is_a_missing_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepwell.trainer.sandbox.namespaces_work", lambda: False)
    with pytest.raises(RewardCrashError, match="permits no user namespaces"):
        await paid("x = 1", ["assert x"], limits={"require_isolation": True})
    monkeypatch.setattr("stepwell.backends.processes.sys.executable", "/no/such/python")
    with pytest.raises(OSError, match="no/such"):
        await paid("x = 1", ["assert x"])
    monkeypatch.undo()
    with pytest.raises(OSError, match="the sandbox did not start"):  # on a machine too busy for it
        await paid("x = 1", ["assert x"], limits={"wall_s": 0.001})


async def test_a_machine_that_can_start_no_process_is_asked_again_whether_it_isolates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all later programs would run without isolation, or none would."""
    isolates = namespaces_work()
    namespaces_work.cache_clear()

    def no_memory(*argv: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", no_memory)
        with pytest.raises(OSError, match="temporarily unavailable"):
            await paid("x = 1", ["assert x"])
    assert namespaces_work() is isolates
    assert (await paid("x = 1", ["assert x"]))["score"] == 1.0


async def test_a_machine_on_which_unshare_can_start_nothing_is_asked_again_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolates = namespaces_work()
    namespaces_work.cache_clear()
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho unshare: fork failed: Cannot allocate memory >&2\nexit 1\n")
    unshare.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(OSError, match="too busy: unshare: fork failed"):
            await paid("x = 1", ["assert x"])
    assert namespaces_work() is isolates


@pytest.mark.parametrize("truth", [None, "", {}, [], {"inputs": ["1"], "outputs": []}])
async def test_a_task_without_tests_is_a_missing_score(truth: Any) -> None:
    with pytest.raises(RewardValueError, match="a task of 'apps' has the tests"):
        await paid("x = 1", truth)


def test_a_limit_that_is_unknown_is_refused_at_the_start() -> None:
    with pytest.raises(RewardLoadError, match="cpu"):
        load_reward("code", {"limits": {"cpu": 1}})


async def test_many_answers_are_scored_at_once() -> None:
    said = await asyncio.gather(*(paid(f"x = {n % 2}", ["assert x"]) for n in range(4)))
    assert [s["score"] for s in said] == [0.0, 1.0, 0.0, 1.0]

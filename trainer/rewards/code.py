"""This module pays for programs that pass the task's tests, each test run in the sandbox
(`trainer/sandbox.py`): a process of its own in an empty folder, without a network where the system
lets us, with limits of time and memory; or on a SandboxFusion server (`sandbox_fusion.py`).

::

    answer ──► its last code block ─┬─ inputs, outputs            a program: stdout compared
                                    ├─ inputs, outputs, fn_name   a function: result compared
                                    └─ asserts, check(candidate)  run to their end

A program that fails, hangs or floods has failed its test: 0. A sandbox that cannot be started is a
missing score.

Forms of the truth: PRIME's and verl's `{"inputs", "outputs", "fn_name"}` (APPS, TACO,
codecontests, codeforces), also with `assert_case`; MBPP's `test_list`; HumanEval's `test` and
`entry_point`. Sources: verl 0.9, `verl/utils/reward_score/prime_code`, `sandbox_fusion`; the data
sets' cards.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.trainer.errors import RewardCrashError, RewardValueError
from stepwell.trainer.rewards.sandbox_fusion import SandboxFusion
from stepwell.trainer.rollout.folders import remove
from stepwell.trainer.sandbox import Ended, SandboxConfig, run

MOST_OF_A_WRONG_ONE = 10
"""Tests that count for a program that does not pass them all, as in verl."""
_BLOCK = re.compile(r"```[^`\n]+```|```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
"""A block, or code within a line, which has no groups."""
_DEFINED = re.compile(r"(?m)^(?:def|class)\s+(\w+)")
_FUTURE = re.compile(r"(?m)^from __future__ import (?:\([^)]*\)|[^\n(]*)$")
_PRELUDE = """\
import bisect, collections, functools, heapq, itertools, json, math, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import gcd, ceil, floor, sqrt, inf, log
from typing import *
"""
"""Names that these sets' answers use without importing them."""
_ALONE = f"{_PRELUDE}exec(compile({{code!r}}, '<answer>', 'exec'), globals())\n"
_AS_MODULE = f"""\
import os, sys, types
given, answer = os.fdopen(os.dup(0), encoding="utf-8"), types.ModuleType("answer")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # an answer that reads must not read its test
sys.modules["answer"] = answer
exec({_PRELUDE!r}, answer.__dict__)
exec(compile({{code!r}}, "<answer>", "exec"), answer.__dict__)
"""
_TESTED = _AS_MODULE + "exec(compile(given.read(), '<tests>', 'exec'), answer.__dict__)\n"
_CALLED = (
    _AS_MODULE
    + """\
import json
name, arguments, mark = json.loads(given.read())
owner = answer.Solution() if hasattr(answer, "Solution") else answer
def plain(value):  # numpy's, and what is iterated over
    return value.tolist() if hasattr(value, "tolist") else list(value)
print("\\n" + mark + json.dumps(getattr(owner, name)(*arguments), default=plain))
"""
)


class _Test(NamedTuple):
    """Code to run, and a check of its output. What the output is compared with never enters the
    process; a test that has to be run there is read after the answer, and ends with a mark that the
    answer does not know."""

    harness: str
    stdin: str
    passes: Callable[[str], bool]
    output_chars: int = 0
    """Characters of output that are allowed at least, whatever the sandbox's limit is."""


class CodeReward:
    """1.0 for a program that passes every test; else the share of those it passes (of the first
    10), or 0.0 without `continuous`. Beside it `acc`, `passed` and `tests`.

    Args:
        continuous: whether a part of the tests pays.
        limits: of one test, as `SandboxConfig`; 1024 MB unless it says so.
        total_s: seconds that the tests of an answer run, after which none is begun; those that were
            not have failed. Waiting for a server does not count. Keep it and one test's `wall_s`
            below `rollout.reward.timeout_s`.
        sandbox_fusion: the server that runs the tests (`rollout.reward.sandbox_fusion`); None: this
            machine does. Of `limits` it obeys `wall_s` and `memory_mb`.
    """

    def __init__(
        self,
        continuous: bool = True,
        limits: Mapping[str, Any] | None = None,
        total_s: float = 40.0,
        sandbox_fusion: SandboxFusion | None = None,
    ) -> None:
        self._continuous = continuous
        self._limits = SandboxConfig.model_validate({"memory_mb": 1024, **(limits or {})})
        self._total_s = total_s
        self._server = sandbox_fusion
        self.places = None if sandbox_fusion is None else sandbox_fusion.places
        """Places of calls (`manager.py`); None: any number runs at once."""

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """
        Args:
            ground_truth: tests in one of the module's forms, or as JSON, or as Python code.
            extra_info: may hold what the truth lacks: `entry_point`, `prompt`, `test_setup_code`.

        Raises:
            RewardValueError: there are no tests in it.
            RewardCrashError: the system does not isolate as `limits` require, or the server ran no
                program.
        """
        tests = list(_tests(ground_truth, extra_info or {}, data_source))
        if self._server is None and not await self._limits.is_met():
            raise RewardCrashError(
                "limits.require_isolation is true, and this system permits no user namespaces "
                "(unshare --map-root-user --net --pid fails); permit them, or set it to false"
            )
        code = _code_of(solution_str, extra_info or {}, ground_truth)
        passed: list[bool] = []
        seconds = 0.0
        for test in tests:
            if seconds >= self._total_s or (
                not all(passed) and (not self._continuous or len(passed) >= MOST_OF_A_WRONG_ONE)
            ):
                break
            ended = await self._run(test, code)
            seconds += ended.seconds
            passed.append(not ended.failure and await asyncio.to_thread(test.passes, ended.output))
        n = len(tests)
        right = len(passed) == n and all(passed)
        # verl's counts the first ten alone, and pays 1 where only a later one fails.
        share = sum(passed) / max(len(passed), min(n, MOST_OF_A_WRONG_ONE))
        if all(passed):  # out of time, or right: of all tests
            share = len(passed) / n
        score = 1.0 if right else share * self._continuous
        return {"score": float(score), "acc": right, "passed": sum(passed), "tests": n}

    async def _run(self, test: _Test, code: str) -> Ended:
        program = test.harness.replace("{code!r}", repr(code))
        if self._server is not None:
            return await self._server.run(program, self._limits, test.stdin)
        return await self._run_here(program, test)

    async def _run_here(self, program: str, test: _Test) -> Ended:
        most = max(self._limits.output_chars, test.output_chars)
        limits = self._limits.model_copy(update={"output_chars": most})
        folder = Path(tempfile.mkdtemp(prefix="stepwell-code-"))
        try:
            return await run(program, folder, limits, test.stdin, stderr=False)
        finally:
            await asyncio.to_thread(_remove, folder)


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # the program has left something there, perhaps thousands of levels deep
        remove(folder)


def _code_of(answer: str, info: Mapping[str, Any], truth: Any) -> str:
    """The last Python block of `answer`, else its last block, else all of it. HumanEval's prompt
    stands before it: what only goes on after it needs that, and its tests may call what is defined
    in the prompt beside the function that was asked for."""
    reply = answer.rpartition("</think>")[2]
    found = [block for block in _BLOCK.finditer(reply) if block[2] is not None]
    blocks = [(block[1], _unindented(reply, block)) for block in found]
    python = [code for language, code in blocks if language.lower() in ("python", "py", "python3")]
    code: str = [*(code for _, code in blocks), *python][-1] if blocks else reply
    known = {**info, **truth} if isinstance(truth, Mapping) else info
    name, prompt = known.get("entry_point"), known.get("prompt")
    if not isinstance(prompt, str) or not name:
        return code
    asked = rf"\bdef {re.escape(name)}\b"
    if not re.search(asked, code):
        return prompt + code
    return _beside(prompt, code)


def _beside(prompt: str, code: str) -> str:
    """`code` behind the imports and definitions of `prompt` that it has not itself."""
    try:
        known = ast.parse(prompt).body
    except (SyntaxError, ValueError):
        return code
    own = set(_DEFINED.findall(code))
    missing = [
        ast.unparse(each)
        for each in known
        if isinstance(each, ast.Import | ast.ImportFrom)
        or (isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name not in own)
    ]
    future = _FUTURE.findall(code)  # must come first
    return "\n".join([*future, *missing, _FUTURE.sub("", code)])


def _unindented(reply: str, block: re.Match[str]) -> str:
    """A block's code without the indent of the list that it stands in, as Markdown has it."""
    indent = reply[: block.start()].rpartition("\n")[2]
    if not indent.isspace():
        return block[2]
    return "\n".join(line.removeprefix(indent) for line in block[2].split("\n"))


def _tests(truth: Any, info: Mapping[str, Any], data_source: str) -> Sequence[_Test]:
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            truth = {"test": truth}
    if isinstance(truth, list | tuple):
        truth = {"test_list": truth}
    truth = {} if not isinstance(truth, Mapping) else truth
    if "input_output" in truth:  # APPS as it is on the Hub
        return _tests(truth["input_output"], info, data_source)
    known = {**info, **truth}
    setup = "\n".join([str(known.get("test_setup_code") or ""), *(known.get("test_imports") or ())])
    asserts = truth.get("assert_case") or truth.get("test_list")
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if asserts:
        return [_asserted(f"{setup}\n{a}") for a in asserts]
    if truth.get("test"):
        name = known.get("entry_point")
        check = f"\ncheck({name})" if name and "def check" in truth["test"] else ""
        return [_asserted(f"{setup}\n{truth['test']}{check}")]
    if inputs and isinstance(outputs, Sequence) and len(inputs) == len(outputs):
        name = truth.get("fn_name")
        with suppress(ValueError, RecursionError):  # arguments that are no JSON: told below
            return [
                _of_a_call(name, i, o) if name else _of_a_program(i, o)
                for i, o in zip(inputs, outputs, strict=True)
            ]
    raise RewardValueError(
        f"a task of {data_source!r} has the tests {truth!r:.80}; they should be inputs and outputs "
        "of the same number (a function's as JSON), test_list, or test with entry_point: set "
        "label_key to where they are"
    )


def _asserted(tests: str) -> _Test:
    mark = secrets.token_hex(16)
    return _Test(
        _TESTED, f"{tests}\nprint('\\n{mark}')", lambda output: output.rstrip().endswith(mark)
    )


def _of_a_call(name: str, given: Any, wanted: Any) -> _Test:
    """Make the test of a function's call. Arguments given as text stand one a line, as JSON."""
    mark = secrets.token_hex(16)
    arguments = [json.loads(x) for x in given.splitlines()] if isinstance(given, str) else given
    want = json.loads(wanted) if isinstance(wanted, str) and _is_json(wanted) else wanted

    def passes(output: str) -> bool:
        _, found, result = output.rpartition(mark)
        if not found or not _is_json(result):
            return False
        got = json.loads(result)
        # Some sets put the one result into a list.
        return _same_value(got, want) or _same_value([got], want)

    return _Test(_CALLED, json.dumps([name, arguments, mark]), passes, 2 * len(json.dumps(want)))


def _of_a_program(given: Any, wanted: Any) -> _Test:
    """Make the test of a whole program by its input and output. The items of a list are lines."""
    stdin, want = (
        "\n".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for x in (given, wanted)
    )
    return _Test(_ALONE, stdin, lambda output: _same_output(output, want), 2 * len(want))


def _same_output(output: str, want: str) -> bool:
    """The same words, but for white space and the last digits of decimals."""
    got, right = output.split(), want.split()
    return len(got) == len(right) and all(map(_same_word, got, right))


def _same_word(got: str, right: str) -> bool:
    if got == right:
        return True
    try:
        return "." in right and math.isclose(float(got), float(right), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _same_value(got: Any, right: Any) -> bool:
    """Equal but for the last digits of decimals, as those of a program's output."""
    if isinstance(right, list) and isinstance(got, list):
        return len(got) == len(right) and all(map(_same_value, got, right))
    if isinstance(right, dict) and isinstance(got, dict):
        return got.keys() == right.keys() and all(_same_value(got[k], right[k]) for k in right)
    if isinstance(right, float) and isinstance(got, int | float):
        try:
            return math.isclose(got, right, rel_tol=1e-6, abs_tol=1e-6)
        except OverflowError:  # an integer beyond all floats
            return False
    return bool(got == right)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # a program may print thousands of brackets
        return False
    return True

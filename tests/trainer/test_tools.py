"""Tools for white-box agents: schemas, life cycle, limits, the loop, and the examples for real."""

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
import pytest
from aiohttp import web
from pydantic import AfterValidator, Field

from examples.tools.agent import TOOLS, helper
from examples.tools.agent import agent as example_agent
from examples.tools.calculator import calculator
from examples.tools.sandbox import PythonSandbox
from examples.tools.search import Search
from stepwell.trainer.sandbox import namespaces_work
from stepwell.trainer.tools import (
    FunctionTool,
    Tool,
    ToolAgent,
    ToolBox,
    ToolBoxConfig,
    ToolConfig,
    ToolConfigError,
    ToolError,
    ToolSession,
    ToolUnavailableError,
)
from tests.helpers import PanicError, gone, serving_posts


def calls(*named: tuple[str, Any]) -> list[dict[str, Any]]:
    """Tool calls as an assistant message has them; arguments that are no string become JSON."""
    return [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": n, "arguments": a if isinstance(a, str) else json.dumps(a)},
        }
        for i, (n, a) in enumerate(named)
    ]


async def said(tools: ToolSession, *named: tuple[str, Any]) -> list[Any]:
    return [m["content"] for m in await tools.call(calls(*named))]


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────


async def weather(
    city: Annotated[str, Field(description="its name")],
    unit: Literal["C", "F"] = "C",
    days: int = 1,
) -> dict[str, Any]:
    """The weather
    of a city.

    Not for the model.
    """
    return {"city": city, "unit": unit, "days": days}


def test_a_functions_types_and_docstring_are_its_schema() -> None:
    assert FunctionTool(weather).tool_schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": "integer", "default": 1},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


class Counting(Tool):
    """Counts up by what it is asked, from where the task says."""

    name = "count"

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.values: dict[str, int] = {}
        self.log: list[str] = []

    async def create(self, instance_id: str | None = None, start: int = 0, **kwargs: Any) -> str:
        self.log.append("create")
        instance_id = f"i{len(self.log)}"
        self.values[instance_id] = start
        return instance_id

    async def call(self, instance_id: str, by: int, **kwargs: Any) -> tuple[str, float, Any]:
        """Count."""
        self.values[instance_id] += by * kwargs.get("factor", 1)
        return str(self.values[instance_id]), 0.5, {"by": by}

    async def calc_reward(self, instance_id: str, target: int = 0, **kwargs: Any) -> float:
        return float(self.values[instance_id] == target)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append("release")
        del self.values[instance_id]


def test_a_tools_call_is_its_schema_without_the_instance_and_the_tasks_kwargs() -> None:
    function = Counting().tool_schema["function"]
    assert (function["name"], function["description"]) == ("count", "Count.")
    assert list(function["parameters"]["properties"]) == ["by"]


def test_a_schema_that_is_given_is_taken_in_either_form() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    whole = {"type": "function", "function": function}
    for given in (function, whole):
        assert Counting(tool_schema=given).tool_schema == whole
        assert Counting(tool_schema=given).name == "add"


def untyped(x) -> str:  # type: ignore[no-untyped-def]
    return str(x)


def unfit(x: threading.Lock) -> str:
    return str(x)


def positional(x: int, /) -> str:
    return str(x)


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (untyped, "x has no type"),
        (unfit, "no JSON schema"),
        (positional, "positional only"),
        (ToolConfig(class_name="no.such.Tool"), "cannot be imported"),
        (
            ToolConfig(class_name="json.JSONDecodeError"),
            "neither a stepwell.trainer",
        ),
        (ToolConfig(class_name="examples.tools.search.Search"), "cannot be made with config {}"),
        (
            ToolConfig(class_name="examples.tools.calculator.calculator", config={"a": 1}),
            "takes no config",
        ),
        (
            ToolConfig(
                class_name="examples.tools.calculator.calculator", tool_schema={"name": "a b"}
            ),
            "tool_schema is",
        ),
        (
            ToolConfig(class_name="examples.tools.sandbox.PythonSandbox", config={"cpu": 1}),
            "Extra inputs",
        ),
        (ToolConfig(class_name="stepwell.trainer.tools.Tool"), "neither a method `call` nor"),
    ],
)
def test_a_tool_that_cannot_be_made_is_refused_at_the_start(tool: Any, message: str) -> None:
    with pytest.raises(ToolConfigError, match=message):
        ToolBox([tool])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolConfigError, match="two tools are named 'weather'"):
        ToolBox([weather, weather])


def test_a_file_of_tools_is_read_and_its_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = ToolBox.from_yaml(str(TOOLS))
    assert box.names == ["calculator", "search", "python"]
    monkeypatch.setenv("HOME", str(TOOLS.parent))
    assert ToolBox.from_yaml("~/tools.yaml").names == box.names
    file = tmp_path / "tools.yaml"
    for text, message in [
        ("tools: [{class_nam: a.b}]", "tools.0.class_name: Field required"),
        ("timeout_s: 0", "timeout_s: Input should be greater than 0"),
        ("tools: [", "cannot be read"),
    ]:
        file.write_text(text)
        with pytest.raises(ToolConfigError, match=message):
            ToolBox.from_yaml(file)
    with pytest.raises(ToolConfigError, match="cannot be read"):
        ToolBox.from_yaml(tmp_path / "none.yaml")


# ── life cycle ───────────────────────────────────────────────────────────────────────────────────


async def test_an_instance_lives_as_long_as_its_rollout_with_the_tasks_kwargs() -> None:
    counting = Counting()
    task = {
        "metadata": {
            "tools_kwargs": {
                "count": {
                    "create_kwargs": {"start": 10},
                    "execute_kwargs": {"factor": 2},
                    "calc_reward_kwargs": {"target": 16},
                }
            }
        }
    }
    async with ToolBox([counting]).session(task) as tools:
        assert counting.log == []  # nothing is made that is not used
        assert await said(tools, ("count", {"by": 1})) == ["12"]
        assert await said(tools, ("count", {"by": 2})) == ["16"]
        assert await tools.rewards() == {"count": 1.0}
    assert counting.log == ["create", "release"]
    assert counting.values == {}
    assert tools.step_rewards == [0.5, 0.5]


async def test_rollouts_do_not_share_an_instance_and_calls_of_one_do() -> None:
    counting = Counting()
    box = ToolBox([counting])
    async with box.session() as one, box.session() as other:
        first, second = await asyncio.gather(
            said(one, *[("count", {"by": 1})] * 3), said(other, ("count", {"by": 5}))
        )
    assert (sorted(first), second) == (["1", "2", "3"], ["5"])
    assert Counter(counting.log) == {"create": 2, "release": 2}


@pytest.mark.parametrize("error", [RuntimeError("agent died"), asyncio.CancelledError()])
async def test_what_was_made_is_released_however_the_rollout_ends(error: BaseException) -> None:
    counting = Counting()

    async def rollout() -> None:
        async with ToolBox([counting]).session() as tools:
            await said(tools, ("count", {"by": 1}))
            raise error

    with pytest.raises(type(error)):
        await rollout()
    assert counting.log == ["create", "release"]


async def test_a_task_chooses_among_the_tools() -> None:
    box = ToolBox([weather, Counting()])
    schema = Counting().tool_schema
    schema = {**schema, "function": {**schema["function"], "description": "The task's words."}}
    async with box.session({"tools": [schema]}) as tools:
        assert tools.schemas == [schema]
        (message,) = await said(tools, ("weather", {"city": "Patan"}))
        assert message == "error: there is no tool 'weather'; there is count"
    with pytest.raises(ToolConfigError, match=r"names radar, which .* it has weather, count"):
        box.session({"tools_kwargs": {"radar": {}}})


# ── what the model is told ───────────────────────────────────────────────────────────────────────


def crash() -> str:
    raise KeyError("city")


class NoText(Exception):  # noqa: N818 - a name as foreign code has it
    def __str__(self) -> str:
        return self.message


def speechless() -> str:
    raise NoText


def endless() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


def by_plate(plate: Annotated[str, AfterValidator({"A": "Patan"}.__getitem__)]) -> str:
    return plate


async def leave() -> str:
    sys.exit("no such city")  # as argparse does


async def panic() -> str:
    raise PanicError("no such city")


def refuse() -> str:
    raise ToolError("no such city")


RELEASED = threading.Event()


def wait() -> str:
    RELEASED.wait(60)
    return "late"


def now() -> str:
    return "now"


async def hang() -> str:
    await asyncio.Event().wait()
    return "never"


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "message"),
    [
        ("whether", {}, "unknown_tool", "error: there is no tool 'whether'; there is weather"),
        ("weather", "{city", "arguments", "error: the arguments are no JSON"),
        ("weather", "[]", "arguments", "error: the arguments are no JSON object"),
        ("weather", "9" * 5000, "arguments", "error: the arguments are no JSON"),
        ("weather", "[" * 200_000, "arguments", "error: the arguments are no JSON"),
        ("weather", {}, "arguments", "error: wrong arguments: city: Field required"),
        ("weather", {"city": "x", "unit": "K"}, "arguments", "unit: Input should be 'C' or 'F'"),
        ("weather", {"city": "x", "when": 1}, "arguments", "when: Extra inputs"),
        ("crash", "", "failed", "error: KeyError: 'city'"),
        ("speechless", "", "failed", "error: NoText"),
        ("endless", {}, "failed", "error: ValueError: Circular reference"),
        ("by_plate", {"plate": "B"}, "failed", "error: KeyError: 'B'"),
        ("leave", {}, "failed", "error: SystemExit: no such city"),
        ("panic", {}, "failed", "error: PanicError: no such city"),
        ("refuse", {}, "refused", "error: no such city"),
        ("hang", {}, "timeout", "error: hang gave no result within 0.05 s"),
    ],
)
async def test_every_failure_is_told_to_the_model(
    name: str, arguments: Any, kind: str, message: str
) -> None:
    slow = ToolConfig(class_name=f"{__name__}.hang", timeout_s=0.05)
    box = ToolBox([weather, crash, speechless, endless, by_plate, leave, panic, refuse, slow])
    async with box.session() as tools:
        (content,) = await said(tools, (name, arguments))
    assert message in content
    assert tools.errors == {kind: 1}


async def test_arguments_are_checked_against_a_schema_that_was_given() -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tool = FunctionTool(weather, {"name": "weather", "parameters": parameters})
    async with ToolBox([tool]).session() as tools:
        assert json.loads((await said(tools, ("weather", {"city": "Patan"})))[0])["days"] == 1
        assert await said(tools, ("weather", {}), ("weather", {"city": 1})) == [
            "error: wrong arguments: 'city' is a required property",
            "error: wrong arguments: city: 1 is not of type 'string'",
        ]


async def test_arguments_are_converted_as_the_signature_says() -> None:
    async with ToolBox([weather]).session() as tools:
        (content,) = await said(tools, ("weather", {"city": "Patan", "days": "3"}))
    assert json.loads(content) == {"city": "Patan", "unit": "C", "days": 3}


async def test_calls_of_one_reply_run_at_once_and_keep_their_order() -> None:
    arrived = asyncio.Barrier(3)

    async def meet(who: str) -> str:
        await arrived.wait()  # returns only if all three run at the same time
        return who

    async with ToolBox([meet]).session() as tools:
        messages = await tools.call(calls(*[("meet", {"who": w}) for w in "abc"]))
    assert messages == [
        {"role": "tool", "tool_call_id": f"call_{i}", "content": w} for i, w in enumerate("abc")
    ]


async def test_calls_beyond_the_limit_are_answered_too() -> None:
    box = ToolBox([weather], ToolBoxConfig(max_parallel_calls=1))
    async with box.session() as tools:
        first, second = await said(tools, *[("weather", {"city": "Patan"})] * 2)
    assert "Patan" in first
    assert second == "error: only 1 calls of one reply are run"


async def test_a_sync_function_that_hangs_does_not_hold_up_the_others() -> None:
    box = ToolBox([now, ToolConfig(class_name=f"{__name__}.wait", timeout_s=0.05)])
    async with box.session() as tools:
        first, second = await said(tools, ("wait", {}), ("now", {}))
    RELEASED.set()
    assert first.startswith("error: wait gave no result")
    assert second == "now"


async def test_a_tool_that_is_unavailable_ends_the_rollout_and_the_other_calls() -> None:
    cancelled = asyncio.Event()

    async def broken() -> str:
        raise ToolUnavailableError("the index is gone")

    async def slow() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return ""

    async with ToolBox([broken, slow]).session() as tools:
        with pytest.raises(ToolUnavailableError, match="the index is gone"):
            await said(tools, ("slow", {}), ("broken", {}))
    assert cancelled.is_set()


async def test_a_reward_that_fails_is_missing_not_zero() -> None:
    class Broken(Counting):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            raise KeyError("target")

    async with ToolBox([Broken()]).session() as tools:
        await said(tools, ("count", {"by": 1}))
        with pytest.raises(ToolUnavailableError, match="calc_reward of tool 'count'"):
            await tools.rewards()


async def test_an_instance_that_cannot_be_made_is_told_and_tried_again() -> None:
    class Flaky(Counting):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
            self.log.append("try")
            if len(self.log) == 1:
                raise OSError("disc full")
            return await super().create(instance_id, **kwargs)

    flaky = Flaky()
    async with ToolBox([flaky]).session() as tools:
        assert await said(tools, ("count", {"by": 1})) == ["error: OSError: disc full"]
        assert await tools.rewards() == {}
        assert await said(tools, ("count", {"by": 1})) == ["1"]
    assert flaky.log == ["try", "try", "create", "release"]


async def test_a_long_result_is_cut_in_the_middle() -> None:
    def long() -> str:
        return "X" * 50 + "Y" * 50

    async with ToolBox([long], ToolBoxConfig(max_response_chars=16)).session() as tools:
        (content,) = await said(tools, ("long", {}))
    assert content == "X" * 8 + "\n…(84 characters left out)…\n" + "Y" * 8


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────


class Policy:
    """Answers the n-th call with the n-th reply, the last one over again; keeps the requests."""

    def __init__(self, *replies: str | list[dict[str, Any]], finish: str = "stop") -> None:
        self.replies = replies
        self.finish = finish
        self.requests: list[dict[str, Any]] = []
        self.noted: list[dict[str, Any]] = []
        """Metadata of the trajectory."""
        self.base_url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/register_trajectory"):
            self.noted.append((await request.json())["metadata"])
            return web.json_response({})
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(await request.json())
        message: dict[str, Any] = {"role": "assistant", "content": reply}
        if isinstance(reply, list):
            message = {"role": "assistant", "content": None, "tool_calls": reply}
        choice = {"index": 0, "message": message, "finish_reason": self.finish}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy"}
        return web.json_response({**head, "choices": [choice]})


@asynccontextmanager
async def serving(policy: Policy) -> AsyncIterator[Policy]:
    async with serving_posts("/t/p/v1/{path:.*}", policy.answer) as address:
        policy.base_url = f"{address}/t/p"
        yield policy


async def play(
    policy: Policy, task: Mapping[str, Any], tools: Any = (weather,), **settings: Any
) -> Any:
    agent = ToolAgent(tools, **settings)
    try:
        async with serving(policy):
            return await agent.run(task, policy.base_url, "key")
    finally:
        await agent.aclose()


TASK = {"question": "Is it warm in Patan?"}


async def test_the_loop_runs_tools_until_the_policy_answers() -> None:
    policy = Policy(calls(("weather", {"city": "Patan"}), ("weather", {})), "Yes.")
    run = await play(policy, TASK, system="Be brief.", sampling={"temperature": 0.5})
    assert (run.answer, run.stop, run.turns) == ("Yes.", "answer", 2)
    assert run.calls == {"weather": 2}
    assert run.errors == {"arguments": 1}
    assert policy.noted == []  # they gave no reward
    first, second = policy.requests
    assert first["temperature"] == 0.5
    assert first["tools"] == [FunctionTool(weather).tool_schema]
    assert [m["role"] for m in second["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert second["messages"][:2] == first["messages"]
    assert run.messages == [*second["messages"], {"role": "assistant", "content": "Yes."}]


async def test_a_result_that_is_no_text_is_shown_all_the_same() -> None:
    """Names of files may be any bytes."""

    def files() -> str:
        return os.fsdecode(b"a\xff")

    def fails() -> str:
        raise ValueError(files())

    policy = Policy(calls(("files", {}), ("fails", {})), "Fine.")
    run = await play(policy, TASK, [files, fails])
    assert run.answer == "Fine."
    _, second = policy.requests
    said = [m["content"] for m in second["messages"] if m["role"] == "tool"]
    assert said == ["a?", "error: ValueError: a?"]


async def test_figures_of_a_tool_that_are_no_json_lose_no_rollout() -> None:
    def counts() -> tuple[str, None, dict[str, Any]]:
        return "two", None, {"share": float("nan"), "of": 2**70, "name": "a\udcff", "n": 2}

    policy = Policy(calls(("counts", {})), "Fine.")
    run = await play(policy, TASK, [counts])
    assert run.answer == "Fine."
    assert policy.noted == [
        {
            "tool_rewards": [],
            "rollout_reward_scores": {},
            "tool_metrics": {"counts": [{"share": None, "of": str(2**70), "name": "a?", "n": 2}]},
        }
    ]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400])
async def test_a_tools_reward_that_is_none_is_a_failure_that_the_model_is_told(
    reward: float,
) -> None:
    def pays() -> tuple[str, float]:
        return "done", reward

    policy = Policy(calls(("pays", {})), "Fine.")
    run = await play(policy, TASK, [pays])
    assert run.answer == "Fine."
    assert run.errors == {"failed": 1}
    assert policy.noted == []


async def test_the_loop_ends_after_its_last_turn_and_runs_no_call_in_vain() -> None:
    counting = Counting()
    policy = Policy(calls(("count", {"by": 1})))
    run = await play(policy, TASK, [counting], max_turns=3)
    assert (run.stop, run.turns, run.calls, run.step_rewards) == (
        "max_turns",
        3,
        {"count": 2},
        [0.5, 0.5],
    )
    assert run.rewards == {"count": 0.0}
    assert run.metrics == {"count": [{"by": 1}, {"by": 1}]}
    assert policy.noted == [
        {
            "tool_rewards": [0.5, 0.5],
            "rollout_reward_scores": {"count": 0.0},
            "tool_metrics": {"count": [{"by": 1}, {"by": 1}]},
        }
    ]
    assert counting.log == ["create", "release"]


async def test_a_reply_that_was_cut_off_is_no_answer() -> None:
    run = await play(Policy("Yes, it", finish="length"), TASK)
    assert (run.answer, run.stop) == ("Yes, it", "length")


async def test_a_conversation_is_continued_and_without_tools_none_are_sent() -> None:
    messages = [{"role": "user", "content": "hello"}]
    policy = Policy("Hi.")
    run = await play(policy, {"messages": messages}, [])
    assert policy.requests[0]["messages"] == messages == [{"role": "user", "content": "hello"}]
    assert "tools" not in policy.requests[0]
    assert run.answer == "Hi."


def test_a_loop_without_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="max_turns is 0"):
        ToolAgent([weather], max_turns=0)


# ── the examples ─────────────────────────────────────────────────────────────────────────────────


async def test_the_example_agent_uses_all_three_tools_and_leaves_the_score_to_the_trainer() -> None:
    policy = Policy(
        calls(
            ("calculator", {"expression": "6 * 7"}),
            ("search", {"query": "Which stepwell is in Patan?"}),
            ("python", {"code": "sum(range(10))"}),
        ),
        r"\boxed{42}",
    )
    try:
        async with serving(policy):
            assert await example_agent({"question": "6 * 7 ="}, policy.base_url, "key") is None
    finally:
        await helper().aclose()
        helper.cache_clear()
    results = [m["content"] for m in policy.requests[1]["messages"] if m["role"] == "tool"]
    assert results[0] == "42"
    assert results[1].startswith("[rani-ki-vav] Rani ki Vav")
    assert results[2] == "45\n"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(12 + 34) * 5 / 2", "115.0"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os')", "error: not an arithmetic expression"),
        ("(" * 500, "error: "),
        ("9" * 2000, "error: wrong arguments: expression: String should have at most 1000"),
    ],
)
async def test_the_calculator_computes_or_says_why_not(expression: str, result: str) -> None:
    async with ToolBox([calculator]).session() as tools:
        (content,) = await said(tools, ("calculator", {"expression": expression}))
    assert content.startswith(result)


CORPUS = Path(__file__).parents[2] / "examples" / "tools" / "corpus.jsonl"


async def test_search_finds_by_words_and_is_paid_for_the_documents_the_task_names() -> None:
    task = {
        "tools_kwargs": {"search": {"create_kwargs": {"relevant": ["chand-baori", "qanat", "x"]}}}
    }
    async with ToolBox([Search({"corpus": CORPUS, "k": 1})]).session(task) as tools:
        first, second, third = await said(
            tools,
            ("search", {"query": "3,500 steps in Rajasthan"}),
            ("search", {"query": "sloping underground channel"}),
            ("search", {"query": "xylophone the of"}),
        )
        assert first.startswith("[chand-baori]")
        assert second.startswith("[qanat]")
        assert third == "no document matches"
        assert await tools.rewards() == {"search": pytest.approx(2 / 3)}


async def test_search_without_named_documents_has_no_opinion(tmp_path: Path) -> None:
    async with ToolBox([Search({"corpus": CORPUS})]).session() as tools:
        (content,) = await said(tools, ("search", {"query": "stepwell"}))
        assert content.count("[") == 3
        assert await tools.rewards() == {}
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ToolConfigError, match="holds no documents"):
        Search({"corpus": tmp_path / "empty.jsonl"})


# ── the sandbox ──────────────────────────────────────────────────────────────────────────────────


async def ran(code: str, **limits: Any) -> str:
    box = ToolBox([PythonSandbox({"wall_s": 60, **limits})], ToolBoxConfig(timeout_s=120))
    async with box.session() as tools:
        (content,) = await said(tools, ("python", {"code": code}))
        assert isinstance(content, str)
        return content


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(1)\n1 + 1", "1\n2\n"),
        ("x = 3", "(no output)"),
        ("def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\nf(10)", "55\n"),
        ("if __name__ == '__main__': print('main')", "main\n"),
        ("print(input())", "error: exit status 1"),
        ("1 / 0", "error: exit status 1"),
        ("raise SystemExit(3)", "error: exit status 3"),
        ("(", "error: exit status 1"),
        ("import os\nos.write(1, bytes(range(128, 192)))", "\N{REPLACEMENT CHARACTER}" * 64 + "64"),
    ],
)
async def test_python_runs_and_the_last_value_is_shown(code: str, output: str) -> None:
    assert (await ran(code)).startswith(output)


async def test_python_shows_where_the_code_failed() -> None:
    content = await ran("x = 1\ny = x / 0")
    assert '"<code>", line 2' in content
    assert "ZeroDivisionError" in content


async def test_python_keeps_files_within_a_rollout_and_deletes_them_after() -> None:
    sandbox = PythonSandbox({"wall_s": 60})
    task = {"tools_kwargs": {"python": {"create_kwargs": {"files": {"../in.txt": "seven"}}}}}
    async with ToolBox([sandbox], ToolBoxConfig(timeout_s=120)).session(task) as tools:
        await said(tools, ("python", {"code": "open('a', 'w').write(open('in.txt').read())"}))
        assert await said(tools, ("python", {"code": "print(open('a').read())"})) == ["seven\n"]
        (folder,) = sandbox._folders.values()
        assert sorted(os.listdir(folder)) == ["a", "in.txt"]
    assert not folder.exists()


async def test_python_knows_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert await ran("import os\nsorted(set(os.environ) - {'LC_CTYPE'})") == (
        "['HOME', 'LANG', 'PATH']\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        ("while True: pass", {"cpu_s": 1}, "error: more than 1 s of CPU time; killed"),
        ("import time; time.sleep(600)", {"wall_s": 0.5}, "error: not finished within 0.5 s"),
        ("x = bytearray(2 << 30)", {"memory_mb": 256}, "error: exit status 1\n"),
        ("open('f', 'w').write('x' * (2 << 20))", {"file_mb": 1}, "error: "),
        ("[open('/dev/null') for _ in range(99)]", {"files": 32}, "error: exit status 1"),
        ("while True: print('x' * 999)", {"output_chars": 5000}, "error: more than 5000 char"),
    ],
)
async def test_python_is_held_to_its_limits(
    code: str, limits: dict[str, Any], message: str
) -> None:
    assert (await ran(code, **limits)).startswith(message)


async def test_pythons_output_is_counted_in_characters() -> None:
    assert await ran("print('é' * 4999)", output_chars=5000) == "é" * 4999 + "\n"
    assert (await ran("print('é' * 5000)", output_chars=5000)).startswith("error: more than 5000")
    flood = "import os\nwhile True: os.write(1, bytes([128]) * 999)"
    assert (await ran(flood, output_chars=5000)).startswith("error: more than 5000")


@pytest.mark.parametrize("kwargs", [{}, {"files": {"": "a folder's name"}}])
async def test_python_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    task = {"tools_kwargs": {"python": {"create_kwargs": kwargs}}}
    deep = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    box = ToolBox([PythonSandbox({"wall_s": 60})], ToolBoxConfig(timeout_s=120))
    async with box.session(task) as tools:
        (content,) = await said(tools, ("python", {"code": deep}))
    assert ("error: IsADirectoryError" in content) == bool(kwargs)
    assert os.listdir(tmp_path) == []


async def test_python_cannot_use_more_memory_than_allowed() -> None:
    assert "MemoryError" in await ran("x = bytearray(2 << 30)", memory_mb=256)
    assert await ran("len(bytearray(64 << 20))", memory_mb=512) == f"{64 << 20}\n"


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("leave", ["pass", "time.sleep(600)"])
async def test_python_leaves_no_process_behind(
    leave: str, namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not namespaces:  # then the process group is all there is to kill by
        monkeypatch.setattr("stepwell.trainer.sandbox.namespaces_work", lambda: False)
    marker = f"stepwell-test-{os.getpid()}-{leave[:4]}-{namespaces}"
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {marker!r}],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"{leave}\n"
    )
    content = await ran(code, wall_s=60 if leave == "pass" else 5)
    assert ("killed" in content) == (leave != "pass")
    assert await none_left(marker)


async def none_left(marker: str) -> bool:
    for _ in range(500):
        if not any(marker in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])):
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_call_that_is_cancelled_takes_its_process_along() -> None:
    sandbox = PythonSandbox({"wall_s": 600})
    code = "import time\nopen('up', 'w')\ntime.sleep(600)"
    await ran("1")  # with the first child the guard is started, and stays
    others = {p.pid for p in psutil.Process().children(recursive=True)}  # of other tests
    async with ToolBox([sandbox], ToolBoxConfig(timeout_s=600)).session() as tools:
        running = asyncio.create_task(tools.call(calls(("python", {"code": code}))))
        for _ in range(6000):
            if any((f / "up").exists() for f in sandbox._folders.values()):
                break
            await asyncio.sleep(0.01)
        mine = {p.pid for p in psutil.Process().children(recursive=True)} - others
        assert mine
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    for pid in mine:
        assert await gone(pid)


async def test_python_has_no_network_where_namespaces_are_to_be_had() -> None:
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    code = f"import socket\nsocket.create_connection(({host!r}, {port}), 5).close()\nprint('open')"
    try:
        assert await ran(code, network=True) == "open\n"
        closed = await ran(code)
    finally:
        await runner.cleanup()
    assert ("error: exit status 1" in closed) == namespaces_work()


async def test_python_runs_with_rlimits_alone_where_there_are_no_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stepwell.trainer.sandbox.namespaces_work", lambda: False)
    assert await ran("print(6 * 7)") == "42\n"
    assert (await ran("while True: pass", cpu_s=1)).startswith("error: more than 1 s of CPU")
    with pytest.raises(ToolUnavailableError, match="permits no user namespaces"):
        await ran("1", require_isolation=True)

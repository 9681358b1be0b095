"""Tools of the shape of verl's `BaseTool`, named in verl's file of tools, run as they are."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import pytest

from stepwell.trainer.config import JsonlSource
from stepwell.trainer.data import PromptSource
from stepwell.trainer.errors import RolloutError, ToolConfigError, ToolUnavailableError
from stepwell.trainer.rollout.agents import load_agent
from stepwell.trainer.tools import ToolAgent, ToolBox
from stepwell.trainer.tools.verl import VerlTool
from tests.trainer import verl_tools
from tests.trainer.test_tools import Policy, calls, said, serving

FILE = """
tools:
  - class_name: tests.trainer.verl_tools.{name}
    config:
      type: {kind}
      limit: 3
    tool_schema:
      type: function
      function:
        name: count
        description: Counts.
        parameters:
          type: object
          properties:
            by: {{ type: string, description: how far, item: {{ type: string }} }}
          required: [by]
"""
"""In the form of verl's examples, with the slip of its search tool (`item`)."""


def box(tmp_path: Path, name: str = "Counter", kind: str = "native") -> ToolBox:
    path = tmp_path / "tool_config.yaml"
    path.write_text(FILE.format(name=name, kind=kind))
    return ToolBox.from_yaml(path)


def tool_of(made: ToolBox, name: str = "count") -> Any:
    return cast(VerlTool, made._tools[name])._tool


def task(**kwargs: Any) -> dict[str, Any]:
    """A task as verl's rows have it."""
    return {"question": "q", "metadata": {"index": 0, "tools_kwargs": {"count": kwargs}}}


KWARGS = {
    "create_kwargs": {"start": 10},
    "execute_kwargs": {"factor": 2},
    "calc_reward_kwargs": {"target": 16},
    "release_kwargs": {"why": "over"},
}


async def test_the_stages_get_the_rows_arguments_and_the_schema_stays_as_written(
    tmp_path: Path,
) -> None:
    made = box(tmp_path)
    (schema,) = made.schemas
    assert schema["function"]["parameters"]["properties"]["by"]["item"] == {"type": "string"}
    async with made.session(task(**KWARGS)) as tools:
        assert await said(tools, ("count", {"by": 1}), ("count", {"by": "2"})) == [
            "now 12",
            "now 16",
        ], "arguments are the tool's to check, as in verl"
        assert tools.step_rewards == [0.1, 0.2]
        assert tools.metrics == {"count": [{"by": 1}, {"by": 2}]}
        assert await tools.rewards() == {"count": 1.0}
    tool = tool_of(made)
    assert tool.config == {"type": "native", "limit": 3}
    assert tool.values == {}
    assert tool.log == [
        ("create", {"create_kwargs": {"start": 10}}),
        ("execute", {"by": 1}, {"factor": 2}),
        ("execute", {"by": "2"}, {"factor": 2}),
        ("release", {"why": "over"}),
    ]


async def test_a_tool_of_a_newer_verl_gets_create_kwargs_whole_and_says_its_text(
    tmp_path: Path,
) -> None:
    made = box(tmp_path, "Newer")
    async with made.session(task(create_kwargs={"start": 5})) as tools:
        assert await said(tools, ("count", {"by": "2"}), ("count", {})) == ["now 7", "now 7"]
        assert await tools.rewards() == {"count": 0.0}
    async with made.session() as tools:
        with pytest.raises(ToolUnavailableError, match="'count' returned images, which are not"):
            await said(tools, ("count", {"show": 1}))


async def test_a_tool_may_say_its_own_schema(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text("tools: [{class_name: tests.trainer.verl_tools.Base, config: {type: native}}]")
    made = ToolBox.from_yaml(path)
    assert made.schemas[0]["function"]["description"] == "Does nothing."
    async with made.session() as tools:
        assert await said(tools, ("base", {})) == ["Updated the tool state."]


async def test_a_tool_that_a_row_names_is_asked_for_its_reward_also_if_it_was_not_used(
    tmp_path: Path,
) -> None:
    """verl's `reward_scores` has every tool of `tools_kwargs`."""
    made = box(tmp_path)
    kwargs = {**KWARGS, "calc_reward_kwargs": {"target": 10}}
    async with made.session(task(**kwargs)) as tools:
        assert await tools.rewards() == {"count": 1.0}
    assert [entry[0] for entry in tool_of(made).log] == ["create", "release"]
    async with made.session({"question": "q"}) as tools:
        assert await tools.rewards() == {}


async def test_a_row_without_arguments_for_a_tool_may_say_null(tmp_path: Path) -> None:
    row = {"question": "q", "metadata": {"tools_kwargs": {"count": None, "search": None}}}
    async with box(tmp_path).session(row) as tools:
        assert await said(tools, ("count", {"by": 1})) == ["now 1"]


async def test_an_instance_without_an_id_ends_the_rollout(tmp_path: Path) -> None:
    async with box(tmp_path, "NoId").session() as tools:
        with pytest.raises(ToolUnavailableError, match="create of tool 'count' returned None"):
            await said(tools, ("count", {"by": 1}))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Half", "native", "not create, calc_reward, release; derive it from verl's BaseTool"),
        ("Needs", "native", "verl's agent_data is not to be had here"),
        ("Counter", "mcp", "config.type is 'mcp'; only 'native' is known"),
        ("Absent", "native", "cannot be imported"),
    ],
)
def test_a_tool_that_cannot_run_is_refused_before_anything_starts(
    tmp_path: Path, name: str, kind: str, message: str
) -> None:
    with pytest.raises(ToolConfigError, match=message):
        box(tmp_path, name, kind)


def test_a_schema_that_verl_would_refuse_is_refused_by_its_field() -> None:
    with pytest.raises(ToolConfigError, match=r"tool_schema: function.description: Field required"):
        VerlTool(verl_tools.Counter, {}, {"type": "function", "function": {"name": "count"}})


def test_a_base_tool_without_a_schema_says_so() -> None:
    with pytest.raises(ValueError, match="tool_schema is missing"):
        verl_tools.Newer({}, None)


async def test_the_file_is_an_agent_by_itself(tmp_path: Path) -> None:
    """`rollout.agent=tool_config.yaml`: verl's `multi_turn.tool_config_path`."""
    path = tmp_path / "tool_config.yaml"
    path.write_text(FILE.format(name="Counter", kind="native") + "max_turns: 2\n")
    agent = cast(ToolAgent, load_agent(str(path)))
    policy = Policy(calls(("count", {"by": 6})))
    async with serving(policy):
        assert await agent(task(**KWARGS), policy.base_url, "key") is None  # type: ignore[func-returns-value]
    await agent.aclose()
    assert len(policy.requests) == 2, "max_turns of the file"
    assert policy.requests[1]["messages"][-1]["content"] == "now 22"
    assert policy.noted == [
        {
            "tool_rewards": [0.6],
            "rollout_reward_scores": {"count": 0.0},
            "tool_metrics": {"count": [{"by": 6}]},
        }
    ]


def test_a_file_of_tools_that_cannot_be_read_is_no_agent(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text("tools: [{class_name: no.such}]")
    with pytest.raises(RolloutError, match=r"rollout.agent is .*tools.yaml.*cannot be imported"):
        load_agent(str(path))


def test_rows_that_need_arguments_and_have_none_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        dedent(
            """\
            {"question": "a", "answer": "1", "metadata": {"need_tools_kwargs": true}}
            {"question": "b", "answer": "2", "metadata": {"need_tools_kwargs": false}}
            """
        )
    )
    PromptSource(JsonlSource(kind="jsonl", path=path))
    assert "1 of 2 rows say need_tools_kwargs and have no tools_kwargs; the first is" in caplog.text
    assert "rows.jsonl:1" in caplog.text

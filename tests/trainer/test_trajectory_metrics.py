"""Metrics of trajectories: each figure by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stepwell.datapool.types import Group, Step
from stepwell.trainer.trajectory_metrics import tool_use, trajectory_metrics
from tests.builders import group, step


def turn(
    prompt: int,
    response: int,
    index: int = 0,
    tool_calls: int | None = None,
    messages: list[dict[str, Any]] | None = None,
    **fields: Any,
) -> Step:
    """A Step of so many tokens."""
    said = {"tool_calls": tool_calls, "messages": messages}
    metadata = {k: v for k, v in said.items() if v is not None}
    return step(range(prompt), range(response), index=index, metadata=metadata, **fields)


def sourced(*trajectories: tuple[Step, ...], source: str | None = None) -> Group:
    task = {} if source is None else {"data_source": source}
    return group(*trajectories, metadata={"task": task})


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def test_lengths_and_turns_are_of_whole_trajectories() -> None:
    two_calls = (turn(10, 3), turn(20, 5, 1, reward=1.0, finish_reason="length"))
    one_call = (turn(4, 2, reward=0.0, finish_reason="stop"),)
    metrics = trajectory_metrics([sourced(two_calls), sourced(one_call)])
    assert {k: v for k, v in metrics.items() if "reward" not in k} == {
        "prompt_length/mean": 7.0,
        "prompt_length/min": 4.0,
        "prompt_length/max": 10.0,
        "response_length/mean": 5.0,
        "response_length/min": 2.0,
        "response_length/max": 8.0,
        "response_length/clip_ratio": 0.5,
        "num_turns/mean": 1.5,
        "num_turns/min": 1.0,
        "num_turns/max": 2.0,
    }


def test_rewards_have_a_spread_and_a_mean_for_each_data_source() -> None:
    groups = [
        sourced((turn(1, 1, reward=1.0),), (turn(1, 1, reward=0.0),), source="gsm8k"),
        sourced((turn(1, 1, reward=-1.0),), (turn(1, 1),), source="math"),
        sourced((turn(1, 1, reward=4.0),)),
    ]
    metrics = trajectory_metrics(groups)
    assert {k: v for k, v in metrics.items() if "reward" in k} == {
        "reward/mean": 1.0,
        "reward/min": -1.0,
        "reward/max": 4.0,
        "reward/std": pytest.approx(3.5**0.5),  # (0 + 1 + 4 + 9) / 4: of the population
        "reward/gsm8k/mean": 0.5,
        "reward/math/mean": -1.0,  # a missing reward is no 0
        "reward/unknown/mean": 4.0,
    }


def test_data_sources_need_not_be_texts() -> None:
    sources: list[Any] = ["gsm8k", 3, ["a", "b"], 3]
    groups = [sourced((turn(1, 1, reward=float(i)),), source=s) for i, s in enumerate(sources)]
    metrics = trajectory_metrics(groups)
    assert {k: v for k, v in metrics.items() if k.count("/") == 2} == {
        "reward/gsm8k/mean": 0.0,
        "reward/3/mean": 2.0,
        "reward/['a', 'b']/mean": 2.0,
    }


def test_what_nothing_was_scored_of_has_no_reward() -> None:
    assert not [k for k in trajectory_metrics([sourced((turn(1, 1),))]) if "reward" in k]
    assert trajectory_metrics([]) == {}


def test_tools_are_told_of_where_the_model_was_offered_some() -> None:
    offered = (
        turn(1, 1, tool_calls=2),
        turn(1, 1, 1, tool_calls=1, messages=[result("7"), result("error: no tool 'x'")]),
        turn(1, 1, 2, tool_calls=0, messages=[result("Error: timeout"), {"role": "assistant"}]),
    )
    groups = [sourced(offered), sourced((turn(1, 1, tool_calls=0),)), sourced((turn(1, 1),))]
    metrics = trajectory_metrics(groups)
    assert metrics["tool_calls/mean"] == 1.5  # 3 and 0
    assert metrics["tool_errors"] == pytest.approx(2 / 3)
    assert tool_use(groups) == pytest.approx(1 / 3)
    without = trajectory_metrics(groups[2:])
    assert "tool_calls/mean" not in without
    assert "tool_errors" not in without
    assert tool_use(groups[2:]) is None


def test_an_error_with_a_picture_is_one_too() -> None:
    shown = {"type": "image", "digest": "d", "width": 1, "height": 1, "n_tokens": 1}
    said = [[{"type": "text", "text": text}, shown] for text in ("Error", "no error")]
    results = [{**result(""), "content": content} for content in (*said, [shown], "error: no")]
    metrics = trajectory_metrics([sourced((turn(1, 1, messages=results),))])
    assert metrics["tool_errors"] == 0.5


def test_a_figure_of_a_tool_beyond_all_floats_is_none() -> None:
    (only,) = sourced((turn(1, 1),)).trajectories
    told = {"tool_metrics": {"search": [{"hits": 3, "size": 10**400}]}}
    metrics = trajectory_metrics([group(replace(only, metadata=told))])
    assert {k: v for k, v in metrics.items() if "tool" in k} == {"tool_metrics/search/hits": 3.0}


def test_what_a_steps_metadata_says_in_another_form_is_left_out() -> None:
    """Steps may be submitted by anybody, with metadata of any types under the gateway's names."""
    calls = [{"id": "c", "function": {"name": "search", "arguments": "{}"}}]
    odd = step(range(1), range(1), metadata={"tool_calls": calls, "messages": 3})
    groups = [sourced((odd,)), sourced((turn(1, 1, tool_calls=2, messages=[result("7")]),))]
    metrics = trajectory_metrics(groups)
    assert metrics["tool_calls/mean"] == 2.0
    assert metrics["tool_errors"] == 0.0
    assert tool_use(groups) == 0.5
    assert tool_use(groups[:1]) is None

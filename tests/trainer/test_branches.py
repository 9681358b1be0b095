"""Calls that a harness makes beside its work are told from it, and not trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from stepwell.datapool.types import DUPLICATE_OF, Step
from stepwell.trainer.algorithms.branches import answer, kinds, of_kinds
from stepwell.trainer.config import RolloutConfig

BASE = 100


def tree(*calls: tuple[str, int | None] | tuple[str, int | None, dict[str, Any]]) -> list[Step]:
    """Steps in order: the tree's name (for a new one), or the step that is gone on from."""
    steps: list[Step] = []
    for i, (name, parent, *more) in enumerate(calls):
        own = [BASE + 10 * i, ord(name)]
        before = [] if parent is None else steps[parent].token_ids.tolist()
        how: dict[str, Any] = {"tool_calls": 1, **(more[0] if more else {})}
        finish, n = how.pop("finish", "stop"), how.pop("n", 3)
        steps.append(
            Step(
                prompt_ids=[*before, *own],
                response_ids=[BASE + 10 * i + 5] * n,
                trajectory_uid="t",
                prompt_uid="p",
                step_index=i,
                parent_index=parent,
                finish_reason=finish,
                metadata={k: v for k, v in how.items() if v is not None},
            )
        )
    return steps


NO_TOOLS = {"tool_calls": None}


def test_a_linear_conversation_is_main() -> None:
    assert kinds(tree(("a", None), ("a", 0), ("a", 1))) == ["main"] * 3


def test_titles_summaries_and_probes_are_side_calls_wherever_they_come() -> None:
    probe = {"tool_calls": None, "n": 1, "finish": "length"}
    steps = tree(
        ("q", None, probe), ("t", None, NO_TOOLS), ("a", None), ("s", None, NO_TOOLS), ("a", 2)
    )
    assert kinds(steps) == ["side", "side", "main", "side", "main"]


def test_the_answer_is_the_last_reply_of_main_where_side_calls_are_not_trained() -> None:
    steps = tree(("a", None), ("b", None), ("a", 0), ("b", 1), ("t", None, NO_TOOLS))
    assert kinds(steps) == ["main", "sub_agent", "main", "sub_agent", "side"]
    assert answer(steps, ("main", "sub_agent")) == answer(steps, ["main"]) == 2
    assert answer(steps, None) == answer(steps, ("main", "sub_agent", "side")) == 4
    lost = replace(steps[2], metadata={**steps[2].metadata, DUPLICATE_OF: 0})
    assert answer([*steps[:2], lost, *steps[3:]], ["main"]) == 0
    only = tree(("t", None, NO_TOOLS), ("s", None, NO_TOOLS))
    assert answer(only, ["main"]) == 1, "all that it did is main"


def test_a_sub_agent_works_while_main_goes_on_and_a_compacted_conversation_is_main() -> None:
    steps = tree(
        ("a", None), ("b", None), ("b", 1), ("a", 0), ("c", None), ("d", None), ("c", 4), ("a", 0)
    )
    assert kinds(steps)[:4] == ["main", "sub_agent", "sub_agent", "main"]
    steps = tree(("a", None), ("a", 0), ("c", None), ("c", 2))
    assert kinds(steps) == ["main"] * 4


def test_without_tools_anywhere_there_is_no_side_call_but_a_probe() -> None:
    steps = tree(("a", None, NO_TOOLS), ("b", None, NO_TOOLS), ("b", 1, NO_TOOLS))
    assert "side" not in kinds(steps)
    probes = tree(("q", None, {"n": 1, "finish": "length"}))
    assert kinds(probes) == ["main"], "all that it did"


def test_the_mask_is_over_tokens_and_none_where_all_are_trained() -> None:
    steps = tree(("t", None, NO_TOOLS), ("a", None, {"n": 2}))
    lengths = torch.tensor([3, 2])
    mask = of_kinds(steps, lengths, ("main", "sub_agent"))
    assert mask is not None
    assert mask.tolist() == [0, 0, 0, 1, 1]
    assert of_kinds(steps, lengths, ("main", "side")) is None


def test_side_calls_of_harnesses_and_traffic_are_left_out_by_default() -> None:
    everything = ("main", "sub_agent", "side")
    assert RolloutConfig(agent="a:b").trained_branches == everything
    assert RolloutConfig().trained_branches == ("main", "sub_agent")
    assert RolloutConfig.model_validate({"harness": "pi"}).trained_branches == everything[:2]
    for given, kept in (("all", everything), ("main", ("main",)), (["side"], ("side",))):
        config = RolloutConfig.model_validate({"train_branches": given})
        assert config.trained_branches == kept
    with pytest.raises(ValidationError):
        RolloutConfig.model_validate({"train_branches": ["titles"]})

"""1.0 if the answer is the right one, character for character but for white space, else 0.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.trainer.rewards.errors import RewardValueError


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """`ground_truth` is one answer or a list of accepted ones; numbers are compared as written."""
    if ground_truth is None:
        raise RewardValueError(
            f"exact_match needs a right answer, and a task of {data_source!r} has none; "
            "set data.train.label_key, or use another reward"
        )
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return float(_plain(solution_str) in {_plain(str(a)) for a in accepted})


def _plain(text: str) -> str:
    return " ".join(text.split())

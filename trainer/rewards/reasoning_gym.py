"""Scores an answer with the verifier of the `reasoning_gym` data set it came from.

`data_source` is the data set's name (`chain_sum`). The verifiers give partial credit for an answer
that merely contains the right one ("x12" for "12" scores 0.67); for RL that pays a policy to
babble, so `score` is 1.0 for full marks and 0.0 for anything less, and `partial_score` is the
verifier's own number for those who want it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from stepwell.trainer.errors import RewardValueError

PARAMS = "reasoning_gym_params"
"""Key of a task whose data set has parameters (`data.*.params`): its verifier wants them, too."""
_WITH_TUPLES = ("arc_agi", "rearc")
"""Data sets whose verifiers compare with tuples; a task, which is JSON, has lists."""


def score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """1.0 if the verifier gives full marks, else 0.0."""
    return float(partial_score(data_source, solution_str, ground_truth, extra_info) == 1.0)


def partial_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """The verifier's own score in [0, 1]. `extra_info` may hold the task; its `metadata` is what
    verifiers without a single right answer read, and `PARAMS` are those of its data set."""
    task = extra_info or {}
    metadata = dict(task.get("metadata") or {})
    if data_source in _WITH_TUPLES:
        metadata = {name: _as_tuples(value) for name, value in metadata.items()}
    entry = {**task, "answer": ground_truth, "metadata": metadata}
    verifier = _verifier(data_source, json.dumps(task.get(PARAMS) or {}))
    return float(verifier(solution_str.strip(), entry))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


@cache
def _verifier(data_source: str, params: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym  # 1.3 s to import: only for those who use it

    try:
        verifier: Callable[[str, dict[str, Any]], float] = reasoning_gym.create_dataset(
            data_source, **json.loads(params)
        ).score_answer
    except ValueError as e:
        raise RewardValueError(
            f"data_source is {data_source!r}: reasoning_gym has no data set of that name; "
            "score this data with another reward"
        ) from e
    return verifier

"""This module says in numbers what trajectories look like, so that training and validation show the
same figures under the same names.

    groups ──► trajectory_metrics ─┬─► response_length/mean, reward/std, …      an optimizer step
                                   └─► val/response_length/mean, …              an evaluation

Names are verl's where it has one (`response_length/clip_ratio`). Every name and its unit is in
docs/metrics.md. Does not own: what the mathematics measures (`algorithms/`, `updater.py`), mean@n
and pass@k (`validation.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from stepwell.datapool.types import Group, Trajectory, last_seen, mapping_in


def trajectory_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the figures of scored groups; one without any value is left out.

    - `reward/mean`, `/min`, `/max`, `/std`: of trajectories' rewards; std of the population;
    - `reward/{data_source}/mean`: of the trajectories of one data source;
    - `prompt_length/…`: tokens of a trajectory's first prompt;
    - `response_length/…`: tokens that the policy wrote in a trajectory, over all its calls;
    - `response_length/clip_ratio`: share whose last call ended at its limit of tokens;
    - `num_turns/…`: LLM calls of a trajectory;
    - `tool_calls/mean`: calls of tools in a trajectory, where the model was offered tools;
    - `tool_errors`: share of tools' results that say "error" first;
    - `tool_metrics/{tool}/{figure}`: over a tool's calls that gave the figure.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {}
    rewards = [t.reward for t in trajectories if t.reward is not None]
    metrics: dict[str, float] = {}
    if rewards:
        metrics = _spread("reward", rewards) | {"reward/std": float(np.std(rewards))}
    by_source: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_source[data_source(group)] += [
            t.reward for t in group.trajectories if t.reward is not None
        ]
    metrics |= {f"reward/{s}/mean": float(np.mean(r)) for s, r in sorted(by_source.items()) if r}
    written = [sum(len(s.response_ids) for s in t.steps) for t in trajectories]
    metrics |= {
        **_spread("prompt_length", [len(t.steps[0].prompt_ids) for t in trajectories]),
        **_spread("response_length", written),
        "response_length/clip_ratio": float(np.mean([is_clipped(t) for t in trajectories])),
        **_spread("num_turns", [len(t.steps) for t in trajectories]),
    }
    calls = [sum(c) for t in trajectories if (c := _tool_calls(t))]
    if calls:
        metrics["tool_calls/mean"] = float(np.mean(calls))
    results = [failed for t in trajectories for failed in _tool_results(t)]
    if results:
        metrics["tool_errors"] = float(np.mean(results))
    given: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in _tool_metrics(trajectory):
            given[name].append(value)
    return metrics | {f"tool_metrics/{n}": float(np.mean(v)) for n, v in sorted(given.items())}


def tool_use(groups: Sequence[Group]) -> float | None:
    """Share of trajectories in which the agent called a tool; None: the model was offered none."""
    calls = [_tool_calls(t) for g in groups for t in g.trajectories]
    return float(np.mean([sum(c) > 0 for c in calls])) if any(calls) else None


def task_of(group: Group) -> Mapping[str, Any]:
    """The task that the group's prompt is of; empty if nobody said one."""
    return mapping_in(group.metadata, "task")


def data_source(group: Group) -> str:
    """Name of the data set that the prompt came from, or "unknown"."""
    return str(task_of(group).get("data_source") or "unknown")


def versions_of(trajectory: Trajectory) -> set[int]:
    """The policy versions that generated its tokens."""
    spans = {v.version for s in trajectory.steps for v in s.version_spans}
    return spans | {s.policy_version for s in trajectory.steps}


def is_clipped(trajectory: Trajectory) -> bool:
    """Return whether its last reply ended at its limit of tokens."""
    return trajectory.steps[last_seen(trajectory.steps)].finish_reason == "length"


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/min": float(min(values)),
        f"{name}/max": float(max(values)),
    }


def _tool_calls(trajectory: Trajectory) -> list[int]:
    """Calls of tools, for each LLM call that offered tools."""
    found = (s.metadata.get("tool_calls") for s in trajectory.steps)
    return [n for n in found if type(n) is int]  # Steps may be submitted with anything there


def _tool_results(trajectory: Trajectory) -> Iterable[bool]:
    """Yield whether each tool's result, in the messages that the gateway keeps, is an error. Tools
    say it in the text, as `trainer/tools` does: no dialect has a field for it but Anthropic's,
    whose gateway writes it there."""
    for step in trajectory.steps:
        messages = step.metadata.get("messages")
        for message in messages if isinstance(messages, list | tuple) else ():
            if isinstance(message, Mapping) and message.get("role") == "tool":
                yield _text(message.get("content")).lstrip().lower().startswith("error")


def _text(content: Any) -> str:
    """Text of a message, which has parts where pictures are shown."""
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _tool_metrics(trajectory: Trajectory) -> Iterable[tuple[str, float]]:
    """`tool/figure` and its value, of each call. An agent of any kind may send them, so what is no
    figure is left out."""
    for tool, calls in mapping_in(trajectory.metadata, "tool_metrics").items():
        for call in calls if isinstance(calls, list | tuple) else ():
            for figure, value in call.items() if isinstance(call, Mapping) else ():
                if isinstance(value, int | float):  # bool is an int
                    with suppress(OverflowError):  # as of a reward's extras
                        yield f"{tool}/{figure}", float(value)

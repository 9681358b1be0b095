"""Random groups with everything that a conversion can get wrong, from a seed.

    s0: P R0            s1: P R0 tool R1            s3: P R0 tool R1 tool R3     the main chain
                        s2: P R0 tool' R2                                       a branch of s0
                        s4: Q R4                                                a side call

Groups are unequal in size, trajectories in steps, and some groups have equal rewards throughout.
Rewards sit on the last step, or on several, or on an early one; versions rise along a trajectory
and some calls span two; a truncated trajectory ends with `finish_reason="length"` and says so in
its metadata. `parent_index` tells the truth. Ids may be the one that a padding would use (0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.datapool.types import Group, Step, Trajectory, VersionSpan

VOCAB = 64
N_GROUPS = 64
TEMPERATURE = 0.8

Draw = np.random.Generator
Ids = list[int]


def random_groups(n: int = N_GROUPS, seed: int = 0) -> list[Group]:
    """`n` groups `g0`, `g1`, … of 1 to 6 complete trajectories each."""
    draw = np.random.default_rng(seed)
    return [_group(f"g{i}", draw) for i in range(n)]


def steps_of(groups: Sequence[Group]) -> list[Step]:
    """All steps, in the order in which a lease has them."""
    return [step for group in groups for step in group.steps]


def current_log_probs(
    steps: Sequence[Step], seed: int = 0, scale: float = 0.3
) -> list[npt.NDArray[np.float32]]:
    """log π of a policy that has moved on: per step its behaviour log-probs, shifted; [R] each."""
    draw = np.random.default_rng(seed)
    found = []
    for step in steps:
        assert step.rollout_log_probs is not None
        moved = step.rollout_log_probs + draw.normal(0, scale, len(step.response_ids))
        found.append(np.minimum(moved, 0).astype(np.float32))
    return found


def _group(uid: str, draw: Draw) -> Group:
    prompt = _ids(draw, 3, 9)
    size = int(draw.integers(1, 7))
    # One reward for all: a group without a signal.
    fixed = float(draw.integers(0, 2)) if draw.random() < 0.15 else None
    trajectories = tuple(_trajectory(f"{uid}-t{i}", uid, prompt, fixed, draw) for i in range(size))
    return Group(uid, trajectories, n_rollouts=size, metadata={"data_source": f"task{size % 2}"})


def _trajectory(
    uid: str, prompt_uid: str, prompt: Ids, fixed: float | None, draw: Draw
) -> Trajectory:
    calls = _calls(prompt, draw)
    truncated = bool(draw.random() < 0.2)
    rewards = _rewards(len(calls), fixed, draw)
    version = int(draw.integers(0, 4))
    steps = []
    for i, (context, response, parent) in enumerate(calls):
        last = i == len(calls) - 1
        version += int(draw.random() < 0.25)
        spans: tuple[VersionSpan, ...] = ()
        if len(response) > 2 and draw.random() < 0.2:
            cut = int(draw.integers(1, len(response)))
            spans = (
                VersionSpan(version, 0, cut),
                VersionSpan(version + 1, cut, len(response)),
            )
        steps.append(
            Step(
                prompt_ids=context,
                response_ids=response,
                reward=rewards[i],
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                step_index=i,
                policy_version=version,
                is_last=last,
                metadata={"sampling_params": {"temperature": TEMPERATURE}},
                rollout_log_probs=-draw.exponential(1.0, len(response)),
                finish_reason="length" if truncated and last else "stop",
                parent_index=parent,
                version_spans=spans,
            )
        )
        version = max(version, *(s.version for s in spans), version)
    return Trajectory(uid, prompt_uid, tuple(steps), metadata={"truncated": truncated})


def _calls(prompt: Ids, draw: Draw) -> list[tuple[Ids, Ids, int | None]]:
    """(prompt, response, parent) of each call of one rollout, in the order of the calls."""
    calls: list[tuple[Ids, Ids, int | None]] = [(prompt, _ids(draw, 1, 8), None)]
    main = 0
    for _ in range(int(draw.integers(0, 5))):
        kind = draw.choice(["turn", "branch", "side"], p=[0.7, 0.2, 0.1])
        if kind == "side":
            calls.append((_ids(draw, 2, 7), _ids(draw, 1, 6), None))
            continue
        parent = main if kind == "turn" else int(draw.integers(0, len(calls)))
        # A tool that says nothing is a turn too: the model is called again with what there is.
        context = calls[parent][0] + calls[parent][1] + _ids(draw, 0, 5)
        calls.append((context, _ids(draw, 1, 8), parent))
        if kind == "turn":
            main = len(calls) - 1
    return calls


def _rewards(n: int, fixed: float | None, draw: Draw) -> list[float | None]:
    rewards: list[float | None] = [None] * n
    if fixed is not None:
        rewards[-1] = fixed
        return rewards
    how = draw.choice(["last", "all", "early"])
    for i in range(n):
        if how == "all" or (how == "last" and i == n - 1) or (how == "early" and i == 0):
            rewards[i] = round(float(draw.normal()), 3)
    return rewards


def _ids(draw: Draw, low: int, high: int) -> Ids:
    ids: Ids = draw.integers(0, VOCAB, int(draw.integers(low, high))).tolist()
    return ids


def properties(groups: Sequence[Group]) -> dict[str, Any]:
    """Hard cases among the groups, by name: a test of a conversion checks that it met them."""
    steps = steps_of(groups)
    trajectories = [t for g in groups for t in g.trajectories]
    children: dict[tuple[str, int], int] = {}
    for s in steps:
        if s.parent_index is not None:
            key = (s.trajectory_uid, s.parent_index)
            children[key] = children.get(key, 0) + 1
    return {
        "branches": sum(n > 1 for n in children.values()),
        "side_calls": sum(s.parent_index is None and s.step_index > 0 for s in steps),
        "spans": sum(bool(s.version_spans) for s in steps),
        "truncated": sum(bool(t.metadata["truncated"]) for t in trajectories),
        "groups_of_one": sum(len(g.trajectories) == 1 for g in groups),
        "equal_rewards": sum(
            len(g.trajectories) > 1
            and math.isclose(
                min(t.reward or 0 for t in g.trajectories),
                max(t.reward or 0 for t in g.trajectories),
            )
            for g in groups
        ),
        "versions": len({s.policy_version for s in steps}),
        "multi_step": sum(len(t.steps) > 1 for t in trajectories),
    }

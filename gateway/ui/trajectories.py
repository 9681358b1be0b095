"""This module makes of stored trajectories what their pages show: the turn tree, tokens with what
is known of each, and the prefix tree of a group.

    steps ──► shown      the tree, with messages, timing, sums per step
          ──► tokens     one step: ids, texts, mask, log-probs, versions, the trainer's columns
          ──► prefixes   a group: the tokens that its rollouts share

Pure; long trajectories take milliseconds, so call it in a thread. Token ids are those of the
journal; texts are for reading. Does not own where the trajectories are (`dashboard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from stepwell.datapool.branches import branches, parents
from stepwell.datapool.types import Step, TokenIds, Trajectory

MESSAGES_BYTES: Final = 512 * 1024
"""Bytes of messages in one answer; further steps bring theirs when they are asked for."""
MAX_TOKENS: Final = 8192
"""Tokens of one answer."""
PREVIEW_TOKENS: Final = 24
LAST_TOKENS: Final = 100
MAX_DEPTH: Final = 100
"""Levels of a prefix tree."""
Decode: TypeAlias = Callable[[Sequence[int]], str]
_Branch: TypeAlias = tuple[TokenIds, dict[str, Any]]
"""Its tokens, or those that are left of it, and what stands at its end."""
_SAID: Final = ("branch", "dialect", "sampling_params", "tool_calls", "timing", "forced_tool")


def shown(
    trajectory: Trajectory,
    columns: Sequence[Mapping[str, Any]] | None,
    decode: Decode,
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """A trajectory as a tree.

    Args:
        columns: what the trainer computed, by step; None: it was not trained yet.
        whole: with the messages of all steps, however many bytes they have.
    """
    steps = trajectory.steps
    of = parents(steps)
    left = MESSAGES_BYTES
    rows: list[dict[str, Any]] = []
    for i, (step, parent) in enumerate(zip(steps, of, strict=True)):
        known = 0 if parent is None else steps[parent].n_tokens
        row: dict[str, Any] = {
            "index": step.step_index,
            "parent": None if parent is None else steps[parent].step_index,
            "n_prompt": len(step.prompt_ids),
            "n_known": known,
            "n_response": len(step.response_ids),
            "reward": step.reward,
            "versions": _spans(step),
            "finish_reason": step.finish_reason,
            "log_prob": _mean(step.rollout_log_probs),
            **{name: step.metadata.get(name) for name in _SAID},
        }
        for name in ("advantages", "weights", "mask"):
            row[name] = None if columns is None else _mean(columns[i].get(name))
        if left > 0 or whole:
            row["messages"] = said(step, known, decode)
            n_bytes = len(orjson.dumps(row["messages"], repr, orjson.OPT_NON_STR_KEYS))
            left -= n_bytes
        rows.append(row)
    paths = [[steps[i].step_index for i in path] for path in branches(steps)]
    return {"steps": rows, "branches": paths}


def said(step: Step, known: int, decode: Decode) -> list[Any]:
    """The messages of a turn, or its new tokens as text where none were kept."""
    messages = step.metadata.get("messages")
    if isinstance(messages, list):
        return messages
    ids = {"prompt": step.prompt_ids[known:], "assistant": step.response_ids}
    return [{"role": role, "content": decode(new.tolist())} for role, new in ids.items()]


def last_words(trajectories: Sequence[Trajectory], decode: Decode) -> dict[str, str]:
    """Last text of each trajectory, by its uid, to compare rollouts of one prompt at a glance."""
    found = {}
    for trajectory in trajectories:
        for step in trajectory.steps[-1:]:
            text = decode(step.response_ids[-LAST_TOKENS:].tolist())
            found[trajectory.trajectory_uid] = text
    return found


def tokens(
    step: Step,
    known: int,
    columns: Mapping[str, Any] | None,
    text_of: Callable[[int], str],
    start: int | None = None,
) -> dict[str, Any]:
    """At most `MAX_TOKENS` tokens of a step from `start` on (None: from where its parent ends).
    What only response tokens have is null for those of the prompt."""
    n_prompt, ids = len(step.prompt_ids), step.token_ids
    start = known if start is None else min(max(0, start), len(ids))
    end = min(len(ids), start + MAX_TOKENS)
    versions = np.full(len(ids), -1, np.int64)
    for version, first, last in _spans(step):
        versions[n_prompt + first : n_prompt + last] = version
    per_token = {"log_probs": step.rollout_log_probs, **(columns or {})}
    chosen = ids[start:end].tolist()
    return {
        "start": start,
        "total": len(ids),
        "n_prompt": n_prompt,
        "n_known": known,
        "ids": chosen,
        "texts": [*map(text_of, chosen)],
        "pictures": [p._asdict() for p in step.pictures if p.at < end and p.end > start],
        "versions": [None if v < 0 else v for v in versions[start:end].tolist()],
        "columns": {
            name: _aligned(values, n_prompt, start, end)
            for name, values in per_token.items()
            if values is not None
        },
    }


def _aligned(values: Any, n_prompt: int, start: int, end: int) -> list[float | None]:
    """Numbers of response tokens, for tokens [start, end) of prompt and response."""
    n_before = max(0, min(end, n_prompt) - start)
    own = np.asarray(values, np.float32)[max(0, start - n_prompt) : max(0, end - n_prompt)]
    numbers = (round(v, 6) if np.isfinite(v) else None for v in own.tolist())
    return [*[None] * n_before, *numbers]


def _spans(step: Step) -> list[tuple[int, int, int]]:
    spans = [(s.version, s.start, s.end) for s in step.version_spans]
    return spans or [(step.policy_version, 0, len(step.response_ids))]


def _mean(values: Any) -> float | None:
    finite = np.asarray([] if values is None else values, np.float64)
    finite = finite[np.isfinite(finite)]
    return round(float(finite.mean()), 6) if len(finite) else None


# -- prefixes ----------------------------------------------------------------------------------


def prefixes(trajectories: Sequence[Trajectory], decode: Decode) -> dict[str, Any]:
    """The tree of token prefixes that the branches of these trajectories form, and how many tokens
    each way of computing them takes."""
    rows: list[_Branch] = []
    n_calls = 0
    for trajectory in trajectories:
        steps = trajectory.steps
        n_calls += sum(step.n_tokens for step in steps)
        for path in branches(steps):
            leaf = steps[path[-1]]
            label = {"trajectory_uid": trajectory.trajectory_uid, "reward": trajectory.reward}
            rows.append((leaf.token_ids, label))
    roots = _children(rows, decode, MAX_DEPTH)
    return {
        "calls": n_calls,
        "branches": sum(len(ids) for ids, _ in rows),
        "tree": sum(_size(root) for root in roots),
        "roots": roots,
    }


def _children(rows: Sequence[_Branch], decode: Decode, depth: int) -> list[dict[str, Any]]:
    """The nodes below one, of what is left of the branches there; `depth` levels of them at most,
    since JSON is read and written by functions that call themselves."""
    by_first: dict[int, list[_Branch]] = {}
    for i, (ids, label) in enumerate(rows):
        if len(ids):
            by_first.setdefault(int(ids[0]) if depth else i, []).append((ids, label))
    nodes = []
    for same in by_first.values():
        first = same[0][0]
        n = min(_common(first, ids) for ids, _ in same)
        left = [(ids[n:], label) for ids, label in same]
        node: dict[str, Any] = {
            "n": n,
            "shared": len(same),
            "text": decode(first[: min(n, PREVIEW_TOKENS)].tolist()),
            "ends": [label for ids, label in same if len(ids) == n],
            "children": _children(left, decode, depth - 1),
        }
        nodes.append(node)
    return nodes


def _common(a: TokenIds, b: TokenIds) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _size(node: Mapping[str, Any]) -> int:
    """Its tokens and those of all below it."""
    return int(node["n"]) + sum(_size(child) for child in node["children"])

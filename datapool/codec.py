"""Steps as bytes: how they travel, how they are stored, and how they come back exactly.

A step whose prompt extends another one's tokens (prompt + response) carries only what is new, and
names that step as its `base`. Only a step without a base carries a whole prompt; it is kept apart
from the rest, so that the rollouts of a group share one copy of their common prompt::

    step 0   prompt ───────────────┐ response ── log-probs ── extra      base None
    step 1            └── base 0 ──┴ new ids ── response ── log-probs ── extra
    step 2                             └── base 1 ── …

`PackedStep` is a plain tuple underneath and its payload one buffer: a batch of them crosses Ray,
is stored and is journaled without a Python object per token. `extra` is what no index looks at
(metadata, version spans, multi-modal data, …), pickled.

Owns the format. Does not decide which step is whose base, nor where the bytes are kept.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import path_to_root
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.types import Group, Lease, LogProbs, Step, TokenIds, Trajectory, VersionSpan

_PUT: tuple[Callable[[Step, Any], None], ...] = tuple(
    vars(Step)[f.name].__set__ for f in fields(Step)
)
"""Setters of a Step's slots, in the order of its fields."""


class PackedStep(NamedTuple):
    """A step on its way. Counts are in tokens."""

    trajectory_uid: str
    prompt_uid: str
    step_index: int
    policy_version: int
    reward: float | None
    is_last: bool
    parent_index: int | None
    base: int | None
    """`step_index` of the step whose tokens the prompt begins with; None: `prompt` is whole."""
    n_prompt: int
    n_new: int
    """Prompt tokens after the base's; 0 without a base."""
    n_response: int
    has_log_probs: bool
    prompt: bytes | None
    """The whole prompt, int32; None with a base."""
    payload: bytes
    """New prompt ids and response ids, int32; log-probs, float32; extra."""

    @property
    def tokens(self) -> bytes:
        """The new prompt ids and the response ids."""
        return self.payload[: 4 * (self.n_new + self.n_response)]


class StoredStep:
    """A `PackedStep` in the pool: without the uids, which its record has, and perhaps on disk."""

    __slots__ = (
        "base",
        "has_log_probs",
        "is_last",
        "n_new",
        "n_prompt",
        "n_response",
        "parent_index",
        "payload",
        "policy_version",
        "prompt",
        "reward",
        "row",
        "spilled_bytes",
    )

    def __init__(self, packed: PackedStep, prompt: bytes | None) -> None:
        self.policy_version = packed.policy_version
        self.reward = packed.reward
        self.is_last = packed.is_last
        self.parent_index = packed.parent_index
        self.base = packed.base
        self.n_prompt = packed.n_prompt
        self.n_new = packed.n_new
        self.n_response = packed.n_response
        self.has_log_probs = packed.has_log_probs
        self.prompt = prompt
        self.payload: bytes | None = packed.payload
        """None: only the journal has it, in `row`."""
        self.spilled_bytes = 0
        """Its length, if it is not in memory."""
        self.row = 0

    @property
    def n_bytes(self) -> int:
        """Of the payload, wherever it is."""
        return self.spilled_bytes if self.payload is None else len(self.payload)

    def spill(self) -> None:
        """Leave the payload to the journal."""
        self.spilled_bytes = self.n_bytes
        self.payload = None

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_response

    def packed(self, trajectory_uid: str, prompt_uid: str, index: int) -> PackedStep:
        """As it came in. The payload must be in memory."""
        if self.payload is None:
            raise ValueError(f"step {trajectory_uid!r}[{index}]: its payload is on disk; load it")
        return PackedStep(
            trajectory_uid,
            prompt_uid,
            index,
            self.policy_version,
            self.reward,
            self.is_last,
            self.parent_index,
            self.base,
            self.n_prompt,
            self.n_new,
            self.n_response,
            self.has_log_probs,
            self.prompt,
            self.payload,
        )


def pack(step: Step, base: int | None = None, *base_tokens: bytes | None) -> PackedStep:
    """`step` as bytes; relative to step `base` if its prompt really begins with that one's tokens,
    given in one piece or several."""
    prompt = as_bytes(step.prompt_ids)
    shared = 0
    for part in base_tokens:
        if part is None or not prompt.startswith(part, shared):
            shared = 0
            break
        shared += len(part)
    new, whole = (prompt[shared:], None) if shared else (b"", prompt)
    log_probs = step.rollout_log_probs
    payload = b"".join(
        (
            new,
            as_bytes(step.response_ids),
            b"" if log_probs is None else as_bytes(log_probs),
            _pack_extra(step),
        )
    )
    return PackedStep(
        step.trajectory_uid,
        step.prompt_uid,
        step.step_index,
        step.policy_version,
        step.reward,
        step.is_last,
        step.parent_index,
        base if shared else None,
        len(prompt) // 4,
        len(new) // 4,
        len(step.response_ids),
        log_probs is not None,
        whole,
        payload,
    )


def as_bytes(column: npt.NDArray[Any]) -> bytes:
    """The column's memory; not copied if it is a view of just these bytes."""
    base: object = column.base
    return base if isinstance(base, bytes) and len(base) == column.nbytes else column.tobytes()


def _pack_extra(step: Step) -> bytes:
    extra = (
        step.metadata,
        step.finish_reason,
        tuple((s.version, s.start, s.end) for s in step.version_spans),
        step.multi_modal_data,
        step.routed_experts,
    )
    try:
        return pickle.dumps(extra, protocol=5)
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise InvalidStepError(
            f"step {step.trajectory_uid!r}[{step.step_index}]: metadata, multi_modal_data or "
            f"routed_experts cannot be pickled ({e}); pass plain values and arrays"
        ) from e


def unpack(steps: Sequence[PackedStep]) -> list[Step]:
    """The steps of one trajectory, exactly as they were submitted, in the order given.

    Every base must be among them. Prompts of one chain are views of one array.
    """
    by_index = {packed.step_index: packed for packed in steps}
    tokens: dict[int, TokenIds] = {}
    for index in sorted(by_index, reverse=True):
        if index not in tokens:
            _lay_out(by_index[index], by_index, tokens)
    return [_unpack(packed, tokens[packed.step_index]) for packed in steps]


def _lay_out(
    leaf: PackedStep, by_index: Mapping[int, PackedStep], tokens: dict[int, TokenIds]
) -> None:
    """The tokens of a chain, from its leaf, in one array; each step of it sees its part."""
    chain = path_to_root(leaf, lambda p: None if p.base is None else by_index[p.base])
    parts = [packed.tokens for packed in chain]
    parts.append(chain[-1].prompt or b"")
    parts.reverse()
    array = np.frombuffer(b"".join(parts), np.int32)
    for packed in chain:
        if packed.step_index not in tokens:
            tokens[packed.step_index] = array[: packed.n_prompt + packed.n_response]


def _unpack(packed: PackedStep, tokens: TokenIds) -> Step:
    (
        trajectory_uid,
        prompt_uid,
        step_index,
        policy_version,
        reward,
        is_last,
        parent_index,
        _,
        n_prompt,
        n_new,
        n_response,
        has_log_probs,
        _,
        payload,
    ) = packed
    offset = 4 * (n_new + n_response)
    log_probs = None
    if has_log_probs:
        log_probs = np.frombuffer(payload, np.float32, n_response, offset)
        offset += 4 * n_response
    metadata, finish_reason, spans, multi_modal_data, routed_experts = pickle.loads(
        payload[offset:]
    )
    return _restore(
        tokens[:n_prompt],
        tokens[n_prompt:],
        reward,
        trajectory_uid,
        prompt_uid,
        step_index,
        policy_version,
        is_last,
        metadata,
        log_probs,
        finish_reason,
        parent_index,
        tuple(VersionSpan(*span) for span in spans) if spans else (),
        multi_modal_data,
        routed_experts,
    )


def _restore(
    prompt_ids: TokenIds,
    response_ids: TokenIds,
    reward: float | None,
    trajectory_uid: str,
    prompt_uid: str,
    step_index: int,
    policy_version: int,
    is_last: bool,
    metadata: dict[str, Any],
    rollout_log_probs: LogProbs | None,
    finish_reason: Any,
    parent_index: int | None,
    version_spans: tuple[VersionSpan, ...],
    multi_modal_data: Any,
    routed_experts: Any,
) -> Step:
    """A Step of these fields. Not through `__init__`: it was validated when it was made, and
    nothing has changed since. One call for each, because a loop takes twice as long."""
    step = object.__new__(Step)
    _PUT[0](step, prompt_ids)
    _PUT[1](step, response_ids)
    _PUT[2](step, reward)
    _PUT[3](step, trajectory_uid)
    _PUT[4](step, prompt_uid)
    _PUT[5](step, step_index)
    _PUT[6](step, policy_version)
    _PUT[7](step, is_last)
    _PUT[8](step, metadata)
    _PUT[9](step, rollout_log_probs)
    _PUT[10](step, finish_reason)
    _PUT[11](step, parent_index)
    _PUT[12](step, version_spans)
    _PUT[13](step, multi_modal_data)
    _PUT[14](step, routed_experts)
    return step


class PackedTrajectory(NamedTuple):
    """`Trajectory` before its steps are unpacked."""

    trajectory_uid: str
    prompt_uid: str
    steps: Sequence[PackedStep]
    metadata: dict[str, Any]
    attempt: int

    def unpack(self) -> Trajectory:
        return Trajectory(
            self.trajectory_uid,
            self.prompt_uid,
            tuple(unpack(self.steps)),
            dict(self.metadata),
            self.attempt,
        )


class PackedGroup(NamedTuple):
    """`Group` before its steps are unpacked."""

    prompt_uid: str
    trajectories: Sequence[PackedTrajectory]
    n_rollouts: int | None
    metadata: dict[str, Any]
    delivery: int

    def unpack(self) -> Group:
        return Group(
            self.prompt_uid,
            tuple(t.unpack() for t in self.trajectories),
            self.n_rollouts,
            dict(self.metadata),
            self.delivery,
        )


@dataclass(frozen=True, slots=True)
class PackedLease:
    """`Lease` as the pool hands it out. Pickled here, it arrives as a `Lease`."""

    lease_id: str
    channel: str
    groups: tuple[PackedGroup, ...]
    expires_at: float

    def unpack(self) -> Lease:
        return Lease(
            self.lease_id, self.channel, tuple(g.unpack() for g in self.groups), self.expires_at
        )

    def split(self, parts: int) -> tuple[PackedLease, ...]:
        """`parts` leases of the same id, each with some of the groups, in order."""
        edges = [len(self.groups) * i // parts for i in range(parts + 1)]
        return tuple(replace(self, groups=self.groups[start:end]) for start, end in pairwise(edges))

    def steps(self) -> PackedSteps:
        """Its steps alone."""
        return PackedSteps([t for g in self.groups for t in g.trajectories])

    def __reduce__(self) -> tuple[Any, ...]:
        groups = [(*g[:1], [_flat(t) for t in g.trajectories], *g[2:]) for g in self.groups]
        return _unpack_lease, (self.lease_id, self.channel, groups, self.expires_at)


@dataclass(frozen=True, slots=True)
class PackedSteps:
    """Whole trajectories as steps. Pickled here, they arrive as a `list[Step]`."""

    trajectories: Sequence[PackedTrajectory]

    def unpack(self) -> list[Step]:
        return [step for t in self.trajectories for step in unpack(t.steps)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_steps, ([_flat(t) for t in self.trajectories],)


_Flat: TypeAlias = tuple[Any, ...]
"""A named tuple as a plain one: Python pickles those several times faster."""


def _flat(trajectory: PackedTrajectory) -> _Flat:
    return (*trajectory[:2], [tuple(step) for step in trajectory.steps], *trajectory[3:])


def _named(flat: _Flat) -> PackedTrajectory:
    steps = list(map(PackedStep._make, flat[2]))
    return PackedTrajectory._make((*flat[:2], steps, *flat[3:]))


def _unpack_lease(lease_id: str, channel: str, groups: Iterable[_Flat], expires_at: float) -> Lease:
    packed = tuple(PackedGroup(g[0], list(map(_named, g[1])), *g[2:]) for g in groups)
    return PackedLease(lease_id, channel, packed, expires_at).unpack()


def _unpack_steps(trajectories: Iterable[_Flat]) -> list[Step]:
    return PackedSteps(list(map(_named, trajectories))).unpack()

"""A rollout as slime's Rollout Buffer knows it, and as the pool does: items ↔ Steps. Pure.

    item with tokens  ──steps_of──►  Steps        one per run of ones in the loss mask
    trajectory        ──make_item──► item         one Row (branch) per sample

    Row     prompt of the root │ sampled │ tool result │ sampled
    tokens  ───────────────────┼─────────┼─────────────┼────────
    mask                       │ 1 1 1 1 │ 0 0 0 0 0 0 │ 1 1 1      response_length values

Owns: the shapes and their checks. Does not own: HTTP and the pool (`buffer.py`), text
(`transcript.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import path_to_root
from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.types import FinishReason, Group, Step, Trajectory
from stepwell.gateway.errors import RequestError
from stepwell.gateway.slime_buffer.transcript import Transcript
from stepwell.gateway.web import field, number

InstanceId: TypeAlias = int | str
Mask: TypeAlias = npt.NDArray[np.int8]

INSTANCE = "instance_id"
"""Field of an item, and key of the metadata of groups and trajectories."""
SKIPPED = "skip_instance_ids"
WRITTEN = "rollout_item"
"""Key of a trajectory's metadata that keeps what `/buffer/write` was sent."""


# -- what comes in -----------------------------------------------------------------------------


def _instance_id(value: Any, name: str) -> InstanceId:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise RequestError(f"{name} is {value!r:.80}; send a string or an integer", name)
    return value


def parse_repeats(body: Mapping[str, Any]) -> int:
    """slime sends its numbers as strings."""
    name = "num_repeat_per_sample"
    value = body.get(name)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) <= 18:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{name} is {value!r:.80}; send an integer >= 1", name)
    return value


def parse_skipped(body: Mapping[str, Any]) -> Counter[str]:
    ids = field(body, SKIPPED, list, "a list of instance ids") or []
    return Counter(str(_instance_id(v, f"{SKIPPED}[{i}]")) for i, v in enumerate(ids))


@dataclass(frozen=True, slots=True)
class Written:
    """An item of `/buffer/write`, checked."""

    instance_id: InstanceId
    uid: str | None
    reward: float | None
    trajectory_uid: str | None
    """Recorded here before; None: the item brings its tokens."""
    metadata: dict[str, Any]

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> Written:
        if item.get(INSTANCE) is None:
            raise RequestError("instance_id is missing; send the id of the prompt", INSTANCE)
        instance_id = _instance_id(item[INSTANCE], INSTANCE)
        uid = item.get("uid")
        if uid is not None:
            uid = str(_instance_id(uid, "uid"))
        if "reward" not in item:
            raise RequestError(
                "reward is missing; send a number, or null if it is not scored yet", "reward"
            )
        reward = number(item, "reward", -1e308, 1e308)
        trajectory_uid = field(item, "trajectory_uid", str, "a trajectory's uid")
        if trajectory_uid is None and item.get("tokens") is None:
            raise RequestError(
                "the item has neither trajectory_uid nor tokens, and text is never tokenised as if "
                "it had been sampled. Send the trajectory_uid of the rollout that made its calls "
                "through this gateway (POST /init_trajectory), or tokens, response_length and "
                "weight_versions (and loss_mask, rollout_log_probs) as they were sampled",
                "trajectory_uid",
            )
        written: dict[str, Any] = {}
        if uid is not None:
            written["uid"] = uid
        messages = field(item, "messages", list, "a list of messages")
        if messages:
            for i, message in enumerate(messages):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    name = f"messages[{i}]"
                    raise RequestError(f"{name} is {message!r:.80}; send role and content", name)
            written["messages"] = messages
        if extra := field(item, "extra_info", dict, "an object"):
            written["extra_info"] = extra
        metadata = {INSTANCE: instance_id, WRITTEN: written}
        return cls(instance_id, uid, reward, trajectory_uid or None, metadata)


def steps_of(item: Mapping[str, Any]) -> list[Step]:
    """The Steps of a slime sample: one per run of ones in its loss mask, each prompt being all that
    came before. What follows the last sampled token is left out: nothing was conditioned on it.
    Their uids are to be filled in.

    Raises:
        RequestError: a field is missing or contradicts another.
    """
    tokens = _column(item, "tokens", np.int32)
    length = number(item, "response_length", 1, 2**31 - 1, integral=True)
    if length is None or length >= len(tokens):
        raise RequestError(
            f"response_length is {length}; send an integer in [1, {len(tokens)}), so that a prompt "
            "is left",
            "response_length",
        )
    mask = np.ones(length, np.int32)
    if item.get("loss_mask") is not None:
        mask = _column(item, "loss_mask", np.int32)
        if len(mask) != length or not np.isin(mask, (0, 1)).all():
            raise RequestError(
                f"loss_mask has {len(mask)} values; send {length} (response_length), each 0 or 1",
                "loss_mask",
            )
    log_probs = None
    if item.get("rollout_log_probs") is not None:
        log_probs = _column(item, "rollout_log_probs", np.float32)
        if len(log_probs) != length:
            raise RequestError(
                f"rollout_log_probs has {len(log_probs)} values; send {length} "
                "(response_length), or leave them out if they are not known",
                "rollout_log_probs",
            )
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).tolist()
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    if not runs:
        raise RequestError("loss_mask marks no token as sampled; send at least one 1", "loss_mask")
    versions = _versions(item)
    # With another number of calls than of runs, which made which is not known: the oldest bounds
    # the staleness of all.
    of_run = versions if len(versions) == len(runs) else [min(versions)] * len(runs)
    metadata: dict[str, Any] = {}
    if params := _sampling_params(item):
        metadata["sampling_params"] = params
    start = len(tokens) - length
    try:
        return [
            Step(
                prompt_ids=tokens[: start + begin],
                response_ids=tokens[start + begin : start + end],
                trajectory_uid="-",
                prompt_uid="-",
                step_index=k,
                policy_version=of_run[k],
                metadata=metadata,
                rollout_log_probs=None if log_probs is None else log_probs[begin:end],
                finish_reason=_finish_reason(item) if k == len(runs) - 1 else "stop",
                parent_index=k - 1 if k else None,
            )
            for k, (begin, end) in enumerate(runs)
        ]
    except InvalidStepError as e:
        raise RequestError(f"the item makes no Step: {e}", "tokens") from e


def _column(item: Mapping[str, Any], name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A list of numbers as a read-only array."""
    values = field(item, name, list, "a list of numbers")
    if not values:
        raise RequestError(f"{name} is {values!r}; send a list of numbers", name)
    integral = np.issubdtype(dtype, np.integer)
    kinds = (int,) if integral else (int, float)
    if not all(type(v) in kinds for v in values):
        wanted = "integers" if integral else "numbers"
        raise RequestError(f"{name} holds something else than {wanted}", name)
    if integral and (min(values) < 0 or max(values) >= 2**31):
        raise RequestError(f"{name} holds values outside [0, 2**31)", name)
    array = np.asarray(values, dtype)
    array.flags.writeable = False
    return array


def _versions(item: Mapping[str, Any]) -> list[int]:
    name = "weight_versions"
    values = field(item, name, list, "a list of policy versions")
    if not values:
        raise RequestError(
            f"{name} is {values!r}; send the versions of the weights that sampled the tokens, one "
            'per call or one for all, e.g. ["3"]',
            name,
        )
    versions = []
    for value in values:
        text = "0" if value == "default" else str(value)  # SGLang's name of the first weights
        if isinstance(value, bool) or not text.isdecimal() or len(text) > 18:
            raise RequestError(f"{name} holds {value!r:.80}; send decimal integers", name)
        versions.append(int(text))
    return versions


def _sampling_params(item: Mapping[str, Any]) -> dict[str, Any]:
    """slime's generators put them among `extra_info`."""
    given = field(item, "sampling_params", dict, "an object") or item.get("extra_info") or {}
    found = {
        "temperature": number(given, "temperature", 0, 100),
        "top_p": number(given, "top_p", 0, 1),
        "top_k": number(given, "top_k", -1, 2**31 - 1, integral=True),
    }
    return {k: v for k, v in found.items() if v is not None}


def _finish_reason(item: Mapping[str, Any]) -> FinishReason:
    reason = item.get("finish_reason") or (item.get("extra_info") or {}).get("finish_reason")
    truncated = reason == "length" or item.get("status") == "truncated"
    return "length" if truncated else "stop"


# -- what goes out -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One branch of a trajectory as one sample. Arrays have one value per response token, which are
    those behind the root's prompt."""

    steps: tuple[Step, ...]
    """From the root to the leaf; each prompt extends the one before with its response."""
    tokens: npt.NDArray[np.int32]
    loss_mask: Mask
    """1: sampled, and in no earlier row."""
    log_probs: npt.NDArray[np.float32] | None
    """0 where nothing was sampled, as in slime; None if a sampled token's is not known."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "response_length": len(self.loss_mask),
            "loss_mask": self.loss_mask,
            "rollout_log_probs": self.log_probs,
            "weight_versions": [str(v) for s in self.steps for v in _step_versions(s)],
        }

    def pieces(self) -> list[npt.NDArray[np.int32]]:
        """`[prompt, sampled, what the next prompt added, sampled, …]`"""
        pieces: list[npt.NDArray[np.int32]] = []
        known = 0
        for step in self.steps:
            pieces += (step.prompt_ids[known:], step.response_ids)
            known = len(step.prompt_ids) + len(step.response_ids)
        return pieces


def rows(steps: Sequence[Step]) -> list[Row]:
    """The branches of a trajectory, that of its last call first. Each sampled token counts in one
    of them."""
    by_index = {s.step_index: s for s in steps}
    parents = {s.step_index: _parent(s, by_index) for s in steps}
    inner = {p.step_index for p in parents.values() if p is not None}
    owned: set[int] = set()
    made = []
    for leaf in sorted((s for s in steps if s.step_index not in inner), key=_index, reverse=True):
        chain = path_to_root(leaf, lambda step: parents[step.step_index])
        made.append(_row(chain[::-1], owned))
        owned.update(map(_index, chain))
    return made


def _index(step: Step) -> int:
    return step.step_index


def _parent(step: Step, by_index: Mapping[int, Step]) -> Step | None:
    """The Step that this one's prompt extends. Checked: white-box agents may say anything."""
    parent = None if step.parent_index is None else by_index.get(step.parent_index)
    if parent is None:
        return None
    n, m = len(parent.prompt_ids), len(parent.response_ids)
    ids = step.prompt_ids
    extends = (
        len(ids) > n + m
        and np.array_equal(ids[:n], parent.prompt_ids)
        and np.array_equal(ids[n : n + m], parent.response_ids)
    )
    return parent if extends else None


def _row(chain: Sequence[Step], owned: set[int]) -> Row:
    leaf = chain[-1]
    tokens = np.concatenate([leaf.prompt_ids, leaf.response_ids])
    start = len(chain[0].prompt_ids)
    mask = np.zeros(len(tokens) - start, np.int8)
    log_probs: npt.NDArray[np.float32] | None = np.zeros(len(mask), np.float32)
    for step in chain:
        if step.step_index in owned:
            continue
        begin = len(step.prompt_ids) - start
        where = slice(begin, begin + len(step.response_ids))
        mask[where] = 1
        if step.rollout_log_probs is None:
            log_probs = None
        elif log_probs is not None:
            log_probs[where] = step.rollout_log_probs
    return Row(tuple(chain), tokens, mask, log_probs)


def _step_versions(step: Step) -> list[int]:
    return [s.version for s in step.version_spans] or [step.policy_version]


def make_item(
    trajectory: Trajectory, group: Group, instance_id: InstanceId, transcript: Transcript
) -> dict[str, Any]:
    """One trajectory in slime's shape."""
    main, *others = rows(trajectory.steps)
    kept = dict(trajectory.metadata)
    kept.pop(INSTANCE, None)
    written = kept.pop(WRITTEN, {})
    last = main.steps[-1]
    extra = {
        "finish_reason": last.finish_reason,
        "round_number": len(main.steps),
        "trajectory_uid": trajectory.trajectory_uid,
        "prompt_uid": trajectory.prompt_uid,
        "delivery": group.delivery,
        **kept,
        **written.get("extra_info", {}),
    }
    return {
        "uid": written.get("uid", trajectory.trajectory_uid),
        INSTANCE: instance_id,
        "messages": written.get("messages") or transcript.messages(main.pieces()),
        "reward": trajectory.reward,
        "extra_info": extra,
        **main.as_dict(),
        "branches": [row.as_dict() for row in others],
    }


def instance_of(group: Group) -> InstanceId:
    """As its producer said when it opened the group or one of its trajectories."""
    for metadata in (group.metadata, *(t.metadata for t in group.trajectories)):
        value = metadata.get(INSTANCE)
        if isinstance(value, int | str) and not isinstance(value, bool) and value != "":
            return value
    return group.prompt_uid

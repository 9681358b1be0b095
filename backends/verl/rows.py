"""Steps as verl's rows: unpadded, one per branch (or step), with plain torch and no verl.

    steps      s0: P0 R0        s1: P0 R0 U1 R1        s2: P0 R0 U2 R2   (another branch)
    rows       prompt P0          response R0 U1 R1      response_mask ## .. ##
               prompt P0 R0 U2    response R2            response_mask ##          R0 is in row 1

A row's prompt ends where the first response begins that it trains. Steps share a row if one extends
the other token by token (`rows.py`), at the same temperature (verl has one per row). Pictures are
in `verl/images.py`.

Owns: which rows there are and what each holds. Does not own: padding and `DataProto`
(`verl/backend.py`) or TransferQueue (`verl/queue.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepwell.backends.errors import BatchError
from stepwell.backends.rows import RowForm, TokenRow, build_rows
from stepwell.backends.verl.images import RowImages
from stepwell.datapool.types import Step, mapping_in

COLUMNS = {
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "prox_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
}
"""Stepwell's name of a column -> verl's. `weights`, `coef` and `mask` are folded (`_folded`)."""
FOLDED = ("weights", "coef", "mask")
NO_LOG_PROBS = "no behaviour log-probs"
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class VerlRow:
    """One sequence; P prompt and R response tokens."""

    prompts: Tensor
    """int64, [P]; P > 0."""
    columns: dict[str, Tensor]
    """[R] each: `responses` and `response_mask` int64, the others float32 and 0 where nothing was
    sampled."""
    position_ids: Tensor
    """int64, [P + R]; [4, P + R] of a model that reads pictures."""
    temperature: float
    fields: dict[str, Any]
    """Values that are no tensors, by verl's names."""
    routed_experts: Tensor | None = None
    """int16, [P + R, layers, top_k]; the last token's, which routes nothing trained, may be 0."""
    multi_modal_inputs: dict[str, Tensor] | None = None
    """Inputs of the row's pictures; None: the model reads text."""

    @property
    def input_ids(self) -> Tensor:
        """int64, [P + R]."""
        return torch.cat([self.prompts, self.columns["responses"]])


@dataclass(frozen=True, slots=True)
class _Batch:
    """Input that the rows are built from."""

    steps: Sequence[Step]
    offsets: npt.NDArray[np.int64]
    """Step i owns tokens `offsets[i]:offsets[i + 1]` of a flat column."""
    columns: dict[str, Tensor]
    """By verl's names, flat, [T] each."""
    tasks: Mapping[str, Mapping[str, Any]]
    rewards: dict[str, float | None]
    """Trajectory -> its reward; None: not scored."""
    sessions: dict[str, int]
    """Trajectory -> its place in its group."""
    turns: dict[str, int]
    """Trajectory -> chat turns as verl counts them: per call one that asks, one that answers."""
    images: RowImages | None
    outputs: dict[str, int] = field(default_factory=dict)
    """Trajectory -> rows so far."""


def build(
    steps: Sequence[Step],
    *,
    form: RowForm = "merged",
    columns: Mapping[str, Tensor] | None = None,
    tasks: Mapping[str, Mapping[str, Any]] | None = None,
    images: RowImages | None = None,
) -> list[VerlRow]:
    """The rows of `steps`; every response token is trained in exactly one.

    Args:
        columns: Stepwell's, flat over the response tokens in step order, [T] each: `advantages`,
            `returns`, `values`, `prox_log_probs`, `ref_log_probs`; `mask` (0: not trained);
            `weights` and `coef` become verl's `rollout_is_weights`.
        tasks: prompt_uid -> its task, as a group's metadata has it.
        images: of a model that reads pictures.

    Raises:
        BatchError: no steps, pictures without `images`, `multi_modal_data`, columns of the wrong
            shape, or what only some of the steps have.
    """
    if not steps:
        raise BatchError("convert was given no steps; a batch has at least one")
    for step in steps:
        if step.multi_modal_data:
            raise BatchError(
                f"{step.label} has multi_modal_data; verl is given text and `Step.pictures`"
            )
        if step.pictures and images is None:
            raise BatchError(
                f"{step.label} has pictures; set VerlConfig.model_path to the folder of the model"
            )
    _check_routed(steps)
    lengths = np.array([len(s.response_ids) for s in steps], dtype=np.int64)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    batch = _Batch(
        steps,
        offsets,
        _folded(columns or {}, _known(steps, lengths)),
        tasks or {},
        trajectory_rewards(steps),
        _sessions(steps),
        _turns(steps),
        images,
    )
    return [
        _verl_row(part, batch)
        for row in build_rows(steps, form)
        for part in _joinable_parts(row, steps)
    ]


def _check_routed(steps: Sequence[Step]) -> None:
    """verl replays the routing of every row or of none."""
    has = [s.routed_experts is not None for s in steps]
    if any(has) and not all(has):
        without, one = steps[has.index(False)], steps[has.index(True)]
        raise BatchError(
            f"{without.label} has no routed_experts and {one.label} has; verl replays the "
            "routing of all rows or of none: convert them apart, or leave out those without"
        )


def _known(steps: Sequence[Step], lengths: npt.NDArray[np.int64]) -> Tensor:
    """[T]: 0 on the steps without behaviour log-probs, if others have theirs. verl cannot say
    "unknown" of a token, and 0.0 would say "certain", so they are masked and counted."""
    has = np.array([s.rollout_log_probs is not None for s in steps])
    if not has.any():
        has[:] = True
    elif not has.all():
        log.warning("masked %d of %d steps: %s", (~has).sum(), len(has), NO_LOG_PROBS)
    return torch.from_numpy(np.repeat(has, lengths)).float()


def trajectory_rewards(steps: Sequence[Step]) -> dict[str, float | None]:
    """Sum of each trajectory's rewards, by uid; None of all of them: not scored.

    Raises:
        BatchError: some are scored and others are not.
    """
    rewards: dict[str, float | None] = {}
    for step in steps:
        so_far = rewards.setdefault(step.trajectory_uid, None)
        if step.reward is not None:
            rewards[step.trajectory_uid] = step.reward + (so_far or 0.0)
    missing = [uid for uid, reward in rewards.items() if reward is None]
    if missing and len(missing) < len(rewards):
        raise BatchError(
            f"trajectory {missing[0]!r} has no reward and others of the batch have; not scored is "
            "not 0: score it, or leave it out"
        )
    return rewards


def _sessions(steps: Sequence[Step]) -> dict[str, int]:
    sessions: dict[str, int] = {}
    size: dict[str, int] = {}
    group_of: dict[str, str] = {}
    for step in steps:
        uid = step.trajectory_uid
        if uid not in sessions:
            group_of[uid] = step.prompt_uid
            sessions[uid] = size.setdefault(step.prompt_uid, 0)
            size[step.prompt_uid] += 1
        elif group_of[uid] != step.prompt_uid:
            raise BatchError(
                f"trajectory {uid!r} is in group {group_of[uid]!r} and in {step.prompt_uid!r}; "
                "a trajectory answers one prompt"
            )
    return sessions


def _turns(steps: Sequence[Step]) -> dict[str, int]:
    turns: dict[str, int] = {}
    for step in steps:
        turns[step.trajectory_uid] = turns.get(step.trajectory_uid, 0) + 2
    return turns


def _folded(columns: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Columns by verl's names, 0 where `mask` ([T]) is. verl multiplies each token's loss by
    `rollout_is_weights`, so the weights and, for `loss_agg_mode: token-sum`, mask · α / N go there.
    """
    known = (*COLUMNS, *FOLDED)
    n_tokens = len(mask)
    for name, column in columns.items():
        if name not in known:
            raise BatchError(f"column {name!r} is unknown; verl takes {', '.join(known)}")
        if column.shape != (n_tokens,):
            raise BatchError(
                f"column {name!r} has shape {tuple(column.shape)} for {n_tokens} response tokens"
            )
    found = {to: columns[name].float() for name, to in COLUMNS.items() if name in columns}
    factors = [columns[name].float() for name in ("weights", "coef") if name in columns]
    if factors:
        found["rollout_is_weights"] = torch.stack(factors).prod(0)
    for name in ("mask", "coef"):
        if name in columns:
            mask = mask * (columns[name] != 0)
    # What is masked may hold anything, and 0 · NaN is NaN.
    return {"response_mask": mask} | {k: torch.where(mask > 0, v, 0.0) for k, v in found.items()}


def _joinable_parts(row: TokenRow, steps: Sequence[Step]) -> list[TokenRow]:
    """The row, or a row per step if its steps differ in temperature."""
    if len({steps[i].temperature for i in row.steps}) == 1:
        return [row]
    return [TokenRow(row.ids[: steps[i].n_tokens], (i,), steps[i].pictures) for i in row.steps]


def _verl_row(row: TokenRow, batch: _Batch) -> VerlRow:
    members = [batch.steps[i] for i in row.steps]
    last = members[-1]
    uid = last.trajectory_uid
    cut = len(members[0].prompt_ids)
    size = len(row.ids) - cut
    spans = [
        (i, len(step.prompt_ids) - cut, step.n_tokens - cut)
        for i, step in zip(row.steps, members, strict=True)
    ]

    columns = {"responses": torch.from_numpy(row.ids[cut:].astype(np.int64))}
    for name, flat in batch.columns.items():
        columns[name] = flat.new_zeros(size)
        for i, start, end in spans:
            columns[name][start:end] = flat[batch.offsets[i] : batch.offsets[i + 1]]
    columns["response_mask"] = columns["response_mask"].long()
    if any(s.rollout_log_probs is not None for s in batch.steps):
        columns["rollout_log_probs"] = torch.zeros(size)
        for step, (_, start, end) in zip(members, spans, strict=True):
            if step.rollout_log_probs is not None:
                columns["rollout_log_probs"][start:end] = torch.tensor(step.rollout_log_probs)
    reward = batch.rewards[uid]
    if reward is not None:
        columns["rm_scores"] = torch.zeros(size)
        columns["rm_scores"][-1] = reward

    ids = torch.from_numpy(row.ids.astype(np.int64))
    fields = _task_fields(last.prompt_uid, batch.tasks)
    fields["extra_info"] = {
        **fields["extra_info"],
        "trajectory_uid": uid,
        "finish_reason": last.finish_reason,
        "steps": [
            {"step_index": s.step_index, "start": start, "end": end}
            for s, (_, start, end) in zip(members, spans, strict=True)
        ],
    }
    versions = [v for s in members for v in _versions(s)]
    fields |= {
        "uid": last.prompt_uid,
        "session_id": batch.sessions[uid],
        "output_index": batch.outputs.get(uid, 0),
        "__num_turns__": batch.turns[uid],
        "min_global_steps": min(versions),
        "max_global_steps": max(versions),
    }
    batch.outputs[uid] = fields["output_index"] + 1
    return VerlRow(
        ids[:cut],
        columns,
        torch.arange(len(ids)) if batch.images is None else batch.images.positions(row),
        last.temperature,
        fields,
        _routed_experts(members, len(row.ids)),
        None if batch.images is None else batch.images.inputs(row),
    )


def _versions(step: Step) -> list[int]:
    return [s.version for s in step.version_spans] or [step.policy_version]


def _task_fields(prompt_uid: str, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a dataset's row that verl's reward functions and metrics read. Stepwell's own
    producer keeps the row in the group's metadata under `task`."""
    metadata = tasks.get(prompt_uid, {})
    inner = metadata.get("task")
    task = inner if isinstance(inner, Mapping) else metadata
    truth = task.get("ground_truth", task.get("answer"))
    return {
        "data_source": task.get("data_source") or "stepwell",
        "reward_model": task.get("reward_model") or {"style": "rule", "ground_truth": truth},
        # A task of `data` has its row's extra_info as `metadata`.
        "extra_info": {**mapping_in(task, "metadata"), **mapping_in(task, "extra_info")},
    }


def _routed_experts(members: Sequence[Step], n: int) -> Tensor | None:
    """[n, layers, top_k]: each token as it was routed when first computed, which is when what
    follows it was sampled. A later call may have routed it otherwise."""
    if members[0].routed_experts is None:
        return None
    found: npt.NDArray[np.int16] | None = None
    done = 0
    for step in members:
        record = np.asarray(step.routed_experts)
        if record.ndim != 3 or not step.n_tokens - 1 <= len(record) <= step.n_tokens:
            raise BatchError(
                f"{step.label}: routed_experts has shape {record.shape}; pass [n, layers, top_k] "
                f"from the first prompt token on, n = {step.n_tokens - 1} or {step.n_tokens}"
            )
        if found is None:
            found = np.zeros((n, *record.shape[1:]), dtype=np.int16)
        if record.shape[1:] != found.shape[1:]:
            raise BatchError(
                f"{step.label}: routed_experts has shape {record.shape} and the step before "
                f"(…, {found.shape[1]}, {found.shape[2]}); one model routes both"
            )
        found[done : len(record)] = record[done:]
        done = len(record)
    return torch.from_numpy(found)

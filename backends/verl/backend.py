"""Steps for verl (0.9): its `DataProto`, and the rows of its TransferQueue.

    groups ──lease──► feed.py ──convert──► rows.py ──┬─ lay_out ─► DataProto    verl's
                                                     └─ queue ───► TransferQueue trainers

verl owns the loop and the model; this turns leased Steps into what it trains on::

    prompts       . . P P P              left-padded        response_mask  1 1 0 1 1 . .
    responses     R R U R R . .          right-padded       rm_scores      0 0 0 0 G . .
    input_ids     . . P P P R R U R R . .                   rollout_log_probs, advantages, …

Every row carries its trajectory's reward G, as the outputs of verl's own agent loops do, so one
trajectory must count once in its group however many rows it has: take advantages from Stepwell
(`columns`), or from verl through `compute_advantage` here.

Owns: padding, `DataProto`, verl's advantages. Does not own: which rows there are (`verl/rows.py`),
formulas (`trainer/`), the loop (verl).
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stepwell.backends.base import NO_PICTURES, TrainingBackend
from stepwell.backends.config import VerlConfig
from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.verl.images import RowImages
from stepwell.backends.verl.rows import VerlRow, build
from stepwell.datapool.types import GREEDY, Group, Step, Trajectory, superseded

DataProto: TypeAlias = Any
"""`verl.DataProto`."""

REMEDY = "pip install 'verl>=0.9' 'tensordict>=0.10' 'TransferQueue>=0.1.10'"


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """A `DataProto` before it is one: B rows, P prompt and R response tokens wide."""

    tensors: dict[str, Tensor]
    """`prompts` [B, P]; `responses`, `response_mask` and the float columns [B, R]; `input_ids`,
    `attention_mask` [B, P + R]; `position_ids` [B, P + R], [B, 4, P + R] of a model that reads
    pictures; `routed_experts`
    [B, P + R, layers, top_k]; `temperature` [B] if the rows differ in it."""
    non_tensors: dict[str, npt.NDArray[Any]]
    """[B] each."""
    meta_info: dict[str, Any]


def lay_out(rows: Sequence[VerlRow], config: VerlConfig | None = None) -> Layout:
    """The rows, padded as verl pads them.

    Raises:
        BatchError: a row is longer than `prompt_length` or `response_length`.
    """
    config = config or VerlConfig()
    prompts = [len(row.prompts) for row in rows]
    responses = [len(row.columns["responses"]) for row in rows]
    p = _width("prompt_length", config.prompt_length, prompts, rows)
    r = _width("response_length", config.response_length, responses, rows)
    place = [slice(p - n, p + m) for n, m in zip(prompts, responses, strict=True)]
    shape = (len(rows), p + r)

    attention = torch.zeros(shape, dtype=torch.int64)
    input_ids = torch.full(shape, config.pad_token_id)
    for i, row in enumerate(rows):
        attention[i, place[i]] = 1
        input_ids[i, place[i]] = row.input_ids
    tensors = {
        "prompts": input_ids[:, :p].clone(),
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": _positions(rows, attention, place),
    }
    for name, first in rows[0].columns.items():
        column = first.new_zeros(len(rows), r)
        for i, row in enumerate(rows):
            column[i, : responses[i]] = row.columns[name]
        tensors[name] = column
    tensors["responses"] = input_ids[:, p:].clone()
    if rows[0].routed_experts is not None:
        tensors["routed_experts"] = _routed_experts(rows, shape, place)

    meta_info: dict[str, Any] = {"global_token_num": attention.sum(-1).tolist()}
    temperatures = [row.temperature for row in rows]
    if len(set(temperatures)) == 1:
        meta_info["temperature"] = temperatures[0]
    else:
        tensors["temperature"] = torch.tensor(temperatures)
    non_tensors = {name: _array([row.fields[name] for row in rows]) for name in rows[0].fields}
    if rows[0].multi_modal_inputs is not None:
        non_tensors["multi_modal_inputs"] = _array([row.multi_modal_inputs for row in rows])
    return Layout(tensors, non_tensors, meta_info)


def _positions(rows: Sequence[VerlRow], attention: Tensor, place: Sequence[slice]) -> Tensor:
    """Return the positions, padded like verl's: of text 0 on the left and the last one repeated on
    the right; of a model that reads pictures, places are 1 in the padding, rotary positions 0."""
    if rows[0].multi_modal_inputs is None:
        return (attention.cumsum(-1) - 1).clamp(min=0)
    found = attention.new_zeros(len(rows), 4, attention.shape[1])
    found[:, 0] = 1
    for i, row in enumerate(rows):
        found[i, :, place[i]] = row.position_ids
    return found


def _width(name: str, limit: int | None, lengths: Sequence[int], rows: Sequence[VerlRow]) -> int:
    longest = max(lengths)
    if limit is None or longest <= limit:
        return limit or longest
    info = rows[lengths.index(longest)].fields["extra_info"]
    raise BatchError(
        f"trajectory {info['trajectory_uid']!r} has a row of {longest} tokens and {name} is "
        f"{limit}; raise it, here and in verl's rollout, or leave the trajectory out: nothing is "
        "cut"
    )


def _routed_experts(
    rows: Sequence[VerlRow], shape: tuple[int, int], place: Sequence[slice]
) -> Tensor:
    first = rows[0].routed_experts
    if first is None:
        raise BatchError("the first step has no routed_experts; give them with every step or none")
    found = first.new_zeros(*shape, *first.shape[1:])
    for i, row in enumerate(rows):
        if row.routed_experts is None or row.routed_experts.shape[1:] != first.shape[1:]:
            raise BatchError("the steps' routed_experts differ in layers or top_k; one model each")
        found[i, place[i]] = row.routed_experts
    return found


def _array(values: Sequence[Any]) -> npt.NDArray[Any]:
    if all(type(v) is int for v in values):
        return np.array(values, dtype=np.int32)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


class VerlBackend(TrainingBackend):
    """Steps -> verl's batches; verl runs the loop. See the module's docstring."""

    def __init__(self, config: VerlConfig | None = None) -> None:
        self.config = config or VerlConfig()

    @classmethod
    def build(cls, config: Any = None, *args: Any, **kwargs: Any) -> TrainingBackend:
        """`VerlBackend(config, …)`.

        Raises:
            BackendConfigError: `config` is another backend's, as `stepwell train` passes it.
        """
        if config is not None and not isinstance(config, VerlConfig):
            raise BackendConfigError(
                f"the verl backend was given a {type(config).__name__}; it takes a VerlConfig. "
                "verl runs its own loop, so `stepwell train` cannot drive it: feed your verl "
                "trainer from the pool with stepwell.backends.verl.feed.VerlFeed "
                "(docs/design/backends.md), or set trainer.backend=torch"
            )
        return cls(config, *args, **kwargs)

    @classmethod
    def missing(cls) -> str | None:
        absent = [m for m in ("verl", "tensordict") if importlib.util.find_spec(m) is None]
        return f"{' and '.join(absent)} not installed: {REMEDY}" if absent else None

    def rows(
        self,
        steps: Sequence[Step],
        *,
        columns: Mapping[str, Tensor] | None = None,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        pictures: Mapping[str, bytes] = NO_PICTURES,
    ) -> list[VerlRow]:
        """The rows of `steps`, unpadded; needs no verl. See `rows.build`.

        Args:
            pictures: PNG by digest, of those that the steps name.
        """
        model_path = self.config.model_path
        images = None if model_path is None else RowImages(model_path, pictures)
        return build(steps, form=self.config.rows, columns=columns, tasks=tasks, images=images)

    def convert(
        self,
        steps: list[Step],
        *,
        columns: Mapping[str, Tensor] | None = None,
        tasks: Mapping[str, Mapping[str, Any]] | None = None,
        pictures: Mapping[str, bytes] = NO_PICTURES,
    ) -> DataProto:
        """The `DataProto` of `steps`.

        Args:
            columns: Stepwell's columns, flat over the response tokens, [T] each, to be used in
                place of verl's: `advantages`, `prox_log_probs`, `weights`, `coef`, … With `coef`
                set verl's `actor.loss_agg_mode` to `token-sum`: the means are in it.
            tasks: prompt_uid -> its task, for `data_source`, `reward_model` and `extra_info`.
            pictures: as of `rows`; with `model_path`, rows have `multi_modal_inputs` and position
                ids of four rows.

        Raises:
            BackendConfigError: verl is not installed.
            BatchError: what no batch can be made of; see `rows.build` and `lay_out`.
        """
        require_verl()
        from tensordict import TensorDict
        from verl import DataProto as Proto

        rows = self.rows(steps, columns=columns, tasks=tasks, pictures=pictures)
        layout = lay_out(rows, self.config)
        batch = TensorDict(layout.tensors, batch_size=[len(layout.tensors["prompts"])])
        return Proto(batch, layout.non_tensors, layout.meta_info)

    def convert_with_pictures(self, steps: list[Step], pictures: Mapping[str, bytes]) -> DataProto:
        """`convert` of steps with `pictures`, PNG by digest."""
        return self.convert(steps, pictures=pictures)

    def convert_groups(
        self,
        groups: Sequence[Group],
        *,
        columns: Mapping[str, Tensor] | None = None,
        pictures: Mapping[str, bytes] = NO_PICTURES,
    ) -> DataProto:
        """`convert` of leased groups, with their tasks. A greedy baseline rollout (ReMax) is
        never trained and left out; `columns` are over `trained_steps(groups)`. If each group has
        the reward of one, it is verl's `reward_baselines` [B]."""
        tasks = {group.prompt_uid: group.metadata for group in groups}
        steps = trained_steps(groups)
        data = self.convert(steps, columns=columns, tasks=tasks, pictures=pictures)
        baselines = {g.prompt_uid: b for g in groups if (b := _baseline(g)) is not None}
        uids = data.non_tensor_batch["uid"].tolist()
        if baselines.keys() >= set(uids):
            data.batch["reward_baselines"] = torch.tensor([baselines[uid] for uid in uids])
        return data


def trained_steps(groups: Sequence[Group]) -> list[Step]:
    """The steps of `groups` in order, without those of greedy baseline rollouts and replies that
    nobody saw."""
    trained = [t for g in seen_groups(groups) for t in g.trajectories if not t.metadata.get(GREEDY)]
    return [step for t in trained for step in t.steps]


def _baseline(group: Group) -> float | None:
    """Mean reward of the greedy rollouts; None: none has one."""
    greedy = [t.reward for t in group.trajectories if t.metadata.get(GREEDY)]
    rewards = [reward for reward in greedy if reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def seen_groups(groups: Sequence[Group]) -> list[Group]:
    """`groups` without the replies that nobody saw."""
    return [replace(g, trajectories=tuple(map(_seen, g.trajectories))) for g in groups]


def _seen(trajectory: Trajectory) -> Trajectory:
    """A trajectory without the replies that nobody saw, whose reward the last one takes over."""
    if not (unseen := superseded(trajectory.steps)):
        return trajectory
    seen = [s for s in trajectory.steps if s.step_index not in unseen]
    lost = [s.reward for s in trajectory.steps if s.step_index in unseen and s.reward is not None]
    if seen and lost:
        seen[-1] = replace(seen[-1], reward=sum(lost, seen[-1].reward or 0.0))
    return replace(trajectory, steps=tuple(seen))


def require_verl() -> None:
    """Raises:
    BackendConfigError: verl or tensordict is missing.
    """
    missing = VerlBackend.missing()
    if missing:
        raise BackendConfigError(f"the verl backend cannot be used here; {missing}")


def _keys(data: DataProto, outputs: Sequence[int]) -> list[str]:
    """verl's name of each row, `{uid}_{session}_{output}`."""
    x = data.non_tensor_batch
    names = zip(x["uid"], x["session_id"], outputs, strict=True)
    return [f"{uid}_{session}_{output}" for uid, session, output in names]


def compute_advantage(data: DataProto, estimator: str = "grpo", **options: Any) -> DataProto:
    """verl's advantages and returns of a batch with `rm_scores`, a trajectory counting once.

    `grpo` goes over trajectories, whatever rows they have, by verl's own rule: the last row of each
    is normalised in its group and the others take its advantage. `gae` and `remax` go over rows.
    verl's other estimators count every row as a rollout, so they are refused where a trajectory has
    several.

    Args:
        options: verl's: `gamma`, `lam`, `norm_adv_by_std_in_grpo`, `config`.

    Raises:
        BatchError: no rewards, several rows per trajectory and an estimator that counts rows, or
            `remax` of a batch in which a group has no reward of a greedy rollout.
    """
    require_verl()
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    if "rm_scores" not in data.batch:
        raise BatchError("the batch has no rm_scores: its trajectories have no reward; score them")
    trained = data.batch["response_mask"].any(-1).tolist()
    # verl reads the advantage off the last row, at its first trained token: let it have one.
    outputs = data.non_tensor_batch["output_index"]
    keys = _keys(data, [int(o) + len(data) * has for o, has in zip(outputs, trained, strict=True)])
    most = max(Counter(key.rsplit("_", 1)[0] for key in keys).values())
    if estimator == "remax" and "reward_baselines" not in data.batch:
        raise BatchError(
            "estimator is 'remax' and the batch has no reward_baselines: each group needs a greedy "
            f"rollout with a reward, a trajectory with metadata {{{GREEDY!r}: true}}"
        )
    if most > 1 and estimator not in ("grpo", "gae", "remax"):
        raise BatchError(
            f"estimator is {estimator!r}, which counts every row as a rollout, and a trajectory "
            f"has {most} rows; use grpo, or Stepwell's advantages (columns=)"
        )
    if estimator == "gae" and options.get("config") is None:
        options["config"] = {}  # verl asks it for use_pf_ppo
    for name in ("token_level_scores", "token_level_rewards"):
        if name not in data.batch:
            data.batch[name] = data.batch["rm_scores"]
    return compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator=AdvantageEstimator(estimator), **options
    )

"""The same 64 random groups through every backend's conversion: same mask, advantages, loss.

A conversion is asked what it makes of one batch: of every token that it trains, the context, the
id, the advantage and the gradient of the loss (`Seen`), and the loss itself. Log-probs, advantages,
weights and coefficients are given; what may differ is where a backend puts them and how its loss
adds them up. `CONVERSIONS` holds one function per backend; the first is what others must equal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from stepwell.backends.base import TokenBatch
from stepwell.backends.config import VerlConfig
from stepwell.backends.rows import build_rows
from stepwell.backends.slime.backend import SlimeBackend, train_data
from stepwell.backends.slime.samples import to_samples
from stepwell.backends.verl.backend import VerlBackend, lay_out
from stepwell.datapool.types import Group, Step
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.losses import coefficients, make_loss_fn
from stepwell.trainer.config import AdvantageConfig, LossConfig
from tests.backends import slime_itself
from tests.backends.random_groups import (
    current_log_probs,
    properties,
    random_groups,
    steps_of,
)

HAS_VERL = importlib.util.find_spec("verl") is not None
AGGREGATIONS = (
    "token-mean",
    "trajectory-mean",
    "trajectory-sum",
    "trajectory-sum-norm",
    "sequence-mean-token-mean",
)
GROUPS = random_groups()
NORM = 50.0
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0


class Key(NamedTuple):
    """One sampled token."""

    trajectory: str
    step: int
    position: int


class Token(NamedTuple):
    """A response token as a backend's trainer sees it."""

    context: bytes
    """The ids before it, as int64."""
    id: int
    advantage: float
    gradient: float
    """∂ loss / ∂ log π(token)."""


@dataclass(frozen=True)
class Seen:
    """Tokens that a backend trains on, and its loss. A token that it masks is not in `tokens`."""

    tokens: dict[Key, Token]
    loss: float


@dataclass(frozen=True)
class Case:
    """A batch and all that its loss needs, flat over the response tokens of `steps`."""

    groups: list[Group]
    steps: list[Step]
    batch: TokenBatch
    """With `advantages`, `weights`, `prox_log_probs` and `coef`."""
    log_probs: Tensor
    """Log-probs of the policy that is trained, [T]."""
    mask: Tensor
    """[T]; 0: not to be trained."""
    config: LossConfig

    @property
    def columns(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.batch.columns.items() if k != "rollout_log_probs"}


def make_case(aggregation: str, *, masked: bool = False) -> Case:
    groups = GROUPS
    steps = steps_of(groups)
    batch = TokenBatch.of(steps)
    draw = np.random.default_rng(1)
    prox = np.concatenate(current_log_probs(steps, seed=2))
    weights = draw.uniform(0, 1, batch.n_tokens)
    weights[draw.random(batch.n_tokens) < 0.05] = 0.0  # outside a band: counts in N all the same
    mask = torch.from_numpy(draw.random(batch.n_tokens) > (0.1 if masked else -1.0)).float()
    config = LossConfig.model_validate(
        {
            "loss_agg_mode": aggregation,
            "loss_scale_factor": NORM if aggregation.endswith("-norm") else None,
            "clip_ratio_low": CLIP_LOW,
            "clip_ratio_high": CLIP_HIGH,
            "clip_ratio_c": DUAL_CLIP,
        }
    )
    batch.columns["prox_log_probs"] = torch.from_numpy(prox)
    batch.columns["weights"] = torch.from_numpy(weights).float()
    batch.columns["advantages"] = compute_advantages(groups, AdvantageConfig()).columns[
        "advantages"
    ]
    batch.columns["coef"] = coefficients(
        batch.lengths.tolist(), [s.trajectory_uid for s in steps], config, mask=mask
    )
    new = torch.from_numpy(np.concatenate(current_log_probs(steps, seed=3, scale=0.6)))
    return Case(groups, steps, batch, new, mask, config)


# --- torch: the reference -------------------------------------------------------------------------


def by_torch(case: Case) -> Seen:
    """Stepwell's own loss, over the rows that its torch backend computes."""
    log_probs = case.log_probs.clone().requires_grad_()
    loss = make_loss_fn(case.config)(log_probs, None, case.batch.columns).loss
    loss.backward()
    assert log_probs.grad is not None
    gradient = log_probs.grad.tolist()
    coef, advantages = (case.batch.columns[k].tolist() for k in ("coef", "advantages"))
    offsets = case.batch.offsets.tolist()
    tokens = {}
    for row in build_rows(case.steps, "tree"):
        ids = row.ids.astype(np.int64)
        for i in row.steps:
            step = case.steps[i]
            for j in range(len(step.response_ids)):
                t, at = offsets[i] + j, len(step.prompt_ids) + j
                if coef[t] != 0:
                    tokens[Key(step.trajectory_uid, step.step_index, j)] = Token(
                        ids[:at].tobytes(), int(ids[at]), advantages[t], gradient[t]
                    )
    return Seen(tokens, float(loss.detach()))


# --- verl -----------------------------------------------------------------------------------------

VerlLoss = Callable[[dict[str, Tensor], Tensor], Tensor]
"""(the batch's tensors, log π [B, R]) -> loss."""


def verl_restated(x: dict[str, Tensor], log_probs: Tensor) -> Tensor:
    """`compute_policy_loss_vanilla` and `agg_loss(…, "token-sum")` of verl 0.9, in our words."""
    ratio = torch.exp((log_probs - x["old_log_probs"]).clamp(-20, 20))
    a = x["advantages"]
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = torch.maximum(-a * ratio, -a * clipped)
    loss = torch.where(a < 0, torch.minimum(-a * DUAL_CLIP, loss), loss)
    return (loss * x["rollout_is_weights"] * x["response_mask"]).sum()


def verl_live(x: dict[str, Tensor], log_probs: Tensor, aggregation: str = "token-sum") -> Tensor:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config.actor import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=CLIP_LOW,
        clip_ratio_high=CLIP_HIGH,
        clip_ratio_c=DUAL_CLIP,
    )
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=x["old_log_probs"],
        log_prob=log_probs,
        advantages=x["advantages"],
        response_mask=x["response_mask"].bool(),
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=x["rollout_is_weights"],
    )
    assert isinstance(loss, Tensor)
    return loss


def by_verl(
    case: Case,
    policy_loss: VerlLoss = verl_restated,
    form: Literal["merged", "step"] = "merged",
    live: bool = False,
) -> Seen:
    """Read back from the padded tensors; π travels in the reference's column."""
    backend = VerlBackend(VerlConfig(rows=form))
    columns = case.columns | {"ref_log_probs": case.log_probs, "mask": case.mask}
    if live:
        data = backend.convert(case.steps, columns=columns)
        x, info = dict(data.batch.items()), data.non_tensor_batch["extra_info"]
    else:
        layout = lay_out(backend.rows(case.steps, columns=columns))
        x, info = layout.tensors, layout.non_tensors["extra_info"]
    log_probs = x["ref_log_prob"].clone().requires_grad_()
    loss = policy_loss(x, log_probs)
    loss.backward()
    assert log_probs.grad is not None
    gradient = log_probs.grad.numpy()
    seen = {k: v.numpy() for k, v in x.items()}
    width = seen["prompts"].shape[1]
    tokens: dict[Key, Token] = {}
    for i, about in enumerate(info):
        attended = seen["attention_mask"][i].astype(bool)
        for part in about["steps"]:
            for at in range(part["start"], part["end"]):
                if not seen["response_mask"][i, at]:
                    continue
                key = Key(about["trajectory_uid"], part["step_index"], at - part["start"])
                assert key not in tokens, f"{key} is trained twice"
                before = seen["input_ids"][i, : width + at][attended[: width + at]]
                tokens[key] = Token(
                    before.tobytes(),
                    int(seen["responses"][i, at]),
                    float(seen["advantages"][i, at]),
                    float(gradient[i, at]),
                )
    assert int(seen["response_mask"].sum()) == len(tokens), "a token of no step is trained"
    return Seen(tokens, float(loss.detach()))


# --- slime ----------------------------------------------------------------------------------------

SLIME_AGGREGATIONS = ("token-mean", "trajectory-mean")
"""slime's mean over tokens (`--calculate-per-token-loss`) and its default, over rollouts."""
SlimeLoss = Callable[..., Tensor]


def slime_restated(
    data: dict[str, list[Any]],
    *,
    log_probs: list[Tensor],
    old_log_probs: list[Tensor],
    weights: list[Tensor],
    clip: tuple[float, float, float],
    per_token: bool,
    n_rollouts: int,
) -> Tensor:
    """slime 0.3.1 in our words: `compute_policy_loss` (utils/ppo_utils.py), a TIS function's
    weights, `get_sum_of_sample_mean` (megatron_utils/cp_utils.py), `loss_function` (loss.py)."""
    low, high, dual = clip
    masks = [torch.tensor(m) for m in data["loss_masks"]]
    terms = []
    for i, (new, old, w) in enumerate(zip(log_probs, old_log_probs, weights, strict=True)):
        ratio, a = torch.exp(new - old), data["rewards"][i]
        loss = torch.maximum(-ratio * a, -ratio.clamp(1 - low, 1 + high) * a)
        if a < 0:
            loss = loss.clamp(max=-dual * a)
        denominator = 1 if per_token else max(data["rollout_mask_sums"][i], 1)
        terms.append((loss * w * masks[i]).sum() / denominator)
    count = sum(max(int(m.sum()), 1) for m in masks) if per_token else n_rollouts
    return torch.stack(terms).sum() / count


def by_slime(case: Case, policy_loss: SlimeLoss = slime_restated) -> Seen:
    """Advantages, masks and denominators are slime's; π and weights are laid out as its tokens."""
    samples = to_samples(case.groups).flat
    by_name = {(s.trajectory_uid, s.step_index): i for i, s in enumerate(case.steps)}
    where: list[dict[int, tuple[Key, int]]] = []
    columns: dict[str, list[Tensor]] = {name: [] for name in ("new", "old", "weights")}
    for sample in samples:
        places = {}
        begin = len(sample.tokens) - sample.response_length
        for index in sample.metadata["step_indices"]:
            i = by_name[sample.metadata["trajectory_uid"], index]
            step, first = case.steps[i], int(case.batch.offsets[i])
            for j in range(len(step.response_ids)):
                key = Key(step.trajectory_uid, step.step_index, j)
                places[len(step.prompt_ids) + j - begin] = key, first + j
        where.append(places)
        flat = torch.tensor([places[at][1] for at in sorted(places)])
        at = torch.tensor(sorted(places))
        given = zip(
            columns.values(),
            (case.log_probs, case.batch.columns["prox_log_probs"], case.batch.columns["weights"]),
            strict=True,
        )
        for column, values in given:
            column.append(torch.zeros(sample.response_length).index_put((at,), values[flat]))
        keep = torch.ones(sample.response_length).index_put((at,), case.mask[flat])
        assert sample.loss_mask is not None
        sample.loss_mask = [int(m and k) for m, k in zip(sample.loss_mask, keep, strict=True)]
    data = train_data(SlimeBackend(), samples)
    log_probs = [x.clone().requires_grad_() for x in columns["new"]]
    trained = {r for r, n in zip(data["rollout_ids"], data["rollout_mask_sums"], strict=True) if n}
    loss = policy_loss(
        data,
        log_probs=log_probs,
        old_log_probs=columns["old"],
        weights=columns["weights"],
        clip=(CLIP_LOW, CLIP_HIGH, DUAL_CLIP),
        per_token=case.config.loss_agg_mode == "token-mean",
        n_rollouts=len(trained),  # slime itself counts those without a trained token too
    )
    loss.backward()
    tokens: dict[Key, Token] = {}
    for i, places in enumerate(where):
        mask, begin = data["loss_masks"][i], len(data["tokens"][i]) - data["response_lengths"][i]
        gradient = log_probs[i].grad
        assert gradient is not None
        assert {at for at, m in enumerate(mask) if m} <= places.keys(), "a token of no step"
        for at, (key, _) in places.items():
            if not mask[at]:
                continue
            assert key not in tokens, f"{key} is trained twice"
            tokens[key] = Token(
                np.array(data["tokens"][i][: begin + at], dtype=np.int64).tobytes(),
                data["tokens"][i][begin + at],
                data["rewards"][i],
                float(gradient[at]),
            )
    return Seen(tokens, float(loss.detach()))


SLIME: dict[str, SlimeLoss] = {"slime": slime_restated}
if slime_itself.HAS_SLIME:
    SLIME["slime itself"] = slime_itself.loss


CONVERSIONS: dict[str, Callable[[Case], Seen]] = {
    "torch": by_torch,
    "verl": by_verl,
    "verl, a row per step": partial(by_verl, form="step"),
}
if HAS_VERL:
    CONVERSIONS["verl itself"] = partial(by_verl, policy_loss=verl_live, live=True)


# --- what must hold -------------------------------------------------------------------------------


def assert_same(found: Seen, wanted: Seen) -> None:
    only_one_has = found.tokens.keys() ^ wanted.tokens.keys()
    assert not only_one_has  # pytest takes minutes to say how two views of so many keys differ
    for key, token in wanted.tokens.items():
        other = found.tokens[key]
        assert (other.context, other.id) == (token.context, token.id), key
    for what in ("advantage", "gradient"):
        np.testing.assert_allclose(
            [getattr(found.tokens[key], what) for key in wanted.tokens],
            [getattr(token, what) for token in wanted.tokens.values()],
            rtol=1e-6,
            atol=1e-6 if what == "advantage" else 1e-8,
            err_msg=what,
        )
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6, abs=1e-6)


def test_the_groups_hold_every_hard_case() -> None:
    assert len(GROUPS) == 64
    assert all(n >= 5 for n in properties(GROUPS).values())


def test_the_reference_trains_every_sampled_token_once_on_its_own_prompt() -> None:
    case = make_case("token-mean")
    wanted = {
        Key(s.trajectory_uid, s.step_index, j): (
            np.concatenate([s.prompt_ids, s.response_ids[:j]]).astype(np.int64).tobytes(),
            int(s.response_ids[j]),
        )
        for s in case.steps
        for j in range(len(s.response_ids))
    }
    assert {k: (t.context, t.id) for k, t in by_torch(case).tokens.items()} == wanted


@pytest.mark.parametrize("backend", [name for name in CONVERSIONS if name != "torch"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_backend_has_the_same_mask_advantages_gradient_and_loss(
    backend: str, aggregation: str
) -> None:
    case = make_case(aggregation)
    assert_same(CONVERSIONS[backend](case), by_torch(case))


@pytest.mark.parametrize("backend", [name for name in CONVERSIONS if name != "torch"])
def test_what_is_masked_is_masked_everywhere(backend: str) -> None:
    case = make_case("trajectory-mean", masked=True)
    wanted = by_torch(case)
    assert len(wanted.tokens) < case.batch.n_tokens
    assert_same(CONVERSIONS[backend](case), wanted)


@pytest.mark.parametrize("slime", SLIME)
@pytest.mark.parametrize("aggregation", SLIME_AGGREGATIONS)
def test_slime_has_the_same_mask_advantages_gradient_and_loss(slime: str, aggregation: str) -> None:
    case = make_case(aggregation)
    assert_same(by_slime(case, SLIME[slime]), by_torch(case))


@pytest.mark.parametrize("slime", SLIME)
def test_what_is_masked_is_masked_in_slime(slime: str) -> None:
    case = make_case("trajectory-mean", masked=True)
    assert_same(by_slime(case, SLIME[slime]), by_torch(case))


def test_a_token_in_the_wrong_place_is_noticed() -> None:
    case = make_case("token-mean")
    wanted = by_torch(case)
    key = next(iter(wanted.tokens))
    moved = wanted.tokens | {key: wanted.tokens[key]._replace(advantage=9.0)}
    with pytest.raises(AssertionError, match="advantage"):
        assert_same(replace(wanted, tokens=moved), wanted)
    fewer = {k: t for k, t in wanted.tokens.items() if k != key}
    with pytest.raises(AssertionError, match=f"trajectory='{key.trajectory}'"):
        assert_same(replace(wanted, tokens=fewer), wanted)


@pytest.mark.skipif(not HAS_VERL, reason="make test-verl runs it, where verl is")
def test_verls_own_token_mean_is_ours_without_coefficients() -> None:
    case = make_case("token-mean")
    wanted = by_torch(case)
    columns = {k: v for k, v in case.batch.columns.items() if k != "coef"}
    plain = replace(case, batch=replace(case.batch, columns=columns))
    found = by_verl(plain, policy_loss=partial(verl_live, aggregation="token-mean"), live=True)
    assert_same(found, wanted)


@pytest.mark.skipif(not HAS_VERL, reason="make test-verl runs it, where verl is")
@pytest.mark.parametrize("form", ["merged", "step"])
def test_verls_own_advantages_are_ours_however_many_rows_a_trajectory_has(form: Any) -> None:
    from stepwell.backends.verl.backend import compute_advantage

    steps = steps_of(GROUPS)
    wanted = compute_advantages(GROUPS, AdvantageConfig()).columns["advantages"]
    data = compute_advantage(VerlBackend(VerlConfig(rows=form)).convert(steps))
    batch = TokenBatch.of(steps)
    first = {(s.trajectory_uid, s.step_index): int(o) for s, o in zip(steps, batch.offsets[:-1])}  # noqa: B905
    n = 0
    for i, about in enumerate(data.non_tensor_batch["extra_info"]):
        for part in about["steps"]:
            size = part["end"] - part["start"]
            t = first[about["trajectory_uid"], part["step_index"]]
            # A group of one: verl divides its reward by 1 + 1e-6, we by 1.
            torch.testing.assert_close(
                data.batch["advantages"][i, part["start"] : part["end"]],
                wanted[t : t + size],
                rtol=2e-6,
                atol=2e-6,
            )
            n += size
    assert n == batch.n_tokens

"""π_prox of a batch that is one optimizer step is the step's own forward pass: the same columns,
loss, gradient and metrics as of a pass before it, and no such pass."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool.types import SFT, Group
from stepwell.trainer.sampling import CHANNEL
from tests.trainer.test_loop_losses import CountingBackend, groups, train, updater_of

PLAIN = ("backend.betas=[0.0,0.95]", "backend.max_grad_norm=1e9", "backend.lr=0.01")
"""AdamW's first moment is the gradient."""
LONG = pytest.mark.long
SMALL = "backend.micro_batch_tokens=24"
"""Several micro-batches."""


class WithoutColumns(CountingBackend):
    """A plug-in that does not write what the loss finds: π_prox takes a pass of its own."""

    returns_columns = False


def batch(*, channel: bool = False) -> list[Group]:
    """Steps of three versions, some without log-probs; on request the second group is SFT's."""
    first, second = groups()
    text, _ = groups(log_probs=False)
    trajectories = (
        first.trajectories[0],
        replace(
            first.trajectories[1],
            steps=tuple(replace(s, policy_version=1) for s in first.trajectories[1].steps),
        ),
        text.trajectories[2],
    )
    second = replace(second, metadata={CHANNEL: SFT}) if channel else second
    return [replace(first, trajectories=trajectories), second]


def both(
    folder: Path, *overrides: str, channel: bool
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Record, columns and gradient of the last of three steps, one with conversations: of the first
    forward pass as π_prox, and of a pass of its own, in the same micro-batches if there are no
    conversations."""
    records, columns, gradients = [], [], []
    with ExitStack() as stack:
        for backend in (CountingBackend, WithoutColumns):
            updater = stack.enter_context(updater_of(folder, *PLAIN, *overrides, backend=backend))
            updater.progress.published |= {1: 0, 2: 0}
            updater.progress.version = 2
            steps = 1 if channel else 3
            for _ in range(steps):
                trained, record = train(updater, batch(channel=channel))
            own = cast(CountingBackend, updater.backend)
            assert own.passes == (0 if backend is CountingBackend else steps)
            assert record.pop("off_policy/recomputed") == float(own.passes > 0)
            records.append(record)
            columns.append(trained.columns)
            state = own.state_dict()["optimizer"]["state"]
            gradients.append({str(key): state[key]["exp_avg"] for key in state})
    return records, columns, gradients


def assert_same(folder: Path, *overrides: str, channel: bool = False) -> dict[str, float]:
    (got, expected), (ours, theirs), (gradient, other) = both(folder, *overrides, channel=channel)
    exact = 1e-5 if channel else 1e-6  # a pass over rollouts alone has other micro-batches
    assert got.keys() == expected.keys()
    for name in got.keys() - {"seconds"}:
        assert got[name] == pytest.approx(expected[name], rel=exact, abs=exact), name
    for name in ("prox_log_probs", "weights", "rollout_log_probs", "advantages", "coef"):
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=0, atol=exact, equal_nan=True, msg=name
        )
    for name in gradient:
        size = max(1e-6, float(other[name].abs().max()))
        torch.testing.assert_close(gradient[name], other[name], rtol=0, atol=exact * size, msg=name)
    return got


POLICIES = ("ppo", "gspo", "cispo", "sapo", "geo_mean", "dppo_tv", "gpg")
FORMS = ("tree", "merged", "step")


@pytest.mark.parametrize(
    ("policy", "form"),
    [
        # Each loss in the form that differs most from steps, and each form with one loss.
        pytest.param(policy, form, marks=[] if policy == "ppo" or form == "tree" else LONG)
        for policy in POLICIES
        for form in FORMS
    ],
)
def test_every_loss_has_the_same_gradient_in_every_row_form(
    tmp_path: Path, policy: str, form: str
) -> None:
    loss, rows = f"algorithm.loss.policy={policy}", f"backend.rows={form}"
    record = assert_same(tmp_path, loss, rows, SMALL)
    assert record["micro_batches"] > 1
    assert record["off_policy_share"] > 0


@pytest.mark.parametrize(
    "options",
    [
        ("algorithm.loss.policy=dppo_kl",),
        ("algorithm.loss.policy=dro",),
        ("algorithm.adv_estimator=rloo",),
        ("algorithm.adv_estimator=reinforce_running",),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.loss.entropy_coeff=0.01"),
        ("algorithm.loss.loss_agg_mode=trajectory-mean", "algorithm.loss.mask_truncated=true"),
        ("algorithm.kl.place=loss", "algorithm.kl.target_kl=0.1"),
        ("algorithm.off_policy.method=none",),
        ("algorithm.off_policy.method=tis",),
        ("algorithm.off_policy.method=mis",),
        ("algorithm.off_policy.method=icepop",),
        ("algorithm.off_policy.method=decoupled", "algorithm.off_policy.decay=0.5"),
        ("algorithm.off_policy.missing=keep",),
        ("async_training.use_rollout_log_probs=false",),
        ("backend.lora.rank=4",),
        ("backend.gradient_checkpointing=true", "backend.logits_mb=1"),
    ],
    ids=lambda options: ",".join(o.rpartition(".")[2] for o in options),
)
def test_every_setting_that_needs_no_pass_has_the_same_gradient_without_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert_same(tmp_path, *options, SMALL)


def test_conversations_beside_rollouts_have_no_part_in_the_weights(tmp_path: Path) -> None:
    record = assert_same(tmp_path, SMALL, channel=True)
    assert record["sft/loss"] > 0


def test_a_critic_that_is_warm_leaves_the_pass_to_the_policys_step(tmp_path: Path) -> None:
    options = ("algorithm.adv_estimator=gae", "algorithm.critic.warmup_updates=1")
    passes = []
    with updater_of(tmp_path, *options) as updater:
        for _ in range(4):
            _, record = train(updater)
            passes.append(record["off_policy/recomputed"])
            assert "staleness/mean" in record
    assert passes == [1, 1, 0, 0]


def test_policy_and_critic_give_their_gradients_back_for_engines_on_their_gpu(
    tmp_path: Path,
) -> None:
    with updater_of(tmp_path, "algorithm.adv_estimator=gae") as updater:
        train(updater)
        assert updater.critic is not None
        models = (updater.backend, updater.critic._model)
        trained = [p for m in models for p in cast(TorchBackend, m)._masters.parameters]
        assert any(p.grad is not None for p in trained)
        updater.free_cache()
        assert all(p.grad is None for p in trained)


@pytest.mark.parametrize(
    "options",
    [
        ("async_training.require_batches=2", "rollout.max_outstanding_groups=64"),
        ("async_training.ppo_epochs=2",),
        ("algorithm.kl.place=reward",),
        ("algorithm.loss.policy=clip_cov",),
        ("algorithm.loss.policy=kl_cov",),
        ("algorithm.off_policy.opsm=0.1",),
        ("algorithm.off_policy.veto=0.001",),
        ("algorithm.off_policy.method=geometric_tis",),
        ("algorithm.off_policy.method=geometric_mis",),
        ("algorithm.off_policy.method=sequence_tis",),
        ("algorithm.off_policy.method=opsm",),
    ],
    ids=lambda options: options[0].rpartition(".")[2],
)
def test_what_needs_the_batchs_log_probs_before_its_step_takes_one_pass_and_says_so(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with updater_of(tmp_path, *options) as updater:
        _, record = train(updater)
        assert cast(CountingBackend, updater.backend).passes == 1
    assert record["off_policy/recomputed"] == 1

"""The updater on a real backend: which columns a batch gets by configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stepwell.backends.torch.backend import TorchBackend, TorchBatch
from stepwell.config.load import load_config
from stepwell.datapool.remote.lease_keeper import LeaseKeeper
from stepwell.datapool.types import DUPLICATE_OF, TRAIN, Group, Lease, Trajectory
from stepwell.run.trainer import build_updater
from stepwell.trainer.batches import Batches, TrainedChannel
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.metrics import Phases
from stepwell.trainer.progress import Progress
from stepwell.trainer.sampling import GroupFilter
from stepwell.trainer.trajectory_metrics import trajectory_metrics
from stepwell.trainer.updater import Updater
from tests.builders import step

ROOT = Path(__file__).resolve().parents[2]


class CountingBackend(TorchBackend):
    """The torch backend, counting its passes to score the batch."""

    passes = 0

    def compute_log_probs(self, batch: TorchBatch) -> Tensor:
        self.passes += 1
        return super().compute_log_probs(batch)


@contextmanager
def updater_of(
    tmp_path: Path, *overrides: str, backend: type[TorchBackend] = CountingBackend
) -> Iterator[Updater]:
    fixed = ("data.train.size=4", "data.val.size=4", "backend.dtype=float32")
    config = load_config(
        str(ROOT / "configs/quickstart.yaml"),
        [f"run.dir={tmp_path}", f"model.path={ROOT}/examples/quickstart/model", *fixed, *overrides],
    )
    updater = build_updater(config, backend(config.backend, config.model.path))
    try:
        yield updater
    finally:
        updater.close()


def groups(log_probs: bool = True) -> list[Group]:
    """Two prompts, three trajectories each, of one or two steps."""

    def trajectory(p: int, t: int) -> Trajectory:
        uid, context, steps = f"p{p}-t{t}", [5 + p, 6, 7], []
        for i in range(1 + t % 2):
            response = [10 + (3 * p + 2 * t + 5 * i + j) % 20 for j in range(3 + t)]
            steps.append(
                step(
                    context,
                    response,
                    uid,
                    i,
                    prompt_uid=f"p{p}",
                    reward=float(t == p) if i == t % 2 else None,
                    rollout_log_probs=[-1.5] * len(response) if log_probs else None,
                )
            )
            context = [*context, *response, 9]
        return Trajectory(uid, f"p{p}", tuple(steps))

    return [Group(f"p{p}", tuple(trajectory(p, t) for t in range(3))) for p in range(2)]


def train(updater: Updater, batch: Sequence[Group] | None = None) -> tuple[Any, dict[str, float]]:
    torch.set_num_threads(1)
    prepared = updater.prepare(groups() if batch is None else batch)
    metrics = dict(prepared.metrics)
    for mini_batch in prepared.mini_batches:
        metrics |= updater.step(prepared, mini_batch.steps)
    return prepared.batch, metrics


POLICIES: dict[str, Callable[[dict[str, float]], bool]] = {
    "gspo": lambda m: "policy/clip_frac_high" in m,
    "clip_cov": lambda m: "policy/cov_selected_frac" in m,
    "kl_cov": lambda m: m["policy/cov_selected_frac"] > 0,
    "cispo": lambda m: m["policy/ratio"] == pytest.approx(1.0, abs=1e-3),
    "gpg": lambda m: "policy/ratio" not in m,
    "geo_mean": lambda m: m["policy/ratio"] == pytest.approx(1.0, abs=1e-3),
    "dppo_tv": lambda m: "policy/clip_frac_high" in m,
    "dppo_kl": lambda m: "policy/dual_clip_frac" in m,
    "dro": lambda m: "policy/ratio" in m,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_loss_trains_through_the_loop(tmp_path: Path, policy: str) -> None:
    with updater_of(tmp_path, f"algorithm.loss.policy={policy}") as updater:
        _, metrics = train(updater)
    assert metrics["grad_norm"] > 0
    assert metrics["skipped_updates"] == 0
    assert POLICIES[policy](metrics)


def test_a_later_epoch_sees_the_ratio_that_the_first_made(tmp_path: Path) -> None:
    """π_prox stays, so r ≠ 1 and the clip acts; the columns are as they were."""
    keys = ("async_training.ppo_epochs=2", "backend.lr=0.02", "algorithm.loss.clip_ratio_low=0.01")
    with updater_of(tmp_path, *keys, "algorithm.loss.clip_ratio_high=0.01") as updater:
        prepared = updater.prepare(groups())
        assert [m.epoch for m in prepared.mini_batches] == [0, 1]
        one, two = (updater.step(prepared, m.steps) for m in prepared.mini_batches)
        assert updater.backend.passes == 1  # type: ignore[attr-defined]
    assert one["policy/kl_k3"] == pytest.approx(0, abs=1e-9)
    assert two["policy/kl_k3"] > 1e-4
    assert one["policy/clip_frac_high"] == 0 < two["policy/clip_frac_high"]


def test_a_plug_ins_loss_advantage_and_weight_train_through_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/plugin"))
    mine = (
        "algorithm.loss.policy=stepwell_hinge:HINGE",
        "algorithm.loss.options.margin=0.5",
        "algorithm.adv_estimator=stepwell_quantile:QUANTILE",
        "algorithm.off_policy.method=stepwell_tempered:TEMPERED",
    )
    with updater_of(tmp_path, *mine) as updater:
        batch, metrics = train(updater)
    assert set(batch.columns["advantages"].tolist()) == {0.0, 1.0}
    assert metrics["grad_norm"] > 0
    assert metrics["policy/hinge_frac"] == 0


def test_what_was_cut_off_trains_nothing_and_counts_in_its_group(tmp_path: Path) -> None:
    """The last step of t0 and the first of t1 end by length: t0 is masked, t1 is not."""

    def cut(group: Group) -> Group:
        def ended(t: Trajectory) -> Trajectory:
            first, *others = t.steps
            if t.trajectory_uid[-2:] in ("t0", "t1"):
                first = replace(first, finish_reason="length")
            return replace(t, steps=(first, *others))

        return replace(group, trajectories=tuple(map(ended, group.trajectories)))

    with updater_of(tmp_path, "algorithm.loss.mask_truncated=true") as updater:
        whole = updater.prepare(groups()).batch
        cut_off = updater.prepare([cut(g) for g in groups()])
    batch, metrics = cut_off.batch, cut_off.metrics
    trained = batch.columns["coef"] != 0
    owner = [s.trajectory_uid for s in batch.steps for _ in s.response_ids]
    assert {u for u, live in zip(owner, trained.tolist(), strict=True) if not live} == {
        "p0-t0",
        "p1-t0",
    }
    assert torch.equal(batch.columns["advantages"], whole.columns["advantages"])
    assert batch.columns["coef"].sum() == pytest.approx(1)
    assert metrics["policy/truncated_share"] == pytest.approx(1 - float(trained.float().mean()))


@pytest.mark.parametrize("masked", [True, False])
def test_a_reply_that_nobody_saw_trains_nothing_unless_that_is_wanted(
    tmp_path: Path, masked: bool
) -> None:
    def marked(group: Group) -> Group:
        def ended(t: Trajectory) -> Trajectory:
            *others, last = t.steps
            if others:
                last = replace(last, metadata={**last.metadata, DUPLICATE_OF: 0})
            return replace(t, steps=(*others, replace(last, parent_index=None)))

        return replace(group, trajectories=tuple(map(ended, group.trajectories)))

    with updater_of(tmp_path, f"algorithm.loss.mask_superseded={str(masked).lower()}") as updater:
        prepared = updater.prepare([marked(g) for g in groups()])
    trained = prepared.batch.columns["coef"] != 0
    index = [s.step_index for s in prepared.batch.steps for _ in s.response_ids]
    dead = {i for i, live in zip(index, trained.tolist(), strict=True) if not live}
    assert dead == ({1} if masked else set())
    assert prepared.batch.columns["coef"].sum() == pytest.approx(1)
    assert ("policy/superseded_share" in prepared.metrics) is masked


@pytest.mark.parametrize("own", [{"dataset": "a", "row": 3}, ["t1"], "t1", 0.5])
def test_what_a_white_box_agent_writes_under_that_key_is_no_other_try(
    tmp_path: Path, own: object
) -> None:
    def marked(t: Trajectory) -> Trajectory:
        return replace(t, steps=tuple(replace(s, metadata={DUPLICATE_OF: own}) for s in t.steps))

    batch = [replace(g, trajectories=tuple(map(marked, g.trajectories))) for g in groups()]
    with updater_of(tmp_path, "algorithm.loss.mask_superseded=true") as updater:
        prepared = updater.prepare(batch)
    assert (prepared.batch.columns["coef"] != 0).all()


def test_a_reply_that_nobody_saw_is_not_the_one_that_was_cut_off(tmp_path: Path) -> None:
    """A try that its client had left was answered when the agent had ended, at its limit."""

    def marked(t: Trajectory) -> Trajectory:
        *others, last = t.steps
        late = {"finish_reason": "length", "parent_index": None, "metadata": {DUPLICATE_OF: 0}}
        return replace(t, steps=(*others, replace(last, **late) if others else last))

    keys = ("algorithm.loss.mask_truncated=true", "algorithm.loss.mask_superseded=true")
    batch = [replace(g, trajectories=tuple(map(marked, g.trajectories))) for g in groups()]
    with updater_of(tmp_path, *keys) as updater:
        prepared = updater.prepare(batch)
    assert prepared.metrics["policy/truncated_share"] == 0
    assert trajectory_metrics(batch)["response_length/clip_ratio"] == 0
    first = torch.tensor([s.step_index == 0 for s in prepared.batch.steps for _ in s.response_ids])
    assert torch.equal(prepared.batch.columns["coef"] != 0, first)


@pytest.mark.parametrize("kinds", ["main", "all"])
def test_a_side_call_that_was_cut_off_leaves_a_trajectory_whole_where_it_is_not_trained(
    tmp_path: Path, kinds: str
) -> None:
    def cut(t: Trajectory) -> Trajectory:
        *others, last = t.steps
        return replace(
            t, steps=(*others, replace(last, finish_reason="length") if others else last)
        )

    batch = [with_side_call(g) for g in groups()]
    batch = [replace(g, trajectories=tuple(map(cut, g.trajectories))) for g in batch]
    keys = (f"rollout.train_branches={kinds}", "algorithm.loss.mask_truncated=true")
    with updater_of(tmp_path, *keys) as updater:
        share = updater.prepare(batch).metrics["policy/truncated_share"]
    assert (share == 0) is (kinds == "main")


def with_side_call(group: Group) -> Group:
    """The last call of each trajectory is one of its own, offered no tools."""

    def ended(t: Trajectory) -> Trajectory:
        *others, last = t.steps
        offered = [replace(s, metadata={**s.metadata, "tool_calls": 0}) for s in others]
        title = replace(last, prompt_ids=last.prompt_ids[::-1].copy(), parent_index=None)
        return replace(t, steps=(*offered, title if others else last))

    return replace(group, trajectories=tuple(map(ended, group.trajectories)))


@pytest.mark.parametrize("kinds", ["main", "all"])
def test_a_side_call_trains_nothing_unless_that_is_wanted_and_its_reward_stays(
    tmp_path: Path, kinds: str
) -> None:
    with updater_of(tmp_path, f"rollout.train_branches={kinds}") as updater:
        prepared = updater.prepare([with_side_call(g) for g in groups()])
    trained = prepared.batch.columns["coef"] != 0
    index = [s.step_index for s in prepared.batch.steps for _ in s.response_ids]
    left_out = {i for i, live in zip(index, trained.tolist(), strict=True) if not live}
    assert left_out == ({1} if kinds == "main" else set())
    assert prepared.batch.columns["coef"].sum() == pytest.approx(1)
    assert prepared.batch.columns["advantages"].isfinite().all()
    assert ("policy/untrained_branches_share" in prepared.metrics) is (kinds == "main")
    advantages = prepared.batch.columns["advantages"][trained]
    assert prepared.metrics["advantage/mean"] == pytest.approx(float(advantages.mean()))
    assert prepared.metrics["advantage/std"] == pytest.approx(float(advantages.std(correction=0)))


def test_a_kl_in_the_reward_lowers_it_and_adapts_its_coefficient(tmp_path: Path) -> None:
    options = ("algorithm.kl.place=reward", "algorithm.kl.estimator=k1", "algorithm.kl.kl_coef=0.5")
    target = ("algorithm.kl.target_kl=1.0", "algorithm.kl.horizon=30")
    with updater_of(tmp_path, *options, *target) as updater:
        _, metrics = train(updater)
        # The policy is still its own reference: no KL, and the coefficient falls by 0.2 · 6 / 30.
        assert metrics["kl/ref"] == pytest.approx(0.0, abs=1e-5)
        assert metrics["kl/coef"] == 0.5
        assert updater.progress.kl_coef == pytest.approx(0.5 * (1 - 0.2 * 6 / 30))
        _, metrics = train(updater)
        assert metrics["kl/ref"] != 0.0
        assert metrics["kl/coef"] == pytest.approx(0.48)


def test_a_kl_in_the_loss_is_measured_at_every_update(tmp_path: Path) -> None:
    options = ("algorithm.kl.place=loss", "algorithm.kl.target_kl=1.0", "algorithm.kl.kl_coef=0.1")
    with updater_of(tmp_path, *options) as updater:
        train(updater)
        batch, metrics = train(updater)
        assert "ref_log_probs" in batch.columns
        assert metrics["kl/ref"] > 0
        assert updater.progress.kl_coef is not None
        assert updater.progress.kl_coef < 0.1
    with updater_of(tmp_path, "algorithm.kl.place=loss") as fixed:
        train(fixed)
        assert fixed.progress.kl_coef is None  # a changed configuration counts after a resume


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_run_whose_target_was_taken_away_has_the_coefficient_of_its_configuration(
    tmp_path: Path, place: str
) -> None:
    options = (f"algorithm.kl.place={place}", "algorithm.kl.kl_coef=0.5")
    with updater_of(tmp_path, *options) as updater:
        updater.progress.kl_coef = 7.0  # of the checkpoint, adapted
        _, metrics = train(updater)
    assert metrics["kl/coef"] == 0.5


def test_without_a_kl_no_reference_is_scored(tmp_path: Path) -> None:
    with updater_of(tmp_path) as updater:
        batch, metrics = train(updater)
    assert "ref_log_probs" not in batch.columns
    assert not any(name.startswith("kl/") for name in metrics)


def test_bypass_saves_the_pass_that_recomputes_the_proximal_policy(tmp_path: Path) -> None:
    with updater_of(tmp_path, "algorithm.off_policy.method=bypass") as updater:
        batch, metrics = train(updater)
        backend = cast(CountingBackend, updater.backend)
        assert backend.passes == 0
        assert torch.equal(batch.columns["prox_log_probs"], batch.columns["rollout_log_probs"])
        assert metrics["policy/kl_k1"] != 0  # the ratio is π/μ
        assert "log_prob_gap" not in metrics
        assert "rollout_probs_diff/mean" not in metrics  # nothing of the trainer's to compare with
        batch = updater.prepare(groups(log_probs=False)).batch
        assert backend.passes == 1
        assert torch.isfinite(batch.columns["prox_log_probs"]).all()


def test_bypass_without_the_engines_log_probs_is_refused(tmp_path: Path) -> None:
    options = ("algorithm.off_policy.method=bypass", "async_training.use_rollout_log_probs=false")
    with (
        pytest.raises(ConfigError, match="there would be no log-probs to use"),
        updater_of(tmp_path, *options),
    ):
        pass


def test_the_gap_to_the_engine_is_measured_also_when_its_log_probs_are_not_used(
    tmp_path: Path,
) -> None:
    with updater_of(tmp_path) as used:
        _, expected = train(used)
    with updater_of(tmp_path, "async_training.use_rollout_log_probs=false") as unused:
        batch, metrics = train(unused)
    assert torch.equal(batch.columns["rollout_log_probs"], batch.columns["prox_log_probs"])
    assert metrics["log_prob_gap"] == expected["log_prob_gap"] > 0.1  # the steps say -1.5
    diff = {n: x for n, x in expected.items() if n.startswith("rollout_probs_diff/")}
    assert len(diff) == 3
    assert {n: metrics[n] for n in diff} == diff


@pytest.mark.parametrize(
    ("option", "weight"),
    [
        ("algorithm.off_policy.missing=drop", 0.0),
        ("algorithm.off_policy.missing=keep", 1.0),
        ("async_training.use_rollout_log_probs=false", 1.0),
    ],
)
def test_text_only_rollouts_are_counted_weigh_1_when_fresh_and_as_configured_when_stale(
    tmp_path: Path, option: str, weight: float
) -> None:
    """Items of slime's Rollout Buffer that are messages alone become Steps without log-probs."""
    with updater_of(tmp_path, option, "async_training.trigger_parameter_sync_step=1") as updater:
        text, recorded = groups(log_probs=False), groups()
        batch, fresh = train(updater, [text[0], recorded[1]])
        missing = len(text[0].steps)
        assert fresh["off_policy/missing_steps"] == missing
        assert fresh["off_policy/dropped_steps"] == 0
        assert set(batch.columns["weights"].tolist()) == {1.0}
        train(updater)
        batch, stale = train(updater, text)
        assert stale["off_policy/missing_steps"] == 2 * missing
        assert stale["off_policy_share"] == 1.0
        assert set(batch.columns["weights"].tolist()) == {weight}
        assert stale["off_policy/dropped_steps"] == (0 if weight else 2 * missing)


def test_a_coefficient_that_was_adapted_to_0_stays_0(tmp_path: Path) -> None:
    options = ("algorithm.kl.place=reward", "algorithm.kl.kl_coef=0.5")
    with updater_of(tmp_path, *options, "algorithm.kl.target_kl=1.0") as updater:
        updater.progress.kl_coef = 0.0
        _, metrics = train(updater)
        assert metrics["kl/coef"] == 0.0
        assert updater.progress.kl_coef == 0.0


def test_an_update_that_is_not_applied_makes_no_step_staler(tmp_path: Path) -> None:
    with updater_of(tmp_path, "async_training.trigger_parameter_sync_step=1") as updater:
        prepared = updater.prepare(groups())
        prepared.batch.columns["advantages"].fill_(torch.inf)
        ((indices, _, _),) = prepared.mini_batches
        assert updater.step(prepared, indices)["skipped_updates"] == 1
        assert updater.progress.updates == 1
        _, metrics = train(updater)
        assert metrics["staleness/mean"] == 0
        assert "log_prob_gap" in metrics  # the engines still have these weights
        assert train(updater)[1]["staleness/mean"] == 1


def test_an_update_of_the_critic_alone_makes_no_step_staler(tmp_path: Path) -> None:
    options = ("algorithm.adv_estimator=gae", "algorithm.critic.warmup_updates=1")
    sync = "async_training.trigger_parameter_sync_step=1"
    with updater_of(tmp_path, *options, sync) as updater:
        staleness = [train(updater)[1]["staleness/mean"] for _ in range(3)]
    assert staleness == [0, 0, 1]


def test_a_critic_learns_nothing_from_what_is_not_trained(tmp_path: Path) -> None:
    """Every answer was cut off: the policy's gradient is 0, and the run goes on."""

    def cut(t: Trajectory) -> Trajectory:
        return replace(t, steps=tuple(replace(s, finish_reason="length") for s in t.steps))

    batch = [replace(g, trajectories=tuple(map(cut, g.trajectories))) for g in groups()]
    keys = (
        "algorithm.adv_estimator=gae",
        "algorithm.loss.mask_truncated=true",
        "algorithm.critic.warmup_updates=0",
    )
    with updater_of(tmp_path, *keys) as updater:
        assert "critic/loss" in train(updater)[1]
        _, metrics = train(updater, batch)
        assert metrics["grad_norm"] == 0
        assert "critic/loss" not in metrics


@pytest.mark.parametrize("batches", [1, 2])
def test_an_update_that_trains_no_token_leaves_the_policy_as_it_is(
    tmp_path: Path, batches: int
) -> None:
    """Adam would go on as it went before: its memory is not empty."""

    def cut(t: Trajectory) -> Trajectory:
        return replace(t, steps=tuple(replace(s, finish_reason="length") for s in t.steps))

    nothing = [replace(g, trajectories=tuple(map(cut, g.trajectories))) for g in groups()]
    keys = (
        "algorithm.loss.mask_truncated=true",
        f"async_training.require_batches={batches}",
        f"async_training.trigger_parameter_sync_step={batches}",
    )
    with updater_of(tmp_path, *keys) as updater:
        train(updater)
        before = updater.backend.compute_log_probs(updater.prepare(groups()).batch)
        batch, metrics = train(updater, nothing)
        after = updater.backend.compute_log_probs(updater.prepare(groups()).batch)
        assert torch.equal(before, after)
        assert metrics["skipped"] == 1
        assert metrics["policy/truncated_share"] == 1
        assert {"prox_log_probs", "weights"} <= batch.columns.keys(), "people look at them"
        assert updater.progress.updates == 2 * batches
        assert train(updater)[1]["skipped"] == 0


class FarInSecondSteps(CountingBackend):
    """Its reference finds the tokens of second steps less likely than the policy does."""

    def compute_ref_log_probs(self, batch: TorchBatch) -> Tensor:
        far = batch.expand([float(step.step_index == 1) for step in batch.steps])
        return batch.columns["prox_log_probs"] - far


@pytest.mark.parametrize("seen", [True, False])
def test_the_kl_of_a_reply_that_nobody_saw_costs_nothing(tmp_path: Path, seen: bool) -> None:
    def other_tries(t: Trajectory) -> Trajectory:
        first, *others = t.steps
        marks = {} if seen else {DUPLICATE_OF: 0}
        later = (replace(s, metadata=marks, parent_index=None) for s in others)
        return replace(t, steps=(first, *later))

    batch = [replace(g, trajectories=tuple(map(other_tries, g.trajectories))) for g in groups()]
    plain = ("algorithm.adv_estimator=dr_grpo", "algorithm.loss.mask_superseded=true")
    held = ("algorithm.kl.place=reward", "algorithm.kl.estimator=k1", "algorithm.kl.kl_coef=0.5")
    found = []
    for options in (plain, plain + held):
        with updater_of(tmp_path, *options, backend=FarInSecondSteps) as updater:
            found.append(updater.prepare(batch).batch.columns["advantages"])
    assert torch.allclose(*found) is not seen


async def test_the_last_groups_are_trained_though_generation_ends_before_they_arrive(
    tmp_path: Path,
) -> None:
    """The pool has served them; to ask anew would bring nothing, and they would be lost."""
    last = tuple(Group(f"p{i}", ()) for i in range(8))
    asked = 0

    class Pool:
        async def lease_batch(self, *_: Any) -> Lease | None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.1)
            return Lease("lease", TRAIN, last, 0.0) if asked == 1 else None

        async def get_statistics(self, channel: str) -> dict[str, Any]:
            return {"groups": dict.fromkeys(("ready", "leased", "acked"), 0)}

    config = load_config("quickstart", [])
    pool = cast(Any, Pool())
    ended = asyncio.Event()
    ended.set()
    producer = SimpleNamespace(leased=list, wait_ended=ended.wait, has_ended=True, endless=False)
    batches = Batches(
        config.trainer,
        config.async_training,
        [TrainedChannel(TRAIN, cast(Any, producer), LeaseKeeper(pool, TRAIN, 600.0), pool, 60.0)],
        cast(Any, None),
        GroupFilter(config.sampling),
        Progress(),
        Phases(),
        folder=tmp_path,
    )
    assert await batches.lease() == list(last)
    assert await batches.lease() is None

"""Groups as TRL's completions, and one GRPO step of a real TRL (`make test-trl`) beside ours."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stepwell.backends.base import BACKENDS
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BatchError
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.trl.backend import RolloutFunc, TrlBackend, reward
from stepwell.datapool.types import Group, Step, Trajectory
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.losses import coefficients, make_loss_fn
from stepwell.trainer.config import AdvantageConfig, LossConfig
from tests.backends.engines.conftest import VOCAB, save_qwen3

HAS_TRL = importlib.util.find_spec("trl") is not None
N_GROUPS, SIZE = 8, 4
LR = 0.5


def linear_groups(seed: int = 0) -> list[Group]:
    """Eight groups of four conversations of one to three calls, what tools say between them."""
    draw = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        return [int(i) for i in draw.integers(3, VOCAB, int(draw.integers(low, high)))]

    def trajectory(uid: str, group: str, prompt: list[int]) -> Trajectory:
        steps: list[Step] = []
        context, n = prompt, int(draw.integers(1, 4))
        for i in range(n):
            response = ids(2, 9)
            steps.append(
                Step(
                    prompt_ids=context,
                    response_ids=response,
                    reward=float(draw.normal()) if i == n - 1 else None,
                    trajectory_uid=uid,
                    prompt_uid=group,
                    step_index=i,
                    policy_version=0,
                    is_last=i == n - 1,
                    metadata={"sampling_params": {"temperature": 1.0}},
                    rollout_log_probs=-draw.exponential(1.0, len(response)),
                    finish_reason="stop",
                    parent_index=i - 1 if i else None,
                )
            )
            context = context + response + ids(1, 6)
        return Trajectory(uid, group, tuple(steps))

    groups = []
    for g in range(N_GROUPS):
        prompt = ids(3, 9)
        found = [trajectory(f"g{g}t{i}", f"g{g}", prompt) for i in range(SIZE)]
        groups.append(Group(f"g{g}", tuple(found), n_rollouts=SIZE))
    return groups


def steps_of(groups: Sequence[Group]) -> list[Step]:
    return [step for group in groups for step in group.steps]


# -- what TRL is given ----------------------------------------------------------------------------


def test_a_conversation_is_one_completion_in_which_only_what_was_sampled_is_trained() -> None:
    groups = linear_groups()
    made = TrlBackend().convert(steps_of(groups))
    trajectories = [t for g in groups for t in g.trajectories]
    assert len(made["prompt_ids"]) == N_GROUPS * SIZE
    for i, t in enumerate(trajectories):
        last = t.steps[-1]
        whole = [*last.prompt_ids, *last.response_ids]
        assert made["prompt_ids"][i] == list(t.steps[0].prompt_ids)
        assert made["prompt_ids"][i] + made["completion_ids"][i] == whole
        sampled = [j for j, m in enumerate(made["env_mask"][i]) if m]
        assert [made["completion_ids"][i][j] for j in sampled] == [
            x for s in t.steps for x in s.response_ids
        ]
        told = np.concatenate(
            [s.rollout_log_probs for s in t.steps if s.rollout_log_probs is not None]
        )
        assert np.allclose([made["logprobs"][i][j] for j in sampled], told)
        assert made["reward"][i] == pytest.approx(last.reward)


def trainer_of(**fields: Any) -> Any:
    own = {"num_generations": SIZE, "num_generations_eval": SIZE, "temperature": 1.0}
    return SimpleNamespace(**(own | fields), model=SimpleNamespace(training=True))


def test_it_takes_as_many_groups_as_trl_has_prompts() -> None:
    asked: list[int] = []

    def take(n: int) -> list[Group]:
        asked.append(n)
        return linear_groups()[:n]

    made = RolloutFunc(take)(["p"] * (3 * SIZE), trainer_of())
    assert asked == [3]
    assert len(made["prompt_ids"]) == 3 * SIZE
    assert reward(**made) == made["reward"]


def test_fewer_groups_than_trl_has_prompts_are_no_batch() -> None:
    """TRL would hold completions against the wrong prompts, or fail at a tensor's size."""
    with pytest.raises(BatchError, match="2 groups were taken, and TRL has prompts for 3"):
        RolloutFunc(lambda n: linear_groups()[:2])(["p"] * (3 * SIZE), trainer_of())


def _branched(group: Group) -> Group:
    first = group.trajectories[0]
    step = first.steps[-1]
    other = replace(step, step_index=step.step_index + 1, prompt_ids=[5, 6], parent_index=None)
    return replace(
        group, trajectories=(replace(first, steps=(*first.steps, other)), *group.trajectories[1:])
    )


def _unscored(group: Group) -> Group:
    first = group.trajectories[0]
    steps = tuple(replace(s, rollout_log_probs=None) for s in first.steps)
    return replace(group, trajectories=(replace(first, steps=steps), *group.trajectories[1:]))


@pytest.mark.parametrize(
    ("change", "trainer", "words"),
    [
        (_branched, {}, "is more than one sequence"),
        (_unscored, {}, "has no rollout_log_probs"),
        (lambda g: g, {"num_generations": 8}, "has 4 rollouts and TRL's num_generations is 8"),
        (
            lambda g: g,
            {"temperature": 0.7},
            "sampled at temperature 1 and TRL's temperature is 0.7",
        ),
    ],
)
def test_what_trl_cannot_train_is_refused_by_name(change: Any, trainer: Any, words: str) -> None:
    group = change(linear_groups()[0])
    with pytest.raises(BatchError, match=words):
        RolloutFunc(lambda n: [group])(
            ["p"] * trainer.get("num_generations", SIZE), trainer_of(**trainer)
        )


def test_it_is_a_backend_by_name_whose_trainer_runs_the_loop() -> None:
    assert BACKENDS.load("trl") is TrlBackend
    assert "train_step" in TrlBackend.loop_lacks()


# -- one optimizer step ---------------------------------------------------------------------------


def trl_step(
    folder: Path, out: Path, groups: list[Group], loss_type: str, scale: str
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after one step of TRL's `GRPOTrainer`, and what it logged."""
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    n = len(groups) * SIZE
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=n,
            num_generations=SIZE,
            max_steps=1,
            max_completion_length=64,
            beta=0.0,
            loss_type=loss_type,
            scale_rewards=scale,
            max_grad_norm=1e9,
            temperature=1.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"p{i}" for i in range(len(groups))]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        optimizers=(optimizer, constant),
        rollout_func=RolloutFunc(lambda _: groups),
    )
    trainer.train()
    told = {k: v for r in trainer.state.log_history for k, v in r.items() if k != "epoch"}
    return {name: p.detach().clone() for name, p in model.state_dict().items()}, told


def our_step(
    folder: Path, out: Path, groups: list[Group], aggregation: str, estimator: str
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    backend = TorchBackend(
        TorchBackendConfig(
            device="cpu", optimizer="sgd", lr=LR, max_grad_norm=1e9, micro_batch_tokens=1 << 20
        ),
        folder,
    )
    steps = steps_of(groups)
    batch = backend.convert(steps)
    config = LossConfig.model_validate(
        {
            "loss_agg_mode": aggregation,
            "loss_scale_factor": 64.0 if aggregation.endswith("-norm") else None,
        }
    )
    advantages = compute_advantages(groups, AdvantageConfig(adv_estimator=estimator))
    batch.columns["advantages"] = advantages.columns["advantages"]
    batch.columns["prox_log_probs"] = backend.compute_log_probs(batch)
    batch.columns["weights"] = torch.ones(batch.n_tokens)
    batch.columns["coef"] = coefficients(
        batch.lengths.tolist(), [s.trajectory_uid for s in steps], config
    )
    done = backend.train_step(batch, make_loss_fn(config))
    backend.save_weights(out)
    return load_file(out / "model.safetensors"), done


@pytest.mark.skipif(not HAS_TRL, reason="TRL is not installed: make test-trl")
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("bnpo", "token-mean"),
        ("dapo", "token-mean"),
        ("grpo", "trajectory-mean"),
        ("dr_grpo", "trajectory-sum-norm"),
    ],
)
@pytest.mark.parametrize(("scale", "estimator"), [("none", "dr_grpo"), ("group", "grpo")])
def test_one_step_of_trl_is_one_of_ours(
    loss_type: str, aggregation: str, scale: str, estimator: str, tmp_path: Path
) -> None:
    """TRL divides by the deviation + 1e-4, we by + 1e-6: with `group` they agree to that."""
    folder = save_qwen3(tmp_path / "model", 0)
    groups = linear_groups()
    before = load_file(folder / "model.safetensors")
    theirs, told = trl_step(folder, tmp_path / "trl", groups, loss_type, scale)
    ours, done = our_step(folder, tmp_path / "ours", groups, aggregation, estimator)
    far = max(float((ours[n] - before[n]).abs().max()) for n in before)
    apart = max(float((ours[n] - theirs[n]).abs().max()) for n in before)
    tolerance = 1e-5 if scale == "none" else 1e-3
    print(f"{loss_type} {scale}: moved by {far:.2e}, apart by {apart:.2e}")
    assert far > 1e-3
    assert apart <= tolerance * far + 3e-7  # a rounding of a weight in float32
    assert told["grad_norm"] == pytest.approx(done["grad_norm"], rel=tolerance)

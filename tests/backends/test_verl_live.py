# ruff: noqa: E402  # the platform is chosen before verl is imported
"""The verl backend with verl itself: `make test-verl`. Its DataProto, advantages, FSDP2 actor on
the CPU, TransferQueue and V1 replay buffer take what `backends/verl_*` makes of random groups."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="make test-verl runs it, where verl is")

from tests.backends.verl_cpu import OPTIMIZER, training_worker, use_cpu

use_cpu()

import ray
import transfer_queue
from transformers import AutoModelForCausalLM, Qwen3Config
from verl import DataProto
from verl.utils import tensordict_utils
from verl.utils.model import compute_position_id_with_mask
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from stepwell.backends.config import TorchBackendConfig, VerlConfig
from stepwell.backends.errors import BatchError
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.fsdp import full
from stepwell.backends.verl.backend import VerlBackend, compute_advantage
from stepwell.backends.verl.queue import put
from stepwell.datapool.types import GREEDY, Group
from stepwell.trainer.algorithms.advantages.base import baselined
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.algorithms.losses import coefficients, make_loss_fn
from stepwell.trainer.algorithms.registry import ESTIMATORS
from stepwell.trainer.config import AdvantageConfig, LossConfig
from tests.backends.random_groups import VOCAB, random_groups, steps_of

GROUPS = random_groups(16)
STEPS = steps_of(GROUPS)


@pytest.fixture
def data() -> DataProto:
    return VerlBackend().convert_groups(GROUPS)


def same(a: DataProto, b: DataProto) -> bool:
    return (
        set(a.batch.keys()) == set(b.batch.keys())
        and all(a.batch[k].equal(b.batch[k]) for k in a.batch.keys())  # noqa: SIM118
        and all((a.non_tensor_batch[k] == b.non_tensor_batch[k]).all() for k in a.non_tensor_batch)
    )


# --- DataProto ------------------------------------------------------------------------------------


def test_chunks_and_splits_put_together_are_the_batch(data: DataProto) -> None:
    data = data[: len(data) // 4 * 4]
    whole = copy.deepcopy(data)
    assert len(data) >= 40
    assert same(DataProto.concat(data.chunk(4)), whole)
    assert same(DataProto.concat(data.split(7)), whole)
    assert same(pickle.loads(pickle.dumps(data)), whole)


def test_batches_of_one_width_are_concatenated_once_their_token_counts_are_out() -> None:
    """verl refuses to join meta_info that differs, and counts tokens anew itself."""
    backend = VerlBackend(VerlConfig(prompt_length=128, response_length=128))
    parts = [backend.convert_groups(GROUPS[:5]), backend.convert_groups(GROUPS[5:])]
    with pytest.raises(AssertionError, match="global_token_num"):
        DataProto.concat(parts)
    for part in parts:
        part.meta_info.pop("global_token_num")
    whole = backend.convert_groups(GROUPS)
    assert same(DataProto.concat(parts), whole)


def test_union_adds_a_column_and_refuses_another_batch(data: DataProto) -> None:
    more = DataProto.from_dict(tensors={"old_log_probs": torch.zeros(len(data), 3)})
    assert "old_log_probs" in data.union(more).batch.keys()  # noqa: SIM118
    wrong = copy.deepcopy(data)
    wrong.batch["responses"] += 1
    with pytest.raises(AssertionError):
        data.union(wrong)


def test_positions_and_the_tensordict_are_as_verl_makes_them(data: DataProto) -> None:
    mask = data.batch["attention_mask"]
    assert data.batch["position_ids"].equal(compute_position_id_with_mask(mask))
    nested = left_right_2_no_padding(data.to_tensordict())
    # What its engines compute: each row's tokens, nothing else.
    rows = VerlBackend().rows(STEPS)
    for found, row in zip(nested["input_ids"].unbind(), rows, strict=True):
        assert found.equal(row.input_ids)
    flat = torch.nested.nested_tensor_from_jagged(
        nested["input_ids"].values().float(), nested["input_ids"].offsets()
    )
    # verl reads a response's log-probs one token earlier.
    shifted = no_padding_2_padding(flat, nested)
    p = data.batch["prompts"].shape[1]
    assert shifted[0, : len(rows[0].columns["responses"])].equal(
        data.batch["input_ids"][0, p - 1 :][: len(rows[0].columns["responses"])].float()
    )


# --- advantages -----------------------------------------------------------------------------------


def test_grpo_counts_a_trajectory_once_where_verls_plain_function_counts_its_rows(
    data: DataProto,
) -> None:
    from verl.trainer.ppo.ray_trainer import compute_advantage as plain

    wanted = ours(data)
    found = compute_advantage(copy.deepcopy(data)).batch["advantages"]
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    by_row = plain(data, adv_estimator="grpo").batch["advantages"]
    assert (by_row - wanted).abs().max() > 0.01


def ours(data: DataProto) -> Tensor:
    columns = compute_advantages(GROUPS, AdvantageConfig()).columns
    wanted: Tensor = VerlBackend().convert(STEPS, columns=columns).batch["advantages"]
    assert wanted.shape == data.batch["response_mask"].shape
    return wanted


def test_an_estimator_that_counts_rows_is_refused_unless_each_is_a_trajectory(
    data: DataProto,
) -> None:
    with pytest.raises(BatchError, match=r"rloo.*counts every row"):
        compute_advantage(data, "rloo")
    first = [t.steps[0].trajectory_uid for g in GROUPS for t in g.trajectories if len(t.steps) == 1]
    single = [s for s in STEPS if s.trajectory_uid in first and s.reward is not None]
    assert "advantages" in compute_advantage(VerlBackend().convert(single), "rloo").batch.keys()  # noqa: SIM118


def test_remax_takes_off_the_reward_of_each_groups_greedy_rollout(data: DataProto) -> None:
    groups = [
        replace(g, trajectories=(replace(g.trajectories[0], metadata={GREEDY: True}), *others))
        for g in GROUPS
        if (others := g.trajectories[1:])
    ]
    judged = baselined(groups, ESTIMATORS.load("remax"))
    columns = compute_advantages(judged, AdvantageConfig(adv_estimator="remax")).columns
    batch = VerlBackend().convert_groups(groups, columns=columns).batch
    found = compute_advantage(VerlBackend().convert_groups(groups), "remax").batch["advantages"]
    torch.testing.assert_close(
        found * batch["response_mask"], batch["advantages"], rtol=2e-6, atol=2e-6
    )
    with pytest.raises(BatchError, match=r"no reward_baselines.*greedy_baseline"):
        compute_advantage(data, "remax")


def test_gae_goes_over_rows_and_wants_no_config_of_verls(data: DataProto) -> None:
    data.batch["values"] = torch.zeros_like(data.batch["rm_scores"])
    found = compute_advantage(data, "gae").batch
    mask, reward = data.batch["response_mask"], data.batch["rm_scores"].sum(-1, keepdim=True)
    torch.testing.assert_close(found["returns"] * mask, reward * mask)


def test_no_reward_is_no_advantage() -> None:
    group = random_groups(1, seed=5)[0]
    unscored = [s for s in group.steps if s.reward is None][:1]
    with pytest.raises(BatchError, match="no reward"):
        compute_advantage(VerlBackend().convert(unscored))


# --- an actor's update ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def worker(model_path: Path) -> Any:
    return training_worker(
        model_path,
        loss_agg_mode="token-sum",
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )


def scored(worker: Any, data: DataProto) -> Tensor:
    nested = left_right_2_no_padding(data.to_tensordict())
    tensordict_utils.assign_non_tensor(nested, calculate_entropy=False, compute_loss=False)
    found = no_padding_2_padding(worker.infer_batch(nested)["log_probs"], nested)
    assert isinstance(found, Tensor)
    return found


def test_verls_actor_makes_the_update_that_the_torch_backend_makes(
    worker: Any, model_path: Path
) -> None:
    """Same model, same groups, our advantages and coefficients: log-probs, loss, gradient norm and
    the weights after one AdamW step, at the temperature of the rollouts."""
    backend = TorchBackend(
        TorchBackendConfig.model_validate(
            {
                "device": "cpu",
                "lr": OPTIMIZER["lr"],
                "weight_decay": OPTIMIZER["weight_decay"],
                "max_grad_norm": OPTIMIZER["clip_grad"],
                "betas": OPTIMIZER["betas"],
            }
        ),
        model_path,
    )
    batch = backend.convert(STEPS)
    config = LossConfig.model_validate({"loss_agg_mode": "trajectory-mean"})
    batch.columns["prox_log_probs"] = backend.compute_log_probs(batch)
    batch.columns |= compute_advantages(GROUPS, AdvantageConfig()).columns
    batch.columns["weights"] = torch.linspace(0.5, 1.0, batch.n_tokens)
    batch.columns["coef"] = coefficients(
        batch.lengths.tolist(), [s.trajectory_uid for s in STEPS], config
    )
    columns = {k: v for k, v in batch.columns.items() if k != "rollout_log_probs"}
    data = VerlBackend().convert(STEPS, columns=columns)

    mask = data.batch["response_mask"].bool()
    torch.testing.assert_close(
        scored(worker, data)[mask], data.batch["old_log_probs"][mask], rtol=1e-4, atol=2e-5
    )
    nested = left_right_2_no_padding(data.to_tensordict())
    tensordict_utils.assign_non_tensor(
        nested,
        calculate_entropy=False,
        global_batch_size=len(data),
        mini_batch_size=len(data),
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
    )
    metrics = worker.train_mini_batch(nested)["metrics"]
    wanted = backend.train_step(batch, make_loss_fn(config))
    assert float(np.sum(metrics["loss"])) == pytest.approx(wanted["loss"], rel=1e-4, abs=1e-6)
    assert float(np.mean(metrics["grad_norm"])) == pytest.approx(wanted["grad_norm"], rel=1e-3)
    theirs = {k: full(v) for k, v in worker.engine.module.state_dict().items()}
    moved = 0.0
    before = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    for name, mine in backend._model.state_dict().items():
        torch.testing.assert_close(theirs[name], mine, rtol=0, atol=2e-4, msg=name)
        moved = max(moved, float((mine - before[name]).abs().max()))
    assert moved > 5e-4, "the update moved the weights"


# --- TransferQueue --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    yield transfer_queue
    transfer_queue.close()
    ray.shutdown()


def test_verls_replay_buffer_samples_whole_groups_and_computes_their_advantages(
    queue: Any,
) -> None:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    backend = VerlBackend()
    rows = backend.rows(STEPS)

    async def put_twice() -> list[str]:
        """A redelivered lease is put again: nothing is doubled."""
        keys = await put(rows)
        assert await put(rows) == keys
        return keys

    keys = asyncio.run(put_twice())
    buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config=None,
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=None,
        poll_interval=0.1,
    )
    batch, _ = buffer.sample(global_steps=9, partition_id="train", batch_size=len(GROUPS))
    assert sorted(batch.keys) == sorted(keys)

    stored = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["input_ids"])
    for found, row in zip(stored["input_ids"].unbind(), rows, strict=True):
        assert found.equal(row.input_ids)

    algorithm = {"use_kl_in_reward": False, "adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0}
    config = SimpleNamespace(
        algorithm=_Section(algorithm),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=1)),
    )
    PPOTrainer._compute_advantage(SimpleNamespace(config=config), batch, {})
    found = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])
    columns = compute_advantages(GROUPS, AdvantageConfig()).columns
    wanted = VerlBackend().rows(STEPS, columns=columns)
    for advantages, row in zip(found["advantages"].unbind(), wanted, strict=True):
        torch.testing.assert_close(advantages, row.columns["advantages"], rtol=2e-6, atol=2e-6)


class _Section(dict[str, Any]):
    """A section of verl's config: keys as attributes."""

    __getattr__ = dict.__getitem__


def test_the_groups_have_trajectories_of_several_rows() -> None:
    def rows(group: Group) -> int:
        return len(VerlBackend().rows(group.steps))

    assert sum(rows(g) > len(g.trajectories) for g in GROUPS) >= 5

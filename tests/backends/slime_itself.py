"""slime's own code, imported where its source is (`make test-slime`), without Megatron and SGLang.

Both are imported at the top of slime's modules and of neither is anything reached here, but for
Megatron's `mpu`, which says that there is one rank. What is asked is slime's: samples, the rollout
manager's conversion and split, advantages, the policy loss and its reduction.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor


def _has_slime() -> bool:
    try:
        return importlib.util.find_spec("slime.rollout.base_types") is not None
    except ImportError:  # none, or another package of this name
        return False


HAS_SLIME = _has_slime()


@cache
def slime(name: str) -> Any:
    """slime's module `slime.<name>`."""
    if "megatron" not in sys.modules:
        mpu = ModuleType("megatron.core.mpu")
        for of in ("context_parallel", "data_parallel", "tensor_model_parallel"):
            setattr(mpu, f"get_{of}_world_size", lambda **_: 1)
            setattr(mpu, f"get_{of}_rank", lambda **_: 0)
        vars(mpu)["is_pipeline_last_stage"] = lambda: True
        core, megatron = ModuleType("megatron.core"), ModuleType("megatron")
        vars(core)["mpu"] = mpu
        vars(megatron)["core"] = core
        sys.modules |= {"megatron": megatron, "megatron.core": core, "megatron.core.mpu": mpu}
    if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
        for module in (
            "sglang",
            "sglang.srt",
            "sglang.srt.constants",
            "sglang.srt.utils",
            "sglang.srt.server_args",
        ):
            sys.modules[module] = MagicMock()
    return importlib.import_module(f"slime.{name}")


def rollout_manager(args: Any, data_source: Any = None, generate_rollout: Any = None) -> Any:
    """slime's RolloutManager in this process, without the engines that its constructor starts."""
    cls = slime("ray.rollout").RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(cls)
    load = slime("utils.misc").load_function
    manager.args, manager.data_source = args, data_source
    manager.generate_rollout = generate_rollout
    manager._health_monitors = []
    manager.custom_reward_post_process_func = load(args.custom_reward_post_process_path)
    manager.custom_convert_samples_to_train_data_func = None
    return manager


def given_weights(args: Any, pg_loss: Tensor, loss_masks: Any, **_: Any) -> Any:
    """For slime's `--custom-tis-function-path`: weights that somebody else has computed."""
    return pg_loss * args.given_weights, loss_masks, {}


def advantages(data: Mapping[str, Any], estimator: str = "grpo") -> list[Tensor]:
    """Per response token, as slime's `compute_advantages_and_returns` has them."""
    rollout_data = dict(data)
    rollout_data["loss_masks"] = [torch.tensor(m) for m in data["loss_masks"]]
    rollout_data["log_probs"] = [torch.tensor(x) for x in data["rollout_log_probs"]]
    args = Namespace(
        use_rollout_logprobs=False,
        kl_coef=0,
        custom_advantage_function_path=None,
        advantage_estimator=estimator,
        use_opd=False,
        normalize_advantages=False,
    )
    slime("backends.megatron_utils.loss").compute_advantages_and_returns(args, rollout_data)
    found: list[Tensor] = rollout_data["advantages"]
    return found


def loss(
    data: Mapping[str, Any],
    *,
    log_probs: list[Tensor],
    old_log_probs: list[Tensor],
    weights: list[Tensor],
    clip: tuple[float, float, float],
    per_token: bool,
    n_rollouts: int,
) -> Tensor:
    """slime's `loss_function` of one micro-batch, the whole step; π is given.

    Args:
        log_probs, old_log_probs, weights: [response_length] of each sample.
        clip: low, high, dual.
        per_token: `--calculate-per-token-loss`, which Megatron divides by the number of tokens.
    """
    module = slime("backends.megatron_utils.loss")
    args = Namespace(
        loss_type="policy_loss",
        calculate_per_token_loss=per_token,
        recompute_loss_function=False,
        allgather_cp=False,
        use_rollout_logprobs=False,
        use_opsm=False,
        advantage_estimator="grpo",
        eps_clip=clip[0],
        eps_clip_high=clip[1],
        eps_clip_c=clip[2],
        get_mismatch_metrics=False,
        use_tis=True,
        custom_tis_function_path=f"{__name__}.given_weights",
        custom_pg_loss_reducer_function_path=None,
        given_weights=torch.cat(weights),
        entropy_coef=0.0,
        use_kl_loss=False,
        rollout_top_p=1.0,
    )
    batch = {
        "advantages": advantages(data),
        "log_probs": old_log_probs,
        "rollout_log_probs": [torch.tensor(x) for x in data["rollout_log_probs"]],
        "loss_masks": [torch.tensor(m) for m in data["loss_masks"]],
        "rollout_mask_sums": torch.tensor(data["rollout_mask_sums"], dtype=torch.float32),
        "response_lengths": data["response_lengths"],
        "total_lengths": [len(t) for t in data["tokens"]],
        "unconcat_tokens": data["tokens"],
    }
    given = {"log_probs": log_probs, "entropy": [torch.zeros_like(x) for x in log_probs]}
    real = module.get_log_probs_and_entropy
    module.get_log_probs_and_entropy = lambda *_, **__: (None, given)
    try:
        total, count, _ = module.loss_function(args, batch, 1, n_rollouts, torch.zeros(1, 1, 1))
    finally:
        module.get_log_probs_and_entropy = real
    result: Tensor = total / count
    return result

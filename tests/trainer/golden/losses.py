"""verl 0.9's losses of random ragged batches: the batches and the recorder of `losses.json`.

    python -m tests.trainer.golden.losses        (an environment with verl: pip install --no-deps
                                                  verl tensordict codetiming)

A case is a padded batch as verl has it: a row is a whole multi-turn trajectory whose masked tokens
are what tools wrote; the first row of the first case has no trained token. Everything is float64,
so that 1e-6 measures formulas and not rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

RECORDED = Path(__file__).with_suffix(".json")
N_CASES, ROWS, NORM = 3, 6, 16
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
POLICIES = (
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dppo_tv",
    "dppo_kl",
    "dro",
)
DRO_BETA = 0.5
COV_SHARE, COV_LOW, COV_HIGH, KL_COV = 0.1, 0.1, 2.0, 0.7
DRAW_SEED = 11
ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
OBSERVED_KL = ((0.3, 64), (0.02, 64), (0.11, 32), (0.0, 128))
"""(measured KL, trajectories) for the adaptive controller: from 0.1, target 0.1, horizon 1000."""
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence_tis": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "sequence_icepop": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
    "token_k1": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.5"},
    "seq_mean_k1": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.95_1.2"},
    "seq_sum_k1": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_4.0"},
    "sequence_tis_geometric_mask": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.95_1.2",
    },
}

Case = dict[str, Any]


def random_case(number: int) -> Case:
    """Matrices [rows, width] as plain lists."""
    rng = np.random.default_rng(number)
    turns = [
        [(int(rng.integers(1, 6)), int(rng.integers(1, 4))) for _ in range(rng.integers(1, 4))]
        for _ in range(ROWS)
    ]
    width = max(sum(a + b for a, b in row) for row in turns) + 1
    mask = np.zeros((ROWS, width))
    for i, row in enumerate(turns):
        at = 0
        for sampled, tool in row:
            mask[i, at : at + sampled] = 0 if number == 0 and i == 0 else 1
            at += sampled + tool

    def noise(scale: float, tails: float) -> np.ndarray[Any, Any]:
        """A few tokens move by `tails` times the scale: what clips and masks are for."""
        far = np.where(rng.random(mask.shape) < 0.15, tails, 1.0)
        return rng.normal(scale=scale, size=mask.shape) * far

    old = -np.abs(rng.normal(size=mask.shape)) - 0.05
    columns = {
        "old": old,
        "new": old + noise(0.2, 6.0),
        "near": old + 0.01 * rng.normal(size=mask.shape),
        "rollout": old + noise(0.15, 5.0),
        "ref": old + noise(0.4, 8.0),
        "advantages": np.repeat(rng.normal(size=(ROWS, 1)), width, axis=1),
        "weights": rng.uniform(0, 2, size=mask.shape),
        "entropy": rng.uniform(0, 3, size=mask.shape),
    }
    return {"mask": mask.tolist()} | {k: v.round(4).tolist() for k, v in columns.items()}


def tensors(case: Case) -> dict[str, Tensor]:
    return {k: torch.tensor(v, dtype=torch.float64) for k, v in case.items()}


def new_log_probs(policy: str) -> str:
    """The column that is π: `clip_cov` agrees where the ratio is not clipped yet."""
    return "near" if policy == "clip_cov" else "new"


def verl_outputs(case: Case) -> dict[str, Any]:
    """Losses and gradients, KL, rollout correction of one case by verl itself."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
    from verl.utils.debug.metrics import calculate_debug_metrics
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    x = tensors(case)
    mask = x["mask"]
    info = {"loss_scale_factor": NORM}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=PolicyLossConfig(
            clip_cov_ratio=COV_SHARE,
            clip_cov_lb=COV_LOW,
            clip_cov_ub=COV_HIGH,
            kl_cov_ratio=COV_SHARE,
            ppo_kl_coef=KL_COV,
            dro_beta=DRO_BETA,
        ),
        global_batch_info=info,
    )
    out: dict[str, Any] = {"policies": {}, "kl": {}, "correction": {}}
    for policy in POLICIES:
        for aggregation in AGGREGATIONS:
            log_probs = x[new_log_probs(policy)].clone().requires_grad_()
            torch.manual_seed(DRAW_SEED)
            loss, _ = core_algos.get_policy_loss_fn(policy)(
                old_log_prob=x["old"],
                log_prob=log_probs,
                advantages=x["advantages"],
                response_mask=mask,
                loss_agg_mode=aggregation,
                config=config,
                rollout_is_weights=x["weights"],
            )
            out["policies"][f"{policy} {aggregation}"] = _with_gradient(loss, log_probs, mask)
    for estimator in ESTIMATORS:
        log_probs = x["new"].clone().requires_grad_()
        kl = core_algos.kl_penalty(log_probs, x["ref"], estimator)
        loss = core_algos.agg_loss(kl, mask, "seq-mean-token-mean", **info)
        out["kl"][estimator] = _with_gradient(loss, log_probs, mask)
    out["entropy"] = {
        a: float(core_algos.agg_loss(x["entropy"], mask, a, **info)) for a in AGGREGATIONS
    }
    controller = core_algos.AdaptiveKLController(0.1, target_kl=0.1, horizon=1000)
    out["kl_coef"] = []
    for kl, n in OBSERVED_KL:
        controller.update(kl, n)
        out["kl_coef"].append(float(controller.value))
    difference = calculate_debug_metrics(
        DataProto.from_dict(
            {
                "rollout_log_probs": x["rollout"],
                "old_log_probs": x["old"],
                "response_mask": mask,
                "responses": mask,
            }
        )
    )
    out["probs_diff"] = {
        name: float(difference[f"training/rollout_probs_diff_{name}"])
        for name in ("mean", "max", "std")
    }
    for name, options in CORRECTIONS.items():
        proto, kept, metrics = compute_rollout_correction_and_rejection_mask(
            x["old"], x["rollout"], mask, **options
        )
        weights = mask.clone() if proto is None else proto.batch["rollout_is_weights"]
        out["correction"][name] = {
            "weights": _rounded((weights * kept)[mask > 0]),
            "metrics": {
                k.removeprefix("rollout_corr/"): float(v)
                for k, v in metrics.items()
                if k.endswith(("/kl", "/k3_kl", "/chi2_token", "/chi2_seq", "eff_sample_size"))
            },
        }
    return out


def _with_gradient(loss: Tensor, log_probs: Tensor, mask: Tensor) -> dict[str, Any]:
    loss.backward()
    assert log_probs.grad is not None
    return {"loss": float(loss.detach()), "gradient": _rounded(log_probs.grad[mask > 0])}


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{v:.9g}") for v in values.tolist()]


def main() -> None:
    cases = [random_case(n) for n in range(N_CASES)]
    recorded = [{"case": case, "verl": verl_outputs(case)} for case in cases]
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main()

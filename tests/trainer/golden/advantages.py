"""verl 0.9's advantages of random ragged batches: the batches and the recorder of their JSON file.

    python -m tests.trainer.golden.advantages        (an environment with verl: pip install
                                                      --no-deps verl tensordict codetiming)

A case is a padded batch as verl has it: a row is a whole multi-turn trajectory whose masked tokens
are what tools wrote. Everything is float64, so that 1e-6 measures formulas and not rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

RECORDED = Path(__file__).with_suffix(".json")
GROUP_SIZES = (1, 2, 4, 3)
"""A single rollout, and a group whose scores are all equal (the last)."""
GAMMA, LAM, VALUE_CLIP = 0.97, 0.9, 0.2
PART_WEIGHTS = {"accuracy": 1.0, "format": 0.5}
KINDS = ("outcome", "process", "tool", "dense")
"""Places of rewards: on the last sampled token; on the last of each turn; on masked tokens and the
last sampled one; on every sampled token (a KL penalty is)."""

Case = dict[str, Any]


def random_case(kind: str, seed: int) -> Case:
    """mask, rewards, values [rows, width] and group, greedy [rows], as plain lists."""
    rng = np.random.default_rng(seed)
    turns = [
        [(int(rng.integers(1, 6)), int(rng.integers(1, 4))) for _ in range(rng.integers(1, 4))]
        for _ in range(sum(GROUP_SIZES))
    ]
    width = max(sum(a + b for a, b in row) for row in turns) + 2
    mask = np.zeros((len(turns), width))
    rewards = np.zeros_like(mask)
    group = np.repeat(np.arange(len(GROUP_SIZES)), GROUP_SIZES)
    for i, row in enumerate(turns):
        score = 1.0 if group[i] == group[-1] else round(float(rng.normal()), 3)
        at = 0
        for sampled, tool in row:
            mask[i, at : at + sampled] = 1
            last = at + sampled - 1
            if kind == "process" or (kind == "tool" and group[i] != group[-1]):
                rewards[i, last + (kind == "tool")] = round(float(rng.normal()), 3)
            if kind == "dense":
                rewards[i, at : last + 1] = rng.normal(size=sampled).round(3)
            at += sampled + tool
        if kind in ("outcome", "tool"):
            rewards[i, last] += score
    shuffled = rng.permutation(len(turns))
    return {
        "kind": kind,
        "mask": mask[shuffled].tolist(),
        "rewards": rewards[shuffled].tolist(),
        "group": group[shuffled].tolist(),
        "greedy": [round(float(x), 3) for x in rng.normal(size=len(GROUP_SIZES))],
        "values": rng.normal(size=mask.shape).round(3).tolist(),
        "new_values": rng.normal(size=mask.shape).round(3).tolist(),
        # Of the reward; exact in the float32 that verl holds them in.
        "parts": {k: (rng.integers(-8, 9, len(turns)) / 4).tolist() for k in PART_WEIGHTS},
    }


def verl_results(case: Case) -> dict[str, list[list[float]]]:
    """By estimator, verl's advantages [rows, width]; `gae_returns`; and `value_loss`,
    `value_loss_by_row`, [[loss]]."""
    from verl.trainer.ppo import core_algos as verl

    mask, values, new_values = (
        torch.tensor(case[k], dtype=torch.float64) for k in ("mask", "values", "new_values")
    )
    index = np.array(case["group"])
    config = SimpleNamespace(gamma=GAMMA)

    def rewards() -> torch.Tensor:  # verl writes into what it is given
        return torch.tensor(case["rewards"], dtype=torch.float64)

    outcome = {"response_mask": mask, "index": index}
    greedy = torch.tensor([case["greedy"][g] for g in case["group"]], dtype=torch.float64)

    def pass_at_k() -> torch.Tensor:  # verl refuses a group of one; as in GRPO, it keeps its score
        kept = [i for i, g in enumerate(case["group"]) if case["group"].count(g) > 1]
        found = rewards().sum(1, keepdim=True) * mask
        found[kept], _ = verl.compute_grpo_passk_outcome_advantage(
            rewards()[kept], mask[kept], index[kept], config={}
        )
        return found

    gae, returns = verl.compute_gae_advantage_return(rewards(), values, mask, GAMMA, LAM)

    def value_loss(aggregation: str) -> torch.Tensor:
        loss, _ = verl.compute_value_loss(
            new_values, returns, values, mask, VALUE_CLIP, loss_agg_mode=aggregation
        )
        return loss.reshape(1, 1)

    found = {
        "grpo": verl.compute_grpo_outcome_advantage(rewards(), **outcome)[0],
        "dr_grpo": verl.compute_grpo_outcome_advantage(
            rewards(), **outcome, norm_adv_by_std_in_grpo=False
        )[0],
        "rloo": verl.compute_rloo_outcome_advantage(rewards(), **outcome)[0],
        "opo": verl.compute_opo_outcome_advantage(rewards(), **outcome)[0],
        "gpg": verl.compute_gpg_outcome_advantage(rewards(), **outcome)[0],
        "reinforce_plus_plus_baseline": (
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards(), **outcome)[0]
        ),
        "reinforce_plus_plus": verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards(), mask, config
        )[0],
        "grpo_passk": pass_at_k(),
        "gdpo": verl.compute_gdpo_outcome_advantage(
            rewards(),
            **outcome,
            config={
                "gdpo_reward_keys": list(PART_WEIGHTS),
                "gdpo_reward_weights": list(PART_WEIGHTS.values()),
            },
            non_tensor_batch=case["parts"],
            batch={
                "prompts": torch.zeros(len(mask), 1),
                "attention_mask": torch.ones(len(mask), 1 + mask.shape[1], dtype=torch.long),
            },
        )[0],
        "remax": verl.compute_remax_outcome_advantage(rewards(), greedy, mask)[0],
        "gae": gae,
        "gae_returns": returns,
        "value_loss": value_loss("token-mean"),
        "value_loss_by_row": value_loss("seq-mean-token-mean"),
    }
    # Masked tokens are not trained; some estimators leave a number there.
    return {
        name: (x * mask if x.shape == mask.shape else x).round(decimals=9).tolist()
        for name, x in found.items()
    }


def moved(case: Case) -> Case:
    """The same with every reward on a masked token moved to the sampled token before it."""
    rewards = np.array(case["rewards"])
    for i, mask in enumerate(case["mask"]):
        for t in range(1, len(mask)):
            if not mask[t] and rewards[i, t]:
                last = max(u for u in range(t) if mask[u])
                rewards[i, last] += rewards[i, t]
                rewards[i, t] = 0
    return {**case, "rewards": rewards.tolist()}


def results(case: Case) -> dict[str, Any]:
    """`verl`: its results; `verl_moved`: for the case with rewards `moved`."""
    return {"verl": verl_results(case), "verl_moved": verl_results(moved(case))}


def record() -> None:
    cases = [random_case(kind, seed) for seed, kind in enumerate(KINDS)]
    entries = [
        {"case": case} | (results(case) if kind == "tool" else {"verl": verl_results(case)})
        for kind, case in zip(KINDS, cases, strict=True)
    ]
    RECORDED.write_text(json.dumps(entries, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record()

"""The methods of the field, each a preset of the same options (`OffPolicyConfig`).

Sources: decoupled objective, arXiv:2110.00641; truncation, IMPALA arXiv:1802.01561 and "Your
efficient RL framework secretly brings you off-policy RL training" (TIS); masked and geometric
variants, "When Speed Kills Stability" (https://richardli.xyz/rl-collapse); IcePop,
arXiv:2510.18855; OPSM, DeepSeek-V3.2, arXiv:2512.02556.
"""

from __future__ import annotations

from stepwell.trainer.algorithms.off_policy.base import OffPolicyMethod

_EVERY_STEP = {"cap": None, "weigh_on_policy": True, "mask_on_policy": True}

STALENESS_AWARE = OffPolicyMethod(
    "Stale tokens weigh min(1, ρ), and nothing where the policy has gone where A sends it.",
    {"clip": (0.2, 0.28)},
)
NONE = OffPolicyMethod("No weight, no mask.", {"granularity": "none", "missing": "keep"})
BYPASS = OffPolicyMethod(
    "π_prox is the behaviour policy; nothing is recomputed.",
    {"granularity": "none", "missing": "keep", "proximal": "rollout"},
)
DECOUPLED = OffPolicyMethod("Plain ρ.", {"cap": None, "weigh_on_policy": True})
TIS = OffPolicyMethod("ρ, cut off at 2.", {"cap": 2.0, "weigh_on_policy": True})
GEOMETRIC_TIS = OffPolicyMethod(
    "ρ of a step by its geometric mean, cut off at 2.", {**TIS.preset, "granularity": "step"}
)
SEQUENCE_TIS = OffPolicyMethod(
    "ρ of a step by its product, cut off at 2.", {**TIS.preset, "granularity": "sequence"}
)
MIS = OffPolicyMethod("ρ, masked above 2.", {**_EVERY_STEP, "band": (0.0, 2.0)})
SEQUENCE_MIS = OffPolicyMethod(
    "ρ of a step by its product, masked above 2.", {**MIS.preset, "granularity": "sequence"}
)
GEOMETRIC_MIS = OffPolicyMethod(
    "No weight; steps whose geometric mean of ρ leaves [0.999, 1.001] are masked.",
    {
        "granularity": "none",
        "band_granularity": "step",
        "band": (0.999, 1.001),
        "mask_on_policy": True,
    },
)
ICEPOP = OffPolicyMethod("ρ, masked outside [0.5, 5].", {**_EVERY_STEP, "band": (0.5, 5.0)})
OPSM = OffPolicyMethod(
    "Bad steps that the policy has left are masked.",
    {"granularity": "none", "opsm": 1e-4, "mask_on_policy": True},
)

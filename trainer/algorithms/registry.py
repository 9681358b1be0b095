"""The members of each family by name: built in, of an installed package, or by dotted path.

A package adds its own by entry points, each to an object of one file::

    [project.entry-points."stepwell.policy_losses"]
    hinge = "my_losses:HINGE"             # a PolicyLoss
    [project.entry-points."stepwell.advantages"]
    median = "my_advantages:MEDIAN"       # an Estimator
    [project.entry-points."stepwell.off_policy"]
    tempered = "my_weights:TEMPERED"      # an OffPolicyMethod

Does not own how names are found and what is told of wrong ones (`backends/registry.py`). Importing
this loads no torch.
"""

from __future__ import annotations

from typing import Final

from stepwell.backends.registry import Names, Registry, first_line
from stepwell.trainer.algorithms.advantages.base import Estimator
from stepwell.trainer.algorithms.off_policy.base import OffPolicyMethod
from stepwell.trainer.algorithms.policy_losses.base import PolicyLoss

_HERE: Final = "stepwell.trainer.algorithms"

POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    Names(
        group="stepwell.policy_losses",
        key="policy",
        built_in={
            "ppo": f"{_HERE}.policy_losses.ppo:PPO",
            "gspo": f"{_HERE}.policy_losses.gspo:GSPO",
            "cispo": f"{_HERE}.policy_losses.cispo:CISPO",
            "sapo": f"{_HERE}.policy_losses.sapo:SAPO",
            "clip_cov": f"{_HERE}.policy_losses.covariance:CLIP_COV",
            "kl_cov": f"{_HERE}.policy_losses.covariance:KL_COV",
            "gpg": f"{_HERE}.policy_losses.likelihood:GPG",
            "sft": f"{_HERE}.policy_losses.likelihood:SFT",
        },
    ),
    wanted="PolicyLoss",
    fits=lambda found: isinstance(found, PolicyLoss),
    lacks=lambda name, found: None,
    about=lambda found: first_line(found.compute),
)

ESTIMATORS: Registry[Estimator] = Registry(
    Names(
        group="stepwell.advantages",
        key="adv_estimator",
        built_in={
            "grpo": f"{_HERE}.advantages.group:GRPO",
            "dr_grpo": f"{_HERE}.advantages.group:DR_GRPO",
            "rloo": f"{_HERE}.advantages.group:RLOO",
            "opo": f"{_HERE}.advantages.group:OPO",
            "gpg": f"{_HERE}.advantages.group:GPG",
            "remax": f"{_HERE}.advantages.greedy:REMAX",
            "reinforce_plus_plus": f"{_HERE}.advantages.reinforce:REINFORCE_PLUS_PLUS",
            "reinforce_plus_plus_baseline": (
                f"{_HERE}.advantages.reinforce:REINFORCE_PLUS_PLUS_BASELINE"
            ),
            "reinforce_running": f"{_HERE}.advantages.running:REINFORCE_RUNNING",
            "gae": f"{_HERE}.advantages.gae:GAE",
        },
    ),
    wanted="Estimator",
    fits=lambda found: isinstance(found, Estimator),
    lacks=lambda name, found: None,
    about=lambda found: first_line(found.estimate),
)

METHODS: Registry[OffPolicyMethod] = Registry(
    Names(
        group="stepwell.off_policy",
        key="method",
        built_in={
            name: f"{_HERE}.off_policy.presets:{name.upper()}"
            for name in (
                "staleness_aware",
                "none",
                "bypass",
                "decoupled",
                "tis",
                "geometric_tis",
                "sequence_tis",
                "mis",
                "sequence_mis",
                "geometric_mis",
                "icepop",
                "opsm",
            )
        },
    ),
    wanted="OffPolicyMethod",
    fits=lambda found: isinstance(found, OffPolicyMethod),
    lacks=lambda name, found: None,
    about=lambda found: found.about,
)

"""The members of each family by name: built in, of an installed package, or by dotted path.

A package adds its own by entry points, each to an object of one file::

    [project.entry-points."stepwell.policy_losses"]
    hinge = "my_losses:HINGE"             # a PolicyLoss
    [project.entry-points."stepwell.advantages"]
    median = "my_advantages:MEDIAN"       # an Estimator
    [project.entry-points."stepwell.off_policy"]
    tempered = "my_weights:TEMPERED"      # an OffPolicyMethod

Does not own how names are found, and errors about wrong ones (`backends/registry.py`). Importing
this loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stepwell.backends.registry import Names, Registry, first_line
from stepwell.trainer.algorithms.advantages.base import Estimator
from stepwell.trainer.algorithms.off_policy.base import OffPolicyMethod
from stepwell.trainer.algorithms.policy_losses.base import PolicyLoss

T = TypeVar("T")


def _family(
    group: str, key: str, member: type[T], about: Callable[[T], str], built_in: dict[str, str]
) -> Registry[T]:
    """`built_in`: by name, where the member is below this package."""
    paths = {name: f"stepwell.trainer.algorithms.{path}" for name, path in built_in.items()}
    return Registry(
        Names(group, key, paths),
        wanted=member.__name__,
        fits=lambda found: isinstance(found, member),
        lacks=lambda name, found: None,
        about=about,
    )


POLICY_LOSSES = _family(
    "stepwell.policy_losses",
    "policy",
    PolicyLoss,
    lambda found: first_line(found.compute),
    {
        "ppo": "policy_losses.ppo:PPO",
        "gspo": "policy_losses.gspo:GSPO",
        "cispo": "policy_losses.cispo:CISPO",
        "sapo": "policy_losses.sapo:SAPO",
        "clip_cov": "policy_losses.covariance:CLIP_COV",
        "kl_cov": "policy_losses.covariance:KL_COV",
        "geo_mean": "policy_losses.geo_mean:GEO_MEAN",
        "dppo_tv": "policy_losses.dppo:DPPO_TV",
        "dppo_kl": "policy_losses.dppo:DPPO_KL",
        "dro": "policy_losses.dro:DRO",
        "gpg": "policy_losses.likelihood:GPG",
        "sft": "policy_losses.likelihood:SFT",
    },
)

ESTIMATORS = _family(
    "stepwell.advantages",
    "adv_estimator",
    Estimator,
    lambda found: first_line(found.estimate),
    {
        "grpo": "advantages.group:GRPO",
        "dr_grpo": "advantages.group:DR_GRPO",
        "rloo": "advantages.group:RLOO",
        "opo": "advantages.group:OPO",
        "gpg": "advantages.group:GPG",
        "grpo_passk": "advantages.pass_at_k:GRPO_PASSK",
        "gdpo": "advantages.gdpo:GDPO",
        "remax": "advantages.greedy:REMAX",
        "reinforce_plus_plus": "advantages.reinforce:PLAIN",
        "reinforce_plus_plus_baseline": "advantages.reinforce:WITH_BASELINE",
        "reinforce_running": "advantages.running:REINFORCE_RUNNING",
        "gae": "advantages.gae:GAE",
    },
)

METHODS = _family(
    "stepwell.off_policy",
    "method",
    OffPolicyMethod,
    lambda found: found.about,
    {
        name: f"off_policy.presets:{name.upper()}"
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
)

"""This module says which built-in scores a data set, so that a run on a usual one names no reward
function.

The names are those that verl 0.9 writes into `data_source` (`verl/utils/reward_score/__init__.py`,
`default_compute_score`), and those of the same sets on the Hub.
"""

from __future__ import annotations

from typing import Any

from stepwell.trainer.errors import RewardValueError
from stepwell.trainer.rewards.loading import BOXED, BUILT_IN, NOT_OURS

_SETS = {
    "gsm8k": "openai/gsm8k gsm8k",
    # verl wants a box for these; `math` alone would take the last expression of an answer, too.
    "boxed_math": "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 "
    "hendrycks_math EleutherAI/hendrycks_math",
    "dapo": "math_dapo math math_dapo_reasoning",
    "math": "numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc "
    "numina_cn_k12 numina_olympiads",
    "geo3k": "hiyouga/geometry3k",
    "code": "codecontests apps codeforces taco mbpp google-research-datasets/mbpp "
    "evalplus/mbppplus humaneval openai_humaneval openai/openai_humaneval evalplus/humanevalplus",
    "search_r1": "searchR1_nq searchR1_triviaqa searchR1_popqa searchR1_hotpotqa "
    "searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle",
}
USUAL = {name: function for function, names in _SETS.items() for name in names.split()}
"""The built-in by data source; those that begin with `aime` are scored by `dapo`."""
REFUSED = {
    "llava_v1_5_mix": "its answers are free text about images; name a judge in "
    "rollout.reward.function",
}


def usual_reward(data_source: str, rm_type: Any = None) -> str:
    """The built-in for a task of `data_source`.

    Args:
        rm_type: of the task's metadata, where slime's data has the name of its reward; it counts
            first, as there.

    Raises:
        RewardValueError: there is none.
    """
    if isinstance(rm_type, str) and (name := rm_type.strip()):
        if name.removeprefix(BOXED) not in {**BUILT_IN, **NOT_OURS}:  # data name no code to import
            raise RewardValueError(
                f"a task's rm_type is {name!r}, which is not built in; name it in "
                "rollout.reward.function, or set rm_type to one of " + ", ".join(sorted(BUILT_IN))
            )
        return name
    if data_source.startswith("aime"):
        return "dapo"
    if data_source in USUAL:
        return USUAL[data_source]
    because = REFUSED.get(
        data_source,
        "name its function in rollout.reward.by_data_source, or set rollout.reward.function for "
        "all others",
    )
    raise RewardValueError(f"no reward function for data source {data_source!r}: {because}")


def has_usual_reward(data_source: str, rm_type: Any = None) -> bool:
    """True if `usual_reward` knows a function for the data source, or says why there is none."""
    if data_source in REFUSED or rm_type:
        return True
    try:
        return bool(usual_reward(data_source, rm_type))
    except RewardValueError:
        return False

"""GSPO: the clipped surrogate of the ratio of a whole response, with a gradient per token.

    s   = exp(mean over the step's trained tokens of log π - log π_prox)
    s_t = sg(s) · π_t / sg(π_t)
    L   = max(-A s_t, -A clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

A sequence is the response of one step, also in a trajectory of several: each call to the model is
one action. Its tokens have to be in one micro-batch. Row forms keep a response in one row, and rows
are never cut: so they are. The columns `step` and `step_tokens` say what belongs together, and a
step in parts is an error.

Source: GSPO, arXiv:2507.18071 eq. 7 and 14 (GSPO-token, whose gradient is GSPO's when A is constant
over the sequence). The bounds are the paper's: the ratio is a geometric mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepwell.trainer.algorithms.policy_losses.base import (
    BatchTokens,
    Columns,
    LossKeys,
    PolicyLoss,
    PolicyTerms,
    clipped,
)
from stepwell.trainer.errors import ColumnError

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 10.0
"""log s is cut off above this (verl's bound)."""


def gspo(log_probs: Tensor, x: Columns, keys: LossKeys[Any]) -> PolicyTerms:
    """The clipped surrogate of the ratio of a whole response."""
    log_sequence = step_mean((log_probs - x["prox_log_probs"]).detach(), x)
    ratio = (log_probs - log_probs.detach() + log_sequence).clamp(max=MAX_LOG_RATIO).exp()
    loss, flags = clipped(ratio, x["advantages"], keys)
    return PolicyTerms(loss, ratio, flags)


def step_mean(values: Tensor, x: Columns) -> Tensor:
    """The mean of `values` over the trained tokens of each step, spread over these: [n].

    Args:
        x: `step`, a number that a step's tokens share, and `step_tokens`, their number.

    Raises:
        ColumnError: not all tokens of a step are here.
    """
    step = x["step"].long()
    count = step.bincount()
    if (short := count[step] != x["step_tokens"]).any():
        at = int(short.nonzero()[0])
        raise ColumnError(
            f"a micro-batch holds {int(count[step[at]])} of the "
            f"{int(x['step_tokens'][at])} tokens of step {int(x['step'][at])}; a ratio "
            "per sequence needs them all, so the backend must not cut a row in two"
        )
    total: Tensor = values.new_zeros(len(count)).index_add_(0, step, values)
    return (total / count)[step]


def step_columns(tokens: BatchTokens, keys: LossKeys[Any]) -> dict[str, Tensor]:
    """The columns that `step_mean` reads. float32 counts exactly up to 2^24 steps."""
    count = tokens.step[tokens.trained].bincount(minlength=int(tokens.step[-1]) + 1)
    return {"step": tokens.step.float(), "step_tokens": count[tokens.step].float()}


GSPO = PolicyLoss(
    gspo,
    ("prox_log_probs", "advantages", "step", "step_tokens"),
    clip=(3e-4, 4e-4),
    prepare=step_columns,
    selects=False,
)

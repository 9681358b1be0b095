"""The forms that are compared: each takes steps through one optimizer step.

    plain    a row per step, padded to the longest of the batch, logits at every position: the
             loop that one writes first, without Stepwell
    step, merged, tree    `TorchBackend.train_step` with that `backend.rows`
    trl, trl-merged       `trl_forms.py`

All start from the same weights and have the same loss: PPO's clipped surrogate, a mean over the
response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.trainer.base import LR, ROWS_PER_MICRO_BATCH, Form, advantages
from benchmarks.trainer.trl_forms import Trl
from stepwell.backends.base import LossOutput
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.rows import RowForm
from stepwell.backends.torch.backend import TorchBackend
from stepwell.datapool.types import Step


def surrogate(log_probs: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """-min(r A, clip(r, 0.8, 1.2) A), r = π/π_old; PPO, arXiv:1707.06347."""
    ratio = torch.exp(log_probs - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


class Plain(Form):
    """Plain training loop, which the others are compared to."""

    name = "plain"

    def __init__(self, model_path: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._model = model.eval()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)

    def step(self, steps: Sequence[Step]) -> float:
        width = max(step.n_tokens for step in steps)
        n = sum(len(step.response_ids) for step in steps)
        weights = advantages(steps)
        self._optimizer.zero_grad()
        for start in range(0, len(steps), ROWS_PER_MICRO_BATCH):
            rows = steps[start : start + ROWS_PER_MICRO_BATCH]
            ids = np.zeros((len(rows), width), dtype=np.int64)
            mask = np.zeros((len(rows), width), dtype=np.float32)
            for row, step in enumerate(rows):
                ids[row, : step.n_tokens] = step.token_ids
                mask[row, len(step.prompt_ids) : step.n_tokens] = 1
            self._micro_batch(
                torch.from_numpy(ids),
                torch.from_numpy(mask)[:, 1:],
                torch.tensor(weights[start : start + len(rows)]).unsqueeze(-1),
                n,
            )
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.computed = len(steps) * width
        return float(norm)

    def _micro_batch(self, ids: Tensor, mask: Tensor, advantage: Tensor, n: int) -> None:
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = (surrogate(log_probs, log_probs.detach(), advantage) * mask).sum() / n
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Rows(Form):
    """Stepwell's torch backend."""

    def __init__(self, form: RowForm, model_path: Path, **options: Any) -> None:
        self.name = form
        config = {"rows": form, "device": "cpu", "lr": LR} | options
        self.backend = TorchBackend(TorchBackendConfig.model_validate(config), model_path)

    def step(self, steps: Sequence[Step]) -> float:
        batch = self.backend.convert(list(steps))
        batch.columns["advantages"] = batch.expand(advantages(steps))
        batch.columns["coef"] = torch.full((batch.n_tokens,), 1 / batch.n_tokens)
        metrics = self.backend.train_step(batch, _loss)
        self.computed = int(metrics["padded_tokens"])
        return metrics["grad_norm"]


def _loss(log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> LossOutput:
    loss = surrogate(log_probs, log_probs.detach(), columns["advantages"])
    return LossOutput((columns["coef"] * loss).sum(), {})


def make_form(name: str, model_path: Path) -> Form:
    """The form called `name`, around a model of its own."""
    if name == Plain.name:
        return Plain(model_path)
    if name.startswith("trl"):
        return Trl(model_path, merged=name == "trl-merged")
    form: Literal["step", "merged", "tree"] = name  # type: ignore[assignment]  # validated by the config
    return Rows(form, model_path)

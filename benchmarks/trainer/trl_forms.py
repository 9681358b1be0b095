"""TRL's GRPO loss over the same steps, through its own trainer's `compute_loss`.

    trl           a row per step: prompt padded on the left, response on the right
    trl-merged    a row per trajectory: all that follows the first prompt is the completion, what
                  the environment said is masked (`tool_mask`), as TRL does with tools

Only for comparison: `INSTALL` says how to get it. Does not use TRL's generation or optimizer.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.trainer.base import LR, ROWS_PER_MICRO_BATCH, Form, advantages
from stepwell.datapool.types import Step

INSTALL = "pip install --no-deps -c constraints.txt trl==1.16.0"
"""All else that it imports is ours already."""


def is_installed() -> bool:
    """True if TRL is there to be compared with."""
    return importlib.util.find_spec("trl") is not None


class Trl(Form):
    """TRL's trainer, its model and its loss."""

    def __init__(self, model_path: Path, *, merged: bool) -> None:
        self.name = "trl-merged" if merged else "trl"
        self._merged = merged
        self._trainer = _trainer(model_path)
        self._model = self._trainer.model
        # As ours: dropout would make π differ from itself (and this model has none).
        self._model.eval()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)

    def step(self, steps: Sequence[Step]) -> float:
        rows = _merged(steps) if self._merged else [_single(step) for step in steps]
        weights = advantages([step for step, _, _ in rows])
        prompt = max(len(step.prompt_ids) for step, _, _ in rows)
        completion = max(len(ids) for _, ids, _ in rows)
        n = torch.tensor(float(sum(mask.sum() for _, _, mask in rows)))
        self._optimizer.zero_grad()
        for start in range(0, len(rows), ROWS_PER_MICRO_BATCH):
            chunk = rows[start : start + ROWS_PER_MICRO_BATCH]
            inputs = _inputs(chunk, prompt, completion)
            inputs["advantages"] = torch.tensor(weights[start : start + len(chunk)])
            inputs["num_items_in_batch"] = n
            self._trainer.compute_loss(self._model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.computed = len(rows) * (prompt + completion)
        return float(norm)


_Row = tuple[Step, Any, Any]
"""First step of the row, completion ids [n] and their loss mask [n]."""


def _single(step: Step) -> _Row:
    return step, step.response_ids, np.ones(len(step.response_ids), dtype=np.int64)


def _merged(steps: Sequence[Step]) -> list[_Row]:
    by_trajectory: dict[str, list[Step]] = {}
    for step in steps:
        by_trajectory.setdefault(step.trajectory_uid, []).append(step)
    rows: list[_Row] = []
    for members in by_trajectory.values():
        first, last = members[0], members[-1]
        start = len(first.prompt_ids)
        ids = last.token_ids[start:]
        mask = np.zeros(len(ids), dtype=np.int64)
        for step in members:
            begin = len(step.prompt_ids) - start
            mask[begin : begin + len(step.response_ids)] = 1
        rows.append((first, ids, mask))
    return rows


def _inputs(rows: Sequence[_Row], prompt: int, completion: int) -> dict[str, Tensor]:
    arrays = {
        "prompt_ids": np.zeros((len(rows), prompt), dtype=np.int64),
        "prompt_mask": np.zeros((len(rows), prompt), dtype=np.int64),
        "completion_ids": np.zeros((len(rows), completion), dtype=np.int64),
        "completion_mask": np.zeros((len(rows), completion), dtype=np.int64),
        "tool_mask": np.zeros((len(rows), completion), dtype=np.int64),
    }
    for r, (step, ids, mask) in enumerate(rows):
        p, c = len(step.prompt_ids), len(ids)
        arrays["prompt_ids"][r, prompt - p :] = step.prompt_ids
        arrays["prompt_mask"][r, prompt - p :] = 1
        arrays["completion_ids"][r, :c] = ids
        arrays["completion_mask"][r, :c] = 1
        arrays["tool_mask"][r, :c] = mask
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _trainer(model_path: Path) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    trl: Any = importlib.import_module("trl")
    # The trainer wants a tokenizer and data; neither is used.
    words = {"<pad>": 0, "<eos>": 1}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # theirs
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        return trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                beta=0.0,
                loss_type="dapo",
                epsilon=0.2,
                temperature=1.0,
                num_generations=ROWS_PER_MICRO_BATCH,
                per_device_train_batch_size=ROWS_PER_MICRO_BATCH,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * ROWS_PER_MICRO_BATCH}),
            processing_class=tokenizer,
        )

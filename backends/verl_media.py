"""Images and videos of a step as the model takes them: verl's `multi_modal_inputs` and positions.

A step's `multi_modal_data` is all that its prompt's placeholders stand for, in order: raw media
under `images` and `videos` (what a Hugging Face processor accepts), or under any other name what
such a processor made of them (`pixel_values`, `image_grid_thw`, …), which is passed on.

    images ──processor──► pixel_values, image_grid_thw ──get_rope_index──► position_ids [4, L]

The placeholders in the token ids are expanded already, as the engine saw them, so only the media
are processed and no text. Does not own: tokens (`verl_rows.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stepwell.backends.errors import BatchError
from stepwell.datapool.types import Step

Processor: TypeAlias = Any
"""A Hugging Face processor with the model's `get_rope_index` bound to it, as
`verl.utils.tokenizer.hf_processor` returns it."""

RAW = {"images": "image_processor", "videos": "video_processor"}
"""Key of raw media -> the processor's part for them."""
GRIDS = ("image_grid_thw", "video_grid_thw")
"""Where these are, the model counts positions in three dimensions (M-RoPE)."""


@dataclass(frozen=True, slots=True)
class Media:
    """The media of one model's steps."""

    processor: Processor | None = None

    def inputs(self, step: Step) -> dict[str, Tensor]:
        """verl's `multi_modal_inputs` of a row that ends with `step`; empty for text.

        Raises:
            BatchError: raw media and no processor for them.
        """
        data: Mapping[str, Any] = step.multi_modal_data or {}
        found: dict[str, Tensor] = {}
        for key, value in data.items():
            if key not in RAW:
                found[key] = torch.as_tensor(value)
                continue
            part = getattr(self.processor, RAW[key], None)
            if part is None:
                raise BatchError(
                    f"step {step.trajectory_uid!r}[{step.step_index}] has raw {key} in "
                    "multi_modal_data; pass VerlBackend(processor=…) that has a "
                    f"{RAW[key]} (verl.utils.tokenizer.hf_processor(model_path)), or its outputs"
                )
            found |= dict(part(**{key: value}, return_tensors="pt"))
        grid = found.get("image_grid_thw")
        if grid is not None:
            # For verl's count of the vision tower's FLOPs.
            found["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        return found

    def position_ids(self, ids: Tensor, inputs: Mapping[str, Tensor], step: Step) -> Tensor:
        """int64, [L], or [4, L] (text, time, height, width) if the model has M-RoPE."""
        text = torch.arange(len(ids))
        rope_index = getattr(self.processor, "get_rope_index", None)
        if rope_index is None:
            if self.processor is None and any(name in inputs for name in GRIDS):
                raise BatchError(
                    f"step {step.trajectory_uid!r}[{step.step_index}] has image or video grids, so "
                    "its model counts positions in three dimensions; pass "
                    "VerlBackend(processor=verl.utils.tokenizer.hf_processor(model_path))"
                )
            return text
        row = ids.unsqueeze(0)
        grids: dict[str, Any] = {name: inputs.get(name) for name in GRIDS}
        if "mm_token_type_ids" in inspect.signature(rope_index).parameters:  # transformers >= 5.3
            grids["mm_token_type_ids"] = self._token_types(row)
        vision, _ = rope_index(input_ids=row, attention_mask=torch.ones_like(row), **grids)
        return torch.cat([text.unsqueeze(0), vision[:, 0].long()])

    def _token_types(self, row: Tensor) -> Tensor:
        """1 where a token stands for an image, 2 for a video, 0 else; [1, L]."""
        types = torch.zeros_like(row)
        for number, name in enumerate(("image_token_id", "video_token_id"), start=1):
            token = getattr(self.processor, name, None)
            if token is not None:
                types[row == token] = number
        return types

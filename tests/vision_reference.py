"""log π of a model that reads pictures by one plain forward of transformers' own code: its own
placeholders, positions and merging of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from stepwell.backends.pictures import PictureProcessor


class VisionReference:
    """The model in a folder; vision tokens have no probability."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()
        processor = PictureProcessor.of(folder)
        assert processor is not None
        self.processor = processor

    def log_probs(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        pngs: Sequence[bytes] = (),
        temperature: float = 1.0,
    ) -> Tensor:
        """log p(output | prompt) per token, [len(output)]; the prompt's placeholders are expanded
        and `pngs` their canonical pictures."""
        ids = torch.tensor([[*prompt, *output]])
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if pngs:
            made = self.processor.features(pngs)
            inputs |= {name: torch.from_numpy(value) for name, value in made.items()}
            inputs["mm_token_type_ids"] = (ids == self.processor.placeholder_id).int()
        self.model.model.rope_deltas = None
        logits = self.model(**inputs).logits[0, len(prompt) - 1 : -1].float() / temperature
        logits = logits.clone()
        logits[:, list(self.processor.forbidden_ids)] = -torch.inf
        log_probs = torch.log_softmax(logits, dim=-1)
        return log_probs.gather(1, torch.tensor(list(output))[:, None])[:, 0]

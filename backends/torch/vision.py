"""The frozen vision tower of a model: what its decoder gets of a micro-batch with pictures.

    PNGs by digest ──features──► tower, no grad ──► embeddings [n_tokens, hidden], once per batch
    ids ──embedding──► [rows, width, hidden] with those at the placeholders ──► decoder

Nothing of the tower is trained, so its embeddings are constants: each picture is computed once per
batch, whatever the rows, passes and mini-batches it stands in. Vision tokens have no probability,
as in the engine, which never samples them.

Does not own: where pictures stand in rows (`model.py`), the rules of pictures (`pictures.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stepwell.backends.pictures import PictureProcessor


@dataclass(eq=False, slots=True)
class BatchPictures:
    """Pictures of one batch."""

    pngs: Mapping[str, bytes] = field(default_factory=dict)
    """Canonical pictures by digest."""
    embeddings: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """By tower and digest, on the CPU; filled as they are needed."""


class Tower:
    """The tower of one model; frozen."""

    def __init__(
        self, model: Any, processor: PictureProcessor, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.processor = processor
        self.forbidden = torch.tensor(processor.forbidden_ids, device=device)
        """int64: ids without probability."""
        self._model = model
        self._device = device
        self._dtype = dtype

    @property
    def module(self) -> Any:
        """The part of the model that computes pictures."""
        return self._model.base_model.visual

    def embed(
        self, ids: Tensor, places: Iterable[tuple[str, Tensor]], pictures: BatchPictures
    ) -> Tensor:
        """Inputs of the decoder, [rows, width, hidden].

        Args:
            ids: [rows, width].
            places: digest and indices into rows x width of the placeholders of each picture.
        """
        embeds: Tensor = self._model.get_input_embeddings()(ids)
        digests, indices = zip(*places, strict=True)
        known = torch.cat([self._embedding(digest, pictures) for digest in digests])
        at = torch.cat(indices).to(ids.device)
        flat = embeds.flatten(0, 1).index_copy(0, at, known.to(embeds.device, embeds.dtype))
        return flat.view_as(embeds)

    @torch.no_grad()
    def _embedding(self, digest: str, pictures: BatchPictures) -> Tensor:
        key = (id(self), digest)
        if key not in pictures.embeddings:
            features = self.processor.features([pictures.pngs[digest]])
            pixels = torch.from_numpy(features["pixel_values"]).to(self._device, self._dtype)
            grid = torch.from_numpy(features["image_grid_thw"]).to(self._device)
            pictures.embeddings[key] = self.module(pixels, grid_thw=grid).pooler_output.cpu()
        return pictures.embeddings[key]


def freeze_tower(model: Any, dtype: torch.dtype) -> None:
    """Train nothing of the tower; it computes in `dtype`."""
    model.base_model.visual.requires_grad_(False).to(dtype)

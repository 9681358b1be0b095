"""Pictures of verl's rows: what verl's agent loop makes of them with the model's processor.

    multi_modal_inputs   pixel_values, image_grid_thw of the row's pictures, images_seqlens
    position_ids         [4, n]: the token's place, then time, height and width

Source: verl 0.9.1, `AgentLoopWorker._compute_multi_modal_inputs`, `_compute_position_ids`. A row
without pictures has empty inputs and four equal rows of positions, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.pictures import PictureProcessor, no_pictures
from stepwell.backends.rows import TokenRow


class RowImages:
    """Makes a row's inputs.

    Raises:
        BackendConfigError: the model in `model_path` takes no pictures.
    """

    def __init__(self, model_path: Path, pngs: Mapping[str, bytes]) -> None:
        processor = PictureProcessor.of(model_path)
        if processor is None:
            raise BackendConfigError(f"model_path is set, but {no_pictures(model_path)}")
        self._processor = processor
        self._pngs = pngs

    def inputs(self, row: TokenRow) -> dict[str, Tensor]:
        """`multi_modal_inputs`.

        Raises:
            BatchError: the bytes of a picture are not there.
        """
        if not row.pictures:
            return {}
        if missing := [p for p in row.pictures if p.digest not in self._pngs]:
            raise BatchError(f"the bytes of {missing[0]} are not there; give them in pictures")
        found = self._processor.features([self._pngs[p.digest] for p in row.pictures])
        made = {name: torch.from_numpy(value) for name, value in found.items()}
        grid = made["image_grid_thw"]
        made["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        return made

    def positions(self, row: TokenRow) -> Tensor:
        """int64, [4, n]."""
        rotary = torch.from_numpy(self._processor.positions(row.ids, row.pictures))
        return torch.cat([torch.arange(len(row.ids))[None], rotary])

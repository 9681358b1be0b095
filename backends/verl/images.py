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

from stepwell.backends.images import RowFeatures
from stepwell.backends.rows import TokenRow


class RowImages:
    """Makes a row's inputs.

    Raises:
        BackendConfigError: the model in `model_path` takes no pictures.
    """

    def __init__(self, model_path: Path, pngs: Mapping[str, bytes]) -> None:
        self._features = RowFeatures("model_path", model_path, pngs)

    def inputs(self, row: TokenRow) -> dict[str, Tensor]:
        """`multi_modal_inputs`.

        Raises:
            BatchError: the bytes of a picture are not there.
        """
        if made := self._features.of(row):
            grid = made["image_grid_thw"]
            made["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        return made

    def positions(self, row: TokenRow) -> Tensor:
        """int64, [4, n]."""
        rotary = torch.from_numpy(self._features.processor.positions(row.ids, row.pictures))
        return torch.cat([torch.arange(len(row.ids))[None], rotary])

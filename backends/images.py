"""Pictures of a row as a trainer that is not ours wants them: verl's and slime's rows have them.

Owns: what the model's processor makes of a row's pictures. Does not own: what else a trainer wants
beside it (`verl/images.py`, `slime/images.py`), the processor (`pictures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stepwell.backends.errors import BackendConfigError, BatchError
from stepwell.backends.pictures import PictureProcessor, no_pictures
from stepwell.backends.rows import TokenRow


class RowFeatures:
    """Makes the inputs of the vision tower for rows.

    Args:
        setting: name of the setting that `model_path` is the value of.
        pngs: PNG by digest.

    Raises:
        BackendConfigError: the model in `model_path` takes no pictures.
    """

    def __init__(self, setting: str, model_path: Path, pngs: Mapping[str, bytes]) -> None:
        processor = PictureProcessor.of(model_path)
        if processor is None:
            raise BackendConfigError(f"{setting} is set, but {no_pictures(model_path)}")
        self.processor = processor
        self._pngs = pngs

    def of(self, row: TokenRow) -> dict[str, Tensor]:
        """`pixel_values` [patches, patch dim] and `image_grid_thw` [pictures, 3]; empty if the row
        has no pictures.

        Raises:
            BatchError: the bytes of a picture are not there.
        """
        if not row.pictures:
            return {}
        if missing := [p for p in row.pictures if p.digest not in self._pngs]:
            raise BatchError(f"the bytes of {missing[0]} are not there; give them in pictures")
        found = self.processor.features([self._pngs[p.digest] for p in row.pictures])
        return {name: torch.from_numpy(value) for name, value in found.items()}

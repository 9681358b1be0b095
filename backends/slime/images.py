"""Pictures of slime's samples: `multimodal_train_inputs`, as slime's rollout makes them.

    pixel_values [patches, patch dim], image_grid_thw [pictures, 3]; None: the sample has no picture

slime keeps all that the model's processor returns but ids and attention mask, joins each key over
the samples of a micro-batch, and passes it to the model, which finds its positions by itself.
Source: THUDM/slime 0.3.1, `slime/rollout/sglang_rollout.py` (`_prepare_prompt_ids`),
`slime/backends/megatron_utils/data.py` (`get_batch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from stepwell.backends.images import RowFeatures
from stepwell.backends.rows import TokenRow
from stepwell.backends.slime.samples import TrainInputs
from stepwell.datapool.types import Step


def train_inputs(
    hf_checkpoint: str | Path | None, steps: Iterable[Step], pngs: Mapping[str, bytes]
) -> TrainInputs | None:
    """The function that makes `multimodal_train_inputs` of the rows of `steps`; None if there are
    no pictures, or no model that says what becomes of them. Rows of equal pictures, as those of a
    group often are, share their tensors.

    Args:
        hf_checkpoint: slime's argument, the folder of the model.
        pngs: PNG by digest.

    Raises:
        BackendConfigError: the steps have pictures, and the model takes none.
    """
    if hf_checkpoint is None or not any(step.pictures for step in steps):
        return None
    features = RowFeatures("hf_checkpoint", Path(hf_checkpoint), pngs)
    made: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def of(row: TokenRow) -> dict[str, Any]:
        shown = tuple(picture.digest for picture in row.pictures)
        if shown not in made:
            made[shown] = features.of(row)
        return dict(made[shown])

    return of

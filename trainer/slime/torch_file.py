"""Files that slime or we wrote with torch: read alike, and no code of theirs runs.

Ours have a seal (`datapool/sealed.py`); a seal is a digest and no signature, so it allows nothing
more. Does not own what a file must hold, or its errors.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

_NUMPY: Any = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bhilqBHILQefd"},
]
"""Constructors of NumPy's arrays and numbers: the only code of a file that is run."""


def load_torch(content: bytes) -> Any:
    """Return what torch wrote, without its seal.

    Raises:
        ValueError: it cannot be read, or would run code; the message says why in a few words.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as e:  # what is damaged fails in many ways
        why = str(e).partition("\n")[0].partition(" This file can still")[0]  # torch's advice
        raise ValueError(why or type(e).__name__) from e

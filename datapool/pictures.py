"""References to the pictures of a prompt, and what a comparison of token ids needs of them.

A picture stands in a prompt as a run of placeholder ids; two pictures of one size have the same
run. Whatever compares prompts that may hold pictures therefore compares `shadow_ids`, in which each
run has the picture's own value::

    ids     7  9  151655  151655  151655  8        shadow   7  9  -5e18  -5e18  -5e18  8

Owns the reference and the comparison. Does not own bytes (`store/picture_folder.py`), nor what a
picture is to a model (`backends/pictures.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

DIGEST: re.Pattern[str] = re.compile("[0-9a-f]{64}")
_VALUES = 1 << 62


class Picture(NamedTuple):
    """A reference to one picture of a prompt; never its bytes."""

    digest: str
    """64 hex digits: SHA-256 of `RGB <width> <height>`, a newline and the RGB bytes."""
    width: int
    """Pixels; of the canonical picture, which is on the model's grid."""
    height: int
    at: int
    """Index in `prompt_ids` of its first placeholder."""
    n_tokens: int
    """Placeholders from there on."""

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.at + self.n_tokens

    @property
    def shadow(self) -> int:
        """Value < 0 that stands for its placeholders: the same wherever the picture is."""
        named = f"{self.digest} {self.width} {self.height} {self.n_tokens}"
        return -1 - int.from_bytes(sha256(named.encode()).digest()[:8], "little") % _VALUES


def shadow_ids(ids: npt.ArrayLike, pictures: Sequence[Picture]) -> npt.NDArray[np.int64]:
    """Return token ids with each picture's placeholders replaced by `Picture.shadow`, int64 [T]:
    two such arrays are equal if and only if ids and pictures are. A picture that reaches beyond the
    end is replaced as far as the ids go."""
    shadow = np.array(ids, np.int64)
    for picture in pictures:
        shadow[picture.at : picture.end] = picture.shadow
    return shadow


def malformed(pictures: Sequence[Any], n_prompt: int) -> str | None:
    """Return what is wrong with the pictures of a prompt of `n_prompt` tokens, and the remedy; None
    if nothing is."""
    end = 0
    for i, picture in enumerate(pictures):
        if not isinstance(picture, Picture):
            return f"pictures[{i}] is {picture!r:.80}; pass a Picture"
        name = f"pictures[{i}] is {picture!r:.240}"
        if not isinstance(picture.digest, str) or not DIGEST.fullmatch(picture.digest):
            return f"{name}; its digest has 64 hex digits in lower case"
        for value, least in zip(picture[1:], (1, 1, 0, 1), strict=True):
            if type(value) is not int or not least <= value < 2**31:
                return f"{name}; pass integers, all but `at` above 0"
        if picture.at < end or picture.end > n_prompt:
            return (
                f"{name}; pass pictures in order of `at`, none overlapping, each inside the "
                f"{n_prompt} prompt tokens"
            )
        end = picture.end
    return None

"""The model's tokenizer, loaded once for all who turn its tokens into text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def tokenizer_at(path: Path) -> Any:
    """Return the tokenizer of the model folder `path`."""
    from transformers import AutoTokenizer  # seconds to import: only for those who use it

    return AutoTokenizer.from_pretrained(path)

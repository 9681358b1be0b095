"""This module looks at a Hugging Face model directory without loading it, so that a model that
cannot be trained is refused in milliseconds: files that are missing, cut off or only pointers.

    config.json        which architecture it is
    *.safetensors      each begins with the names, shapes and places of its tensors: their number of
                       parameters is exact, and a file that was cut off is shorter than it says
    tokenizer, chat template

Owns what is read of the folder. Does not own loading it (`torch/backend.py`, the engines) or the
memory that training it takes (`torch/memory.py`). Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stepwell.backends.errors import BackendConfigError

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_WHOLE = "model."
"""Prefix of all names of a whole model's base."""
_DEEPER = (("visual.", _WHOLE + "visual."), (_WHOLE, _WHOLE + "language_model."))
"""Prefixes in the files of a model that reads pictures, and in the module that is loaded."""


def module_name(name: str, own: Container[str]) -> str:
    """Name in a loaded module, whose own names are `own`, of a tensor of its files."""
    if name not in own:
        for outer, inner in _DEEPER:
            if name.startswith(outer):
                return inner + name.removeprefix(outer)
    return name


def checkpoint_name(name: str) -> str:
    """Name in the files of a tensor of a loaded model that reads pictures."""
    for outer, inner in _DEEPER:
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name

"""Values as they can be sent to the pool, the gateway or a model and written as JSON, whatever
agents, data sets, tools and rewards say: numbers, text, lists and objects of these, with no integer
beyond 64 bits and no half of a character (a lone surrogate).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.datapool.types import MAX_INT
from stepwell.trainer.errors import shown

MAX_DEPTH = 100
"""Lists and objects within each other. orjson writes 254; a reply that was read as JSON may have
more than Python calls functions."""


def plain_text(text: str) -> str:
    """`text` with a question mark for each half of a character."""
    return text.encode(errors="replace").decode()


def plain(value: Any, depth: int = 0) -> Any:
    """`value` with each text as `plain_text`, NumPy's and torch's numbers and arrays as Python's,
    and integers beyond 64 bits and all that JSON has no form for as text, keys too.

    Args:
        depth: lists and objects around it. What is deeper than `MAX_DEPTH` is text.
    """
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int):
        is_within = -MAX_INT <= value < 2 * MAX_INT
        return value if is_within else shown(value) or hex(value)
    if isinstance(value, float):
        return float(value)
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {plain(k, MAX_DEPTH): plain(item, depth + 1) for k, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, depth + 1) for item in value]
        if callable(to_list := getattr(value, "tolist", None)):
            return plain(to_list(), depth + 1)
    return value if value is None else plain_text(shown(value))

"""Values as they can be sent to the pool, the gateway or a model and written as JSON, whatever
agents, data sets, tools and rewards say: no integer beyond 64 bits, no half of a character (a lone
surrogate).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepwell.datapool.types import MAX_INT
from stepwell.trainer.errors import shown


def plain_text(text: str) -> str:
    """`text` with a question mark for each half of a character."""
    return text.encode(errors="replace").decode()


def plain(value: Any) -> Any:
    """`value` with integers beyond 64 bits as text, and each text as `plain_text`."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int) and not -MAX_INT <= value < 2 * MAX_INT:
        return shown(value) or hex(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value

"""Rows as plain objects: which columns tasks are made of, and what JSON makes of their values.

A row that is about a video or a sound is refused, and one about an image that no `image_key` names,
since a model would be trained on the text without it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from stepwell.trainer.config import TableConfig
from stepwell.trainer.errors import DataError

DataRow: TypeAlias = dict[str, Any]

MEDIA = (
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "multi_modal_data",
    "multi_modal_inputs",
)
"""Names under which rows hold what is not text: those of slime and of verl."""
_PLACEHOLDER = re.compile("<(?:image|video|audio)>")
_PARTS = frozenset({"image", "image_url", "input_image", "video", "audio", "input_audio"})
_NO_PICTURE = re.compile("<(?:video|audio)>")
_NO_PICTURE_PARTS = _PARTS - {"image", "image_url"}


def refuse_media(row: Mapping[str, Any], where: str, image_key: str | None = None) -> None:
    """
    Raises:
        DataError: the row holds an image, a video or a sound in another column than `image_key`.
    """
    for name in MEDIA:
        if image_key is not None and name == image_key.partition(".")[0]:
            continue
        value = row.get(name)
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            raise holds_media(where, name)


def refuse_placeholders(prompt: str | list[DataRow], key: str, where: str) -> None:
    """
    Raises:
        DataError: a text or a message stands for an image, a video or a sound.
    """
    contents = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    for content in contents:
        for part in content if isinstance(content, list) else [content]:
            if (found := _stands_for(part, _PARTS, _PLACEHOLDER)) is not None:
                raise holds_media(where, f"{found} in {key}")


def refuse_videos(part: Any, where: str) -> None:
    """
    Raises:
        DataError: a part of a message, or a text, stands for a video or a sound, or is a picture in
            the form of another API.
    """
    if (found := _stands_for(part, _NO_PICTURE_PARTS, _NO_PICTURE)) is not None:
        raise holds_media(where, f"{found} in its prompt")


def _stands_for(part: Any, kinds: frozenset[str], placeholder: re.Pattern[str]) -> str | None:
    """Words for the part of a message that is one of `kinds`, or for the first `placeholder` in its
    text; None: it is neither."""
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else ("", part)
    if kind in kinds:
        return f"a part of type {kind!r}"
    found = placeholder.search(text) if isinstance(text, str) else None
    return None if found is None else found[0]


def holds_media(where: str, what: str) -> DataError:
    return DataError(
        f"{where} has {what}; videos and sounds are not trained, and images where "
        "image_key names their column: set it, or leave such rows out (a column that is none of "
        "these: rename it)"
    )


def lookup(row: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of `key`, or, reaching into objects, of `key.with.dots`."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


class Columns:
    """The columns of a source that tasks are made of."""

    def __init__(self, config: TableConfig) -> None:
        self._lists = [key for key in (config.prompt_key, config.tool_key) if key is not None]
        keys = (*self._lists, config.label_key, config.metadata_key, "instance_id", "data_source")
        self.image = None if config.image_key is None else config.image_key.partition(".")[0]
        """Column of the pictures, which JSON cannot have."""
        self._wanted = {part for key in keys if key for part in (key, key.partition(".")[0])}

    def __contains__(self, name: str) -> bool:
        return name in self._wanted

    def read(self, stored: Mapping[str, Any]) -> DataRow:
        """The row as JSON has it; of other columns the names alone, which a message may tell."""
        known = {k: v if k in self else None for k, v in stored.items()}
        row: DataRow = json.loads(json.dumps(known, default=_plain))
        if self.image is not None and self.image in stored:
            row[self.image] = stored[self.image]
        # A table gives every message and tool the fields of all; null is how it says "has none".
        for key in self._lists:
            if isinstance(value := lookup(row, key), list):
                value[:] = [_without_nulls(v, keep=("content",)) for v in value]
        return row


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists, anything else as text: so is a column that says bytes and holds
    UTF-8."""
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _without_nulls(value: Any, keep: Iterable[str] = ()) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in keep}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value

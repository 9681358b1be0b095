"""Text from token ids: stop strings, and incremental decoding for streams.

Text is only for people and for tool parsing; ids are what counts and are never derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepwell.backends.engines.embedded.request import Request

_CONTEXT = 5
"""Prompt tokens decoded along, so that a leading space depends on what precedes it."""


class StopStrings:
    """Finds a stop string at the end of the output."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def match(self, output_ids: Sequence[int], stops: Sequence[str]) -> str | None:
        # Every token adds at least a byte unless it is invisible, so a stop string that ends in
        # the last token lies within as many tokens as it has bytes.
        reach = max(len(s.encode()) for s in stops) + 1
        tail = self._tokenizer.decode(list(output_ids[-reach:]), skip_special_tokens=False)
        return next((s for s in stops if s in tail), None)


class Detokenizer:
    """The text of one request's output so far; each call decodes only what is new."""

    def __init__(self, tokenizer: Any, request: Request) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._ids = request.prompt_ids[-_CONTEXT:]
        self._offset = len(self._ids)
        """Ids before it are in `_text`; decoding starts `_CONTEXT` or more before it."""
        self._start = 0
        self._read = 0
        self._text = ""

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._request.params.skip_special_tokens
        )
        return text

    def update(self, output_ids: Sequence[int]) -> str:
        """The text up to `output_ids`, without a trailing incomplete character."""
        self._ids.extend(output_ids[self._read :])
        self._read = len(output_ids)
        known = self._decode(self._ids[self._start : self._offset])
        text = self._decode(self._ids[self._start :])
        if len(text) > len(known) and not text.endswith("�"):
            self._text += text[len(known) :]
            self._start, self._offset = self._offset, len(self._ids)
        return self._text

    def final(self, output_ids: Sequence[int]) -> str:
        """The whole text of a finished request: trimmed before what stopped it, unless
        `no_stop_trim`; a trailing incomplete character is shown as U+FFFD."""
        reason = self._request.finish_reason or {}
        matched = reason.get("matched") if not self._request.params.no_stop_trim else None
        if isinstance(matched, int):
            output_ids = output_ids[:-1]
        if self._read <= len(output_ids):
            self.update(output_ids)
            known = self._decode(self._ids[self._start : self._offset])
            text = self._text + self._decode(self._ids[self._start :])[len(known) :]
        else:  # a stream had already decoded the id that is trimmed now
            context = self._request.prompt_ids[-_CONTEXT:]
            text = self._decode([*context, *output_ids])[len(self._decode(context)) :]
        if isinstance(matched, str) and (at := text.find(matched)) >= 0:
            text = text[:at]
        return text

"""How long a prompt is in tokens, and cutting one that is too long.

A prompt is measured as the model sees it: the chat template's text, tools and generation prompt
included. It stays messages: cutting removes text *inside* them, so that the template's markup,
system messages, tools and media survive::

    left     [system] ░░░░░░░ user … tool … user █████   the oldest text goes
    right    [system] █████ user … tool … user ░░░░░░░   the newest goes
    middle   [system] ██░░░░░░░ user … ░░░░░ user ████   both ends stay

Owns: the measure. Does not own: which prompts are measured, nor the cache (`tasks.py`). Media
count nothing: their tokens depend on the model's image processor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepwell.trainer.config import Truncation
from stepwell.trainer.errors import DataError


class PromptMeter:
    """Measures tasks with the tokenizer and chat template in `path`.

    Raises:
        DataError: there is no tokenizer in `path`.
    """

    def __init__(self, path: Path, template_args: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as e:
            raise DataError(
                f"no tokenizer can be loaded from {str(path)!r} ({e!s:.200}), and "
                "max_prompt_tokens needs one; point model.path at a Hugging Face model directory"
            ) from e
        self._template_args = dict(template_args)
        self.fingerprint = self._fingerprint()
        """Equal for meters that count the same; None if that cannot be told."""

    def count(self, tasks: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt tokens of each task.

        Raises:
            DataError: the chat template refuses one.
        """
        texts = [self._render(task) for task in tasks]
        try:
            ids = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        except (TypeError, ValueError) as e:
            raise DataError(
                f"the tokenizer refuses the prompt ({type(e).__name__}: {e!s:.200}); half a "
                "surrogate pair (\\ud800 to \\udfff) is no text"
            ) from e
        return [len(i) for i in ids]

    def truncate(self, task: Mapping[str, Any], limit: int, side: Truncation) -> dict[str, Any]:
        """`task` with as little text cut from `side` as brings it to `limit` tokens; how many were
        cut is in `truncated_tokens`.

        Raises:
            DataError: what may not be cut (system messages, tools, markup) is longer than that.
        """
        (length,) = self.count([task])
        if length <= limit:
            return dict(task)
        places = _texts(task)
        spans = [self._spans(text) for text in places.values()]
        total = sum(map(len, spans))
        # Texts cut apart may merge into other tokens, so the first try can miss by a few.
        cut = 0
        while length > limit:
            cut += length - limit
            if cut >= total:
                raise DataError(
                    f"the prompt cannot be cut to max_prompt_tokens = {limit}: only {total} of its "
                    "tokens are text that may go (not system messages, tools and markup); raise "
                    "it, or set filter_overlong_prompts"
                )
            start = {"left": 0, "right": total - cut}.get(side, (total - cut) // 2)
            shorter = _cut(task, places, spans, start, start + cut)
            (length,) = self.count([shorter])
        return shorter | {"truncated_tokens": cut}

    def _render(self, task: Mapping[str, Any]) -> str:
        conversation = [{**m, "content": _text(m.get("content"))} for m in _messages(task)]
        if not self._tokenizer.chat_template and "question" in task:
            return str(task["question"])
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=task.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **self._template_args,
            )
        except Exception as e:  # a template is a program of its own: it may raise anything
            raise DataError(
                f"the model's chat template refuses the prompt ({type(e).__name__}: {e!s:.200})"
            ) from e
        return str(text)

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Where each token of `text` lies in it, in characters."""
        try:
            encoded = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except NotImplementedError as e:  # how slow tokenizers say that they know no offsets
            raise DataError(
                "truncation needs a fast tokenizer (tokenizer.json), which this model has not; set "
                "filter_overlong_prompts instead"
            ) from e
        return [(int(a), int(b)) for a, b in encoded["offset_mapping"]]

    def _fingerprint(self) -> str | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        said = [backend.to_str(), self._tokenizer.chat_template, self._template_args]
        return hashlib.sha256(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()


def _messages(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "question" in task:
        return [{"role": "user", "content": task["question"]}]
    messages: list[dict[str, Any]] = task["messages"]
    return messages


def _text(content: Any) -> str:
    """Templates of text models show no lists of parts."""
    if isinstance(content, list):
        return "".join(p.get("text") or "" for p in content if isinstance(p, dict))
    return content or ""


Place = tuple[int | None, int | None]
"""Message and content part that a text is in; (None, None): the question."""


def _texts(task: Mapping[str, Any]) -> dict[Place, str]:
    """What may be cut, in order."""
    if "question" in task:
        return {(None, None): task["question"]}
    places: dict[Place, str] = {}
    for i, message in enumerate(task["messages"]):
        content = message.get("content")
        if message["role"] in ("system", "developer"):
            continue
        if isinstance(content, str):
            places[i, None] = content
        elif isinstance(content, list):
            for j, part in enumerate(content):
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    places[i, j] = part["text"]
    return places


def _cut(
    task: Mapping[str, Any],
    places: Mapping[Place, str],
    spans: Sequence[Sequence[tuple[int, int]]],
    start: int,
    end: int,
) -> dict[str, Any]:
    """`task` without tokens [start, end) of its texts, counted through all of them."""
    result = dict(task)
    if "messages" in result:
        result["messages"] = [
            {**m, "content": [dict(p) if isinstance(p, dict) else p for p in m["content"]]}
            if isinstance(m.get("content"), list)
            else dict(m)
            for m in task["messages"]
        ]
    first = 0
    for (i, j), text, tokens in zip(places, places.values(), spans, strict=True):
        a, b = max(start - first, 0), min(end - first, len(tokens))
        first += len(tokens)
        if a >= b:
            continue
        head = text[: tokens[a][0]] if a else ""
        tail = text[tokens[b][0] :] if b < len(tokens) else ""
        if i is None:
            result["question"] = head + tail
        elif j is None:
            result["messages"][i]["content"] = head + tail
        else:
            result["messages"][i]["content"][j]["text"] = head + tail
    return result

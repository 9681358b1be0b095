"""A prompt as the model sees it, its length in tokens (the chat template's text, tools and
generation prompt included), and cutting one that is too long.

A prompt that is cut stays a conversation: text goes *inside* its messages, so that the template's
markup, system messages and tools survive::

    left     [system] ░░░░░░░ user … tool … user █████   the oldest text goes
    right    [system] █████ user … tool … user ░░░░░░░   the newest goes
    middle   [system] ██░░░░░░░ user … ░░░░░ user ████   both ends stay
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepwell.backends.errors import PictureError
from stepwell.backends.pictures import PictureProcessor, no_pictures
from stepwell.trainer.config import Truncation
from stepwell.trainer.data.images import picture_bytes
from stepwell.trainer.errors import DataError


def load_tokenizer(path: Path, key: str) -> Any:
    """The tokenizer in the model's folder `path`, which `key` needs.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as e:
        raise DataError(
            f"no tokenizer can be loaded from {str(path)!r} ({e!s:.200}), and {key} needs one; "
            "point model.path at a Hugging Face model directory"
        ) from e


class PromptMeter:
    """Measures tasks with the tokenizer and chat template in `path`.

    Raises:
        DataError: there is no tokenizer in `path`.
    """

    def __init__(self, path: Path, template_args: Mapping[str, Any]) -> None:
        self._tokenizer = load_tokenizer(path, "max_prompt_tokens")
        self._pictures = PictureProcessor.of(path)
        self._no_pictures = no_pictures(path)
        self._template_args = dict(template_args)

    def count(self, tasks: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt tokens of each task.

        Raises:
            DataError: the chat template, or the tokenizer, refuses one.
        """
        lengths = self.count_texts([self.render(task) for task in tasks])
        return [n + self._of_pictures(task) for n, task in zip(lengths, tasks, strict=True)]

    def _of_pictures(self, task: Mapping[str, Any]) -> int:
        """Tokens of the task's pictures, but for the one placeholder each in the text."""
        n = 0
        for message in task.get("messages") or ():
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if not (isinstance(part, dict) and part.get("type") == "image_url"):
                    continue
                if self._pictures is None:
                    raise DataError(f"the prompt has a picture, but {self._no_pictures}")
                try:
                    n += self._pictures.n_tokens(picture_bytes(part)) - 1
                except PictureError as e:
                    raise DataError(str(e)) from e
        return n

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text as it stands.

        Raises:
            DataError: the tokenizer refuses one.
        """
        try:
            ids = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
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
        texts = list(_texts(task))
        spans = [self._spans(text.content) for text in texts]
        total = sum(map(len, spans))
        cut = 0
        while length > limit:  # texts cut apart may merge into other tokens: a few more or fewer
            cut += length - limit
            if cut >= total:
                raise DataError(
                    f"the prompt cannot be cut to max_prompt_tokens = {limit}: only {total} of its "
                    "tokens are text that may go (not system messages, tools and markup); raise "
                    "it, or set filter_overlong_prompts"
                )
            start = {"left": 0, "right": total - cut}.get(side, (total - cut) // 2)
            shorter = _without(task, texts, spans, start, start + cut)
            (length,) = self.count([shorter])
        return shorter | {"truncated_tokens": cut}

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """Begin and end of each token of `text`, in characters."""
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

    def _content(self, content: Any) -> Any:
        """Return the content that the gateway gives to the template: parts where there are
        pictures."""
        if not isinstance(content, list):
            return content or ""
        kinds = [p.get("type") for p in content if isinstance(p, dict)]
        if self._pictures is None or "image_url" not in kinds:
            return _text(content)
        return [{"type": "image"} if p.get("type") == "image_url" else p for p in content]

    def render(self, task: Mapping[str, Any]) -> str:
        """The prompt's text; a question without a chat template is itself.

        Raises:
            DataError: the chat template refuses it.
        """
        if not self._tokenizer.chat_template and "question" in task:
            return str(task["question"])
        messages = task.get("messages") or [{"role": "user", "content": task["question"]}]
        try:
            text = self._tokenizer.apply_chat_template(
                [{**m, "content": self._content(m.get("content"))} for m in messages],
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


def _text(content: Any) -> str:
    """Templates of text models show no lists of parts."""
    if isinstance(content, list):
        return "".join(p.get("text") or "" for p in content if isinstance(p, dict))
    return content or ""


class _Text(NamedTuple):
    """One text of a prompt that may be cut."""

    message: int | None
    """None: it is the question."""
    part: int | None
    """Position in the message's content; None: it is the content."""
    content: str


def _texts(task: Mapping[str, Any]) -> Iterator[_Text]:
    """Texts that may be cut, in order."""
    if "question" in task:
        yield _Text(None, None, task["question"])
        return
    for i, message in enumerate(task["messages"]):
        content = message.get("content")
        if message["role"] in ("system", "developer"):
            continue
        if isinstance(content, str):
            yield _Text(i, None, content)
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield _Text(i, j, part["text"])


def _without(
    task: Mapping[str, Any],
    texts: Sequence[_Text],
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
    for (message, part, text), tokens in zip(texts, spans, strict=True):
        a, b = max(start - first, 0), min(end - first, len(tokens))
        first += len(tokens)
        if a >= b:
            continue
        head = text[: tokens[a][0]] if a else ""
        tail = text[tokens[b][0] :] if b < len(tokens) else ""
        if message is None:
            result["question"] = head + tail
        elif part is None:
            result["messages"][message]["content"] = head + tail
        else:
            result["messages"][message]["content"][part]["text"] = head + tail
    return result

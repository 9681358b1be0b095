"""A prompt as the model sees it, and its length in tokens: the chat template's text, tools and
generation prompt included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
        self._template_args = dict(template_args)

    def count(self, tasks: Sequence[Mapping[str, Any]]) -> list[int]:
        """Prompt tokens of each task.

        Raises:
            DataError: the chat template, or the tokenizer, refuses one.
        """
        return self.count_texts([self.render(task) for task in tasks])

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
                [{**m, "content": _text(m.get("content"))} for m in messages],
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

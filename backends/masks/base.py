"""Input and output of loss-mask generators, and the class that they derive from."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.backends.errors import MaskError
from stepwell.datapool.types import TokenIds

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]

STEP_LOSS_MASK = "step_loss_mask"
"""A message with 0 here has no loss (slime's key); 1 if absent."""


ASSISTANT = "<｜Assistant｜>"
"""Token that opens an assistant's turn in DeepSeek's templates."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant message's tokens: `token_ids[start:end]` of its row."""

    message_index: int | None
    """Position of the message; None: not known, as the mask is of a generator of somebody's own."""
    start: int
    end: int
    has_loss: bool
    """False: `step_loss_mask` is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRow:
    """One training sequence; it ends with its last assistant turn."""

    token_ids: TokenIds
    """int32, [T]."""
    loss_mask: npt.NDArray[np.int8]
    """int8, [T]: 1 on the tokens the assistant wrote, the token that closes its turn included."""
    turns: tuple[Turn, ...]


class LossMaskGenerator(ABC):
    """Generator of rows from conversations in OpenAI's form. Subclass it and implement `rows`; a
    subclass of one's own is built as `cls(tokenizer, chat_template_kwargs)`."""

    @abstractmethod
    def rows(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[MaskedRow]:
        """Return the conversation as training sequences.

        Raises:
            MaskError: no mask of it is exact.
        """

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> MaskedRow:
        """Return the conversation as one row.

        Raises:
            MaskError: no one sequence is what the model saw and wrote in all turns, or see `rows`.
        """
        rows = self.rows(messages, tools)
        if len(rows) > 1:
            at = rows[1].turns[0].message_index
            raise MaskError(
                f"before messages[{at}] the chat template rewrites what came before, so the "
                f"conversation is {len(rows)} rows, not one; use rows() or to_steps()"
            )
        return rows[0]


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def check_messages(messages: Sequence[Message]) -> dict[int, bool]:
    """Check the messages; return by index whether an assistant message has loss."""
    with_loss: dict[int, bool] = {}
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str):
            raise MaskError(
                f"messages[{index}] is {message!r:.80}; it is an object with role and content"
            )
        value = message.get(STEP_LOSS_MASK, 1)
        if value not in (0, 1):
            raise MaskError(f"messages[{index}]: {STEP_LOSS_MASK} is {value!r}; it is 0 or 1")
        calls = message.get("tool_calls") or ()
        if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
            raise MaskError(
                f"messages[{index}]: tool_calls is {calls!r:.80}; it is a list of objects like "
                '{"function": {"name": …, "arguments": …}}'
            )
        if role == "assistant":
            with_loss[index] = bool(value)
    if not with_loss:
        raise MaskError(f"none of {len(messages)} messages is the assistant's; nothing has loss")
    return with_loss


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function") or {}, Mapping)


def for_template(message: Message) -> Message:
    """Message in the form that templates expect and the gateway gives them: arguments as
    objects."""
    shown = {k: v for k, v in message.items() if k != STEP_LOSS_MASK}
    if not message.get("tool_calls"):
        shown.pop("tool_calls", None)
        return shown
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or call)
        if isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                arguments = None  # shown as the text it is
            if isinstance(arguments, dict):
                function["arguments"] = arguments
        calls.append({**call, "function": function} if "function" in call else function)
    return {**shown, "tool_calls": calls}


def reasoning_of(message: Message) -> str:
    """Reasoning of the assistant, from a field of its own or out of the content; "" if none."""
    for key in REASONING_FIELDS:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key])
    content = message.get("content")
    if isinstance(content, str) and "</think>" in content:
        return content.partition("</think>")[0].rpartition("<think>")[2]
    return ""

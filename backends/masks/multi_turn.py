"""Loss masks with slime's class, methods and outputs, for generators that were written for slime.

    messages ──get_loss_mask──► token_ids [T], loss_mask [T]      one sequence for a conversation
    loss_mask ──get_response_lengths──► tokens from the first 1 to the end

The source is THUDM/slime, `slime/utils/mask_utils.py` (commit 624b824), whose ids and masks these
are, unlike those of `turnwise.py`: each message is rendered alone, white space behind a turn's
close has loss, and `distill_qwen` sees the first and the last message only. A generator of one's
own is a subclass with another `get_loss_mask`.

Does not own: how configurations name such a class (`own.py`). Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from stepwell.backends.errors import MaskError
from stepwell.backends.masks.base import ASSISTANT, STEP_LOSS_MASK, Message, Tool

_FILLER: Message = {"role": "user", "content": "."}
_HEADER, _THINK, _CLOSE = "<|im_start|>assistant\n", "<think>\n", "<|im_end|>"


class MultiTurnLossMaskGenerator:
    """Generator of slime's shape.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        tokenizer_type: `qwen`, `qwen3`, `qwen3_5`, `distill_qwen`, or what a subclass's
            `get_loss_mask` knows.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        self.system_message_length = 0
        """Tokens of the system message that the chat template adds by itself."""
        self.gen_token_length = 0
        """Tokens of the generation prompt."""
        if tokenizer_type in ("qwen", "qwen3"):
            one, two = self._ids([_FILLER]), self._ids([_FILLER, _FILLER])
            self.system_message_length = 2 * len(one) - len(two)
            asked = self._ids([_FILLER], add_generation_prompt=True)
            self.gen_token_length = len(asked) - len(one)

    def get_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return token ids and loss mask of a conversation, [T] each.

        Raises:
            MaskError: `tokenizer_type` is unknown, or the template does not show the conversation
                as the type asks. A ValueError, as slime raises.
        """
        messages = list(messages)
        match self.tokenizer_type:
            case "qwen" if ASSISTANT in self.tokenizer.get_added_vocab():
                return self.gen_multi_turn_loss_mask_distill_qwen(messages, tools)
            case "qwen":
                return self.gen_multi_turn_loss_mask_qwen(messages, tools)
            case "qwen3":
                return self.gen_multi_turn_loss_mask_qwen3(messages, tools)
            case "qwen3_5":
                return self.gen_multi_turn_loss_mask_qwen3_5(messages, tools)
            case "distill_qwen":
                return self.gen_multi_turn_loss_mask_distill_qwen(messages, tools)
        raise MaskError(
            f"tokenizer_type is {self.tokenizer_type!r}; choose qwen, qwen3, qwen3_5 or "
            "distill_qwen, or override get_loss_mask"
        )

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return of each mask the tokens from its first 1 to its end; 0 if it has no 1."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(
        self, token_ids: Sequence[int], loss_masks: Sequence[int]
    ) -> list[str]:
        """Return the text of each run of tokens with loss."""
        runs = groupby(zip(token_ids, loss_masks, strict=True), lambda pair: pair[1] == 1)
        return [self.tokenizer.decode([i for i, _ in run]) for has_loss, run in runs if has_loss]

    def gen_multi_turn_loss_mask_qwen(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return ids and mask of messages that are rendered one by one."""
        parts = (
            (
                message,
                self._without_system(i, message, self._ids([message], tools if not i else ())),
            )
            for i, message in enumerate(messages)
        )
        return self._joined(parts)

    def gen_multi_turn_loss_mask_qwen3(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return ids and mask of messages that are rendered beside a user's, one by one but for
        tool results in a row, which Qwen's templates show as one turn."""
        filler = len(self._ids([_FILLER]))

        def parts() -> Iterator[tuple[Message, list[int]]]:
            i = 0
            while i < len(messages):
                end = i + 1
                if messages[i]["role"] == "tool":
                    while end < len(messages) and messages[end]["role"] == "tool":
                        end += 1
                run = list(messages[i:end])
                if i == 0:
                    ids = self._ids([*run, _FILLER], tools)[:-filler]
                else:
                    ids = self._ids([_FILLER, *run])[filler:]
                yield messages[i], self._without_system(i, messages[i], ids)
                i = end

        return self._joined(parts())

    def gen_multi_turn_loss_mask_qwen3_5(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return ids and mask of the whole conversation's text; loss where the characters between
        an assistant's header, without `<think>`, and its close are."""
        text = self._text(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids, offsets = list(encoded["input_ids"]), encoded.get("offset_mapping")
        if offsets is None or token_ids != self._ids(messages, tools):
            raise MaskError(
                "tokenizer_type is 'qwen3_5', for which the text's tokens need offsets and be "
                "those of the chat template; use a fast tokenizer, or another type"
            )
        spans: list[tuple[int, int]] = []
        at = 0
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = text.find(_HEADER, at)
            close = text.find(_CLOSE, begin + len(_HEADER))
            if min(begin, close) < 0:
                raise MaskError(
                    f"messages[{index}]: the chat template does not show it between {_HEADER!r} "
                    f"and {_CLOSE!r}; use another tokenizer_type than 'qwen3_5'"
                )
            begin += len(_HEADER)
            begin += len(_THINK) if text.startswith(_THINK, begin) else 0
            at = close + len(_CLOSE)
            at += text.startswith("\n", at)
            if message.get(STEP_LOSS_MASK, 1) == 1:
                spans.append((begin, at))
        mask = [
            int(any(max(start, begin) < min(end, until) for begin, until in spans))
            for start, end in offsets
        ]
        return token_ids, mask

    def gen_multi_turn_loss_mask_distill_qwen(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return ids and mask of the first message with the generation prompt, and of the last
        message's content."""
        prompt = self._encode(self._text(messages[:1], tools, add_generation_prompt=True))
        response = self._encode(messages[-1]["content"])
        has_loss = messages[-1].get(STEP_LOSS_MASK, 1) == 1
        return prompt + response, [0] * len(prompt) + [int(has_loss)] * len(response)

    def _joined(self, parts: Iterator[tuple[Message, list[int]]]) -> tuple[list[int], list[int]]:
        token_ids: list[int] = []
        mask: list[int] = []
        for message, ids in parts:
            has_loss = message["role"] == "assistant" and message.get(STEP_LOSS_MASK, 1) == 1
            given = min(self.gen_token_length, len(ids)) if has_loss else len(ids)
            token_ids += ids
            mask += [0] * given + [1] * (len(ids) - given)
        return token_ids, mask

    def _without_system(self, index: int, message: Message, ids: list[int]) -> list[int]:
        cut = index > 0 and message["role"] != "system"
        return ids[self.system_message_length if cut else 0 :]

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return text

    def _ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return self._encode(
            self._text(messages, tools, add_generation_prompt=add_generation_prompt)
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

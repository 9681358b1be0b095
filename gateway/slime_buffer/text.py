"""This module makes Steps of a conversation that came as messages alone, so that rollouts of agents
which never saw token ids can be trained.

    messages ──as the gateway reads a call──► loss masks (`backends/masks`) ──► Step per assistant
                                                                               message, no log-probs

The ids are those that the conversation would have had through the gateway, if its agent sent back
what the model wrote: the same reading of messages, the same `normalize` rules, the same template
and tokenizer, the same past thinking. What was sampled is not known beyond that: a reply whose
tokens are not the tokenizer's first choice for its text has other ids here. Refused is what is
certain to differ: a template that shows a reply otherwise than it was written (Llama 3 trims it),
leaves something of it out, or ends turns with no special token.

A generator of one's own (`gateway.loss_mask_type` is a path) is given the messages as they were
sent, and its ids are taken as they are: what they should be is its author's to know.

Owns: whether and how text becomes ids. Does not own: which tokens are the assistant's (the masks),
where the Steps go (`writes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stepwell.backends.errors import MaskError
from stepwell.backends.masks import is_path, mask_generator, to_steps
from stepwell.datapool.types import Step
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.dialects.openai_chat import OpenAIChat
from stepwell.gateway.errors import GatewayConfigError, RequestError
from stepwell.gateway.prompt import Prompts
from stepwell.gateway.slime_buffer.mask_tokenizer import MaskTokenizer
from stepwell.gateway.tokens.messages import MESSAGES, Message, Tool, TurnMessages

STEP_LOSS_MASK = "step_loss_mask"


class TextRollouts:
    """Makes Steps of messages. Safe to use from threads.

    Raises:
        GatewayConfigError: `gateway.loss_mask_type` is not for the model's chat template, or a
            path that leads to no generator.
    """

    def __init__(
        self, config: GatewayConfig, prompts: Prompts, turn_messages: TurnMessages
    ) -> None:
        self._prompts = prompts
        self._turn_messages = turn_messages
        self._renderer = prompts.renderer
        self._dialect = OpenAIChat(self._renderer.tokenizer.template_text)
        self._arguments = dict(config.chat_template_args)
        self._is_own = is_path(config.loss_mask_type)
        try:
            self._generator = mask_generator(
                config.loss_mask_type, MaskTokenizer(self._renderer), self._arguments
            )
        except MaskError as e:
            raise GatewayConfigError(
                f"gateway.loss_mask_type is {config.loss_mask_type!r}: {e}"
            ) from e

    def steps(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, *, truncated: bool = False
    ) -> list[Step]:
        """A Step for each assistant message without `step_loss_mask: 0`; the uids are to be filled
        in.

        Args:
            truncated: the last reply was cut off, so it has no token that closes it.

        Raises:
            RequestError: the messages are malformed, or no ids are certain to be theirs.
        """
        if self._is_own:
            steps = self._steps(messages, tools)
            last = replace(steps[-1], is_last=False)
            return [*steps[:-1], replace(last, finish_reason="length") if truncated else last]
        if not self._renderer.closes_turns:
            raise RequestError(
                "the model's chat template ends assistant turns with no special token, so where a "
                "sampled reply ended is not known from its text; send tokens, response_length and "
                "loss_mask, or let the agent call through this gateway",
                "messages",
            )
        body = {"messages": list(messages), "tools": list(tools) if tools else None}
        read = self._prompts.normalised(self._dialect.parse(body).call)
        said = [
            {**m, STEP_LOSS_MASK: sent[STEP_LOSS_MASK]} if STEP_LOSS_MASK in sent else m
            for m, sent in zip(read.messages, messages, strict=True)
        ]
        steps = self._steps(said, read.tools)
        for i, step in enumerate(steps):
            index: int = step.metadata["message_index"]
            self._check_shown(said, index, read.tools)
            parent = None if step.parent_index is None else steps[step.parent_index]
            first = 0 if parent is None else parent.metadata["message_index"] + 1
            kept = self._turn_messages.of(read.messages[first:index], read.messages[index])
            if kept is not None:
                steps[i] = replace(step, metadata={**step.metadata, MESSAGES: kept})
        # The reward comes with the trajectory's completion, which no Step of it is then.
        last = steps[-1] = replace(steps[-1], is_last=False)
        if truncated:
            ids, control = last.response_ids, self._renderer.tokenizer.special.values()
            cut = ids[:-1] if len(ids) > 1 and int(ids[-1]) in control else ids
            steps[-1] = replace(last, response_ids=cut, finish_reason="length")
        return steps

    def _steps(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[Step]:
        try:
            steps = to_steps(self._generator, messages, tools, trajectory_uid="-", prompt_uid="-")
        except MaskError as e:
            raise RequestError(f"the messages have no certain ids: {e}", "messages") from e
        if not steps:
            raise RequestError(
                "every assistant message has step_loss_mask 0; nothing is trained", "messages"
            )
        return steps

    def _check_shown(
        self, messages: Sequence[Message], index: int, tools: Sequence[Tool] | None
    ) -> None:
        """The template shows message `index` in the very words that were written."""
        before, text = (
            self._renderer.text(messages[:end], tools, self._arguments, add_generation_prompt=False)
            for end in (index, index + 1)
        )
        shown = text.removeprefix(before)
        for words in _words(messages[index]):
            if words not in shown:
                raise RequestError(
                    f"messages[{index}]: the model's chat template does not show {words!r:.60} as "
                    "it is written, so what was sampled is not known; send tokens, "
                    "response_length and loss_mask, or let the agent call through this gateway",
                    "messages",
                )


def _words(message: Message) -> list[str]:
    """Texts of an assistant message, but for its thought, which the masks look after."""
    content = message["content"]
    if "</think>" in content:
        content = content.rpartition("</think>")[2].lstrip("\n")
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [content, *(v for f in functions for v in f.values() if isinstance(v, str))]

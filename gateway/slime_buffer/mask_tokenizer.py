"""The gateway's tokenizer by transformers' names, for the loss masks.

    apply_chat_template, (text)   the gateway's own: the text of control tokens in what users and
                                  tools say controls nothing
    all else                      transformers', of the same vocabulary, made when it is asked for

Owns: these names. Does not own: the vocabulary and the template (`tokens/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken

from stepwell.gateway.tokens.messages import Message, Tool
from stepwell.gateway.tokens.render import ChatRenderer


class MaskTokenizer:
    """A tokenizer as loss-mask generators use it."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer
        self.chat_template = self._tokenizer.template_text
        self.eos_token = self._tokenizer.template.special_tokens.get("eos_token", "")
        self.added_tokens_decoder = {
            i: AddedToken(text, special=True) for text, i in self._tokenizer.special.items()
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._transformers, name)

    def __len__(self) -> int:
        return self._tokenizer.vocabulary

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        **_: Any,
    ) -> dict[str, list[int]]:
        """Return the ids of `text`.

        Raises:
            ValueError: offsets are asked for, which marked text has none of.
        """
        if return_offsets_mapping:
            raise ValueError(
                "the gateway's tokenizer has no offsets, which qwen3_5 masks need; use the ids of "
                "parts of the text"
            )
        ids = self._tokenizer.encode(text).tolist()
        begin = self._tokenizer.begin(text).tolist() if add_special_tokens else []
        return {"input_ids": begin + ids}

    def convert_tokens_to_ids(self, token: Any) -> Any:
        """Return the id of a control token, or what transformers returns of any other."""
        known = self._tokenizer.special.get(token) if isinstance(token, str) else None
        return self._transformers.convert_tokens_to_ids(token) if known is None else known

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        add_special_tokens: bool = False,
        **arguments: Any,
    ) -> Any:
        """Return the text of a conversation, or its ids, or these as `input_ids`."""
        text = self._renderer.text(
            conversation, tools, arguments, add_generation_prompt=add_generation_prompt
        )
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=add_special_tokens)
        return encoded if return_dict else encoded["input_ids"]

    @cached_property
    def _transformers(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        special = {
            name: text
            for name, text in self._tokenizer.template.special_tokens.items()
            if name in PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES
        }
        kind: Any = PreTrainedTokenizerFast
        return kind(tokenizer_object=self._tokenizer.backend, **special)

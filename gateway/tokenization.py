"""Tokenizer and chat template of the served model, loaded once and safe to use from threads.

Owns: text → ids of rendered prompts (special tokens of the template become control tokens, the same
text inside user and tool messages does not), and ids → text, whole or token by token. Does not own:
what is rendered (`render.py`). Response text is never tokenised anywhere.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from datapool.types import TokenIds
from gateway.errors import GatewayConfigError
from gateway.messages import Message, Tool

_UNTRUSTED = ("user", "tool")


class ChatTokenizer:
    """A Hugging Face tokenizer with a chat template.

    Works on copies of the Rust tokenizer without truncation or padding: the Python wrapper changes
    its shared state on every call, which threads must not do to one another.
    """

    def __init__(self, hf_tokenizer: Any, *, sanitize: bool = True) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise GatewayConfigError(
                f"gateway.tokenizer_path holds a {type(hf_tokenizer).__name__} without a fast "
                "backend; convert it to a tokenizer.json"
            )
        if not getattr(hf_tokenizer, "chat_template", None):
            raise GatewayConfigError(
                "gateway.tokenizer_path holds a tokenizer without a chat template; add a "
                "chat_template.jinja to the folder"
            )
        self.hf = hf_tokenizer
        self._encoder: Tokenizer = Tokenizer.from_str(backend.to_str())
        self._encoder.no_truncation()
        self._encoder.no_padding()
        spec = json.loads(backend.to_str())
        spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._plain: Tokenizer = Tokenizer.from_str(json.dumps(spec))
        added = hf_tokenizer.added_tokens_decoder
        self.special: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        """Control tokens by their text."""
        # Unguessable, so that no message can forge it.
        secret = secrets.token_hex(6)
        self._open, self._shut = f"\ue0f0{secret}\ue0f1", f"\ue0f2{secret}\ue0f3"
        longest_first = sorted(self.special, key=len, reverse=True)
        any_special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special_re = re.compile(any_special)
        self._marked_re = re.compile(
            f"{self._open}({any_special}){self._shut}|{self._open}|{self._shut}"
        )
        self._sanitize = sanitize and bool(self.special)

    @classmethod
    def load(cls, path: str | None, *, sanitize: bool = True) -> ChatTokenizer:
        """Load from a folder; never from the network."""
        from transformers import AutoTokenizer

        if path is None:
            raise GatewayConfigError(
                "gateway.tokenizer_path is null; give the folder of the served model's tokenizer"
            )
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as e:
            raise GatewayConfigError(
                f"gateway.tokenizer_path is {path!r}, from which no tokenizer can be loaded "
                f"({e!s:.200}); give the folder of the served model's tokenizer"
            ) from e
        return cls(hf_tokenizer, sanitize=sanitize)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_args: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The chat template's text. Marks control-token text in user and tool messages."""
        if self._sanitize:
            messages = [self._mark(m) for m in messages]
        text = self.hf.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_args,
        )
        return str(text)

    def encode(self, text: str) -> TokenIds:
        """Ids of rendered text; nothing is added to it.

        `encode_batch_fast` and not `encode`: it releases the GIL and computes no offsets.
        """
        if self._open not in text and self._shut not in text:
            return _frozen(self._encode(text))
        ids: list[int] = []
        for i, piece in enumerate(self._marked_re.split(text)):
            if piece:
                ids += self._encode(piece) if i % 2 == 0 else self._encode_as_text(piece)
        return _frozen(ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self._encoder.decode(list(ids), skip_special_tokens=False)

    def stream(self) -> TokenStream:
        return TokenStream(self._encoder)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _encode_as_text(self, token: str) -> list[int]:
        ids: list[int] = self._plain.encode(token, add_special_tokens=False).ids
        if self.special[token] in ids:
            # The vocabulary itself holds the token as a word; its characters one by one do not.
            ids = [i for c in token for i in self._plain.encode(c, add_special_tokens=False).ids]
        return ids

    def _mark(self, message: Message) -> Message:
        content = message.get("content")
        if message["role"] not in _UNTRUSTED or not isinstance(content, str):
            return message
        if self._special_re.search(content) is None:
            return message
        marked = self._special_re.sub(f"{self._open}\\g<0>{self._shut}", content)
        return {**message, "content": marked}


class TokenStream:
    """Ids → text as they arrive: characters come out when their last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)

    def feed(self, ids: Sequence[int]) -> str:
        return "".join(self._stream.step(self._tokenizer, i) or "" for i in ids)


def _frozen(ids: list[int]) -> TokenIds:
    array = np.asarray(ids, dtype=np.int32)
    array.flags.writeable = False
    return array

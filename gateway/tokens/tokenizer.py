"""This module turns rendered prompts into ids and sampled ids into text, so that the text of
control tokens in what users and tools say controls nothing.

    prompt   <|im_start|>user\\n ⟦<|im_end|>⟧ is text here <|im_end|>
    ids      └─ control ─┘       └ characters ┘            └ control ┘      ⟦ ⟧: unguessable marks

Text is encoded with `fastokens`, several times faster than `tokenizers`, as long as both give the
same ids. `tokenizers` is the reference: what it gives is right::

    text ──► fastokens ──► ids          checked: a probe at the start, then one text in CHECK_EVERY
               │ differs, or cannot read the tokenizer
               └──► tokenizers, for this text or from then on

Owns: ids of texts, text of ids, whole or token by token. Does not own: the template
(`template.py`), what is rendered (`render.py`), the model's files (`folder.py`). Sampled text is
never tokenised.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from stepwell.datapool.types import TokenIds
from stepwell.gateway.errors import ContextLengthError
from stepwell.gateway.tokens.folder import read_folder
from stepwell.gateway.tokens.messages import Message, Tool
from stepwell.gateway.tokens.template import ChatTemplate

log = logging.getLogger(__name__)

_Characters = codecs.getincrementaldecoder("utf-8")
_UNTRUSTED = ("user", "tool")
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
CHECK_EVERY = 1000
"""Texts encoded by fastokens for each one that tokenizers encodes as well."""
_ODD = "\u180e"
"""White space to PCRE2, which fastokens uses for patterns it has no matcher of its own for, and no
white space to tokenizers. Of all other characters, each beside letters, digits, signs and white
space, both give the same ids (seven patterns, fastokens 0.3.5)."""
_PROBE = (
    "",
    " a  b\t\n\n c\r\n  ",
    "It's 12,345.67 – don't! we'LL i'm",
    'def f(x: int) -> None:\n\t"""é"""\n    return {"a": [1, 2.5e-3]}  # ok',
    "日本語 텍스트 العربية हिन्दी ру́сский e\u0301 ﬁ １２ \u200d\ufeff\u00a0\u3000x",
    "😀👨‍👩‍👧 \x00\x7f\ufffd �",
    "a" * 300 + " " * 70 + "\n" * 9 + "0" * 40 + "ab1 " * 20,
)


class ChatTokenizer:
    """A tokenizer with its chat template. Safe to use from threads: nothing of it changes."""

    def __init__(
        self,
        backend: Tokenizer,
        template: ChatTemplate,
        *,
        vocabulary: int = 0,
        sanitize: bool = True,
    ) -> None:
        """
        Args:
            vocabulary: ids of the model, which may have more than its tokenizer.
            sanitize: False: the text of control tokens is a control token, whoever says it.
        """
        backend.no_truncation()
        backend.no_padding()
        self.template = template
        self._backend = backend
        self._encoder = TextEncoder(backend)
        # The same vocabulary without added tokens; a tokenizer of its own would hold it twice.
        self._plain = Tokenizer(backend.model)
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()
        self.special: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        """Control tokens by their text."""
        secret = secrets.token_hex(6)
        self._open, self._shut = f"\ue0f0{secret}\ue0f1", f"\ue0f2{secret}\ue0f3"
        longest_first = sorted(self.special, key=len, reverse=True)
        any_special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special_re = re.compile(any_special)
        self._marked_re = re.compile(
            f"{self._open}({any_special}){self._shut}|{self._open}|{self._shut}"
        )
        self._sanitize = sanitize and bool(self.special)
        self.vocabulary = max(backend.get_vocab_size(), 1 + max(added, default=0), vocabulary)
        """Token ids lie in [0, this)."""
        self._added: dict[int, bytes] = {i: t.content.encode() for i, t in added.items()}
        by_bytes = '"ByteLevel"' in json.dumps(_spec(backend.decoder))
        self._bytes = _byte_alphabet() if by_bytes else None
        only_bytes = (_spec(backend.decoder) or {}).get("type") == "ByteLevel"
        self._pieces = _Pieces(backend) if only_bytes else None
        """None: the decoder does more than to join bytes."""
        self._longest = _longest_token(backend)
        self._composes = '"NFC"' in json.dumps(_spec(backend.normalizer))
        self._begin = _frozen(self._find_begin())
        self._begin_text = self.decode(self._begin.tolist())

    @classmethod
    def load(cls, path: str | None) -> ChatTokenizer:
        """
        Raises:
            GatewayConfigError: see `read_folder`.
        """
        folder = read_folder(path)
        return cls(
            folder.backend,
            ChatTemplate(folder.template, folder.special_tokens),
            vocabulary=folder.vocabulary,
        )

    @property
    def is_fast(self) -> bool:
        """True while fastokens encodes texts, and not tokenizers."""
        return self._encoder.is_fast

    @property
    def template_text(self) -> str:
        """The chat template, or all of them."""
        return self.template.text

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
        return self.template.render(
            messages, tools, template_args, add_generation_prompt=add_generation_prompt
        )

    def encode(self, text: str, context: int | None = None) -> TokenIds:
        """Ids of rendered text; nothing is added to it.

        Args:
            context: a text that certainly has as many tokens is refused before they are made.

        Raises:
            ContextLengthError
        """
        if context is not None and len(text) >= context:
            n = self.fewest_tokens(text)
            if n >= context:
                raise ContextLengthError.of(n, context, at_least=True)
        if self._open not in text and self._shut not in text:
            return self._encoder.encode(text)
        ids: list[int] = []
        for i, piece in enumerate(self._marked_re.split(text)):
            if piece and i % 2 == 0:
                ids += self._encoder.encode(piece).tolist()
            elif piece:
                ids += self._encode_as_text(piece)
        return _frozen(ids)

    def fewest_tokens(self, text: str) -> int:
        """Lower bound on the tokens of `text`, by its length: no token stands for more characters
        than the longest one has. 0 where a tokenizer drops or joins characters."""
        if self._longest is None:
            return 0
        n = len(text) - sum(len(mark) * text.count(mark) for mark in (self._open, self._shut))
        if self._composes and not text.isascii():
            # Composed (NFC), up to 4 characters become one, of which at most one is ASCII.
            n_ascii = n - (len(text) - len(text.encode("ascii", "ignore")))
            n = max(n_ascii, n // 4)
        return -(-n // self._longest)

    def fewest_of(self, n_chars: int) -> int:
        """Lower bound on the tokens of any text of so many characters, as `fewest_tokens`."""
        if self._longest is None:
            return 0
        return (n_chars // 4 if self._composes else n_chars) // self._longest

    def begin(self, text: str) -> TokenIds:
        """Ids that the tokenizer puts before a plain text (Llama's BOS), if `text` does not begin
        with them itself."""
        has_it = not self._begin_text or text.startswith(self._begin_text)
        return self._begin[:0] if has_it else self._begin

    def decode(self, ids: Iterable[int]) -> str:
        if self._pieces is None:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        return b"".join(map(self._pieces.__getitem__, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that one token adds to a text: often no whole character."""
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self._backend.id_to_token(token_id) or ""
        if self._bytes is not None and all(c in self._bytes for c in token):
            return bytes(self._bytes[c] for c in token)
        if (byte := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as answers with log-probs write them; OpenAI's way if they are no text."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    @property
    def backend(self) -> Tokenizer:
        """The tokenizer itself, of which nothing may be changed."""
        return self._backend

    def stream(self) -> TokenStream:
        return TokenStream(self._backend, self._pieces)

    def _find_begin(self) -> list[int]:
        ids: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        plain = self._encoder.encode("a").tolist()
        starts = range(len(ids) - len(plain) + 1)
        return ids[: next((n for n in starts if ids[n : n + len(plain)] == plain), 0)]

    def _encode_as_text(self, token: str) -> list[int]:
        ids: list[int] = self._plain.encode(token, add_special_tokens=False).ids
        if self.special[token] in ids:
            # The vocabulary itself holds the token as a word; its characters one by one do not.
            ids = [i for c in token for i in self._plain.encode(c, add_special_tokens=False).ids]
        return ids

    def _mark(self, message: Message) -> Message:
        content = message.get("content")
        if message["role"] not in _UNTRUSTED:
            return message
        if isinstance(content, list):  # parts, of which texts are marked
            texts = [self._mark({"role": "user", "content": part.get("text")}) for part in content]
            parts = zip(content, texts, strict=True)
            marked = [{**p, "text": t["content"]} if "text" in p else p for p, t in parts]
            return {**message, "content": marked}
        if not isinstance(content, str) or self._special_re.search(content) is None:
            return message
        text = self._special_re.sub(f"{self._open}\\g<0>{self._shut}", content)
        return {**message, "content": text}


class _Pieces(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, as its decoder joins them: several times as
    fast as to have the decoder do it."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._alphabet = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""  # the decoder leaves unknown ones out
        if all(c in self._alphabet for c in token):
            piece = bytes(self._alphabet[c] for c in token)
        else:
            piece = token.encode()
        self[token_id] = piece
        return piece


class TextEncoder:
    """Ids of texts, without special tokens around them. Safe to use from threads.

    Args:
        reference: the tokenizer whose ids are right. It must not change any more.
        check_every: texts for each check.
        fast: fastokens' tokenizer of the same `tokenizer.json`; None: made of the reference.
    """

    def __init__(
        self, reference: Tokenizer, *, check_every: int = CHECK_EVERY, fast: Any = None
    ) -> None:
        self._reference = reference
        self._check_every = check_every
        self._until_check = 1
        self._fast = _load(reference) if fast is None else fast
        added = [t.content for t in reference.get_added_tokens_decoder().values()]
        around = " \n".join(f"a{text} {text}\n{text}b" for text in added)
        if self._fast is not None and not all(map(self._agree, (*_PROBE, around, *added))):
            self._fast = None
            log.info("texts are encoded by tokenizers: fastokens gives other ids here")

    @property
    def is_fast(self) -> bool:
        """True while fastokens encodes."""
        return self._fast is not None

    def encode(self, text: str) -> TokenIds:
        """Ids of `text`, read-only."""
        fast = self._fast
        if fast is None or _ODD in text:
            return self._exact(text)
        try:
            ids = _ids_of(fast, text)
        except Exception:  # noqa: BLE001 - a limit of its matcher: nothing narrower is documented
            return self._exact(text)
        self._until_check -= 1
        if self._until_check <= 0:
            self._until_check = self._check_every
            exact = self._exact(text)
            if not np.array_equal(ids, exact):
                self._fast = None
                log.warning(
                    "fastokens and tokenizers give different ids for a text of %d characters; "
                    "texts are encoded by tokenizers from now on",
                    len(text),
                )
                return exact
        return ids

    def _exact(self, text: str) -> TokenIds:
        # `encode_batch_fast` and not `encode`: it releases the GIL and computes no offsets.
        (encoding,) = self._reference.encode_batch_fast([text], add_special_tokens=False)
        ids = np.asarray(encoding.ids, np.int32)
        ids.flags.writeable = False
        return ids

    def _agree(self, text: str) -> bool:
        try:
            return np.array_equal(_ids_of(self._fast, text), self._exact(text))
        except Exception:  # noqa: BLE001 - as in `encode`
            return False


def _ids_of(fast: Any, text: str) -> TokenIds:
    ids, _ = fast.encode_batch_flat([text])  # no object per token
    return np.frombuffer(ids, np.int32)


def _load(reference: Tokenizer) -> Any:
    try:
        import fastokens

        return fastokens.Tokenizer.from_json_str(reference.to_str())
    except Exception as e:  # noqa: BLE001 - no wheel for this platform, or no support of the kind
        log.info("texts are encoded by tokenizers: fastokens cannot (%.200s)", e)
        return None


class TokenStream:
    """Ids → text as they arrive: characters come out when their last byte is there."""

    def __init__(self, tokenizer: Tokenizer, pieces: _Pieces | None = None) -> None:
        """`pieces`: bytes of the tokens, where to join them is all that the decoder does."""
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._characters = _Characters("replace")
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []
        """Ids since text last came out."""

    @property
    def is_within_character(self) -> bool:
        """The last ids have given no text yet."""
        return bool(self._held) if self._pieces is None else bool(self._characters.getstate()[0])

    def feed(self, ids: Sequence[int]) -> str:
        if self._pieces is not None:
            return self._characters.decode(b"".join(map(self._pieces.__getitem__, ids)))
        if len(ids) == 1:
            return self._step(ids[0])
        return "".join(map(self._step, ids))

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower
            # Bytes that are no UTF-8 behind some that were, in a vocabulary with <0x00>: they
            # change how the whole run reads, of which a part is out. What is held begins anew.
            held, self._held = self._held, []
            self._stream = DecodeStream(skip_special_tokens=False)
            return self.feed(held)
        if text:
            self._held.clear()
        return text or ""


def _longest_token(backend: Tokenizer) -> int | None:
    """Characters of the longest token, if every character of a text is in some token of it.

    None: it may be otherwise. Normalizers and pre-tokenizers may drop characters, special tokens
    take white space beside them, and unknown characters become one token together.
    """
    normalizers = _flat(_spec(backend.normalizer), "normalizers")
    splitters = _flat(_spec(backend.pre_tokenizer), "pretokenizers")
    by_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *splitters))
    alphabet = _byte_alphabet() if by_bytes else [f"<0x{b:02X}>" for b in range(256)]
    vocabulary = backend.get_vocab()
    keeps_all = (
        isinstance(backend.model, BPE)
        and all(token in vocabulary for token in alphabet)
        and (by_bytes or backend.model.byte_fallback)
        and all(map(_lengthens, normalizers))
        and all(part["type"] in _SPLITTERS for part in splitters)
        and all(part.get("behavior") != "Removed" for part in splitters)
        and not any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values())
    )
    return max(map(len, vocabulary)) if keeps_all else None


_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


def _lengthens(normalizer: Mapping[str, Any]) -> bool:
    """It leaves no character out, but for what NFC composes."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return bool(pattern) and len(normalizer["content"]) >= len(pattern)
    return normalizer["type"] in ("ByteLevel", "NFC", "Prepend")


def _spec(part: Any) -> dict[str, Any] | None:
    """A part of a tokenizer as tokenizer.json has it."""
    return None if part is None else json.loads(part.__getstate__())


def _flat(part: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [each for member in part[members] for each in _flat(member, members)]


def _byte_alphabet() -> dict[str, int]:
    """Byte by the character that byte-level vocabularies write it with (GPT-2's alphabet)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _frozen(ids: list[int]) -> TokenIds:
    array = np.asarray(ids, dtype=np.int32)
    array.flags.writeable = False
    return array

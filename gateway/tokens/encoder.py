"""This module encodes text with `fastokens`, several times faster than `tokenizers`, as long as
both give the same ids.

    text ──► fastokens ──► ids          checked: a probe at the start, then one text in CHECK_EVERY
               │ differs, or cannot read the tokenizer
               └──► tokenizers, for this text or from then on

`tokenizers` is the reference: what it gives is right. Does not own: control tokens in what users
say, and decoding (`tokenizer.py`).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from stepwell.datapool.types import TokenIds

log = logging.getLogger(__name__)

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

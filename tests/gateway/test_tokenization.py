"""Bounds on the number of a text's tokens that are known before it is tokenised."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from stepwell.gateway.errors import ContextLengthError
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.gateway.conftest import make_backend, make_template, make_tokenizer

Change = Callable[[Tokenizer], Any]


def changed(change: Change, family: str = "qwen3") -> ChatTokenizer:
    """A family's tokenizer, but for one thing."""
    backend = make_backend(family)
    change(backend)
    return ChatTokenizer(backend, make_template(family))


def pieces(merges: int = 3) -> Tokenizer:
    """Tokenizer as SentencePiece writes them: spaces are marks, unknown characters bytes."""
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "▁▁": 5, "▁▁▁▁": 6, "ab": 7}
    vocabulary |= {f"<0x{b:02X}>": 8 + b for b in range(256)}
    merged = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁"), ("a", "b")][: merges + 1]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merged, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


@cache
def sentence_pieces() -> ChatTokenizer:
    return ChatTokenizer(pieces(), make_template("chatml"))


@cache
def composing() -> ChatTokenizer:
    return changed(lambda backend: setattr(backend, "normalizer", normalizers.NFC()))


KEEPING: dict[str, Callable[[], ChatTokenizer]] = {
    "quickstart": lambda: make_tokenizer("quickstart"),
    "qwen3": lambda: make_tokenizer("qwen3"),
    "llama3": lambda: make_tokenizer("llama3"),
    "composing": composing,
    "sentence pieces": sentence_pieces,
}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text(max_size=8).map(lambda t: unicodedata.normalize("NFD", t)),
        st.builds(
            lambda t, n: t * n,
            st.sampled_from(
                [" ", "    ", "a", "ab", "calculator", "<|im_end|>", "ᾂ", "각", "é", "\u0345", "\n"]
            ),
            st.integers(1, 300),
        ),
    ),
    max_size=5,
).map("".join)


@pytest.mark.parametrize("name", KEEPING)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_says(name: str, text: str) -> None:
    text = text.encode(errors="ignore").decode()
    tokenizer = KEEPING[name]()
    message = [{"role": "user", "content": text}]
    for whole in (text, tokenizer.render(message, None, {}, add_generation_prompt=True)):
        assert tokenizer.fewest_tokens(whole) <= len(tokenizer.encode(whole))


@pytest.mark.parametrize("name", KEEPING)
def test_a_text_far_too_long_is_refused_without_tokenising_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KEEPING[name]()
    text = "a b" * 100_000
    n = tokenizer.fewest_tokens(text)
    assert n > 3000
    assert len(tokenizer.encode(text, len(tokenizer.encode(text)))) >= n
    monkeypatch.setattr(tokenizer, "_encoder", None)
    with pytest.raises(ContextLengthError, match=f"at least {n} tokens") as refused:
        tokenizer.encode(text, n)
    assert refused.value.tokens == (n, n)


def unknown_without_bytes(backend: Tokenizer) -> None:
    spec = json.loads(backend.to_str())
    del spec["model"]["vocab"]["Ā"]
    again = Tokenizer.from_str(json.dumps(spec))
    backend.model = again.model


@pytest.mark.parametrize(
    "change",
    [
        lambda b: setattr(b, "normalizer", normalizers.Strip()),
        lambda b: setattr(b, "normalizer", normalizers.NFKC()),
        lambda b: setattr(b, "normalizer", normalizers.Replace("  ", " ")),
        lambda b: setattr(
            b,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), b.pre_tokenizer]),
        ),
        lambda b: setattr(
            b,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), b.pre_tokenizer]),
        ),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda b: b.add_special_tokens([AddedToken("<|x|>", rstrip=True)]),
        lambda b: b.add_special_tokens([AddedToken("<|x|>", lstrip=True)]),
        unknown_without_bytes,
    ],
)
def test_a_tokenizer_that_may_drop_characters_says_nothing_by_length(change: Change) -> None:
    assert changed(change).fewest_tokens("a" * 10_000) == 0


# -- text of ids -----------------------------------------------------------------------------


def byte_level(*added: str) -> ChatTokenizer:
    backend = make_backend("qwen3")
    backend.add_tokens([AddedToken(text) for text in added])
    return ChatTokenizer(backend, make_template("qwen3"))


@cache
def odd_words() -> ChatTokenizer:
    """Added tokens that a byte-level decoder takes for bytes, and ones that it does not."""
    return byte_level("Ġword", "two words", "é", "日本", "\ufffd")


@pytest.mark.parametrize("name", ["quickstart", "qwen3", "llama3", "sentence pieces", "odd words"])
@given(data=st.data())
def test_any_ids_read_as_the_tokenizer_itself_reads_them(name: str, data: st.DataObject) -> None:
    tokenizer = odd_words() if name == "odd words" else KEEPING[name]()
    last = tokenizer.vocabulary - 1
    ids = data.draw(st.lists(st.integers(0, last) | st.integers(max(last - 9, 0), last)))
    whole = tokenizer.encode(data.draw(TEXTS).encode(errors="ignore").decode()).tolist()
    for each in (ids, whole[: len(whole) // 2 + 1], [*whole[:3], *ids]):
        assert tokenizer.decode(each) == tokenizer.backend.decode(each, skip_special_tokens=False)

"""Texts are encoded by fastokens where it gives the ids of tokenizers, elsewhere by tokenizers."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

import fastokens
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from stepwell.gateway.tokens.tokenizer import TextEncoder
from tests.gateway.conftest import FAMILIES, QUICKSTART, make_backend

LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}".replace("{1,3}", "")
SPLITS = {"llama3": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{LETTERS}", "qwen2": QWEN}
CONTROL = [text for family in FAMILIES.values() for text in family.special]


@lru_cache
def backend(name: str) -> Tokenizer:
    if name == "quickstart":
        return Tokenizer.from_file(str(QUICKSTART / "tokenizer.json"))
    if name in FAMILIES:
        return make_backend(name)
    made = make_backend("chatml")
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return made


def exact(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


texts = st.lists(
    st.text(max_size=12) | st.sampled_from([*CONTROL, " \n", "it's", "\r\n", "e\u0301", "\u180e"]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", [*FAMILIES, *SPLITS, "quickstart"])
@given(text=texts)
def test_the_ids_are_those_of_tokenizers(name: str, text: str) -> None:
    encoder = TextEncoder(backend(name), check_every=1_000_000)
    assert encoder.is_fast
    encoder.encode("")  # the first one is checked
    ids = encoder.encode(text)
    assert ids.dtype == np.int32
    assert not ids.flags.writeable
    assert ids.tolist() == exact(backend(name), text)
    assert encoder.is_fast


def test_a_character_that_the_matchers_disagree_on_is_left_to_tokenizers() -> None:
    quickstart = backend("quickstart")
    text = "a \u180e the"
    (fast_ids, _) = fastokens.Tokenizer.from_json_str(quickstart.to_str()).encode_batch_flat([text])
    assert np.frombuffer(fast_ids, np.int32).tolist() != exact(quickstart, text)  # else: drop it
    encoder = TextEncoder(quickstart, check_every=1)
    assert encoder.encode(text).tolist() == exact(quickstart, text)
    assert encoder.is_fast


def other(changed: Any) -> Any:
    """fastokens' tokenizer of a changed chatml one."""
    spec = json.loads(backend("chatml").to_str())
    changed(spec)
    return fastokens.Tokenizer.from_json_str(json.dumps(spec))


def no_merges(spec: Any) -> None:
    spec["model"]["merges"] = []


def swapped(spec: Any) -> None:
    """The ids of two letters that no probe has."""
    words = spec["model"]["vocab"]
    words["Q"], words["Z"] = words["Z"], words["Q"]


def test_other_ids_of_a_probe_leave_all_to_tokenizers() -> None:
    encoder = TextEncoder(backend("chatml"), fast=other(no_merges))
    assert not encoder.is_fast
    assert encoder.encode("what is the answer").tolist() == exact(
        backend("chatml"), "what is the answer"
    )


def test_other_ids_of_a_later_text_are_noticed_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = TextEncoder(backend("chatml"), check_every=3, fast=other(swapped))
    assert encoder.is_fast
    caplog.set_level(logging.INFO)
    for n, text in enumerate(["the", "the answer", "name", "QZQQ", "QZQQ", "the"]):
        ids = encoder.encode(text).tolist()
        assert ids == exact(backend("chatml"), text) or n < 3
        assert encoder.is_fast == (n < 3)
    (told,) = caplog.messages
    assert told == (
        "fastokens and tokenizers give different ids for a text of 4 characters; texts are encoded "
        "by tokenizers from now on"
    )


def test_what_fastokens_cannot_read_tokenizers_encodes() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = TextEncoder(words)
    assert not encoder.is_fast
    assert encoder.encode("a b a").tolist() == [0, 1, 0]

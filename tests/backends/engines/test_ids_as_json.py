"""Ids of a conversation are written once, and are those of its arrays."""

from __future__ import annotations

import random

import numpy as np
import orjson

from stepwell.backends.engines.connections import PART_BYTES, IdsJson
from stepwell.datapool.types import TokenIds


def listed(ids: IdsJson, pieces: list[TokenIds]) -> list[int]:
    found: list[int] = orjson.loads(b"".join(ids.parts(pieces)))
    return found


def test_texts_are_the_ids_of_the_pieces() -> None:
    ids = IdsJson()
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 150_000, n, dtype=np.int32) for n in (0, 1, 32, 5000, 3)]
    for _ in range(2):
        assert listed(ids, pieces) == np.concatenate(pieces).tolist()
    assert b"".join(ids.parts([])) == b"[]"


def test_conversations_that_share_their_beginning_and_branch_are_their_own() -> None:
    rng, choice = np.random.default_rng(0), random.Random(0)
    for max_bytes in (1 << 30, 200_000, 0):
        ids = IdsJson(max_bytes)
        root = rng.integers(0, 150_000, 2000, dtype=np.int32)
        conversations: list[list[TokenIds]] = [[root]]
        for _ in range(200):
            said = [rng.integers(0, 150_000, choice.randrange(1, 400)) for _ in range(2)]
            pieces = [*choice.choice(conversations), *(each.astype(np.int32) for each in said)]
            conversations.append(pieces)
            for again in (pieces, choice.choice(conversations)):
                assert listed(ids, again) == np.concatenate(again).tolist()


def test_what_a_prompt_goes_on_from_is_not_written_again() -> None:
    ids = IdsJson()
    root, reply, new = (np.arange(n, dtype=np.int32) for n in (PART_BYTES, 9, 8))
    (_, written, _) = ids.parts([root])
    for _ in range(2):  # by several conversations
        assert ids.parts([root, reply, new.copy()])[1] is written
    assert ids.parts([root])[1] is written


def test_what_was_not_used_for_longest_goes_first() -> None:
    pieces = [np.full(1000, i, np.int32) for i in range(3)]
    ids = IdsJson(max_bytes=4_500)  # two of them
    texts = [ids.parts([piece])[1] for piece in (pieces[0], pieces[1], pieces[0], pieces[2])]
    assert ids.parts([pieces[0]])[1] is texts[0]
    assert ids.parts([pieces[1]])[1] is not texts[1]
    ids.clear()
    assert ids.parts([pieces[0]])[1] is not texts[0]

"""Ids of a conversation are written once, and are those of its arrays."""

from __future__ import annotations

import numpy as np
import orjson

from stepwell.backends.engines.connections import LEAST_IDS, IdsJson


def test_texts_are_the_ids_of_the_pieces() -> None:
    ids = IdsJson()
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 150_000, n, dtype=np.int32) for n in (0, 1, LEAST_IDS, 5000, 3)]
    for _ in range(2):
        listed = orjson.loads(b"".join(ids.parts(pieces)))
        assert listed == np.concatenate(pieces).tolist()
    assert b"".join(ids.parts([])) == b"[]"


def test_a_long_piece_is_written_once() -> None:
    ids, piece = IdsJson(), np.arange(1000, dtype=np.int32)
    assert ids.parts([piece])[1] is ids.parts([piece])[1]


def test_what_was_not_used_for_longest_goes_first() -> None:
    pieces = [np.full(1000, i, np.int32) for i in range(3)]
    ids = IdsJson(max_bytes=13_000)  # two of them
    texts = [ids.parts([piece])[1] for piece in (pieces[0], pieces[1], pieces[0], pieces[2])]
    assert ids.parts([pieces[0]])[1] is texts[0]
    assert ids.parts([pieces[1]])[1] is not texts[1]
    ids.clear()
    assert ids.parts([pieces[0]])[1] is not texts[0]

"""This module writes token ids as JSON so that those of a long conversation are written once.

    prompt   [first prompt │ reply │ new │ reply │ new]      arrays of the turns, and what is new
    JSON     [ as before   │ as …  │ …   │ as …  │ new ]     joined

Owns: the texts. Does not own: the request around them (`client.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import orjson

from stepwell.datapool.types import TokenIds

MAX_BYTES = 64 * 1024 * 1024
"""Bytes kept of texts and arrays: 7 million ids, or a hundred conversations of 60,000."""
LEAST_IDS = 32
"""Fewer are written as fast as they are found."""


class IdsJson:
    """Texts of arrays of ids, of which nothing changes; those not used for longest go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._n_bytes = 0
        self._texts: OrderedDict[int, tuple[TokenIds, bytes]] = OrderedDict()
        """Arrays and their texts by the array's id, which is its own as long as it is here."""

    def parts(self, pieces: Sequence[TokenIds]) -> list[bytes]:
        """Parts of one JSON list of all these ids."""
        parts = [b"["]
        for ids in pieces:
            if not len(ids):
                continue
            if (known := self._texts.get(id(ids))) is not None:
                self._texts.move_to_end(id(ids))
                text = known[1]
            else:
                text = orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
                if len(ids) >= LEAST_IDS:
                    self._keep(ids, text)
            parts += (text, b",")
        if len(parts) == 1:
            return [b"[]"]
        parts[-1] = b"]"
        return parts

    def clear(self) -> None:
        self._texts.clear()
        self._n_bytes = 0

    def _keep(self, ids: TokenIds, text: bytes) -> None:
        self._texts[id(ids)] = ids, text
        self._n_bytes += len(text) + ids.nbytes
        while self._n_bytes > self._max_bytes and self._texts:
            _, (gone, its_text) = self._texts.popitem(last=False)
            self._n_bytes -= len(its_text) + gone.nbytes

"""The index from conversations to the trajectories that were made for agents that name none.

    caller + key of a conversation, or of a first request ──► trajectory_uid

A trajectory keeps its own places here (`LiveTrajectory.places`), which go when it is closed. Does
not own: what a conversation's key is (`tokens/messages.py`), whose a call is (`identity.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import text_prefix_keys

Caller: TypeAlias = bytes
"""Digest of the API keys of a request."""
Peer: TypeAlias = tuple[str, int] | None
"""The other end of a connection. Port 0: a proxy's word for it, and any of its connections."""


class Place(NamedTuple):
    """A key under which a trajectory is found."""

    key: bytes
    """Its caller, and the key of a conversation or first request."""
    length: int | None = None
    """Length of a conversation that is no messages."""


class Conversations:
    """One per gateway. Knows open trajectories only."""

    def __init__(self) -> None:
        self._uids: dict[bytes, str] = {}
        self._lengths: Counter[int] = Counter()
        """Counts, by length, the conversations that are no messages."""

    def __len__(self) -> int:
        return len(self._uids)

    def add(self, place: Place, uid: str) -> None:
        """The latest of several trajectories is found."""
        self._uids[place.key] = uid
        if place.length is not None:
            self._lengths[place.length] += 1

    def at(self, key: bytes) -> str | None:
        return self._uids.get(key)

    def extended(self, call: ChatRequest, caller: Caller) -> str | None:
        """The trajectory of the deepest turn that this conversation extends."""
        deepest = None
        if (plain := call.plain) is not None:
            for _, key in text_prefix_keys(plain, self._lengths):
                deepest = self._uids.get(caller + key, deepest)
            return deepest
        turns = (self._uids.get(caller + key) for _, key in call.keys.ends())
        return next((uid for uid in turns if uid is not None), None)

    def remove(self, places: Iterable[Place], uid: str) -> None:
        """A trajectory was closed."""
        for key, length in places:
            if self._uids.get(key) == uid:
                del self._uids[key]
            if length is not None:
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]

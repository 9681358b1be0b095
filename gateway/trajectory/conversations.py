"""This module finds the conversation that a call goes on with by what is said in it, for agents
that name no trajectory.

    turn stored ──note_turn──► its key, for its caller ──extended──► the trajectory of a call

Told of turns and closings; knows no trajectories but the uids of those made here. Owned by the
app's lifespan.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import Key, extend_key, text_prefix_keys
from stepwell.gateway.trajectory.trajectory import LiveTrajectory

Caller: TypeAlias = bytes
"""Digest of the API keys of a request."""


class Conversations:
    """The trajectories that were made for agents that name none, and the conversations in them."""

    def __init__(self) -> None:
        self._own: OrderedDict[str, Caller] = OrderedDict()
        """Trajectories that are still open, with their last caller; the least recently used
        first."""
        self._by_turn: dict[bytes, str] = {}
        """Trajectory by caller and key of a conversation."""
        self._turns: dict[str, list[tuple[bytes, int | None]]] = {}
        self._lengths: Counter[int] = Counter()
        """Of the conversations that are no messages."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._own

    def __iter__(self) -> Iterator[str]:
        """Uids, the least recently used first."""
        return iter(tuple(self._own))

    def use(self, uid: str, caller: Caller) -> None:
        """A trajectory has a call of this caller, and is closed when it has had none for long."""
        self._own[uid] = caller
        self._own.move_to_end(uid)

    def extended(self, call: ChatRequest, caller: Caller) -> str | None:
        """The trajectory of the deepest turn that this conversation extends."""
        deepest = None
        if (plain := call.plain) is not None:
            for _, key in text_prefix_keys(plain, self._lengths):
                deepest = self._by_turn.get(caller + key, deepest)
            return deepest
        key = call.root
        for message in call.messages:
            key = extend_key(key, message)
            if message["role"] == "assistant":
                deepest = self._by_turn.get(caller + key, deepest)
        return deepest

    def note_turn(self, trajectory: LiveTrajectory, key: Key, length: int | None) -> None:
        """A turn was stored: calls that extend its conversation belong to its trajectory."""
        uid = trajectory.uid
        if (caller := self._own.get(uid)) is not None:
            self.use(uid, caller)
            trajectory.touch()  # it is idle from the end of a call on
            self._by_turn[caller + key] = uid
            self._turns.setdefault(uid, []).append((caller + key, length))
            if length is not None:
                self._lengths[length] += 1

    def forget(self, trajectory: LiveTrajectory) -> None:
        """It was closed."""
        self._own.pop(trajectory.uid, None)
        for place, length in self._turns.pop(trajectory.uid, ()):
            if self._by_turn.get(place) == trajectory.uid:
                del self._by_turn[place]
            if length is not None:
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]

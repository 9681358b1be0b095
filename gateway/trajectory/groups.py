"""This module says which group and channel a trajectory is of, so that traffic makes GRPO groups
without a word from its agents.

    conversation ──x-prompt-uid──────────────────────► the group of that name
         │  └──a first prompt that others began with──► the group that is forming of it, or another
         └──anything else─────────────────────────────► a group of its own (or none: not stored)

    forming ──n conversations │ within_s over │ served, dropped──► the next one begins another group

Each gateway forms groups of its own; the pool closes them (`open_group`, with n and a deadline).
What an agent changes between calls and sampling parameters are no part of a first prompt. A
conversation that has replies in it which nobody sampled here began elsewhere, with another prompt.

Owns: groups that are forming, and the share that is held out. Does not own: when a group is served
(the pool), which conversation a call goes on with (`identity.py`).
"""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from cachetools import LRUCache

from stepwell.datapool.types import VAL
from stepwell.gateway.access import Principal
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import Key, extend_key, text_key

_Place: TypeAlias = tuple[str | None, str | Key]
"""Owner (`access.Principal.owner`), and the declared name or the first prompt."""


@dataclass(slots=True, eq=False)
class Group:
    """One that is forming, with what it is declared with to the pool."""

    prompt_uid: str
    n: int
    """Trajectories of it."""
    deadline_s: float
    place: _Place | None = None
    """Key under which others find it; None: it takes nobody else."""
    channels: tuple[str, ...] = ()
    """Channels of its owner's conversations: one that began elsewhere may be in each of them."""
    joined: set[str] = field(default_factory=set)
    """Trajectories that have a place in it, if others find it by its first prompt."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def has_places(self) -> bool:
        """Others find it by its first prompt."""
        return self.place is not None and not isinstance(self.place[1], str)


class Identity(NamedTuple):
    """Names, channel and owner of a trajectory that begins."""

    uid: str
    prompt_uid: str
    channel: str
    is_conversation: bool = False
    """Found by what is said in it: no agent knows its address."""
    group: Group | None = None
    """Declared when the trajectory is opened."""
    owner: str | None = None
    """Owner that the key has which opens it (`access.Principal.owner`)."""


class Groups:
    """Owned by the app's lifespan."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._forming: LRUCache[_Place, Group] = LRUCache(REMEMBERED)

    def channel(self, prompt_uid: str, of_key: str | None = None) -> str:
        """Return the channel of a group for which nobody chose one.

        Args:
            of_key: the channel of its caller's key; None: the gateway's own.
        """
        digest = hashlib.blake2b(prompt_uid.encode(errors="surrogatepass"), digest_size=8).digest()
        if int.from_bytes(digest) < self._config.holdout * 2**64:
            return VAL
        return of_key or self._config.channel

    def join(
        self, call: ChatRequest, uid: str, declared: str | None, caller: Principal
    ) -> Identity | None:
        """The identity of a conversation that begins with this call; None: it is not to be stored.

        Args:
            uid: of the conversation's trajectory.
            declared: the group that the call names.
            caller: as whose, and in whose channel, it begins.
        """
        config, group = self._config.groups, None
        if declared is not None:
            place = caller.owner, declared
            group = self._forming.get(place) or self._begin(place, declared)
        elif config.form == "declared":
            return None
        elif config.form == "first_prompt":
            if (first := self._first_prompt(call)) is None:
                group = Group(f"prompt-{uid}", 1, config.within_s)
            else:
                group = self._formed((caller.owner, first), first)
                group.joined.add(uid)
        prompt_uid = f"prompt-{uid}" if group is None else group.prompt_uid
        channel = self.channel(prompt_uid, caller.channel)
        if group is not None:
            own = caller.channel or self._config.channel
            group.channels = (own, VAL) if self._config.holdout else (own,)
        return Identity(uid, prompt_uid, channel, True, group, caller.opens_as(uid))

    def end(self, group: Group | None) -> None:
        """The pool takes nothing more for it."""
        if group is None or group.place is None or self._forming.get(group.place) is not group:
            return
        del self._forming[group.place]
        if isinstance(declared := group.place[1], str):  # its name is used up
            self._begin(group.place, f"{declared}~{uuid.uuid4().hex[:12]}")

    def _formed(self, place: _Place, first: Key) -> Group:
        """The group of a first prompt that still takes conversations."""
        group = self._forming.get(place)
        if group is None or (
            len(group.joined) >= group.n or time.monotonic() - group.began_at >= group.deadline_s
        ):
            group = self._begin(place, f"prompt-{first.hex()[:12]}-{uuid.uuid4().hex[:12]}")
        return group

    def _begin(self, place: _Place, prompt_uid: str) -> Group:
        config = self._config.groups
        group = self._forming[place] = Group(prompt_uid, config.n, config.within_s, place)
        return group

    def _first_prompt(self, call: ChatRequest) -> Key | None:
        """Key of what all conversations that begin alike share; None: this one does not begin
        here."""
        if (plain := call.plain) is not None:
            return text_key(plain)
        key = call.keys.root
        for message in call.messages:
            if message["role"] == "assistant":
                return None
            key = extend_key(key, message)
        if call.prefill or call.forced_tool is not None:  # prompts end with them
            return text_key(f"{key.hex()} {call.forced_tool} {call.prefill}")
        return key

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
(the pool), which conversation a call goes on with (`trajectory/identity.py`).
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from typing import TypeAlias

from stepwell.datapool.types import VAL
from stepwell.gateway.config import REMEMBERED, GatewayConfig
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import Key, extend_key, root_key, text_key
from stepwell.gateway.trajectory.trajectory import Identity, LiveTrajectory, Terms

log = logging.getLogger(__name__)

_Place: TypeAlias = tuple[str | None, str | Key]
"""Channel of the caller's key, and the declared name or the first prompt."""


class _Forming:
    __slots__ = ("began_at", "n", "place", "prompt_uid")

    def __init__(self, place: _Place, prompt_uid: str) -> None:
        self.place = place
        self.prompt_uid = prompt_uid
        self.began_at = time.monotonic()
        self.n = 0
        """Conversations that joined it."""


class Groups:
    """Owned by the app's lifespan."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._forming: OrderedDict[_Place, _Forming] = OrderedDict()
        self._by_uid: dict[tuple[str | None, str], _Forming] = {}
        """By the channel of the callers' keys and prompt_uid."""
        self._warned = False

    def channel(self, prompt_uid: str, of_key: str | None = None) -> str:
        """Where a group is stored if nobody chose its channel.

        Args:
            of_key: the channel of its caller's key; None: the gateway's own.
        """
        digest = hashlib.blake2b(prompt_uid.encode(errors="surrogatepass"), digest_size=8).digest()
        if int.from_bytes(digest) < self._config.holdout * 2**64:
            return VAL
        return of_key or self._config.channel

    def join(
        self, call: ChatRequest, uid: str, declared: str | None, of_key: str | None
    ) -> Identity | None:
        """Who a conversation is that begins with this call; None: it is not to be stored.

        Args:
            uid: of the conversation's trajectory.
            declared: the group that the call names.
            of_key: the channel of its caller's key.
        """
        config = self._config.groups
        prompt_uid, terms = f"prompt-{uid}", None
        if declared is not None:
            prompt_uid = self._declared((of_key, declared))
            terms = Terms(config.n, config.within_s)
        elif config.form == "declared":
            return None
        elif config.form == "first_prompt":
            first = self._first_prompt(call)
            terms = Terms(1 if first is None else config.n, config.within_s)
            if first is not None:
                prompt_uid = self._formed((of_key, first))
        channel = self.channel(prompt_uid, of_key)
        return Identity(uid, prompt_uid, channel, terms, True, of_key)

    def leave(self, trajectory: LiveTrajectory) -> None:
        """A conversation that joined a group was refused before it was stored."""
        if (forming := self._of(trajectory)) is not None:
            forming.n -= 1

    def end(self, trajectory: LiveTrajectory) -> None:
        """The pool takes nothing more for its group."""
        if (forming := self._of(trajectory)) is None:
            return
        self._forget(forming)
        if isinstance(declared := forming.place[1], str):  # its name is used up
            self._begin(forming.place, f"{declared}~{uuid.uuid4().hex[:12]}")

    def note_late(self, idle_s: float) -> None:
        """A conversation that nobody completed ended later than its group."""
        within_s = self._config.groups.within_s
        if not self._warned and within_s <= idle_s:
            self._warned = True
            log.warning(
                "gateway.groups.within_s is %g and gateway.conversation_idle_s is %g: groups are "
                "closed before conversations that nobody completes, which are lost so; complete "
                "them (POST /v1/complete_trajectory), or make within_s the longer one",
                *(within_s, idle_s),
            )

    def _of(self, trajectory: LiveTrajectory) -> _Forming | None:
        return self._by_uid.get((trajectory.of_key, trajectory.prompt_uid))

    def _declared(self, place: _Place) -> str:
        forming = self._forming.get(place) or self._begin(place, str(place[1]))
        return forming.prompt_uid

    def _formed(self, place: _Place) -> str:
        forming, config = self._forming.get(place), self._config.groups
        if forming is None or (
            forming.n >= config.n or time.monotonic() - forming.began_at >= config.within_s
        ):
            first = place[1].hex() if isinstance(place[1], bytes) else place[1]
            forming = self._begin(place, f"prompt-{first[:12]}-{uuid.uuid4().hex[:12]}")
        forming.n += 1
        return forming.prompt_uid

    def _begin(self, place: _Place, prompt_uid: str) -> _Forming:
        if (before := self._forming.get(place)) is not None:
            self._forget(before)
        forming = self._forming[place] = _Forming(place, prompt_uid)
        self._by_uid[place[0], prompt_uid] = forming
        while len(self._forming) > REMEMBERED:
            self._forget(next(iter(self._forming.values())))
        return forming

    def _forget(self, forming: _Forming) -> None:
        del self._forming[forming.place], self._by_uid[forming.place[0], forming.prompt_uid]

    def _first_prompt(self, call: ChatRequest) -> Key | None:
        """What is the same for all conversations that begin alike; None: this one does not begin
        here."""
        if (plain := call.plain) is not None:
            return text_key(plain)
        key = root_key(
            call.tools, {**self._config.chat_template_args, **(call.template_args or {})}
        )
        for message in call.messages:
            if message["role"] == "assistant":
                return None
            key = extend_key(key, message)
        if call.prefill or call.forced_tool is not None:  # prompts end with them
            return text_key(f"{key.hex()} {call.forced_tool} {call.prefill}")
        return key

"""Whose call is it? Every LLM call belongs to a trajectory; agents say which in many ways.

The first that applies::

    URL path            /{trajectory_uid}/{prompt_uid}/v1/…
    API key             the `api_key` that /init_trajectory returned, for agents without a path
    headers             x-trajectory-uid (and x-prompt-uid, its group)
    the body            `previous_response_id` continues the trajectory of that response
    session headers     x-session-id …: one trajectory per session; a sub-agent's parent session
                        (x-parent-session-id …) is the session
    the conversation    the trajectory whose turn it extends; a new one otherwise

The last two are the online case: nobody opens these trajectories, so their first call says of which
group they are (`groups.py`), and they are completed, unscored, after `gateway.conversation_idle_s`
without a call if nobody does that before.

Agents often send the very same first request, so a conversation belongs to the API key that it came
with, and a retry of its first call finds it only if it cannot be another agent's: nobody has the
reply yet, or the retry comes over the same connection or with the same `Idempotency-Key`.

Owns: this order, and the index from conversations to trajectories. Does not own: trajectories, nor
whether the caller may (`keys.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from starlette.datastructures import Headers

from stepwell.datapool.errors import DataPoolError
from stepwell.gateway.errors import GatewayError, RequestError, TrajectoryClosedError
from stepwell.gateway.keys import Named, presented
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.tokens.messages import Key, extend_key, root_key, text_prefix_keys
from stepwell.gateway.trajectory.groups import Groups
from stepwell.gateway.trajectory.retries import RetryKey
from stepwell.gateway.trajectory.trajectory import LiveTrajectory, TrajectoryStore

log = logging.getLogger(__name__)

TRAJECTORY_HEADER = "x-trajectory-uid"
PROMPT_HEADER = "x-prompt-uid"
RECORD_HEADER = "x-stepwell-record"
"""`false`: nothing of the call is stored or kept once it is answered."""
SESSION_HEADERS = (
    "x-parent-session-id",
    "x-session-id",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
    "x-conversation-id",
)
"""In this order: a sub-agent that names its parent's session belongs to the parent's trajectory."""

REMEMBERED_REQUESTS = 100_000

Peer: TypeAlias = tuple[str, int] | None
"""The other end of a connection. Port 0: a proxy's word for it, and any of its connections."""
Caller: TypeAlias = bytes
"""Digest of the API keys of a request."""


class _FirstCall(NamedTuple):
    """How a conversation began."""

    uid: str
    peer: Peer


ReadKey = Callable[[str], Named | None]
"""The trajectory of a trajectory's API key; None for any other text."""


class Origin(NamedTuple):
    """What a request says of whose it is, beside its body."""

    headers: Headers
    url: Named | None
    peer: Peer
    channel: str | None
    """Of its agent key."""


class Conversations:
    """The trajectories that were made here for agents that name none, and the conversations in
    them. It is told of turns and closings, and knows no other trajectories."""

    def __init__(self, template_args: Mapping[str, Any]) -> None:
        self._template_args = template_args
        self._own: OrderedDict[str, Caller] = OrderedDict()
        """Trajectories that are still open, with their last caller; the least recently used
        first."""
        self._by_turn: dict[bytes, str] = {}
        """Trajectory by caller and key of a conversation."""
        self._turns: dict[str, list[tuple[bytes, int | None]]] = {}
        self._text_lengths: Counter[int] = Counter()
        """Of the turns that are plain text."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._own

    def __iter__(self) -> Iterator[str]:
        """Uids, the least recently used first."""
        return iter(tuple(self._own))

    def use(self, trajectory: LiveTrajectory, caller: Caller) -> LiveTrajectory:
        """It has a call of this caller, and is closed when it has had none for long."""
        self._own[trajectory.uid] = caller
        self._own.move_to_end(trajectory.uid)
        return trajectory

    def extended(self, call: ChatRequest, caller: Caller) -> str | None:
        """The trajectory of the deepest turn that this conversation extends."""
        deepest = None
        if (plain := call.plain) is not None:
            for _, key in text_prefix_keys(plain, self._text_lengths):
                deepest = self._by_turn.get(caller + key, deepest)
            return deepest
        key = root_key(call.tools, {**self._template_args, **(call.template_args or {})})
        for message in call.messages:
            key = extend_key(key, message)
            if message["role"] == "assistant":
                deepest = self._by_turn.get(caller + key, deepest)
        return deepest

    def note_turn(self, trajectory: LiveTrajectory, key: Key, text_length: int | None) -> None:
        """A turn was stored: calls that extend its conversation belong to its trajectory."""
        if (caller := self._own.get(trajectory.uid)) is not None:
            self.use(trajectory, caller)
            trajectory.touch()  # it is idle from the end of a call on
            place = caller + key
            self._by_turn[place] = trajectory.uid
            self._turns.setdefault(trajectory.uid, []).append((place, text_length))
            if text_length is not None:
                self._text_lengths[text_length] += 1

    def forget(self, trajectory: LiveTrajectory) -> None:
        """It was closed."""
        self._own.pop(trajectory.uid, None)
        for place, text_length in self._turns.pop(trajectory.uid, ()):
            if self._by_turn.get(place) == trajectory.uid:
                del self._by_turn[place]
            if text_length is not None:
                self._text_lengths[text_length] -= 1
                if not self._text_lengths[text_length]:
                    del self._text_lengths[text_length]


class Identities:
    """Finds the trajectory of a call. Owned by the app's lifespan."""

    def __init__(
        self,
        trajectories: TrajectoryStore,
        conversations: Conversations,
        groups: Groups,
        read_key: ReadKey,
        *,
        idle_s: float,
    ) -> None:
        self._trajectories = trajectories
        self._conversations = conversations
        self._groups = groups
        self._read_key = read_key
        self._idle_s = idle_s
        self._first_calls: OrderedDict[tuple[Caller, str, str], _FirstCall] = OrderedDict()
        """By caller and request, for a client's retry of a conversation's first call."""
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    def identify(
        self,
        origin: Origin,
        call: ChatRequest,
        retry: RetryKey,
        continued: str | None = None,
    ) -> LiveTrajectory:
        """The trajectory of a call.

        Args:
            continued: the trajectory that the body continues.

        Raises:
            TrajectoryClosedError, TrajectoryConflictError
            RequestError: a header is malformed.
        """
        headers = origin.headers
        if _is_not_recorded(headers):
            return self._trajectories.unrecorded("asked", origin.channel)
        if (named := origin.url or self.named(headers)) is not None:
            return self._trajectories.get(*named, origin.channel)
        if continued is not None and (known := self._trajectories.known(continued)) is not None:
            # One that was opened by its URL is its opener's to complete.
            return (
                self._conversations.use(known, _caller(headers))
                if known.uid in self._conversations
                else known
            )
        caller = _caller(headers)
        session = _session(headers)
        if session is not None:
            uid = self._session_uid(session, origin.channel)
        else:
            uid = self._of_conversation(call, retry, caller, origin.peer)
        trajectory = self._trajectories.known(uid)
        if trajectory is None:
            declared = _decoded(headers, PROMPT_HEADER)
            identity = self._groups.join(call, uid, declared, origin.channel)
            if identity is None:
                return self._trajectories.unrecorded("undeclared", origin.channel)
            trajectory = self._trajectories.begin(identity)
        return self._conversations.use(trajectory, caller)

    def let_go(self, trajectory: LiveTrajectory) -> None:
        """The pool takes no more of it, nor of its group: what comes belongs to another one."""
        self._groups.end(trajectory)
        trajectory.let_go()

    def known(
        self, headers: Headers, call: ChatRequest, of_key: str | None
    ) -> LiveTrajectory | None:
        """The open trajectory that `identify` would find without a URL; none is begun.

        Args:
            of_key: the channel of the caller's key.

        Raises:
            RequestError: a header is malformed.
        """
        if (named := self.named(headers)) is not None:
            return self._trajectories.known(named[0])
        if (session := _session(headers)) is not None:
            return self._trajectories.known(self._session_uid(session, of_key))
        uid = self._conversations.extended(call, _caller(headers))
        return self._trajectories.known(uid) if uid is not None else None

    def named(self, headers: Headers) -> tuple[str, str] | None:
        """(trajectory_uid, prompt_uid) that key or headers name.

        Raises:
            RequestError: a header is malformed.
        """
        for key in presented(headers):
            if (named := self._read_key(key)) is not None:
                return named
        if (uid := _decoded(headers, TRAJECTORY_HEADER)) is None:
            return None
        return uid, _decoded(headers, PROMPT_HEADER) or f"prompt-{uid}"

    def _session_uid(self, session: str, of_key: str | None) -> str:
        """A session that goes on after its trajectory was closed begins another one."""
        # No two sessions have one name: `~` stands before our number, `%` before an escaped byte,
        # `@` before the channel of a key: those of two services may be called alike.
        first = "session-" + re.sub("[%/~@]", lambda m: f"%{ord(m[0]):02X}", session)
        first = uid = first if of_key is None else f"{first}@{of_key}"
        n = 1
        while self._trajectories.is_closed(uid):
            n += 1
            uid = f"{first}~{n}"
        return uid

    def _of_conversation(
        self, call: ChatRequest, retry: RetryKey, caller: Caller, peer: Peer
    ) -> str:
        uid = self._conversations.extended(call, caller)
        if uid is None:
            request = caller, retry.key, retry.body
            uid = self._retried(self._first_calls.get(request), retry, peer)
            if uid is None:
                uid = f"conversation-{uuid.uuid4().hex}"
            self._first_calls[request] = _FirstCall(uid, peer)
            self._first_calls.move_to_end(request)
            while len(self._first_calls) > REMEMBERED_REQUESTS:
                self._first_calls.popitem(last=False)
        return uid

    def _retried(self, first: _FirstCall | None, retry: RetryKey, peer: Peer) -> str | None:
        """The conversation that began with this very request, if this is a retry of it."""
        known = self._trajectories.known(first.uid) if first is not None else None
        if first is None or known is None:
            return None
        is_same_connection = peer is not None and peer[1] != 0 and peer == first.peer
        is_same_client = retry.is_named or is_same_connection
        if (retry.is_retry and is_same_client) or known.awaits_retry(retry):
            return known.uid
        return None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._idle_s / 4, 30.0))
            before = time.monotonic() - self._idle_s
            for work in (self.close_idle, self.let_go_of_closed):
                try:
                    await work(before)
                except Exception:  # a sweeper that ended would close nothing for good
                    log.exception("sweeping idle trajectories failed")

    async def close_idle(self, before: float) -> int:
        """Complete what was last used before this time (monotonic seconds); how many that were."""
        closed = 0
        for uid in self._conversations:
            trajectory = self._trajectories.known(uid)
            if trajectory is None or trajectory.in_flight:
                continue
            if trajectory.last_used >= before:
                break
            try:
                outcome = await trajectory.complete(None, {"closed_by": "idle"})
                closed += 1
                if outcome == "late":
                    self._groups.note_late(self._idle_s)
            except (GatewayError, DataPoolError) as e:  # tried again in the next round
                log.warning("idle trajectory %s could not be completed: %s", uid, e)
        return closed

    async def let_go_of_closed(self, before: float) -> None:
        """Ask the pool about trajectories with an address that were last used before this time: it
        may have closed them, by a deadline say, and an agent that died never comes to hear it."""
        for trajectory in self._trajectories:
            if (
                trajectory.uid in self._conversations
                or trajectory.is_new
                or trajectory.in_flight
                or trajectory.last_used >= before
            ):
                continue
            trajectory.touch()  # asked again after as long
            if trajectory.unrecorded is not None:
                trajectory.let_go()
                continue
            try:
                await trajectory.open(metadata={})
            except TrajectoryClosedError:
                log.debug("%s was closed by the pool", trajectory.uid)
            except (GatewayError, DataPoolError) as e:
                log.warning("the pool was not asked about %s: %s", trajectory.uid, e)


def _decoded(headers: Headers, name: str) -> str | None:
    """The id in a header; None: it names none.

    Raises:
        RequestError: it is empty.
    """
    if (value := headers.get(name)) is None:
        return None
    if not value:
        raise RequestError(f"{name} is empty; send an id, percent-encoded", name)
    return unquote(value)


def _is_not_recorded(headers: Headers) -> bool:
    """
    Raises:
        RequestError: the header says neither.
    """
    value = headers.get(RECORD_HEADER, "true").lower()
    if value not in ("true", "false"):
        raise RequestError(f"{RECORD_HEADER} is {value!r:.80}; send true or false", RECORD_HEADER)
    return value == "false"


def _session(headers: Headers) -> str | None:
    return next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)


def _caller(headers: Headers) -> Caller:
    return hashlib.blake2b("\0".join(presented(headers)).encode(), digest_size=16).digest()

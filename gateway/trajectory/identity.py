"""Every LLM call belongs to a trajectory; agents say which in many ways.

The first that applies (`x-stepwell-record: false` before all of them: the call is not recorded)::

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

Owns: this order, and the sweep of idle trajectories. Does not own: trajectories (`store.py`), the
index of their conversations (`conversations.py`), whether the caller may (`access.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeAlias
from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers

from stepwell.datapool.errors import DataPoolError, TrajectoryClosedError
from stepwell.gateway.access import Named, Principal, presented
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.trajectory.calls import RetryKey
from stepwell.gateway.trajectory.conversations import Caller, Peer
from stepwell.gateway.trajectory.groups import Groups
from stepwell.gateway.trajectory.store import TrajectoryStore
from stepwell.gateway.trajectory.trajectory import LiveTrajectory
from stepwell.gateway.web import RequestHeaders

log = logging.getLogger(__name__)

TRAJECTORY_HEADER = "x-trajectory-uid"
PROMPT_HEADER = "x-prompt-uid"
RECORD_HEADER = "x-stepwell-record"
"""`false`: nothing of the call is stored or kept once it is answered."""
_RECORD = RECORD_HEADER.encode()
SESSION_HEADERS = (
    "x-parent-session-id",
    "x-session-id",
    "session-id",
    "session_id",
    "x-claude-code-session-id",
    "x-conversation-id",
)
"""Tried in this order: a sub-agent that names its parent's session is part of the parent's
trajectory."""

ReadKey: TypeAlias = Callable[[str], Named | None]
"""The trajectory of a trajectory's API key; None for any other text."""


class Origin(msgspec.Struct, frozen=True, eq=False):
    """The parts of a request, beside its prompts, that tell whose it is."""

    headers: RequestHeaders
    url: Named | None
    peer: Peer
    caller: Principal
    retry: RetryKey
    continued: str | None = None
    """The trajectory that its body continues."""
    n: int = 1
    """Samples of each prompt."""


class Identities:
    """Finds the trajectory of a call. Owned by the app's lifespan."""

    def __init__(
        self,
        trajectories: TrajectoryStore,
        groups: Groups,
        read_key: ReadKey,
        *,
        idle_s: float,
    ) -> None:
        self._trajectories = trajectories
        self._conversations = trajectories.conversations
        self._groups = groups
        self._read_key = read_key
        self._idle_s = idle_s
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])

    def identify(self, origin: Origin, call: ChatRequest, i: int = 0) -> LiveTrajectory:
        """The trajectory of a request's prompt `i`.

        Raises:
            TrajectoryClosedError, TrajectoryConflictError
            PermissionDeniedError: another key opened it, or it is named as another's.
            RequestError: a header is malformed.
        """
        headers = origin.headers
        if _RECORD in headers.first and _is_not_recorded(headers):
            return self._trajectories.unrecorded("asked", origin.caller)
        if (named := origin.url or self._named(headers)) is not None:
            return self._trajectories.get(*named, origin.caller)
        caller, continued, retry = _caller(headers), origin.continued, origin.retry.of_prompt(i)
        trajectory = self._trajectories.known(continued) if continued is not None else None
        if trajectory is not None:
            trajectory.check_owner(origin.caller)
        if trajectory is not None and trajectory.caller is None:
            return trajectory  # it was opened by its URL, and is its opener's to complete
        uid = first = session = None
        if trajectory is None:
            session = self._session_uid(headers, origin.caller)
            uid = session or self._conversations.extended(call, caller)
            if uid is None:
                first = retry.first_digest
                uid = self._begun_by(first, retry.samples(origin.n), caller, origin.peer)
            trajectory = None if uid is None else self._trajectories.known(uid)
        if trajectory is not None:
            trajectory.check_owner(origin.caller)
            if trajectory.group is not None and not trajectory.steps:
                trajectory.group.joined.add(trajectory.uid)  # again, if its calls had failed
        else:
            if (declared := _decoded(headers, PROMPT_HEADER)) is not None:
                origin.caller.check_owner(declared, None, "group")
            uid = uid or f"conversation-{uuid.uuid4().hex}"
            identity = self._groups.join(call, uid, declared, origin.caller)
            if identity is None:
                return self._trajectories.unrecorded("undeclared", origin.caller)
            trajectory = self._trajectories.begin(identity)
            trajectory.is_session = session is not None
        trajectory.caller = caller
        if first is not None:
            trajectory.begun_by(first, origin.peer)
        return trajectory

    def begin_again(
        self, origin: Origin, trajectory: LiveTrajectory, call: ChatRequest, i: int
    ) -> LiveTrajectory:
        """Another trajectory for prompt `i`, as `identify`: this one takes no more calls. If it was
        refused as it began, its group takes no more either."""
        if trajectory.is_new:
            self._groups.end(trajectory.group)
        trajectory.detach()
        return self.identify(origin, call, i)

    def known(
        self, headers: Headers, call: ChatRequest, principal: Principal
    ) -> LiveTrajectory | None:
        """The open trajectory that `identify` would find without a URL; none is begun.

        Raises:
            RequestError: a header is malformed.
            PermissionDeniedError: another key opened it.
        """
        named = self._named(headers)
        uid = named[0] if named is not None else self._session_uid(headers, principal)
        uid = uid or self._conversations.extended(call, _caller(headers))
        trajectory = self._trajectories.known(uid) if uid is not None else None
        if trajectory is not None:
            trajectory.check_owner(principal)
        return trajectory

    def _named(self, headers: Headers) -> tuple[str, str] | None:
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

    def _session_uid(self, headers: Headers, caller: Principal) -> str | None:
        """The uid for the session that headers name. A session that goes on after its trajectory
        was closed begins another one."""
        session = next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)
        if session is None:
            return None
        # Sessions of two services may be called alike, and nobody can take another's.
        first = uid = caller.named(f"session-{session}")
        n = 1
        while self._trajectories.is_closed(uid):
            n += 1
            uid = f"{first}~{n}"
        return uid

    def _begun_by(
        self, first: bytes, samples: Sequence[RetryKey], caller: Caller, peer: Peer
    ) -> str | None:
        """The trajectory that began with this request, if it may be this very client's; the latest
        of several."""
        uid = self._conversations.at(caller + first)
        known = None if uid is None else self._trajectories.known(uid)
        if known is None or any(map(known.calls.awaits_retry, samples)):
            return uid
        retry, is_there = samples[0], peer is not None and peer[1] != 0 and peer == known.peer
        return uid if retry.is_retry and (retry.is_named or is_there) else None

    # -- idle trajectories -------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._idle_s / 4, 30.0))
            try:
                await self.close_idle(time.monotonic() - self._idle_s)
            except Exception:  # a sweeper that ended would close nothing for good
                log.exception("sweeping idle trajectories failed")

    async def close_idle(self, before: float) -> int:
        """Complete the conversations that were last used before this time (monotonic seconds), or
        abort those without a Step whose place in a group is free for others; how many that were.
        Of other trajectories ask the pool: it may have closed them, by a deadline say, and an agent
        that died never comes to hear it."""
        n_completed = 0
        for trajectory in self._trajectories:
            if not trajectory.is_idle(before):
                continue
            try:
                if trajectory.caller is not None and await trajectory.went_on_elsewhere():
                    trajectory.last_used = time.monotonic()
                elif not trajectory.is_idle(before):
                    continue  # it went on here, while the pool was asked
                elif (
                    (group := trajectory.group) is not None
                    and group.has_places
                    and not trajectory.steps
                ):
                    # Its place in the group is another's, to which its agent may have gone on.
                    await trajectory.abort("no_steps", will_retry=True)
                    n_completed += 1
                elif trajectory.caller is not None:
                    await trajectory.complete(None, {"closed_by": "idle"})
                    n_completed += 1
                elif trajectory.unrecorded is not None:
                    trajectory.detach()
                elif not trajectory.is_new:
                    trajectory.last_used = time.monotonic()  # asked again after as long
                    await trajectory.refresh()
            except TrajectoryClosedError:
                log.debug("%s was closed by the pool", trajectory.uid)
            except (GatewayError, DataPoolError) as e:  # tried again in a later round
                log.warning("idle trajectory %s could not be closed: %s", trajectory.uid, e)
        return n_completed


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
    value = headers[RECORD_HEADER].lower()
    if value not in ("true", "false"):
        raise RequestError(f"{RECORD_HEADER} is {value!r:.80}; send true or false", RECORD_HEADER)
    return value == "false"


def _caller(headers: Headers) -> Caller:
    return hashlib.blake2b("\0".join(presented(headers)).encode(), digest_size=16).digest()

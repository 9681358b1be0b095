"""This module remembers the calls of one trajectory so that a client's retry gets the same reply.

    Call in flight ──► its last client left ──► FinishedCall ──► a retry ──► Call again
         └──► failed: remembered as a failure, so that a retry is for it

Owns: which calls are remembered, and for which of them a retry is. Does not own: what makes two
requests the same (`web.retry_key`), what is kept of a call (`note.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from stepwell.datapool.types import UNSEEN, Step, unseen_key
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.tokens.graph import Turn, TurnGraph
from stepwell.gateway.trajectory.note import FinishedCall

REMEMBERED = 64
"""Keys of a trajectory, and calls of each key; the oldest ones go."""
AT_ONCE_S = 1
"""Seconds within which an agent sends the requests of a best-of. A client that has waited longer
than this and sends its request again has given the first one up."""


@dataclass(frozen=True, slots=True)
class RetryKey:
    """Which earlier call a request may be a repetition of."""

    key: str
    body: str
    """Digest of the request's bytes."""
    is_retry: bool

    @property
    def is_named(self) -> bool:
        """The client gave the request a name (`Idempotency-Key`)."""
        return self.body not in self.key

    @property
    def digest(self) -> bytes:
        """Of the key; 8 bytes, to be told from the few others of one trajectory."""
        return _digest(self.key)

    @property
    def body_digest(self) -> bytes | None:
        """Of the request's bytes, where the key does not hold that."""
        return _digest(self.body) if self.is_named else None

    def of_prompt(self, i: int) -> RetryKey:
        """The key of the request's prompt `i`; the first one's is the request's own."""
        return replace(self, key=f"{self.key}#{i}") if i else self

    def samples(self, n: int) -> list[RetryKey]:
        """The keys of `n` samples of one prompt."""
        return [self] if n == 1 else [replace(self, key=f"{self.key}/{i}") for i in range(n)]


class LiveCall(Protocol):
    """A call in flight, or with clients, as its trajectory knows it: `call.Call`."""

    uid: str
    retry: RetryKey
    created: int
    delivered: bool
    is_unseen: bool

    @property
    def turn(self) -> Turn | None: ...

    @property
    def has_failed(self) -> bool: ...

    @property
    def is_unclaimed(self) -> bool: ...

    def step(self, index: int) -> Step | None: ...

    def stored(self, index: int) -> None: ...

    def becomes(self, other: FinishedCall) -> bool: ...

    def cancel(self, why: GatewayError) -> None: ...

    async def wait(self) -> None: ...


Calls: TypeAlias = tuple[LiveCall | FinishedCall | None, ...]
"""Calls of one key; None: one that failed."""


class CallMemory:
    """Calls by the digest of their request's key, the key used last at the end."""

    def __init__(self) -> None:
        self._calls: dict[bytes, Calls] = {}

    def add(self, key: bytes, call: LiveCall | FinishedCall, *, is_retry: bool = False) -> None:
        """Remember a call. One that is a retry takes the place of a failed one."""
        calls = self._calls.pop(key, ())
        failed = (i for i, each in enumerate(calls) if each is None or each.has_failed)
        if is_retry and (i := next(failed, None)) is not None:
            calls = calls[:i] + calls[i + 1 :]
        if calls:
            _give_up(calls, call)
        self._calls[key] = (*calls, call)[-REMEMBERED:]
        while len(self._calls) > REMEMBERED:
            del self._calls[next(iter(self._calls))]

    def settle(self, call: LiveCall, finished: FinishedCall | None) -> None:
        """Remember of `call`, if that is remembered, this; None: that it failed."""
        key = call.retry.digest
        if call in (calls := self._calls.get(key, ())):
            self._calls[key] = tuple(finished if each is call else each for each in calls)

    def knows(self, retry: RetryKey) -> bool:
        return retry.digest in self._calls

    def find(self, retry: RetryKey) -> LiveCall | FinishedCall | None:
        """The call that a request repeats; None: it is a call of its own.

        Raises:
            RequestError: an Idempotency-Key came with another request before.
        """
        calls = self._calls.get(retry.digest, ())
        there = [call for call in calls if call is not None and not call.has_failed]
        if not retry.is_retry:
            # Many clients repeat a request without saying so. One whose reply nobody got is that.
            found = next((call for call in there if call.is_unclaimed), None)
        elif len(there) < len(calls):
            # Of several samples of one request, the retry is for the one that failed …
            return None
        else:  # … or else for one that did not get through.
            last = there[-1] if there else None
            found = next((call for call in there if not call.delivered), last)
        if found is not None:
            known = found.note.body if isinstance(found, FinishedCall) else found.retry.body_digest
            if known != retry.body_digest:
                raise RequestError(
                    "this Idempotency-Key came with another request body before; use a new key",
                    "Idempotency-Key",
                )
        return found

    def awaits_retry(self, retry: RetryKey) -> bool:
        """A call of this key has a reply that no client has got; or has failed, and the retry says
        that it is one."""
        return any(
            retry.is_retry if call is None or call.has_failed else call.is_unclaimed
            for call in self._calls.get(retry.digest, ())
        )

    def go_on(self, turn: Turn) -> None:
        """A client goes on from `turn`, so it waits for no other try of the request."""
        for calls in self._calls.values():
            if len(calls) > 1 and any(c is not None and c.turn is turn for c in calls):
                for each in _unanswered(calls):
                    each.is_unseen = True

    def superseded(
        self, call: LiveCall, index: int, parent: Turn | None, graph: TurnGraph
    ) -> list[int]:
        """The Steps whose replies no client saw, and another try of whose request the agent went on
        from. Samples of one request have keys of their own.

        Args:
            call, index, parent: what is to be stored, as this Step; the turn that it goes on from.
        """
        found: list[int] = []
        for calls in self._calls.values():
            if len(calls) == 1 or not any(c is not None and c.is_unseen for c in calls):
                continue
            continued = graph.continued()
            if parent is not None:
                continued.add(parent)
            there = [c for c in calls if c is not None]
            if any(c.turn in continued for c in there):
                unseen = [c for c in there if c.is_unseen and c.turn not in continued]
                indices = [index if c is call else _index(c) for c in unseen]
                found += [i for i in indices if i is not None]
        return found

    def read_unseen(self, metadata: Mapping[str, Any]) -> None:
        """Take over what a trajectory's metadata says of replies that no client got."""
        if not any(name.startswith(UNSEEN) for name in metadata):
            return
        for calls in self._calls.values():
            for call in calls:
                if isinstance(call, FinishedCall) and call.turn.step_index is not None:
                    said = metadata.get(unseen_key(call.turn.step_index))
                    call.is_unseen = call.is_unseen if said is None else said is True

    def clear(self) -> None:
        self._calls.clear()


def _index(call: LiveCall | FinishedCall) -> int | None:
    return None if call.turn is None else call.turn.step_index


def _unanswered(calls: Calls) -> list[LiveCall]:
    """Calls whose clients still wait."""
    return [
        call
        for call in calls
        if not (call is None or isinstance(call, FinishedCall) or call.has_failed or call.delivered)
    ]


def _give_up(calls: Calls, again: LiveCall | FinishedCall) -> None:
    """Mark the calls that a client waits for no more, since it has sent their request `again`. One
    that has a reply already samples on purpose."""
    if not any(c is not None and c.delivered and not c.is_unseen for c in calls):
        for call in _unanswered(calls):
            call.is_unseen |= again.created - call.created > AT_ONCE_S


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()

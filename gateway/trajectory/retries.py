"""This module remembers the calls of one trajectory so that a client's retry gets the same reply.

    Call in flight ──► its last client left ──► FinishedCall ──► a retry ──► Call again
         └──► failed: remembered as a failure, so that a retry is for it

A retry is found by a digest of its request's key, and it brings the request again. So a finished
call is kept as what neither the request nor the turn graph says: ids that the client was told, how
the reply ended, log-probs if they were asked for. The reply is read again from the sampled ids
(`Call._recall`), for a call of this gateway as for one that another gateway stored.

A finished call is a plain tuple for the reason that turns are (`tokens/graph.py`).

Owns: which calls are remembered, and for which of them a retry is. Does not own: what makes two
requests the same (`web.retry_key`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stepwell.datapool.types import LogProbs, TokenIds
from stepwell.gateway.engine import TopLogProbs
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.tokens.graph import Calls

PackedLogProbs: TypeAlias = tuple[TokenIds, TokenIds, npt.NDArray[np.float64]]
"""Alternatives of all tokens: how many each has; their ids and log-probs one after the other."""


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


class FinishedCall(NamedTuple):
    """A call whose Step is stored, as it is kept."""

    call_id: str
    created: int
    """Unix seconds."""
    body: bytes | None
    """`retry_digest` of the request's bytes' digest, where its key does not hold that."""
    is_retry: bool
    """Its request was marked as a retry."""
    delivered: bool
    """The terminal event was handed to some client's connection."""
    step_index: int | None
    turn: int | None
    """Its number in the turn graph; None: the prompt came as ids and is no part of the graph."""
    response_ids: TokenIds
    n_forced: int
    """As `TurnNote.n_forced`."""
    calls: Calls
    """Tool calls with the ids that the client was told."""
    finish_reason: Literal["stop", "length"]
    spans: tuple[tuple[int, int, int], ...]
    """Version spans: version, start, end. Empty: all of it is `version`."""
    version: int
    cached_tokens: int
    log_probs: LogProbs | None
    """None: the reply shows none."""
    alternatives: PackedLogProbs | None


class LiveCall(Protocol):
    """A call in flight, or with clients, as its trajectory knows it (`calls.Call`)."""

    delivered: bool

    @property
    def body(self) -> bytes | None:
        """As `FinishedCall.body`."""

    @property
    def has_failed(self) -> bool: ...

    @property
    def is_unclaimed(self) -> bool:
        """A reply exists, no client has its end, and none waits for it."""

    def was_stored_elsewhere(self, key: bytes, other: FinishedCall) -> bool:
        """This call and `other`, which another gateway stored for a request of this key, are one
        call of one client: then the reply is that one's."""

    def cancel(self, why: GatewayError) -> None:
        """End it with this error, unless its Step is being stored."""

    async def wait(self) -> None:
        """Return when it has ended."""


Remembered: TypeAlias = LiveCall | tuple[Any, ...] | None
"""A call that is in flight or has clients; the fields of a `FinishedCall`; None: a failed call."""


def retry_digest(text: str) -> bytes:
    """Of a `RetryKey`'s texts; 8 bytes, to be told from the few others of one trajectory."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


class CallMemory:
    """Calls by the digest of their request's key, the key used last at the end."""

    def __init__(self) -> None:
        self._calls: dict[bytes, tuple[Remembered, ...]] = {}

    def add(self, key: bytes, call: LiveCall, limit: int) -> None:
        """Remember a call that begins. The oldest beyond `limit`, of keys and of each key, go."""
        self._calls[key] = (*self._calls.pop(key, ()), call)[-limit:]
        while len(self._calls) > limit:
            del self._calls[next(iter(self._calls))]

    def knows(self, key: bytes) -> bool:
        return key in self._calls

    def restore(self, key: bytes, finished: FinishedCall) -> None:
        """Remember a call that another gateway stored."""
        self._calls[key] = (*self._calls.get(key, ()), tuple(finished))

    def replace(self, key: bytes, old: Remembered, new: Remembered) -> None:
        """Remember `new` in the place of `old`, if that is remembered."""
        if (calls := self._calls.get(key)) is not None:
            self._calls[key] = tuple(new if each is old else each for each in calls)

    def forget(self, key: bytes, call: Remembered) -> None:
        calls = self._calls.get(key, ())
        at = next((i for i, each in enumerate(calls) if each is call), len(calls))
        left = calls[:at] + calls[at + 1 :]
        if left:
            self._calls[key] = left
        else:
            self._calls.pop(key, None)

    def find(self, key: bytes, retry: RetryKey) -> LiveCall | tuple[Any, ...] | None:
        """The call that a request repeats; None: it is a call of its own.

        Raises:
            RequestError: an Idempotency-Key came with another request before.
        """
        calls = self._calls.get(key, ())
        if not retry.is_retry:
            # Many clients repeat a request without saying so. One whose reply nobody got is that.
            calls = tuple(each for each in calls if _is_unclaimed(each))[:1]
        # Of several samples of one request, the retry is for the one that failed, or else for one
        # that did not get through.
        for each in calls:
            if _is_failed(each):
                self.forget(key, each)
                return None
        found = next(
            (each for each in calls if not _is_delivered(each)), calls[-1] if calls else None
        )
        if found is not None:
            body = FinishedCall(*found).body if isinstance(found, tuple) else found.body
            if body is not None and body != retry_digest(retry.body):
                raise RequestError(
                    "this Idempotency-Key came with another request body before; use a new key",
                    "Idempotency-Key",
                )
        return found

    def awaits_retry(self, key: bytes, retry: RetryKey) -> bool:
        """A call of this key has a reply that no client has got; or has failed, and the retry says
        that it is one."""
        calls = self._calls.get(key, ())
        return any(_is_unclaimed(each) or (retry.is_retry and _is_failed(each)) for each in calls)

    def clear(self) -> None:
        self._calls.clear()


def _is_failed(call: Remembered) -> bool:
    return call is None or (not isinstance(call, tuple) and call.has_failed)


def _is_unclaimed(call: Remembered) -> bool:
    if isinstance(call, tuple):
        return not FinishedCall(*call).delivered
    return call is not None and call.is_unclaimed


def _is_delivered(call: Remembered) -> bool:
    if isinstance(call, tuple):
        return FinishedCall(*call).delivered
    return call is not None and call.delivered


def pack(alternatives: Sequence[TopLogProbs]) -> PackedLogProbs | None:
    """Alternatives of many tokens in three arrays; None if there are none."""
    flat = [pair for each in alternatives for pair in each]
    if not flat:
        return None
    counts = np.asarray([len(each) for each in alternatives], np.int32)
    ids, log_probs = zip(*flat, strict=True)
    return counts, np.asarray(ids, np.int32), np.asarray(log_probs, np.float64)


def unpack(packed: PackedLogProbs | None) -> list[TopLogProbs]:
    if packed is None:
        return []
    counts, ids, log_probs = (array.tolist() for array in packed)
    pairs = iter(zip(ids, log_probs, strict=True))
    return [tuple(islice(pairs, n)) for n in counts]

"""Memory of the calls of one trajectory, so that a client's retry gets the same reply, here or at
another gateway.

    LiveCall ──answered, failed──► its last reader leaves ──► Call ──a retry──► LiveCall again
        └── its Step ──► pool ──► another gateway: restore ──► Call and its turn

A `Call` is small and stays as long as its trajectory: the reply is read again from the sampled ids.
A `LiveCall` holds everything else, as long as the call is generated, stored or read.

Ids say what the model saw and said. They do not say of which messages, and that is what requests
are matched by. So each Step carries a note (`TurnNote`), and a gateway that did not make the Steps
(a replica that takes over, a process that was restarted) has the graph and the calls that made
them. A note is a JSON object of hashes, counts and the tool calls, which the next prompt shows; no
other text. A Step without one (an agent submitted it itself) has a `step_index` and nothing else to
restore.

Owns: which calls are remembered, which of them a request repeats, and the way back from Steps. Does
not own: what makes two requests the same (`web.retry_key`), the life of a call (`gateway/call.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from stepwell.backends.engines.api import TopLogProbs
from stepwell.datapool.errors import DataPoolError
from stepwell.datapool.types import UNSEEN, LogProbs, Step, TokenIds, unseen_key
from stepwell.gateway.engine import Generation
from stepwell.gateway.errors import GatewayError, RequestError
from stepwell.gateway.prompt import ChatRequest
from stepwell.gateway.reply.parser import Delta
from stepwell.gateway.reply.reader import ReplyText
from stepwell.gateway.tokens.graph import ToolCalls, Turn, TurnGraph, TurnKeys, join
from stepwell.gateway.tokens.messages import Message

NOTE: Final = "turn"
"""Key of a Step's metadata."""
REMEMBERED = 64
"""Keys of a trajectory, and calls of each key; the oldest ones without a call in flight go."""
AT_ONCE_S = 1
"""Seconds within which an agent sends the requests of a best-of. A client that has waited longer
than this and sends its request again has given the first one up."""
State: TypeAlias = Literal["generating", "committing", "done", "unstored", "failed"]


class RetryKey(msgspec.Struct, eq=False):
    """Key of the earlier call that a request may repeat."""

    key: str
    body: str
    """Digest of the request's bytes."""
    is_retry: bool
    """The request is marked as a retry."""
    is_named: bool = False
    """The client gave the request a name (`Idempotency-Key`), so the key does not hold `body`."""
    _digest: bytes = b""

    @property
    def digest(self) -> bytes:
        """Digest of the key; 8 bytes, to be told from the few others of one trajectory."""
        if not self._digest:
            key = self.key.encode(errors="surrogatepass")
            self._digest = hashlib.blake2b(key, digest_size=8).digest()
        return self._digest

    @property
    def body_digest(self) -> bytes | None:
        """Digest of the request's bytes, where the key does not hold that."""
        if not self.is_named:
            return None
        return hashlib.blake2b(self.body.encode(), digest_size=8).digest()

    @property
    def first_digest(self) -> bytes:
        """Digest of key and body, by which a conversation is found that began with this request."""
        return hashlib.blake2b(
            f"{self.key}\0{self.body}".encode(errors="surrogatepass"), digest_size=16
        ).digest()

    def of_prompt(self, i: int) -> RetryKey:
        """The key of the request's prompt `i`; the first one's is the request's own."""
        return self._with_key(f"{self.key}#{i}") if i else self

    def samples(self, n: int) -> list[RetryKey]:
        """The keys of `n` samples of one prompt."""
        if n == 1:
            return [self]
        return [self._with_key(f"{self.key}/{i}") for i in range(n)]

    def _with_key(self, key: str) -> RetryKey:
        return RetryKey(key, self.body, self.is_retry, self.is_named)


class TurnNote(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """The facts about a call that its ids do not tell. Bytes are base64 in JSON."""

    keys: TurnKeys
    retry: bytes
    """`RetryKey.digest` of the request."""
    created: int
    """Unix seconds."""
    body: bytes | None = None
    """`RetryKey.body_digest` of the request."""
    is_retry: bool = False
    """The request was marked as a retry."""
    n_forced: int = 0
    """Ids at the end of the prompt that begin the reply itself (a forced tool call)."""
    calls: ToolCalls = ()
    has_reasoning: bool = False
    """Same as `Turn.has_reasoning`."""

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = msgspec.to_builtins(self)
        value["keys"] = [*value["keys"]]
        if self.calls:
            value["calls"] = [list(call) for call in self.calls]
        return value


def read_note(step: Step) -> TurnNote | None:
    """The note of a Step; None if it has none that can be read."""
    try:
        return msgspec.convert(step.metadata.get(NOTE), TurnNote)
    except msgspec.ValidationError:  # somebody else's use of the same key
        return None


class SampledToken(NamedTuple):
    """A token as an answer with log-probs shows it."""

    token_id: int
    log_prob: float
    alternatives: TopLogProbs
    """(token id, log-prob), best first."""


class Call(msgspec.Struct, eq=False, gc=False, kw_only=True):
    """One sample of one try of a request. The garbage collector does not look at it, for the reason
    that it does not look at turns (`tokens/graph.py`)."""

    uid: str
    created: int
    """Unix seconds."""
    retry: bytes
    """`RetryKey.digest` of the request."""
    body: bytes | None
    """`RetryKey.body_digest` of the request."""
    is_retry: bool
    """The request was marked as a retry."""
    live: LiveCall | None = None
    """None once it has ended and nobody reads it."""
    failed: bool = False
    delivered: bool = False
    """The end was handed to some client's connection, which did not break then."""
    is_unseen: bool = False
    """No client got the end, or the one that did had sent the request again before."""
    n_forced: int = 0
    """Ids at the end of the prompt that begin the reply."""
    turn: Turn | None = None
    """Its reply in the graph; None until it is answered. The fields below are set then, too."""
    completed: int = 0
    """Unix seconds when its reply was sampled; set once it is."""
    finish_reason: Literal["stop", "length"] = "stop"
    spans: tuple[tuple[int, int, int], ...] = ()
    """Version spans: version, start, end."""
    log_probs: LogProbs | None = None
    """None: the reply shows none."""
    alternatives: Sequence[TopLogProbs] = ()

    @property
    def is_in_flight(self) -> bool:
        return self.live is not None and self.live.state in ("generating", "committing")

    @property
    def is_unclaimed(self) -> bool:
        """A reply exists, no client has its end, and none waits for it."""
        if self.delivered:
            return False
        if (live := self.live) is None:
            return self.turn is not None
        return live.state in ("committing", "done", "unstored") and not live.readers

    def give_up(self) -> None:
        """Its client waits no more: it sent the request again, or went on from another try."""
        self.is_unseen = True
        if self.live is not None:
            self.live.is_given_up = True


class LiveCall:
    """A call while it is generated, stored or read; once it is done, dialects answer from it.
    `gateway/call.py` has its life cycle."""

    generation: Generation
    """The sampled tokens; there once `is_generated`."""
    keys: TurnKeys
    """Place of its turn in the graph; there once `is_generated`."""
    message: Message
    """The reply as a message of the conversation; there once `is_generated`."""
    state: State = "generating"
    task: asyncio.Task[Any] | None = None
    """The task that generates and commits it, or is about to; None while nothing does."""
    is_running = is_generated = False
    why_cancelled: GatewayError | DataPoolError | None = None
    has_reasoning = False
    """Same as `Turn.has_reasoning`."""
    error: GatewayError | None = None
    engine_s = 0.0
    timing: dict[str, float] | None = None
    streamed_version: int | None = None
    elsewhere: Call | None = None
    """Another try of the request, which another gateway stored meanwhile."""
    duplicate_of: int | None = None
    """Step of that try, if this one's client was told otherwise already."""
    number = 0
    """Which sample of its prompt it is."""
    is_given_up = False
    """Its client waits no more, whoever takes the reply."""

    def __init__(self, call: Call, request: ChatRequest, dialect: str, text: ReplyText) -> None:
        self.call = call
        self.request = request
        self.prompt_ids: TokenIds = request.ids
        self.dialect = dialect
        self.text = text
        """The reply as it is read so far."""
        self.deltas: list[Delta] = []
        self.tokens: list[SampledToken] = []
        """Sampled tokens so far, if the request asks for log-probs."""
        self.readers: set[object] = set()
        """Clients that are still there."""
        self.watchers: list[Callable[[], None]] = []
        """Called when there is a delta more, or the end."""

    @property
    def tool_calls(self) -> ToolCalls:
        """Tool calls of the reply, as its turn and its Step's note have them."""
        calls = self.text.tool_calls
        return tuple([(c.id, c.name, c.arguments) for c in calls]) if calls else ()

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def n_response(self) -> int:
        return len(self.generation.response_ids)

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        if self.generation.finish_reason == "stop" and self.text.tool_calls:
            return "tool_calls"
        return self.generation.finish_reason

    @property
    def version(self) -> int | None:
        """The newest policy version that sampled of it so far; None: nothing is sampled yet."""
        if not self.is_generated:
            return self.streamed_version
        spans = self.generation.spans
        return spans[0].version if len(spans) == 1 else max(span.version for span in spans)

    @property
    def is_due(self) -> bool:
        """There is something to do for it, and nothing does it."""
        return self.task is None and self.state in ("generating", "committing")

    def on_tokens(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float] = (),
        alternatives: Sequence[TopLogProbs] = (),
        version: int | None = None,
    ) -> None:
        """Read sampled ids as a part of the reply."""
        self.streamed_version = version
        if self.request.n_logprobs is not None:
            self.tokens += map(SampledToken, ids, log_probs, alternatives or [()] * len(ids))
        if deltas := self.text.feed(ids):
            self.publish(deltas)

    def publish(self, deltas: Sequence[Delta] = ()) -> None:
        """Add deltas, and tell those who wait for one more, or for the end."""
        self.deltas += deltas
        for watcher in tuple(self.watchers):
            watcher()

    async def wait(self) -> None:
        """Return when nothing generates or commits it any more."""
        while self.task is not None:
            change = asyncio.Event()
            self.watchers.append(change.set)
            try:
                await change.wait()
            finally:
                self.watchers.remove(change.set)

    def cancel(self, why: GatewayError | DataPoolError) -> None:
        """End it with this error, unless its Step is being stored."""
        if self.state == "generating":
            self.why_cancelled = why
            if self.is_running and self.task is not None:
                self.task.cancel()


class CallMemory:
    """Calls by the digest of their request's key, the key used last at the end."""

    def __init__(self) -> None:
        self._calls: dict[bytes, tuple[Call, ...]] = {}

    def add(self, call: Call, *, replaces_failed: bool = False) -> None:
        """Remember a call.

        Args:
            replaces_failed: it is the retry of one that failed.
        """
        if calls := self._calls.pop(call.retry, ()):
            failed = [i for i, each in enumerate(calls) if each.failed]
            if replaces_failed and failed:
                calls = calls[: failed[0]] + calls[failed[0] + 1 :]
            _give_up(calls, call)
            if (n_over := len(calls) + 1 - REMEMBERED) > 0:
                old = tuple([each for each in calls if not each.is_in_flight][:n_over])
                _drop(old)
                calls = tuple([each for each in calls if each not in old])
        self._calls[call.retry] = (*calls, call)
        while len(self._calls) > REMEMBERED:
            ended = (k for k, v in self._calls.items() if not any(c.is_in_flight for c in v))
            if (oldest := next(ended, None)) is None:
                break
            _drop(self._calls.pop(oldest))

    def discard(self, call: Call) -> None:
        """Forget a call that turned out to be another one."""
        calls = self._calls.get(call.retry, ())
        self._calls[call.retry] = tuple(each for each in calls if each is not call)

    def with_uid(self, uid: str) -> Call | None:
        return next((c for calls in self._calls.values() for c in calls if c.uid == uid), None)

    def knows(self, retry: RetryKey) -> bool:
        return retry.digest in self._calls

    def find(self, retry: RetryKey) -> Call | None:
        """The call that a request repeats; None: it is a call of its own.

        Raises:
            RequestError: an Idempotency-Key came with another request before.
        """
        if not (calls := self._calls.get(retry.digest, ())):
            return None
        # Many clients repeat a request without saying so. One whose reply nobody got is that.
        found = next((call for call in calls if call.is_unclaimed), None)
        if found is None and retry.is_retry:
            if any(call.failed for call in calls):
                # Of several samples of one request, the retry is for the one that failed …
                return None
            # … or else for one that did not get through.
            found = next((call for call in calls if not call.delivered), calls[-1])
        if found is not None and found.body != retry.body_digest:
            raise RequestError(
                "this Idempotency-Key came with another request body before; use a new key",
                "Idempotency-Key",
            )
        return found

    def awaits_retry(self, retry: RetryKey) -> bool:
        """A call of this key has a reply that no client has got; or has failed, and the retry says
        that it is one."""
        return any(
            retry.is_retry if call.failed else call.is_unclaimed
            for call in self._calls.get(retry.digest, ())
        )

    def go_on(self, turn: Turn) -> None:
        """A client goes on from `turn`, so it waits for no other try of the request."""
        for calls in self._calls.values():
            if len(calls) > 1 and any(c.turn is turn for c in calls):
                for each in _unanswered(calls):
                    each.give_up()

    def superseded(
        self, call: Call, index: int, parent: Turn | None, graph: TurnGraph
    ) -> list[int]:
        """The Steps whose replies no client saw, and another try of whose request the agent went on
        from. Samples of one request have keys of their own.

        Args:
            call, index, parent: what is to be stored, as this Step; the turn that it goes on from.
        """
        found: list[int] = []
        if max(map(len, self._calls.values()), default=1) == 1:
            return found
        for calls in self._calls.values():
            if len(calls) == 1 or not any(c.is_unseen for c in calls):
                continue
            continued: set[Turn | None] = {*graph.continued()}
            if parent is not None:
                continued.add(parent)
            if any(c.turn in continued for c in calls):
                unseen = [c for c in calls if c.is_unseen and c.turn not in continued]
                indices = [index if c is call else _index(c) for c in unseen]
                found += [i for i in indices if i is not None]
        return found

    def read_unseen(self, metadata: Mapping[str, Any]) -> None:
        """Take over what a trajectory's metadata says of replies that no client got."""
        if not any(name.startswith(UNSEEN) for name in metadata):
            return
        for calls in self._calls.values():
            for call in calls:
                if call.live is None and (index := _index(call)) is not None:
                    said = metadata.get(unseen_key(index))
                    call.is_unseen = call.is_unseen if said is None else said is True

    def clear(self) -> None:
        for calls in self._calls.values():
            _drop(calls)
        self._calls.clear()


def _drop(calls: tuple[Call, ...]) -> None:
    """Forget calls. The garbage collector does not look at them, so a circle of a call and its
    live part, which waits for a retry, would stay for good."""
    for call in calls:
        call.live = None


def _index(call: Call) -> int | None:
    return None if call.turn is None else call.turn.step_index


def _unanswered(calls: tuple[Call, ...]) -> list[Call]:
    """Calls whose clients still wait."""
    return [c for c in calls if c.live is not None and not (c.failed or c.delivered)]


def _give_up(calls: tuple[Call, ...], again: Call) -> None:
    """Mark the calls that a client waits for no more, since it has sent their request `again`. One
    that has a reply already samples on purpose."""
    if not any(c.delivered and not c.is_unseen for c in calls):
        for call in _unanswered(calls):
            if again.created - call.created > AT_ONCE_S:
                call.give_up()


def completed_at(timing: Any, created: int) -> int:
    """Unix seconds when a reply was sampled, by the `timing` of its Step, so that all gateways say
    the same; `created` where that does not say it, and never before."""
    try:
        return max(created, int(timing["began"] + timing["waited_s"] + timing["engine_s"]))
    except (TypeError, KeyError, ValueError, OverflowError):  # a Step may hold anything there
        return created


def restore(
    graph: TurnGraph, steps: Sequence[Step], crcs: Mapping[int, int] | None = None
) -> list[Call]:
    """Add to `graph` the turns of those of `steps` that it does not hold; the calls behind them.

    Args:
        steps: all of the trajectory, by `step_index`.
        crcs: as `Turn.crc`, by `step_index`.
    """
    extended = {step.parent_index for step in steps}
    found = []
    for step in steps:
        note = None if step.step_index in graph.steps else read_note(step)
        if note is None:
            continue
        parent = None if step.parent_index is None else graph.steps.get(step.parent_index)
        if parent is not None and parent.n_tokens >= len(step.prompt_ids):
            parent = None
        # Copies: a part of the Step's arrays would keep the whole of them.
        turn = graph.add(
            note.keys,
            parent=parent,
            new_prompt_ids=join([step.prompt_ids[0 if parent is None else parent.n_tokens :]]),
            response_ids=join([step.response_ids]),
            calls=note.calls,
            has_reasoning=note.has_reasoning,
            step_index=step.step_index,
            crc=None if crcs is None else crcs[step.step_index],
            pictures=tuple(p for p in step.pictures if parent is None or p.at >= parent.n_tokens),
        )
        uid, reason = step.metadata.get("call_id"), step.finish_reason
        if (
            isinstance(uid, str)
            and reason in ("stop", "length")
            and step.rollout_log_probs is not None
        ):
            spans = tuple((s.version, s.start, s.end) for s in step.version_spans)
            call = Call(
                uid=uid,
                created=note.created,
                completed=completed_at(step.metadata.get("timing"), note.created),
                retry=note.retry,
                body=note.body,
                is_retry=note.is_retry,
                delivered=step.step_index in extended,
                is_unseen=step.metadata.get(UNSEEN) is True,
                n_forced=note.n_forced,
                turn=turn,
                finish_reason=reason,
                spans=spans or ((step.policy_version, 0, len(step.response_ids)),),
                log_probs=np.array(step.rollout_log_probs),
            )
            found.append(call)
    return found

"""This module reads and checks what an engine answers to `/generate` so that every id, log-prob and
weight version that reaches a Step is one that the engine sampled.

    bytes ──► EngineAnswer (types) ──► Part (one request's share) ──► a whole Part ──► Generation

It checks that ids are of the vocabulary and no more than asked for, that log-probs are numbers <= 0
of just these ids, and that version spans cover them without a gap. An engine that sends no
`weight_versions` still says with every event which version it has; spans then follow the events,
and tokens between two that differ get the older version::

    asked at 3 ──► event: 2 tokens, "3" ──► 5 tokens, "4" ──► 9 tokens, "4"
                         3 3                3 3 3             4 4 4 4

An answer that was not streamed has one event. It does not own requests (`client.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np

from stepwell.backends.engines.client import is_canary, version_number
from stepwell.datapool.types import LogProbs, TokenIds, VersionSpan
from stepwell.gateway.errors import EngineError, RequestError

log = logging.getLogger(__name__)
T = TypeVar("T")

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probs, best first."""
OnTokens: TypeAlias = Callable[
    [Sequence[int], Sequence[float], Sequence[TopLogProbs], int | None], None
]
"""Called with new ids, their log-probs, their alternatives (empty unless asked for), and the weight
version that the engine has now (None: it does not say)."""

MOST_TOKENS = 2**31
LEAST_LOG_PROB = -3e38
"""What float32 holds."""
_RETRIED = frozenset({429, 502, 503, 504})
_ADDRESSES = re.compile(
    r"\w+://[^\s\"']+|(?<![\w/])(?:/[\w.@+-]+){2,}|\b\d+(?:\.\d+){3}(?::\d+)?\b"
)
"""URLs, files and IP addresses in an engine's own words."""
_EVENT_END = re.compile(rb"\r?\n\r?\n")
"""An empty line ends an event; servers end lines in either way."""
_VERSION_FIELD = re.compile(rb'"weight_version"\s*:\s*(?:"[^"]*"|[^\s,}]+)')
"""No text of a reply matches: its quotation marks are escaped."""


class LostError(Exception):
    """A request found no engine, or its engine did not answer to the end: it may be made again."""


class BusyError(LostError):
    """The engine answered that it cannot, for the moment."""


class Finish(msgspec.Struct):
    """Why an answer ended: `type` is "stop", "length" or "abort"."""

    type: str
    matched: int | str | None = None
    status_code: int | None = None
    message: Any = None


class _Span(msgspec.Struct):
    version: Any
    start: int
    end: int


_Entry: TypeAlias = tuple[float, int, Any]
"""Log-prob, id and text of a token."""


class _Meta(msgspec.Struct):
    finish_reason: Finish | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: Any = None
    """What the engine has now."""
    weight_versions: list[_Span] | None = None
    """What sampled each token, once it has ended."""
    output_token_logprobs: list[_Entry] | None = None
    output_top_logprobs: list[list[_Entry] | None] | None = None


class EngineAnswer(msgspec.Struct):
    """An answer of SGLang's `/generate`, or an event of its stream."""

    output_ids: list[int] = msgspec.field(default_factory=list)
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None

    @property
    def begins(self) -> int:
        """Which of the request's tokens its first id is: 0, unless the engine was started to
        stream only what is new."""
        return max((self.meta_info.completion_tokens or 0) - len(self.output_ids), 0)


_decoder = msgspec.json.Decoder(EngineAnswer)


def read_answer(data: bytes) -> EngineAnswer:
    """
    Raises:
        EngineError: it is none of SGLang's, or says that the engine failed.
    """
    try:
        answer = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise EngineError(
            f"the engine answered in another shape than SGLang's /generate ({e}); is it SGLang?",
            f"{data[:200]!r}",
        ) from e
    if answer.error is not None:
        raise EngineError("the engine failed; see the gateway's log", f"{answer.error!s:.300}")
    return answer


@dataclass(slots=True)
class Sampling:
    """Sampling parameters as really used; `top_k` -1 is no limit."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    n_top_logprobs: int = 0
    """Alternatives returned per token."""
    constraint: tuple[str, str] | None = None
    """(kind, text): "json_schema", "regex", "ebnf" or "structural_tag"."""

    def wire(self, max_new_tokens: int) -> dict[str, Any]:
        """SGLang's `sampling_params`."""
        kind, text = self.constraint or ("", None)
        params = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "sampling_seed": self.seed,
            "min_p": self.min_p or None,
            kind: text,
        }
        return {name: value for name, value in params.items() if value is not None}


@dataclass(slots=True, eq=False)
class Generation:
    """What one call sampled. Arrays are read-only and equally long."""

    response_ids: TokenIds
    log_probs: LogProbs
    spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
    matched: int | str | None
    """Token id or stop string that ended a `stop`."""
    cached_tokens: int
    top_log_probs: tuple[TopLogProbs, ...] = ()
    """One per token if `Sampling.n_top_logprobs`, else empty."""

    def cut(self, n: int) -> Generation:
        """The first `n` tokens, as if a stop string had ended them."""
        return replace(
            self,
            response_ids=self.response_ids[:n],
            log_probs=self.log_probs[:n],
            top_log_probs=self.top_log_probs[:n],
            spans=tuple(
                VersionSpan(s.version, s.start, min(s.end, n)) for s in self.spans if s.start < n
            ),
            finish_reason="stop",
        )

    @property
    def policy_version(self) -> int:
        return min(s.version for s in self.spans)


@dataclass(slots=True)
class Part:
    """What one request sampled so far; a call may take several."""

    most: int = MOST_TOKENS
    """Tokens that the engine may return."""
    vocabulary: int = MOST_TOKENS
    """Ids lie in [0, this)."""
    version: int | None = None
    """What the engine had when it was asked; None: not known."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[TopLogProbs] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish: Finish | None = None
    cached_tokens: int = 0
    reported: int | None = None
    """What the engine said last that it has."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(version, its first token), by what the engine said with each event."""
    canary: bool = False
    """That is not committed."""
    is_certain: bool = True
    """Every event named `version`, so that it sampled all of this."""

    def certain_spans(self) -> list[VersionSpan] | None:
        """The spans of a part without an end; None: they are not known."""
        if self.version is None or not self.is_certain:
            return None
        return [VersionSpan(self.version, 0, len(self.ids))]

    def add(self, part: Part) -> None:
        """Go on from what a further request sampled."""
        start = len(self.ids)
        if not start:
            self.cached_tokens = part.cached_tokens
        self.ids += part.ids
        self.log_probs += part.log_probs
        self.tops += part.tops
        for s in part.spans:
            begin = start + s.start
            if self.spans and self.spans[-1].version == s.version:
                begin = self.spans.pop().start
            self.spans.append(VersionSpan(s.version, begin, start + s.end))

    def generation(self, finish: Finish | None) -> Generation:
        """The whole call, as it ended.

        Raises:
            EngineError: without a token, or in another way than `stop` and `length`.
        """
        if not self.ids:
            raise EngineError("the engine returned no token")
        if finish is None or finish.type not in ("stop", "length"):
            log.warning("an engine finished with %.200r", finish)
            raise EngineError("the engine's answer ended with neither stop nor length")
        ids, log_probs = np.asarray(self.ids, np.int32), np.asarray(self.log_probs, np.float32)
        ids.flags.writeable = log_probs.flags.writeable = False
        return Generation(
            response_ids=ids,
            log_probs=log_probs,
            spans=tuple(self.spans),
            finish_reason="stop" if finish.type == "stop" else "length",
            matched=finish.matched,
            cached_tokens=self.cached_tokens,
            top_log_probs=tuple(self.tops),
        )

    def take(self, answer: EngineAnswer, *, is_event: bool = False) -> None:
        """Bring this up to date with a whole answer, or with an event of a stream, which has all
        tokens so far or those from `answer.begins` on.

        Raises:
            EngineError: the engine cannot have sampled this.
            RequestError, BusyError, EngineError: it refuses the call.
        """
        meta, finish = answer.meta_info, answer.meta_info.finish_reason
        if finish is not None and finish.type == "abort" and finish.status_code:
            refuse(finish.status_code, "aborted the call", f"{finish.message!s:.300}")
        known = len(self.ids) - (answer.begins if is_event else 0)
        if known < 0:
            raise EngineError(f"the engine's stream leaves out {-known} tokens")
        new = answer.output_ids[known:]
        self._check_ids(new)
        if (n := len(self.ids) + len(new)) > self.most:
            raise EngineError(f"the engine returned {n} tokens for max_new_tokens {self.most}")
        self.ids += new
        self._note_version(meta.weight_version, n - len(new))
        entries = self._of_new(meta.output_token_logprobs, len(new))
        if [e[1] for e in entries] != new:
            raise EngineError(
                "the engine returned log-probs of other tokens than output_ids; is return_logprob "
                "honoured?"
            )
        self.log_probs += _log_probs(entries)
        if meta.output_top_logprobs:
            tops = [top or [] for top in self._of_new(meta.output_top_logprobs, len(new))]
            if len(tops) != len(new):
                raise EngineError(f"the engine returned {len(tops)} top log-probs of {n} tokens")
            for top in tops:
                self._check_ids(ids := [e[1] for e in top])
                self.tops.append(tuple(zip(ids, _log_probs(top), strict=True)))
        if finish is not None:
            self.finish = finish
            self.cached_tokens = meta.cached_tokens or 0
            self.spans = self._whole_spans(meta) if n else []

    def _of_new(self, entries: list[T] | None, n: int) -> list[T]:
        """Those of the last `n` tokens: an event has those of all tokens or of the new ones."""
        entries = entries or []
        return entries[len(entries) - n :] if len(entries) in (n, len(self.ids)) else entries

    def _check_ids(self, ids: list[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            bad = next(i for i in ids if not 0 <= i < self.vocabulary)
            raise EngineError(
                f"the engine returned a token id that is no integer in [0, {self.vocabulary}), the "
                "vocabulary of gateway.tokenizer_path; does it serve that model?",
                f"It is {bad!r:.200}.",
            )

    def _note_version(self, reported: Any, start: int) -> None:
        """What was sampled between two moments at which the engine had one version is that
        version's. Around a change, an event does not tell which of its tokens are whose.

        Args:
            start: tokens before this event.
        """
        before = self.version if self.reported is None else self.reported
        try:
            self.reported = version_number(reported)
        except ValueError:
            self.reported = None
        self.canary = is_canary(reported)
        if self.reported is None or self.reported != self.version:
            self.is_certain = False
        if self.reported is None:
            return
        older = self.reported if before is None else min(before, self.reported)
        if not self.changes or self.changes[-1][0] != older:
            self.changes.append((older, start if self.changes else 0))

    def _whole_spans(self, meta: _Meta) -> list[VersionSpan]:
        reported, n = meta.weight_versions, len(self.ids)
        try:
            if reported:
                spans = [VersionSpan(version_number(s.version), s.start, s.end) for s in reported]
            else:
                version_number(meta.weight_version)
                ends = [*(start for _, start in self.changes[1:]), n]
                spans = [VersionSpan(v, s, e) for (v, s), e in zip(self.changes, ends, strict=True)]
        except ValueError as e:
            if reported is None and meta.weight_version is None:
                raise EngineError(
                    "the engine's answer has no weight_version: its server is too old, or not "
                    "SGLang; see `stepwell doctor --engine URL`"
                ) from e
            raise EngineError(
                "the engine's weight_version is no number; publish decimal integers ('0', '1', …)",
                f"but {reported or meta.weight_version!r:.200}",
            ) from e
        spans = [s for s in spans if s.end > s.start]
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), n]:
            raise EngineError(
                f"the engine's weight_versions do not cover its {n} tokens",
                f"but {reported!r:.200}",
            )
        return spans


def version_field(event: bytes) -> bytes:
    """The bytes of an event that name the engine's version; empty if it names none."""
    found = _VERSION_FIELD.search(event)
    return b"" if found is None else found[0]


async def events(body: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Payloads of the SSE events that arrived together."""
    buffer = b""
    async for data in body:
        *whole, buffer = _EVENT_END.split(buffer + data)
        payloads = [e[5:].strip() for e in whole if e.startswith(b"data:")]
        payloads = [p for p in payloads if p != b"[DONE]"]
        if payloads:
            yield payloads


def refuse(status: int, what: str, why: str) -> NoReturn:
    """
    Args:
        why: the engine's own words: for the log, and for the agent that sent what it refuses.
    """
    if status == 400:
        words = _ADDRESSES.sub("…", why)
        raise RequestError(f"the engine refuses the request: {what}: {words}", None)
    if status in _RETRIED:
        raise BusyError(f"the engine {what}: {why}")
    raise EngineError(f"the engine {what}; see the gateway's log", why)


def _log_probs(entries: list[_Entry]) -> list[float]:
    """Numbers as a Step takes them."""
    log_probs = [e[0] for e in entries]
    if log_probs and not LEAST_LOG_PROB < min(log_probs) <= max(log_probs) <= 1e-3:
        raise EngineError(
            "the engine returned a log-prob that is no number <= 0", f"{log_probs!r:.200}"
        )
    return log_probs

"""This module joins and checks what engines sample for one call so that every id, log-prob and
weight version that reaches a Step is one that an engine sampled.

    Output, Output, … ──► Part (one request's share) ──► a whole Part ──► Generation

It checks that ids are of the vocabulary and no more than asked for, that log-probs are numbers
<= 0, and that version spans cover the tokens without a gap. An engine that does not say which
version sampled which token still says with every output which one it has; spans then follow the
outputs, and tokens between two that differ get the older version::

    asked at 3 ──► output: 2 tokens, 3 ──► 5 tokens, 4 ──► 9 tokens, 4
                       3 3                 3 3 3           4 4 4 4

An answer that was not streamed is one output. It does not own requests (`sampler.py`), or how an
engine words its answers (`backends/engines/`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from struct import pack
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from stepwell.backends.engines.api import Output, TopLogProbs
from stepwell.datapool.types import LogProbs, TokenIds, VersionSpan
from stepwell.gateway.errors import EngineError

log = logging.getLogger(__name__)

OnTokens: TypeAlias = Callable[
    [Sequence[int], Sequence[float], Sequence[TopLogProbs], int | None], None
]
"""Called with new ids, their log-probs, their alternatives (empty unless asked for), and the weight
version that the engine has now (None: it does not say)."""

MOST_TOKENS = 2**31
LEAST_LOG_PROB, MOST_LOG_PROB = -3e38, 1e-3
"""Bounds of a log-prob: what float32 holds, and 0 but for rounding."""


class Generation(msgspec.Struct, eq=False):
    """Tokens that one call sampled, with their log-probs. Arrays are read-only and equally long."""

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
        return msgspec.structs.replace(
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
        spans = self.spans
        return spans[0].version if len(spans) == 1 else min(s.version for s in spans)


class Part(msgspec.Struct, eq=False):
    """Tokens that one request to the engine sampled so far; a call may take several requests."""

    most: int = MOST_TOKENS
    """Tokens that the engine may return."""
    vocabulary: int = MOST_TOKENS
    """Ids lie in [0, this)."""
    masked: frozenset[int] = frozenset()
    """Ids that may not be sampled."""
    version: int | None = None
    """Weight version that the engine had when it was asked; None: not known."""
    ids: list[int] = msgspec.field(default_factory=list)
    log_probs: list[float] = msgspec.field(default_factory=list)
    tops: list[TopLogProbs] = msgspec.field(default_factory=list)
    spans: list[VersionSpan] = msgspec.field(default_factory=list)
    finish: str | None = None
    """Why it ended; None: it did not."""
    matched: int | str | None = None
    cached_tokens: int = 0
    reported: int | None = None
    """Weight version in the engine's last output; None: it did not say."""
    changes: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(version, its first token), by what the engine said with each output."""
    canary: bool = False
    """The version in the last output is not committed."""
    is_certain: bool = True
    """Every output named `version`, so that it sampled all of this."""

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
        self.matched = part.matched
        for s in part.spans:
            begin = start + s.start
            if self.spans and self.spans[-1].version == s.version:
                begin = self.spans.pop().start
            self.spans.append(VersionSpan(s.version, begin, start + s.end))

    def generation(self, finish: str | None) -> Generation:
        """The whole call, as it ended.

        Raises:
            EngineError: without a token, or in another way than `stop` and `length`.
        """
        ids = self.ids
        if not ids:
            raise EngineError("the engine returned no token")
        if finish not in ("stop", "length"):
            log.warning("an engine finished with %.200r", finish)
            raise EngineError("the engine's answer ended with neither stop nor length")
        return Generation(
            # Through bytes: NumPy takes twice as long to read a list, and to write it again.
            np.frombuffer(pack(f"{len(ids)}i", *ids), np.int32),
            np.frombuffer(pack(f"{len(ids)}f", *self.log_probs), np.float32),
            tuple(self.spans),
            "stop" if finish == "stop" else "length",
            self.matched,
            self.cached_tokens,
            tuple(self.tops),
        )

    def take(self, output: Output) -> None:
        """Add what was sampled since the output before.

        Raises:
            EngineError: the engine cannot have sampled this.
        """
        ids, log_probs, before = output.ids, output.log_probs, len(self.ids)
        if (n := before + len(ids)) > self.most:
            raise EngineError(f"the engine returned {n} tokens for max_new_tokens {self.most}")
        self._check(ids, log_probs)
        self.ids += ids
        self.log_probs += log_probs
        for top in output.top_log_probs:
            self._check([i for i, _ in top], [p for _, p in top])
            self.tops.append(top)
        self.canary, version, finish = output.is_canary, output.version, output.finish
        if finish is not None:
            self.finish, self.matched = finish, output.matched
            self.cached_tokens = output.cached_tokens
            is_whole = not before and n > 0 and output.spans is None
            if is_whole and version is not None and version == self.version:
                # Sampled by the version that the engine had when it was asked.
                self.reported, self.spans = version, [VersionSpan(version, 0, n)]
                return
        if not self.changes or not version == self.reported == self.changes[-1][0]:
            self._note_version(version, before)
        if finish is not None:
            if output.spans is None and n and len(self.changes) == 1:
                self.spans = [VersionSpan(self.changes[0][0], 0, n)]
            else:
                self.spans = self._whole_spans(output) if n else []

    def _check(self, ids: list[int], log_probs: list[float]) -> None:
        if not ids:
            return
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            bad = next(i for i in ids if not 0 <= i < self.vocabulary)
            raise EngineError(
                f"the engine returned a token id that is no integer in [0, {self.vocabulary}), the "
                "vocabulary of gateway.tokenizer_path; does it serve that model?",
                f"It is {bad!r:.200}.",
            )
        if self.masked and not self.masked.isdisjoint(ids):
            raise EngineError(
                "the engine sampled a vision token, of which the model would take the next one for "
                "a picture; does it mask logit_bias?",
                f"It is one of {sorted(self.masked)}.",
            )
        # A NaN compares with nothing, and max may pass over it: the sum does not, and is as low as
        # the lowest.
        if not (max(log_probs) <= MOST_LOG_PROB and LEAST_LOG_PROB < sum(log_probs) <= 1):
            raise EngineError(
                "the engine returned a log-prob that is no number <= 0", f"{log_probs!r:.200}"
            )

    def _note_version(self, reported: int | None, start: int) -> None:
        """Note a weight version that the output before did not have. What was sampled between two
        moments at which the engine had one version is that version's. Around a change, an output
        does not tell which of its tokens are whose.

        Args:
            start: tokens before this output.
        """
        before = self.version if self.reported is None else self.reported
        self.reported = reported
        if reported is None or reported != self.version:
            self.is_certain = False
        if reported is None:
            return
        older = reported if before is None else min(before, reported)
        if not self.changes or self.changes[-1][0] != older:
            self.changes.append((older, start if self.changes else 0))

    def _whole_spans(self, output: Output) -> list[VersionSpan]:
        n = len(self.ids)
        if output.spans is None:
            ends = [*(start for _, start in self.changes[1:]), n]
            spans = [VersionSpan(v, s, e) for (v, s), e in zip(self.changes, ends, strict=True)]
        else:
            spans = [*output.spans]
        spans = [s for s in spans if s.end > s.start]
        if [0, *(s.end for s in spans)] != [*(s.start for s in spans), n]:
            raise EngineError(
                f"the engine's weight_versions do not cover its {n} tokens",
                f"but {output.spans!r:.200}",
            )
        return spans

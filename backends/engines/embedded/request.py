"""One generation request: what was asked, what has been sampled so far, how it ended.

Life cycle; the scheduler moves a request, the HTTP layer only reads it::

    waiting ──admit──► running ──► finished   stop | length | abort
       ▲                  │
       └──── retract ─────┘   tokens kept, KV dropped; admission recomputes it under new weights

Worked example: 5 tokens sampled at version "3", paused with retract, weights "4" loaded,
continued, 2 more tokens: `output_ids` has 7 ids, `num_retractions` is 1 and `spans` is
`[("3", 0, 5), ("4", 5, 7)]`.

Owns the validation of SGLang's `sampling_params`. Does not sample, schedule or format JSON.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TopLogProbs = list[tuple[float, int]]

_GREEDY_EPS = 1e-6

# SGLang accepts these; the embedded engine does not compute them. A neutral value is let through.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ""),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "spaces_between_special_tokens": (True, None),
}
_KNOWN = frozenset(
    {
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "skip_special_tokens",
        "no_stop_trim",
        "sampling_seed",
        "stream_interval",
        "n",
    }
)


class InvalidRequestError(ValueError):
    """The request cannot be served; answered with HTTP 400 and SGLang's error body."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """SGLang's sampling parameters, validated. Temperature 0 is greedy and scores at 1."""

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """Also ignores `stop_token_ids`, as SGLang does."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    stream_interval: int | None = None
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Sampling is restricted to part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None) -> SamplingParams:
        """Validate a request's `sampling_params`.

        Raises:
            InvalidRequestError: an unknown field, a field this engine does not implement set to
                something other than its neutral value, or a value out of bounds.
        """
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise InvalidRequestError(f"sampling_params is {raw!r:.80}; pass an object")
        values: dict[str, Any] = {}
        for name, value in raw.items():
            if name in _KNOWN:
                if value is not None or name == "max_new_tokens":
                    values[name] = value
            elif name in _UNSUPPORTED:
                if value not in _UNSUPPORTED[name]:
                    raise InvalidRequestError(
                        f"sampling_params.{name}={value!r:.80} is not supported by the embedded "
                        "engine; leave it out, or use SGLang"
                    )
            else:
                raise InvalidRequestError(
                    f"sampling_params.{name} is unknown; known are {', '.join(sorted(_KNOWN))}"
                )
        return cls._checked(values)

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> SamplingParams:
        def number(name: str, ok: Callable[[float], bool], wanted: str) -> None:
            if name in values:
                value = values[name]
                if isinstance(value, bool) or not isinstance(value, int | float) or not ok(value):
                    raise InvalidRequestError(f"{name} must be {wanted}, got {value!r:.80}.")

        def integer(name: str, ok: Callable[[int], bool], wanted: str) -> None:
            if name in values and not (name == "max_new_tokens" and values[name] is None):
                value = values[name]
                if isinstance(value, bool) or not isinstance(value, int) or not ok(value):
                    raise InvalidRequestError(f"{name} must be {wanted}, got {value!r:.80}.")

        number("temperature", lambda v: math.isfinite(v) and v >= 0, "a non-negative finite number")
        number("top_p", lambda v: 0 < v <= 1, "in (0, 1]")
        number("min_p", lambda v: 0 <= v <= 1, "in [0, 1]")
        integer("top_k", lambda v: v == -1 or v >= 1, "-1 (disable) or at least 1")
        integer("max_new_tokens", lambda v: v >= 0, "at least 0")
        integer("n", lambda v: v >= 1, "at least 1")
        integer("stream_interval", lambda v: v >= 1, "at least 1")
        integer("sampling_seed", lambda v: True, "an integer")
        for name in ("ignore_eos", "skip_special_tokens", "no_stop_trim"):
            if name in values and not isinstance(values[name], bool):
                raise InvalidRequestError(f"{name} must be true or false, got {values[name]!r:.80}")
        stop = values.get("stop", ())
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, list | tuple) or not all(isinstance(s, str) and s for s in stop):
            raise InvalidRequestError(
                f"stop must be a non-empty string or a list, got {stop!r:.80}"
            )
        ids = values.get("stop_token_ids", ())
        if not isinstance(ids, list | tuple) or not all(
            isinstance(i, int) and not isinstance(i, bool) for i in ids
        ):
            raise InvalidRequestError(f"stop_token_ids must be a list of ids, got {ids!r:.80}")
        values["stop"], values["stop_token_ids"] = tuple(stop), frozenset(ids)
        if values.get("temperature", 1.0) < _GREEDY_EPS:
            values["temperature"], values["top_k"] = 1.0, 1
        return cls(**values)


@dataclass(slots=True)
class Span:
    """Output tokens `[start, end)` were sampled under weight `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Request:
    """A request in flight. Written by the scheduler's thread only; another thread may read it:
    the lists only grow, log-probs before ids, and `finish_reason` is set last."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position to score; -1 scores none."""
    top_logprobs_num: int = 0
    stream: bool = False
    stream_interval: int = 1
    """Tokens between two streamed chunks; the first and the last are always sent at once."""
    on_update: Callable[[], None] | None = None
    """Called by the event loop when there is something new to read."""
    received: float = field(default_factory=time.perf_counter)

    output_ids: list[int] = field(default_factory=list)
    output_log_probs: list[float] = field(default_factory=list)
    output_top: list[TopLogProbs] = field(default_factory=list)
    input_log_probs: list[float | None] = field(default_factory=list)
    input_top: list[TopLogProbs | None] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    num_retractions: int = 0
    cached_tokens: int = 0
    limit: int = 0
    """Tokens it may generate: `max_new_tokens` within the context length. Set on submit."""
    row: int = -1
    """Cache row while running, else -1."""
    announced: int = -1
    """Output length at the last announcement; -1 before the first."""
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.params.sampling_seed is not None:
            self.generator = torch.Generator()
            self.generator.manual_seed(self.params.sampling_seed & (2**63 - 1))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Prompt plus output tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def scores_prompt(self) -> bool:
        """Prompt log-probs are wanted and not yet computed."""
        return self.return_logprob and self.logprob_start_len >= 0 and not self.input_log_probs

    def token_ids(self) -> npt.NDArray[np.int32]:
        return np.asarray(self.prompt_ids + self.output_ids, dtype=np.int32)

    def append(self, token: int, log_prob: float, top: TopLogProbs, version: str) -> None:
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end += 1
        else:
            n = len(self.output_ids)
            self.spans.append(Span(version, n, n + 1))
        self.output_log_probs.append(log_prob)
        if self.top_logprobs_num:
            self.output_top.append(top)
        self.output_ids.append(token)

    def abort(self, message: str = "Aborted") -> None:
        self.finish_reason = {
            "type": "abort",
            "message": message,
            "status_code": None,
            "err_type": None,
        }

    def due(self) -> bool:
        """There is news that the client should see now."""
        if self.finished:
            return True
        if not self.stream or not self.output_ids:
            return False
        return self.announced < 1 or len(self.output_ids) - self.announced >= self.stream_interval

"""One generation request: what was asked, what has been sampled so far, how it ended.

Life cycle; the scheduler moves a request, the HTTP layer only reads it::

    waiting ──admit──► running ──► finished   stop | length | abort
       ▲                  │
       └──── retract ─────┘   tokens kept, KV dropped; admission recomputes it under new weights

Worked example: 5 tokens sampled at version "3", paused with retract, weights "4" loaded,
continued, 2 more tokens: `output_ids` has 7 ids, `num_retractions` is 1 and `spans` is
`[("3", 0, 5), ("4", 5, 7)]`.

Owns the validation of `/generate`'s body. Does not sample, schedule or format JSON.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from stepwell.backends.engines.embedded.vision import Vision

TopLogProbs = list[tuple[float, int]]

_GREEDY_EPS = 1e-6

_NEUTRAL = {"repetition_penalty": 1, "n": 1, "spaces_between_special_tokens": True}
"""SGLang's other sampling parameters where they change nothing; so do null, 0 and empty values."""
_NO_FIELDS = (
    "text",
    "input_embeds",
    "video_data",
    "audio_data",
    "token_ids_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_entropy",
    "return_sampling_mask",
    "return_text_in_logprobs",
    "session_params",
    "lora_id",
    "custom_logit_processor",
    "max_thinking_tokens",
)
"""Fields that would change what is generated or returned, and are refused; other unknown fields are
ignored."""


class InvalidRequestError(ValueError):
    """The request cannot be served; answered with HTTP 400 and SGLang's error body."""


class SamplingParams(BaseModel):
    """SGLang's sampling parameters. Temperature 0 is greedy and scores at 1."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: int | None = Field(128, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    """-1 keeps the whole vocabulary."""
    min_p: float = Field(0.0, ge=0, le=1)
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    """Also ignores `stop_token_ids`, as SGLang does."""
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    stream_interval: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = cls.model_fields
        values = {
            name: value
            for name, value in values.items()
            if (value is not None or name == "max_new_tokens")
            and (name in known or (value and value != _NEUTRAL.get(name)))
        }
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        if values.get("top_k") == 0:
            raise ValueError("top_k is 0; it is -1 (disabled) or at least 1")
        return values

    @model_validator(mode="after")
    def _greedy(self) -> SamplingParams:
        if self.temperature < _GREEDY_EPS:
            self.temperature, self.top_k = 1.0, 1
        return self

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Sampling is restricted to part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class GenerateBody(BaseModel):
    """The body of `/generate`: one prompt, as token ids."""

    model_config = ConfigDict(strict=True)

    input_ids: list[int] | None = None
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    rid: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0)
    stream: bool = False
    lora_path: str | None = None
    image_data: list[str] = Field(default_factory=list)
    """For each placeholder in `input_ids`, which has one a picture: a base64 PNG, or `sha256:` and
    the digest of one that was sent before."""
    extra_key: str = ""
    """Requests share prefixes and pictures with those of the same key only."""

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        refused = [name for name in _NO_FIELDS if values.get(name)]
        if values.get("logprob_start_len") not in (None, -1):
            refused.append("logprob_start_len")
        if refused:
            raise ValueError(f"not supported by the embedded engine: {refused}; use SGLang")
        values = {k: v for k, v in values.items() if v is not None}
        if isinstance(values.get("image_data"), str):
            values["image_data"] = [values["image_data"]]
        return values

    @classmethod
    def parse(cls, content: bytes) -> GenerateBody:
        """
        Raises:
            InvalidRequestError: a field is missing, malformed, or not supported.
        """
        try:
            body = cls.model_validate_json(content)
        except ValidationError as e:
            raise InvalidRequestError(words(e.errors())) from e
        if body.input_ids is None:
            raise InvalidRequestError("Either text, input_ids or input_embeds should be provided.")
        return body

    def request(self, stream_interval: int, vision: Vision | None = None) -> Request:
        key = self.extra_key
        return Request(
            rid=self.rid or uuid.uuid4().hex,
            prompt_ids=(self.input_ids or []) if vision is None else vision.prompt_ids,
            vision=vision,
            salt=_salt(key) if key else 0,
            adapter=self.lora_path,
            params=self.sampling_params,
            return_logprob=self.return_logprob,
            top_logprobs_num=self.top_logprobs_num,
            stream=self.stream,
            stream_interval=self.sampling_params.stream_interval or stream_interval,
        )


def _salt(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)


def words(errors: Any) -> str:
    """Text of pydantic's errors, with the names of the fields."""
    return "; ".join(f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in errors)


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
    vision: Vision | None = None
    """The prompt's pictures."""
    salt: int = 0
    """Hash of `extra_key`; the prefix cache shares nothing between two."""
    adapter: str | None = None
    """Adapter that has to be loaded when it begins to run; None: whatever is."""
    return_logprob: bool = False
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

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Prompt plus output tokens."""
        return len(self.prompt_ids) + len(self.output_ids)

    def token_ids(self) -> npt.NDArray[Any]:
        """Prompt and output as the prefix cache compares them."""
        if self.vision is None:
            return np.asarray(self.prompt_ids + self.output_ids, dtype=np.int32)
        return np.concatenate([self.vision.shadow, np.asarray(self.output_ids, dtype=np.int64)])

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

    def abort(self, message: str = "Aborted", status: int | None = None) -> None:
        """End it. With a `status` it is refused, as a request that cannot be served."""
        self.finish_reason = {
            "type": "abort",
            "message": message,
            "status_code": status,
            "err_type": None,
        }

    def due(self) -> bool:
        """There is news that the client should see now."""
        if self.finished:
            return True
        if not self.stream or not self.output_ids:
            return False
        return self.announced < 1 or len(self.output_ids) - self.announced >= self.stream_interval

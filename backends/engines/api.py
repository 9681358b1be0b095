"""The seam between inference engines and all that use them: what Stepwell asks of an engine.

    GenerateRequest ──► Engine.sample ──► Output, Output, …    token ids in, sampled token ids out
    Engine.pause ─► update_weights_from_disk ─► continue_      a publication
    Engine.check, state, max_model_len                         how it is, and what fits

The gateway samples over several engines with these methods (`gateway/engine/`): it goes on after an
abort, and on another engine after a loss. Publications use the others (`weights/transaction.py`).
`client.py` implements all of them for SGLang's API, which the embedded engine speaks as well, and
more: other ways to send weights, and memory that is lent. An engine with another API is another
class with these methods; `gateway` and `weights` do not see which one they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from stepwell.backends.config import PauseMode
from stepwell.datapool.types import CANARY, TokenIds, VersionSpan

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probs, best first."""


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


class GenerateRequest(NamedTuple):
    """One prompt to sample from."""

    rid: str
    """Name for `Engine.abort`."""
    input_ids: TokenIds
    sampling: Sampling
    max_new_tokens: int
    """At most what `sampling` says: less if some of the response is in `input_ids` already."""
    stream: bool = False
    """Outputs come as tokens are sampled, otherwise one comes at the end."""
    adapter: str | None = None
    pieces: Sequence[TokenIds] = ()
    """Arrays that `input_ids` is made of, if later requests have the same objects: what is made of
    them for the wire may be kept."""


class Output(NamedTuple):
    """Tokens of one request that were sampled since the output before."""

    ids: list[int]
    log_probs: list[float]
    """One per id."""
    top_log_probs: Sequence[TopLogProbs] = ()
    """One per id if `Sampling.n_top_logprobs`, else empty."""
    version: int | None = None
    """Weight version that the engine has now; None: it does not say."""
    is_canary: bool = False
    """True if `version` is on trial and not committed (`publish.canary_share`)."""
    finish: str | None = None
    """Reason of the end, in the last output: "stop", "length", or "abort", after which another
    request may go on from what was sampled."""
    matched: int | str | None = None
    """Token id or stop string that ended a `stop`."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its cache; in the last output."""
    spans: Sequence[VersionSpan] | None = None
    """Versions that sampled the request's tokens, in the last output; None: the engine does not
    say, and `version` of each output has to do."""


OnOutput: TypeAlias = Callable[[Output], None]
"""Callback that takes each output, in the order in which they were sampled, outside any task. What
it raises ends the request and comes out of `Engine.sample`."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Answer to a weight update. A real SGLang says `success=False` after an update without a
    pause although the weights are in force; only its version tells."""

    success: bool
    message: str


class EngineState(NamedTuple):
    """An engine as it answers now."""

    version: int | None
    """Version of its weights; None: it does not say, or they are of another publisher."""
    is_canary: bool = False
    """True if `version` is on trial and not committed (`publish.canary_share`)."""


class Engine(Protocol):
    """One engine, asked over its network address.

    Raises (every method):
        EngineUnavailableError: nobody answers there, or the connection broke.
        EngineTimeoutError: no answer in time.
        EngineRequestError: the engine refused (4xx).
        EngineInternalError: the engine failed (5xx), or its answer makes no sense.
    """

    url: str

    async def sample(self, request: GenerateRequest, on_output: OnOutput) -> None:
        """Sample a response; returns behind the output with `finish`. Waits without limit: a paused
        engine answers when it is continued. When this is cancelled nobody reads the answer, which
        an engine may not notice at once: `abort` tells it."""

    async def abort(self, rid: str | None = None) -> None:
        """End a request with what it has, or all of them; unknown ones are no error."""

    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        """Sample nothing until `continue_`. What runs ends ("abort"), or waits with its cache
        ("in_place") or without it ("retract")."""

    async def continue_(self) -> None: ...

    async def update_weights_from_disk(
        self, path: str, version: int | str, *, flush_cache: bool = True, timeout_s: float = ...
    ) -> UpdateResult:
        """Load weights from a Hugging Face directory that the engine's machine can read; they are
        named `version` from then on."""

    async def check(self) -> None:
        """Raise unless the engine can generate."""

    async def state(self) -> EngineState:
        """Return the version of its weights; answered also while it is paused."""

    async def weight_version(self) -> int:
        """Return the version that `state` has.

        Raises:
            ValueError: it has none that Stepwell published.
        """

    async def max_model_len(self) -> int:
        """Tokens that fit, prompt and response."""

    async def close(self) -> None: ...


def version_number(weight_version: Any) -> int:
    """Stepwell publishes decimal integers, a canary's with a suffix; SGLang's initial "default" is
    version 0.

    Raises:
        ValueError: another version scheme; somebody else publishes to this engine.
    """
    if weight_version == "default":
        return 0
    digits = weight_version.removesuffix(CANARY) if isinstance(weight_version, str) else ""
    number = int(digits) if digits.isdecimal() else weight_version
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(
            f"weight_version is {weight_version!r:.80}; Stepwell publishes decimal integers. "
            "Does something else publish weights to this engine?"
        )
    return number


def is_canary(weight_version: Any) -> bool:
    """Return true if an engine has a version that is not committed (`publish.canary_share`)."""
    return isinstance(weight_version, str) and weight_version.endswith(CANARY)

"""Steps of a sequence that was sampled in pieces, as a generate function of slime returns it.

    tokens        P P P a a a t t b b        response_length 7
    loss_mask           1 1 1 0 0 1 1
    ──►  Step 0: prompt P P P, response a a a       Step 1: prompt P P P a a a t t, response b b

Each run of ones is a Step, and all that came before it is its prompt. What stands behind the last
sampled token is left out: nothing was conditioned on it.

Log-probs are the sample's own, or those of the calls whose responses stand in the sequence; a Step
of which neither is known has none. Versions are those of the calls, else the sample's
`weight_versions`: one for each Step, or the oldest. Pure. Does not own: running the function
(`generate.py`), the calls (`engine_address.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.backends.engines.api import version_number
from stepwell.datapool.types import FinishReason, Step, TokenIds, VersionSpan
from stepwell.trainer.errors import RolloutError


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call of a rollout, and the tokens that the engine sampled for it."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    log_probs: Sequence[float]
    """One per token of `response_ids`."""
    spans: Sequence[VersionSpan]
    """Cover `response_ids`."""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    """Temperature, top_p and top_k as used."""


def steps_of(
    sample: Any, calls: Sequence[EngineCall], identity: Mapping[str, str], first_index: int = 0
) -> list[Step]:
    """The Steps of `sample`, a slime Sample; none if it has no trained token.

    Args:
        calls: of its rollout, in their order.
        identity: `trajectory_uid` and `prompt_uid`.
        first_index: `step_index` of the first.

    Raises:
        RolloutError: fields of the sample contradict each other, or say of no version.
        InvalidStepError: ids or log-probs are none.
    """
    ids = _ids(sample.tokens)
    n = sample.response_length
    if not isinstance(n, int) or not 0 <= n < max(len(ids), 1):
        raise RolloutError(
            f"sample.response_length is {n!r} for {len(ids)} tokens; set tokens to prompt and "
            "response, and response_length to the tokens of the response"
        )
    mask = np.ones(n, np.int64)
    if sample.loss_mask is not None:
        mask = np.asarray(_column(sample, "loss_mask", n), np.int64)
    if sample.remove_sample:
        mask[:] = 0
    own = None
    if sample.rollout_log_probs is not None:
        own = np.asarray(_column(sample, "rollout_log_probs", n), np.float32)
    begin = len(ids) - n
    found = _Found(ids, begin, mask, calls)
    edges = np.flatnonzero(np.diff(mask != 0, prepend=False, append=False)).tolist()
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    ended: FinishReason = "length" if sample.status == type(sample).Status.TRUNCATED else "stop"
    steps: list[Step] = []
    for number, (start, end) in enumerate(runs):
        spans = found.spans(start, end)
        version = min(s.version for s in spans) if spans else None
        if version is None:
            version = _version(sample, calls, number, len(runs))
        params = found.sampling_params(start)
        log_probs = found.log_probs(start, end) if own is None else own[start:end]
        steps.append(
            Step(
                prompt_ids=ids[: begin + start],
                response_ids=ids[begin + start : begin + end],
                step_index=first_index + len(steps),
                policy_version=version,
                version_spans=spans if len(spans) > 1 else (),
                rollout_log_probs=log_probs,
                finish_reason=ended if end == edges[-1] else "stop",
                parent_index=first_index + len(steps) - 1 if steps else None,
                metadata={"sampling_params": dict(params)} if params else {},
                trajectory_uid=identity["trajectory_uid"],
                prompt_uid=identity["prompt_uid"],
            )
        )
    return steps


def _ids(tokens: Any) -> TokenIds:
    try:
        return np.asarray(_plain(tokens), np.int32)
    except (TypeError, ValueError, OverflowError) as e:
        raise RolloutError(
            f"sample.tokens is {tokens!r:.80}; set the token ids of prompt and response"
        ) from e


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _column(sample: Any, name: str, n: int) -> Any:
    values = _plain(getattr(sample, name))
    if len(values) != n:
        raise RolloutError(
            f"sample.{name} has {len(values)} values for a response_length of {n}; set one for "
            "each token of the response, or None"
        )
    return values


class _Found:
    """Log-probs and versions of a response, by position, from the calls whose whole responses stand
    in its trained part, each behind the one before. Version -1: no call accounts for the token."""

    def __init__(
        self, ids: TokenIds, begin: int, mask: npt.NDArray[Any], calls: Sequence[EngineCall]
    ) -> None:
        response = ids[begin:]
        self._versions = np.full(len(response), -1, np.int64)
        self._log_probs = np.zeros(len(response), np.float32)
        self._params: list[tuple[int, Mapping[str, Any]]] = []
        self._calls = calls
        cursor = 0
        for call in calls:
            sampled = np.asarray(call.response_ids, np.int32)
            at = _find(response, sampled, cursor, mask)
            if at is None:
                continue
            cursor = at + len(sampled)
            self._log_probs[at:cursor] = call.log_probs
            for span in call.spans:
                self._versions[at + span.start : at + span.end] = span.version
            self._params.append((at, call.sampling_params))

    def log_probs(self, start: int, end: int) -> npt.NDArray[Any] | None:
        """None: some tokens are of no call."""
        return self._log_probs[start:end] if self._versions[start:end].min() >= 0 else None

    def spans(self, start: int, end: int) -> tuple[VersionSpan, ...]:
        """Empty: some tokens are of no call."""
        if self._versions[start:end].min() < 0:
            return ()
        made, at = [], 0
        for version, run in groupby(self._versions[start:end].tolist()):
            n = len(list(run))
            made.append(VersionSpan(version, at, at + n))
            at += n
        return tuple(made)

    def sampling_params(self, start: int) -> Mapping[str, Any]:
        """Parameters of the last call that begins there or before; else of the first one."""
        before = [params for at, params in self._params if at <= start]
        if before:
            return before[-1]
        return self._calls[0].sampling_params if self._calls else {}


def _find(
    response: npt.NDArray[Any], sampled: npt.NDArray[Any], cursor: int, mask: npt.NDArray[Any]
) -> int | None:
    """Position of `sampled` in `response`, at `cursor` or behind it, where it is trained."""
    text, wanted = response.tobytes(), sampled.tobytes()
    at = text.find(wanted, cursor * 4)
    while at >= 0:
        where = at // 4
        if at % 4 == 0 and mask[where : where + len(sampled)].all():
            return where
        at = text.find(wanted, at + 1)
    return None


def _version(sample: Any, calls: Sequence[EngineCall], number: int, n_runs: int) -> int:
    """The version of a run of ones that no call accounts for: its own, where the sample names one
    for each; else the oldest that may have sampled it.

    Args:
        number: of the run, among `n_runs`.

    Raises:
        RolloutError: there is none.
    """
    try:
        versions = [version_number(version) for version in sample.weight_versions]
    except ValueError as e:
        raise RolloutError(f"sample.weight_versions: {e}") from e
    if len(versions) == n_runs:
        return versions[number]
    versions = versions or [span.version for call in calls for span in call.spans]
    if not versions:
        raise RolloutError(
            "no call was made to args.sglang_router_ip and args.sglang_router_port, and "
            "sample.weight_versions is empty: which policy version sampled the response is not "
            "known; call that address, or set weight_versions"
        )
    return min(versions)

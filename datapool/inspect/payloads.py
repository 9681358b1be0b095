"""What a listing shows of a step's payload: metadata and tokens, without importing what producers
use.

Owns the reading for people. Does not own the layout (`codec.py`), nor where payloads are kept.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from stepwell.datapool.codec import StoredStep
from stepwell.datapool.core.channel import Channel
from stepwell.datapool.core.records import TrajectoryRecord
from stepwell.datapool.types import FinishReason, LogProbs, TokenIds


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of a type that the pool does not load: it would import what producers use."""

    type_name: str


class Extra(NamedTuple):
    """What no index looks at."""

    metadata: dict[str, Any]
    finish_reason: FinishReason | None
    version_spans: tuple[tuple[int, int, int], ...]


class Tokens(NamedTuple):
    """Columns of a step, copied: a view would travel with all of its buffer."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    rollout_log_probs: LogProbs | None


def read_extra(channel: Channel, stored: StoredStep) -> tuple[Extra, int]:
    """And how many bytes that took."""
    payload = _payload(channel, stored)
    n_columns = stored.n_new + stored.n_response * (2 if stored.has_log_probs else 1)
    loaded = _Peek(io.BytesIO(memoryview(payload)[4 * n_columns :])).load()
    metadata, finish_reason, spans, *_ = loaded
    shown = {key: _shown(value) for key, value in metadata.items()}
    return Extra(shown, finish_reason, spans), len(payload)


def read_tokens(channel: Channel, record: TrajectoryRecord, index: int) -> tuple[Tokens, int]:
    """And how many bytes that took."""
    chain = [record.steps[i] for i in record.chain(index)]
    payloads = [_payload(channel, stored) for stored in chain]
    parts = [chain[-1].prompt or b""]
    for stored, payload in zip(reversed(chain), reversed(payloads), strict=True):
        parts.append(payload[: 4 * (stored.n_new + stored.n_response)])
    tokens = np.frombuffer(b"".join(parts), np.int32)
    stored, log_probs = chain[0], None
    if stored.has_log_probs:
        offset = 4 * (stored.n_new + stored.n_response)
        log_probs = _frozen(np.frombuffer(payloads[0], np.float32, stored.n_response, offset))
    n = stored.n_prompt
    columns = Tokens(_frozen(tokens[:n]), _frozen(tokens[n:]), log_probs)
    return columns, tokens.nbytes + sum(map(len, payloads))


def _payload(channel: Channel, stored: StoredStep) -> bytes:
    """From memory, or from the log, where it stays."""
    return channel.load_payload(stored) if stored.payload is None else stored.payload


def _frozen(array: Any) -> Any:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


class _Peek(pickle.Unpickler):
    """Loads plain values and NumPy's; what else there is becomes `Opaque`, and nothing is
    imported for it: a producer's metadata may hold what this process has not, or should not."""

    def find_class(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        if package == "numpy" or (module, name) in _PLAIN:
            return super().find_class(module, name)
        return type(name, (_Unknown,), {"type_name": f"{module}.{name}"})


class _Unknown:
    """Takes whatever its pickle would do to the real thing."""

    type_name = ""

    def __new__(cls, *_: Any, **__: Any) -> _Unknown:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _ignore(self, *_: Any) -> None: ...

    __setstate__ = __setitem__ = append = extend = add = _ignore


_PLAIN: Final = {
    *(("builtins", name) for name in ("set", "frozenset", "bytearray", "complex", "slice")),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    ("_codecs", "encode"),
    ("collections", "OrderedDict"),
}


def _shown(value: Any) -> Any:
    if isinstance(value, _Unknown):
        return Opaque(value.type_name)
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(_shown, value))
    return value

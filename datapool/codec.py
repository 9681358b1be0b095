"""Steps as bytes: how they travel, how they are stored, and how they come back exactly.

A step whose prompt extends another one's tokens (prompt + response) carries only what is new, and
names that step as its `base`. Only a step without a base carries a whole prompt; it is kept apart
from the rest, so that the rollouts of a group share one copy of their common prompt::

    step 0   prompt ───────────────┐ response ── log-probs ── extra      base None
    step 1            └── base 0 ──┴ new ids ── response ── log-probs ── extra
    step 2                             └── base 1 ── …

    payload  header (6 × uint32) │ new prompt ids, response ids: int32 │ log-probs: float32 │ extra

A step names the tokens that it is relative to by their CRC-32, too: a pool that holds other ones
asks for it whole, whatever was lost or refused on the way.

A `PackedStep` is one object with one buffer wherever it is: on its way, in the pool, in a lease.
`extra` is what no index looks at (metadata, version spans, multi-modal data, …), as msgpack; arrays
in it are `.npy` bytes. Nothing is ever pickled.

Owns the layout. Does not decide which step is whose base, nor where the bytes are kept.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

from stepwell.datapool.branches import path_to_root
from stepwell.datapool.errors import DataPoolError, InvalidStepError
from stepwell.datapool.types import (
    FinishReason,
    Group,
    Lease,
    Step,
    TokenIds,
    Trajectory,
    VersionSpan,
    trusted_step,
)

_HEADER = Struct("<6I")
_N_TOKENS = Struct("<I4xI")
_SPILLED_BYTES = _HEADER.size + 5
"""A header and a number below 10^12. A payload has one more at least: a token, and what is extra.
"""


class Header(NamedTuple):
    """What a payload begins with. Counts are in tokens."""

    n_prompt: int
    n_new: int
    """Prompt tokens after the base's; 0 without a base."""
    n_response: int
    flags: int
    crc: int
    """CRC-32 of prompt and response."""
    base_crc: int
    """That of the base; 0 without one."""

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_response

    @property
    def has_log_probs(self) -> bool:
        return bool(self.flags & _LOG_PROBS)


_LOG_PROBS, _MORE, _REASON_SHIFT = 1, 2, 2
_REASONS: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))
_ARRAY = 1
"""Extension type of msgpack."""


# -- values of no fixed type -------------------------------------------------------------------


def _to_msgpack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray or value.dtype.hasobject:
            raise TypeError(f"an array of {value.dtype} ({type(value).__name__})")
        buffer = io.BytesIO()
        np.save(buffer, value, allow_pickle=False)
        return msgspec.msgpack.Ext(_ARRAY, buffer.getvalue())
    if isinstance(value, np.generic) and isinstance(item := value.item(), _CARRIED):
        return item
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, DataPoolError):
        return [type(value).__name__, str(value)]  # `ops.Refusal`
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not supported")


def _from_msgpack(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension type {code}")
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


encoder = msgspec.msgpack.Encoder(enc_hook=_to_msgpack)


def decoder(what: Any) -> msgspec.msgpack.Decoder[Any]:
    """Reads a value of this type, which `encoder` wrote."""
    return msgspec.msgpack.Decoder(what, ext_hook=_from_msgpack, dec_hook=_to_array)


def _to_array(wanted: Any, value: Any) -> Any:
    """A column of a row, which is its array already."""
    if isinstance(value, np.ndarray):
        return value
    raise NotImplementedError(f"{wanted} from {type(value).__name__}")


_CARRIED = (str, int, float, bytes, bytearray)
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))


def encode_any(value: Any) -> bytes:
    """A value of no fixed type, which comes back equal: JSON values, bytes and arrays, in lists,
    tuples and mappings. A tuple comes back as a list.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: it holds something else, an integer
            beyond 64 bits, or itself.
    """
    _check_carried(value)
    return encoder.encode(value)


def _check_carried(value: Any) -> None:
    """msgspec knows more types (dates, sets, dataclasses, …), which would come back as others."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise TypeError(f"a key of type {type(key).__qualname__} is not supported")
            _check_carried(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_carried(item)
    elif not isinstance(value, (*_CARRIED, np.generic, np.ndarray)):
        kind = type(value)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not supported")


_extra_decoder = decoder(list[Any])


# -- a step ------------------------------------------------------------------------------------


if TYPE_CHECKING:
    Prompt: TypeAlias = bytes | memoryview
else:
    # A view of the message that it comes with. A pool keeps one copy for all rollouts of a group;
    # the others would leave holes in its heap.
    Prompt = memoryview


class PackedStep(msgspec.Struct, array_like=True, gc=False):
    """A step without its uids, which its trajectory has."""

    step_index: int
    policy_version: int
    reward: float | None
    is_last: bool
    parent_index: int | None
    base: int | None
    """`step_index` of the step whose tokens the prompt begins with; None: `prompt` is whole."""
    prompt: Prompt | None
    """The whole prompt, int32; None with a base."""
    payload: bytes
    """See the module; if it is spilled, its header and the row of the journal."""

    @property
    def header(self) -> Header:
        return Header._make(_HEADER.unpack_from(self.payload))

    @property
    def n_tokens(self) -> int:
        """Prompt and response."""
        n_prompt, n_response = _N_TOKENS.unpack_from(self.payload)
        return int(n_prompt + n_response)

    @property
    def tokens(self) -> bytes:
        """The new prompt ids and the response ids."""
        header = self.header
        return self.payload[_HEADER.size : _HEADER.size + 4 * (header.n_new + header.n_response)]

    @property
    def is_spilled(self) -> bool:
        """Whether the journal alone has the payload."""
        return len(self.payload) <= _SPILLED_BYTES

    @property
    def row(self) -> int:
        """Of the journal, if it is spilled."""
        return int.from_bytes(self.payload[_HEADER.size :], "little")

    def spill(self, row: int) -> None:
        """Leave the payload to the journal."""
        number = row.to_bytes(_SPILLED_BYTES - _HEADER.size, "little")
        self.payload = self.payload[: _HEADER.size] + number


class Tokens(NamedTuple):
    """What a step may be packed relative to."""

    step_index: int
    prompt: bytes
    response: bytes
    crc: int
    """Of both together."""


def pack(step: Step, base: Tokens | None = None) -> PackedStep:
    """`step` as bytes; relative to `base` if its prompt really begins with those tokens.

    Raises:
        InvalidStepError: metadata, multi_modal_data or routed_experts hold what cannot be carried.
    """
    prompt = as_bytes(step.prompt_ids)
    response = as_bytes(step.response_ids)
    new, base_crc = b"", 0
    if base is not None:
        middle = len(base.prompt)
        if prompt.startswith(base.response, middle) and prompt.startswith(base.prompt):
            new, base_crc = prompt[middle + len(base.response) :], base.crc
        else:
            base = None
    crc = crc32(response, crc32(prompt) if base is None else crc32(new, base_crc))
    log_probs = step.rollout_log_probs
    more = step.version_spans or step.multi_modal_data is not None
    more = more or step.routed_experts is not None
    flags = (
        (_LOG_PROBS if log_probs is not None else 0)
        | (_MORE if more else 0)
        | _REASONS.index(step.finish_reason) << _REASON_SHIFT
    )
    n_tokens = len(prompt) // 4, len(new) // 4, len(response) // 4
    payload = b"".join(
        (
            _HEADER.pack(*n_tokens, flags, crc, base_crc),
            new,
            response,
            b"" if log_probs is None else as_bytes(log_probs),
            _pack_extra(step, more),
        )
    )
    return PackedStep(
        step.step_index,
        step.policy_version,
        step.reward,
        step.is_last,
        step.parent_index,
        None if base is None else base.step_index,
        prompt if base is None else None,
        payload,
    )


def relative(step: PackedStep, base: int, base_header: Header) -> PackedStep:
    """A step with a whole prompt, relative to step `base`, with whose tokens it begins."""
    header = step.header
    new = (step.prompt or b"")[4 * base_header.n_tokens :]
    changed = header._replace(n_new=len(new) // 4, base_crc=base_header.crc)
    return msgspec.structs.replace(
        step,
        base=base,
        prompt=None,
        payload=b"".join((_HEADER.pack(*changed), new, step.payload[_HEADER.size :])),
    )


def as_bytes(column: npt.NDArray[Any]) -> bytes:
    """The column's memory; not copied if it is a view of just these bytes."""
    base: object = column.base
    return base if isinstance(base, bytes) and len(base) == column.nbytes else column.tobytes()


def _pack_extra(step: Step, more: object) -> bytes:
    extra: list[Any] = [step.metadata]
    if more:
        spans = [(s.version, s.start, s.end) for s in step.version_spans]
        extra += (spans, step.multi_modal_data, step.routed_experts)
    try:
        return encode_any(extra)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise InvalidStepError(
            f"step {step.trajectory_uid!r}[{step.step_index}]: metadata, multi_modal_data or "
            f"routed_experts cannot be carried ({e}); pass JSON values, bytes or NumPy arrays"
        ) from e


# -- trajectories, groups, leases --------------------------------------------------------------


class PackedTrajectory(msgspec.Struct, array_like=True, gc=False):
    """`Trajectory` before its steps are unpacked; or some steps of one on their way to the pool."""

    trajectory_uid: str
    prompt_uid: str
    steps: list[PackedStep]
    metadata: dict[str, Any] = {}
    attempt: int = 0

    def unpack(self) -> Trajectory:
        return Trajectory(
            self.trajectory_uid, self.prompt_uid, tuple(unpack(self)), self.metadata, self.attempt
        )


class PackedGroup(msgspec.Struct, array_like=True, gc=False):
    """`Group` before its steps are unpacked."""

    prompt_uid: str
    trajectories: list[PackedTrajectory]
    n_rollouts: int | None
    metadata: dict[str, Any]
    delivery: int

    def unpack(self) -> Group:
        return Group(
            self.prompt_uid,
            tuple(t.unpack() for t in self.trajectories),
            self.n_rollouts,
            self.metadata,
            self.delivery,
        )


class PackedLease(msgspec.Struct, array_like=True, tag=True, gc=False):
    """`Lease` as the pool hands it out."""

    lease_id: str
    channel: str
    groups: list[PackedGroup]
    expires_at: float

    def unpack(self) -> Lease:
        return Lease(
            self.lease_id, self.channel, tuple(g.unpack() for g in self.groups), self.expires_at
        )


def unpack(trajectory: PackedTrajectory) -> list[Step]:
    """The steps of a trajectory, exactly as they were submitted, in the order given.

    Every base must be among them. Prompts of one chain are views of one array.
    """
    steps = trajectory.steps
    by_index = {packed.step_index: packed for packed in steps}
    tokens: dict[int, TokenIds] = {}
    for index in sorted(by_index, reverse=True):
        if index not in tokens:
            _lay_out(by_index[index], by_index, tokens)
    uids = trajectory.trajectory_uid, trajectory.prompt_uid
    return [_unpack(packed, tokens[packed.step_index], *uids) for packed in steps]


def chain_tokens(chain: Sequence[PackedStep]) -> bytes:
    """Prompt and response of the first step of a chain: a step, its base, and so on to a root."""
    return b"".join((chain[-1].prompt or b"", *(p.tokens for p in reversed(chain))))


def _lay_out(
    leaf: PackedStep, by_index: Mapping[int, PackedStep], tokens: dict[int, TokenIds]
) -> None:
    """The tokens of a chain, from its leaf, in one array; each step of it sees its part."""
    chain = path_to_root(leaf, lambda p: None if p.base is None else by_index[p.base])
    array = np.frombuffer(chain_tokens(chain), np.int32)
    for packed in chain:
        if packed.step_index not in tokens:
            tokens[packed.step_index] = array[: packed.header.n_tokens]


class Extra(NamedTuple):
    """What no index looks at."""

    metadata: dict[str, Any]
    finish_reason: FinishReason | None
    version_spans: tuple[VersionSpan, ...]
    multi_modal_data: dict[str, Any] | None
    routed_experts: npt.NDArray[Any] | None


def read_extra(packed: PackedStep) -> Extra:
    """What a step holds besides its columns."""
    payload, header = packed.payload, packed.header
    n_columns = header.n_new + header.n_response * (2 if header.has_log_probs else 1)
    extra = memoryview(payload)[_HEADER.size + 4 * n_columns :]
    metadata, *more = _extra_decoder.decode(extra)
    spans, multi_modal_data, routed_experts = more or ((), None, None)
    return Extra(
        metadata,
        _REASONS[header.flags >> _REASON_SHIFT],
        tuple(VersionSpan(*span) for span in spans) if spans else (),
        multi_modal_data,
        routed_experts,
    )


def _unpack(packed: PackedStep, tokens: TokenIds, trajectory_uid: str, prompt_uid: str) -> Step:
    n_prompt, n_new, n_response, flags, _, _ = _HEADER.unpack_from(packed.payload)
    log_probs = None
    if flags & _LOG_PROBS:
        offset = _HEADER.size + 4 * (n_new + n_response)
        log_probs = np.frombuffer(packed.payload, np.float32, n_response, offset)
    metadata, finish_reason, spans, multi_modal_data, routed_experts = read_extra(packed)
    return trusted_step(
        tokens[:n_prompt],
        tokens[n_prompt:],
        packed.reward,
        trajectory_uid,
        prompt_uid,
        packed.step_index,
        packed.policy_version,
        packed.is_last,
        metadata,
        log_probs,
        finish_reason,
        packed.parent_index,
        spans,
        multi_modal_data,
        routed_experts,
    )


def in_trajectories(steps: Iterable[tuple[str, str, PackedStep]]) -> list[PackedTrajectory]:
    """(trajectory_uid, prompt_uid, step), in order; neighbours of one trajectory together."""
    found: list[PackedTrajectory] = []
    for trajectory_uid, prompt_uid, packed in steps:
        last = found[-1] if found else None
        if last is None or (last.trajectory_uid, last.prompt_uid) != (trajectory_uid, prompt_uid):
            found.append(PackedTrajectory(trajectory_uid, prompt_uid, []))
        found[-1].steps.append(packed)
    return found

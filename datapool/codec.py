"""Steps as bytes: how they travel, how they are stored, and how they come back exactly.

A step whose prompt extends another one's tokens (prompt + response) carries only what is new, and
names that step as its `base`. Only a step without a base carries a whole prompt; it is kept apart
from the rest, so that the rollouts of a group share one copy of their common prompt::

    step 0   prompt ───────────────┐ response ── log-probs ── extra      base None
    step 1            └── base 0 ──┴ new ids ── response ── log-probs ── extra
    step 2                             └── base 1 ── …

    payload  header │ new prompt ids, response ids: int32 │ log-probs: float32 │ extra

A step names the tokens that it is relative to by their CRC-32, too: a pool that holds other ones
asks for it whole, whatever was lost or refused on the way. Pictures are tokens in this: a step
carries the references to those behind its base's tokens alone, and the CRC-32 is of the shadow ids
(`pictures.py`), cut to int32, so that other pictures are another base.

A `PackedStep` is one object with one buffer wherever it is: on its way, in the pool, in a lease,
and in the journal. What indexes look at is in its header (`Header`), at fixed places.
`extra` is what no index looks at (metadata, version spans, multi-modal data, …), as msgpack; arrays
in it are `.npy` bytes. Nothing is ever pickled.

Owns the layout. Does not decide which step is whose base, nor where the bytes are kept.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, get_args
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from stepwell.datapool.errors import DataPoolError, InvalidStepError
from stepwell.datapool.pictures import Picture, shadow_ids
from stepwell.datapool.types import (
    MAX_LEVELS,
    FinishReason,
    Group,
    Lease,
    Step,
    TokenIds,
    Trajectory,
    VersionSpan,
    trusted_step,
)

_LAYOUT = "iiiIqdIIIII"
_HEADER = Struct(f"<{_LAYOUT}")
_INDEX, _FLAGS_AT, _VERSION = Struct("<i"), 12, Struct("<16xq")
_BASE, _SCORE, _CRC = Struct("<8xi"), Struct("<16xqd"), Struct("<44xI")
_N_TOKENS, _N_OWN = Struct("<32xI4xI"), Struct("<36xII")
"""Parts of a header that are looked at often."""
_PLACE = Struct("<qII")
"""Row of the journal, offset and size in it: after the header of a spilled step."""
_LOG_PROBS, _MORE, _LAST, _REASON_SHIFT, _REASON = 1, 2, 4, 3, 3
"""Flags; the two bits of a reason."""
SPILLED = 32
"""Flag of a step whose payload the journal alone has."""
PICTURES = 64
"""Flag of a step whose prompt has pictures: its own, or its base's."""
HEADER_BYTES = _HEADER.size
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
Place: TypeAlias = tuple[int, int, int]
"""Row of the journal, offset and size in it."""
_REASONS: tuple[FinishReason | None, ...] = (None, *get_args(FinishReason))
_ARRAY = 1
"""Extension type of msgpack."""


class Header(NamedTuple):
    """The header of a payload. Counts are in tokens."""

    step_index: int
    parent: int
    """-1: none, or not known. In a pool it is the base, unless the parent has not come yet."""
    base_index: int
    """-1: none, the prompt is whole."""
    flags: int
    policy_version: int
    own_reward: float
    """NaN: not scored."""
    n_prompt: int
    n_new: int
    """Prompt tokens after the base's; 0 without a base."""
    n_response: int
    crc: int
    """CRC-32 of prompt and response."""
    base_crc: int
    """CRC-32 of the base; 0 without one."""

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_response

    @property
    def is_last(self) -> bool:
        return bool(self.flags & _LAST)

    @property
    def has_more(self) -> bool:
        """True if the step may hold pictures, so that equal ids need not be equal prompts."""
        return bool(self.flags & (_MORE | PICTURES))

    @property
    def finish_reason(self) -> FinishReason | None:
        return _REASONS[self.flags >> _REASON_SHIFT & _REASON]

    @property
    def parent_index(self) -> int | None:
        return None if self.parent < 0 else self.parent

    @property
    def base(self) -> int | None:
        """`step_index` of the step whose tokens the prompt begins with."""
        return None if self.base_index < 0 else self.base_index

    @property
    def reward(self) -> float | None:
        return None if math.isnan(self.own_reward) else self.own_reward


_HEADERS = np.dtype(
    # Counts are signed, as the columns that are made of them.
    [
        (name, f"<{code.replace('I', 'i')}")
        for name, code in zip(Header._fields, _LAYOUT, strict=True)
    ]
)


class Headers:
    """Headers of many payloads, a column for each field, as `Header` has them."""

    def __init__(self, payloads: Iterable[bytes]) -> None:
        self._table = np.frombuffer(b"".join([p[: _HEADER.size] for p in payloads]), _HEADERS)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return np.ascontiguousarray(self._table[name])

    @property
    def has_log_probs(self) -> npt.NDArray[np.bool_]:
        return (self._table["flags"] & _LOG_PROBS).astype(bool)

    @property
    def is_last(self) -> npt.NDArray[np.bool_]:
        return (self._table["flags"] & _LAST).astype(bool)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        return [_REASONS[i] for i in (self._table["flags"] >> _REASON_SHIFT & _REASON).tolist()]


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
        TypeError, ValueError, OverflowError: it holds something else, an integer beyond 64 bits,
            more than `MAX_LEVELS` levels, or itself.
    """
    _check_carried(value)
    return encoder.encode(value)


CARRIED = f"JSON values, bytes or NumPy arrays, at most {MAX_LEVELS} levels deep"
"""The values that `encode_any` takes, for messages."""


def _check_carried(value: Any, levels: int = MAX_LEVELS) -> None:
    """msgspec knows more types (dates, sets, dataclasses, …), which would come back as others."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind is not dict and isinstance(value, (list, tuple)):
        items: Iterable[Any] = value
    elif kind is dict or isinstance(value, Mapping):
        for key in value:
            if type(key) is not str and not isinstance(key, str | int):
                raise TypeError(f"a key of type {type(key).__qualname__} is not supported")
        items = value.values()
    elif isinstance(value, (*_CARRIED, np.generic, np.ndarray)):
        return
    else:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not supported")
    if not levels:
        raise ValueError("it is nested too deeply")
    for item in items:
        if type(item) not in _PLAIN:
            _check_carried(item, levels - 1)


_extra_decoder = decoder(list[Any])


def extra_of(data: bytes | memoryview) -> list[Any]:
    """`PackedStep.extra` from its bytes."""
    extra: list[Any] = _extra_decoder.decode(data)
    return extra


_OWN = 4
"""Index of the own pictures in `extra`."""


def pictures_of(extra: Sequence[Any]) -> list[Picture]:
    """The own pictures of a step with this `extra`."""
    return [Picture(*values) for values in extra[_OWN]] if len(extra) > _OWN else []


# -- a step ------------------------------------------------------------------------------------


if TYPE_CHECKING:
    Prompt: TypeAlias = bytes | memoryview
else:
    # A view of the message that it comes with. A pool keeps one copy for all rollouts of a group;
    # the others would leave holes in its heap.
    Prompt = memoryview


class PackedStep(msgspec.Struct, array_like=True, gc=False):
    """A step without its uids, which its trajectory has."""

    prompt: Prompt | None
    """The whole prompt, int32; None with a base."""
    payload: bytes
    """See the module; if it is spilled, its header and where the journal has it."""

    @property
    def header(self) -> Header:
        return tuple.__new__(Header, _HEADER.unpack_from(self.payload))  # half of `_make`'s time

    @property
    def step_index(self) -> int:
        index: int = _INDEX.unpack_from(self.payload)[0]
        return index

    @property
    def is_last(self) -> bool:
        return bool(self.payload[_FLAGS_AT] & _LAST)

    @property
    def crc(self) -> int:
        crc: int = _CRC.unpack_from(self.payload)[0]
        return crc

    @property
    def version(self) -> int:
        """Policy version."""
        version: int = _VERSION.unpack_from(self.payload)[0]
        return version

    @property
    def score(self) -> tuple[int, float | None]:
        """Policy version, and own reward."""
        version, reward = _SCORE.unpack_from(self.payload)
        return version, None if math.isnan(reward) else reward

    def served(self, reward: float | None, is_last: bool) -> PackedStep:
        """This step with another reward, or the last one."""
        header = self.header
        if (header.reward, header.is_last) == (reward, is_last):
            return self
        own = math.nan if reward is None else reward
        flags = header.flags | _LAST if is_last else header.flags & ~_LAST
        changed = _HEADER.pack(*header._replace(flags=flags, own_reward=own))
        return PackedStep(self.prompt, changed + self.payload[_HEADER.size :])

    @property
    def n_tokens(self) -> int:
        """Prompt and response."""
        n_prompt, n_response = _N_TOKENS.unpack_from(self.payload)
        return int(n_prompt + n_response)

    @property
    def tokens(self) -> bytes:
        """The new prompt ids and the response ids."""
        n_new, n_response = _N_OWN.unpack_from(self.payload)
        return self.payload[_HEADER.size : _HEADER.size + 4 * (n_new + n_response)]

    @property
    def log_probs(self) -> bytes | None:
        """Log-probs of the response, float32; None if it has none."""
        if not self.payload[_FLAGS_AT] & _LOG_PROBS:
            return None
        n_new, n_response = _N_OWN.unpack_from(self.payload)
        at = _HEADER.size + 4 * (n_new + n_response)
        return self.payload[at : at + 4 * n_response]

    @property
    def extra(self) -> list[Any]:
        """Metadata; with version spans, multi-modal data, routed experts and own pictures if it has
        one of them."""
        n_new, n_response = _N_OWN.unpack_from(self.payload)
        n_columns = n_new + n_response * (2 if self.payload[_FLAGS_AT] & _LOG_PROBS else 1)
        at = _HEADER.size + 4 * n_columns
        extra: list[Any] = _extra_decoder.decode(memoryview(self.payload)[at:])
        return extra

    @property
    def has_pictures(self) -> bool:
        """True if the prompt has pictures: its own, or its base's."""
        return bool(self.payload[_FLAGS_AT] & PICTURES)

    @property
    def pictures(self) -> list[Picture]:
        """Pictures of the new prompt tokens; those of its base are not among them."""
        return pictures_of(self.extra) if self.has_pictures else []

    @property
    def is_hollow(self) -> bool:
        """True for an erased step: not even its prompt is left."""
        return self.prompt is None and bool(_BASE.unpack_from(self.payload)[0] < 0)

    @property
    def is_spilled(self) -> bool:
        """True if the payload is not here: the journal alone has it, or nobody."""
        payload = self.payload
        return len(payload) <= _HEADER.size or bool(payload[_FLAGS_AT] & SPILLED)

    @property
    def place(self) -> Place:
        """Place of a spilled payload."""
        return _PLACE.unpack_from(self.payload, _HEADER.size)

    def spill(self, place: Place) -> None:
        """Leave the payload to the journal."""
        header = self.header
        header = header._replace(flags=header.flags | SPILLED)
        self.payload = _HEADER.pack(*header) + _PLACE.pack(*place)


HOLLOW_BYTES = _HEADER.size + 1


def hollow(payload: bytes, n_bytes: int) -> bytes:
    """A payload of `n_bytes` that holds nothing but the step's index, its version and whether it is
    the last one."""
    header = Header._make(_HEADER.unpack_from(payload))
    kept = Header(
        header.step_index, -1, -1, header.flags & _LAST, header.policy_version, math.nan, *[0] * 5
    )
    return _HEADER.pack(*kept).ljust(n_bytes, b"\0")


class Base(NamedTuple):
    """A step that others may be packed relative to. A digest says whether a prompt begins with its
    tokens: the tokens themselves, kept of every turn, were four times what a trajectory holds."""

    step_index: int
    n_bytes: int
    """Bytes of its prompt and response ids."""
    crc: int
    digest: bytes | None = None
    """None: whoever made the prompt made it of these tokens."""

    @classmethod
    def of(cls, step: Step, crc: int) -> Base:
        prompt = _shadow(step.prompt_ids, step.pictures) if step.pictures else step.prompt_ids
        tokens = as_bytes(prompt) + as_bytes(step.response_ids)
        return cls(step.step_index, len(tokens), crc, xxh3_128_digest(tokens))

    def begins(self, step: Step) -> bool:
        """True if the prompt of `step` begins with these tokens."""
        prompt, n = step.prompt_ids, self.n_bytes // 4
        if len(prompt) < n:
            return False
        if self.digest is None and not step.pictures:
            return True
        own = prompt[:n]
        if step.pictures:
            if any(picture.at < n < picture.end for picture in step.pictures):
                return False
            own = _shadow(own, step.pictures)
        if self.digest is None:
            return True
        return bool(xxh3_128_digest(np.ascontiguousarray(own).data) == self.digest)


def _shadow(ids: TokenIds, pictures: Iterable[Picture], start: int = 0) -> TokenIds:
    """Shadow ids as the CRC-32 takes them, int32: of tokens from index `start` on, with all
    pictures there."""
    moved = [p._replace(at=p.at - start) for p in pictures]
    shadow: TokenIds = shadow_ids(ids, moved).astype(np.int32)
    return shadow


def pack(step: Step, base: Base | None = None, *, is_json: bool = False) -> PackedStep:
    """`step` as bytes; relative to `base`, which is its parent then, if its prompt really begins
    with those tokens.

    Args:
        is_json: its metadata certainly holds JSON values alone, and is not looked through.

    Raises:
        InvalidStepError: metadata, multi_modal_data or routed_experts hold what cannot be carried.
    """
    prompt_ids, response = step.prompt_ids, as_bytes(step.response_ids)
    prompt, new, base_index, base_crc, parent = None, b"", -1, 0, step.parent_index
    pictures, log_probs, reward = step.pictures, step.rollout_log_probs, step.reward
    if base is not None and base.begins(step):
        n = base.n_bytes // 4
        named = new = prompt_ids[n:].tobytes()
        if pictures:
            pictures = tuple(picture for picture in pictures if picture.at >= n)
            named = _shadow(prompt_ids[n:], pictures, n).tobytes()
        parent = base_index = base.step_index
        base_crc = base.crc
        crc = crc32(response, crc32(named, base_crc))
    else:
        prompt = as_bytes(prompt_ids)
        named = _shadow(prompt_ids, pictures).tobytes() if pictures else prompt
        crc = crc32(response, crc32(named))
    flags = _REASONS.index(step.finish_reason) << _REASON_SHIFT
    more = bool(step.version_spans or pictures) or step.multi_modal_data is not None
    if more or step.routed_experts is not None:
        more, flags = True, flags | _MORE
    if log_probs is not None:
        flags |= _LOG_PROBS
    if step.is_last:
        flags |= _LAST
    if step.pictures:
        flags |= PICTURES
    header = _HEADER.pack(
        step.step_index,
        -1 if parent is None else parent,
        base_index,
        flags,
        step.policy_version,
        math.nan if reward is None else reward,
        len(prompt_ids),
        len(new) // 4,
        len(response) // 4,
        crc,
        base_crc,
    )
    columns = new, response, b"" if log_probs is None else as_bytes(log_probs)
    payload = b"".join((header, *columns, _pack_extra(step, more, pictures, is_json)))
    return PackedStep(prompt, payload)


def relative(step: PackedStep, base: Header) -> PackedStep:
    """A step with a whole prompt, relative to its parent, the step with this header."""
    new, index = (step.prompt or b"")[4 * base.n_tokens :], base.step_index
    header = step.header
    columns = step.payload[_HEADER.size :]
    if base.flags & PICTURES:
        extra = step.extra
        extra[_OWN:] = [own] if (own := [p for p in step.pictures if p.at >= base.n_tokens]) else []
        n_columns = header.n_response * (2 if header.flags & _LOG_PROBS else 1)
        columns = columns[: 4 * n_columns] + encoder.encode(extra)
    header = header._replace(parent=index, base_index=index, n_new=len(new) // 4, base_crc=base.crc)
    return PackedStep(None, b"".join((_HEADER.pack(*header), new, columns)))


def as_root(step: PackedStep) -> PackedStep:
    """A step with a whole prompt that extends no other."""
    header = step.header
    if header.parent < 0:
        return step
    packed = _HEADER.pack(*header._replace(parent=-1))
    return PackedStep(step.prompt, packed + step.payload[_HEADER.size :])


def as_bytes(column: npt.NDArray[Any]) -> bytes:
    """The column's memory; not copied if it is a view of just these bytes."""
    base: object = column.base
    return base if isinstance(base, bytes) and len(base) == column.nbytes else column.tobytes()


def _pack_extra(
    step: Step, more: object, pictures: Sequence[Picture], is_json: bool = False
) -> bytes:
    extra: list[Any] = [step.metadata]
    if more:
        spans = [(s.version, s.start, s.end) for s in step.version_spans]
        extra += (spans, step.multi_modal_data, step.routed_experts)
    if pictures:
        extra.append(pictures)
    try:
        if more or not is_json:
            for value in extra:
                _check_carried(value)
        return encoder.encode(extra)
    except (TypeError, ValueError, OverflowError) as e:
        raise InvalidStepError(
            f"{step.label}: metadata, multi_modal_data or "
            f"routed_experts cannot be carried ({e}); pass {CARRIED}"
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
        return self.with_groups(g.unpack() for g in self.groups)

    def with_groups(self, groups: Iterable[Group]) -> Lease:
        """The lease with its groups as they were unpacked."""
        return Lease(self.lease_id, self.channel, tuple(groups), self.expires_at)


def unpack(trajectory: PackedTrajectory) -> list[Step]:
    """The steps of a trajectory, exactly as they were submitted, in the order given.

    Every base must be among them. Prompts of one chain are views of one array.
    """
    sent, trajectory_uid, prompt_uid = (
        trajectory.steps,
        trajectory.trajectory_uid,
        trajectory.prompt_uid,
    )
    headers = [packed.header for packed in sent]
    found = {header.step_index: at for at, header in enumerate(headers)}
    chains: dict[int, TokenIds] = {}
    for index in sorted(found, reverse=True):
        if index not in chains:
            # The tokens of a chain, from its leaf, in one array; each step of it sees its part.
            chain, base = [index], headers[found[index]].base_index
            while base >= 0:
                chain.append(base)
                base = headers[found[base]].base_index
            array = np.frombuffer(chain_tokens([sent[found[at]] for at in chain]), _INT32)
            for at in chain:
                chains.setdefault(at, array)
    steps = []
    for header, packed in zip(headers, sent, strict=True):
        index, parent, _, flags, version, reward, n_prompt, n_new, n_response, *_ = header
        payload, ids, log_probs = packed.payload, chains[index], None
        offset = _HEADER.size + 4 * (n_new + n_response)
        if flags & _LOG_PROBS:
            log_probs = np.frombuffer(payload, _FLOAT32, n_response, offset)
            offset += 4 * n_response
        # What no index looks at.
        extra = _extra_decoder.decode(memoryview(payload)[offset:])
        spans, multi_modal_data, routed_experts = extra[1:_OWN] or ((), None, None)
        steps.append(
            trusted_step(
                ids[:n_prompt],
                ids[n_prompt : n_prompt + n_response],
                None if math.isnan(reward) else reward,
                trajectory_uid,
                prompt_uid,
                index,
                version,
                bool(flags & _LAST),
                extra[0],
                log_probs,
                _REASONS[flags >> _REASON_SHIFT & _REASON],
                None if parent < 0 else parent,
                tuple(VersionSpan(*span) for span in spans) if spans else (),
                multi_modal_data,
                routed_experts,
                tuple(pictures_of(extra)) if flags & PICTURES else (),
            )
        )
    if any(header.flags & PICTURES for header in headers):
        for index in sorted(found):  # a base comes before what extends it
            header, step = headers[found[index]], steps[found[index]]
            if header.flags & PICTURES and header.base_index >= 0:
                before = steps[found[header.base_index]].pictures
                object.__setattr__(step, "pictures", before + step.pictures)
    return steps


def chain_pictures(chain: Sequence[PackedStep]) -> list[Picture]:
    """Pictures in the prompt of the first step of such a chain, in order."""
    return [picture for packed in reversed(chain) for picture in packed.pictures]


def shadow_bytes(prompt: Prompt, pictures: Sequence[Picture]) -> bytes:
    """Shadow ids of a prompt, or of its beginning, as the CRC-32 takes them."""
    ids = np.frombuffer(prompt, np.int32)
    return _shadow(ids, pictures).tobytes()


def chain_tokens(chain: Sequence[PackedStep]) -> bytes:
    """Prompt and response of the first step of a chain: a step, its base, and so on to a root."""
    return b"".join((chain[-1].prompt or b"", *(p.tokens for p in reversed(chain))))


def in_trajectories(steps: Iterable[tuple[str, str, PackedStep]]) -> list[PackedTrajectory]:
    """(trajectory_uid, prompt_uid, step), in order; neighbours of one trajectory together."""
    found: list[PackedTrajectory] = []
    for trajectory_uid, prompt_uid, packed in steps:
        last = found[-1] if found else None
        if last is None or (last.trajectory_uid, last.prompt_uid) != (trajectory_uid, prompt_uid):
            found.append(PackedTrajectory(trajectory_uid, prompt_uid, []))
        found[-1].steps.append(packed)
    return found

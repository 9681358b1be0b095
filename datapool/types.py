"""The nouns of Stepwell: the file to open first.

A `Step` is one LLM call. Steps form a `Trajectory` (one rollout; a tree by `parent_index`),
trajectories of one prompt form a `Group` (GRPO), and groups live in a channel of the pool::

    Trajectory   open ──► complete
                      └─► aborted(reason)
    Group        open ──► ready ──► leased ──► acked
                   │        │ ▲────── nack / lease expiry
                   └────────┴──► dropped(reason)

Conservation, per channel, at every moment::

    groups submitted = open + ready + leased + acked + dropped

This module owns the records and their validation. It holds no state and loads no torch. Token
payloads are read-only NumPy columns (int32 ids, float32 log-probs): 4 bytes a token, cheap to
pickle, ready to be tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, get_args

import numpy as np
import numpy.typing as npt

from stepwell.datapool.errors import InvalidStepError
from stepwell.datapool.pictures import Picture, malformed

TokenIds: TypeAlias = npt.NDArray[np.int32]
LogProbs: TypeAlias = npt.NDArray[np.float32]
FinishReason: TypeAlias = Literal["stop", "length", "abort"]
_FINISH_REASONS = (None, *get_args(FinishReason))


class _Column(NamedTuple):
    """The type of a column's elements: NumPy's, Python's, and what `struct` calls it."""

    dtype: np.dtype[Any]
    plain: type
    code: str


_IDS = _Column(np.dtype(np.int32), int, "I")
"""Written as unsigned numbers, for which `struct` takes less time."""
_LOG_PROBS = _Column(np.dtype(np.float32), float, "f")
MAX_INT = 2**63
"""Integers that the journal and every export can hold are below."""
MAX_LEVELS = 260
"""Levels of lists and mappings in a value of no fixed type that every export and page can hold."""

TRAIN = "train"
VAL = "val"
SFT = "sft"
CHANNEL_BYTES = 1024
"""Names of channels are shorter: each row of a journal has one."""
CANARY = "-canary"
"""Ends the weight version of an engine that tries one out: `7-canary` is 7, not committed."""
OWNER = "stepwell_owner"
"""Key of the metadata of a trajectory and its group: who opened it. Who opens, or goes on with, a
trajectory or group and names an owner is refused if it has another one; it never changes."""
GREEDY = "greedy_baseline"
"""Key of the metadata of a trajectory and its group: true for a rollout that the gateway
samples at temperature 0; its reward is the group's baseline (ReMax) and it is never trained."""

DUPLICATE_OF = "duplicate_of"
"""Key of a Step's metadata: the Step of another try of the same request, which was stored first."""
SUPERSEDES = "supersedes"
"""Key of a Step's metadata: the Steps of its trajectory, itself included, whose replies no client
saw and another try of whose request the agent went on from."""
UNSEEN = "stepwell_unseen"
"""Key of a Step's metadata: true if its client sent the request again before it was answered. Where
a connection broke after the Step was stored, the trajectory's metadata says so (`unseen_key`)."""

MAX_REWARD = 1e9
"""The largest size of a reward. The spread of a group is a sum of squares, which larger ones would
make infinite, and every advantage of the group NaN."""


def is_reward(value: object, parts: int = 1) -> TypeGuard[float]:
    """True if `value` may be the sum of `parts` rewards: numbers (NumPy's too) within
    ±`MAX_REWARD`."""
    if not isinstance(value, int | float | np.integer | np.floating):
        return False
    size: Any = abs(value)  # a huge integer compares, but has no float
    return bool(size <= parts * MAX_REWARD)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens `[start, end)` were sampled by policy `version`."""

    version: int
    start: int
    end: int


@lru_cache(1 << 14)
def _packer(n: int, code: str) -> Callable[..., bytes]:
    """Writes so many plain numbers as bytes."""
    return struct.Struct(f"{n}{code}").pack


def _column(value: Any, name: str, column: _Column) -> tuple[npt.NDArray[Any], bytes]:
    """`value` as a read-only 1-D array, and the high byte of each number, on machines that are
    little-endian: what is wrong with one shows there, and bytes are looked through in a quarter of
    the time that NumPy takes. Whatever the cast would change is refused."""
    dtype, plain, code = column
    if type(value) is list and value and type(value[0]) is plain:
        # Plain numbers, as a gateway has them: twice as fast as NumPy reads a list.
        try:
            data = _packer(len(value), code)(*value)
        except (struct.error, OverflowError):
            pass  # `_cast` says why
        else:
            return np.frombuffer(data, dtype), data[3::4]
    array: npt.NDArray[Any]
    if isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1:
        array = value.copy() if value.flags.writeable else value
    else:
        array = _cast(value, column, name)
    array.flags.writeable = False
    base: Any = array.base
    if type(base) is not bytes or len(base) != array.nbytes:
        base = array.tobytes()
    return array, base[3::4]


def _ids(value: Any, name: str) -> TokenIds:
    ids, high_bytes = _column(value, name, _IDS)
    if not high_bytes.isascii():  # one is negative, or too large
        ids = _cast(value, _IDS, name)
    return ids


_MOST_LOG_PROBS = bytes([*range(0x3A), *range(0x80, 0xFF)])
"""High bytes of float32 numbers from -1.7e38 to 4.9e-4; NaN and infinity have none of these."""


def _cast(value: Any, column: _Column, name: str) -> npt.NDArray[Any]:
    try:
        raw = np.asarray(value if isinstance(value, np.ndarray) else list(value))
    except (TypeError, ValueError) as e:
        raise InvalidStepError(f"{name} is {value!r:.80}; pass a sequence of numbers") from e
    if raw.ndim != 1:
        raise InvalidStepError(f"{name} has shape {raw.shape}; pass one flat sequence")
    if raw.size == 0:
        raw = raw.astype(column.dtype)
    integral = column is _IDS
    if raw.dtype.kind not in ("iu" if integral else "iuf"):
        wanted = "integers" if integral else "numbers"
        raise InvalidStepError(f"{name} holds {raw.dtype} values; pass {wanted}")
    if integral and raw.size and (raw.min() < 0 or raw.max() > np.iinfo(np.int32).max):
        raise InvalidStepError(
            f"{name} spans [{raw.min()}, {raw.max()}]; token ids lie in [0, 2**31)"
        )
    return raw.astype(column.dtype)


def _same(a: Any, b: Any) -> bool:
    """Equality that may meet arrays anywhere (multi-modal data holds them inside dicts)."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (
            isinstance(a, np.ndarray)
            and isinstance(b, np.ndarray)
            and a.dtype == b.dtype
            and np.array_equal(a, b)
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _is_below(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _refused(name: str, value: object, wanted: str) -> InvalidStepError:
    return InvalidStepError(f"{name} is {value!r:.80}; pass {wanted}")


def _checked_log_probs(value: Any, n_response: int) -> LogProbs:
    log_probs, high_bytes = _column(value, "rollout_log_probs", _LOG_PROBS)
    if len(log_probs) != n_response:
        raise InvalidStepError(
            f"rollout_log_probs has {len(log_probs)} values for {n_response} response tokens; "
            "pass one each, or None if unknown"
        )
    # NaN fails both comparisons, +inf the first, -inf the second.
    if high_bytes.translate(None, _MOST_LOG_PROBS) and not (
        np.maximum.reduce(log_probs) <= 1e-3 and np.minimum.reduce(log_probs) > -math.inf
    ):
        raise InvalidStepError(
            "rollout_log_probs holds values that are no log-probabilities "
            f"(max {log_probs.max()}); pass finite values <= 0, or None if unknown"
        )
    return log_probs


def _checked_spans(
    value: Sequence[VersionSpan], n_response: int, policy_version: int
) -> tuple[VersionSpan, ...]:
    spans = tuple(value)
    if not spans:
        return spans
    for s in spans:
        is_int = type(s.version) is type(s.start) is type(s.end) is int
        if not is_int or not 0 <= s.version < MAX_INT:
            raise InvalidStepError(f"version_spans holds {s}; pass integers in [0, 2**63)")
    edges = [0, *(s.end for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != n_response:
        raise InvalidStepError(f"version_spans {spans} do not cover [0, {n_response})")
    oldest = min(s.version for s in spans)
    if policy_version != oldest:
        raise InvalidStepError(
            f"policy_version is {policy_version} but the oldest span has version {oldest}; "
            "policy_version is the oldest"
        )
    return spans


def _checked_pictures(value: Any, n_prompt: int) -> tuple[Picture, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidStepError(f"pictures is {value!r:.80}; pass a sequence")
    if (why := malformed(value, n_prompt)) is not None:
        raise InvalidStepError(why)
    return tuple(value)


_FRESH: Any = {}
"""Default of a Step's metadata: a dict of its own."""
_REQUIRED = ("prompt_ids", "response_ids", "trajectory_uid", "prompt_uid")
"""Fields of a Step without a default."""


@dataclass(frozen=True, eq=False, slots=True, init=False)
class Step:
    """One LLM call: state (`prompt_ids`), action (`response_ids`), `reward`.

    Ids come from the engine (prompt as sent, response as sampled, EOS included) and are never
    recomputed from text. Sequences are normalised to read-only int32/float32 arrays: `+` adds
    arrays number by number, so `prompt_ids + response_ids` is not the two joined. `token_ids` is.

    Raises:
        InvalidStepError: a field is malformed; the message names it, its value and the remedy.
    """

    prompt_ids: TokenIds
    """Full context before the call, shape [P]; P > 0."""
    response_ids: TokenIds
    """Sampled tokens, shape [R]; R > 0."""
    reward: float | None
    """Immediate reward; None means not scored, never 0."""
    trajectory_uid: str
    prompt_uid: str
    step_index: int
    """Position in the trajectory, from 0, in the order the calls were committed."""
    policy_version: int
    """Version that sampled the response; the oldest one if several did (`version_spans`)."""
    is_last: bool
    """Completes the trajectory once all steps up to this index have arrived."""
    metadata: dict[str, Any]
    """JSON-like. The gateway writes `sampling_params` here; the trainer reads its temperature."""
    rollout_log_probs: LogProbs | None
    """log μ(token) of each response token as sampled, after temperature, before top-p/top-k;
    shape [R]. None if the producer does not know them; never filled with 0."""
    finish_reason: FinishReason | None
    parent_index: int | None
    """Step whose prompt + response this prompt begins with; None for a root. Where it is missing or
    false, the pool finds it by the token ids: the longest such step that is stored. Not for steps
    with `pictures` or `multi_modal_data`, which have to declare it."""
    version_spans: tuple[VersionSpan, ...]
    """Set when a weight update fell inside the call; covers [0, R) without gaps."""
    multi_modal_data: dict[str, Any] | None
    routed_experts: npt.NDArray[Any] | None
    pictures: tuple[Picture, ...]
    """All pictures of the prompt, in order. Their bytes are the pool's (`put_pictures`)."""

    def __new__(
        cls,
        *,
        prompt_ids: TokenIds,
        response_ids: TokenIds,
        reward: float | None = None,
        trajectory_uid: str,
        prompt_uid: str,
        step_index: int = 0,
        policy_version: int = 0,
        is_last: bool = False,
        metadata: dict[str, Any] = _FRESH,
        rollout_log_probs: LogProbs | None = None,
        finish_reason: FinishReason | None = None,
        parent_index: int | None = None,
        version_spans: tuple[VersionSpan, ...] = (),
        multi_modal_data: dict[str, Any] | None = None,
        routed_experts: npt.NDArray[Any] | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Step:
        # No `__init__`: a frozen class's sets each field by a call, which takes 2 µs a Step.
        try:
            prompt = _ids(prompt_ids, "prompt_ids")
            response = _ids(response_ids, "response_ids")
            n_prompt, n_response = len(prompt), len(response)
            if not n_prompt or not n_response:
                name = "response_ids" if n_prompt else "prompt_ids"
                raise InvalidStepError(f"{name} is empty; a step has at least one token")
            if rollout_log_probs is not None:
                rollout_log_probs = _checked_log_probs(rollout_log_probs, n_response)
            if reward is not None:
                # The last step of a served trajectory holds its own reward and the outcome.
                if not is_reward(reward, parts=2):
                    wanted = f"a number within ±{MAX_REWARD:g}, None if not scored"
                    raise _refused("reward", reward, wanted)
                reward = float(reward)
            if not isinstance(trajectory_uid, str) or not trajectory_uid:
                raise _refused("trajectory_uid", trajectory_uid, "a non-empty string")
            if not isinstance(prompt_uid, str) or not prompt_uid:
                raise _refused("prompt_uid", prompt_uid, "a non-empty string")
            if not _is_below(step_index, 2**31):
                raise _refused("step_index", step_index, "an integer in [0, 2**31)")
            if not _is_below(policy_version, MAX_INT):
                raise _refused("policy_version", policy_version, "an integer in [0, 2**63)")
            if not isinstance(is_last, bool):
                raise _refused("is_last", is_last, "True or False")
            if finish_reason not in _FINISH_REASONS:
                raise _refused("finish_reason", finish_reason, "'stop', 'length', 'abort' or None")
            if metadata is _FRESH:
                metadata = {}
            elif not isinstance(metadata, (dict, Mapping)):
                raise _refused("metadata", metadata, "a mapping")
            if parent_index is not None and (
                type(parent_index) is not int or not 0 <= parent_index < step_index
            ):
                wanted = f"an integer in [0, {step_index}), or None"
                raise _refused("parent_index", parent_index, wanted)
            if type(version_spans) is not tuple or version_spans:
                version_spans = _checked_spans(version_spans, n_response, policy_version)
            if type(pictures) is not tuple or pictures:
                pictures = _checked_pictures(pictures, n_prompt)
        except InvalidStepError as e:
            raise InvalidStepError(f"step {trajectory_uid!r}[{step_index}]: {e}") from e.__cause__
        return trusted_step(
            prompt,
            response,
            reward,
            trajectory_uid,
            prompt_uid,
            step_index,
            policy_version,
            is_last,
            metadata,
            rollout_log_probs,
            finish_reason,
            parent_index,
            version_spans,
            multi_modal_data,
            routed_experts,
            pictures,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash((self.trajectory_uid, self.step_index))

    def __reduce__(self) -> tuple[Any, ...]:
        values = list(_VALUES(self))
        for i in _COLUMNS:  # as bytes: three times as fast as NumPy pickles them
            values[i] = None if values[i] is None else values[i].tobytes()
        return _unpickled, tuple(values)

    def to_dict(self) -> dict[str, Any]:
        """Its fields as `from_dict` takes them, and `POST /submit_steps` if it has no pictures;
        JSON, if `metadata` and `multi_modal_data` are."""
        values = {name: getattr(self, name) for name in _NAMES}
        values["version_spans"] = [asdict(span) for span in self.version_spans]
        if pictures := values.pop("pictures"):
            values["pictures"] = [picture._asdict() for picture in pictures]
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """A Step of these fields. The numbers of `routed_experts` get NumPy's type for them.

        Raises:
            InvalidStepError: a field is malformed, unknown or missing.
        """
        if missing := [name for name in _REQUIRED if name not in values]:
            raise InvalidStepError(f"a Step needs {', '.join(missing)}, too; see Step.to_dict")
        if unknown := [*(values.keys() - cls.__dataclass_fields__.keys())]:
            raise InvalidStepError(f"a Step has no {', '.join(sorted(unknown))}; see Step.to_dict")
        try:
            spans = tuple(VersionSpan(**span) for span in values.get("version_spans") or ())
            experts = values.get("routed_experts")
            arrays = {"routed_experts": None if experts is None else np.asarray(experts)}
            pictures = tuple(Picture(**picture) for picture in values.get("pictures") or ())
            step = cls(**{**values, **arrays, "version_spans": spans, "pictures": pictures})
            _check_sampling(step)
            return step
        except InvalidStepError:
            raise
        except (TypeError, ValueError) as e:
            raise InvalidStepError(f"no Step has these fields ({e}); see Step.to_dict") from e

    @property
    def label(self) -> str:
        """The step as messages name it: `step 't-1'[0]`."""
        return f"step {self.trajectory_uid!r}[{self.step_index}]"

    @property
    def token_ids(self) -> TokenIds:
        """Prompt, then response; shape [P + R]."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def n_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def temperature(self) -> float:
        """Temperature the log-probs were taken at; greedy (0) scores at 1, as SGLang does."""
        params = self.metadata.get("sampling_params") or {}
        return float(params.get("temperature") or 1.0)


def _check_sampling(step: Step) -> None:
    """
    Raises:
        InvalidStepError: the trainer cannot read the temperature of a step that is not ours.
    """
    params = step.metadata.get("sampling_params") or {}
    given = params.get("temperature") if isinstance(params, Mapping) else params
    if given is None or (isinstance(given, int | float) and 0 <= given < math.inf):
        return
    raise InvalidStepError(
        f"{step.label}: metadata.sampling_params is "
        f"{params!r:.80}; pass an object whose temperature is a number from 0, or leave it out"
    )


_NAMES = [f.name for f in fields(Step)]
_VALUES = attrgetter(*_NAMES)
_COLUMNS = {
    _NAMES.index("prompt_ids"): _IDS,
    _NAMES.index("response_ids"): _IDS,
    _NAMES.index("rollout_log_probs"): _LOG_PROBS,
}


class _Unfrozen:
    """A Step that is being made: its fields are set in a fifth of the time."""

    __slots__ = tuple(_NAMES)


def trusted_step(*values: Any) -> Step:
    """A Step of these fields, in their order. Not through `__init__`: it was validated when it was
    made, and nothing has changed since."""
    step: Any = _Unfrozen()
    (
        step.prompt_ids,
        step.response_ids,
        step.reward,
        step.trajectory_uid,
        step.prompt_uid,
        step.step_index,
        step.policy_version,
        step.is_last,
        step.metadata,
        step.rollout_log_probs,
        step.finish_reason,
        step.parent_index,
        step.version_spans,
        step.multi_modal_data,
        step.routed_experts,
        step.pictures,
    ) = values
    step.__class__ = Step
    made: Step = step
    return made


UNKNOWN = np.zeros(1, np.int32)
"""Tokens of a step that is made to be `without_tokens`: one has to have some."""


def without_tokens(step: Step) -> Step:
    """The step without its tokens, of which nobody knows more than the text."""
    values = {f.name: getattr(step, f.name) for f in fields(Step)}
    values["prompt_ids"] = values["response_ids"] = np.empty(0, np.int32)
    return trusted_step(*(values | {"rollout_log_probs": None}).values())


def _unpickled(*values: Any) -> Step:
    known = list(values)
    for i, column in _COLUMNS.items():
        known[i] = None if known[i] is None else np.frombuffer(known[i], column.dtype)
    return trusted_step(*known)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A complete rollout as the consumer sees it: steps by `step_index`, `is_last` on the last."""

    trajectory_uid: str
    prompt_uid: str
    steps: tuple[Step, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    """0 for the first try of a rollout, n for its n-th retry."""

    @property
    def reward(self) -> float | None:
        """Sum of the step rewards (the outcome reward is on the last); None if none is set."""
        scored = [s.reward for s in self.steps if s.reward is not None]
        return sum(scored) if scored else None


def user_of(*metadata: Mapping[str, Any]) -> str | None:
    """The user that a trajectory is of: `user` or `user_id` of its metadata or its group's, a text
    or a number; else who opened it.

    Args:
        metadata: of the trajectory, and of its group.
    """
    for keys in (("user", "user_id"), (OWNER,)):
        for each in metadata:
            for key in keys:
                if (found := each.get(key)) is None:
                    continue
                if isinstance(found, str | int) and not isinstance(found, bool) and found != "":
                    return str(found)
    return None


def unseen_key(step_index: int) -> str:
    """Key of a trajectory's metadata: whether no client got the end of this Step's reply. A key for
    each Step, since two gateways may write at once."""
    return f"{UNSEEN}:{step_index}"


def superseded(steps: Sequence[Step]) -> frozenset[int]:
    """`step_index` of the replies of one trajectory that nobody saw, since another try of their
    request took their place. Of two tries at two gateways at once it is the later one, unless the
    agent went on from that. A reply that another Step goes on from was seen."""
    continued = {step.parent_index for step in steps}
    found: set[int] = set()
    for step in steps:
        # Others' Steps may have anything there.
        if isinstance(first := step.metadata.get(DUPLICATE_OF), int):
            found.add(first if step.step_index in continued else step.step_index)
        if isinstance(others := step.metadata.get(SUPERSEDES), list):
            found.update(i for i in others if isinstance(i, int))
    return frozenset(i for i in found if i not in continued)


def last_seen(steps: Sequence[Step]) -> int:
    """Place in `steps`, of one trajectory in order, of the last reply that is not `superseded`: a
    try whose client had left may be answered when the agent has ended."""
    unseen = superseded(steps)
    places = (i for i in reversed(range(len(steps))) if steps[i].step_index not in unseen)
    return next(places, len(steps) - 1)


@dataclass(frozen=True, slots=True)
class Group:
    """The complete trajectories of one prompt. `n_rollouts` is what was asked for; the real size
    is `len(trajectories)` and may be smaller if rollouts were aborted or the deadline passed."""

    prompt_uid: str
    trajectories: tuple[Trajectory, ...]
    n_rollouts: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    delivery: int = 1
    """1 on first delivery; higher after a nack or an expired lease."""

    @property
    def steps(self) -> list[Step]:
        return [s for t in self.trajectories for s in t.steps]


@dataclass(frozen=True, slots=True)
class Lease:
    """Groups handed to one consumer until `ack`, `nack` or `expires_at` (pool clock, seconds)."""

    lease_id: str
    channel: str
    groups: tuple[Group, ...]
    expires_at: float

    @property
    def steps(self) -> list[Step]:
        return [s for g in self.groups for s in g.steps]


def mapping_in(metadata: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping under a key; empty if there is none: agents send with their groups and
    trajectories whatever they like."""
    found = metadata.get(key)
    return found if isinstance(found, Mapping) else {}

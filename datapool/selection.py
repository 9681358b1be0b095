"""Which ready groups are served, in what order, which are refused, and why.

Owns the rules: people's marks, orders, filters and batch filters, built in or named by dotted
path. Owns no group, no queue and no clock: a channel describes a group as a `GroupInfo`, asks, and
acts on the answer. Everything here is pure; one group costs O(its trajectories), a batch filter
O(window log window)::

    ready ─► gate ───────────► filters ──────────────► order ─────► batch filter ─► served
    group    marks of people   None   serve            smallest     picks a batch
             Hold if nothing   Drop   refill           key first,   from the first
             is left           Hold   wait for news    then oldest  `window`

`Drop` removes the group, counted with its reason, and frees its credit, so the producer generates
another one: DAPO's dynamic sampling (arXiv 2503.14476), as a stream instead of a loop of
generation batches. `Hold` keeps it, unserved, until its marks or rewards change.

Names in `SelectionConfig`; an argument goes in brackets, `over_sampling(1.5)`:

    order         fifo · freshest · highest_reward_std
    filters       zero_variance · scored · all_correct(1.0) · all_wrong(0.0) · slime_filter(path)
    batch_filter  over_sampling(2.0) · slime_buffer_filter(path)

What other systems call them:

    verl   algorithm.filter_groups               filters: [zero_variance]; a group of one is kept,
                                                 as there. `max_num_gen_batches` needs nothing
                                                 here: drops are counted by reason
    slime  --dynamic-sampling-filter-path F      filters: [slime_filter(F)]
           check_reward_nonzero_std              filters: [zero_variance], same threshold
           --over-sampling-batch-size            how far generation may run ahead: the channel's
                                                 `max_outstanding_groups`
           --over-sampling-filter-path           batch_filter: over_sampling(r), with
             sort_by_reward_std (to 2025-09)     r = over_sampling_batch_size / rollout_batch_size;
                                                 the losers are dropped, as there
           --buffer-filter-path F                batch_filter: slime_buffer_filter(F)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final, Literal, SupportsFloat, TypeAlias

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.dotted import resolve
from stepwell.datapool.errors import InvalidRequestError, SelectionError

ZERO_STD: Final = 1e-6
"""Rewards whose standard deviation is not above this are all equal: slime's threshold. An exact
zero would miss sums that differ in their last bit."""

STALE: Final = "stale"
NOT_TRAINABLE: Final = "not_trainable"
LOW_QUALITY: Final = "low_quality"
EXCLUDED_TAG: Final = "excluded_tag"
MISSING_TAG: Final = "missing_tag"
NO_TRAJECTORIES: Final = "no_trajectories"
ZERO_VARIANCE: Final = "zero_variance"
UNSCORED: Final = "unscored"
ALL_CORRECT: Final = "all_correct"
ALL_WRONG: Final = "all_wrong"
OVER_SAMPLED: Final = "over_sampled"
BUFFER_FILTER: Final = "buffer_filter"


# -- what a selection sees ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """What people say of a group or of a trajectory. The default says nothing.

    Raises:
        InvalidRequestError: a field is of another type, or `quality` is not finite.
    """

    trainable: bool | None = None
    """False: not served until this changes. None: nobody has said."""
    quality: float | None = None
    """Any finite scale; `min_quality` of the channel reads it."""
    tags: frozenset[str] = frozenset()
    """`require_tags` and `exclude_tags` of the channel read them."""
    note: str = ""
    """For people; nothing reads it."""

    def __post_init__(self) -> None:
        if self.trainable is not None and not isinstance(self.trainable, bool):
            raise InvalidRequestError(
                f"trainable is {self.trainable!r}; pass True, False, or None for not marked"
            )
        quality = self.quality
        if quality is not None:
            number = isinstance(quality, int | float) and not isinstance(quality, bool)
            if not number or not math.isfinite(quality):
                raise InvalidRequestError(
                    f"quality is {quality!r}; pass a finite number, or None for not marked"
                )
            object.__setattr__(self, "quality", float(quality))
        tags: Any = self.tags
        if isinstance(tags, str) or not isinstance(tags, Iterable):
            raise InvalidRequestError(f"tags is {tags!r:.80}; pass a list of strings")
        tags = list(tags)
        for tag in tags:
            if not isinstance(tag, str) or not tag:
                raise InvalidRequestError(
                    f"tags holds {tag!r:.80}; pass strings that are not empty"
                )
        object.__setattr__(self, "tags", frozenset(tags))
        if not isinstance(self.note, str):
            raise InvalidRequestError(f"note is {self.note!r:.80}; pass a string")

    def merged(self, update: Mapping[str, Any]) -> Marks:
        """These marks with the fields in `update` replaced; None clears one (RFC 7396).

        Raises:
            InvalidRequestError: no such field, or a malformed value.
        """
        for name in update:
            if name not in _MARK_NAMES:
                near = get_close_matches(str(name), _MARK_NAMES, 1, 0.0)[0]
                raise InvalidRequestError(
                    f"marks have no field {name!r} (did you mean {near!r}?); "
                    f"they have {', '.join(_MARK_NAMES)}"
                )
        return replace(
            self, **{k: getattr(UNMARKED, k) if v is None else v for k, v in update.items()}
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON values only; `UNMARKED.merged` of it gives the same marks."""
        return {
            "trainable": self.trainable,
            "quality": self.quality,
            "tags": sorted(self.tags),
            "note": self.note,
        }


_MARK_NAMES: Final = tuple(f.name for f in fields(Marks))
UNMARKED: Final = Marks()


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """A complete trajectory without its tokens."""

    trajectory_uid: str
    reward: float | None
    """Sum of its step rewards; None if not scored."""
    n_steps: int
    n_tokens: int
    oldest_version: int
    newest_version: int
    """Smallest and largest policy version that generated a token of it."""
    attempt: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = UNMARKED


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A ready group without its tokens. Read-only, `metadata` too: it is the pool's own."""

    prompt_uid: str
    channel: str
    n_rollouts: int | None
    """What was asked for; the real size is `len(trajectories)`."""
    trajectories: tuple[TrajectoryInfo, ...]
    """The complete ones, in the order of completion."""
    sequence: int
    """Order of readiness; negative if handed back by a consumer."""
    opened_at: float
    """Pool clock, seconds."""
    delivery: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    marks: Marks = UNMARKED

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of the scored trajectories only."""
        return tuple(t.reward for t in self.trajectories if t.reward is not None)

    @property
    def is_scored(self) -> bool:
        """Whether every trajectory has a reward (and there is one)."""
        return bool(self.trajectories) and all(t.reward is not None for t in self.trajectories)

    @property
    def reward_mean(self) -> float | None:
        """Over the scored trajectories; None if there is none."""
        rewards = self.rewards
        return math.fsum(r / len(rewards) for r in rewards) if rewards else None

    @property
    def reward_std(self) -> float | None:
        """Population standard deviation over the scored trajectories; None for fewer than two,
        because one reward says nothing of how the group spreads. Equal rewards give exactly 0."""
        rewards = self.rewards
        n = len(rewards)
        if n < 2:
            return None
        # Shifted by the first reward: the mean of equal numbers need not be that number exactly.
        shifted = [r - rewards[0] for r in rewards]
        mean = math.fsum(d / n for d in shifted)
        return math.hypot(*(d - mean for d in shifted)) / math.sqrt(n)

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version in the group; None without trajectories."""
        return min((t.oldest_version for t in self.trajectories), default=None)

    @property
    def newest_version(self) -> int | None:
        """Largest policy version in the group; None without trajectories."""
        return max((t.newest_version for t in self.trajectories), default=None)

    @property
    def n_steps(self) -> int:
        return sum(t.n_steps for t in self.trajectories)

    @property
    def n_tokens(self) -> int:
        return sum(t.n_tokens for t in self.trajectories)


# -- what a selection answers ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drop:
    """The group leaves the pool, counted under `reason`, and its credit is free again."""

    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """The group stays and is not served until its marks or rewards change."""

    reason: str


Verdict: TypeAlias = Drop | Hold
"""What a filter says of a group; None serves it. Keep reasons few: they are counted by name."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch filter's answer."""

    serve: Sequence[str] = ()
    """`batch_size` prompt uids in the order to serve them; empty: wait for more groups."""
    drop: Mapping[str, str] = field(default_factory=dict)
    """prompt_uid -> reason. Groups in neither stay ready."""


Order: TypeAlias = Callable[[GroupInfo], float]
Filter: TypeAlias = Callable[[GroupInfo], Verdict | None]
BatchFilter: TypeAlias = Callable[[Sequence[GroupInfo], int], Choice]


# -- orders ------------------------------------------------------------------------------------


def fifo(info: GroupInfo) -> float:
    """By readiness; what was handed back first."""
    return float(info.sequence)


def freshest(info: GroupInfo) -> float:
    """The group whose oldest token is newest first. The oldest may wait for ever while fresher
    ones keep coming: bound it with the channel's `max_staleness`."""
    version = info.oldest_version
    return math.inf if version is None else -float(version)


def highest_reward_std(info: GroupInfo) -> float:
    """The group whose rewards spread most first; those that cannot be judged yet come last."""
    std = info.reward_std
    return math.inf if std is None else -std


# -- filters -----------------------------------------------------------------------------------


def zero_variance(info: GroupInfo) -> Verdict | None:
    """Drop a group whose rewards are all equal: its GRPO advantages are all zero.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2). As in verl, a group of one is kept:
    whether it teaches anything is up to the advantage estimator. So is a group with an unscored
    trajectory, which cannot be judged yet; put `scored` before this filter to wait for it.
    """
    std = info.reward_std
    if std is None or std > ZERO_STD or not info.is_scored:
        return None
    return Drop(ZERO_VARIANCE)


def scored(info: GroupInfo) -> Verdict | None:
    """Hold a group until every trajectory has a reward (`set_reward`). Not for a run that scores
    what it has leased: such groups would never be served."""
    return None if info.is_scored else Hold(UNSCORED)


def all_correct(info: GroupInfo, threshold: float = 1.0) -> Verdict | None:
    """Drop a group of scored trajectories that all earn `threshold` or more: too easy."""
    if info.is_scored and all(r >= threshold for r in info.rewards):
        return Drop(ALL_CORRECT)
    return None


def all_wrong(info: GroupInfo, threshold: float = 0.0) -> Verdict | None:
    """Drop a group of scored trajectories that all earn `threshold` or less: too hard."""
    if info.is_scored and all(r <= threshold for r in info.rewards):
        return Drop(ALL_WRONG)
    return None


# -- batch filters -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OverSampling:
    """Of `factor` x batch_size candidates, serve those whose rewards spread most; drop the rest.

    slime's over-sampling filter (`sort_by_reward_std`, removed there in 2025-09): it collects
    `over_sampling_batch_size` groups, keeps the best `rollout_batch_size` and discards the others.
    Discarding is the point: kept, the losers would fill the next round's places and nothing new
    would compete. A group that cannot be ranked (unscored, or one trajectory only) comes after
    those that can, fills up the batch if they are too few, and is never dropped.
    """

    factor: float = 2.0

    def n_candidates(self, batch_size: int) -> int:
        """How many groups compete for a batch."""
        # Rounded first: ceil(1.1 * 100) is 111 in floating point.
        return math.ceil(round(self.factor * batch_size, 6))

    def __call__(self, infos: Sequence[GroupInfo], batch_size: int) -> Choice:
        n = self.n_candidates(batch_size)
        return self.best(infos[:n], batch_size) if len(infos) >= n else Choice()

    def best(self, infos: Sequence[GroupInfo], batch_size: int) -> Choice:
        """The best `batch_size` of all that are given, in the order given."""
        if len(infos) < batch_size:
            return Choice()
        # Stable: the order of equals is the channel's.
        ranked = sorted(infos, key=highest_reward_std)
        chosen = {i.prompt_uid for i in ranked[:batch_size]}
        return Choice(
            serve=tuple(i.prompt_uid for i in infos if i.prompt_uid in chosen),
            drop={
                i.prompt_uid: OVER_SAMPLED
                for i in ranked[batch_size:]
                if i.is_scored and i.reward_std is not None
            },
        )


# -- slime's function signatures ---------------------------------------------------------------


@dataclass(slots=True)
class SlimeSample:
    """What slime's filters read of a `slime.utils.types.Sample`: not its tokens and texts, which
    the pool does not unpack to select. Writing to it changes nothing in the pool."""

    index: int
    """Place of the trajectory in the buffer, counted over all groups."""
    group_index: int
    """Place of the group in the buffer."""
    reward: float | None
    metadata: dict[str, Any]
    weight_versions: list[str]
    """Oldest and newest."""
    remove_sample: bool = False

    def get_reward_value(self, args: Any) -> float | None:
        """The reward; `args.reward_key` has no meaning here, rewards are numbers."""
        return self.reward


def _slime_args() -> SimpleNamespace:
    """What stands in for slime's arguments; a function that reads others needs a wrapper."""
    return SimpleNamespace(reward_key=None, eval_reward_key=None)


def _slime_buffer(infos: Iterable[GroupInfo]) -> list[list[SlimeSample]]:
    index = count()
    return [
        [
            SlimeSample(
                index=next(index),
                group_index=group_index,
                reward=t.reward,
                metadata=dict(t.metadata),
                weight_versions=[str(t.oldest_version), str(t.newest_version)],
            )
            for t in info.trajectories
        ]
        for group_index, info in enumerate(infos)
    ]


def slime_filter(function: Callable[..., Any], args: Any = None) -> Filter:
    """A filter from a function for slime's `--dynamic-sampling-filter-path`:
    `(args, samples) -> bool | DynamicFilterOutput(keep, reason)`.

    Its rejects are dropped. A group with an unscored trajectory is served unasked: such functions
    expect rewards. `keep_when_insufficient` has no meaning in a stream and is not read.
    `args` stands in for slime's arguments; None has no more than `reward_key=None`.
    """
    args = _slime_args() if args is None else args

    def judge(info: GroupInfo) -> Verdict | None:
        if not info.is_scored:
            return None
        output = function(args, _slime_buffer([info])[0])
        if getattr(output, "keep", output):
            return None
        return Drop(getattr(output, "reason", None) or _name_of(function))

    return judge


def slime_buffer_filter(function: Callable[..., Any], args: Any = None) -> BatchFilter:
    """A batch filter from a function for slime's `--buffer-filter-path`:
    `(args, rollout_id, buffer: list[list[Sample]], num_samples) -> list[list[Sample]]`.

    The buffer holds the window's groups in order, `rollout_id` is None as in slime. What it
    returns is served; what it only takes out of `buffer` is dropped; the rest stays. slime fills
    a short answer up with new prompts; here the batch waits, and what was returned stays ready.
    `args` as in `slime_filter`.
    """
    args = _slime_args() if args is None else args

    def choose(infos: Sequence[GroupInfo], batch_size: int) -> Choice:
        groups = _slime_buffer(infos)
        # By identity: groups with the same rewards are equal.
        uid_of = {id(g): i.prompt_uid for g, i in zip(groups, infos, strict=True)}
        buffer = list(groups)
        returned = []
        for group in function(args, None, buffer, batch_size):
            if id(group) not in uid_of:
                raise ValueError("it returned a group that is not one of the buffer's list objects")
            returned.append(uid_of[id(group)])
        kept = {uid_of.get(id(g)) for g in buffer} | set(returned)
        return Choice(
            serve=returned if len(returned) >= batch_size else (),
            drop={uid: BUFFER_FILTER for uid in uid_of.values() if uid not in kept},
        )

    return choose


# -- names to functions ------------------------------------------------------------------------


def _number(argument: str, low: float = -math.inf) -> float:
    value = float(argument)
    if not math.isfinite(value) or value < low:
        raise ValueError(f"{argument} is out of range, pass a number >= {low:g}")
    return value


_Maker: TypeAlias = Callable[[str | None], Callable[..., Any]]


def _plain(function: Callable[..., Any]) -> _Maker:
    def make(argument: str | None) -> Callable[..., Any]:
        if argument is not None:
            raise ValueError("it takes no argument")
        return function

    return make


def _threshold(function: Callable[..., Any]) -> _Maker:
    return lambda a: function if a is None else partial(function, threshold=_number(a))


def _adapter(adapt: Callable[[Callable[..., Any]], Callable[..., Any]]) -> _Maker:
    def make(argument: str | None) -> Callable[..., Any]:
        if argument is None:
            raise ValueError("it needs the dotted path of a function in brackets")
        return adapt(_load(argument))

    return make


ORDERS: Final[dict[str, _Maker]] = {
    "fifo": _plain(fifo),
    "freshest": _plain(freshest),
    "highest_reward_std": _plain(highest_reward_std),
}
FILTERS: Final[dict[str, _Maker]] = {
    "zero_variance": _plain(zero_variance),
    "scored": _plain(scored),
    "all_correct": _threshold(all_correct),
    "all_wrong": _threshold(all_wrong),
    "slime_filter": _adapter(slime_filter),
}
BATCH_FILTERS: Final[dict[str, _Maker]] = {
    "over_sampling": lambda a: OverSampling() if a is None else OverSampling(_number(a, low=1)),
    "slime_buffer_filter": _adapter(slime_buffer_filter),
}

_NAME: Final = re.compile(r"([A-Za-z_]\w*)(?:\((.*)\))?")


def _load(path: str) -> Callable[..., Any]:
    found = resolve(path.strip())
    if not callable(found):
        raise ValueError(f"{path} is {found!r:.80}, not a function")
    return found  # type: ignore[no-any-return]  # a dotted path names anything


def _build(config_field: str, spec: str, makers: Mapping[str, _Maker]) -> Callable[..., Any]:
    """The function that `spec` names: built in, `name(argument)`, or a dotted path."""
    built_in = _NAME.fullmatch(spec.strip())
    remedy = f"use {', '.join(makers)} or the dotted path of a function, package.module:name"
    if built_in is not None and built_in[1] not in makers:
        near = get_close_matches(built_in[1], makers, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SelectionError(f"{config_field} is {spec!r}, which is not built in{hint}; {remedy}")
    try:
        return makers[built_in[1]](built_in[2] or None) if built_in else _load(spec)
    except Exception as e:  # importing the module of a dotted path runs foreign code
        raise SelectionError(f"{config_field} is {spec!r}: {_reason(e)}; {remedy}") from e


def _reason(e: Exception) -> str:
    return str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


# -- the selection of a channel ----------------------------------------------------------------


class Selection:
    """The rules of one channel, made from its configuration once. Holds no state.

    Every method takes a group as it is and looks at it through `gate`, so rewards, versions and
    counts are always those of what would be served.

    Raises:
        SelectionError: a name is unknown, a dotted path leads nowhere, or gates contradict.
    """

    def __init__(self, config: SelectionConfig) -> None:
        self.config = config
        both = set(config.require_tags) & set(config.exclude_tags)
        if both:
            raise SelectionError(
                f"selection.require_tags and selection.exclude_tags share {sorted(both)}; "
                "nothing would ever be served: take them out of one"
            )
        self._required = frozenset(config.require_tags)
        self._excluded = frozenset(config.exclude_tags)
        self._order: Order = _build("selection.order", config.order, ORDERS)
        self._filters: list[tuple[str, Filter]] = [
            (f"selection.filters[{i}] {spec!r}", _build(f"selection.filters[{i}]", spec, FILTERS))
            for i, spec in enumerate(config.filters)
        ]
        self._batch_filter: BatchFilter | None = None
        if config.batch_filter is not None:
            self._batch_filter = _build(
                "selection.batch_filter", config.batch_filter, BATCH_FILTERS
            )

    @property
    def is_trivial(self) -> bool:
        """Whether a group without marks is served by readiness, unexamined. A mark still counts:
        `trainable=False` needs no configuration."""
        config = self.config
        return (
            self._order is fifo
            and not self._filters
            and self._batch_filter is None
            and config.min_quality is None
            and not self._required
            and not self._excluded
        )

    # -- one group ---------------------------------------------------------------------------

    def gate(self, info: GroupInfo) -> tuple[GroupInfo, Verdict | None]:
        """The group as its marks let it be served, and a Hold if they do not.

        A mark on the group decides for all of it. A mark on a trajectory takes that one out of
        what is served; the group is held once none is left. A trajectory has the tags of its group
        and its own. Never a Drop: whoever set a mark may think again.
        """
        if (refusal := self._refusal(info.marks)) is not None:
            return info, Hold(refusal)
        if not info.trajectories:
            return info, Hold(NO_TRAJECTORIES)
        missing = self._required - info.marks.tags
        refusals = [self._refusal(t.marks, missing) for t in info.trajectories]
        if not any(refusals):
            return info, None
        served = tuple(t for t, r in zip(info.trajectories, refusals, strict=True) if r is None)
        info = replace(info, trajectories=served)
        return info, None if served else Hold("+".join(sorted({r for r in refusals if r})))

    def _refusal(self, marks: Marks, missing: frozenset[str] = frozenset()) -> str | None:
        """Why these marks forbid serving, or None. `missing`: the tags still required."""
        if marks is not UNMARKED:
            limit = self.config.min_quality
            if marks.trainable is False:
                return NOT_TRAINABLE
            if limit is not None and marks.quality is not None and marks.quality < limit:
                return LOW_QUALITY
            if not marks.tags.isdisjoint(self._excluded):
                return EXCLUDED_TAG
        return None if missing <= marks.tags else MISSING_TAG

    def judge(self, info: GroupInfo) -> Verdict | None:
        """Gates, then filters in order: the first that objects decides. None serves.

        Raises:
            SelectionError: a filter failed, or returned something else.
        """
        info, verdict = self.gate(info)
        if verdict is not None:
            return verdict
        for name, judge in self._filters:
            answer = _call(name, judge, f"group {info.prompt_uid!r}", info)
            if answer is None:
                continue
            if not isinstance(answer, Drop | Hold) or not _is_word(answer.reason):
                raise SelectionError(
                    f"{name} returned {answer!r:.80} for group {info.prompt_uid!r}; return None "
                    "to serve it, or Drop(reason) or Hold(reason) of stepwell.datapool.selection"
                )
            return answer
        return None

    def key(self, info: GroupInfo) -> float:
        """Smaller is served first; the channel breaks ties by `sequence`.

        Raises:
            SelectionError: the order failed, or returned NaN or no number.
        """
        info, _ = self.gate(info)
        name = f"selection.order {self.config.order!r}"
        value = _call(name, self._order, f"group {info.prompt_uid!r}", info)
        try:
            key = float(value) if isinstance(value, SupportsFloat) else math.nan
        except (TypeError, ValueError, OverflowError):
            key = math.nan
        if math.isnan(key):
            raise SelectionError(
                f"{name} returned {value!r:.80} for group {info.prompt_uid!r}; "
                "return a number that can be compared (infinity is one, NaN is not)"
            )
        return key

    # -- a batch -----------------------------------------------------------------------------

    def choose(
        self, infos: Sequence[GroupInfo], batch_size: int, *, more_may_come: bool = True
    ) -> Choice:
        """The next batch out of `infos`: groups that may be served, in order.

        With a batch filter only the first `window` count. One that still waits when nothing can
        come any more (`more_may_come=False`: no open group, and no credit or no producer for
        another) is overruled with the groups at hand, for no group waits for ever.

        Raises:
            SelectionError: the batch filter failed, its answer contradicts itself or `infos`, or
                `window` is too small for it ever to answer.
        """
        if self._batch_filter is None:
            first = tuple(i.prompt_uid for i in infos[:batch_size])
            return Choice(serve=first if len(first) == batch_size else ())
        self._check_window(batch_size)
        candidates = [self.gate(info)[0] for info in infos[: self.config.window]]
        name = f"selection.batch_filter {self.config.batch_filter!r}"
        subject = f"{len(candidates)} groups"
        choice = _call(name, self._batch_filter, subject, candidates, batch_size)
        choice = _checked(name, choice, candidates, batch_size)
        if choice.serve or more_may_come:
            return choice
        left = [i for i in candidates if i.prompt_uid not in choice.drop]
        if isinstance(self._batch_filter, OverSampling):
            return self._batch_filter.best(left, batch_size)
        if len(left) < batch_size:
            return choice
        return Choice(tuple(i.prompt_uid for i in left[:batch_size]), choice.drop)

    def _check_window(self, batch_size: int) -> None:
        needed, why = batch_size, f"the fetch asks for {batch_size}"
        if isinstance(self._batch_filter, OverSampling):
            needed = self._batch_filter.n_candidates(batch_size)
            why += f" and {self.config.batch_filter} waits for {needed}"
        if needed > self.config.window:
            raise SelectionError(
                f"selection.window is {self.config.window} groups, but {why}; "
                f"set window to at least {needed} or fetch fewer"
            )


def _call(name: str, function: Callable[..., Any], subject: str, *args: Any) -> Any:
    """The function's answer; whatever it raises becomes a SelectionError with both names."""
    try:
        return function(*args)
    except Exception as e:  # foreign code: whatever it raises is reported with its name
        raise SelectionError(
            f"{name} failed on {subject}: {type(e).__name__}: {e}; "
            "a selection function must answer for every group (rewards may be None)"
        ) from e


def _is_word(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason)


def _checked(name: str, choice: Any, infos: Sequence[GroupInfo], batch_size: int) -> Choice:
    """A batch filter's answer, if it can be carried out."""
    if not isinstance(choice, Choice):
        raise SelectionError(f"{name} returned {choice!r:.80}; return a Choice(serve, drop)")
    known = {i.prompt_uid for i in infos}
    serve, drop = tuple(choice.serve), dict(choice.drop)
    if len(serve) not in (0, batch_size):
        raise SelectionError(
            f"{name} serves {len(serve)} groups of a batch of {batch_size}; "
            "serve all of a batch, or none to wait"
        )
    for what, uids in (("serves", serve), ("drops", tuple(drop))):
        for uid in uids:
            if uid not in known:
                raise SelectionError(
                    f"{name} {what} {uid!r}, which is none of the {len(infos)} groups it was "
                    "given; name each by its prompt_uid"
                )
    for uid, n in Counter((*serve, *drop)).items():
        if n > 1:
            raise SelectionError(f"{name} names group {uid!r} {n} times; serve it once, or drop it")
    for uid, reason in drop.items():
        if not _is_word(reason):
            raise SelectionError(
                f"{name} drops {uid!r} with reason {reason!r}; give a string that is not empty"
            )
    return Choice(serve, drop)


# -- dry run -----------------------------------------------------------------------------------

IN_ORDER: Final = "in_order"
CHOSEN: Final = "chosen"
NOT_ENOUGH_GROUPS: Final = "not_enough_groups"
LATER_BATCH: Final = "later_batch"
NOT_CHOSEN: Final = "not_chosen"
BATCH_FILTER_WAITS: Final = "batch_filter_waits"
BEYOND_WINDOW: Final = "beyond_window"


@dataclass(frozen=True, slots=True)
class Decision:
    """What would become of one group. Rewards, versions and counts are of what would be served."""

    prompt_uid: str
    decision: Literal["serve", "wait", "hold", "drop"]
    reason: str
    rank: int | None
    """Place in the order, from 1; None if the group is held, or dropped before it got one."""
    key: float | None
    reward_mean: float | None
    reward_std: float | None
    oldest_version: int | None
    newest_version: int | None
    n_trajectories: int
    n_withheld: int
    """Complete trajectories that marks take out of what is served."""
    n_steps: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """The next batch as it would be served now, and why everything else would not be."""

    batch_size: int
    decisions: tuple[Decision, ...]
    """Served (in that order), waiting (by rank), held, dropped."""

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Groups by decision and reason."""
        counts: dict[str, dict[str, int]] = {}
        for d in self.decisions:
            reasons = counts.setdefault(d.decision, {})
            reasons[d.reason] = reasons.get(d.reason, 0) + 1
        return counts

    def table(self, limit: int | None = None) -> str:
        """A table for a terminal: the first `limit` groups (None: all) and the counts."""
        rows = [_HEADER, *(_cells(d) for d in self.decisions[:limit])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if left else cell.rjust(width)
                for cell, width, left in zip(row, widths, _LEFT, strict=True)
            ).rstrip()
            for row in rows
        ]
        if (hidden := len(self.decisions) - (len(rows) - 1)) > 0:
            lines.append(f"… and {hidden} more")
        summary = "; ".join(
            f"{decision} {sum(reasons.values())} "
            f"({', '.join(f'{reason} {n}' for reason, n in reasons.items())})"
            for decision, reasons in self.counts.items()
        )
        lines.append(f"batch of {self.batch_size}: {summary or 'no group is ready'}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table(limit=50)


_HEADER: Final = (
    "rank", "decision", "group", "reason", "key", "reward", "std", "versions", "size", "steps",
    "tokens",
)  # fmt: skip
_LEFT: Final = (False, True, True, True, *[False] * 7)


def _cells(d: Decision) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    versions = "-" if d.oldest_version is None else f"{d.oldest_version}..{d.newest_version}"
    return (
        "-" if d.rank is None else str(d.rank),
        d.decision,
        d.prompt_uid,
        d.reason,
        number(d.key),
        number(d.reward_mean),
        number(d.reward_std),
        versions,
        f"{d.n_trajectories}" + (f" (-{d.n_withheld})" if d.n_withheld else ""),
        str(d.n_steps),
        str(d.n_tokens),
    )


def dry_run(
    selection: Selection | SelectionConfig,
    infos: Iterable[GroupInfo],
    batch_size: int,
    *,
    more_may_come: bool = True,
    stale: Collection[str] = (),
    unscored: Collection[str] = (),
) -> DryRun:
    """What a fetch of `batch_size` groups would do with these ready ones. Changes nothing.

    Args:
        stale: groups among them that the channel drops before it looks at anything else.
        unscored: groups that the channel holds until their rewards come.

    Raises:
        InvalidRequestError: `batch_size` < 1.
        SelectionError: as the rules themselves do.
    """
    if batch_size < 1:
        raise InvalidRequestError(f"batch_size is {batch_size}; ask for at least 1 group")
    rules = selection if isinstance(selection, Selection) else Selection(selection)
    held: list[Decision] = []
    dropped: list[Decision] = []
    servable: list[tuple[float, GroupInfo]] = []
    for info in sorted(infos, key=lambda i: i.sequence):
        verdict = Drop(STALE) if info.prompt_uid in stale else rules.judge(info)
        if verdict is None and info.prompt_uid in unscored:
            verdict = Hold(UNSCORED)
        if verdict is None:
            servable.append((rules.key(info), info))
        elif isinstance(verdict, Drop):
            dropped.append(_decision(rules, info, "drop", verdict.reason))
        else:
            held.append(_decision(rules, info, "hold", verdict.reason))
    servable.sort(key=lambda pair: pair[0])  # stable: ties stay in sequence
    choice = rules.choose([i for _, i in servable], batch_size, more_may_come=more_may_come)
    filtered = rules.config.batch_filter is not None
    served: dict[str, Decision] = {}
    waiting: list[Decision] = []
    for rank, (key, info) in enumerate(servable, start=1):
        uid = info.prompt_uid
        decide = partial(_decision, rules, info, rank=rank, key=key)
        if uid in choice.drop:
            dropped.append(decide("drop", choice.drop[uid]))
        elif uid in choice.serve:
            served[uid] = decide("serve", CHOSEN if filtered else IN_ORDER)
        elif filtered and rank > rules.config.window:
            waiting.append(decide("wait", BEYOND_WINDOW))
        elif choice.serve:
            waiting.append(decide("wait", NOT_CHOSEN if filtered else LATER_BATCH))
        elif len(servable) < batch_size:
            waiting.append(decide("wait", NOT_ENOUGH_GROUPS))
        else:
            waiting.append(decide("wait", BATCH_FILTER_WAITS))
    in_order = [served[uid] for uid in choice.serve]
    return DryRun(batch_size, (*in_order, *waiting, *held, *dropped))


def _decision(
    rules: Selection,
    info: GroupInfo,
    decision: Literal["serve", "wait", "hold", "drop"],
    reason: str,
    rank: int | None = None,
    key: float | None = None,
) -> Decision:
    n_complete = len(info.trajectories)
    info, _ = rules.gate(info)
    return Decision(
        prompt_uid=info.prompt_uid,
        decision=decision,
        reason=reason,
        rank=rank,
        key=key,
        reward_mean=info.reward_mean,
        reward_std=info.reward_std,
        oldest_version=info.oldest_version,
        newest_version=info.newest_version,
        n_trajectories=len(info.trajectories),
        n_withheld=n_complete - len(info.trajectories),
        n_steps=info.n_steps,
        n_tokens=info.n_tokens,
    )

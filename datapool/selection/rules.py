"""The rules of one channel: the functions that its configuration names, asked in their order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, SupportsFloat

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.selection.built_in import (
    BATCH_FILTERS,
    FILTERS,
    NOT_TRAINABLE,
    ORDERS,
    OverSampling,
    build,
    fifo,
)
from stepwell.datapool.selection.groups import (
    UNMARKED,
    BatchFilter,
    Choice,
    Drop,
    Filter,
    GroupInfo,
    Hold,
    Marks,
    Order,
    Verdict,
)


class Ready(Protocol):
    """Groups that one consumer may be served, in order: those of a channel, or a copy of them."""

    def __len__(self) -> int: ...

    def first(self, limit: int) -> Sequence[str]:
        """The prompt uids that come next, at most `limit`; fewer if some are refused now."""

    def info(self, prompt_uid: str) -> GroupInfo: ...

    def drop(self, prompt_uid: str, reason: str) -> None: ...

    def more_may_come(self) -> bool:
        """Whether another group may still become ready: there is an open one, or credit and a
        producer for another."""


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
        self._order: Order = build("selection.order", config.order, ORDERS)
        self._filters: list[tuple[str, Filter]] = [
            (f"selection.filters[{i}] {spec!r}", build(f"selection.filters[{i}]", spec, FILTERS))
            for i, spec in enumerate(config.filters)
        ]
        self._batch_filter: BatchFilter | None = None
        if config.batch_filter is not None:
            self._batch_filter = build("selection.batch_filter", config.batch_filter, BATCH_FILTERS)

    @property
    def is_trivial(self) -> bool:
        """Whether a group without marks is served by readiness, unexamined. A mark still counts:
        `trainable=False` needs no configuration."""
        gated = self.config.min_quality is not None or self._required or self._excluded
        return self._order is fifo and not (self._filters or self._batch_filter or gated)

    # -- one group ---------------------------------------------------------------------------

    def gate(self, info: GroupInfo) -> tuple[GroupInfo, Hold | None]:
        """The group as its marks let it be served, and a Hold if they do not.

        A mark on the group decides for all of it. A mark on a trajectory takes that one out of
        what is served; the group is held once none is left. A trajectory has the tags of its group
        and its own. Never a Drop: whoever set a mark may think again.
        """
        if (refusal := self._refusal(info.marks)) is not None:
            return info, Hold(refusal)
        if not info.trajectories:
            return info, Hold("no_trajectories")
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
                return "low_quality"
            if not marks.tags.isdisjoint(self._excluded):
                return "excluded_tag"
        return None if missing <= marks.tags else "missing_tag"

    def judge(self, info: GroupInfo) -> Verdict | None:
        """Gates, then filters in order: the first that objects decides. None serves.

        Raises:
            SelectionError: a filter failed, or returned something else.
        """
        info, refusal = self.gate(info)
        if refusal is not None:
            return refusal
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

    def next_batch(self, ready: Ready, batch_size: int) -> Sequence[str]:
        """The groups that a fetch is given: `batch_size` of them, or none. Drops those on the way
        that the batch filter drops.

        Raises:
            SelectionError: as `choose`.
        """
        filtered = self._batch_filter is not None
        n_seen = max(batch_size, self.config.window) if filtered else batch_size
        while len(ready) >= batch_size:
            seen = ready.first(n_seen)
            if not filtered:
                return seen if len(seen) == batch_size else ()
            choice = self.choose(
                [ready.info(uid) for uid in seen], batch_size, more_may_come=ready.more_may_come()
            )
            for prompt_uid, reason in choice.drop.items():
                ready.drop(prompt_uid, reason)
            if choice.serve or not choice.drop:
                return choice.serve
            # Others came into the window.
        return ()

    def choose(
        self, infos: Sequence[GroupInfo], batch_size: int, *, more_may_come: bool = True
    ) -> Choice:
        """What a batch filter makes of `infos`: groups that may be served, in order, of which it
        sees the first `window`.

        One that still waits when nothing can come any more is overruled with the groups at hand,
        for no group waits for ever.

        Raises:
            SelectionError: the batch filter failed, its answer contradicts itself or `infos`, or
                `window` is too small for it ever to answer.
        """
        batch_filter = self._batch_filter
        if batch_filter is None:
            first = tuple(i.prompt_uid for i in infos[:batch_size])
            return Choice(serve=first if len(first) == batch_size else ())
        self._check_window(batch_size)
        candidates = [self.gate(info)[0] for info in infos[: self.config.window]]
        name = f"selection.batch_filter {self.config.batch_filter!r}"
        choice = _call(name, batch_filter, f"{len(candidates)} groups", candidates, batch_size)
        choice = _checked(name, choice, candidates, batch_size)
        if choice.serve or more_may_come:
            return choice
        left = [i for i in candidates if i.prompt_uid not in choice.drop]
        if isinstance(batch_filter, OverSampling):
            return batch_filter.best(left, batch_size)
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
    for uid, n in Counter((*serve, *drop)).items():
        if uid not in known:
            raise SelectionError(
                f"{name} {'serves' if uid in serve else 'drops'} {uid!r}, which is none of the "
                f"{len(infos)} groups it was given; name each by its prompt_uid"
            )
        if n > 1:
            raise SelectionError(f"{name} names group {uid!r} {n} times; serve it once, or drop it")
    for uid, reason in drop.items():
        if not _is_word(reason):
            raise SelectionError(
                f"{name} drops {uid!r} with reason {reason!r}; give a string that is not empty"
            )
    return Choice(serve, drop)

"""This module asks the rules of one channel, which its configuration names, in their order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, SupportsFloat

from stepwell.datapool.config import SelectionConfig
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.own_loop import ENDS
from stepwell.datapool.selection.built_in import (
    FILTERS,
    NOT_TRAINABLE,
    ORDERS,
    Rules,
    build,
    fifo,
)
from stepwell.datapool.selection.info import Drop, Filter, GroupInfo, Hold, Order, Verdict


class Selection:
    """The rules of one channel, made from its configuration once. Holds no state.

    Every method takes a group as it is and looks at it through `gate`, so rewards, versions and
    counts are always those of what would be served.

    Args:
        filters: by the names that the configuration may use.

    Raises:
        SelectionError: a name is unknown, or a dotted path leads nowhere.
    """

    def __init__(self, config: SelectionConfig, filters: Rules = FILTERS) -> None:
        self.config = config
        self._order: Order = build("selection.order", config.order, ORDERS)
        self._filters: list[tuple[str, Filter]] = [
            (f"selection.filters[{i}] {spec!r}", build(f"selection.filters[{i}]", spec, filters))
            for i, spec in enumerate(config.filters)
        ]
        self.is_trivial = self._order is fifo and not self._filters
        """True if a group without marks is served by readiness, unexamined. A mark still counts:
        `trainable=False` needs no configuration."""

    def gate(self, info: GroupInfo) -> tuple[GroupInfo, Hold | None]:
        """The group as its marks let it be served, and a Hold if they do not.

        A mark on the group decides for all of it. A mark on a trajectory takes that one out of
        what is served; the group is held once none is left. Never a Drop: whoever set a mark may
        think again.
        """
        if info.marks.trainable is False:
            return info, Hold(NOT_TRAINABLE)
        if not info.trajectories:
            return info, Hold("no_trajectories")
        served = tuple(t for t in info.trajectories if t.marks.trainable is not False)
        if len(served) < len(info.trajectories):
            info = replace(info, trajectories=served)
        return info, None if served else Hold(NOT_TRAINABLE)

    def judge(self, info: GroupInfo) -> Verdict | None:
        """Marks, then filters in order: the first that objects decides. None serves.

        Raises:
            SelectionError: a filter failed, or returned something else.
        """
        info, refusal = self.gate(info)
        if refusal is not None:
            return refusal
        for name, judge in self._filters:
            answer = _call(name, judge, info)
            if answer is None:
                continue
            if not (
                isinstance(answer, Drop | Hold) and isinstance(answer.reason, str) and answer.reason
            ):
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
        value = _call(name, self._order, info)
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


def _call(name: str, function: Callable[[GroupInfo], Any], info: GroupInfo) -> Any:
    """The function's answer; whatever it raises becomes a SelectionError with both names."""
    try:
        return function(info)
    except ENDS:
        raise
    except BaseException as e:  # foreign code: whatever it raises is reported with its name
        raise SelectionError(
            f"{name} failed on group {info.prompt_uid!r}: {type(e).__name__}: {e}; "
            "a selection function must answer for every group (rewards may be None)"
        ) from e

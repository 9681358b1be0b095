"""This module names the built-in orders and filters so that a configuration can choose them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, Final, TypeAlias

from stepwell.datapool.dotted import resolve
from stepwell.datapool.errors import SelectionError
from stepwell.datapool.selection.info import Drop, GroupInfo, Hold, Verdict

ZERO_STD: Final = 1e-6
"""Rewards whose standard deviation is not above this are all equal: slime's threshold. An exact
zero would miss sums that differ in their last bit."""

STALE: Final = "stale"
NOT_TRAINABLE: Final = "not_trainable"
DOUBTFUL: Final = "doubtful"
"""Tag of groups that a salvage holds, as they may have been closed in what was lost."""
UNSCORED: Final = "unscored"


# -- orders ------------------------------------------------------------------------------------


def fifo(info: GroupInfo) -> float:
    """By readiness; what was handed back first."""
    return float(info.sequence)


def freshest(info: GroupInfo) -> float:
    """The group whose oldest token is newest first. The oldest may wait for ever while fresher
    ones keep coming: bound it with the channel's `max_staleness`."""
    version = info.oldest_version
    return math.inf if version is None else -float(version)


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
    return Drop("zero_variance")


def scored(info: GroupInfo) -> Verdict | None:
    """Hold a group until every trajectory has a reward (`set_reward`). Not for a run that scores
    what it has leased: such groups would never be served."""
    return None if info.is_scored else Hold(UNSCORED)


def all_correct(info: GroupInfo, threshold: float = 1.0) -> Verdict | None:
    """Drop a group of scored trajectories that all earn `threshold` or more: too easy."""
    too_easy = info.is_scored and min(info.rewards) >= threshold
    return Drop("all_correct") if too_easy else None


def all_wrong(info: GroupInfo, threshold: float = 0.0) -> Verdict | None:
    """Drop a group of scored trajectories that all earn `threshold` or less: too hard."""
    too_hard = info.is_scored and max(info.rewards) <= threshold
    return Drop("all_wrong") if too_hard else None


# -- names to functions ------------------------------------------------------------------------

Rules: TypeAlias = Mapping[str, Callable[..., Any] | str]
"""By name: a function; or the dotted path of an adapter, which makes a rule of the function whose
path is in brackets, and is imported when a configuration names it.
"""

ORDERS: Final[Rules] = {"fifo": fifo, "freshest": freshest}
FILTERS: Final[Rules] = {
    "zero_variance": zero_variance,
    "scored": scored,
    "all_correct": all_correct,
    "all_wrong": all_wrong,
}
_ELSEWHERE: Final = {
    "slime_filter": "it asks for whole samples, which the pool does not unpack to select: name it "
    "in sampling.filters",
}
_TAKE_A_NUMBER: Final = (all_correct, all_wrong)
_NAME: Final = re.compile(r"([A-Za-z_]\w*)(?:\((.*)\))?")


def build(config_field: str, spec: str, known: Rules) -> Callable[..., Any]:
    """The function that `spec` names: built in, `name(argument)`, or a dotted path. For the texts
    of a configuration or a program: a dotted path loads code."""
    built_in = _NAME.fullmatch(spec.strip())
    remedy = f"use {', '.join(known)} or the dotted path of a function, package.module:name"
    if built_in is not None and built_in[1] not in known:
        if because := _ELSEWHERE.get(built_in[1]):
            raise SelectionError(f"{config_field} is {spec!r}, which is refused: {because}")
        near = get_close_matches(built_in[1], known, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SelectionError(f"{config_field} is {spec!r}, which is not built in{hint}; {remedy}")
    try:
        return _made(known[built_in[1]], built_in[2] or None) if built_in else load(spec)
    except Exception as e:  # importing the module of a dotted path runs foreign code
        reason = str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"
        raise SelectionError(f"{config_field} is {spec!r}: {reason}; {remedy}") from e


def read_name(config_field: str, spec: str, known: Rules) -> str:
    """The built-in rule and argument that `spec` names, written anew: what comes from a page, which
    may name no code. `build` of the result loads nothing.

    Raises:
        SelectionError: `spec` is anything but one of `known` with an argument that it takes.
    """
    names = [name for name, rule in known.items() if callable(rule)]
    built_in = _NAME.fullmatch(spec)
    if built_in is None or built_in[1] not in names:
        raise SelectionError(
            f"{config_field} is {spec!r:.80}, which is not built in; use {', '.join(names)}"
        )
    name, argument = built_in[1], built_in[2]
    if not argument:
        return name
    try:
        number = _argument(known[name], argument)
    except ValueError as e:
        raise SelectionError(f"{config_field} is {spec!r:.80}: {e}") from e
    return f"{name}({number!r})"


def _made(rule: Callable[..., Any] | str, argument: str | None) -> Callable[..., Any]:
    if isinstance(rule, str):
        if argument is None:
            raise ValueError("it needs the dotted path of a function in brackets")
        return load(rule)(load(argument))  # type: ignore[no-any-return]
    return rule if argument is None else partial(rule, threshold=_argument(rule, argument))


def _argument(rule: object, argument: str) -> float:
    if rule not in _TAKE_A_NUMBER:
        raise ValueError("it takes no argument")
    if not math.isfinite(threshold := float(argument)):
        raise ValueError(f"{argument} is out of range, pass a finite number")
    return threshold


def load(path: str) -> Callable[..., Any]:
    """The function that a configuration, or a program that asks the pool itself, names by its
    path. The only way from a rule's text to code: no text of a web page comes here."""
    found = resolve(path.strip())
    if not callable(found):
        raise ValueError(f"{path} is {found!r:.80}, not a function")
    return found  # type: ignore[no-any-return]  # a dotted path names anything

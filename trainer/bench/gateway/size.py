"""This module counts the bytes that live objects hold, so that a trajectory's memory has a bound.

`deep_size` follows references from one object. It counts every object once and stops at objects
that are shared: modules, classes, functions, event loops and whatever the caller names.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np

ALLOWANCE_BYTES = 64 * 1024
"""For what does not grow with a trajectory's tokens."""

_SHARED = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    CodeType,
    FrameType,
    asyncio.AbstractEventLoop,
)


def deep_size(root: object, shared: Iterable[object] = ()) -> int:
    """Bytes of `root` and of all that it refers to.

    Args:
        shared: objects that are neither counted nor followed.
    """
    seen = {id(each) for each in shared}
    left: list[Any] = [root]
    total = 0
    while left:
        here = left.pop()
        if id(here) in seen or isinstance(here, _SHARED):
            continue
        seen.add(id(here))
        total += sys.getsizeof(here)
        if isinstance(here, np.ndarray):
            left.append(here.base)  # getsizeof leaves out what an array does not own
        else:
            left += gc.get_referents(here)
    return total


def trajectory_size(gateway: Any, uid: str) -> int:
    """Bytes of an open trajectory.

    Args:
        gateway: the application's `state.gateway`; what it holds is shared by all trajectories.
    """
    trajectory = gateway.trajectories.known(uid)
    if trajectory is None:
        raise KeyError(f"trajectory {uid!r} is not open in this gateway")
    return deep_size(trajectory, [gateway, *vars(gateway).values()])


def bound(n_tokens: float, n_text_bytes: float) -> float:
    """The most bytes that a live trajectory may hold.

    Args:
        n_tokens: its tokens; those that turns share count once.
        n_text_bytes: their text in UTF-8.
    """
    return 1.5 * (4 * n_tokens + n_text_bytes) + ALLOWANCE_BYTES

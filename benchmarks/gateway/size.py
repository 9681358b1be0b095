"""This module counts the bytes that live objects hold, so that a trajectory's memory has a bound.

`reachable` follows references from one object. It yields every object once and stops at objects
that are shared: modules, classes, functions, event loops and whatever the caller names.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import msgspec
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


def reachable(root: object, shared: Iterable[object] = ()) -> Iterator[object]:
    """`root` and all that it refers to, each once.

    Args:
        shared: objects that are left out, with what only they refer to.
    """
    seen = {id(each) for each in shared}
    left: list[Any] = [root]
    while left:
        here = left.pop()
        if id(here) in seen or isinstance(here, _SHARED):
            continue
        seen.add(id(here))
        yield here
        if isinstance(here, np.ndarray):
            left.append(here.base)  # getsizeof leaves out what an array does not own
        elif isinstance(here, msgspec.Struct):  # the garbage collector does not know all of them
            left += msgspec.structs.astuple(here)
        else:
            left += gc.get_referents(here)


def objects_of(gateway: Any, uid: str) -> Iterator[object]:
    """The objects of an open trajectory.

    Args:
        gateway: the application's `state.services`; what it holds is shared by all trajectories.
    """
    trajectory = gateway.trajectories.known(uid)
    if trajectory is None:
        raise KeyError(f"trajectory {uid!r} is not open in this gateway")
    return reachable(trajectory, [gateway, *vars(gateway).values()])


def trajectory_size(gateway: Any, uid: str) -> int:
    """Bytes of an open trajectory."""
    return sum(map(sys.getsizeof, objects_of(gateway, uid)))


def bound(n_tokens: float, n_text_bytes: float) -> float:
    """The most bytes that a live trajectory may hold.

    Args:
        n_tokens: its tokens; those that turns share count once.
        n_text_bytes: their text in UTF-8.
    """
    return 1.5 * (4 * n_tokens + n_text_bytes) + ALLOWANCE_BYTES

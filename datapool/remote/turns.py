"""Calls of one actor handle take effect in the order they were made.

Ray runs the calls of an async actor in any order: fired without waiting, `complete_trajectory`
overtakes the `submit_step` before it often enough to spoil one trajectory in ten. So the calling
side numbers the calls of a handle, and the actor starts them by number::

    handle ──0, 1, 2, 3──► Ray ──1, 0, 3, 2──► Turns ──0, 1, 2, 3──► method

Only starts are ordered: a call that waits for something lets the next one begin. A number that
never arrives (cancelled before it ran, lost with a former actor) is waited for GRACE_S and then
passed over. There is no order between handles.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Order: TypeAlias = tuple[str, int]
"""(caller, number of the call)"""
Invocation: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], Any]

GRACE_S = 5.0
RESUMED_GRACE_S = 0.25
"""The same right after a restart, when what is missing was most likely lost with the former
actor; whoever sent it knows that, so order is lost already."""
RESUMED_S = 10.0
"""How long that is."""
MAX_CALLERS = 100_000


class Numbering:
    """Calling side: a Ray invocation decorator, shared by the methods of one handle.

    A copy of the handle, in this process or another one, is another caller: its decorator
    unpickles with an identity and numbers of its own. A client's `known=`, which pool it means,
    goes along.
    """

    def __init__(self) -> None:
        self._caller = uuid.uuid4().hex
        self._number = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Numbering], tuple[()]]:
        return (Numbering, ())

    def __call__(self, invocation: Invocation) -> Invocation:
        def numbered(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            with self._lock:
                # One keyword for both, because Ray pickles each by itself.
                order = (self._caller, self._number), kwargs.get("known")
                rest = {name: value for name, value in kwargs.items() if name != "known"}
                reference = invocation(args, {**rest, "order": order})
                # Only now: a call that could not be sent must not leave a hole.
                self._number += 1
                return reference

        return numbered


class _Line:
    """The calls of one caller, at the actor."""

    __slots__ = ("done", "next", "waiting")

    def __init__(self, first: int) -> None:
        self.next = first
        self.done: set[int] = set()
        self.waiting: dict[int, asyncio.Future[None]] = {}

    def finish(self, number: int) -> None:
        self.done.add(number)
        while self.next in self.done:
            self.done.remove(self.next)
            self.next += 1
        self._wake()

    def pass_over(self) -> None:
        """The lowest number that waits begins, whatever is missing before it."""
        self.next = min(self.waiting)
        self.done = {n for n in self.done if n > self.next}
        self._wake()

    def _wake(self) -> None:
        turn = self.waiting.get(self.next)
        if turn is not None and not turn.done():
            turn.set_result(None)


class Turns:
    """Actor side: lets calls begin by number.

    Args:
        resumed: the actor follows one that died. Its callers' numbers went to the former one, so
            a caller's line starts at the first number seen instead of waiting for the others.
    """

    def __init__(self, resumed: bool = False) -> None:
        self._resumed = resumed
        self._began = time.monotonic()
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    async def take(self, order: Order | None) -> None:
        """Return when every earlier call of the same handle has begun. None: not numbered."""
        if order is None:
            return
        caller, number = order
        line = self._line(caller, number if self._resumed else 0)
        if number < line.next:
            return  # passed over before; better late than never
        if number > line.next:
            turn = line.waiting[number] = asyncio.get_running_loop().create_future()
            try:
                while number > line.next:
                    just_resumed = self._resumed and time.monotonic() - self._began < RESUMED_S
                    grace_s = RESUMED_GRACE_S if just_resumed else GRACE_S
                    await asyncio.wait([turn], timeout=grace_s)
                    if number > line.next:
                        line.pass_over()
            except asyncio.CancelledError:
                line.waiting.pop(number)
                line.finish(number)
                raise
            line.waiting.pop(number)
        line.finish(number)

    def _line(self, caller: str, first: int) -> _Line:
        line = self._lines.get(caller)
        if line is None:
            line = self._lines[caller] = _Line(first)
            if len(self._lines) > MAX_CALLERS:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(caller)
        return line

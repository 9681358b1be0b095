"""Credit for new groups, of a pool of several shards as a whole.

Dividing it among the shards would let one that happens to get many groups stop a producer while the
consumer waits for groups that the others were to have. So shards are asked, and it is exact for the
groups that one client opens. Steps of groups that nobody opened are blocked by their own shard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stepwell.datapool.errors import PoolFullError
from stepwell.datapool.ops import DropGroup, OpenGroup, SubmitOutcome
from stepwell.datapool.questions import Credit, WaitCredit
from stepwell.datapool.remote.fanout import ANSWER_S, Shards, shard_of

SLICE_S: Final = 10.0
"""A pool is not told that a caller's machine died: a long wait is asked for in slices."""


@dataclass(slots=True)
class _Line:
    """Those who open groups in one channel, first come first; all in one event loop."""

    loop: asyncio.AbstractEventLoop
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    opening: set[asyncio.Task[Any]] = field(default_factory=set)
    """Admitted, and perhaps not in their shard yet."""
    credits: dict[int, Credit] = field(default_factory=dict)
    """What each shard answered last; what is in one that is down still counts."""
    full: str | None = None
    """Why the first one waits."""
    is_unlimited: bool = False


class CreditLines:
    """Opens groups of a pool, whatever its number of shards."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._ports = shards.ports
        self._n = shards.n
        self._lines: dict[str, _Line] = {}

    async def open_group(self, op: OpenGroup, timeout_s: float | None) -> SubmitOutcome:
        """Open it once the whole pool has credit for one more."""
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        home = self._ports[shard_of(op.prompt_uid, self._n)]

        async def open_() -> SubmitOutcome:
            while True:
                try:
                    left = max(0.0, end - time.monotonic())
                    return await home.call(op, min(left, SLICE_S))
                except PoolFullError:
                    if time.monotonic() >= end:
                        raise

        line = self._line(op.channel)
        if self._n == 1 or line.is_unlimited:
            return await open_()
        ask = WaitCredit(op.prompt_uid, op.channel)
        if line.full is not None and (await home.call(ask)).is_known:
            return await open_()
        try:
            # A moment at least: who is before us may be just about to be admitted.
            least = ANSWER_S if line.full is None else 0.0
            wait = None if timeout_s is None else max(end - time.monotonic(), least)
            async with asyncio.timeout(wait):
                await line.lock.acquire()
        except TimeoutError:
            raise PoolFullError(
                f"channel {op.channel!r} {line.full or 'is busy'}; group {op.prompt_uid!r} waits "
                "behind others: raise the limit or timeout_s"
            ) from None
        try:
            await self._wait_for_credit(line, op, end)
            opening = asyncio.create_task(open_())
            line.opening.add(opening)
            opening.add_done_callback(line.opening.discard)
        finally:
            line.lock.release()
        # Outside the line: the shard may be down, and the next group of another one.
        try:
            return await opening
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                # It was opened in the same moment, and nobody would ever start its rollouts.
                drop = DropGroup(op.prompt_uid, "open_cancelled", op.channel)
                if opening.result() == "accepted":
                    self._shards.later(home.call(drop))
            raise

    def _line(self, channel: str) -> _Line:
        loop = asyncio.get_running_loop()
        line = self._lines.get(channel)
        if line is None or line.loop is not loop:
            line = self._lines[channel] = _Line(loop)
        return line

    async def _wait_for_credit(self, line: _Line, op: OpenGroup, end: float) -> None:
        """Return once the whole pool has credit for one group more."""
        home = shard_of(op.prompt_uid, self._n)
        try:
            while True:
                # From before asking: whoever of these was not there yet when its shard answered
                # is counted, and who was is counted twice, until it is done.
                earlier = tuple(line.opening)
                answers = await self._shards.each(WaitCredit(op.prompt_uid, op.channel))
                line.credits |= {k: credit for k, credit in enumerate(answers) if credit}
                known = answers[home]
                if known is not None and known.is_known:
                    return
                if any(credit.shut_down for credit in line.credits.values()):
                    return  # which is for the shard to say
                credits = line.credits.values()
                if len(credits) == self._n and not any(c.used for c in credits):
                    line.is_unlimited = True
                    return
                line.full = _no_credit(credits, len(earlier))
                if line.full is None:
                    return
                left = end - time.monotonic()
                if left <= 0:
                    raise PoolFullError(
                        f"channel {op.channel!r} {line.full}; group {op.prompt_uid!r} waits until "
                        "one is leased: raise the limit or timeout_s"
                    )
                await self._freer(op, line, earlier, left)
        finally:
            line.full = None

    async def _freer(
        self, op: OpenGroup, line: _Line, earlier: Sequence[asyncio.Task[Any]], left: float
    ) -> None:
        """Return once a shard has more credit, one of `earlier` is open, or after `left` s."""
        wait = min(left, SLICE_S)
        tasks = [
            self._shards.later(
                port.call(WaitCredit(op.prompt_uid, op.channel, line.credits[k].used), wait)
            )
            for k, port in enumerate(self._ports)
            if k in line.credits
        ]
        try:
            await asyncio.wait(
                (*tasks, *earlier), timeout=wait, return_when=asyncio.FIRST_COMPLETED
            )
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()


def _no_credit(credits: Collection[Credit], n_more: int) -> str | None:
    """Why a group has to wait; None if it would be admitted by all limits together."""
    for name in dict.fromkeys(name for credit in credits for name in credit.used):
        pairs = [credit.used[name] for credit in credits if name in credit.used]
        used = sum(used for used, _ in pairs) + (n_more if name in _GROUP_LIMITS else 0)
        limit = max(limit for _, limit in pairs)
        if used >= limit:
            return f"has used {used} of {limit} ({name}) in {len(pairs)} shards"
    return None


_GROUP_LIMITS: Final = ("max_outstanding_groups", "max_ahead_versions")
"""Limits that count the groups that are being opened."""

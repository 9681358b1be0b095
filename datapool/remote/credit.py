"""This module grants credit for new groups of a pool of several shards as a whole, so that no
producer waits for a shard while the consumer waits for groups that other shards were to have: a
group's shard is a matter of chance, and a share of the limits per shard would be used up in one
first.

Every shard is asked what it holds, and the sum counts. It is exact for the groups that one client
opens, one after the other; m clients at once may go m - 1 groups over. Steps of groups that nobody
opened are blocked by their own shard.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from stepwell.datapool.errors import PoolFullError
from stepwell.datapool.ops import OpenGroup, SubmitOutcome
from stepwell.datapool.questions import Credit, WaitCredit
from stepwell.datapool.remote import shards
from stepwell.datapool.remote.batches import Batches
from stepwell.datapool.remote.link import Port
from stepwell.datapool.remote.shards import shard_of


@dataclass(slots=True)
class _Line:
    """Those who open groups in one channel, first come first; all in one event loop."""

    loop: asyncio.AbstractEventLoop
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    opening: set[asyncio.Future[Any]] = field(default_factory=set)
    """Groups that were admitted, and are perhaps not in their shard yet."""
    credits: dict[int, Credit] = field(default_factory=dict)
    """What each shard answered last; what is in one that is down still counts."""
    full: str | None = None
    """Why the first one waits."""
    is_unlimited: bool = False


class CreditLines(Batches):
    """Shards, batches out of several, and credit for new groups of all."""

    def __init__(self, ports: Sequence[Port]) -> None:
        super().__init__(ports)
        self._lines: dict[str, _Line] = {}

    async def open_group(self, op: OpenGroup, timeout_s: float | None) -> SubmitOutcome:
        """Open it once the whole pool has credit for one more."""
        home = shard_of(op.prompt_uid, self.n)
        line = self._lines.get(op.channel)
        if line is None or line.loop is not asyncio.get_running_loop():
            line = self._lines[op.channel] = _Line(asyncio.get_running_loop())
        ask = WaitCredit(op.prompt_uid, op.channel)
        if line.is_unlimited or (
            line.full is not None and (await self.ports[home].call(ask)).is_known
        ):
            return await self.ports[home].call(op, timeout_s)
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # A moment at least: who is before us may be just about to be admitted.
        least = shards.ANSWER_S if line.full is None else 0.0
        try:
            async with asyncio.timeout(None if end == math.inf else max(_left(end), least)):
                await line.lock.acquire()
        except TimeoutError:
            raise PoolFullError(
                f"channel {op.channel!r} {line.full or 'is busy'}; group {op.prompt_uid!r} waits "
                "behind others: raise the limit or timeout_s"
            ) from None

        async def open_() -> SubmitOutcome:
            return await self.ports[home].call(op, None if end == math.inf else _left(end))

        try:
            await self._wait_for_credit(op, line, end)
            opening = self.later(open_())
            line.opening.add(opening)
            opening.add_done_callback(line.opening.discard)
        finally:
            line.full = None
            line.lock.release()
        # Outside the line: the shard may be down, and the next group of another one.
        try:
            return await opening
        except asyncio.CancelledError:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                self.take_back(home, op, opening.result())  # it came in the same moment
            raise

    async def _wait_for_credit(self, op: OpenGroup, line: _Line, end: float) -> None:
        home = shard_of(op.prompt_uid, self.n)
        ask = WaitCredit(op.prompt_uid, op.channel)
        credits = line.credits
        while True:
            # From before asking: whoever of these was not there yet when its shard answered is
            # counted, and who was is counted twice, until it is done.
            earlier = tuple(line.opening)
            answers = await self.ask(dict.fromkeys(range(self.n), ask))
            credits |= answers
            if home in answers and answers[home].is_known:
                return
            if any(credit.shut_down for credit in credits.values()):
                return  # which is for the shard to say
            if len(credits) == self.n and not any(credit.used for credit in credits.values()):
                line.is_unlimited = True
            full = _no_credit(credits.values(), len(earlier))
            if full is None:
                return
            if (left := _left(end)) == 0:
                raise PoolFullError(
                    f"channel {op.channel!r} {full}; group {op.prompt_uid!r} waits until one is "
                    "leased: raise the limit or timeout_s"
                )
            line.full = full
            freer = {
                k: replace(ask, before=credits[k].used if k in credits else None)
                for k in range(self.n)
            }
            wait_s = None if left == math.inf else left
            waiting = self.later(self.ask(freer, wait_s, enough=lambda credit: True))
            try:
                await asyncio.wait((waiting, *earlier), return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    waiting.result()
            finally:
                waiting.cancel()


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _no_credit(credits: Collection[Credit], n_more: int) -> str | None:
    """Why a group has to wait; None if it would be admitted by all limits together."""
    for name in dict.fromkeys(name for credit in credits for name in credit.used):
        pairs = [credit.used[name] for credit in credits if name in credit.used]
        used, limit = sum(used for used, _ in pairs), max(limit for _, limit in pairs)
        used += n_more if name in _GROUP_LIMITS else 0
        if used >= limit:
            return f"has used {used} of {limit} ({name}) in {len(pairs)} shards"
    return None


_GROUP_LIMITS = ("max_outstanding_groups", "max_ahead_versions")
"""Limits that count the groups that are being opened."""

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

from msgspec.structs import replace

from stepwell.datapool.errors import PoolFullError
from stepwell.datapool.ops import OpenGroup, SubmitOutcome
from stepwell.datapool.questions import Credit, WaitCredit
from stepwell.datapool.remote import shards as shards_module
from stepwell.datapool.remote.batches import Batches
from stepwell.datapool.remote.link import Port
from stepwell.datapool.remote.shards import shard_of


class CreditLines(Batches):
    """Shards, batches out of several, and credit for new groups of all."""

    def __init__(self, ports: Sequence[Port]) -> None:
        super().__init__(ports)
        self._lines: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Lock]] = {}
        """Those who open groups in one channel, first come first; all in one event loop."""
        self._credits: dict[str, dict[int, Credit]] = {}
        """What each shard answered last; what is in one that is down still counts."""
        self._full: dict[str, str] = {}
        """Why the first one in a channel's line waits."""
        self._unlimited: set[str] = set()

    async def open_group(self, op: OpenGroup, timeout_s: float | None) -> SubmitOutcome:
        """Open it once the whole pool has credit for one more."""
        home = self.ports[shard_of(op.prompt_uid, self.n)]
        if op.channel in self._unlimited:
            return await home.call(op, timeout_s)
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # Outside the line: a shard that is down stops its own groups only.
        if (await home.call(WaitCredit(op.prompt_uid, op.channel))).is_known:
            return await home.call(op)
        line = self._line(op.channel)
        # A moment at least: who is before us may be just about to be admitted.
        least = 0.0 if op.channel in self._full else shards_module.ANSWER_S
        try:
            async with asyncio.timeout(None if end == math.inf else max(_left(end), least)):
                await line.acquire()
        except TimeoutError:
            raise PoolFullError(
                f"channel {op.channel!r} {self._full.get(op.channel, 'is busy')}; group "
                f"{op.prompt_uid!r} waits behind others: raise the limit or timeout_s"
            ) from None
        try:
            await self._wait_for_credit(op, end)
            return await home.call(op, None if end == math.inf else _left(end))
        finally:
            self._full.pop(op.channel, None)
            line.release()

    def _line(self, channel: str) -> asyncio.Lock:
        here = asyncio.get_running_loop()
        loop, line = self._lines.get(channel, (None, None))
        if line is None or loop is not here:
            line = asyncio.Lock()
            self._lines[channel] = here, line
        return line

    async def _wait_for_credit(self, op: OpenGroup, end: float) -> None:
        ask = WaitCredit(op.prompt_uid, op.channel)
        credits = self._credits.setdefault(op.channel, {})
        while True:
            credits |= await self.ask(dict.fromkeys(range(self.n), ask))
            if any(credit.shut_down for credit in credits.values()):
                return  # which is for the shard to say
            if len(credits) == self.n and not any(credit.used for credit in credits.values()):
                self._unlimited.add(op.channel)
            full = _no_credit(credits.values())
            if full is None:
                return
            if (left := _left(end)) == 0:
                raise PoolFullError(
                    f"channel {op.channel!r} {full}; group {op.prompt_uid!r} waits until one is "
                    "leased: raise the limit or timeout_s"
                )
            self._full[op.channel] = full
            freer = {
                k: replace(ask, before=credits[k].used if k in credits else None)
                for k in range(self.n)
            }
            wait_s = None if left == math.inf else left
            await self.ask(freer, wait_s, enough=lambda credit: True)


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _no_credit(credits: Collection[Credit]) -> str | None:
    """Why a group has to wait; None if it would be admitted by all limits together."""
    for name in dict.fromkeys(name for credit in credits for name in credit.used):
        pairs = [credit.used[name] for credit in credits if name in credit.used]
        used, limit = sum(used for used, _ in pairs), max(limit for _, limit in pairs)
        if used >= limit:
            return f"has used {used} of {limit} ({name}) in {len(pairs)} shards"
    return None

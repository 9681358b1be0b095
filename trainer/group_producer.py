"""Whoever brings the groups that are trained: agents that this run starts, conversations, traffic.

    GroupProducer ──► channel of the pool ──lease──► Batches
          ▲ leased, refund, settle: what became of them     close_window, open_window: publications

By default groups come by themselves, and nothing has to be done about them. Does not own leases and
batches (`batches.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.trainer.ledger import Ledger


class GroupProducer:
    """Brings groups into one channel; see the module's docstring.

    Args:
        min_n: rollouts that a group is trained with at the least.
    """

    endless = False
    """Groups come for ever, so training waits for them without a limit."""

    def __init__(self, pool: DataPoolClient, ledger: Ledger, min_n: int) -> None:
        self._pool = pool
        self.ledger = ledger
        self.min_n = min_n

    def running(self) -> AbstractAsyncContextManager[object]:
        """Groups are brought inside the block."""
        return nullcontext()

    @property
    def has_ended(self) -> bool:
        """No more groups come, unless one is given back."""
        return False

    async def wait_ended(self) -> None:
        """Return once `has_ended`.

        Raises:
            RolloutError: groups cannot be brought (so does any error of the infrastructure).
        """
        await asyncio.Event().wait()

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """Training took these groups: whatever becomes of their leases, it has them."""

    def refund(self, n: int) -> None:
        """`n` of the groups that training took are not trained: others may take their place."""

    def settle(self, prompt_uids: Iterable[str]) -> None:
        """These groups are trained and their checkpoint is durable."""

    async def close_window(self) -> None:
        """New weights are about to be published."""

    def open_window(self) -> None:
        """The engines serve the weights that the next groups are to be begun under."""

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """State for a checkpoint that holds the groups `consumed`."""
        return {}

    async def resume(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Go on where `state` was taken; None: at the start."""

    def metrics(self) -> dict[str, float]:
        """Figures for the record of an optimizer step."""
        return {}

"""This module says what the trainer needs of whatever brings its groups, so that our own
rollouts, live traffic and recordings train alike.

    Producer   (`rollout/`)     agents that this run starts, on the tasks of `data`
    Traffic    (`live.py`)      agents that nobody here starts, through the gateway

Both bring groups into the pool, where the trainer leases them. What differs is what is known of
them: prompts can be issued again, traffic cannot; tasks end, traffic does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from stepwell.trainer.ledger import Ledger


class GroupProducer(Protocol):
    """Brings groups into the train channel, and keeps account of them."""

    ledger: Ledger
    """Proves that none is trained twice."""

    @property
    def min_n(self) -> int:
        """Rollouts that a group is trained with at the least."""

    @property
    def endless(self) -> bool:
        """Groups may stay away for any time: nobody promised them."""

    def running(self) -> AbstractAsyncContextManager[object]:
        """Groups are brought inside the block."""

    async def ended(self) -> None:
        """Returns once no further group will come, unless one is given back; raises what made the
        producer fail."""

    @property
    def has_ended(self) -> bool:
        """Whether `ended` would return."""

    def leased(self, prompt_uids: Iterable[str]) -> None:
        """Training took these groups: whatever becomes of their leases, it has them."""

    def refund(self, n: int) -> None:
        """`n` of the groups that training took are not trained: others may take their place."""

    def settle(self, prompt_uids: Iterable[str]) -> None:
        """The checkpoint that holds these groups is durable."""

    async def close_window(self) -> None:
        """Weights are about to be published, in a mode in which generation waits for that."""

    def open_window(self) -> None:
        """The engines serve them."""

    def state_dict(self, consumed: Set[str]) -> dict[str, Any]:
        """For a checkpoint that holds the groups `consumed`."""

    async def resume(self, state: Mapping[str, Any] | None, version: int) -> None:
        """Bring source and pool to what the checkpoint `state` says, of policy version `version`;
        None: there is no checkpoint, and what a former process held is free again."""

    def metrics(self) -> dict[str, float]:
        """For the record of an optimizer step."""

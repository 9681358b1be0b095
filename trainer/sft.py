"""This module brings conversations that somebody has written into the pool, so that SFT is trained
by the same loop as rollouts: durable, leased, acked with the checkpoint, none skipped or repeated.

    data.sft ──PromptSource──► Producer ──group of one, open──► ConversationWriter ──► channel "sft"
                                                                 masks, to_steps      └─► ready

A `Producer` (`rollout/producer.py`) issues them like prompts: in the order of the epoch, with an
entry in the ledger and what a checkpoint needs. In place of agents there is a worker that writes
the conversation as Steps. They have no log-probs and no reward, and do not go stale.

Owns who brings conversations. Does not own what one is (`data/conversations.py`), masks
(`backends/masks`) or the loss (`algorithms/policy_losses/likelihood.py`).
"""

from __future__ import annotations

import asyncio

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import SFT
from stepwell.trainer.config import RolloutConfig
from stepwell.trainer.data import Conversations, PromptSource, Task
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.rollout.producer import Producer
from stepwell.trainer.rollout.worker import COMPLETE


class ConversationWriter:
    """A worker of a `Producer` that writes the task's conversation in place of running an agent."""

    def __init__(self, pool: DataPoolClient, conversations: Conversations) -> None:
        self._pool = pool
        self._conversations = conversations
        self._in_turn = asyncio.Lock()
        """Conversations are ready in the order in which they were issued, so that runs repeat."""

    async def run_group(
        self, task: Task, prompt_uid: str, n: int, channel: str = SFT, n_greedy: int = 0
    ) -> dict[str, int]:
        async with self._in_turn:
            written = await asyncio.to_thread(self._conversations.written, task, prompt_uid)
            await self._pool.submit_steps(written.steps, channel, pictures=written.pictures)
        return {COMPLETE: 1}

    async def ready(self) -> None:
        return


def sft_producer(
    rollout: RolloutConfig,
    source: PromptSource,
    conversations: Conversations,
    pool: DataPoolClient,
    ledger: Ledger,
) -> Producer:
    """Keeps the channel `sft` fed. The channel's `max_outstanding_groups` is the brake."""
    alone = rollout.model_copy(update={"n": 1, "min_n": 1})
    writer = ConversationWriter(pool, conversations)
    return Producer(alone, source, pool, [writer], ledger, channel=SFT)

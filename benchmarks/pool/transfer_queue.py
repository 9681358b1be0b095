"""TransferQueue 0.1.11 (PyPI), as its tutorials and its own performance test use it.

One async client, samples as rows of a TensorDict (jagged where lengths differ), `async_put` without
metadata, `async_get_meta` + `async_get_data` in polling mode with the sequential sampler: the mode
without polling blocks its controller for 5 s whenever too little is there. It has no groups; what
arrives in order is served in order.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray

from benchmarks.pool.cluster import pid_of
from benchmarks.pool.systems import Store
from benchmarks.pool.workload import STEPS_PER_FETCH, Call

INSTALL = (
    "pip install --no-deps -c constraints.txt "
    "TransferQueue==0.1.11 tensordict pyvers cloudpickle pyzmq msgspec"
)
"""Its own dependencies would bring Ray's dashboard and more; this is what it imports."""
FIELDS = ["prompt_ids", "response_ids", "log_probs", "rest"]
POLL_S = 0.001


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("transfer_queue", "tensordict"))


class TransferQueue(Store):
    """Its controller and two storage units, the default."""

    name = "TransferQueue 0.1.11"
    max_fetches = 1  # two would get the same samples: it is asked for metadata first

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
        logging.getLogger("transfer_queue").setLevel(logging.ERROR)
        tq: Any = importlib.import_module("transfer_queue")
        self._torch: Any = importlib.import_module("torch")
        self._tensordict: Any = importlib.import_module("tensordict")
        omegaconf: Any = importlib.import_module("omegaconf")
        config = omegaconf.OmegaConf.create({"controller": {"polling_mode": True}})
        # Its start and its end wait for its actors with ray.get.
        await asyncio.to_thread(tq.init, config)
        self._client = tq.get_client()
        self._partitions = map("train_{}".format, itertools.count())
        self._partition = next(self._partitions)
        controller = ray.get_actor("TransferQueueController", "transfer_queue")
        units = [ray.get_actor(f"TransferQueueStorageUnit#{rank}") for rank in range(2)]
        self.pids = [await pid_of(actor) for actor in (controller, *units)]
        try:
            yield
        finally:
            await asyncio.to_thread(tq.close)

    async def drained(self) -> None:
        # A fresh partition: its controller scans all that the present one ever held.
        await self._client.async_clear_partition(self._partition)
        self._partition = next(self._partitions)

    async def submit(self, calls: Sequence[Call]) -> None:
        await self._client.async_put(self._pack(calls), partition_id=self._partition)

    def _pack(self, calls: Sequence[Call]) -> Any:
        torch = self._torch
        return self._tensordict.TensorDict(
            {
                "prompt_ids": torch.nested.as_nested_tensor(
                    [torch.tensor(c.prompt_ids, dtype=torch.int32) for c in calls],
                    layout=torch.jagged,
                ),
                # Responses of this workload are equally long, the form it is fastest with.
                "response_ids": torch.tensor([c.response_ids for c in calls], dtype=torch.int32),
                "log_probs": torch.tensor([c.log_probs for c in calls], dtype=torch.float32),
                "rest": self._tensordict.NonTensorStack.from_list([call[3:] for call in calls]),
            },
            batch_size=len(calls),
        )

    async def fetch(self) -> Any:
        while True:
            meta = await self._client.async_get_meta(
                data_fields=FIELDS,
                batch_size=STEPS_PER_FETCH,
                partition_id=self._partition,
                task_name="train",
            )
            if meta.size:
                return await self._client.async_get_data(meta)
            await asyncio.sleep(POLL_S)

    def unpack(self, batch: Any) -> list[Call]:
        columns = zip(
            batch["prompt_ids"].unbind(),
            batch["response_ids"].unbind(),
            batch["log_probs"].unbind(),
            batch["rest"],
            strict=True,
        )
        return [
            Call(
                prompt.flatten().tolist(),
                response.flatten().tolist(),
                log_probs.flatten().tolist(),
                *getattr(rest, "data", rest),
            )
            for prompt, response, log_probs, rest in columns
        ]

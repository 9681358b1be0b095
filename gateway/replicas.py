"""This module chooses which gateway replica serves a new trajectory, so that the address that is
handed out is the routing.

    POST /init_trajectory at any replica ──► place ──► origin ──► base_url: every call goes there

A replica that does not answer is left out. Conversations without an address of their own stay with
the replica that they talk to. What one replica deletes the others forget (`have_forgotten`).

Does not own: starting replicas (`server.py`); which names in a request are ours (`access.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from stepwell.backends.engines.connections import ConnectionPool
from stepwell.gateway.config import Wiring
from stepwell.gateway.errors import ReplicaUnavailableError

CHECK_S = 1.0
"""Seconds that a check of another replica is valid, and that it waits for an answer at most."""
FORGET_S = 10.0
"""Seconds that another replica has to forget a trajectory."""
FORGET_HEADER = "x-stepwell-replica"
"""Header of a DELETE from another replica, which has deleted the trajectory from the pool."""


class Replicas:
    """The replicas as one of them sees them: whose address to hand out. Owned by the app."""

    def __init__(self, wiring: Wiring, public_url: str | None) -> None:
        self.index = wiring.replica
        self.urls = wiring.replica_urls
        """Origin of each; another value once one serves elsewhere (`server.py`)."""
        self._public_url = public_url
        self._connections = ConnectionPool()
        self._turns = itertools.count(self.index)
        self._looks = [(float("-inf"), True)] * len(self.urls)
        """Time of each replica's last check (`time.monotonic()`), and whether it answered."""

    async def place(self, trajectory_uid: str | None = None) -> int | None:
        """The replica that is to serve a new trajectory; None: there is only this one.

        Args:
            trajectory_uid: if the client chose it. The same one gets the same replica, whoever
                is asked, while that answers.
        """
        n = len(self.urls)
        if n <= 1:
            return None
        first = next(self._turns) if trajectory_uid is None else crc32(trajectory_uid.encode())
        for k in range(n):
            if await self._is_up((first + k) % n):
                return (first + k) % n
        return self.index

    def origin(self, replica: int) -> str:
        """Origin of a replica as clients are told it."""
        if self._public_url is None:
            return self.urls[replica]
        return self._public_url.replace("{replica}", str(replica))

    async def have_forgotten(self, keys: Mapping[str, str]) -> None:
        """Have the other replicas forget trajectories. One that is gone has nothing to forget.

        Args:
            keys: by the path of each trajectory, one that may delete it.

        Raises:
            ReplicaUnavailableError: one runs, and did not do it.
        """
        others = [i for i in range(len(self.urls)) if i != self.index]
        done = await asyncio.gather(*(self._has_forgotten(i, keys) for i in others))
        if left := [str(i) for i, is_done in zip(others, done, strict=True) if not is_done]:
            raise ReplicaUnavailableError(
                f"deleted from the DataPool, but replica {', '.join(left)} did not answer and may "
                f"still know it; repeat DELETE {' and DELETE '.join(keys)}"
            )

    async def _has_forgotten(self, replica: int, keys: Mapping[str, str]) -> bool:
        for path, key in keys.items():
            headers = f"authorization: Bearer {key}\r\n{FORGET_HEADER}: {self.index}\r\n"
            url = self.urls[replica] + path
            try:
                async with asyncio.timeout(FORGET_S):
                    status, _ = await self._connections.request(
                        "DELETE", url, headers=headers.encode()
                    )
                if status != 200:
                    return False
            except ConnectionRefusedError:
                return True
            except (ConnectionError, TimeoutError):
                return False
        return True

    async def look(self) -> None:
        """Find out which of them answer, as `statistics` tells it."""
        await asyncio.gather(*map(self._is_up, range(len(self.urls))))

    def statistics(self) -> dict[str, Any]:
        return {
            "replica": self.index,
            "replicas": [
                {"url": url, "up": is_up}
                for url, (_, is_up) in zip(self.urls, self._looks, strict=True)
            ],
        }

    def close(self) -> None:
        self._connections.close()

    async def _is_up(self, replica: int) -> bool:
        looked_at, is_up = self._looks[replica]
        now = time.monotonic()
        if replica != self.index and now - looked_at > CHECK_S:
            self._looks[replica] = now, is_up  # others take that meanwhile
            is_up = await self._answers(self.urls[replica])
            self._looks[replica] = time.monotonic(), is_up
        return is_up

    async def _answers(self, url: str) -> bool:
        try:
            async with asyncio.timeout(CHECK_S):
                status, _ = await self._connections.request("GET", f"{url}/health")
            return status == 200
        except (ConnectionError, TimeoutError):
            return False

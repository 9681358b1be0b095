"""Pictures of leased steps, fetched when they are needed, within a bound of memory.

    lease ──Step.pictures: references──► PictureCache.of(step) ──ReadPictures──► pool

A lease holds references: 64 groups of screenshots are gigabytes, and one batch at a time is
computed. What was used last stays; the rollouts of a group share their prompt's pictures. Fetch
before the lease is acked: then the pool forgets them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import TRAIN, Step


class PictureCache:
    """PNG of the pictures of steps.

    Args:
        max_bytes: what stays in memory, besides those of the steps asked for last.
    """

    def __init__(
        self, client: DataPoolClient, channel: str = TRAIN, max_bytes: int = 512 << 20
    ) -> None:
        self._client, self._channel, self._max_bytes = client, channel, max_bytes
        self._known: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """By prompt_uid and digest: one owner's. The last used is the last."""
        self.n_bytes = 0

    async def of(self, step: Step) -> dict[str, bytes]:
        """PNG of each picture of a step, by digest. Raises as `of_all`."""
        return await self.of_all([step])

    async def of_all(self, steps: Iterable[Step]) -> dict[str, bytes]:
        """PNG of each picture of steps of one group, by digest.

        Raises:
            TrajectoryClosedError, UnknownTrajectoryError: it left the pool.
            DamagedFileError: a picture is not what was stored.
        """
        found: dict[str, bytes] = {}
        missing: dict[str, dict[str, str]] = {}
        for step in steps:
            for picture in step.pictures:
                if picture.digest in found:
                    continue
                key = step.prompt_uid, picture.digest
                if (data := self._known.get(key)) is not None:
                    self._known.move_to_end(key)
                    found[picture.digest] = data
                else:
                    found[picture.digest] = b""
                    own = missing.setdefault(step.trajectory_uid, {})
                    own[picture.digest] = step.prompt_uid
        for trajectory_uid, wanted in missing.items():
            read = await self._client.read_pictures(trajectory_uid, wanted, self._channel)
            for digest, data in read.items():
                found[digest] = data
                self._keep((wanted[digest], digest), data)
        return found

    def _keep(self, key: tuple[str, str], data: bytes) -> None:
        self.n_bytes += len(data) - len(self._known.get(key, b""))
        self._known[key] = data
        while self.n_bytes > self._max_bytes and self._known:
            _, gone = self._known.popitem(last=False)
            self.n_bytes -= len(gone)

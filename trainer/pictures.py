"""Pictures of a batch, read from the pool while its groups are leased."""

from __future__ import annotations

from collections.abc import Iterable

from stepwell.backends.errors import BatchError
from stepwell.datapool.remote.lease_keeper import LeaseKeeper
from stepwell.datapool.types import Group

MAX_PICTURE_BYTES = 4 * 2**30
"""Most bytes of PNGs that one batch holds in memory."""


async def read_pictures(leased: Iterable[tuple[LeaseKeeper, Group]]) -> dict[str, bytes]:
    """Pictures that the steps of groups name, each read by the keeper of its lease; PNG by digest.

    Raises:
        BatchError: they are more than `MAX_PICTURE_BYTES`.
    """
    found: dict[str, bytes] = {}
    for n, (keeper, group) in enumerate(leased, 1):
        found |= await keeper.pictures(group)
        if sum(map(len, found.values())) > MAX_PICTURE_BYTES:
            raise BatchError(
                f"the pictures of {n} groups of a batch have more than "
                f"{MAX_PICTURE_BYTES:,} bytes; train on fewer prompts in a batch, or send "
                "smaller pictures (max_pixels in the model's preprocessor_config.json)"
            )
    return found

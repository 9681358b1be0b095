"""Leases and deadlines last as long as they were given, whatever happens to the wall clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.datapool import DataPoolClient, PoolConfig, Step, clock
from stepwell.datapool.errors import LeaseExpiredError
from tests.datapool.pools import pool_here, service_of

MakeStep = Callable[..., Step]
HOUR = 3600.0


@pytest.fixture
def set_wall_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    true_time = time.time

    def set_(by_seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: true_time() + by_seconds)

    return set_


def restarted(pool: DataPoolClient, folder: Path) -> DataPoolClient:
    """End the pool and return its successor over the same folder."""
    service_of(pool).close()
    return pool_here(None, folder)


@pytest.mark.parametrize("durability", ["none", "process"])
async def test_a_lease_expires_in_time_when_the_wall_clock_is_set_back(
    tmp_path: Path, make_step: MakeStep, set_wall_clock: Callable[[float], None], durability: str
) -> None:
    config = PoolConfig(durability=durability)
    pool = pool_here(config, None if durability == "none" else tmp_path)
    await pool.submit_step(make_step("t", is_last=True))
    await pool.lease_batch(lease_s=0.1)
    set_wall_clock(-HOUR)
    again = await pool.lease_batch(timeout_s=None)
    assert again.groups[0].delivery == 2


async def test_a_lease_is_held_when_the_wall_clock_is_set_forward(
    make_step: MakeStep, set_wall_clock: Callable[[float], None]
) -> None:
    pool = pool_here(PoolConfig(durability="none"))
    await pool.submit_step(make_step("t", is_last=True))
    lease = await pool.lease_batch(lease_s=HOUR / 2)
    set_wall_clock(HOUR)
    assert await pool.lease_batch(timeout_s=0.05) is None
    await pool.ack(lease.lease_id)


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
async def test_a_lease_keeps_its_time_through_a_restart_and_a_corrected_clock(
    tmp_path: Path, make_step: MakeStep, set_wall_clock: Callable[[float], None], jump: float
) -> None:
    pool = pool_here(None, tmp_path)
    for uid in "ab":
        await pool.submit_step(make_step(uid, f"p{uid}", is_last=True))
    brief = await pool.lease_batch(lease_s=0.1)
    long = await pool.lease_batch(lease_s=HOUR / 2)
    set_wall_clock(jump)
    pool = restarted(pool, tmp_path)
    again = await pool.lease_batch(timeout_s=None)
    assert [g.prompt_uid for g in again.groups] == [g.prompt_uid for g in brief.groups]
    with pytest.raises(LeaseExpiredError):
        await pool.ack(brief.lease_id)
    await pool.ack(long.lease_id)


async def test_after_a_reboot_time_goes_on_and_not_back(
    tmp_path: Path,
    make_step: MakeStep,
    set_wall_clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pool_here(None, tmp_path / "pool")
    await pool.open_group("p", 2, deadline_s=0.2)
    await pool.submit_step(make_step("t", "p", is_last=True))
    (tmp_path / "boot_id").write_text(f"{uuid.uuid4()}\n")
    monkeypatch.setattr(clock, "BOOT_ID", tmp_path / "boot_id")
    set_wall_clock(-HOUR)
    pool = restarted(pool, tmp_path / "pool")
    lease = await pool.lease_batch(timeout_s=None)
    assert lease.groups[0].prompt_uid == "p", "its deadline came"

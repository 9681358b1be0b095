"""Leases and deadlines last as long as they were given, whatever happens to the wall clock."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from stepwell.datapool import DataPoolActor, PoolConfig, Step, process
from stepwell.datapool.errors import LeaseExpiredError

MakeStep = Callable[..., Step]
HOUR = 3600.0


@pytest.fixture
def set_wall_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    true_time = time.time

    def set_(by_seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: true_time() + by_seconds)

    return set_


def restarted(actor: DataPoolActor, folder: Path) -> DataPoolActor:
    """What a killed pool's successor finds."""
    assert actor._journal is not None
    actor._journal.close()
    return DataPoolActor(None, folder)


@pytest.mark.parametrize("durability", ["none", "process"])
async def test_a_lease_expires_in_time_when_the_wall_clock_is_set_back(
    tmp_path: Path, make_step: MakeStep, set_wall_clock: Callable[[float], None], durability: str
) -> None:
    config = PoolConfig(durability=durability)
    actor = DataPoolActor(config, None if durability == "none" else tmp_path)
    await actor.submit_step(make_step("t", is_last=True))
    await actor.lease_batch(lease_s=0.1)
    set_wall_clock(-HOUR)
    again = await actor.lease_batch(timeout_s=None)
    assert again.groups[0].delivery == 2


async def test_a_lease_is_held_when_the_wall_clock_is_set_forward(
    make_step: MakeStep, set_wall_clock: Callable[[float], None]
) -> None:
    actor = DataPoolActor(PoolConfig(durability="none"))
    await actor.submit_step(make_step("t", is_last=True))
    lease = await actor.lease_batch(lease_s=HOUR / 2)
    set_wall_clock(HOUR)
    assert await actor.lease_batch(timeout_s=0.05) == "nothing_yet"
    await actor.ack(lease.lease_id)


@pytest.mark.parametrize("jump", [-HOUR, HOUR])
async def test_a_lease_keeps_its_time_through_a_restart_and_a_corrected_clock(
    tmp_path: Path, make_step: MakeStep, set_wall_clock: Callable[[float], None], jump: float
) -> None:
    actor = DataPoolActor(None, tmp_path)
    for uid in "ab":
        await actor.submit_step(make_step(uid, f"p{uid}", is_last=True))
    brief = await actor.lease_batch(lease_s=0.1)
    long = await actor.lease_batch(lease_s=HOUR / 2)
    set_wall_clock(jump)
    actor = restarted(actor, tmp_path)
    again = await actor.lease_batch(timeout_s=None)
    assert [g.prompt_uid for g in again.groups] == [g.prompt_uid for g in brief.groups]
    with pytest.raises(LeaseExpiredError):
        await actor.ack(brief.lease_id)
    await actor.ack(long.lease_id)


async def test_after_a_reboot_time_goes_on_and_not_back(
    tmp_path: Path,
    make_step: MakeStep,
    set_wall_clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actor = DataPoolActor(None, tmp_path / "pool")
    await actor.open_group("p", 2, deadline_s=0.2)
    await actor.submit_step(make_step("t", "p", is_last=True))
    (tmp_path / "boot_id").write_text(f"{uuid.uuid4()}\n")
    monkeypatch.setattr(process, "BOOT_ID", tmp_path / "boot_id")
    set_wall_clock(-HOUR)
    actor = restarted(actor, tmp_path / "pool")
    lease = await actor.lease_batch(timeout_s=None)
    assert lease.groups[0].prompt_uid == "p", "its deadline came"

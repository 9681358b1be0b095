"""DELETE of what is in the archive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from stepwell.datapool.ops import OpenGroup
from stepwell.gateway.deletions import FileDeletions
from tests.datapool.test_archive import SECRET, Archived


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = Archived(tmp_path)
    for i in range(100):
        run.train(f"t{i}", SECRET)
    run.archive()
    yield run
    run.pool.journal.close()


async def delete(world: Any, uid: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.delete(f"{world.url}/v1/trajectories/{uid}") as response,
    ):
        return response.status, await response.text()


async def test_a_hundred_deletions_at_once_take_few_processes(
    world: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gateway.file_deletions = FileDeletions(run.path / "archive", None)
    started, start = [], asyncio.create_subprocess_exec

    async def counted(*args: Any, **kwargs: Any) -> Any:
        started.append(args)
        return await start(*args, **kwargs)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", counted)
    answers = await asyncio.gather(*(delete(world, f"t{i}") for i in range(100)))
    assert {status for status, _ in answers} == {200}
    assert len(started) < 10
    assert run.reader.rows().items == []
    assert b"secret" not in b"".join(
        path.read_bytes() for path in (run.path / "archive").rglob("*") if path.is_file()
    )


async def test_what_an_archive_could_not_delete_is_forgotten_here(
    world: Any, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world.gateway.file_deletions = FileDeletions(run.path / "archive", None)
    client = await world.client("mine", "p1")
    messages = [{"role": "user", "content": "a secret"}]
    await client.chat.completions.create(model="m", messages=messages)
    (run.path / "archive" / "deleted.jsonl").write_bytes(b"damaged\n")
    status, said = await delete(world, "mine")
    assert status == 503
    assert "the archive may still hold it" in said
    assert "is not what was written" in caplog.text
    assert world.gateway.trajectories.known("mine") is None


async def test_a_deletion_whose_process_cannot_be_started_says_what_is_left_and_to_repeat_it(
    world: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.gateway.file_deletions = FileDeletions(run.path / "archive", None)
    with monkeypatch.context() as patched:
        patched.setattr("sys.executable", "/nowhere/python")
        status, body = await delete(world, "t0")
    assert status == 503
    assert "the archive may still hold it" in body
    assert (await delete(world, "t0"))[0] == 200


async def test_archived_siblings_are_forgotten_here_too(world: Any, tmp_path: Path) -> None:
    """The pool knows nothing of a group that is archived: the archive says who was in it."""
    run = Archived(tmp_path)
    run.pool("apply", OpenGroup("p1", 2))
    for uid in ("mine", "other"):
        client = await world.client(uid, "p1")
        messages = [{"role": "user", "content": f"of {uid}"}]
        await client.chat.completions.create(model="m", messages=messages)
        run.turn(uid, "Hello?", "Hi.", "p1")
        run.pool("complete_trajectory", uid, 1.0)
    await world.pool.drop_group("p1", "archived")
    run.pool("ack", run.pool("lease_batch", 1).lease_id)
    await asyncio.to_thread(run.archive)
    run.pool.journal.close()
    world.gateway.file_deletions = FileDeletions(tmp_path / "archive", None)
    assert world.gateway.trajectories.known("other") is not None
    assert (await delete(world, "mine"))[0] == 200
    assert world.gateway.trajectories.known("mine") is None
    assert world.gateway.trajectories.known("other") is None


@pytest.mark.parametrize("has_archive", [True, False])
async def test_the_trainers_copies_go_before_the_answer(
    world: Any, tmp_path: Path, run: Any, *, has_archive: bool
) -> None:
    """Also those of siblings, which the copies alone know where there is no archive."""
    lines = [
        {"trajectory_uid": uid, "prompt_uid": group, "prompt": f"said by {uid}"}
        for uid, group in (("t1", "p-t1"), ("mate", "p-t1"), ("t2", "p-t2"))
    ]
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    archive = run.path / "archive" if has_archive else None
    world.gateway.file_deletions = FileDeletions(archive, tmp_path)
    client = await world.client("mate", "p-t1")
    messages = [{"role": "user", "content": "hi"}]
    await client.chat.completions.create(model="m", messages=messages)
    await world.pool.drop_group("p-t1", "archived")
    assert (await delete(world, "t1"))[0] == 200
    assert rollouts.read_bytes() == orjson.dumps(lines[2]) + b"\n"
    assert world.gateway.trajectories.known("mate") is None

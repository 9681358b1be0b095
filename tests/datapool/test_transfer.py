"""A channel exported to a file, and the file imported into another channel, through a real actor:
what is fetched there is what would have been fetched where it comes from."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray

from stepwell.datapool import (
    ChannelConfig,
    DataPoolClient,
    PoolConfig,
    Step,
    Trajectory,
    VersionSpan,
    client_of,
    start_data_pool,
)
from stepwell.datapool.errors import (
    ExportError,
    GroupClosedError,
    GroupConflictError,
    InvalidRequestError,
    PoolFullError,
    StepConflictError,
)
from stepwell.datapool.files import transfer
from stepwell.datapool.files.export import read, read_rows, write
from stepwell.datapool.files.transfer import export_channel, import_channel
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.types import MAX_LEVELS
from tests.builders import until

BOTH = pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
NARROW = "narrow"


@pytest.fixture(scope="module")
def shared_actor(cluster):
    narrow = ChannelConfig(max_outstanding_groups=2)
    return start_data_pool(PoolConfig(channels={NARROW: narrow}), name=uuid.uuid4().hex)


@pytest.fixture
def client(shared_actor):
    return client_of([shared_actor])


@pytest.fixture
def channel():
    """A channel of this test's own, so that tests can share the actor."""
    return uuid.uuid4().hex


@pytest.fixture
def other():
    return uuid.uuid4().hex


def build_chain(trajectory_uid: str, prompt_uid: str, n: int = 3, **fields: Any) -> list[Step]:
    """Each prompt extends the tokens before it; the last but one saw a weight update."""
    steps: list[Step] = []
    tokens = [1, 2]
    for i in range(n):
        response = [10 + i, 20 + i]
        spans = (VersionSpan(i, 0, 1), VersionSpan(i + 1, 1, 2)) if i == n - 2 else ()
        steps.append(
            Step(
                prompt_ids=tokens,
                response_ids=response,
                rollout_log_probs=[-0.1, -0.2 - i],
                trajectory_uid=trajectory_uid,
                prompt_uid=prompt_uid,
                step_index=i,
                policy_version=i,
                parent_index=i - 1 if i else None,
                version_spans=spans,
                finish_reason="stop",
                metadata={"turn": i, "tools": ("a", b"b")},
                **fields,
            )
        )
        tokens = [*tokens, *response, 30 + i]
    return steps


async def finish(
    client: DataPoolClient, channel: str, prompt_uid: str, *uids: str, reward: float | None = None
) -> None:
    for uid in uids:
        await client.open_trajectory(uid, prompt_uid, 1, {"agent": uid}, channel)
        await client.submit_steps(build_chain(uid, prompt_uid), channel)
        await client.complete_trajectory(uid, reward, channel=channel)


async def fill(client: DataPoolClient, channel: str) -> None:
    """Groups in every state: leased, ready (one of them undeclared), held, open."""
    where = {"channel": channel}
    await client.open_group("leased", 2, metadata={"task": 1}, **where)
    await finish(client, channel, "leased", "l0", reward=1.0)
    await finish(client, channel, "leased", "l1", reward=0.0)
    assert await client.lease_batch(**where) is not None
    await client.open_group("ready", 3, min_rollouts=2, metadata={"task": 2}, **where)
    await finish(client, channel, "ready", "r0", reward=0.5)
    await finish(client, channel, "ready", "r1")
    await client.set_reward("r1", -1.0, **where)
    await client.set_reward("r1", 0.25, 0, **where)
    await client.submit_step(build_chain("r2", "ready")[0], **where)
    await client.abort_trajectory("r2", "crash", **where)
    await client.submit_steps(build_chain("u0", "undeclared", reward=0.125), **where)
    await client.complete_trajectory("u0", **where)
    await client.open_group("held", 2, **where)
    await finish(client, channel, "held", "h0", "h1", reward=2.0)
    await client.mark("held", trainable=False, note="check", **where)
    await client.open_group("open", 3, **where)
    # One whose second step never came.
    chain = build_chain("o0", "open")
    await client.submit_steps([chain[0], chain[2]], **where)
    await client.complete_trajectory("o0", 3.0, **where)
    await client.submit_steps(build_chain("o1", "open")[:2], **where)
    await client.set_reward("o1", 7.0, **where)


async def fetched(client: DataPoolClient, channel: str) -> dict[str, dict[str, Trajectory]]:
    """All groups that can be leased now, and that are."""
    groups: dict[str, dict[str, Trajectory]] = {}
    while (lease := await client.lease_batch(channel=channel)) is not None:
        for group in lease.groups:
            groups[group.prompt_uid] = {t.trajectory_uid: t for t in group.trajectories}
    return groups


async def groups_of(client: DataPoolClient, channel: str) -> dict[str, Any]:
    rows = (await client.list_groups(channel, limit=1000)).items
    return {row.prompt_uid: row for row in rows}


@BOTH
async def test_what_is_fetched_after_an_import_is_what_was_exported(
    client, channel, other, tmp_path, suffix
):
    await fill(client, channel)
    before = await client.get_statistics(channel)
    summary = await export_channel(client, tmp_path / f"x.{suffix}", channel)
    assert (summary.n_trajectories, summary.n_without_steps) == (9, 1)
    after = await client.get_statistics(channel)
    assert (after["groups"], after["steps"]) == (before["groups"], before["steps"])

    imported = await import_channel(client, tmp_path / f"x.{suffix}", other)
    assert (imported.n_groups, imported.n_trajectories, imported.n_steps) == (5, 8, 23)
    assert imported.n_left_out == 1
    rows = await groups_of(client, other)
    assert {uid: (row.state, row.n_rollouts) for uid, row in rows.items()} == {
        "leased": ("ready", 2),
        "ready": ("ready", 2),
        "undeclared": ("ready", 1),
        "held": ("held", 2),
        "open": ("ready", 1),
    }
    assert rows["held"].marks.note == "check"
    assert (rows["leased"].metadata, rows["ready"].metadata) == ({"task": 1}, {"task": 2})
    # Here as there: what the consumer that had a lease got, and what others would get.
    for where in (channel, other):
        await client.release_leases(where)
        await client.mark("held", trainable=None, channel=where)
    await client.abort_trajectory("o1", "over", channel=channel)
    await client.open_trajectory("o2", "open", channel=channel)
    await client.abort_trajectory("o2", "over", channel=channel)
    original, copy = await fetched(client, channel), await fetched(client, other)
    assert copy == original
    assert {t.reward for t in copy["ready"].values()} == {0.5, -0.75}
    assert {t.reward for t in copy["leased"].values()} == {1.0, 0.0}
    assert [s.step_index for s in copy["open"]["o0"].steps] == [0, 2]
    assert copy["undeclared"]["u0"].reward == 0.375
    assert copy["leased"]["l0"].attempt == 1
    assert copy["leased"]["l0"].metadata == {"agent": "l0"}


async def test_a_second_import_changes_nothing(client, channel, other, tmp_path):
    await fill(client, channel)
    await client.mark(trajectory_uid="r0", quality=0.5, channel=channel)
    await export_channel(client, tmp_path / "x.jsonl", channel)
    first = await import_channel(client, tmp_path / "x.jsonl", other)
    before = await client.list_trajectories(other, limit=1000)
    assert await import_channel(client, tmp_path / "x.jsonl", other) == first
    assert await client.list_trajectories(other, limit=1000) == before
    found = {row.trajectory_uid: row for row in before.items}
    assert found["r0"].marks.quality == 0.5


async def test_what_was_served_already_is_not_imported_again(client, channel, tmp_path):
    await client.open_group("p", 1, channel=channel)
    await finish(client, channel, "p", "t", reward=1.0)
    await export_channel(client, tmp_path / "x.jsonl", channel)
    assert await client.fetch_batch(channel=channel) is not None
    with pytest.raises(GroupClosedError, match="was acked"):
        await import_channel(client, tmp_path / "x.jsonl", channel)


async def test_other_content_under_the_same_uids_is_an_error(client, channel, other, tmp_path):
    await client.open_group("p", 1, channel=channel)
    await finish(client, channel, "p", "t", reward=1.0)
    await export_channel(client, tmp_path / "x.jsonl", channel)
    await client.open_group("p", 3, channel=other)
    with pytest.raises(GroupConflictError):
        await import_channel(client, tmp_path / "x.jsonl", other)
    # Its outcome reward is in its last step now, which makes that another one.
    with pytest.raises(StepConflictError):
        await import_channel(client, tmp_path / "x.jsonl", channel)


async def test_running_trajectories_are_in_the_file_and_left_out_of_an_import(
    client, channel, other, tmp_path
):
    await fill(client, channel)
    await export_channel(client, tmp_path / "x.parquet", channel, prompt_uid="open")
    found = {e.trajectory.trajectory_uid: e for e in read(tmp_path / "x.parquet")}
    assert (found["o1"].state, found["o1"].group_state, found["o1"].outcome) == (
        "open",
        "open",
        7.0,
    )
    imported = await import_channel(client, tmp_path / "x.parquet", other)
    assert (imported.n_trajectories, imported.n_left_out) == (1, 1)
    assert set((await fetched(client, other))["open"]) == {"o0"}


async def test_marks_of_the_file_keep_a_trajectory_from_being_served(
    client, channel, other, tmp_path
):
    await client.open_group("p", 2, channel=channel)
    await finish(client, channel, "p", "good", "bad", reward=1.0)
    await client.mark(trajectory_uid="bad", trainable=False, channel=channel)
    await export_channel(client, tmp_path / "x.parquet", channel)
    consumer = asyncio.create_task(client.lease_batch(channel=other, timeout_s=60))
    await import_channel(client, tmp_path / "x.parquet", other)
    (group,) = (await consumer).groups
    assert [t.trajectory_uid for t in group.trajectories] == ["good"]


async def test_a_waiting_consumer_gets_a_group_whole_however_many_it_asked_for(
    client, channel, other, tmp_path
):
    await client.open_group("p", 2, channel=channel)
    n = 73  # more than it was declared with
    for i in range(n):
        await client.submit_step(build_chain(f"t{i}", "p", n=1)[0], channel)
    for i in range(n):
        await client.complete_trajectory(f"t{i}", float(i), channel=channel)
    await export_channel(client, tmp_path / "x.jsonl", channel)
    consumer = asyncio.create_task(client.lease_batch(channel=other, timeout_s=60))
    await import_channel(client, tmp_path / "x.jsonl", other)
    (group,) = (await consumer).groups
    assert sorted(t.reward for t in group.trajectories) == list(range(n))


async def test_an_import_waits_for_admission_credit(client, channel, tmp_path):
    for i in range(3):
        await client.open_group(f"p{i}", 1, channel=channel)
        await finish(client, channel, f"p{i}", f"t{i}")
    await export_channel(client, tmp_path / "x.jsonl", channel)
    with pytest.raises(PoolFullError):
        await import_channel(client, tmp_path / "x.jsonl", NARROW, timeout_s=0.05)
    # There was credit for two, and those are there.
    states = {uid: row.state for uid, row in (await groups_of(client, NARROW)).items()}
    assert states == {"p0": "ready", "p1": "ready"}
    importing = asyncio.create_task(import_channel(client, tmp_path / "x.jsonl", NARROW))

    async def import_waits():
        return (await client.get_statistics(NARROW))["waiting"]["producers"]

    await until(import_waits)
    assert await client.lease_batch(channel=NARROW) is not None
    assert (await importing).n_groups == 3
    assert set(await fetched(client, NARROW)) == {"p1", "p2"}


async def test_an_export_has_what_the_filters_let_through(client, channel, tmp_path):
    await fill(client, channel)
    path = tmp_path / "x.jsonl"
    await export_channel(client, path, channel, state="complete", min_reward=0.5)
    found = list(read(path))
    assert [e.trajectory.trajectory_uid for e in found] == ["l0", "r0", "h0", "h1", "o0"]
    source = f"channel {channel!r}, min_reward=0.5, state='complete'"
    assert {row["provenance"]["source"] for _, row in read_rows(path)} == {source}
    assert found[0].channel == channel


async def test_an_export_goes_on_over_many_pages(client, channel, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "EXPORT_PAGE", 7)
    for i in range(30):
        await finish(client, channel, f"p{i}", f"t{i}")
    summary = await export_channel(client, tmp_path / "x.parquet", channel)
    assert (summary.n_trajectories, summary.n_steps) == (30, 90)
    uids = [e.trajectory.trajectory_uid for e in read(tmp_path / "x.parquet")]
    assert uids == [f"t{i}" for i in range(30)]


async def test_what_no_file_can_hold_for_its_levels_is_refused_where_it_is_submitted(
    client, channel, tmp_path
):
    """And what the pool takes, every file holds."""
    deep: dict[str, Any] = {}
    for _ in range(MAX_LEVELS - 1):
        deep = {"in": deep}
    (step,) = build_chain("t", "p", 1)
    for call in (
        client.open_group("p", 1, metadata={"in": deep}, channel=channel),
        client.open_trajectory("t", "p", metadata={"in": (deep,)}, channel=channel),
        client.submit_step(replace(step, metadata={"in": deep}), channel),
        client.append_step(replace(step, multi_modal_data={"in": deep}), channel=channel),
        client.complete_trajectory("t", channel=channel, metadata={"in": deep}),
    ):
        with pytest.raises(
            ValueError, match=r"metadata.*nested too deeply.*pass .* at most 260 levels"
        ):
            await call
    assert await groups_of(client, channel) == {}
    kept = replace(step, metadata=deep, multi_modal_data=deep)
    await client.open_group("p", 1, metadata=deep, channel=channel)
    await client.open_trajectory("t", "p", metadata=deep, channel=channel)
    await client.submit_step(kept, channel)
    await export_channel(client, tmp_path / "x.parquet", channel)
    (found,) = read(tmp_path / "x.parquet")
    assert found.trajectory.steps == (kept,)
    assert found.trajectory.metadata == found.group_metadata == deep


async def test_an_export_that_is_refused_leaves_no_file(client, channel, tmp_path):
    with pytest.raises(InvalidRequestError, match="no filter 'states'"):
        await export_channel(client, tmp_path / "x.jsonl", channel, states="open")
    await export_channel(client, tmp_path / "y.jsonl", channel)
    with pytest.raises(ExportError, match="exists"):
        await export_channel(client, tmp_path / "y.jsonl", channel)
    await export_channel(client, tmp_path / "y.jsonl", channel, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["y.jsonl", "y.jsonl.sha256"]


async def test_a_file_that_is_none_of_ours_imports_nothing(client, other, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(ExportError, match="was not exported by Stepwell"):
        await import_channel(client, tmp_path / "x.jsonl", other)
    with pytest.raises(FileNotFoundError):
        await import_channel(client, tmp_path / "y.jsonl", other)
    assert await groups_of(client, other) == {}


async def test_a_caller_that_leaves_takes_its_unfinished_file_along(
    client, channel, tmp_path, monkeypatch
):
    monkeypatch.setattr(transfer, "EXPORT_PAGE", 1)
    for i in range(20):
        await finish(client, channel, f"p{i}", f"t{i}")
    exporting = asyncio.create_task(export_channel(client, tmp_path / "x.jsonl", channel))
    await until(lambda: list(tmp_path.iterdir()))
    exporting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exporting
    await until(lambda: not list(tmp_path.iterdir()))


async def test_trajectories_of_a_hand_made_file_can_be_imported(client, other, tmp_path):
    # Nothing but steps, none of them marked is_last.
    steps = tuple(build_chain("t", "p", reward=0.5))
    write(tmp_path / "x.jsonl", [ExportedTrajectory(trajectory=Trajectory("t", "p", steps))])
    await import_channel(client, tmp_path / "x.jsonl", other)
    batch = await client.fetch_batch(channel=other)
    assert [s.reward for s in batch] == [0.5, 0.5, 0.5]
    assert [s.is_last for s in batch] == [False, False, True]


async def test_an_export_goes_on_when_the_pool_is_killed_under_it(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "EXPORT_PAGE", 1)
    handle = start_data_pool(name=uuid.uuid4().hex)
    client = client_of([handle])
    await client.submit_steps([build_chain(f"t{i}", f"p{i}", n=1)[0] for i in range(40)])
    await client.drop_group("p3", "test")  # so that the groups after it were not the first ones
    pid = (await client.describe())["pid"]
    exporting = asyncio.create_task(export_channel(client, tmp_path / "x.jsonl"))
    await until(lambda: any(p.stat().st_size for p in tmp_path.iterdir()))
    assert not exporting.done()
    psutil.Process(pid).kill()
    summary = await exporting
    assert summary.n_trajectories == 39
    assert (await client.describe())["pid"] != pid
    ray.kill(handle)

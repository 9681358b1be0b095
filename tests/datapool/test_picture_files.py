"""Pictures in exported files: beside them or in them, and back into a pool."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from stepwell.datapool import ChannelConfig, DataPoolClient, PoolConfig
from stepwell.datapool.errors import DamagedFileError, ExportError
from stepwell.datapool.files.deletion import delete_from_export
from stepwell.datapool.files.export import read, read_rows, write, write_rows
from stepwell.datapool.files.transfer import export_channel, import_channel
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.ops import Delete
from tests.datapool.test_picture_store import A, B, C, conversation, png, source
from tests.helpers import full_disk

FORMS = pytest.mark.parametrize("form", ["parquet", "jsonl"])
PLACES: Any = pytest.mark.parametrize("pictures", ["files", "embedded"])


def names(path: Path) -> list[str]:
    return sorted(picture.stem for picture in path.with_name(f"{path.name}.pictures").glob("*"))


def written(path: Path) -> list[Path]:
    """The file and what is beside it."""
    return [*path.parent.glob("x.*")]


def move(path: Path) -> Path:
    """Move an exported file, with what is beside it, into another folder."""
    folder = path.parent / "moved"
    folder.mkdir()
    for each in written(path):
        each.rename(folder / each.name)
    return folder / path.name


async def filled(client: DataPoolClient) -> None:
    for uid, digests in (("t", (A, B)), ("u", (B, C))):
        steps = conversation(uid, *digests, prompt_uid=uid)
        await client.submit_steps(steps, pictures=source(*digests))
        await client.complete_trajectory(uid, 1.0)


@FORMS
@PLACES
async def test_an_export_has_each_picture_and_an_import_brings_it_back(
    tmp_path: Path, form: str, pictures: Literal["files", "embedded"]
) -> None:
    config = PoolConfig(default=ChannelConfig(n_rollouts=1))
    path = tmp_path / f"x.{form}"
    async with DataPoolClient.local(config, tmp_path / "pool") as client:
        await filled(client)
        await export_channel(client, path, pictures=pictures)
        lease = await client.lease_batch(batch_size=2)
        assert lease is not None
    assert names(path) == ([A, B, C] if pictures == "files" else [])
    exported = list(read(path))
    assert [dict(each.pictures) for each in exported] == [source(A, B), source(B, C)]
    moved = move(path)
    async with DataPoolClient.local(config, tmp_path / "other") as client:
        assert (await import_channel(client, moved, "copy")).n_steps == 4
        again = await client.lease_batch(channel="copy", batch_size=2)
        assert again is not None
        served = [trajectory.steps for group in lease.groups for trajectory in group.trajectories]
        got = [trajectory.steps for group in again.groups for trajectory in group.trajectories]
        assert [[s.pictures for s in steps] for steps in got] == [
            [s.pictures for s in steps] for steps in served
        ]
        assert await client.read_pictures("u", [B, C], "copy") == source(B, C)


async def test_rows_have_their_pictures_in_the_form_of_datasets(tmp_path: Path) -> None:
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, tmp_path / "x.jsonl")
        await export_channel(client, tmp_path / "y.jsonl", pictures="embedded")
    row, _ = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    paths = [image["path"] for image in row["images"]]
    assert [(tmp_path / path).read_bytes() for path in paths] == [png(A), png(B)]
    row, _ = map(json.loads, (tmp_path / "y.jsonl").read_text().splitlines())
    assert [base64.b64decode(image["bytes"]) for image in row["images"]] == [png(A), png(B)]


@FORMS
async def test_a_trajectory_that_is_deleted_from_a_file_takes_its_pictures(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / f"x.{form}"
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, path)
        assert delete_from_export(path, Delete("t")) == ["t"]
        assert names(path) == [B, C]
        (left,) = read(path)
        assert dict(left.pictures) == source(B, C)
        await export_channel(client, path, overwrite=True, min_reward=5.0)
    assert names(path) == []


@FORMS
async def test_an_export_that_fails_leaves_the_old_pictures_and_none_of_its_own(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / f"x.{form}"
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, tmp_path / "all.jsonl", pictures="embedded")
    first, second = read(tmp_path / "all.jsonl")

    def failing() -> Iterator[ExportedTrajectory]:
        yield second
        raise ConnectionError("the pool is gone")

    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(path, [first])
    assert not written(path)
    write(path, [first])
    with pytest.raises(ConnectionError):
        write(path, failing(), overwrite=True)
    assert names(path) == [A, B]
    assert [dict(each.pictures) for each in read(path)] == [source(A, B)]


@FORMS
async def test_a_renamed_file_whose_pictures_have_the_old_name_is_an_error_with_both(
    tmp_path: Path, form: str
) -> None:
    """Its pictures of what is deleted would stay."""
    path, renamed = tmp_path / f"x.{form}", tmp_path / f"y.{form}"
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, path)
    path.rename(renamed)
    before = renamed.read_bytes()
    with pytest.raises(ExportError, match=rf"its pictures are in x\.{form}\.pictures; rename it"):
        delete_from_export(renamed, Delete("t"))
    assert renamed.read_bytes() == before
    assert delete_from_export(renamed, Delete("nobody")) == []
    renamed.rename(path)
    assert delete_from_export(path, Delete("t")) == ["t"]
    assert names(path) == [B, C]


async def test_two_files_of_one_name_have_pictures_of_their_own(tmp_path: Path) -> None:
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, tmp_path / "x.parquet")
        await export_channel(client, tmp_path / "x.jsonl", trajectory_uid="t")
    exported = list(read(tmp_path / "x.parquet"))
    assert [dict(each.pictures) for each in exported] == [source(A, B), source(B, C)]


@FORMS
async def test_a_row_with_fewer_images_than_pictures_is_refused(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"x.{form}"
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, path, trajectory_uid="t")
    rows = [row | {"images": row["images"][:1]} for _, row in read_rows(path)]
    write_rows(path, rows, overwrite=True)
    with pytest.raises(ExportError, match="malformed"):
        list(read(path))


async def test_a_picture_that_was_changed_or_lost_is_an_error_of_its_own(tmp_path: Path) -> None:
    async with DataPoolClient.local() as client:
        await filled(client)
        await export_channel(client, tmp_path / "x.jsonl")
        first, _ = read(tmp_path / "x.jsonl")
        (tmp_path / "x.jsonl.pictures" / f"{A}.png").write_bytes(b"another")
        with pytest.raises(DamagedFileError, match=A):
            await import_channel(client, tmp_path / "x.jsonl", "copy")
        (tmp_path / "x.jsonl.pictures" / f"{B}.png").unlink()
        with pytest.raises(ExportError, match=B):
            first.pictures[B]

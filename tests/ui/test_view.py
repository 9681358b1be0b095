"""`stepwell view`: the dashboard of a run that has ended, out of its files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from stepwell.cli.main import main
from stepwell.config.load import load_config
from stepwell.run.folder import begin, only_run_in
from stepwell.show.dashboard import view
from stepwell.trainer.errors import ConfigError
from tests.ui.demo import demo, fill, train


async def ended_run(folder: Path) -> None:
    async with demo(folder) as served:
        await fill(served, groups=3)
        await train(served, steps=12)
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=ended"]))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@asynccontextmanager
async def viewed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> AsyncIterator[tuple[asyncio.Task[None], str, str]]:
    """The task of `stepwell view`, the origin that it serves and what it printed."""
    task = asyncio.create_task(view(str(folder), 0))
    printed = ""
    try:
        async with asyncio.timeout(60):
            while "/ui" not in printed:
                await asyncio.sleep(0.05)
                if task.done():
                    await task
                printed += capsys.readouterr().out
        (url,) = re.findall(r"http://\S+(?=/ui)", printed)
        yield task, url, printed
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_dashboard_of_a_run_that_had_keys_asks_for_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ended_run(tmp_path)
    key = "the-key-of-this-very-run-0000000000"
    (tmp_path / "gateway_key").write_text(key)
    async with viewed(tmp_path, capsys) as (_, url, printed):
        assert f"admin key in {tmp_path / 'gateway_key'}" in printed
        assert key not in printed
        async with httpx.AsyncClient(base_url=f"{url}/ui/api/") as http:
            assert (await http.get("trajectories")).status_code == 401
            bearer = {"authorization": f"Bearer {key}"}
            assert (await http.get("trajectories", headers=bearer)).status_code == 200
    (tmp_path / "gateway_key").write_text("")
    with pytest.raises(ConfigError, match="gateway_key holds no key"):
        await view(str(tmp_path), 0)


async def test_a_finished_run_is_shown_and_none_of_its_files_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ended_run(tmp_path)
    before = contents(tmp_path)
    async with (
        viewed(tmp_path, capsys) as (task, url, _),
        httpx.AsyncClient(base_url=f"{url}/ui/api/") as http,
    ):
        about = (await http.get("about")).json()
        assert about["read_only"]
        assert about["run"]["name"] == "ended"
        rows = (await http.get("trajectories")).json()["items"]
        assert len(rows) == 8
        named = {"trajectory_uid": rows[0]["trajectory_uid"], "index": 0, "start": 0}
        tokens = (await http.get("tokens", params=named)).json()
        assert "".join(tokens["texts"]).startswith("<|im_start|>")
        batch = (await http.get("batch", params={"step": 12})).json()
        assert batch["sample"]["trajectories"]
        one = {"trajectory_uid": rows[0]["trajectory_uid"]}
        mark, reward = {**one, "marks": {"trainable": False}}, {**one, "reward": 1}
        for path, body in (("mark", mark), ("delete", one), ("reward", reward)):
            refused = await http.post(path, json=body)
            assert refused.status_code == 400
            assert "this run is over" in refused.text
        async with http.stream("GET", "live") as stream:
            lines = (line async for line in stream.aiter_lines() if line)
            assert '"ready":1' in await anext(lines)
            task.cancel()  # no page that watches holds the end up
            async with asyncio.timeout(4):
                with pytest.raises(asyncio.CancelledError):
                    await task
    after = contents(tmp_path)
    assert before.items() <= after.items()
    assert {path.relative_to(tmp_path).parts[0] for path in after.keys() - before} <= {"archive"}


def test_what_cannot_be_shown_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert "is no run's folder" in capsys.readouterr().err
    asyncio.run(ended_run(tmp_path))
    with only_run_in(tmp_path):  # it is alive, and its parts are not up yet
        assert main(["view", str(tmp_path)]) == 1
    assert "still starting" in capsys.readouterr().err

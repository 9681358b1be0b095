"""`stepwell view`: the dashboard of a run that has ended, out of its files."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from stepwell.cli.main import main
from stepwell.config.load import load_config
from stepwell.run.folder import begin, only_run_in
from stepwell.show.dashboard import view
from tests.ui.demo import demo, fill, train


async def ended_run(folder: Path) -> None:
    async with demo(folder) as served:
        await fill(served, groups=3)
        await train(served, steps=12)
    begin(load_config("quickstart", [f"run.dir={folder}", "run.name=ended"]))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_finished_run_is_shown_and_none_of_its_files_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ended_run(tmp_path)
    before = contents(tmp_path)
    task = asyncio.create_task(view(str(tmp_path), 0))
    url = None
    async with asyncio.timeout(60):
        while url is None:
            await asyncio.sleep(0.05)
            if task.done():
                await task
            url = re.search(r"http://\S+(?=/ui)", capsys.readouterr().out)
    async with httpx.AsyncClient(base_url=f"{url[0]}/ui/api/") as http:
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

"""A third process connects to each of two runs on this machine, by their folders alone."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.run.folder import live_run
from tests.e2e.conftest import ROOT, SMALL

pytestmark = [pytest.mark.e2e, pytest.mark.long]

LOOK = """
import asyncio, json, sys
import stepwell

async def look():
    for folder in sys.argv[1:]:
        try:
            async with stepwell.connect(folder) as pool:
                await pool.open_group(f"of {folder}", 2, channel="debug")
                page = await pool.list_groups(channel="debug")
                print(json.dumps([group.prompt_uid for group in page.items]))
        except stepwell.RunUnavailableError as e:
            print(json.dumps(str(e)))

asyncio.run(look())
"""
TWO_AT_ONCE = """
import asyncio, sys
import stepwell

async def look():
    pool = await stepwell.connect(sys.argv[1])
    print((await pool.get_statistics("train"))["groups"]["open"])
    async with stepwell.connect(sys.argv[1]) as again:
        print((await again.get_statistics("train"))["groups"]["open"])
    print((await pool.get_statistics("train"))["groups"]["open"])
    try:
        await stepwell.connect(sys.argv[2])
    except stepwell.RunUnavailableError as e:
        print(e)

asyncio.run(look())
"""
FILL = """
import asyncio
import stepwell

async def fill():
    async with stepwell.connect("runs/quickstart") as pool:
        for i, uid in enumerate(["one"] * 5 + ["two"] * 5):
            known = dict(prompt_ids=[1, 2], response_ids=[3, 4], prompt_uid=uid)
            await pool.submit_step(stepwell.Step(trajectory_uid=f"t-{i + 13}", **known))
            await pool.complete_trajectory(f"t-{i + 13}", float(i % 5))

asyncio.run(fill())
"""
NOTEBOOK = """
import ast, asyncio, sys
cell = compile(sys.argv[1], "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
asyncio.run(eval(cell))
"""


@contextmanager
def gateway(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`stepwell serve` as a user runs it."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stepwell",
            "serve",
            "--config",
            "quickstart",
            *SMALL,
            f"run.dir={folder}",
            f"run.name={folder.name}",
            "gateway.port=0",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()


def ask(code: str, *runs: Path | str, cwd: Path = ROOT) -> list[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, runs)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def shown(*argv: str, cwd: Path) -> Any:
    """Answer of `stepwell … --json` about the run that it finds below `cwd`."""
    command = [sys.executable, "-m", "stepwell", *argv, "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_documented_lines_run_as_they_stand_in_another_process(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "runs.md").read_text()
    look, consume = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    with gateway(tmp_path / "runs" / "quickstart") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("gateway at")
        ask(FILL, cwd=tmp_path)
        status = shown("status", cwd=tmp_path)
        assert (status["state"], status["pool"]["train"]["ready"]) == ("alive", 2)
        assert status["gateways"][0]["engine"]["engines"][0]["state"] == "up"
        groups = shown("groups", "--min-reward", "2", cwd=tmp_path)["groups"]
        assert [group["prompt_uid"] for group in groups] == ["one", "two"]
        (branch,) = shown("show", "t-14", cwd=tmp_path)["branches"]
        assert (branch["input_ids"], branch["loss_mask"]) == ([1, 2, 3, 4], [0, 0, 1, 1])
        moved = tmp_path / "moved.jsonl"
        assert shown("data", "export", str(moved), cwd=tmp_path)["trajectories"] == 10
        took = shown("data", "import", str(moved), "--channel", "again", cwd=tmp_path)
        assert took == {"groups": 2, "trajectories": 10}
        found = shown("doctor", "runs/quickstart", cwd=tmp_path)
        assert {f["name"] for f in found if f["state"] == "ok"} >= {"gateway", "engine"}
        in_a_notebook = ask(NOTEBOOK, look, cwd=tmp_path)
        batch, leased = ask(consume, cwd=tmp_path)
    assert in_a_notebook[:2] == ["one 2.0 1.4142135623730951", "two 2.0 1.4142135623730951"]
    assert batch == str([np.array([1, 2, 3, 4], np.int32)] * 4), "one is marked untrainable"
    assert leased == "['two']"
    assert (tmp_path / "rollouts.parquet").exists()


def test_each_of_two_runs_is_found_by_its_folder_until_it_is_killed(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with ExitStack() as runs:
        processes = [runs.enter_context(gateway(folder)) for folder in (one, two)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("gateway at")

        files = [live_run(folder) for folder in (one, two)]
        assert [f.pid for f in files] == [p.pid for p in processes]
        addresses = {file.ray.address for file in files if file.ray is not None}
        assert len(addresses) == 2
        for folder in (one, two):
            assert stat.S_IMODE((folder / "run.json").stat().st_mode) == 0o600

        found = [json.loads(line) for line in ask(LOOK, one, two, one)]
        assert found == [[f"of {one}"], [f"of {two}"], [f"of {one}"]]

        by_address = [f"{f.ray.address}/{f.config['run']['name']}" for f in files if f.ray]
        found = [json.loads(line) for line in ask(LOOK, *by_address)]
        assert found == [
            [f"of {folder}", f"of {address}"]
            for folder, address in zip((one, two), by_address, strict=True)
        ]

        for folder in (one, two):
            command = [sys.executable, "-m", "stepwell", "data", "delete", str(folder)]
            done = subprocess.run(
                [*command, "--trajectory", "t"],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            )
            *deleted, not_reached = done.stdout.splitlines()
            assert deleted[0] == f"{folder}: deleted 0 trajectories"
            assert all(line.endswith(": deleted 0 trajectories") for line in deleted)
            assert not_reached.startswith("not reached: ")

        *counts, refused = ask(TWO_AT_ONCE, one, two)
        assert counts == ["0", "0", "0"]
        assert all(address in refused for address in addresses), refused

        processes[0].kill()
        processes[0].wait()
        found = [json.loads(line) for line in ask(LOOK, one, two)]
        assert f"the run in {one} is not alive" in found[0]
        assert found[1] == [f"of {two}", f"of {by_address[1]}"]

        other = tmp_path / "another_token"
        other.write_text("0" * 64)
        assert files[1].ray is not None
        ray = files[1].ray.model_copy(update={"auth_mode": "token", "token_file": other})
        files[1].model_copy(update={"ray": ray}).write(two)
        (refused,) = ask(LOOK, two)
        assert f"it wants another token than {other} holds" in refused


def test_top_ends_quietly_when_it_is_terminated(tmp_path: Path) -> None:
    with gateway(tmp_path / "one") as serving:
        assert serving.stdout is not None
        assert serving.stdout.readline().startswith("gateway at")
        top = subprocess.Popen(
            [sys.executable, "-m", "stepwell", "top", str(tmp_path / "one"), "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert top.stdout is not None
        assert json.loads(top.stdout.readline())["state"] == "alive"
        top.terminate()
        _, said = top.communicate(timeout=60)
    assert (top.returncode, said) == (0, "")

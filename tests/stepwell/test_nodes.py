"""A node of a cluster that lacks something is told in a line with the node and the remedy."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from stepwell.cluster.nodes import Look, Seen, look, needs_of, runtime_env
from stepwell.cluster.nodes import differences as told
from stepwell.config.load import load_config

HERE = {"python": "3.11.7", "stepwell": "0.1.0", "torch": "2.13.0"}
ALL = Look("agent:agent", (Path("/models/base"),), Path("/runs/mine"), "nonce")


def seen(**what: object) -> Seen:
    return Seen(**{"host": "b", "versions": HERE, "python": "/env/bin/python", **what})  # type: ignore[arg-type]


def test_a_node_that_has_everything_is_not_spoken_of() -> None:
    assert told("10.0.0.2", ALL, seen(), HERE) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"versions": {**HERE, "torch": "2.9.0"}}, ("torch 2.9.0", "2.13.0", "/env/bin/python")),
        ({"versions": {"python": "3.11.7", "torch": "2.13.0"}}, ("stepwell not at all", "0.1.0")),
        ({"agent_error": "there is no module 'x'\nlonger"}, ("no module 'x'; install", "/env/bin")),
        ({"missing": (Path("/models/base"),)}, ("model.path", "/models/base", "XDG_CACHE_HOME")),
        ({"is_shared": False}, ("run.dir", "/runs/mine", "engine.weight_transport=nccl")),
    ],
)
def test_what_a_node_lacks_is_one_line_with_node_and_remedy(
    found: dict[str, object], words: tuple[str, ...]
) -> None:
    (line,) = told("10.0.0.2", ALL, seen(**found), HERE)
    assert "node 10.0.0.2 (b)" in line
    assert [word for word in words if word not in line] == []
    assert "longer" not in line


def test_a_rank_needs_the_drivers_folder_whatever_carries_weights() -> None:
    wanted = Look("agent:agent", (), Path("/runs/mine"), "nonce", saves=True)
    (line,) = told("10.0.0.2", wanted, seen(is_shared=False), HERE)
    assert "checkpoint" in line
    assert line.endswith("name a folder that all nodes see")


def test_a_node_looks_for_the_agent_the_folders_and_the_drivers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nonce").touch()
    (tmp_path / "own.py").write_text("async def agent(task, base_url, api_key): ...\n")
    wanted = Look("own:agent", (tmp_path, tmp_path / "gone"), tmp_path, "nonce")
    found = look(wanted)
    assert (found.agent_error, found.missing, found.is_shared) == ("", (tmp_path / "gone",), True)
    assert found.versions["stepwell"]
    assert len(list(tmp_path.glob("nonce-*"))) == 1, "the driver sees that the node wrote there"
    found = look(Look("nowhere:agent", (), tmp_path / "other", "nonce"))
    assert "'nowhere'" in found.agent_error
    assert not found.is_shared
    long = "n" * 250  # it is seen, but nothing can be written beside it
    (tmp_path / long).touch()
    assert not look(Look(None, (), tmp_path, long)).is_shared


def test_a_node_needs_what_runs_on_it() -> None:
    config = load_config("quickstart", ["run.dir=/shared/runs/a"])
    assert needs_of(config, "b", used={}) == Look(config.rollout.agent)
    full = needs_of(config, "b", used={"a": "rank 0", "b": "engine 0"}, nonce="x")
    assert full.paths == (config.model.path.absolute(),)
    assert (full.shared, full.nonce, full.saves) == (Path("/shared/runs/a"), "x", False)
    over_nccl = load_config("quickstart", ["engine.weight_transport=nccl", "run.dir=/shared/a"])
    assert needs_of(over_nccl, "b", used={"b": "engine 0"}).shared is None
    # Its part of a checkpoint would be on its own disk, and the checkpoint without it.
    of_rank = needs_of(over_nccl, "b", used={"b": "rank 1, engine 0"})
    assert (of_rank.shared, of_rank.saves) == (Path("/shared/a"), True)
    by_themselves = load_config("live", [])
    assert needs_of(by_themselves, "b", used={}) == Look(None)


def test_a_project_travels_without_what_no_agent_imports(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("env/agent.py", "venv/pyvenv.cfg", "runs/a/run.json", ".git/HEAD", "tools/env/a"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("")
    env = runtime_env(project, {})
    assert env is not None
    assert env["working_dir"] == str(project)
    packed = tmp_path / "packed.zip"
    create_package(str(project), packed, excludes=env["excludes"], include_gitignore=True)
    with ZipFile(packed) as file:
        sent = {name for name in file.namelist() if not name.endswith("/")}
    assert sent == {"env/agent.py", "tools/env/a"}


def test_variables_of_a_run_travel_with_or_without_its_project(tmp_path: Path) -> None:
    variables = load_config("quickstart", ["cluster.env={NCCL_SOCKET_IFNAME: eth1}"]).cluster.env
    assert runtime_env(None, variables) == {"env_vars": {"NCCL_SOCKET_IFNAME": "eth1"}}
    both = runtime_env(tmp_path, variables)
    assert both is not None
    assert both.keys() == {"working_dir", "excludes", "env_vars"}
    assert runtime_env(None, {}) is None

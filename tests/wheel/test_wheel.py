"""The wheel as a user has it: what is in it, and a run beside modules named like its rooms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROOMS = ("datapool", "gateway", "backends", "trainer", "configs")
PACKAGES = {"stepwell": ".", "examples/quickstart": "quickstart", **{room: room for room in ROOMS}}
"""Folder of the repository -> where it is in the installed package."""
DISTRIBUTION = """
raise ImportError("the distribution {name} was imported instead of stepwell.{name}")
"""
OWN = "gateway"
MODULES = {
    **{
        f"{name}.py": f'raise ImportError("the project\'s {name}.py was imported")\n'
        for name in ("datapool", "backends", "trainer", "configs")
    },
    f"{OWN}.py": "def ask(question: str) -> str:\n    return question\n",
    "agent.py": f"import {OWN} as own\n"
    """
from stepwell.quickstart import agent as quickstart

async def agent(task, base_url, api_key):
    question = own.ask(task["question"])
    return await quickstart.agent({**task, "question": question}, base_url, api_key)
""",
}
"""A project whose modules have the names of Stepwell's folders. Its agent uses one of them."""


def run(*argv: str | Path, cwd: Path) -> str:
    """Output of a command. It sees neither this checkout nor anything of the tests' Python."""
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        argv, cwd=cwd, env=outside, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an index or an installer does."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commands of an environment with the wheel, this one's dependencies, and a distribution with
    a package `trainer`, as PyPI's `trainer` has. A `.pth` of this environment, by which the
    checkout is installed, does not count there."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    installed = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    (packages / "trainer").mkdir()
    (packages / "trainer" / "__init__.py").write_text(DISTRIBUTION.format(name="trainer"))
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder / "bin"


def files_of(folder: Path) -> Iterator[str]:
    """Files that are below `folder` itself, without what is only linked there."""
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (str((Path(here) / name).relative_to(folder)) for name in names)


def test_the_wheel_holds_every_file_of_each_room_once_and_nothing_else(wheel: Path) -> None:
    expected = {
        os.path.normpath(f"stepwell/{package}/{file}")
        for folder, package in PACKAGES.items()
        for file in files_of(ROOT / folder)
    }
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_wheel_of_the_checkout_is_the_wheel_of_the_sdist(wheel: Path, tmp_path: Path) -> None:
    assert build("wheel", ROOT, tmp_path).read_bytes() == wheel.read_bytes()


def test_the_sdist_holds_the_rooms_and_what_its_links_lead_to(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    files = {member.name for member in members if member.isfile()}
    for link in (member for member in members if member.issym()):
        assert os.path.normpath(Path(link.name).parent / link.linkname) in files
    folders = {member.name.split("/")[1] for member in members}
    assert folders >= {*ROOMS, "stepwell", "examples", "tests", "benchmarks"}


@pytest.mark.e2e
@pytest.mark.long
def test_a_project_with_modules_of_the_same_names_trains_the_quickstart(
    scripts: Path, tmp_path: Path
) -> None:
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    small = (*SMALL, "data.val.size=2", "trainer.total_steps=2", "rollout.agent=agent:agent")
    run(scripts / "stepwell", "train", "--config", "quickstart", *small, cwd=tmp_path)
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["optimizer_steps"] == 2
    assert "eval_after" in summary


def test_no_text_imports_or_runs_a_room_by_its_bare_name() -> None:
    """Ruff sees imports; commands, and code in strings and pages, are text."""
    room = rf"(?:{'|'.join(ROOMS)}|examples\.quickstart)\b"
    ways = (rf"-m {room}", rf"\bfrom {room}[\w.]* import", rf"(?:^|[;\"'])\s*import {room}")
    bare = re.compile("|".join(ways), re.M)
    found = [
        f"{folder}/{file}: {match[0].strip()}"
        for folder in (*PACKAGES, "examples", "benchmarks", "tests", "docs", ".ci")
        for file in files_of(ROOT / folder)
        if not file.endswith((".safetensors", ".png"))
        for match in bare.finditer((ROOT / folder / file).read_text())
    ]
    assert found == []

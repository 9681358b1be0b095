"""`import stepwell` is the public API: its names are there, and cost nothing before their use."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stepwell

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", stepwell.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(stepwell, name)
    assert name == "__version__" or value.__name__ == name
    assert name in dir(stepwell)


def test_names_are_sorted_and_a_wrong_one_is_an_attribute_error() -> None:
    assert stepwell.__all__ == sorted(stepwell.__all__)
    with pytest.raises(AttributeError, match=r"no attribute .Stepp.; did you mean .Step.\?"):
        _ = stepwell.Stepp


def test_type_checkers_see_every_name() -> None:
    (block,) = (
        node
        for node in ast.parse(Path(stepwell.__file__).read_text()).body
        if isinstance(node, ast.If)
    )
    seen = {
        alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(stepwell.__all__) - {"__version__"}


@pytest.mark.parametrize(
    "line",
    [
        "import stepwell",
        "from stepwell import Step",
        "import stepwell.show.trajectory, stepwell.show.status",  # of a run that has ended
    ],
)
def test_importing_it_loads_neither_torch_nor_ray(line: str) -> None:
    heavy = "[m for m in ('torch', 'ray', 'transformers', 'fastapi') if m in sys.modules]"
    done = _python(f"import sys; {line}; sys.exit(' '.join({heavy}) or 0)")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_is_a_command_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepwell", "config", "--config", "quickstart", "run.name=mine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "name: mine" in done.stdout


def test_its_version_is_the_distributions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert stepwell.__version__ == project["version"]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_tab_completion_offers_the_public_names_alone() -> None:
    offered = {name for name in dir(stepwell) if not name.startswith("__")}
    assert offered == set(stepwell.__all__) - {"__version__"}

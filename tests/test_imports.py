"""The import direction of the packages, and what must not be loaded for reading a configuration."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("datapool", "gateway", "backends", "trainer")
ALLOWED = {
    "datapool": {"datapool"},
    "gateway": {"gateway", "datapool"},
    "backends": {"backends", "datapool"},
    "trainer": {"trainer", "datapool", "backends"},
}
"""What each room imports of ours. The shell (`stepwell/`) sees every room, no room the shell."""


def imported(path: Path) -> Iterator[str]:
    """Names of modules that `path` imports, anywhere in it; `from a import b` gives a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path) -> set[str]:
    """The parts of `stepwell` that `path` imports, e.g. `gateway.errors`."""
    return {n.partition(".")[2] for n in imported(path) if n.startswith("stepwell.")}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    paths = list((ROOT / room).rglob("*.py"))
    assert any(ours(path) for path in paths)
    for path in paths:
        wrong = {name for name in ours(path) if name.partition(".")[0] not in ALLOWED[room]}
        # until trainer's parts are given their sections
        wrong -= {n for n in wrong if n.partition(".")[0] == "config"}
        assert not wrong, f"{path} imports {wrong}"


def test_backends_see_nothing_of_the_pool_but_its_nouns_and_the_lease_keeper() -> None:
    seen = {"datapool.types", "datapool.errors", "datapool.lease_keeper", "datapool.process"}
    for path in (ROOT / "backends").rglob("*.py"):
        wrong = {n for n in ours(path) if n.startswith("datapool")}
        wrong = {n for n in wrong if n not in seen and n.rpartition(".")[0] not in seen}
        assert not wrong, f"{path} imports {wrong}"


def test_reading_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys; from stepwell.presets import load_config; load_config('quickstart');"
        "sys.exit(' '.join(m for m in ('torch', 'transformers', 'ray') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The import direction of the packages, and what must not be loaded for reading a configuration."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"datapool", "gateway", "backends", "trainer"}
ALLOWED = {
    "datapool": {"datapool"},
    "gateway": {"gateway", "datapool"},
    "backends": {"backends", "datapool"},
    "trainer": {"trainer", "datapool", "backends"},
}
# The composition root: these wire the packages together, and only they may see the gateway.
COMPOSERS = {
    "trainer/cli.py",
    "trainer/config.py",
    "trainer/cluster.py",
    "trainer/bench/gateway/systems.py",
}


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name for name in found if name.partition(".")[0] in OURS}


@pytest.mark.parametrize("package", sorted(OURS))
def test_imports_run_one_way(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        allowed = set(ALLOWED[package])
        if str(path.relative_to(ROOT)) in COMPOSERS:
            allowed.add("gateway")
        wrong = {name for name in _imported(path) if name.partition(".")[0] not in allowed}
        assert not wrong, f"{path} imports {wrong}"


def test_backends_see_nothing_of_the_pool_but_its_nouns_and_the_lease_keeper() -> None:
    for path in (ROOT / "backends").rglob("*.py"):
        wrong = {n for n in _imported(path) if n.startswith("datapool")} - {
            "datapool.types",
            "datapool.errors",
            "datapool.lease_keeper",
            "datapool.process",
        }
        assert not wrong, f"{path} imports {wrong}"


def test_reading_a_configuration_loads_no_torch() -> None:
    code = (
        "import sys; from trainer.config import load_config; load_config('quickstart');"
        "sys.exit(' '.join(m for m in ('torch', 'transformers', 'ray') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The import graph of our modules: no cycle, one direction, and nothing heavy for a light task.

Every import counts: of a module, in a function, under `TYPE_CHECKING`, by `import_module("…")`. An
import leads to the module that it names. It leads to a package's `__init__` where a name is taken
from there (`from stepwell.datapool import DataPoolClient`), and not where it only passes through
(`stepwell.datapool.types`, `from stepwell.datapool import types`): Python gives a submodule even of
a package that is half loaded, and an `__init__` that collects names would otherwise be in a cycle
with each module that it collects from.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from glob import glob
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("stepwell", "benchmarks", "examples", "tests")
ALLOWED = {
    "datapool": {"datapool"},
    "gateway": {"gateway", "datapool", "backends"},
    "backends": {"backends", "datapool"},
    "trainer": {"trainer", "datapool", "backends"},
}
"""Rooms that each room imports from: no name of the shell, none of the public API. The shell sees
every room."""
SHELL = ("config", "cluster", "track", "run", "show", "cli")
"""The shell's folders: each imports only of those before it, and of the files beside them."""


# -- the graph -----------------------------------------------------------------------------------


@cache
def modules(root: Path) -> Mapping[str, Path]:
    """Every module below `root`, by the name that it is imported under; links are followed."""
    found = {}
    for top in ("stepwell", "benchmarks", "examples"):
        for file in glob(f"{top}/**/*.py", root_dir=root, recursive=True):
            found[".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")] = (
                root / file
            )
    return found


@cache
def imported(path: Path) -> list[str]:
    """Dotted names of all that `path` imports, anywhere in it; `from a import b` gives a.b."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                assert not node.level, f"{path} imports relatively"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                yield name


def edges(root: Path) -> dict[str, set[str]]:
    """Each module and those of ours that it imports."""
    known = modules(root)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        names = imported(path)
        targets = {n if n in known else n.rpartition(".")[0] for n in names}
        graph[module] = (targets & known.keys()) - {module}
    return graph


def cycle(graph: Mapping[str, set[str]]) -> str:
    """A chain of modules, each of which imports the next, from one back to itself; or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return " → ".join(reversed(e.args[1]))
    return ""


def wrong_way(root: Path) -> list[str]:
    """Imports against the direction."""
    wrong = []
    for module, path in modules(root).items():
        package, _, rest = module.partition(".")
        allowed = ALLOWED.get(rest.partition(".")[0])
        for name in imported(path) if package == "stepwell" else ():
            top, _, part = name.partition(".")
            upwards = top in OURS[1:]
            aside = top == "stepwell" and allowed is not None
            if upwards or (aside and part.partition(".")[0] not in allowed):
                wrong.append(f"{path.relative_to(root)} imports {name}")
    return wrong


# -- our modules ---------------------------------------------------------------------------------


def test_no_module_imports_itself_through_others() -> None:
    graph = edges(ROOT)
    assert {f"stepwell.{room}" for room in ALLOWED} < graph.keys()
    assert "stepwell.datapool.types" in graph["stepwell.gateway.trajectory.trajectory"]
    chain = cycle(graph)
    assert not chain, chain


def test_imports_run_one_way_and_no_room_imports_the_shell() -> None:
    wrong = wrong_way(ROOT)
    assert not wrong, wrong


def test_the_folders_of_the_shell_are_floors() -> None:
    floors = {folder: n for n, folder in enumerate(SHELL)}
    wrong = []
    for module, targets in edges(ROOT).items():
        for target in targets if module.count(".") > 1 else ():
            here, there = (floors.get(f"{name}.".split(".")[1]) for name in (module, target))
            if here is not None and there is not None and there > here:
                wrong.append(f"{module} imports {target}")
    assert not wrong, wrong
    beside = {path.name for path in (ROOT / "stepwell").glob("*.py")}
    assert beside == {"__init__.py", "__main__.py", "errors.py", "layout.py", "version.py"}


def test_backends_see_nothing_of_the_pool_but_its_nouns_and_the_lease_keeper() -> None:
    nouns = ("types", "branches", "errors", "config", "pictures")
    parts = (*nouns, "remote.lease_keeper", "log_files", "heap", "sealed", "dotted", "own_loop")
    seen = {f"stepwell.datapool.{part}" for part in parts}
    for module, targets in edges(ROOT).items():
        if module.startswith("stepwell.backends"):
            wrong = {t for t in targets if t.startswith("stepwell.datapool")} - seen
            assert not wrong, f"{module} imports {wrong}"


def test_the_gateway_sees_of_backends_only_the_client_of_engines_masks_pictures_and_processes() -> (
    None
):
    parts = (
        "config",
        "engines.api",
        "engines.client",
        "engines.connections",
        "engines.kinds",
        "errors",
        "function_process",
        "masks",
        "pictures",
        "processes",
    )
    seen = {f"stepwell.backends.{part}" for part in parts}
    for module, targets in edges(ROOT).items():
        if module.startswith("stepwell.gateway"):
            wrong = {t for t in targets if t.startswith("stepwell.backends")} - seen
            assert not wrong, f"{module} imports {wrong}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import stepwell", ["torch", "transformers", "ray"]),
        (
            "from stepwell.config.run import RunConfig; "
            "from stepwell.config.load import load_config; load_config('quickstart')",
            ["torch", "transformers", "ray"],
        ),
        (
            "import stepwell.datapool",
            [
                "torch",
                "transformers",
                "ray",
                "uvloop",
                *(f"stepwell.{r}" for r in ALLOWED if r != "datapool"),
            ],
        ),
        # A pool of this process, and who has a client already, needs no Ray.
        ("from stepwell.datapool import DataPoolClient", ["torch", "transformers", "ray"]),
        # Pools and engines are started and supervised by processes that compute nothing.
        (
            "import stepwell.datapool.remote.actor, stepwell.datapool.remote.start",
            ["torch", "transformers"],
        ),
        ("import stepwell.backends.engines.server", ["torch", "transformers"]),
        ("import stepwell.gateway.engine", ["torch", "transformers", "ray"]),
        ("import stepwell.gateway.app", ["torch", "transformers", "pyarrow"]),
        ("import stepwell.run.checks, stepwell.run.serve", ["torch", "transformers"]),
    ],
)
def test_what_is_light_loads_nothing_heavy(statement: str, absent: list[str]) -> None:
    code = f"import sys; {statement}; sys.exit(' '.join(set({absent}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the tests above fail when they should -------------------------------------------------------


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Our layout in small, with `files` besides: gateway imports datapool, and nothing else."""
    sound = {
        "stepwell/__init__.py": "",
        "stepwell/cli/main.py": "from stepwell import gateway\nimport stepwell.gateway.app",
        "stepwell/datapool/__init__.py": "from stepwell.datapool.types import Step",
        "stepwell/datapool/types.py": "import os\nclass Step: ...",
        "stepwell/datapool/core/pool.py": "from stepwell.datapool import types",
        "stepwell/gateway/__init__.py": "",
        "stepwell/gateway/app.py": "from stepwell.gateway.routes import ROUTES\nclass App: ...",
        "stepwell/gateway/routes.py": "from stepwell.datapool import Step\nROUTES = []",
        "benchmarks/gateway.py": "import stepwell.cli.main, stepwell.gateway.app",
        "examples/agent.py": "import benchmarks.gateway",
    }
    for name, text in (sound | dict(files)).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    root = plant(tmp_path, {})
    assert len(modules(root)) == 10
    assert (cycle(edges(root)), wrong_way(root)) == ("", [])


@pytest.mark.parametrize(
    "back",
    [
        "from stepwell.gateway.app import App",
        "from stepwell.gateway import app",
        "import stepwell.gateway.app as a",
        "def late():\n    from stepwell.gateway.app import App",
        "def late():\n    from stepwell.gateway import app",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import stepwell.gateway.app",
        "import importlib\nAPP = importlib.import_module('stepwell.gateway.app')",
    ],
)
def test_a_planted_cycle_is_found_and_its_chain_named(tmp_path: Path, back: str) -> None:
    root = plant(tmp_path, {"stepwell/gateway/routes.py": f"ROUTES = []\n{back}"})
    chain = cycle(edges(root)).split(" → ")
    assert chain[0] == chain[-1]
    assert set(chain) == {"stepwell.gateway.app", "stepwell.gateway.routes"}


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("stepwell/datapool/types.py", "from stepwell.datapool import Step"),
        ("stepwell/datapool/types.py", "import stepwell.cli.main"),
        ("stepwell/gateway/app.py", "def f():\n    import examples.agent"),
    ],
    ids=["a name of its own package", "through every package", "a bench and an example"],
)
def test_a_planted_cycle_over_packages_is_found(tmp_path: Path, file: str, statement: str) -> None:
    chain = cycle(edges(plant(tmp_path, {file: statement}))).split(" → ")
    assert chain[0] == chain[-1]
    assert file.removesuffix(".py").replace("/", ".") in chain


@pytest.mark.parametrize(
    ("file", "statement", "name"),
    [
        ("stepwell/datapool/a.py", "from stepwell import gateway", "stepwell.gateway"),
        ("stepwell/datapool/a.py", "import stepwell.gateway.app", "stepwell.gateway.app"),
        ("stepwell/datapool/a.py", "def f():\n from stepwell import gateway", "stepwell.gateway"),
        ("stepwell/gateway/x/a.py", "import stepwell.trainer", "stepwell.trainer"),
        ("stepwell/trainer/a.py", "from stepwell.gateway import x", "stepwell.gateway.x"),
        ("stepwell/trainer/a.py", "from stepwell.config.run import X", "stepwell.config.run.X"),
        (
            "stepwell/backends/a.py",
            "from stepwell import DataPoolClient",
            "stepwell.DataPoolClient",
        ),
        ("stepwell/backends/a.py", "import stepwell", "stepwell"),
        ("stepwell/backends/a.py", "from stepwell import *", "stepwell.*"),
        ("stepwell/gateway/a.py", "import benchmarks.gateway", "benchmarks.gateway"),
        ("stepwell/run/train.py", "from examples import agent", "examples.agent"),
        ("stepwell/run/train.py", "def f():\n import tests.helpers", "tests.helpers"),
    ],
)
def test_a_planted_import_against_the_direction_is_found(
    tmp_path: Path, file: str, statement: str, name: str
) -> None:
    assert wrong_way(plant(tmp_path, {file: statement})) == [f"{file} imports {name}"]


def test_a_relative_import_is_refused(tmp_path: Path) -> None:
    root = plant(tmp_path, {"stepwell/gateway/a.py": "from . import app"})
    with pytest.raises(AssertionError, match=r"a\.py imports relatively"):
        cycle(edges(root))

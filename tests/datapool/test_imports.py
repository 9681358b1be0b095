"""Modules that `import stepwell.datapool` loads, and those that it must not."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

from stepwell import datapool


def modules_loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_no_module_of_the_datapool_loads_torch_or_another_package_of_ours():
    names = [m.name for m in pkgutil.walk_packages(datapool.__path__, "stepwell.datapool.")]
    here = {"core.pool", "remote.actor", "remote.client"}
    assert {f"stepwell.datapool.{name}" for name in here} <= set(names)
    loaded = modules_loaded_by("import " + ", ".join(names))
    assert set(names) <= loaded
    others = {f"stepwell.{room}" for room in ("gateway", "trainer", "backends", "cli", "run")}
    assert not loaded & {"torch", "transformers", *others}


def test_the_nouns_come_without_ray():
    assert "ray" not in modules_loaded_by(
        "from stepwell.datapool import Step, DataPool, PoolConfig"
    )

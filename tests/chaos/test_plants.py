"""The list of plants: each reaches the module that it means, in any process that its environment
names it to, and none without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.chaos.lives import ROOT, SITE
from tests.chaos.plants import PLANT, PLANTS
from tests.chaos.runs import KEYS

LOOK = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
changed = [
    f"{name}.{method}"
    for name, kind in vars(module).items() if isinstance(kind, type)
    for method, function in vars(kind).items()
    if getattr(function, "__module__", None) == "tests.chaos.plants"
]
print(*changed)
"""

INSTALL_EACH = """
import importlib, os
from tests.chaos.plants import PLANTS
modules = {name: importlib.import_module(plant.module) for name, plant in PLANTS.items()}
for name, module in modules.items():
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    owners = [module, *(kind for kind in vars(module).values() if isinstance(kind, type))]
    before = [dict(vars(owner)) for owner in owners]
    PLANTS[name].install(module)
    print(name, *(
        attribute
        for owner, known in zip(owners, before)
        for attribute, value in vars(owner).items() if value is not known.get(attribute)
    ), sep=":", flush=True)
    os._exit(0)
"""
"""Each plant in a process of its own: what it replaces, it replaces for good."""


def changed(module: str, **environment: str) -> str:
    """Methods of the module's classes that a plant replaced, in a process of its own."""
    path = ":".join([str(SITE), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", LOOK, module],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_there_are_14_plants_and_each_names_a_check_that_the_run_reports() -> None:
    assert len(PLANTS) == 14
    assert all(plant.noticed_as and plant.noticed_as <= set(KEYS) for plant in PLANTS.values())


def test_every_plant_finds_what_it_replaces() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INSTALL_EACH], cwd=ROOT, capture_output=True, text=True, check=True
    )
    replaced = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert set(replaced) == set(PLANTS)
    assert all(replaced.values()), replaced


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("silent_abort", "Channel._complete"),
        ("acked_again", "DataPool._ack"),
        ("wrong_version", "Calls._step"),
        ("skipped_prompt", "PromptSource.next"),
    ],
)
def test_a_plant_replaces_its_method_where_the_environment_names_it_and_only_there(
    name: str, method: str
) -> None:
    module = PLANTS[name].module
    assert changed(module, **{PLANT: name}) == method
    assert changed(module) == ""

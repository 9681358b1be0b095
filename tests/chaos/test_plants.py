"""The list of plants: each reaches the module that it means, in any process that its environment
names it to, and none without."""

from __future__ import annotations

import importlib
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


@pytest.mark.parametrize("name", PLANTS)
def test_every_plant_finds_what_it_replaces(name: str) -> None:
    """In a process of its own: what a plant replaces, it replaces for good."""
    module = importlib.import_module(PLANTS[name].module)
    if not (child := os.fork()):
        exit_code = 1
        try:
            owners = [module, *(kind for kind in vars(module).values() if isinstance(kind, type))]
            before = [{**vars(owner)} for owner in owners]
            PLANTS[name].install(module)
            exit_code = int(before == [{**vars(owner)} for owner in owners])
        finally:
            os._exit(exit_code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
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

"""A run on two machines, network namespaces with folders of their own: `make test-cluster`.

Needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.machines import TwoMachines

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    folder = Path("/tmp") / f"two-{os.getpid()}"  # Ray's sockets need a short path
    folder.mkdir()
    both = TwoMachines(folder)
    try:
        both.start({**os.environ, **both.token})
        yield both
    finally:
        both.remove()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def stepwell(
    machines: TwoMachines, *command: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command on the first machine, in `folder` there."""
    there = (*machines.prefix, "sh", "-c", 'cd "$0" && exec "$@"', str(folder))
    return subprocess.run(
        [*there, sys.executable, "-m", "stepwell", *command],
        env={**os.environ, **machines.token, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_a_project_of_one_machine_runs_its_agents_on_both(machines: TwoMachines) -> None:
    began = stepwell(machines, "init", "mine", folder=machines.local)
    assert began.returncode == 0, began.stderr
    project = machines.local / "mine"
    options = (f"cluster.address={machines.address}", "rollout.workers=4", "trainer.total_steps=2")
    ran = stepwell(machines, "train", "--config", "config.yaml", *options, folder=project)
    assert ran.returncode == 0, ran.stderr
    own = [machine.own / "mine/runs/mine" for machine in machines.machines]
    summary = json.loads((own[0] / "summary.json").read_text())
    assert summary["optimizer_steps"] == 2
    logs = [{path.name for path in (run / "logs").glob("rollout*")} for run in own]
    assert logs[1], "workers are on the second machine, too, which has no such project"
    assert logs[0] | logs[1] == {f"rollout_{k}.log" for k in range(4)}
    assert not (own[1].parents[1] / "agent.py").exists()


def test_an_agent_that_is_a_file_travels_too(machines: TwoMachines) -> None:
    project = machines.local / "mine"
    options = (f"cluster.address={machines.address}", "rollout.workers=2", "run.name=by-file")
    own = ("rollout.agent=agent.py:agent", "trainer.total_steps=1", "validation.before_train=false")
    ran = stepwell(machines, "train", "--config", "config.yaml", *options, *own, folder=project)
    assert ran.returncode == 0, ran.stderr


def test_an_agent_that_a_node_cannot_import_is_one_line(machines: TwoMachines) -> None:
    project = machines.local / "mine"
    on_first = machines.machines[0].own / "mine/agent.py"
    on_first.write_text(
        "from pathlib import Path\n\n"
        "if not Path('config.yaml').exists():\n"
        "    raise ImportError('there is no config')\n" + on_first.read_text()
    )
    (machines.machines[0].own / "mine/.gitignore").write_text("config.yaml\n")
    options = (f"cluster.address={machines.address}", "rollout.workers=2", "run.resume=never")
    ran = stepwell(machines, "train", "--config", "config.yaml", *options, folder=project)
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert "node 10.77.0.2" in last
    assert "there is no config" in last
    assert not [p for p in psutil.process_iter(["cmdline"]) if "RolloutWorker" in str(p.info)]

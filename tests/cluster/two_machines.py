"""A run on two machines, network namespaces with folders of their own: `make test-cluster`.

Needs root and `ip`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest

from tests.chaos.machines import Machines
from tests.cluster.driving import LIMIT_S, machines_in, serving, stepwell, wait_for

pytestmark = pytest.mark.timeout(6 * LIMIT_S)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with machines_in("two", 2) as both:
        yield both


def test_a_project_of_one_machine_runs_its_agents_on_both(machines: Machines) -> None:
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


def test_an_agent_that_is_a_file_travels_too(machines: Machines) -> None:
    project = machines.local / "mine"
    options = (f"cluster.address={machines.address}", "rollout.workers=2", "run.name=by-file")
    own = ("rollout.agent=agent.py:agent", "trainer.total_steps=1", "validation.before_train=false")
    ran = stepwell(machines, "train", "--config", "config.yaml", *options, *own, folder=project)
    assert ran.returncode == 0, ran.stderr


def test_an_agent_that_a_node_cannot_import_is_one_line(machines: Machines) -> None:
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
    left = [p.as_dict(["cmdline"]) for machine in machines.machines for p in machine.processes()]
    assert left, "Ray is there"
    assert not [p for p in left if "RolloutWorker" in str(p)]


def test_a_gateway_whose_machine_is_lost_comes_back_on_another(machines: Machines) -> None:
    with serving(machines, "served") as run:
        before = wait_for(partial(run.replicas, run.url()))
        assert {url.split(":")[1] for url in before} == {"//10.77.0.1", "//10.77.0.2"}
        machines.machines[1].stop()
        run.check_all_are_on(["10.77.0.1"], "10.77.0.2")


def test_a_machine_that_is_lost_while_its_gateway_starts_is_a_line(machines: Machines) -> None:
    with serving(machines, "starting") as run:
        logs = [machine.own / "starting/runs/live/logs" for machine in machines.machines]
        wait_for(lambda: any((log / "gateway_1.log").exists() for log in logs) or None)
        machines.machines[1].stop()
        run.check_all_are_on(["10.77.0.1"], "10.77.0.2")
    assert "Traceback" not in run.output

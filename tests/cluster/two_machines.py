"""A run on two machines, network namespaces with folders of their own: `make test-cluster`.

Needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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


T = TypeVar("T")
KEY = "a-key-of-two-machines"


def there(machines: TwoMachines, folder: Path) -> tuple[str, ...]:
    """Runs a command on the first machine, in `folder` there."""
    return (*machines.prefix, "sh", "-c", 'cd "$0" && exec "$@"', str(folder))


def wait_for(what: Callable[[], T | None], limit_s: float) -> T:
    """Return what `what` returns, once that is something."""
    give_up = time.monotonic() + limit_s
    while (found := what()) is None:
        assert time.monotonic() < give_up, "in vain"
        time.sleep(1.0)
    return found


def ask(machines: TwoMachines, url: str) -> dict[str, Any] | None:
    """The answer to a GET on the first machine; None: there is none."""
    command = ("curl", "-s", "-m", "5", "-H", f"authorization: Bearer {KEY}", url)
    done = subprocess.run([*machines.prefix, *command], capture_output=True, check=False)
    return json.loads(done.stdout) if done.stdout else None


def stepwell(
    machines: TwoMachines, *command: str, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command on the first machine, in `folder` there."""
    return subprocess.run(
        [*there(machines, folder), sys.executable, "-m", "stepwell", *command],
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


@dataclass
class Serving:
    """`stepwell serve` on the first machine, with a gateway on each."""

    machines: TwoMachines
    name: str
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.machines.machines[0].own / f"{self.name}.txt").read_text()

    def url(self) -> str:
        """Origin of the first gateway, once it serves."""

        def found() -> str | None:
            assert self.process.poll() is None, self.output
            _, _, rest = self.output.partition("gateway at ")
            return rest.split()[0].rstrip(",") if rest else None

        return wait_for(found, 200)

    def replicas(self, url: str) -> list[str] | None:
        """Origins of all gateways by the one at `url`."""
        found = ask(self.machines, f"{url}/statistics")
        return None if found is None else [replica["url"] for replica in found["replicas"]]

    def check_all_are_on_the_first(self) -> None:
        """All gateways come to be on the first machine, and know it of each other."""

        def moved() -> list[str] | None:
            urls = self.replicas(self.url())
            return urls if urls and all("//10.77.0.1:" in url for url in urls) else None

        urls = wait_for(moved, 120)
        assert len({*urls}) == 2
        for url in urls:
            assert wait_for(partial(self.replicas, url), 30) == urls
        wait_for(lambda: "node 10.77.0.2 has left the Ray" in self.output or None, 60)
        assert self.process.poll() is None


@contextmanager
def serving(machines: TwoMachines, name: str) -> Iterator[Serving]:
    wait_for(lambda: n_nodes(machines) == 2 or None, 120)
    folder, own = machines.local / name, machines.machines[0].own
    (own / name).mkdir()
    options = (f"cluster.address={machines.address}", "gateway.replicas=2", "gateway.host=0.0.0.0")
    keys = f"gateway.admin_keys=[{KEY}]"
    command = ("-m", "stepwell", "serve", "--config", "live", *options, keys)
    with (own / f"{name}.txt").open("wb") as output:
        process = subprocess.Popen(
            [*there(machines, folder), sys.executable, *command],
            env={**os.environ, **machines.token, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
        run = Serving(machines, name, process)
        try:
            yield run
        except AssertionError as e:
            e.add_note(run.output)
            raise
        finally:
            process.terminate()
            process.wait(60)
            machines.start({**os.environ, **machines.token})


def test_a_gateway_whose_machine_is_lost_comes_back_on_another(machines: TwoMachines) -> None:
    with serving(machines, "served") as run:
        before = wait_for(partial(run.replicas, run.url()), 60)
        assert {url.split(":")[1] for url in before} == {"//10.77.0.1", "//10.77.0.2"}
        machines.machines[1].stop()
        run.check_all_are_on_the_first()


def test_a_machine_that_is_lost_while_its_gateway_starts_is_a_line(machines: TwoMachines) -> None:
    with serving(machines, "starting") as run:
        logs = [machine.own / "starting/runs/live/logs" for machine in machines.machines]
        wait_for(lambda: any((log / "gateway_1.log").exists() for log in logs) or None, 200)
        machines.machines[1].stop()
        run.check_all_are_on_the_first()
    assert "Traceback" not in run.output


def n_nodes(machines: TwoMachines) -> int:
    """Nodes of their Ray that run a task."""
    done = subprocess.run(
        [*machines.prefix, sys.executable, "-c", ASK_NODES, machines.address],
        env={**os.environ, **machines.token},
        capture_output=True,
        text=True,
        check=False,
    )
    return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


ASK_NODES = """
import ray, sys
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(sys.argv[1], log_to_driver=False)
task = ray.remote(num_cpus=0)(lambda: 1)
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
print(sum(ray.get([task.options(scheduling_strategy=On(n, soft=False)).remote() for n in nodes])))
"""

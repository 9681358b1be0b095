"""Runs on three machines that lose each of them, and what several refuse before they start.

`make test-cluster`. Ray is told of a GPU on each machine; there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from stepwell.trainer.ledger import audit
from tests.chaos.machines import Machines
from tests.cluster.driving import (
    KEY,
    Serving,
    ask,
    environment,
    machines_in,
    n_nodes,
    running,
    stepwell,
    wait_for,
)

pytestmark = pytest.mark.timeout(1500)
STEPS, BATCH = 60, 4
FIRST, SECOND, THIRD = "10.77.0.1", "10.77.0.2", "10.77.0.3"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with machines_in("three", 3, gpus=1) as three:
        yield three


def options(machines: Machines, run_dir: Path, engines: int) -> tuple[str, ...]:
    """A short quickstart with a gateway and a worker on each machine."""
    return (
        f"cluster.address={machines.address}",
        f"run.dir={run_dir}",
        "backend.device=cpu",
        f"cluster.engines={engines}",
        "pool.shards=2",  # the second is on the second machine
        "rollout.workers=3",
        "gateway.replicas=3",
        "gateway.host=0.0.0.0",
        f"gateway.admin_keys=[{KEY}]",
        f"trainer.total_steps={STEPS}",
        f"trainer.train_batch_size={BATCH}",
        "rollout.max_outstanding_groups=8",
        "trainer.checkpoint_every=1",
        "validation.before_train=false",
        "validation.every=1000",
    )


class Training(Serving):
    """`stepwell train` on the first machine."""

    def __init__(self, machines: Machines, run_dir: Path, output: Path, process: object) -> None:
        super().__init__(machines, output.stem, process)  # type: ignore[arg-type]
        self.run_dir, self._output = run_dir, output

    @property
    def output(self) -> str:
        return self._output.read_text()

    def steps(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def wait_trained(self, n: int) -> None:
        """Returns once `n` more optimizer steps are recorded."""
        goal = self.steps() + n

        def there() -> bool | None:
            assert self.process.poll() is None, self.output
            return self.steps() >= goal or None

        wait_for(there, 300)

    def ended(self) -> str:
        """The line by which a command says why it ended."""
        assert self.process.wait(120) == 1, self.output
        own = ("stepwell: node ", "stepwell: the Ray ")
        lines = [line for line in self.output.splitlines() if line.startswith(own)]
        assert len(lines) == 1, self.output
        return lines[0]


@contextmanager
def training(machines: Machines, run_dir: Path, engines: int, name: str) -> Iterator[Training]:
    output = machines.machines[0].own / f"{name}.txt"
    command = ("train", "--config", "quickstart", *options(machines, run_dir, engines))
    with running(machines, *command, folder=machines.local, output=output) as process:
        yield Training(machines, run_dir, output, process)


def check_books(run_dir: Path) -> None:
    """Every optimizer step was trained once on a whole batch, and no group twice."""
    books = audit(run_dir / "checkpoints" / "ledger.jsonl")
    assert books.doubled == ()
    assert {*range(1, STEPS + 1)} == books.updates.keys()
    assert {*books.updates.values()} == {BATCH}


def all_are_up(machines: Machines) -> None:
    machines.start(environment(machines))
    wait_for(lambda: n_nodes(machines) == 3 or None, 180)


def test_parts_are_on_all_machines_and_each_lost_one_is_a_line_that_the_same_command_outlives(
    machines: Machines,
) -> None:
    run_dir = machines.local.parent / "spread"  # seen by all
    all_are_up(machines)
    with training(machines, run_dir, 3, "loses-third") as run:
        url = run.url()
        run.wait_trained(2)
        told = wait_for(partial(ask, machines, f"{url}/statistics"), 60)
        assert f"engine 1 on {SECOND}; engine 2 on {THIRD}" in run.output
        hosts = [e["url"].split(":")[1].removeprefix("//") for e in told["engine"]["engines"]]
        assert hosts == [FIRST, SECOND, THIRD]
        gateways = [replica["url"].split(":")[1].removeprefix("//") for replica in told["replicas"]]
        assert sorted(gateways) == [FIRST, SECOND, THIRD]
        machines.machines[2].stop()
        assert f"node {THIRD}, which had engine 2, has left the Ray" in run.ended()
        assert "Traceback" not in run.output
    with training(machines, run_dir, 3, "loses-second") as run:  # engine 2 is beside the driver now
        run.wait_trained(2)
        machines.machines[1].stop()
        assert f"node {SECOND}, which had engine 1, has left the Ray" in run.ended()
    all_are_up(machines)
    with training(machines, run_dir, 3, "loses-head") as run:
        run.wait_trained(2)
        gcs = next(p for p in processes(machines, 0) if p.name() == "gcs_server")
        gcs.kill()
        # Told at once: Ray itself ends a driver whose head has been gone for a minute.
        told = f"the Ray at {machines.address} has ended"
        wait_for(lambda: told in run.output or None, 60)
        assert run.process.wait(120) == 1
        assert "Traceback" not in run.output
    all_are_up(machines)
    with training(machines, run_dir, 3, "finishes") as run:
        assert run.process.wait(500) == 0, run.output
    check_books(run_dir)


def processes(machines: Machines, k: int) -> list[psutil.Process]:
    """Processes of Ray on machine `k`."""
    ray = machines.machines[k].ray
    assert ray is not None
    return psutil.Process(ray.pid).children(recursive=True)


def test_workers_and_gateways_of_lost_machines_come_back_while_training_goes_on(
    machines: Machines,
) -> None:
    run_dir = machines.local.parent / "goes-on"
    all_are_up(machines)
    with training(machines, run_dir, 1, "goes-on") as run:
        run.wait_trained(1)
        machines.machines[2].stop()
        run.check_all_are_on([FIRST, SECOND], THIRD)
        machines.machines[1].stop()
        run.check_all_are_on([FIRST], SECOND)
        assert run.process.wait(500) == 0, run.output
        assert "Traceback" not in run.output
    check_books(run_dir)


def test_ranks_whose_weights_another_machine_would_not_see_are_refused_before_the_start(
    machines: Machines,
) -> None:
    all_are_up(machines)
    run_dir = machines.local / "own"  # a disk of each
    here = (*options(machines, run_dir, 1), "backend.device=auto", "backend.ranks=2")
    ran = stepwell(machines, "train", "--config", "quickstart", *here, folder=machines.local)
    assert ran.returncode == 2, ran.stderr
    last = ran.stderr.strip().splitlines()[-1]
    assert f"run.dir is {str(run_dir)!r}, which node {SECOND}" in last or THIRD in last
    assert "name a folder that all nodes see" in last
    assert not [p for p in os.listdir(machines.machines[0].own / "own") if p == "weights"]


def test_the_plan_of_a_joined_ray_names_its_machines(machines: Machines) -> None:
    all_are_up(machines)
    told = ("backend.device=cpu", "cluster.engines=3", f"cluster.address={machines.address}")
    ran = stepwell(machines, "plan", "--config", "quickstart", *told, folder=machines.local)
    assert ran.returncode == 0, ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines() if line.startswith("engine ")]
    assert [row[2] for row in rows] == [FIRST, SECOND, THIRD]

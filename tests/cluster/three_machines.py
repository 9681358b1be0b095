"""Runs on three machines that lose each of them, and what several refuse before they start.

`make test-cluster`. Ray is told of a GPU on each machine; there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from stepwell.datapool.files.archive.reader import ArchiveReader
from stepwell.datapool.remote.stopped import stopped_pool
from stepwell.run.folder import archive_folder, journal_folder, read_run
from stepwell.show.archive import archive_rest
from stepwell.show.run import limits_of
from stepwell.trainer.ledger import audit
from tests.chaos.machines import Machines
from tests.chaos.talkers import Talk, missing
from tests.cluster.driving import (
    KEY,
    LIMIT_S,
    Serving,
    all_are_up,
    ask,
    kill_gcs,
    machines_in,
    running,
    serving,
    stepwell,
    there,
    wait_for,
)

pytestmark = pytest.mark.timeout(6 * LIMIT_S)
ROOT = Path(__file__).parents[2]
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

        wait_for(there)


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


def test_parts_are_on_all_machines_and_each_lost_one_is_a_line_that_the_same_command_outlives(
    machines: Machines,
) -> None:
    run_dir = machines.local.parent / "spread"  # seen by all
    all_are_up(machines)
    with training(machines, run_dir, 3, "loses-third") as run:
        url = run.url()
        run.wait_trained(2)
        told = wait_for(partial(ask, machines, f"{url}/statistics"))
        assert f"engine 1 on {SECOND}; engine 2 on {THIRD}" in run.output
        hosts = [e["url"].split(":")[1].removeprefix("//") for e in told["engine"]["engines"]]
        assert hosts == [FIRST, SECOND, THIRD]
        gateways = [replica["url"].split(":")[1].removeprefix("//") for replica in told["replicas"]]
        assert sorted(gateways) == [FIRST, SECOND, THIRD]
        # The first shard answers for the run at its Ray's address.
        assert [n_running(machines, k, "DataPoolActor") for k in range(3)] == [1, 1, 0]
        machines.machines[2].stop()
        assert f"node {THIRD}, which had engine 2, has left the Ray" in run.ended()
    with training(machines, run_dir, 3, "loses-second") as run:  # engine 2 is beside the driver now
        run.wait_trained(2)
        machines.machines[1].stop()
        assert f"node {SECOND}, which had engine 1, has left the Ray" in run.ended()
    all_are_up(machines)
    with training(machines, run_dir, 3, "loses-head") as run:
        run.wait_trained(2)
        kill_gcs(machines)
        assert "run the same command again" in run.ended_with_head()
    all_are_up(machines)
    with training(machines, run_dir, 3, "finishes") as run:
        assert run.process.wait(2 * LIMIT_S) == 0, run.output
    check_books(run_dir)


def n_running(machines: Machines, k: int, actor: str) -> int:
    """Actors of this class on machine `k`."""
    titles = []
    for process in machines.machines[k].processes():
        with suppress(psutil.Error):  # it has just ended
            titles += process.cmdline()[:1]
    return sum(title.startswith(f"ray::{actor}") for title in titles)


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
        assert run.process.wait(2 * LIMIT_S) == 0, run.output
        assert "Traceback" not in run.output
    check_books(run_dir)


@contextmanager
def talking(machines: Machines, url: str, file: Path) -> Iterator[None]:
    """Clients on the first machine talk to the gateway at `url` inside the block."""
    command = (sys.executable, "-m", "tests.cluster.talking", url, str(file))
    clients = subprocess.Popen([*there(machines, ROOT), *command])
    try:
        yield
    finally:
        clients.terminate()
        assert clients.wait(LIMIT_S) == 0


def talks_in(file: Path) -> list[Talk]:
    lines = file.read_text().splitlines() if file.exists() else ()
    return [Talk(**json.loads(line)) for line in lines]


def wait_answered(file: Path, n: int) -> None:
    """Returns once `n` more turns were answered."""

    def answered() -> int:
        return sum(len(talk.words) for talk in talks_in(file))

    goal = answered() + n
    wait_for(lambda: answered() >= goal or None)


async def test_nothing_that_was_answered_is_lost_with_any_machine(machines: Machines) -> None:
    all_are_up(machines)
    run_dir = machines.local.parent / "answered"  # seen by all
    talks = machines.local.parent / "talks.jsonl"
    own = (f"run.dir={run_dir}", "pool.shards=2")
    with serving(machines, "loses-all", *own) as run, talking(machines, run.url(), talks):
        wait_answered(talks, 20)
        machines.machines[2].stop()
        run.check_all_are_on([FIRST, SECOND], THIRD)
        wait_answered(talks, 20)
        all_are_up(machines)
        machines.machines[1].stop()  # the second shard was there
        run.check_all_are_on([FIRST, THIRD], SECOND)
        wait_answered(talks, 20)
        kill_gcs(machines)
        assert "run the same command again" in run.ended_with_head()
    seen = talks_in(talks)
    talks.unlink()
    with serving(machines, "answers-again", *own) as run, talking(machines, run.url(), talks):
        wait_answered(talks, 20)
    seen += talks_in(talks)
    await archive_rest(run_dir, read_run(run_dir))
    pool = stopped_pool(journal_folder(run_dir), limits_of(read_run(run_dir)))
    lost, places = await missing(seen, pool, ArchiveReader(archive_folder(run_dir)))
    assert not lost
    assert sum(places.values()) >= 20


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

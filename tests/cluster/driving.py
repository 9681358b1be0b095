"""Commands on machines that are network namespaces (`tests/chaos/machines.py`), for the tests of
`make test-cluster`. Needs root and `ip`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.chaos.machines import Machines

T = TypeVar("T")
KEY = "a-key-of-several-machines"
LIMIT_S = 600.0
"""For whatever is waited for: many processes start on few cores. Not a measure of anything."""


@contextmanager
def machines_in(name: str, n: int, gpus: int = 0) -> Iterator[Machines]:
    """Machines with their Ray inside the block."""
    folder = Path("/tmp") / f"{name}-{os.getpid()}"  # Ray's sockets need a short path
    folder.mkdir()
    machines = Machines(folder, n, gpus)
    try:
        all_are_up(machines)
        yield machines
    finally:
        machines.remove()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def environment(machines: Machines) -> dict[str, str]:
    return {**os.environ, **machines.token, "OMP_NUM_THREADS": "1"}


def all_are_up(machines: Machines) -> None:
    """Returns once each has a Ray that runs tasks. On a busy machine one may miss Ray's own limits
    while it starts, and end."""

    def are_up() -> bool | None:
        machines.start(environment(machines))
        return n_nodes(machines) == len(machines.machines) or None

    wait_for(are_up)


def there(machines: Machines, folder: Path) -> tuple[str, ...]:
    """Runs a command on the first machine, in `folder` there."""
    return (*machines.prefix, "sh", "-c", 'cd "$0" && exec "$@"', str(folder))


def wait_for(what: Callable[[], T | None], limit_s: float = LIMIT_S) -> T:
    """Return what `what` returns, once that is something."""
    give_up = time.monotonic() + limit_s
    while (found := what()) is None:
        assert time.monotonic() < give_up, "in vain"
        time.sleep(1.0)
    return found


def ask(machines: Machines, url: str) -> dict[str, Any] | None:
    """The answer to a GET on the first machine; None: there is none."""
    command = ("curl", "-s", "-m", "5", "-H", f"authorization: Bearer {KEY}", url)
    done = subprocess.run([*machines.prefix, *command], capture_output=True, check=False)
    return json.loads(done.stdout) if done.stdout else None


def kill_gcs(machines: Machines) -> None:
    """The head of their Ray dies; its machine lives on."""
    ray = machines.machines[0].ray
    assert ray is not None
    family = psutil.Process(ray.pid).children(recursive=True)
    next(process for process in family if process.name() == "gcs_server").kill()


def stepwell(machines: Machines, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command on the first machine, in `folder` there."""
    return subprocess.run(
        [*there(machines, folder), sys.executable, "-m", "stepwell", *command],
        env=environment(machines),
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
        check=False,
    )


@contextmanager
def running(
    machines: Machines, *command: str, folder: Path, output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """The command runs on the first machine inside the block; its words go to the file `output`."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*there(machines, folder), sys.executable, "-m", "stepwell", *command],
            env=environment(machines),
            stdout=file,
            stderr=file,
        )
        try:
            yield process
        except AssertionError as e:
            e.add_note(output.read_text())
            raise
        finally:
            process.terminate()
            process.wait(LIMIT_S)


@dataclass
class Serving:
    """A command on the first machine that has a gateway on each."""

    machines: Machines
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
            return rest.split()[0].rstrip(",;") if rest else None

        return wait_for(found)

    def replicas(self, url: str) -> list[str] | None:
        """Origins of all gateways by the one at `url`."""
        found = ask(self.machines, f"{url}/statistics")
        return None if found is None else [replica["url"] for replica in found["replicas"]]

    def check_all_are_on(self, live: Sequence[str], lost: str) -> None:
        """All gateways come to be on the machines with addresses `live`, and know it of each
        other; the terminal names the one that was `lost`."""

        def moved() -> list[str] | None:
            assert self.process.poll() is None, self.output
            urls = self.replicas(self.url())
            hosts = {url.split(":")[1].removeprefix("//") for url in urls or ()}
            return urls if urls and hosts <= {*live} else None

        urls = wait_for(moved)
        for url in urls:
            wait_for(lambda url=url: self.replicas(url) == urls or None)
        wait_for(lambda: f"node {lost} has left the Ray" in self.output or None)
        assert self.process.poll() is None

    def ended(self) -> str:
        """Line by which a command says why it ended: its last, but for where its logs are."""
        assert self.process.wait(LIMIT_S) == 1, self.output
        lines = [line for line in self.output.splitlines() if line.startswith("stepwell: ")]
        own = [line for line in lines if not line.startswith("stepwell: see ")]
        assert len(own) == 1, self.output
        assert "Traceback" not in self.output
        return own[0]

    def ended_with_head(self) -> str:
        """The same, after the head of its Ray has died: that is told before parts are stopped."""
        told = f"the Ray at {self.machines.address} has ended"
        wait_for(lambda: told in self.output or None)
        line = self.ended()
        assert line.startswith(f"stepwell: {told}")
        return line


@contextmanager
def serving(machines: Machines, name: str, *options: str) -> Iterator[Serving]:
    """`stepwell serve` with a gateway on each machine; afterwards all machines are up again."""
    n = len(machines.machines)
    all_are_up(machines)
    folder, own = machines.local / name, machines.machines[0].own
    (own / name).mkdir()
    where = (f"cluster.address={machines.address}", "gateway.host=0.0.0.0")
    own_keys = (f"gateway.replicas={n}", f"gateway.admin_keys=[{KEY}]")
    command = ("serve", "--config", "live", *where, *own_keys, *options)
    output = own / f"{name}.txt"
    try:
        with running(machines, *command, folder=folder, output=output) as process:
            yield Serving(machines, name, process)
    finally:
        machines.start(environment(machines))


def n_nodes(machines: Machines) -> int:
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

"""This module makes several machines of one, so that a Ray cluster of several nodes meets what
machines meet: addresses of their own, folders of their own, and cables that can be cut.

    network namespace 1, 10.77.0.1 ──veth── switch ──veth── namespace 2, 10.77.0.2 (and 3, …)
    ray start --head                                        ray start --address=10.77.0.1
    LOCAL = a folder of its own                             LOCAL = likewise, at the same path

Needs root and `ip` (`apt-get install iproute2`). Owns the namespaces and the Ray processes in them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

RAY = Path(sys.executable).with_name("ray")
PORT = 6390
START_S = 300.0
OBJECT_STORE = 200 << 20


def shell(*command: str) -> None:
    """
    Raises:
        RuntimeError: it failed, in its own words.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}; chaos needs root")


class Machine:
    """One of them.

    Args:
        local: the path at which each machine has a folder of its own.
        gpus: that its Ray is told of; there are none.
    """

    def __init__(self, number: int, folder: Path, local: Path, gpus: int) -> None:
        self.ip = f"10.77.0.{number}"
        self._gpus = gpus
        self.cable = f"chaos{os.getpid()}-{number}"
        self._is_head = number == 1
        self.own, self._local = folder / f"machine-{number}", local
        self._log = folder / f"ray-{number}.log"
        self.ray: subprocess.Popen[bytes] | None = None
        self.own.mkdir()

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command there: `ip netns exec` gives it a mount namespace of its own, too."""
        bind = 'mount --bind "$0" "$1" && shift && exec "$@"'
        there = ("ip", "netns", "exec", self.cable)
        return (*there, "sh", "-c", bind, str(self.own), str(self._local))

    def start(self, env: Mapping[str, str]) -> None:
        """Ray's processes, if they are not there; returns before they are up."""
        if self.ray is not None and self.ray.poll() is None:
            return
        self.stop()
        # By this file `ray start` refuses an address at which it sees any raylet; processes of
        # other tests, on machines of the same addresses, can be seen from here.
        (self.own / "ray/ray_current_cluster").unlink(missing_ok=True)
        role = (
            ("--head", f"--port={PORT}", "--include-dashboard=false")
            if self._is_head
            else (f"--address=10.77.0.1:{PORT}",)
        )
        size = ("--num-cpus=4", f"--num-gpus={self._gpus}")
        size += (f"--object-store-memory={OBJECT_STORE}",)
        where = (f"--node-ip-address={self.ip}", f"--temp-dir={self._local / 'ray'}")
        with self._log.open("ab") as log:
            self.ray = subprocess.Popen(
                [*self.prefix, str(RAY), "start", *role, *where, *size, "--block"],
                stdout=log,
                stderr=log,
                env=dict(env),
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it as a power failure would, with Ray and all that it started there. Commands that
        this process runs there, drivers for example, live on.

        A Ray that lost its GCS has ended by itself and left some of its processes to init, so they
        are found by the namespace.
        """
        if self.ray is not None:
            self.ray.kill()
            self.ray.wait()
            self.ray = None
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)

    def processes(self) -> list[psutil.Process]:
        """Return Ray's processes there and what they started: all but commands of ours."""
        told = subprocess.run(
            ["ip", "netns", "pids", self.cable], capture_output=True, text=True, check=True
        )
        pids = {*map(int, told.stdout.split())}
        for command in psutil.Process().children():
            if self.ray is None or command.pid != self.ray.pid:
                with suppress(psutil.NoSuchProcess):
                    pids -= {command.pid, *(p.pid for p in command.children(recursive=True))}
        found = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found


class Machines:
    """All of them, joined. `start` may be called whenever something of them may have died.

    Args:
        folder: of this scenario; seen by all, but for `local`.
        gpus: that Ray is told of each machine.
    """

    def __init__(self, folder: Path, n: int = 2, gpus: int = 0) -> None:
        self.local = folder / "local"
        self.local.mkdir(parents=True)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        """Environment of everything that joins."""
        self.machines = [Machine(k + 1, folder, self.local, gpus) for k in range(n)]
        self.address = f"{self.machines[0].ip}:{PORT}"
        self._switch = f"chaos{os.getpid()}-switch"
        shell("ip", "netns", "add", self._switch)
        there = ("ip", "-n", self._switch, "link")
        shell(*there, "add", "name", "bridge", "type", "bridge")
        shell(*there, "set", "bridge", "up")
        for k, one in enumerate(self.machines):
            shell("ip", "netns", "add", one.cable)
            port, peer = f"port-{k + 1}", ("type", "veth", "peer", "name", "cable")
            shell("ip", "link", "add", port, "netns", self._switch, *peer, "netns", one.cable)
            shell(*there, "set", port, "up", "master", "bridge")
            here = ("ip", "-n", one.cable)
            shell(*here, "addr", "add", f"{one.ip}/24", "dev", "cable")
            for link in ("lo", "cable"):
                shell(*here, "link", "set", link, "up")
            self._route(k, "add")

    def _route(self, k: int, how: str) -> None:
        """By its default route Ray finds out which address a machine has."""
        other = self.machines[(k + 1) % len(self.machines)]
        shell("ip", "-n", self.machines[k].cable, "route", how, "default", "via", other.ip)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs the driver, on the first."""
        return self.machines[0].prefix

    def start(self, env: Mapping[str, str]) -> None:
        """Head first; a head that died took the cluster with it."""
        head, *others = self.machines
        if head.ray is None or head.ray.poll() is not None:
            for machine in self.machines:
                machine.stop()
            head.start(env)
            self._wait()
        for other in others:
            other.start(env)

    def _wait(self) -> None:
        give_up = time.monotonic() + START_S
        reach = ("bash", "-c", f"exec 3<>/dev/tcp/{self.machines[0].ip}/{PORT}")
        command = (*self.machines[0].prefix, *reach)
        while subprocess.run(command, capture_output=True, check=False).returncode:
            if time.monotonic() > give_up:
                log = (self.local.parent / "ray-1.log").read_text()
                raise RuntimeError(f"Ray did not start in {START_S:g} s: {log[-2000:]}")
            time.sleep(0.5)

    def cut(self) -> None:
        """Nothing gets from the first to the others, until `mend`."""
        shell("ip", "-n", self.machines[0].cable, "link", "set", "cable", "down")

    def mend(self) -> None:
        shell("ip", "-n", self.machines[0].cable, "link", "set", "cable", "up")
        self._route(0, "replace")

    def daemons(self) -> list[psutil.Process]:
        found = []
        for machine in self.machines:
            if machine.ray is not None:
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(machine.ray.pid))
        return found

    def remove(self) -> None:
        for machine in self.machines:
            machine.stop()
            shell("ip", "netns", "delete", machine.cable)
        shell("ip", "netns", "delete", self._switch)

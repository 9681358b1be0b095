"""This module makes two machines of one, so that a Ray cluster of two nodes meets what two machines
meet: addresses of their own, folders of their own, and a cable between them that can be cut.

    network namespace a, 10.77.0.1 ──veth── network namespace b, 10.77.0.2
    ray start --head                        ray start --address=10.77.0.1
    LOCAL = a folder of a's own             LOCAL = a folder of b's own, at the same path

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
START_S = 120.0
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
    """One of the two.

    Args:
        local: the path at which each machine has a folder of its own.
    """

    def __init__(self, number: int, folder: Path, local: Path) -> None:
        self.ip = f"10.77.0.{number}"
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
        role = (
            ("--head", f"--port={PORT}", "--include-dashboard=false")
            if self._is_head
            else (f"--address=10.77.0.1:{PORT}",)
        )
        size = ("--num-cpus=4", f"--object-store-memory={OBJECT_STORE}")
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
        if self.ray is None:
            return
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.ray.pid).children(recursive=True)
            self.ray.kill()
            self.ray.wait()
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.ray = None


class TwoMachines:
    """Both, joined. `start` may be called whenever something of them may have died.

    Args:
        folder: of this scenario; seen by both, but for `local`.
    """

    def __init__(self, folder: Path) -> None:
        self.local = folder / "local"
        self.local.mkdir(parents=True)
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        """Environment of everything that joins."""
        self.machines = [Machine(n, folder, self.local) for n in (1, 2)]
        self.address = f"{self.machines[0].ip}:{PORT}"
        a, b = self.machines
        for one in self.machines:
            shell("ip", "netns", "add", one.cable)
        # fmt: off
        shell("ip", "link", "add", "cable", "netns", a.cable,
              "type", "veth", "peer", "name", "cable", "netns", b.cable)
        # fmt: on
        for one, other in ((a, b), (b, a)):
            here = ("ip", "-n", one.cable)
            shell(*here, "addr", "add", f"{one.ip}/24", "dev", "cable")
            for link in ("lo", "cable"):
                shell(*here, "link", "set", link, "up")
            # By its default route Ray finds out which address a machine has.
            shell(*here, "route", "add", "default", "via", other.ip)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs the driver, on the first."""
        return self.machines[0].prefix

    def start(self, env: Mapping[str, str]) -> None:
        """Head first; a head that died took the cluster with it."""
        head, other = self.machines
        if head.ray is None or head.ray.poll() is not None:
            for machine in self.machines:
                machine.stop()
            head.start(env)
            self._wait()
        other.start(env)

    def _wait(self) -> None:
        give_up = time.monotonic() + START_S
        reach = ("bash", "-c", f"exec 3<>/dev/tcp/{self.machines[0].ip}/{PORT}")
        command = (*self.machines[0].prefix, *reach)
        while subprocess.run(command, capture_output=True, check=False).returncode:
            if time.monotonic() > give_up:
                raise RuntimeError(f"Ray did not start in {START_S:g} s; see {self.local.parent}")
            time.sleep(0.5)

    def cut(self) -> None:
        """Nothing gets from one to the other, until `mend`."""
        shell("ip", "-n", self.machines[0].cable, "link", "set", "cable", "down")

    def mend(self) -> None:
        here = ("ip", "-n", self.machines[0].cable)
        shell(*here, "link", "set", "cable", "up")
        shell(*here, "route", "replace", "default", "via", self.machines[1].ip)

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

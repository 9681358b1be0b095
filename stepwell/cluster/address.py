"""This module finds the Ray that `cluster.address` names and looks whether it answers, so that a
wrong address is told in one line, before Ray waits a minute for it.

    host:port   as it is
    auto        RAY_ADDRESS, or else the one Ray that `ray start` began on this machine. Those that
                other runs of Stepwell have started for themselves do not count

Does not own the connection (`cluster/ray.py`). Does not import Ray.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from stepwell.cluster.guard import VARIABLE
from stepwell.trainer.errors import ConfigError

CONNECT_S = 3.0
"""A GCS answers within this."""
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""First bytes of a client; a gRPC server, as a GCS is, answers with its settings. Ray itself would
wait for a mute one for over a minute."""
_SETTINGS = b"\4"
_OWN = "set cluster.address=null for a Ray of this run's own"


class RayPart(BaseModel):
    """A Ray, as `run.json` names it: what a process needs to join it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    address: str
    """host:port of the GCS."""
    namespace: str
    auth_mode: str
    """Authentication, as in RAY_AUTH_MODE: `token` or `disabled`."""
    token_file: Path | None = None
    """None: Ray wants no token, or it stands in the run's RAY_AUTH_TOKEN alone."""
    session_dir: Path | None = None
    """Ray's own logs are in its `logs`."""


def find_ray(address: str) -> str:
    """host:port of the Ray that `cluster.address` names; it answers.

    Raises:
        ConfigError: there is none, or `auto` could be several.
    """
    whose = f"cluster.address is {address!r}"
    if address == "auto":
        if (named := os.environ.get("RAY_ADDRESS", "auto")) not in ("", "auto"):
            address, whose = named, f"{whose} and RAY_ADDRESS is {named!r}"
        else:
            address = _only_one(whose)
    if "://" in address:
        raise ConfigError(
            f"{whose}, a Ray Client's; give the host:port of the cluster's GCS (`ray start --head` "
            "prints it), reached from a node of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{whose}; write host:port, or auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S) as sock:
            sock.sendall(_HTTP2_HELLO)
            if sock.recv(9)[3:4] != _SETTINGS:
                raise OSError("no gRPC server")
    except (OSError, UnicodeError) as e:  # the latter of a name that no host has
        why = getattr(e, "strerror", None) or e
        raise ConfigError(
            f"{whose}, where nothing answers ({why}); start Ray there (`ray start "
            f"--head`) and give its GCS's host:port, or {_OWN}"
        ) from e
    return address


def _only_one(whose: str) -> str:
    here = sorted(set(_running()))
    if not here:
        raise ConfigError(
            f"{whose}, but no Ray that could be joined runs on this machine; start one (`ray start "
            f"--head`), give its host:port, or {_OWN}"
        )
    if len(here) > 1:
        raise ConfigError(f"{whose}, but several run on this machine: {', '.join(here)}; give one")
    return here[0]


def _running() -> Iterator[str]:
    """GCS addresses of the raylets on this machine that no run of Stepwell has started."""
    for process in psutil.process_iter():
        try:
            if process.name() != "raylet":
                continue
            found = re.search(r"--gcs-address=(\S+)", " ".join(process.cmdline()))
            if found is not None and VARIABLE not in process.environ():
                yield found[1]
        except psutil.Error:  # it ended meanwhile, or is another user's
            continue

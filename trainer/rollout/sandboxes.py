"""Plans how a command of a rollout is run: as a process, in bubblewrap, or in a container.

    SandboxRequest ──kind──► SandboxPlan: the command line for this machine, and what ends it

Pure: a plan is made without the sandbox being there. `process` bounds and ends what goes wrong by
itself and is no wall: it reads what its user reads. `bubblewrap` and containers see their own
folders, what `visible` names, and the network, since they have to reach the gateway. Does not own
running it (`harness.py`), nor limits of processes of this machine (`backends/processes.py`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from stepwell.datapool import dotted
from stepwell.trainer.config.harness import HarnessLimits, SandboxChoice
from stepwell.trainer.errors import RolloutError


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """A command that is to be run in a sandbox."""

    name: str
    """Unique here: letters, digits and dashes."""
    command: Sequence[str]
    root: Path
    """Folder of the rollout, which holds all that it may write; `tmp` in it, temporary files."""
    workdir: Path
    """Folder in which the command runs."""
    env: Mapping[str, str]
    choice: SandboxChoice
    limits: HarnessLimits
    image: str | None = None
    """Image of this rollout's task; None: the choice's."""
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Folders of `root` by the path that they have inside bubblewrap or a container."""
    hidden: Sequence[Path] = ()
    """Folders that the command must not see: those of other rollouts, tests. Processes do."""


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """Command of this machine."""

    argv: Sequence[str]
    env: Mapping[str, str]
    after: Sequence[str] = ()
    """Command that ends what `argv` may leave running elsewhere."""


_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/var", "/nix", "/srv")
"""Folders of a system that programs are in."""
_EMPTY = ("/home", "/root", "/run")
"""Folders of others, which have nothing for an agent."""
_TEMPORARY = ("/tmp", "/var/tmp")
"""Names of the rollout's own `tmp`: what is written there counts, and is removed."""


def process(request: SandboxRequest) -> SandboxPlan:
    return SandboxPlan(tuple(request.command), request.env)


def bubblewrap(request: SandboxRequest) -> SandboxPlan:
    """A read-only file system without anybody's home, in which only `root` can be written."""
    root = str(request.root)
    argv = ["bwrap", "--die-with-parent", "--new-session"]
    argv += ["--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    if request.mounts:  # their names may not be there, and nothing can be made in a read-only root
        argv += ["--tmpfs", "/"]
        for folder in _SYSTEM:
            argv += ["--ro-bind-try", folder, folder]
        argv += ["--dev", "/dev", "--proc", "/proc"]
    else:
        argv += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for folder in _TEMPORARY:
        argv += ["--bind", f"{root}/tmp", folder]
    for folder in _EMPTY:
        argv += ["--tmpfs", folder]
    shown = [(path, ["--ro-bind", str(path), str(path)]) for path in request.choice.visible]
    hidden = [(path, ["--tmpfs", str(path)]) for path in request.hidden]
    for _, mount in sorted((*hidden, *shown), key=lambda each: len(each[0].parts)):
        argv += mount  # what is within another comes after it
    argv += ["--bind", root, root]
    for inside, mounted in request.mounts.items():
        argv += ["--bind", str(mounted), inside]
    if not request.mounts:  # tests of a Harbor task install what they need
        for folder in _EMPTY:
            argv += ["--remount-ro", folder]
    for path in request.hidden:
        argv += ["--remount-ro", str(path)]
    argv += ["--chdir", _inside(request), "--", *request.command]
    return SandboxPlan(argv, request.env)


def _inside(request: SandboxRequest) -> str:
    """The working folder, as the sandbox calls it."""
    named = (at for at, folder in request.mounts.items() if folder == request.workdir)
    return next(named, str(request.workdir))


def _container(program: str, request: SandboxRequest) -> SandboxPlan:
    choice, limits = request.choice, request.limits
    root = str(request.root)
    volumes: list[str] = []
    argv = [program, "run", "--rm", "--init", "--name", request.name]
    argv += ["--network", choice.network]
    if not request.mounts:  # tests of a Harbor task install what they need, as root
        argv += ["--user", f"{os.getuid()}:{os.getgid()}"]
        if program == "podman" and os.getuid():  # root's podman refuses it, and needs it not
            argv += ["--userns", "keep-id"]
        argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        for folder in _TEMPORARY:  # the only ones that an image lets everybody write
            volumes += ["--volume", f"{root}/tmp:{folder}"]
    if limits.memory_mb is not None:
        argv += ["--memory", f"{limits.memory_mb}m"]
    if limits.processes is not None:
        argv += ["--pids-limit", str(limits.processes)]
    if choice.cpus is not None:
        argv += ["--cpus", f"{choice.cpus:g}"]
    if limits.cpu_s is not None:
        argv += ["--ulimit", f"cpu={limits.cpu_s}"]
    env = {name: url_inside(value, choice) for name, value in request.env.items()}
    if choice.network != "host" and program == "docker":
        argv += ["--add-host", f"{_HOSTS[program]}:host-gateway"]
    argv += [*volumes, "--volume", f"{root}:{root}"]
    for inside, mounted in request.mounts.items():
        argv += ["--volume", f"{mounted}:{inside}"]
    for path in choice.visible:
        argv += ["--volume", f"{path}:{path}:ro"]
    argv += ["--workdir", _inside(request)]
    # Values come from this process's environment: keys are in no command line. PATH is the image's,
    # and what the program itself reads is its user's: podman keeps its images in the home.
    client = client_env()
    for name in sorted(env.keys() - {"PATH"}):
        argv += ["--env", f"{name}={env[name]}" if name in _CLIENTS else name]
    command = [url_inside(part, choice) for part in request.command]
    argv += [request.image or choice.image or "", *command]
    env.setdefault("PATH", os.defpath)  # finds the program itself
    return SandboxPlan(argv, {**env, **client}, (program, "rm", "--force", request.name))


_CLIENTS = (
    "HOME",
    "XDG_RUNTIME_DIR",
    "DOCKER_HOST",
    "DOCKER_CONFIG",
    "CONTAINER_HOST",
    "CONTAINERS_CONF",
    "CONTAINERS_STORAGE_CONF",
)
"""Variables by which docker and podman find their settings, daemon, images and logins."""


def client_env() -> dict[str, str]:
    """Return what docker and podman get of this process's environment; containers get nothing."""
    return {name: os.environ[name] for name in _CLIENTS if name in os.environ}


_HOSTS = {"docker": "host.docker.internal", "podman": "host.containers.internal"}
"""Names by which containers call this machine."""


def url_inside(text: str, choice: SandboxChoice) -> str:
    """A text that is a URL of this machine's loopback, as a container of another network calls it;
    any other text, or in another sandbox, as it is."""
    host = None if choice.network == "host" else _HOSTS.get(choice.kind)
    if host is None or not re.fullmatch(r"https?://\S+", text):
        return text
    try:
        url = urlsplit(text)
        at = host if url.port is None else f"{host}:{url.port}"
    except ValueError:  # it only looks like one
        return text
    if url.hostname not in ("127.0.0.1", "localhost", "0.0.0.0", "::1"):
        return text
    return urlunsplit(url._replace(netloc=at))


def docker(request: SandboxRequest) -> SandboxPlan:
    return _container("docker", request)


def podman(request: SandboxRequest) -> SandboxPlan:
    return _container("podman", request)


Sandbox = Callable[[SandboxRequest], SandboxPlan]
SANDBOXES: Mapping[str, Sandbox] = {
    "process": process,
    "bubblewrap": bubblewrap,
    "docker": docker,
    "podman": podman,
}
_PROGRAMS = {"bubblewrap": "bwrap", "docker": "docker", "podman": "podman"}


def find_sandbox(choice: SandboxChoice) -> Sandbox:
    """The function that plans commands of the sandbox.

    Raises:
        RolloutError: it is not here.
    """
    key = f"rollout.harness.sandbox.kind is {choice.kind!r}"
    program = _PROGRAMS.get(choice.kind)
    if program is not None and shutil.which(program) is None:
        remedy = f"install {'bubblewrap' if program == 'bwrap' else program}, or set it to process"
        raise RolloutError(f"{key}, but there is no {program} on the PATH; {remedy}")
    if choice.kind in SANDBOXES:
        return SANDBOXES[choice.kind]
    try:
        found: Sandbox = dotted.resolve(choice.kind)
    except Exception as e:  # foreign code
        raise RolloutError(
            f"{key}, none of {', '.join(SANDBOXES)}, nor a function that can be imported "
            f"({type(e).__name__}: {e}); name package.module:function"
        ) from e
    if not callable(found):
        raise RolloutError(f"{key}, which is no function; write (SandboxRequest) -> SandboxPlan")
    return found

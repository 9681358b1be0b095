"""Looks at every other node of a joined Ray before a run starts there, so that what a node lacks is
one line that names the node and the remedy, and not a part that never comes up.

    driver ── Look(agent, paths, nonce) ──► a task on each other node ──► Seen
       └── compares it with this machine ──► ConfigError, a line for each thing that is missing

The project, which is the folder that the command runs in, travels to nodes that do not have it, as
Ray's `working_dir` (`lacks_project`, `runtime_env`). Does not own placement (`placement.py`).
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stepwell.config.run import RunConfig
from stepwell.trainer.config.environment import ENVIRONMENT
from stepwell.trainer.config.harness import HarnessConfig
from stepwell.trainer.errors import ConfigError, RolloutError
from stepwell.trainer.rollout.agents import agent_of_workers, load_agent
from stepwell.version import versions

ANSWER_S = 120.0
"""A node's first worker imports Ray and Stepwell, and the agent what it needs."""
SAME = ("ray", "torch")
"""Packages that have to be of one version on all nodes, as Stepwell and Python."""
NONCE = ".stepwell-node-check"
"""Beginning of the files in `run.dir` by which nodes see whether they share it."""
NOT_SENT = ("runs", "wandb", "tensorboard", ".venv*", ".git", "node_modules")
"""Folders of a project that no agent imports, beside environments of Python, which may have any
name, and what `.gitignore` names."""


@dataclass(frozen=True)
class Look:
    """Questions to a node."""

    agent: str | None
    """`rollout.agent`; None: no agent is run there."""
    paths: tuple[Path, ...] = ()
    """Folders that it has to have."""
    shared: Path | None = None
    """`run.dir`, if the node has to see the driver's."""
    nonce: str = ""
    """File in `shared` that the driver has written."""
    harness: HarnessConfig | None = None
    """`rollout.harness`."""
    saves: bool = False
    """A rank is there, which writes its part of each checkpoint into `shared`."""


@dataclass(frozen=True)
class Seen:
    """Answers of a node."""

    host: str
    versions: Mapping[str, str]
    agent_error: str = ""
    """Empty: it can be imported."""
    missing: tuple[Path, ...] = ()
    is_shared: bool = True
    """It sees the driver's file, and can write beside it."""
    mark: str = ""
    """End of the name of the file that it has left beside that."""
    python: str = field(default_factory=lambda: sys.executable)


def look(wanted: Look) -> Seen:
    """Answer for this machine; runs as a task on a node."""
    error = ""
    if wanted.agent is not None:
        sys.path.insert(0, os.getcwd())
        try:
            if wanted.agent != ENVIRONMENT:  # comes with Stepwell
                load_agent(wanted.agent, harness=wanted.harness)
        except RolloutError as e:
            error = str(e)
    is_shared, mark = True, secrets.token_hex(4)
    if wanted.shared is not None:
        try:
            is_shared = (wanted.shared / wanted.nonce).is_file()
            if is_shared:
                (wanted.shared / f"{wanted.nonce}-{mark}").touch()
        except OSError:  # another user's, or mounted to be read
            is_shared = False
    missing = tuple(path for path in wanted.paths if not path.is_dir())
    return Seen(platform.node(), versions(SAME), error, missing, is_shared, mark)


def lacks_project(config: RunConfig) -> bool:
    """True if an agent is to run on a node of this Ray that cannot import it as it is."""
    agent = config.rollout.agent
    if agent is None or not (others := _others()):
        return False
    wanted = Look(agent_of_workers(agent), harness=config.rollout.harness)
    return any(seen.agent_error for seen in _ask(others, dict.fromkeys(others, wanted)).values())


def runtime_env(project: Path | None, variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Ray's `runtime_env` of all processes on a Ray that was joined; None: none is needed.

    Args:
        project: folder to take along; None: the nodes have it.
        variables: added to the environment.
    """
    env: dict[str, Any] = {}
    if project is not None:
        environments = (f"/{each.parent.name}" for each in project.glob("*/pyvenv.cfg"))
        env |= {"working_dir": str(project), "excludes": [*NOT_SENT, *sorted(environments)]}
    if variables:
        env["env_vars"] = dict(variables)
    return env or None


def check_nodes(config: RunConfig, used: Mapping[str, str]) -> None:
    """Ask every other node of this Ray for what the run needs there.

    Args:
        used: names of the ranks and engines on each node that has some, by its id.

    Raises:
        ConfigError: something is missing; a line for each thing and node.
    """
    if not (others := _others()):
        return
    folder = config.run.dir.absolute()
    nonce = f"{NONCE}-{secrets.token_hex(8)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / nonce).touch()
    wanted = {node: needs_of(config, node, used, nonce) for node in others}
    try:
        answers = _ask(others, wanted)
        left = {path.name for path in folder.glob(f"{nonce}-*")}
    finally:
        for path in folder.glob(f"{nonce}*"):
            path.unlink(missing_ok=True)
    lines = []
    for node, seen in answers.items():
        if wanted[node].shared is not None and f"{nonce}-{seen.mark}" not in left:
            seen = replace(seen, is_shared=False)
        lines += differences(others[node], wanted[node], seen, versions(SAME))
    if lines:
        raise ConfigError("\n".join(lines))


def needs_of(config: RunConfig, node: str, used: Mapping[str, str], nonce: str = "") -> Look:
    """Return what the run needs on a node.

    Args:
        used: names of the ranks and engines on each node that has some, by its id.
        nonce: file that the driver has written in `run.dir`.
    """
    agent = config.rollout.agent and agent_of_workers(config.rollout.agent)
    harness = config.rollout.harness
    if node not in used:
        return Look(agent, harness=harness)
    saves = "rank" in used[node]
    is_shared = saves or config.engine.weight_transport not in ("nccl", "ipc")
    folder = config.run.dir.absolute() if is_shared else None
    return Look(agent, (config.model.path.absolute(),), folder, nonce, harness, saves)


def differences(ip: str, wanted: Look, seen: Seen, here: Mapping[str, str]) -> list[str]:
    """A line for each thing that the node at `ip` lacks.

    Args:
        here: versions on this machine.
    """
    node = f"node {ip} ({seen.host})"
    lines = [
        f"{node} has {name} {seen.versions.get(name, 'not at all')} in {seen.python}, and this "
        f"machine {version}; install the same there"
        for name, version in here.items()
        if seen.versions.get(name) != version
    ]
    if seen.agent_error:
        lines.append(
            f"{node}: {seen.agent_error.splitlines()[0]}; install what the agent imports in "
            f"{seen.python} there, or start the run in the folder that has it"
        )
    lines += [
        f"model.path is {str(path)!r}, which {node} does not have; copy it there, or name a folder "
        "that all nodes see; an id on the hub or an address is fetched into the cache of this "
        "machine alone, unless XDG_CACHE_HOME is such a folder"
        for path in seen.missing
    ]
    if not seen.is_shared:
        why = (
            "a rank writes its part of each checkpoint there; name a folder that all nodes see"
            if wanted.saves
            else "weights go to its engines through it; name a folder that all nodes see, or set "
            "engine.weight_transport=nccl"
        )
        lines.append(
            f"run.dir is {str(wanted.shared)!r}, which {node} does not share with this machine, or "
            f"cannot write, and {why}"
        )
    return lines


def _others() -> dict[str, str]:
    """Addresses of the other live nodes, by id."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()  # type: ignore[no-untyped-call]  # theirs
        if node["Alive"] and node["NodeID"] != here
    }


def _ask(nodes: Mapping[str, str], wanted: Mapping[str, Look]) -> dict[str, Seen]:
    """Answers by node id. All nodes are asked at once.

    Args:
        nodes: their addresses.

    Raises:
        ConfigError: a node does not answer, or has no Stepwell.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = {
        node: task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(wanted[node])
        for node in nodes
    }
    answers = {}
    for node, answer in asked.items():
        try:
            answers[node] = ray.get(answer, timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError as e:
            raise ConfigError(
                f"node {nodes[node]} did not answer within {ANSWER_S:g} s; see its Ray's logs, or "
                "stop Ray there (`ray stop`) to go on without it"
            ) from e
        except ray.exceptions.RayError as e:
            why = str(e).strip().splitlines()[-1][:200]
            raise ConfigError(
                f"node {nodes[node]} cannot run Stepwell ({why}); install it there as here "
                f"({sys.executable}), and start Ray from that environment"
            ) from e
    return answers

"""Plan of a run that is not started: the place and the memory of each part, and exact commands.

    configuration ──► placement.plan ──────► node and GPUs of each rank and engine
    config.json ────► checks.rank_memory ──► bytes of a rank; of an engine its weights, the rest is
                                             KV cache; what does not fit has one line of remedy
    keys ───────────► engine_flags ────────► the engine's command line

The machines are those that the caller describes, those of the Ray to be joined, or this one. The
model is a folder with a config.json, or an id on the hub, of which that file alone is fetched.
Starts nothing. Does not own the arithmetic of a rank (`backends/torch/memory.py`), nor what refuses
a run (`checks.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from stepwell.backends.base import BACKENDS
from stepwell.backends.engines.commands import Launch, has_gpu
from stepwell.backends.engines.kinds import command_line
from stepwell.backends.engines.ports import BLOCK, Host, node_launches
from stepwell.backends.hub import fetch_model_config, is_hub_id
from stepwell.backends.torch.memory import LENT, ModelShape
from stepwell.cluster.engine_flags import engine_of_run, engine_share
from stepwell.cluster.placement import (
    Node,
    Plan,
    Seat,
    cluster_nodes,
    in_turn,
    machine,
    plan,
    trains_elsewhere,
)
from stepwell.config.run import RunConfig
from stepwell.run.checks import as_planned, gpu_bytes, kept_beside_engine, rank_memory
from stepwell.trainer.errors import ConfigError

GPU_GB = 80.0
"""Memory of a GPU, where nobody says it."""
ENGINE_PORT = 30000
"""Port of the engine in the printed commands; a run takes free ones."""
ENGINE_RESERVE = 2e9
"""Bytes of an engine's share that are neither weights nor KV cache: CUDA graphs and workspaces."""
_GB = 1e9


class Machines(NamedTuple):
    """Nodes to plan for."""

    nodes: Sequence[Node]
    gpu_bytes: float
    """Memory of each GPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run, and its place."""

    name: str
    node: str
    gpus: str = ""
    """Empty: it has none."""
    memory: str = ""
    """Bytes in words; empty: not known, or little."""
    problem: str = ""
    """Reason why it does not fit, and the remedy; empty: it fits."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that `stepwell plan` shows."""

    model: str
    machines: str
    strategy: str
    parts: tuple[Part, ...]
    commands: tuple[str, ...]
    problems: tuple[str, ...] = field(default=())

    def text(self) -> str:
        """Lines for people. Equal neighbours, such as rank 0 to rank 3, keep their own lines."""
        lines = [self.model, self.machines, self.strategy, ""]
        rows = [(p.name, p.node, p.gpus or "–", p.memory) for p in self.parts]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines += [
            "  ".join(f"{cell:{w}}" for cell, w in zip(row, (*widths, 0), strict=True)).rstrip()
            for row in rows
        ]
        lines += ["", "commands", *(f"  {command}" for command in self.commands)]
        if self.problems:
            lines += ["", "does not fit", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


def machines_of(config: RunConfig, gpus: int | None, n: int, gpu_gb: float | None) -> Machines:
    """The nodes to plan for.

    Args:
        gpus: of each node; None: those of the Ray to be joined, or of this machine.
        n: number of nodes, with `gpus`.
        gpu_gb: memory of a GPU; None: that of this machine's, or 80.

    Raises:
        ConfigError: there is no such Ray.
    """
    if gpus is not None:
        width = len(str(n))
        made = [Node(f"node-{k:0{width}}", f"{k}", gpus, k == 1) for k in range(1, n + 1)]
        return Machines(made, (gpu_gb or GPU_GB) * _GB)
    found = gpu_bytes() if gpu_gb is None and has_gpu() else None
    size = found or (gpu_gb or GPU_GB) * _GB
    if config.cluster.address is None:
        return Machines(machine(), size)
    from stepwell.cluster.ray import joined

    with joined(config.cluster.address):
        return Machines(cluster_nodes(), size)


def shape_of(config: RunConfig) -> ModelShape:
    """Sizes of the model, by its config.json.

    Raises:
        ConfigError: there is none.
        BackendConfigError: it is named by its id on the hub, and cannot be had from there.
    """
    path = config.model.path
    if (path / "config.json").is_file():
        return ModelShape.read(path)
    if is_hub_id(path):
        return ModelShape.of(fetch_model_config(str(path), config.model.revision, "model.path"))
    raise ConfigError(
        f"model.path is {str(path)!r}, which has no config.json; name a Hugging Face model "
        "directory (its config.json alone is enough for a plan) or a model's id on the hub"
    )


def plan_run(
    config: RunConfig, shape: ModelShape, machines: Machines, arguments: Sequence[str]
) -> RunPlan:
    """Plan the run.

    Args:
        arguments: of the command (`--config …`, `key=value`), for the printed one.

    Raises:
        ConfigError: the machines have not enough GPUs (`placement.plan`).
    """
    nodes = machines.nodes
    backend = config.trainer.backend
    trains = backend == "torch" or not BACKENDS.load(backend).loop_lacks()
    planned = plan(config, nodes, trains=trains, serves=config.serves)
    where = _gpus_of_bundles(planned, nodes)
    config = as_planned(config, planned)
    is_remote = trains_elsewhere(config)
    parts = [*_ranks(config, shape, machines, planned, where)] if trains and not is_remote else []
    if is_remote:
        parts.append(Part("trainer", f"{backend}'s service", "", "weights and optimizer are there"))
    elif not trains:
        parts.append(Part("trainer", f"where {backend} runs", "", "its own"))
    parts += _engines(config, shape, machines, planned, where)
    parts += _others(config, nodes)
    problems = [f"{p.name}: {p.problem}" for p in parts if p.problem]
    row = config.engine.context_length
    told = f"{config.model.path}: {shape.parameters / _GB:.3g}e9 parameters, {shape.layers} layers"
    counts = sorted({node.gpus for node in nodes})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    size = f" of {machines.gpu_bytes / _GB:.0f} GB" if counts[-1] else ""
    return RunPlan(
        f"{told}, rows of up to {row:,} tokens" if row else told,
        f"{len(nodes)} node{'s' * (len(nodes) > 1)}, {each} GPU{'s' * (each != '1')}{size} each",
        _strategy(planned, len(nodes)),
        tuple(parts),
        tuple(_commands(config, planned, nodes, ["train" if trains else "serve", *arguments])),
        tuple(_once(problems)),
    )


def _strategy(planned: Plan, n_nodes: int) -> str:
    words = {
        "plain": "no part has a GPU",
        "disaggregated": "ranks and engines on GPUs of their own, packed on few nodes",
        "colocated": "rank i and engine i share GPU i"
        if planned.bundles_per_engine == 1
        else f"each engine shares the GPUs of {planned.bundles_per_engine} ranks",
    }[planned.mode]
    if n_nodes > 1 and (planned.cpu_ranks or planned.cpu_engines):
        words += "; number i without a GPU is on node i modulo their number, from the driver's"
    return f"placement {planned.mode}: {words}"


def _gpus_of_bundles(planned: Plan, nodes: Sequence[Node]) -> list[tuple[Node, tuple[int, ...]]]:
    """Node and GPU numbers of each bundle, as Ray packs them: on the first node with room."""
    order = list(in_turn(nodes, len(nodes)) or nodes)
    used = dict.fromkeys((node.node_id for node in order), 0)
    found = []
    for size in planned.bundles:
        node = next((n for n in order if n.gpus - used[n.node_id] >= size), None)
        if node is None:
            raise ConfigError(
                f"no node has {size} free GPUs left for an engine of cluster.gpus_per_engine "
                f"{size} (nodes of {', '.join(str(n.gpus) for n in order)}); use fewer engines or "
                "ranks, or a gpus_per_engine that divides what ranks leave on a node"
            )
        first = used[node.node_id]
        used[node.node_id] += size
        found.append((node, tuple(range(first, first + size))))
    return found


def _place(
    seat: Seat, where: Sequence[tuple[Node, tuple[int, ...]]], bundles: int = 1
) -> tuple[str, str]:
    node = where[seat.bundle][0]
    own = where[seat.bundle : seat.bundle + bundles]
    numbers = tuple(number for _, of_bundle in own for number in of_bundle)
    share = "" if seat.gpus >= 1 else f" (1/{round(1 / seat.gpus)})"
    name = f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPU {numbers[0]}–{numbers[-1]}"
    return node.ip, name + share


def _ranks(
    config: RunConfig,
    shape: ModelShape,
    machines: Machines,
    planned: Plan,
    where: Sequence[tuple[Node, tuple[int, ...]]],
) -> Iterator[Part]:
    ranks = max(1, config.backend.ranks)
    driver = next(node for node in machines.nodes if node.is_driver).ip
    has = machines.gpu_bytes if planned.ranks else None
    needed = rank_memory(config, shape, has)
    problem = ""
    if has is not None and needed.total + (LENT if config.engine.release_memory else 0) > has:
        problem = (
            f"needs {needed}, a GPU has {has / _GB:.0f} GB; {_remedy(config, shape, machines)}"
        )
    elif has is not None:
        problem = kept_beside_engine(config, needed, has)
    for i in range(ranks):
        if planned.ranks:
            node, gpus = _place(planned.ranks[i], where)
        else:
            node, gpus = (planned.cpu_ranks[i].ip if planned.cpu_ranks else driver), ""
        yield Part(f"rank {i}", node, gpus, str(needed), problem)


def _remedy(config: RunConfig, shape: ModelShape, machines: Machines) -> str:
    """The least change by which a rank fits, by the same estimate."""
    most = sum(node.gpus for node in machines.nodes)
    if config.cluster.placement == "disaggregated":
        most -= config.cluster.engines * config.cluster.gpus_per_engine
    backend, kept = config.backend, LENT if config.engine.release_memory else 0.0
    changes: list[tuple[str, dict[str, object]]] = [
        ("backend.gradient_checkpointing=true", {"gradient_checkpointing": True})
    ]
    tokens = config.engine.context_length or 1
    if backend.micro_batch_tokens > tokens:
        changes.append((f"backend.micro_batch_tokens={tokens}", {"micro_batch_tokens": tokens}))
    ranks = [backend.context_parallel * 2**k for k in range(11)]
    ranks = [n for n in ranks if backend.ranks < n <= most]
    changes += [(f"backend.ranks={n}", {"ranks": n}) for n in ranks]
    for n in (2**k for k in range(1, 11) if 2**k <= most and shape.heads % 2**k == 0):
        if n > backend.context_parallel and not shape.reads_pictures:
            all_ranks = max(n, backend.ranks // n * n)
            words = f"backend.ranks={all_ranks} backend.context_parallel={n}"
            changes.append((words, {"ranks": all_ranks, "context_parallel": n}))
    if backend.lora is None:
        lora = type(backend).model_validate({**backend.model_dump(), "lora": {"rank": 16}}).lora
        changes.append(("backend.lora={rank: 16}", {"lora": lora}))
    for words, update in changes:
        changed = config.model_copy(update={"backend": backend.model_copy(update=update)})
        total = rank_memory(changed, shape, machines.gpu_bytes).total + kept
        if total <= machines.gpu_bytes:
            return f"{words} takes {total / _GB:.0f} GB"
    return (
        "neither more ranks nor adapters make it fit: take GPUs of their own "
        "(cluster.placement=disaggregated), a shorter engine.context_length or a smaller model"
    )


def _engines(
    config: RunConfig,
    shape: ModelShape,
    machines: Machines,
    planned: Plan,
    where: Sequence[tuple[Node, tuple[int, ...]]],
) -> Iterator[Part]:
    if not config.serves:
        return
    engine, per = config.engine, planned.nodes_per_engine
    if engine.is_attached:
        for url in engine.urls or (engine.router_url,):
            yield Part("engine", str(url), "", "somebody else's")
        return
    driver = next(node for node in machines.nodes if node.is_driver).ip
    bytes_each = 4 if engine.dtype == "float32" else 2
    for i in range(config.cluster.engines):
        if not planned.engines:
            node = planned.cpu_engines[i].ip if planned.cpu_engines else driver
            yield Part(
                f"engine {i}", node, "", f"{shape.parameters * bytes_each / _GB:.1f} GB of weights"
            )
            continue
        seats = planned.engines[i * per : (i + 1) * per]
        places = [_place(seat, where, planned.bundles_per_engine) for seat in seats]
        size = config.cluster.gpus_per_engine
        share = engine_share(config, planned.mode == "colocated")
        weights = shape.parameters * bytes_each / size
        room = share * machines.gpu_bytes - weights - ENGINE_RESERVE
        per_token = 2 * shape.layers * shape.keys * 2 / size
        tokens = max(0, int(room / per_token))
        context = engine.context_length or 0
        memory = (
            f"{share * machines.gpu_bytes / _GB:.1f} GB of each GPU (weights {weights / _GB:.1f}, "
            f"KV cache {max(0.0, room) / _GB:.1f}: {tokens:,} tokens)"
        )
        problem = ""
        if tokens <= context:
            longest = f"one row of engine.context_length {context:,}" if context else "any"
            remedy = f"cluster.gpus_per_engine={size * 2} halves both"
            if planned.mode == "colocated":
                remedy = "cluster.placement=disaggregated gives it a GPU, or take a smaller model"
            problem = (
                f"{share * machines.gpu_bytes / _GB:.0f} GB of a GPU leave room for {tokens:,} "
                f"tokens beside {weights / _GB:.0f} GB of weights, not for {longest}; {remedy}"
            )
        for node, gpus in places:
            yield Part(f"engine {i}", node, gpus, memory, problem)


def _others(config: RunConfig, nodes: Sequence[Node]) -> Iterator[Part]:
    """Parts that have no GPU."""
    driver = next(node for node in nodes if node.is_driver).ip
    yield Part(
        "driver",
        driver,
        "",
        "trainer's loop, run.json"
        if config.backend.ranks > 1 or trains_elsewhere(config)
        else "rank 0's process",
    )
    for k in range(config.pool.shards):
        spread = in_turn(nodes, config.pool.shards)
        yield Part(f"pool {k}", spread[k].ip if spread else driver)
    if config.serves:
        everywhere = config.gateway.host in ("0.0.0.0", "::")
        spread = in_turn(nodes, config.gateway.replicas) if everywhere else ()
        for k in range(config.gateway.replicas):
            yield Part(f"gateway {k}", spread[k].ip if spread else driver)
    if config.rollout.agent is not None:
        all_nodes = "spread over all nodes" if len(nodes) > 1 else driver
        yield Part(
            f"{config.rollout.workers} rollout worker{'s' * (config.rollout.workers > 1)}",
            all_nodes,
        )


def _commands(
    config: RunConfig, planned: Plan, nodes: Sequence[Node], arguments: Sequence[str]
) -> Iterator[str]:
    driver = next(node for node in nodes if node.is_driver)
    if len(nodes) > 1 and config.cluster.address is None:
        yield f"on {driver.ip}: ray start --head --port=6379 --num-gpus={driver.gpus}"
        others = [n for n in nodes if not n.is_driver]
        for gpus, group in groupby(others, key=lambda n: n.gpus):
            names = [n.ip for n in group]
            which = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
            yield f"on {which}: ray start --address={driver.ip}:6379 --num-gpus={gpus}"
        arguments = [*arguments, f"cluster.address={driver.ip}:6379"]
    yield f"on {driver.ip}: stepwell {shlex.join(arguments)}"
    if not config.serves or config.engine.is_attached:
        return
    engine = engine_of_run(config, planned.mode == "colocated")
    engine = engine.model_copy(update={"python": engine.python or "python"})
    path = str(engine.model_path)
    if planned.nodes_per_engine == 1:
        launches = [Launch(engine.port or ENGINE_PORT, path, on_gpu=bool(planned.engines))]
    else:
        hosts = [
            Host(f"<node of part {k}>", ENGINE_PORT + k * BLOCK)
            for k in range(planned.nodes_per_engine)
        ]
        launches = [
            Launch(one.port, path, extra_args=one.args, on_gpu=True) for one in node_launches(hosts)
        ]
    for launch in launches:
        line = command_line(engine, launch)
        yield f"the run starts each engine as: {shlex.join(line.argv)}"


def _once(lines: Sequence[str]) -> Iterator[str]:
    """One line for neighbours that differ in their number alone."""
    for reason, group in groupby(lines, key=lambda line: line.partition(": ")[2]):
        names = [line.partition(": ")[0] for line in group]
        yield f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''}: {reason}"

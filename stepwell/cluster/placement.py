"""Placement of trainer ranks and engines: on GPUs by a Ray placement group in a stable order,
without GPUs in turn over the nodes.

    disaggregated   trainer ranks and engines on GPUs of their own     needs ranks + engines × GPUs
    colocated       rank i and engine i share GPU i, half each         needs max(ranks, engines
                    (an engine of n GPUs those of n ranks)                       × GPUs)
    plain           no placement group: nobody wants a GPU, or there is none

A rank or engine without a GPU is number i of its kind: it is on node i modulo their number, counted
from the driver's by address. A single engine is beside the driver, as a single rank always is.

Ray gives a process no halves of several GPUs: a colocated engine of n GPUs holds its half of the
first and is told the numbers of all n (`Placement.engine_env`), whose group is the run's own.

An SGLang engine with more GPUs than a node has is spread over the fewest nodes that hold them in
equal parts, a bundle each (`backends/engines/nodes.py`).

The critic of GAE has as many ranks as the trainer, and its rank i shares the GPU of the trainer's.

`plan` is pure and says what would be done; `place` does it. Ray numbers the bundles of a group as
it likes, so every bundle is asked where it is and they are sorted by node address, node id and GPU
id: rank 0 is on the lowest GPU of the lowest node, neighbours are neighbours, in every start.

Worked example: nodes 10.0.0.2 and 10.0.0.10 with two GPUs each, 2 ranks, 2 engines. Disaggregated,
the ranks take both GPUs of 10.0.0.2 (2 < 10: addresses are not compared as text), the engines those
of 10.0.0.10. A single rank lives in the driver's own process; its bundle is on the driver's node.

Owns the plan and the group. Does not own starting anything in it (`cluster/parts.py`,
`backends/torch/ranks.py`) or making room: colocated, an SGLang engine leaves the trainer its part
(`cluster/engine_flags.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from stepwell.backends.config import EngineConfig
from stepwell.config.run import RunConfig
from stepwell.datapool.nodes import address_order
from stepwell.trainer.errors import ConfigError

Mode: TypeAlias = Literal["plain", "disaggregated", "colocated"]

READY_S = 120.0
"""GPUs that others hold may be given back meanwhile."""


class Node(NamedTuple):
    """A machine of the cluster."""

    ip: str
    node_id: str
    gpus: int
    is_driver: bool = False


class Bundle(NamedTuple):
    """Place that Ray gave a bundle of the group."""

    number: int
    """Ray's."""
    ip: str
    node_id: str
    gpu_ids: tuple[str, ...]


class Seat(NamedTuple):
    """A part's place: `gpus` of the bundle that is number `bundle` in the stable order."""

    bundle: int
    gpus: float


@dataclass(frozen=True, slots=True)
class Plan:
    """GPUs to reserve, and the parts they are for."""

    mode: Mode
    bundles: tuple[int, ...] = ()
    """GPUs of each bundle, all of them on one node; in the stable order, one size after another."""
    ranks: tuple[Seat, ...] = ()
    critic: tuple[Seat, ...] = ()
    """Seats of the critic's ranks, where there is one and it is not in the driver's own process."""
    engines: tuple[Seat, ...] = ()
    """`nodes_per_engine` in a row for each engine."""
    nodes_per_engine: int = 1
    cpu_ranks: tuple[Node, ...] = ()
    """Node of each rank that has no GPU; empty: there is none, or one node."""
    cpu_engines: tuple[Node, ...] = ()
    """Node of each engine that has no GPU, likewise."""
    bundles_per_engine: int = 1
    """Bundles from each engine's own on that are its GPUs; above 1 where it shares them."""


def in_turn(nodes: Sequence[Node], n: int) -> tuple[Node, ...]:
    """Nodes of `n` parts without GPUs; empty where there is one node."""
    if len(nodes) == 1:
        return ()
    order = sorted(
        nodes, key=lambda node: (not node.is_driver, address_order(node.ip), node.node_id)
    )
    return tuple(order[i % len(order)] for i in range(n))


def wanted_gpus(config: RunConfig) -> tuple[int, int]:
    """(trainer ranks that want a GPU each, engines that want `gpus_per_engine` each)."""
    no_rank = config.backend.device == "cpu" or trains_elsewhere(config)
    ranks = 0 if no_rank else config.backend.ranks
    # SGLang's, vLLM's and a plug-in's want GPUs.
    on_cpu = config.engine.kind == "embedded" or config.engine.is_attached
    engines = 0 if on_cpu else config.cluster.engines
    return ranks, engines


def trains_elsewhere(config: RunConfig) -> bool:
    """Return whether a service trains the model: no rank of this run does."""
    if config.trainer.backend == "torch":
        return False
    from stepwell.backends.base import BACKENDS

    return BACKENDS.load(config.trainer.backend).is_remote


def plan(
    config: RunConfig, nodes: Sequence[Node], *, trains: bool = True, serves: bool = True
) -> Plan:
    """Plan the place of each part on `nodes`.

    Args:
        trains: with a trainer.
        serves: with engines.

    Raises:
        ConfigError: the cluster has not enough GPUs for what the configuration asks.
    """
    ranks, engines = wanted_gpus(config)
    ranks, engines = ranks * trains, engines * serves
    total = sum(node.gpus for node in nodes)
    if ranks and config.backend.device == "cuda" and not total:
        raise ConfigError(
            "backend.device is 'cuda', but Ray knows of no GPU on any node; start Ray where they "
            "are (`ray start --num-gpus=N` if it does not find them), or set backend.device=cpu"
        )
    ranked = trains and config.backend.ranks > 1 and not (total and ranks)
    launched = serves and not config.engine.is_attached and not (total and engines)
    cpu_ranks = in_turn(nodes, config.backend.ranks * ranked)
    cpu_engines = in_turn(nodes, config.cluster.engines * launched)
    # A single rank is the driver's process, and its critic is there too.
    critics = ranks if ranks > 1 and config.algorithm.estimator.critic else 0
    size, asked = config.cluster.gpus_per_engine, config.cluster.placement
    if total == 0 or ranks + engines == 0:
        return Plan("plain", cpu_ranks=cpu_ranks, cpu_engines=cpu_engines)
    apart = ranks + engines * size
    mode: Mode = "disaggregated" if asked == "auto" else asked
    if asked == "auto" and total < apart:
        mode = "colocated"
    needed = max(ranks, engines * size) if mode == "colocated" else apart
    if total < needed:
        raise ConfigError(
            f"cluster.placement {mode!r} needs {needed} GPUs (backend.ranks {ranks}, "
            f"cluster.engines {engines} × gpus_per_engine {size}), the cluster has {total}; "
            + ("use fewer" if mode == "colocated" else "use fewer, or cluster.placement=colocated")
        )
    if mode == "colocated" and (odd := [node.gpus for node in nodes if node.gpus % size]):
        less = "use fewer engines or ranks" if total < apart else "set placement to 'disaggregated'"
        raise ConfigError(
            f"cluster.placement is 'colocated' with cluster.gpus_per_engine {size}, which does not "
            f"divide the {odd[0]} GPUs of a node: an engine that shares its GPUs is on one; set it "
            f"to a number that does, or {less}"
        )
    if mode == "colocated":
        share = 1 / sum(map(bool, (ranks, critics, engines)))
        return Plan(
            mode,
            (1,) * needed,
            tuple(Seat(i, share) for i in range(ranks)),
            tuple(Seat(i, share) for i in range(critics)),
            tuple(Seat(i * size, share) for i in range(engines)),
            bundles_per_engine=size,
            cpu_ranks=cpu_ranks,
            cpu_engines=cpu_engines,
        )
    spread = _nodes_of_an_engine(config, nodes) if engines else 1
    part = size // spread
    share = 1 / (1 + bool(critics))
    return Plan(
        mode,
        (1,) * ranks + (part,) * (engines * spread),
        tuple(Seat(i, share) for i in range(ranks)),
        tuple(Seat(i, share) for i in range(critics)),
        tuple(Seat(ranks + i, part) for i in range(engines * spread)),
        spread,
        cpu_ranks,
        cpu_engines,
    )


def _nodes_of_an_engine(config: RunConfig, nodes: Sequence[Node]) -> int:
    """The fewest nodes that hold the GPUs of an engine in equal parts.

    Raises:
        ConfigError: none do, or the engine cannot be spread.
    """
    size = config.cluster.gpus_per_engine
    if size <= max(node.gpus for node in nodes):
        return 1
    key = f"cluster.gpus_per_engine is {size}"
    if config.engine.kind != "sglang":
        raise ConfigError(
            f"{key}, but no node has so many GPUs, and engine.kind {config.engine.kind!r} stays on "
            "one node; lower it, or start the engine yourself and name it: engine.kind=attach, "
            "engine.urls"
        )
    for n in range(2, size + 1):
        if size % n == 0 and sum(node.gpus >= size // n for node in nodes) >= n:
            break
    else:
        raise ConfigError(
            f"{key}, which no number of nodes holds in equal parts; they have "
            f"{', '.join(str(node.gpus) for node in nodes)} GPUs"
        )
    for name in ("host", "port"):
        if (given := getattr(config.engine, name)) != EngineConfig.model_fields[name].default:
            raise ConfigError(
                f"{key}, over {n} nodes, but engine.{name} is {given!r}: each part listens at its "
                f"own node's address and at a port that is free there; leave engine.{name} out"
            )
    return n


def stable_order(bundles: Iterable[Bundle]) -> list[Bundle]:
    """By node address (as a number, where it is one), node id and GPU ids; bundles of fewer GPUs
    before those of more, as in `Plan.bundles`."""
    return sorted(
        bundles,
        key=lambda b: (
            len(b.gpu_ids),
            address_order(b.ip),
            b.node_id,
            tuple(map(_number, b.gpu_ids)),
        ),
    )


def _number(gpu_id: str) -> tuple[int, str]:
    return (int(gpu_id), "") if gpu_id.isdecimal() else (1 << 30, gpu_id)  # MIG: a UUID


def _in_driver(planned: Plan) -> bool:
    """A single rank has no actor: it is the driver's own process."""
    return len(planned.ranks) == 1


@dataclass(frozen=True, slots=True)
class Placement:
    """The reserved places, as actor options."""

    plan: Plan
    bundles: tuple[Bundle, ...] = ()
    """In the stable order."""
    group: Any = None

    def options(self, seat: Seat) -> dict[str, Any]:
        """Ray's options of the actor that takes `seat`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_gpus": seat.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.bundles[seat.bundle].number
            ),
        }

    def engine_options(self, number: int) -> list[dict[str, Any]]:
        """Ray's options for each of the engine's nodes; mostly it has one."""
        if self.plan.cpu_engines:
            return [_on(self.plan.cpu_engines[number])]
        return [self.options(seat) for seat in self._seats(number)] or [{}]

    def engine_env(self, number: int) -> dict[str, str]:
        """Variables by which an engine finds the GPUs that it shares; none where Ray says them.

        Raises:
            ConfigError: they are on several nodes.
        """
        n, seats = self.plan.bundles_per_engine, self._seats(number)
        if n == 1 or not seats:
            return {}
        own = self.bundles[seats[0].bundle : seats[0].bundle + n]
        if len({bundle.node_id for bundle in own}) > 1:
            raise ConfigError(
                f"the {n} GPUs of engine {number} (cluster.gpus_per_engine) are on several nodes "
                f"({', '.join(sorted({b.ip for b in own}))}), since other runs hold the rest of "
                "one; free them, or set cluster.placement to 'disaggregated'"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu for b in own for gpu in b.gpu_ids)}

    def is_one_machine(self) -> bool:
        """Return whether rank 0 and all engines are on one machine."""
        found = {ip for _, ip, name in self._parts() if name == "rank 0" or "engine" in name}
        return len(found) < 2

    def engine_ip(self, number: int) -> str | None:
        """The node of an engine's (first) seat; None: it has no seat."""
        if self.plan.cpu_engines:
            return self.plan.cpu_engines[number].ip
        seats = self._seats(number)
        return self.bundles[seats[0].bundle].ip if seats else None

    def _seats(self, number: int) -> tuple[Seat, ...]:
        n = self.plan.nodes_per_engine
        return self.plan.engines[number * n : (number + 1) * n]

    def parts_by_node(self) -> dict[str, str]:
        """Names of the ranks and engines on each node, by its id."""
        return _joined((node_id, name) for node_id, _, name in self._parts())

    def text(self) -> str:
        """One line: the ranks and engines on each node; empty unless they are on several."""
        by_ip = _joined((ip, name) for _, ip, name in self._parts())
        if len(by_ip) < 2:
            return ""
        return "; ".join([f"placement {self.plan.mode}", *(f"{by_ip[ip]} on {ip}" for ip in by_ip)])

    def _parts(self) -> Iterator[tuple[str, str, str]]:
        """(node id, address, name) of each rank and engine."""
        per = self.plan.nodes_per_engine
        for word, seats, each in (("rank", self.plan.ranks, 1), ("engine", self.plan.engines, per)):
            for i, seat in enumerate(seats):
                bundle = self.bundles[seat.bundle]
                yield bundle.node_id, bundle.ip, f"{word} {i // each}"
        for word, nodes in (("rank", self.plan.cpu_ranks), ("engine", self.plan.cpu_engines)):
            for i, node in enumerate(nodes):
                yield node.node_id, node.ip, f"{word} {i}"

    def backend_options(self) -> dict[str, Any]:
        """Arguments of `build_backend`: options by rank; none for a rank in this process."""
        if self.plan.cpu_ranks:
            return {"options": [_on(node) for node in self.plan.cpu_ranks]}
        if not self.plan.ranks or _in_driver(self.plan):
            return {}
        return {"options": [self.options(seat) for seat in self.plan.ranks]}

    def critic_options(self) -> dict[str, Any]:
        """Arguments of `Critic`, like `backend_options`."""
        if self.plan.cpu_ranks:
            return self.backend_options()
        return {"options": [self.options(s) for s in self.plan.critic]} if self.plan.critic else {}

    def release(self) -> None:
        """Give the GPUs back; actors that still have them are killed by Ray."""
        if self.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.group)


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Names by place."""
    found: dict[str, list[str]] = {}
    for place_of, name in pairs:
        found.setdefault(place_of, []).append(name)
    return {place_of: ", ".join(dict.fromkeys(names)) for place_of, names in found.items()}


def _on(node: Node) -> dict[str, Any]:
    """Ray's options of an actor on `node` alone. Ray 2.60 keeps to labels."""
    return {"label_selector": {"ray.io/node-id": node.node_id}}


def machine() -> list[Node]:
    """This machine, as a cluster of our own would see it."""
    import torch

    return [Node("127.0.0.1", "this machine", torch.cuda.device_count(), is_driver=True)]


def cluster_nodes() -> list[Node]:
    """The live nodes of the cluster that Ray is connected to."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return [
        Node(
            node["NodeManagerAddress"],
            node["NodeID"],
            int(node["Resources"].get("GPU", 0)),
            node["NodeID"] == here,
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]  # theirs
        if node["Alive"]
    ]


def on_this_node() -> Any:
    """Ray's scheduling strategy of an actor that runs on the driver's node, after a restart too:
    its address stays."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return NodeAffinitySchedulingStrategy(node, soft=False)


def place(config: RunConfig, *, trains: bool = True, serves: bool = True) -> Placement:
    """Reserve what `plan` says on the cluster that Ray is connected to. A single rank's GPU becomes
    the only one that this process sees.

    Raises:
        ConfigError: see `plan`; or the GPUs are there but others hold them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    nodes = cluster_nodes()
    planned = plan(config, nodes, trains=trains, serves=serves)
    if planned.mode == "plain":
        return Placement(planned)
    requests: list[dict[str, float]] = [{"GPU": float(size)} for size in planned.bundles]
    where: list[dict[str, str]] = [{} for _ in requests]
    if _in_driver(planned):
        where[0] = {"ray.io/node-id": next(node for node in nodes if node.is_driver).node_id}
    group = placement_group(requests, strategy="PACK", bundle_label_selector=where)
    try:
        ray.get(group.ready(), timeout=READY_S)
        probe = ray.remote(num_cpus=0)(_whereabouts)
        found = ray.get(
            [
                probe.options(
                    **Placement(planned, (Bundle(i, "", "", ()),), group).options(Seat(0, size))
                ).remote()
                for i, size in enumerate(planned.bundles)
            ],
            timeout=READY_S,
        )
    except ray.exceptions.GetTimeoutError as e:
        remove_placement_group(group)
        raise ConfigError(
            f"cluster.placement {planned.mode!r} needs {sum(planned.bundles)} GPUs, which the "
            f"cluster has but did not give within {READY_S:g} s; others hold them: `ray status`"
        ) from e
    bundles = [Bundle(i, *place_of) for i, place_of in enumerate(found)]
    if _in_driver(planned):
        # The driver's bundle is the one that was asked for there; the rest in their order.
        own, rest = bundles[0], stable_order(bundles[1:])
        if planned.bundles_per_engine > 1:  # the first engine has the driver's GPU and those beside
            rest.sort(key=lambda bundle: bundle.node_id != own.node_id)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own.gpu_ids)
        return Placement(planned, (own, *rest), group)
    return Placement(planned, tuple(stable_order(bundles)), group)


def _whereabouts() -> tuple[str, str, tuple[str, ...]]:
    """(node address, node id, GPU ids) of the caller's bundle."""
    import ray

    context = ray.get_runtime_context()
    ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # theirs
    return ip, context.get_node_id(), tuple(map(str, context.get_accelerator_ids()["GPU"]))

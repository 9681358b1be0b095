"""`python -m benchmarks scale`: replays measured costs of gateway and pool for many agents, and
names the part that is full first.

    agent ──► gateway: before ──► engine: prefill, decode ──► gateway: after ──► pool ──► agent
      ▲       (a core each)       (memory of a GPU)                              (a core each)
      └──────────────────────────── a tool runs, then the next turn ───────────────┘

A discrete-event simulation: agents in a closed loop, each gateway and shard a server with a queue,
each engine a batch whose steps take longer the more it holds.

    measured   CPU of a call by its context (`recorded/gateway.json`); CPU of the pool and bytes of
               the journal by new tokens, at each run
    derived    a model's weights and KV cache, from its config.json; an engine's step is the time
               to read them once
    given      `Given`: a GPU's bandwidth and speed, how long a tool runs, what a disk writes

`--gateways`, `--shards`, `--engines` and `--trainer-gpus` say on which fleet; a second one is found
for each number of agents, of which no part is above 0.7.

Checked: the same simulation with the costs and the engine of the gateway's bench gives its measured
calls per second. Not simulated: the loss of parts, uneven agents, the network between machines,
prefill that slows the decoding beside it.
"""

from __future__ import annotations

import heapq
import math
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson

from benchmarks.checks import BenchResult
from benchmarks.command import RECORDS
from benchmarks.path import served_pool
from benchmarks.pool.workload import VOCABULARY, Call
from stepwell.backends.torch.memory import ModelShape
from stepwell.datapool import PoolConfig

FULL = 0.7
"""Utilisation up to which a part has reserves."""
WARM_S, MEASURED_S = 60.0, 120.0
"""Simulated seconds that agents need to spread out, and those that are counted."""
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Facts of Qwen/Qwen3-4B."""


@dataclass(frozen=True)
class Given:
    """Figures that nobody measured here."""

    gpu_bandwidth: float = 3.35e12 * 0.7
    """Bytes/s that a GPU reads while it decodes: an H100's data sheet, 0.7 of it."""
    gpu_flops: float = 989e12 * 0.4
    """bfloat16 operations/s in prefill: likewise, 0.4 of it."""
    trainer_flops: float = 989e12 * 0.29
    """In training, with what checkpointing computes again: measured on an H100, a 0.6B model in
    rows of 1 to 2.5 k tokens (`benchmarks/README.md`, GPU)."""
    gpu_bytes: float = 0.85 * 80e9
    """Memory of a GPU that an engine has."""
    tool_s: float = 5.0
    """Mean time between an answer and the agent's next call, exponential."""
    turns: int = 20
    first_prompt: int = 2000
    new_tokens: int = 500
    """Tokens that a tool's answer adds to the prompt."""
    response: int = 250
    disk: float = 200e6
    """Bytes/s that a shard's disk writes."""


GIVEN = Given()


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes that were measured."""

    contexts: Sequence[int]
    gateway_s: Sequence[float]
    """CPU of a gateway for one call, at each of `contexts`."""
    pool_s: float
    """CPU of a shard for one step, with its lease and ack."""
    journal_bytes: float
    """Bytes of one step in the journal."""
    trajectory_bytes: float
    """Memory of a gateway for a live trajectory, for each token of it."""

    def gateway(self, context: int) -> float:
        return float(np.interp(context, self.contexts, self.gateway_s))


@dataclass(frozen=True)
class Fleet:
    """Parts of a deployment."""

    gateways: int = 1
    shards: int = 1
    engines: int = 8
    trainer_gpus: int = 8

    def __str__(self) -> str:
        return f"{self.gateways} gw, {self.shards} pool, {self.engines}+{self.trainer_gpus} GPUs"


class Engine:
    """A batch in continuous decoding: each step reads the weights and the cache of all that it
    holds, so that all advance together at a speed that depends on their number."""

    def __init__(self, step_s: Callable[[int], float], holds: int) -> None:
        self._step_s, self._holds = step_s, holds
        self._at = self._progress = 0.0
        self._running: list[tuple[float, int]] = []
        """(progress at which it is done, agent), the next first."""
        self._waiting: deque[tuple[int, int]] = deque()
        self.version = 0
        """Rises whenever the next end moves."""
        self.busy_s = 0.0
        """Share of the places that were taken, by time."""

    def _advance(self, now: float) -> None:
        n = len(self._running)
        self.busy_s += (now - self._at) * n / self._holds
        if n:
            self._progress += (now - self._at) / self._step_s(n)
        self._at = now

    def add(self, now: float, agent: int, tokens: int) -> None:
        self._advance(now)
        self._waiting.append((agent, tokens))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._holds:
            agent, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self._progress + tokens, agent))
        self.version += 1

    def next_end(self) -> float | None:
        """Time of the next end, if nobody comes."""
        if not self._running:
            return None
        left = max(0.0, self._running[0][0] - self._progress)
        return self._at + left * self._step_s(len(self._running))

    def end(self, now: float) -> int:
        """The agent whose answer is complete."""
        self._advance(now)
        _, agent = heapq.heappop(self._running)
        self._fill()
        return agent


class Queue:
    """Servers that are asked in turn by whom they serve, each one call after the other."""

    def __init__(self, n: int) -> None:
        self._free = [0.0] * n
        self.busy_s = [0.0] * n

    def serve(self, now: float, server: int, cost_s: float) -> float:
        """Time at which the call is done."""
        began = max(now, self._free[server])
        self._free[server] = began + cost_s
        self.busy_s[server] += cost_s
        return self._free[server]


@dataclass
class Seen:
    """Figures of the time that counts."""

    calls: int = 0
    turn_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)
    """Seconds of each call in gateway and pool, their queues included."""
    tokens: int = 0


OURS = ("gateway", "pool", "journal")
"""Parts that are Stepwell's own work."""
BEFORE = 0.6
"""Share of a gateway's work that comes before the engine is asked."""


@dataclass
class Turn:
    """Turn that an agent is at."""

    number: int = 0
    began: float = 0.0
    added: float = 0.0


def simulate(
    n_agents: int,
    fleet: Fleet,
    costs: Costs,
    given: Given = GIVEN,
    *,
    step_s: Callable[[int], float],
    holds: int,
    prefill_s: Callable[[int, int], float],
    seconds: tuple[float, float] = (WARM_S, MEASURED_S),
) -> tuple[Seen, dict[str, float]]:
    """Return what agents see, and the utilisation of gateways, pool and engines (of each the
    fullest).

    Args:
        step_s: seconds of an engine's step, by the sequences in its batch.
        holds: sequences that an engine holds at once.
        prefill_s: seconds until the first token, by the context and its new tokens.
        seconds: not counted, and counted.
    """
    warm, counted = seconds
    pick = random.Random(0)
    gateways, shards = Queue(fleet.gateways), Queue(fleet.shards)
    prefills = Queue(fleet.engines)
    engines = [Engine(step_s, holds) for _ in range(fleet.engines)]
    turns = [Turn(pick.randrange(given.turns)) for _ in range(n_agents)]
    seen, base = Seen(), None
    events: list[tuple[float, int, str, int, int]] = []
    order = 0

    def at(when: float, what: str, who: int, version: int = 0) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (when, order, what, who, version))

    def decode(e: int) -> None:
        if (end := engines[e].next_end()) is not None:
            at(end, "end", e, engines[e].version)

    for agent in range(n_agents):
        at(pick.uniform(0, given.tool_s + 1.0), "call", agent)
    while events:
        now, _, what, who, version = heapq.heappop(events)
        if now > warm + counted:
            break
        if base is None and now >= warm:
            base = (
                [*gateways.busy_s],
                [*shards.busy_s],
                [*prefills.busy_s],
                [engine.busy_s for engine in engines],
            )
            seen = Seen()
        turn, g, e = turns[who % n_agents], who % fleet.gateways, who % fleet.engines
        context = given.first_prompt + turn.number * (given.new_tokens + given.response)
        if what == "call":
            done = gateways.serve(now, g, BEFORE * costs.gateway(context))
            turn.began, turn.added = now, done - now
            at(done, "ask", who)
        elif what == "ask":
            new = given.new_tokens if turn.number else given.first_prompt
            at(prefills.serve(now, e, prefill_s(context, new)), "first", who)
        elif what == "first":
            engines[e].add(now, who, given.response)
            decode(e)
        elif what == "end":
            if version != engines[who].version:
                continue  # somebody came or went meanwhile
            agent = engines[who].end(now)
            at(now, "after", agent)
            decode(who)
        elif what == "after":
            done = gateways.serve(now, g, (1 - BEFORE) * costs.gateway(context))
            turn.added += done - now
            at(done, "store", who)
        else:
            done = shards.serve(now, who % fleet.shards, costs.pool_s)
            seen.calls += 1
            seen.turn_s.append(done - turn.began)
            seen.added_s.append(turn.added + done - now)
            seen.tokens += given.new_tokens + given.response
            turn.number = (turn.number + 1) % given.turns
            at(done + pick.expovariate(1 / given.tool_s) if given.tool_s else done, "call", who)
    assert base is not None

    def fullest(queue: Sequence[float], before: Sequence[float]) -> float:
        return max(b - a for a, b in zip(before, queue, strict=True)) / counted

    return seen, {
        "gateway": fullest(gateways.busy_s, base[0]),
        "pool": fullest(shards.busy_s, base[1]),
        "engine, prefill": fullest(prefills.busy_s, base[2]),
        "engine, decode": fullest([engine.busy_s for engine in engines], base[3]),
    }


def deployment(
    n_agents: int, fleet: Fleet, costs: Costs, shape: ModelShape, given: Given = GIVEN
) -> Row:
    """Simulate agents on a fleet."""
    weights, per_token = 2.0 * shape.parameters, 4.0 * shape.layers * shape.keys
    mean = given.first_prompt + (given.turns - 1) / 2 * (given.new_tokens + given.response)
    room = given.gpu_bytes - weights - 2e9
    holds = max(1, int(room / per_token / mean))
    on_one = math.ceil(n_agents / fleet.engines)
    cached = min(1.0, room / per_token / (on_one * mean))

    def step_s(n: int) -> float:
        return (weights + n * mean * per_token) / given.gpu_bandwidth

    def prefill_s(context: int, new: int) -> float:
        again = (1 - cached) * (context - new)
        return 2.0 * shape.parameters * (new + again) / given.gpu_flops

    seen, used = simulate(
        n_agents, fleet, costs, given, step_s=step_s, holds=holds, prefill_s=prefill_s
    )
    calls = seen.calls / MEASURED_S
    tokens = seen.tokens / MEASURED_S
    used["journal"] = calls * costs.journal_bytes / fleet.shards / given.disk
    # Forward, backward, and the forward that checkpointing makes again.
    used["trainer"] = tokens * 8.0 * shape.parameters / (fleet.trainer_gpus * given.trainer_flops)
    return Row(
        n_agents,
        fleet,
        calls,
        float(np.percentile(seen.turn_s, 50)),
        1e3 * float(np.percentile(seen.added_s, 99)),
        used,
    )


@dataclass(frozen=True)
class Row:
    """Agents on a fleet."""

    agents: int
    fleet: Fleet
    calls_per_s: float
    turn_s: float
    """Median seconds of a turn, without the tool."""
    added_ms: float
    """99th percentile of milliseconds that gateway and pool add."""
    used: Mapping[str, float]
    """Utilisation of the fullest of each part."""

    def fullest(self, *parts: str) -> str:
        """The part that is full first, of `parts` or of all."""
        return max(parts or self.used, key=lambda name: self.used[name])

    def shown(self) -> dict[str, Any]:
        first, own = self.fullest(), self.fullest(*OURS)
        return {
            "agents": self.agents,
            "fleet": str(self.fleet),
            "calls/s": self.calls_per_s,
            "turn s": self.turn_s,
            "added ms p99": self.added_ms,
            "first bottleneck": f"{first} {self.used[first]:.2f}",
            "first of ours": f"{own} {self.used[own]:.3f}",
        }


def sized(n_agents: int, costs: Costs, shape: ModelShape, given: Given = GIVEN) -> Fleet:
    """The smallest fleet, part by part, of which nothing is above `FULL`."""
    parts = {
        "gateway": "gateways",
        "pool": "shards",
        "journal": "shards",
        "engine, prefill": "engines",
        "engine, decode": "engines",
        "trainer": "trainer_gpus",
    }
    fleet = Fleet(engines=max(1, n_agents // 100), trainer_gpus=max(1, n_agents // 100))
    while True:
        row = deployment(n_agents, fleet, costs, shape, given)
        worst = row.fullest()
        if row.used[worst] <= FULL:
            return fleet
        n = getattr(fleet, parts[worst])
        more = max(n + 1, math.ceil(n * row.used[worst] / FULL))
        fleet = replace(fleet, **{parts[worst]: more})


def needs(row: Row, costs: Costs, given: Given = GIVEN) -> dict[str, Any]:
    """Bytes that a fleet of this row writes, keeps and sends."""
    written = row.calls_per_s * costs.journal_bytes
    mean = given.first_prompt + (given.turns - 1) / 2 * (given.new_tokens + given.response)
    memory = row.fleet.gateways * GATEWAY_BYTES + row.agents * mean * costs.trajectory_bytes
    return {
        "agents": row.agents,
        "GPUs": row.fleet.engines + row.fleet.trainer_gpus,
        "tokens/s": row.calls_per_s * (given.new_tokens + given.response),
        "journal MB/s": written / 1e6,
        "archive GB/day": written * ARCHIVED * 86_400 / 1e9,
        "gateway memory GB": memory / 1e9,
        "to engines MB/s": row.calls_per_s * mean * ID_BYTES / 1e6,
    }


GATEWAY_BYTES = 225e6
"""Memory of a gateway without trajectories, by the recorded run of its bench."""
ARCHIVED = 0.59
"""Bytes of the archive's files by those of the journal, of steps with 500 + 250 new tokens and no
text; `tests/benchmarks/test_scale.py` measures it."""
ID_BYTES = 6.5
"""Bytes of one token id in a request to an engine: up to six digits and a comma."""


async def measure_pool(new_tokens: int, response: int, steps: int = 512) -> tuple[float, float]:
    """(CPU seconds of client and pool, journal bytes) of one step that is submitted, leased and
    acked, in trajectories of eight turns."""
    turns, rollouts = 8, 8
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as name:
        async with served_pool(PoolConfig(), Path(name)) as pool:
            calls = [
                call
                for group in range(steps // (turns * rollouts))
                for rollout in range(rollouts)
                for call in _trajectory(f"{group}", rollout, turns, new_tokens, response)
            ]
            began = time.process_time()
            for call in calls:
                await pool.submit_steps([call.step()])
            taken = 0
            while taken < len(calls):
                lease = await pool.lease_batch(n_rollouts=rollouts, batch_size=1, timeout_s=30)
                assert lease is not None
                taken += sum(len(group.steps) for group in lease.groups)
                await pool.ack(lease.lease_id)
            cpu = time.process_time() - began
            return cpu / taken, _bytes_in(Path(name)) / taken


def _trajectory(
    prompt_uid: str, rollout: int, turns: int, new_tokens: int, response: int
) -> Iterator[Call]:
    pick = random.Random(f"{prompt_uid} {rollout}")
    uid, prompt = f"{prompt_uid}-{rollout}", pick.choices(range(VOCABULARY), k=512)
    for turn in range(turns):
        answer = pick.choices(range(VOCABULARY), k=response)
        logprobs = [-pick.random() for _ in answer]
        parent = turn - 1 if turn else None
        is_last, about = turn == turns - 1, {"request_id": f"{uid}-{turn}"}
        yield Call(prompt, answer, logprobs, uid, prompt_uid, turn, parent, is_last, about)
        prompt = prompt + answer + pick.choices(range(VOCABULARY), k=new_tokens)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


async def measured() -> Costs:
    """Costs of the recorded run of the gateway's bench, and of a pool here and now."""
    figures = orjson.loads((RECORDS / "gateway.json").read_bytes())["figures"]
    rows = [r for r in figures["growing_by_500_tokens_a_turn"] if r["system"] == "Stepwell"]
    at_64 = next(
        r for r in figures["systems"] if r["system"] == "Stepwell" and r["connections"] == 64
    )
    contexts = [1000, *(int(r["context"].rstrip("k")) * 1000 for r in rows)]
    gateway = [at_64["cpu_ms"], *(r["cpu_ms"] for r in rows)]
    small, _ = await measure_pool(64, 64)
    large, written = await measure_pool(GIVEN.new_tokens, GIVEN.response)
    live = figures["live_trajectory"]
    return Costs(
        contexts,
        [ms / 1e3 for ms in gateway],
        # By the ratio: the pool alone was measured with small steps, as a process of its own.
        at_64["pool_cpu_ms"] / 1e3 * large / small,
        written,
        live["resident_bytes"] / live["tokens"],
    )


def check_against_the_bench(result: BenchResult) -> None:
    """The gateway's bench at 64 connections, once at an engine that answers at once and once at
    one of 50 ms: simulated calls/s by those that were measured."""
    figures = orjson.loads((RECORDS / "gateway.json").read_bytes())["figures"]
    given = replace(GIVEN, turns=1, first_prompt=1000, response=1, tool_s=0.0)
    for name, rows, engine_s in (
        ("at_once", figures["systems"], 20e-6),
        ("engine_of_50_ms", figures["engine_of_50_ms"], 0.05),
    ):
        for system, gateways in (("Stepwell", 1), ("Stepwell, 2 replicas", 2)):
            row = next(r for r in rows if r["system"] == system and r["connections"] == 64)
            costs = Costs([0], [row["cpu_ms"] / 1e3], row["pool_cpu_ms"] / 1e3, 0.0, 0.0)
            seen, _ = simulate(
                64,
                Fleet(gateways=gateways, engines=64),
                costs,
                given,
                step_s=lambda n, s=engine_s: s,  # type: ignore[misc]  # bound now
                holds=64,
                prefill_s=lambda context, new: 0.0,
                seconds=(1.0, 5.0),
            )
            ratio = seen.calls / 5.0 / row["requests_per_s"]
            label = f"simulated_by_measured_{name}_{gateways}"
            if (
                gateways == 1 or engine_s > 0.01
            ):  # two replicas at once want more than the bench's cores
                result.at_most(f"{label}_at_most", ratio, 1.25)
                result.at_least(f"{label}_at_least", ratio, 0.8)
            else:
                result.figures[label] = ratio


async def run(
    *,
    agents: Annotated[Sequence[int], "numbers of agents"] = (100, 1_000, 10_000),
    gateways: Annotated[int, "gateways of the fleet that is given"] = 1,
    shards: Annotated[int, "shards of its pool"] = 1,
    engines: Annotated[int, "its engines, a GPU each"] = 8,
    trainer_gpus: Annotated[int, "its GPUs that train"] = 8,
) -> BenchResult:
    result = BenchResult()
    costs, shape = await measured(), ModelShape.of(QWEN3_4B)
    fleet = Fleet(gateways, shards, engines, trainer_gpus)
    result.figures["costs"] = [
        {"cost": f"gateway, CPU ms a call at {n:,} tokens", "value": 1e3 * s}
        for n, s in zip(costs.contexts, costs.gateway_s, strict=True)
    ] + [
        {"cost": "pool, CPU ms a step", "value": 1e3 * costs.pool_s},
        {"cost": "journal, bytes a step", "value": costs.journal_bytes},
        {"cost": "gateway, bytes of memory a live token", "value": costs.trajectory_bytes},
    ]
    given = [deployment(n, fleet, costs, shape) for n in agents]
    found = [deployment(n, sized(n, costs, shape), costs, shape) for n in agents]
    result.figures["this fleet"] = [row.shown() for row in given]
    result.figures["fleets of which nothing is above 0.7"] = [row.shown() for row in found]
    result.figures["utilisation"] = [
        {"fleet": str(row.fleet), "agents": row.agents, **row.used} for row in (*given, *found)
    ]
    result.figures["what they need"] = [needs(row, costs) for row in found]
    check_against_the_bench(result)
    return result

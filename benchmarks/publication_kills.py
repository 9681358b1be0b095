"""`python -m benchmarks publication-kills`: engine replicas are killed before, during and after
each phase of a weight publication.

Real parts: supervised embedded engines, each a process, behind a real gateway with a real pool;
agents keep completions in flight all the time. The weights make the version readable: those of
version v put all probability on one token, `TOKENS[v]`. Each round publishes v+1, every other one
after one replica has tried it out as a canary (or v+2, which takes the canary back), and hooks of
the transaction `kill -9` replicas at random points of random phases; a phase that is killed
"during" has just sent its requests, and the kill comes at a random moment of the next 20 ms.
Supervisors restart what was killed.

Checked, on every token of every Step and of every direct answer: the version that is said to have
produced it is the one whose token it is. And a watcher per replica asks it directly, again and
again: an answer to a request that was sent after a commit must hold no token of an older version,
and a Step of a call begun after a commit neither. Every replica comes back, and every call is
answered.

Recovery: from the kill until the replica has answered with the then committed version.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checks import BenchResult, Check
from benchmarks.gateway_updates import MODEL, gateway, steps_in
from stepwell.backends.config import EngineConfig, PublishMode, WeightTransport
from stepwell.backends.engines.client import EngineClient, version_number
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import EngineError, WeightUpdateError
from stepwell.backends.weights import WeightStore, publish
from stepwell.backends.weights.transaction import PHASES, Phase, When
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step, VersionSpan
from stepwell.trainer.errors import ConfigError

WHENS: tuple[When, ...] = ("before", "during", "after")
MODES: tuple[PublishMode, ...] = ("retract", "retract", "abort", "in_place", "drain")
TRANSPORTS: tuple[WeightTransport, ...] = ("disk", "distributed")
FIRST_TOKEN, N_TOKENS = 9, 90
"""Printable tokens of the quickstart's vocabulary."""
MAX_TOKENS = 60
PROBE_TOKENS = 3
DURING_S = 0.02
PACE_S = 0.1
"""Between two calls of one agent or watcher."""
CALL_TIMEOUT_S = 300.0
BACK_TIMEOUT_S = 300.0
SHOWN = 20


def token_of(version: int) -> int:
    """The one token that the weights of `version` generate."""
    return FIRST_TOKEN + version % N_TOKENS


class Weights:
    """Writes models that say one token, whatever they are asked."""

    def __init__(self) -> None:
        config = AutoConfig.from_pretrained(MODEL)
        config.update({"num_hidden_layers": 2, "tie_word_embeddings": False, "eos_token_id": 0})
        config.layer_types = config.layer_types[:2]
        self._model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        self._model.generation_config.eos_token_id = 0
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL, eos_token="<|endoftext|>")
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if "embed_tokens" in name:
                    parameter.fill_(1.0)  # every prompt is alike,
                elif "o_proj" in name or "down_proj" in name:
                    parameter.zero_()  # and no layer changes that

    def save(self, version: int, folder: Path) -> None:
        head = self._model.lm_head.weight
        with torch.no_grad():
            head.zero_()
            head[token_of(version)] = 1.0
        self._model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


@dataclass
class Record:
    """What was seen."""

    violations: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    publication_s: list[float] = field(default_factory=list)
    probes: int = 0
    probe_tokens: int = 0
    probes_failed: int = 0
    calls: int = 0
    committed: int = 0
    began: dict[str, int] = field(default_factory=dict)
    """Trajectory -> version that was committed when its call began."""

    def check(self, who: str, began: int, ids: Sequence[int], spans: Sequence[VersionSpan]) -> None:
        if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or (
            spans[-1].end != len(ids)
        ):
            self.violations.append(f"{who}: spans {spans} do not cover {len(ids)} tokens")
        for span in spans:
            if wrong := set(ids[span.start : span.end]) - {token_of(span.version)}:
                self.violations.append(
                    f"{who}: tokens {wrong} as version {span.version}, which says "
                    f"{token_of(span.version)}"
                )
            if span.version < began:
                self.violations.append(
                    f"{who}: began when {began} was committed, has tokens of {span.version}"
                )


class Replica:
    """A supervised engine and what is known of its last death."""

    def __init__(self, supervisor: Supervisor, client: EngineClient) -> None:
        self.supervisor = supervisor
        self.client = client
        self.killed_at: float | None = None

    @property
    def up(self) -> bool:
        return self.supervisor.state == "up" and self.killed_at is None

    def kill(self) -> bool:
        pid = self.supervisor.pid
        if pid is None:
            return False
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed_at = time.monotonic()
        return True


@dataclass(frozen=True)
class Kill:
    phase: Phase
    when: When
    replica: Replica
    delay_s: float


class Killer:
    """The transaction's hook: carries out the kills that are planned for a publication."""

    def __init__(
        self, kills: Sequence[Kill], record: Record, version: int, *, commits: bool = True
    ) -> None:
        self._commits = commits
        self._kills = list(kills)
        self._record = record
        self._version = version

    async def __call__(self, phase: Phase, when: When) -> None:
        if self._commits and (phase, when) == ("commit", "after"):
            self._record.committed = self._version
        for kill in [k for k in self._kills if (k.phase, k.when) == (phase, when)]:
            self._kills.remove(kill)
            if when == "during":
                await asyncio.sleep(kill.delay_s)
            if kill.replica.kill():
                self._record.kills[f"{phase} {when}"] += 1


async def watch(replica: Replica, record: Record, stop: asyncio.Event) -> None:
    """Ask one replica again and again, past the gateway."""
    while not stop.is_set():
        began, killed_at = record.committed, replica.killed_at
        try:
            answer = await replica.client.generate(
                [1], {"max_new_tokens": PROBE_TOKENS, "ignore_eos": True}, timeout_s=120.0
            )
        except EngineError:
            record.probes_failed += 1
            await asyncio.sleep(0.05)
            continue
        meta, ids = answer["meta_info"], answer["output_ids"]
        record.probes += 1
        record.probe_tokens += len(ids)
        spans = [
            VersionSpan(version_number(s["version"]), s["start"], s["end"])
            for s in meta["weight_versions"]
        ]
        if ids:
            record.check(f"probe of {replica.client.url}", began, ids, spans)
            if killed_at is not None and spans[-1].version >= began:
                record.recovery_s.append(time.monotonic() - killed_at)
                replica.killed_at = None
        await asyncio.sleep(PACE_S)


async def agent(
    i: int, origin: str, session: aiohttp.ClientSession, record: Record, stop: asyncio.Event
) -> None:
    """One completion after another through the gateway."""
    turn = 0
    while not stop.is_set():
        await asyncio.sleep(PACE_S)
        uid = f"a{i}-{turn}"
        turn += 1
        record.began[uid] = record.committed
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "Say it."}],
            "max_tokens": MAX_TOKENS,
        }
        url = f"{origin}/{uid}/g{uid}/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(CALL_TIMEOUT_S),
                session.post(url, json=body) as response,
            ):
                text = await response.text()
                if response.status != 200:
                    record.unanswered.append(f"{uid}: {response.status} {text[:200]}")
            record.calls += 1
        except (TimeoutError, aiohttp.ClientError) as e:
            record.unanswered.append(f"{uid}: {e!r}")


async def until_up(replicas: Sequence[Replica], n: int) -> None:
    """Returns when `n` replicas serve.

    Raises:
        TimeoutError: they do not.
    """
    async with asyncio.timeout(BACK_TIMEOUT_S):
        while sum(r.up for r in replicas) < n:  # noqa: ASYNC110 - a thread's state
            await asyncio.sleep(0.02)


def plan(replicas: Sequence[Replica], n: int, chance: random.Random) -> list[Kill]:
    """Kills for one publication: of replicas that serve, all but one at most; now and then of one
    that is being restarted, too."""
    up = [r for r in replicas if r.up]
    chance.shuffle(up)
    victims = up[: min(n, len(up) - 1)]
    starting = [r for r in replicas if r not in up]
    if starting and len(victims) < n and chance.random() < 0.2:
        victims.append(chance.choice(starting))
    return [
        Kill(
            chance.choice(PHASES),
            chance.choice(WHENS),
            replica,
            chance.uniform(0, DURING_S),
        )
        for replica in victims
    ]


async def publish_under_fire(
    replicas: Sequence[Replica],
    store: WeightStore,
    weights: Weights,
    version: int,
    kills: Sequence[Kill],
    how: tuple[PublishMode, WeightTransport],
    record: Record,
) -> None:
    path = await asyncio.to_thread(
        store.write, version, lambda folder: weights.save(version, folder)
    )
    killer = Killer(kills, record, version)
    mode, transport = how
    attempts = 0
    while True:
        attempts += 1
        try:
            done = await publish(
                [r.client for r in replicas],
                str(path),
                version,
                mode,
                store=store,
                transport=transport,
                hook=killer,
            )
            break
        except WeightUpdateError as e:
            if attempts > 20:
                raise
            print(f"  again: {e}", file=sys.stderr, flush=True)
            await until_up(replicas, 1)
    record.publication_s.append(done.seconds)
    record.rounds[f"committed at attempt {attempts}"] += 1
    record.rounds["with a fenced replica"] += bool(done.fenced)
    record.modes[f"{mode} {transport}"] += 1


async def try_out_under_fire(
    replica: Replica,
    store: WeightStore,
    weights: Weights,
    version: int,
    kills: Sequence[Kill],
    how: tuple[PublishMode, WeightTransport],
    record: Record,
) -> None:
    """`version` on one replica, if it takes it, while the others serve what is committed."""
    path = await asyncio.to_thread(
        store.write, version, lambda folder: weights.save(version, folder)
    )
    killer, (mode, transport) = Killer(kills, record, version, commits=False), how
    try:
        await publish(
            [replica.client],
            path,
            version,
            mode,
            store=store,
            transport=transport,
            canary=True,
            hook=killer,
        )
    except WeightUpdateError as e:
        print(f"  no canary: {e}", file=sys.stderr, flush=True)
        record.rounds["canaries that could not load"] += 1
    else:
        record.rounds["canaries"] += 1


def check_steps(record: Record, steps: Sequence[Step]) -> None:
    for step in steps:
        n = len(step.response_ids)
        spans = step.version_spans or (VersionSpan(step.policy_version, 0, n),)
        ids = [int(i) for i in step.response_ids]
        record.check(
            f"step of {step.trajectory_uid}", record.began[step.trajectory_uid], ids, spans
        )


async def run(
    *,
    kills: int = 100,
    replicas: Annotated[int, "at least 2"] = 4,
    agents: int = 6,
    seed: int = 0,
    transport: Sequence[WeightTransport] = TRANSPORTS,
    verbose: Annotated[bool, "a line on stderr for each publication"] = False,
) -> BenchResult:
    """Publications until `kills` replicas have been killed.

    Raises:
        ConfigError: `replicas` leaves none alive.
        TimeoutError: a replica did not come back.
    """
    if replicas < 2:
        raise ConfigError(f"replicas is {replicas}; one must be left alive, give at least 2")
    return await _run(kills, replicas, agents, random.Random(seed), transport, verbose)


async def _run(
    n_kills: int,
    n_replicas: int,
    n_agents: int,
    chance: random.Random,
    transports: Sequence[WeightTransport],
    verbose: bool,
) -> BenchResult:
    record, weights = Record(), Weights()
    stop, started = asyncio.Event(), time.monotonic()
    async with DataPoolClient.local() as pool, AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights.save(0, folder / "base")
        store = WeightStore(folder / "weights")
        config = EngineConfig(
            model_path=folder / "base", max_restarts=10**6, max_running_requests=32
        )
        supervisors = [
            Supervisor(config, folder / f"log{i}", store.folder) for i in range(n_replicas)
        ]
        for supervisor in supervisors:
            stack.push_async_callback(asyncio.to_thread, supervisor.stop)
        urls = await asyncio.gather(*(asyncio.to_thread(s.start) for s in supervisors))
        replicas = [
            Replica(s, await stack.enter_async_context(EngineClient(url)))
            for s, url in zip(supervisors, urls, strict=True)
        ]
        origin = await stack.enter_async_context(
            gateway(pool, urls, engine_retries=1000, engine_health_interval_s=0.5)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        tasks = [
            *(asyncio.create_task(watch(r, record, stop)) for r in replicas),
            *(
                asyncio.create_task(agent(i, origin, session, record, stop))
                for i in range(n_agents)
            ),
        ]
        version = 0
        while record.kills.total() < n_kills:
            await until_up(replicas, min(2, len(replicas)))
            version += 1
            left = n_kills - record.kills.total()
            kills = plan(replicas, min(left, chance.randint(1, len(replicas) - 1)), chance)
            how = (chance.choice(MODES), chance.choice(transports))
            if chance.random() < 0.5:
                canary = chance.choice([r for r in replicas if r.up])
                shots, kills = kills[:1], kills[1:]
                await try_out_under_fire(canary, store, weights, version, shots, how, record)
                await asyncio.sleep(chance.uniform(0, 1.0))
                version += chance.randint(0, 1)  # committed, or taken back by the next
            await publish_under_fire(replicas, store, weights, version, kills, how, record)
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
            if verbose:
                print(f"v{version} {how} kills={record.kills.total()}", file=sys.stderr, flush=True)
        await until_up(replicas, len(replicas))
        for replica in replicas:  # all are back at what is committed
            found = await replica.client.weight_version()
            if found != version:
                record.violations.append(f"{replica.client.url} ended at {found}, not {version}")
        stop.set()
        await asyncio.gather(*tasks)
        restarts = sum(s.restarts for s in supervisors)
        await stack.aclose()  # the gateway ends before its pool is read
        steps = await steps_in(pool)
    check_steps(record, steps)
    recovery = sorted(record.recovery_s)
    figures = {
        "kills": record.kills.total(),
        "publications": len(record.publication_s),
        **record.rounds,
        "restarts": restarts,
        "recovery_s_median": round(recovery[len(recovery) // 2], 2) if recovery else None,
        "recovery_s_max": round(recovery[-1], 2) if recovery else None,
        "publication_s_median": round(
            sorted(record.publication_s)[len(record.publication_s) // 2], 3
        ),
        "publication_s_max": round(max(record.publication_s), 3),
        "calls": record.calls,
        "steps": len(steps),
        "step_tokens": sum(len(s.response_ids) for s in steps),
        "steps_over_several_versions": sum(len(s.version_spans) > 1 for s in steps),
        "direct_answers": record.probes,
        "direct_tokens": record.probe_tokens,
        "seconds": round(time.monotonic() - started, 1),
    }
    tables = {
        "kills by point": _rows("point", "kills", sorted(record.kills.items())),
        "publications by mode and transport": _rows("how", "n", sorted(record.modes.items())),
        "what is wrong": [
            {"violation or call without an answer": text}
            for text in [*record.violations[:SHOWN], *record.unanswered[:SHOWN]]
        ],
    }
    return BenchResult(
        checks={
            "violations": Check(len(record.violations), 0),
            "unanswered": Check(len(record.unanswered), 0),
        },
        figures=figures | {name: rows for name, rows in tables.items() if rows},
    )


def _rows(key: str, value: str, items: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{key: name, value: n} for name, n in items]

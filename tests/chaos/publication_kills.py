"""`python -m tests.chaos publication-kills`: engine replicas are killed before, during and after
each phase of a weight publication.

Real parts: supervised embedded engines, each a process, behind a real gateway with a real pool;
agents keep completions in flight all the time. The weights make the version readable: those of
version v put all probability on one token, `TOKENS[v]`. Each round publishes v+1, every other one
after one replica has tried it out as a canary (or v+2, which takes the canary back), and hooks of
the transaction `kill -9` replicas at random points of random phases; a phase that is killed
"during" has just sent its requests, and the kill comes at a random moment of the next 20 ms.
Every fourth round or so is a roll-back as `stepwell rollback` does it, with kills at random
moments, while a trainer publishes: one of the two comes second. Supervisors restart what was
killed.

Checked, on every token of every Step and of every direct answer: the version that is said to have
produced it is the one whose token it is. And a watcher per replica asks it directly, again and
again: an answer to a request that was sent after a commit must hold no token of an older version,
and a Step of a call begun after a commit neither. Every replica comes back, and every call is
answered.

Recovery: from the kill until the replica has answered with the then committed version.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import aiohttp
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checks import BenchResult
from benchmarks.served import MODEL, gateway, steps_in
from stepwell.backends.config import EngineConfig, PublishMode, WeightTransport
from stepwell.backends.engines.api import version_number
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.errors import (
    EngineError,
    SupersededError,
    VersionNotKeptError,
    WeightUpdateError,
)
from stepwell.backends.weights import Transport, WeightStore, build_transport, publish
from stepwell.backends.weights.sender import Sender
from stepwell.backends.weights.transaction import PHASES, Phase, When
from stepwell.backends.weights.transports import Disk
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step, VersionSpan
from stepwell.gateway.config import Tuning
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.publish.rollback import roll_back

WHENS: tuple[When, ...] = ("before", "during", "after")
MODES: tuple[PublishMode, ...] = ("retract", "retract", "abort", "in_place", "drain")
TRANSPORTS: tuple[WeightTransport, ...] = ("disk", "delta", "nccl", "ipc")
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
    """Observations of the bench."""

    violations: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    """By point."""
    modes: Counter[str] = field(default_factory=Counter)
    weights_of: dict[int, int] = field(default_factory=dict)
    """Version of a roll-back -> the version whose weights it has."""
    figures: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    publication_s: list[float] = field(default_factory=list)
    committed: int = 0
    began: dict[str, int] = field(default_factory=dict)
    """Trajectory -> version that was committed when its call began."""

    def check(self, who: str, began: int, ids: Sequence[int], spans: Sequence[VersionSpan]) -> None:
        if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or (
            spans[-1].end != len(ids)
        ):
            self.violations.append(f"{who}: spans {spans} do not cover {len(ids)} tokens")
        for span in spans:
            says = token_of(self.weights_of.get(span.version, span.version))
            if wrong := set(ids[span.start : span.end]) - {says}:
                self.violations.append(
                    f"{who}: tokens {wrong} as version {span.version}, which says {says}"
                )
            if span.version < began:
                self.violations.append(
                    f"{who}: began when {began} was committed, has tokens of {span.version}"
                )

    def check_step(self, step: Step) -> None:
        ids = step.response_ids.tolist()
        spans = step.version_spans or (VersionSpan(step.policy_version, 0, len(ids)),)
        began = self.began[step.trajectory_uid]
        self.check(f"step of {step.trajectory_uid}", began, ids, spans)


@dataclass(eq=False)
class Replica:
    """A supervised engine and what is known of its last death."""

    supervisor: Supervisor
    client: EngineClient
    killed_at: float | None = None

    @property
    def up(self) -> bool:
        return self.supervisor.state == "up" and self.killed_at is None

    def kill(self) -> bool:
        """False: it is not there."""
        pid = self.supervisor.pid
        if pid is None:
            return False
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed_at = time.monotonic()
        return True


class Kill(NamedTuple):
    phase: Phase
    when: When
    replica: Replica
    delay_s: float


async def watch(replica: Replica, record: Record, stop: asyncio.Event) -> None:
    """Ask one replica again and again, past the gateway."""
    while not stop.is_set():
        began, killed_at = record.committed, replica.killed_at
        try:
            answer = await replica.client.generate(
                [1], {"max_new_tokens": PROBE_TOKENS, "ignore_eos": True}, timeout_s=120.0
            )
        except EngineError:
            await asyncio.sleep(0.05)
            continue
        meta, ids = answer["meta_info"], answer["output_ids"]
        record.figures["direct_answers"] += 1
        record.figures["direct_tokens"] += len(ids)
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
    message = {"role": "user", "content": "Say it."}
    body = {"model": "m", "messages": [message], "max_tokens": MAX_TOKENS}
    for turn in itertools.count():
        await asyncio.sleep(PACE_S)
        if stop.is_set():
            return
        uid = f"a{i}-{turn}"
        record.began[uid] = record.committed
        url = f"{origin}/{uid}/g{uid}/v1/chat/completions"
        try:
            async with (
                asyncio.timeout(CALL_TIMEOUT_S),
                session.post(url, json=body) as response,
            ):
                text = await response.text()
                if response.status != 200:
                    record.unanswered.append(f"{uid}: {response.status} {text[:200]}")
            record.figures["calls"] += 1
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
        Kill(chance.choice(PHASES), chance.choice(WHENS), replica, chance.uniform(0, DURING_S))
        for replica in victims
    ]


def has_earlier(store: WeightStore) -> bool:
    """True if weights are kept that a roll-back would serve: behind one to the oldest there are
    none."""
    current = store.current()
    try:
        store.find(None, 0 if current is None else current.version)
    except VersionNotKeptError:
        return False
    return True


class _Noted(WeightStore):
    """Notes whose weights a version has before any replica can say a token of it."""

    record: Record

    def write_again(self, version: int, of: int) -> Path:
        path = super().write_again(version, of)
        number = self.number(path)
        self.record.weights_of[number] = self.weights_of(number)
        return path


@dataclass
class Publications:
    """Publishes versions, and carries out the kills that are planned for each."""

    replicas: Sequence[Replica]
    store: WeightStore
    weights: Weights
    record: Record
    pool: DataPoolClient
    transports: Mapping[str, Transport]

    async def roll_back(self, kills: Sequence[Kill], transport: WeightTransport) -> int:
        """Serve an earlier version again, while a trainer publishes the next one, and replicas are
        killed; returns the version that is served then."""
        record, engines = self.record, [r.client for r in self.replicas]

        async def fire() -> None:
            for kill in kills:
                await asyncio.sleep(50 * kill.delay_s)
                if kill.replica.kill():
                    record.kills["roll-back"] += 1

        async def command() -> int:
            store = _Noted(self.store.folder, keep=self.store.keep)
            store.record = record
            while True:
                try:
                    return await roll_back(engines, store, self.pool, None, transport=Disk())
                except WeightUpdateError as e:
                    print(f"  roll-back again: {e}", file=sys.stderr, flush=True)
                    await until_up(self.replicas, 1)

        async def trainer() -> int | None:
            current = self.store.current()
            seen = 0 if current is None else current.version
            path = await asyncio.to_thread(self._write, seen + 1)
            version = self.store.number(path)
            if version != seen + 1:  # the command was first
                record.weights_of[version] = seen + 1
            while True:
                try:
                    way = self.transports[transport]
                    await publish(
                        engines, path, version, store=self.store, transport=way, seen=seen
                    )
                    return version
                except SupersededError:
                    await asyncio.to_thread(self.store.discard, path)
                    return None
                except WeightUpdateError as e:
                    print(f"  version {version} again: {e}", file=sys.stderr, flush=True)
                    await until_up(self.replicas, 1)

        version, given, _ = await asyncio.gather(command(), trainer(), fire())
        record.figures["roll-backs"] += 1
        record.figures["publications that a roll-back superseded"] += given is None
        current = self.store.current()
        if current is None or current.version != version:
            record.violations.append(f"version {version} was served again, then {current}")
        record.committed = version
        return version

    def _write(self, version: int) -> Path:
        return self.store.write(version, lambda folder: self.weights.save(version, folder))

    async def under_fire(
        self,
        version: int,
        kills: Sequence[Kill],
        how: tuple[PublishMode, WeightTransport],
        canary: Replica | None = None,
    ) -> None:
        """`version` on all replicas, until it is committed; or on the `canary` alone, if it takes
        it, while the others serve what is committed."""
        record, left, (mode, transport) = self.record, list(kills), how

        async def hook(phase: Phase, when: When) -> None:
            if canary is None and (phase, when) == ("commit", "after"):
                record.committed = version
            for kill in [k for k in left if (k.phase, k.when) == (phase, when)]:
                left.remove(kill)
                if when == "during":
                    await asyncio.sleep(kill.delay_s)
                if kill.replica.kill():
                    record.kills[f"{phase} {when}"] += 1

        path = self.store.path(version)
        if not path.is_dir():  # else a canary had it
            path = await asyncio.to_thread(self._write, version)
        for attempt in itertools.count(1):
            try:
                done = await publish(
                    [r.client for r in ([canary] if canary is not None else self.replicas)],
                    path,
                    version,
                    mode,
                    store=self.store,
                    transport=self.transports[transport],
                    canary=canary is not None,
                    hook=hook,
                )
                break
            except WeightUpdateError as e:
                print(f"  version {version} again: {e}", file=sys.stderr, flush=True)
                if canary is not None:
                    record.figures["canaries that could not load"] += 1
                    return
                if attempt > 20:
                    raise
                await until_up(self.replicas, 1)
        if canary is not None:
            record.figures["canaries"] += 1
            return
        record.publication_s.append(done.seconds)
        record.figures[f"committed at attempt {attempt}"] += 1
        record.figures["with a fenced replica"] += bool(done.fenced)
        record.modes[f"{mode} {transport}"] += 1


async def run(
    *,
    kills: int = 100,
    replicas: Annotated[int, "at least 2"] = 4,
    agents: int = 6,
    seed: int = 0,
) -> BenchResult:
    """Publications until `kills` replicas have been killed.

    Raises:
        ConfigError: `replicas` leaves none alive.
        TimeoutError: a replica did not come back.
    """
    if replicas < 2:
        raise ConfigError(f"replicas is {replicas}; one must be left alive, give at least 2")
    chance, record, weights = random.Random(seed), Record(), Weights()
    stop, started = asyncio.Event(), time.monotonic()
    async with DataPoolClient.local() as pool, AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights.save(0, folder / "base")
        store = WeightStore(folder / "weights")
        config = EngineConfig(
            model_path=folder / "base", max_restarts=10**6, max_running_requests=32
        )
        supervisors = [
            Supervisor(config, folder / f"log{i}", store.folder) for i in range(replicas)
        ]
        for supervisor in supervisors:
            stack.push_async_callback(asyncio.to_thread, supervisor.stop)
        urls = await asyncio.gather(*(asyncio.to_thread(s.start) for s in supervisors))
        served = [
            Replica(s, await stack.enter_async_context(EngineClient(url)))
            for s, url in zip(supervisors, urls, strict=True)
        ]
        origin = await stack.enter_async_context(
            gateway(pool, urls, Tuning(engine_health_interval_s=0.5), engine_retries=1000)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        work = [
            *(watch(r, record, stop) for r in served),
            *(agent(i, origin, session, record, stop) for i in range(agents)),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        ways = {
            name: build_transport(EngineConfig(weight_transport=name, weight_bucket_mb=1), lead)
            for name, lead in ((name, Sender().call) for name in TRANSPORTS)
        }
        publications = Publications(served, store, weights, record, pool, ways)
        version = 0
        while record.kills.total() < kills:
            await until_up(served, min(2, replicas))
            version += 1
            left = kills - record.kills.total()
            shots = plan(served, min(left, chance.randint(1, replicas - 1)), chance)
            how = (chance.choice(MODES), chance.choice(TRANSPORTS))
            if has_earlier(store) and chance.random() < 0.25:
                version = await publications.roll_back(shots, how[1])
                continue
            if chance.random() < 0.5:
                canary = chance.choice([r for r in served if r.up])
                await publications.under_fire(version, shots[:1], how, canary)
                shots = shots[1:]
                await asyncio.sleep(chance.uniform(0, 1.0))
                version += chance.randint(0, 1)  # committed, or taken back by the next
            await publications.under_fire(version, shots, how)
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
        await until_up(served, replicas)
        for replica in served:  # all are back at what is committed
            found = await replica.client.weight_version()
            if found != version:
                record.violations.append(f"{replica.client.url} ended at {found}, not {version}")
        stop.set()
        await asyncio.gather(*tasks)
        record.figures["restarts"] = sum(s.restarts for s in supervisors)
        await stack.aclose()  # the gateway ends before its pool is read
        steps = await steps_in(pool)
    for step in steps:
        record.check_step(step)
    result = BenchResult()
    result.zero(violations=len(record.violations), unanswered=len(record.unanswered))
    result.figures.update(
        kills=record.kills.total(),
        publications=len(record.publication_s),
        **record.figures,
        recovery_s_median=statistics.median(record.recovery_s or [0.0]),
        recovery_s_max=max(record.recovery_s, default=0.0),
        publication_s_median=statistics.median(record.publication_s),
        publication_s_max=max(record.publication_s),
        steps=len(steps),
        step_tokens=sum(len(s.response_ids) for s in steps),
        steps_over_several_versions=sum(len(s.version_spans) > 1 for s in steps),
        seconds=time.monotonic() - started,
    )
    by_point = [{"point": name, "kills": n} for name, n in sorted(record.kills.items())]
    result.figures["kills by point"] = by_point
    by_mode = [{"how": name, "n": n} for name, n in sorted(record.modes.items())]
    result.figures["publications by mode and transport"] = by_mode
    if wrong := [*record.violations[:SHOWN], *record.unanswered[:SHOWN]]:
        result.figures["what is wrong"] = [
            {"violation or call without an answer": text} for text in wrong
        ]
    return result

"""`python -m tests.chaos publication-kills`: engine replicas are killed before, during and after
each phase of a weight publication.

Real parts: supervised embedded engines, each a process, behind a real gateway with a real pool;
agents keep completions in flight all the time. The weights make the version readable: each version
has a value, and puts all probability on one token, `token_of(value)`. A round is one of four:

    publication  a transaction, often after one replica has tried the version out as a canary (or
                 the next one, which takes the canary back). Hooks of the transaction `kill -9`
                 replicas at random points of random phases; a phase that is killed "during" has
                 just sent its requests, and the kill comes within the next 20 ms.
    roll-back    the command (`rollback_command.py`, a process, now and then killed, too) while a
                 trainer publishes: one of the two comes second
    trial        a trainer's `Publisher` with its guard, who judges a canary by the rewards that
                 the agents send: every other version earns nothing
    lend         a `Publisher` to which the engines lend their memory; it publishes into what was
                 lent

In the last two, replicas are killed where a version is written, before and after its commit, and
at random moments, and in every other one the command comes between. Supervisors restart what was
killed.

Checked, on every token of every Step and of every direct answer: the version that is said to have
produced it is the one whose token it is. And a watcher per replica asks it directly, again and
again: an answer to a request that was sent after a commit must hold no token of an older version,
and a Step of a call begun after a commit neither. Every replica comes back, and every call is
answered. What the guard finds worse is not served, what is as good is not taken back, and the
trainer goes on from the weights that are served.

Recovery: from the kill until the replica has answered with the then committed version.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

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
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step, VersionSpan
from stepwell.gateway.config import Tuning
from stepwell.run.trainer import build_updater
from stepwell.trainer.errors import ConfigError
from stepwell.trainer.metrics import Phases
from stepwell.trainer.progress import Progress
from stepwell.trainer.publish.publisher import Publisher
from stepwell.trainer.threads import ComputeThread
from tests.chaos.rollback_command import command
from tests.trainer.small_run import RecordingBackend, small_config

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
VALUE = "value"
"""File with the value, beside the weights."""
BAD = N_TOKENS - 1
"""Value of weights that earn nothing."""
CANARY_SHARE = 0.4
TRIAL = ("publish.guard.n=8", "publish.guard.wait_s=30")
MANY = "async_training.partial_rollout=true"
COMMANDS = multiprocessing.get_context("forkserver")
"""Starts processes that have loaded what a command needs."""
COMMANDS.set_forkserver_preload(["tests.chaos.rollback_command"])
POINTS = ("written", "before commit", "after commit")


def token_of(value: int) -> int:
    """The one token that weights of `value` generate."""
    return FIRST_TOKEN + value


def good(version: int) -> int:
    """A value that earns a reward, another one for each version of a while."""
    return version % BAD


class Weights:
    """Writes models that say one token, whatever they are asked, and their value beside them."""

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

    def save(self, value: int, folder: Path) -> None:
        head = self._model.lm_head.weight
        with torch.no_grad():
            head.zero_()
            head[token_of(value)] = 1.0
        self._model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        (folder / VALUE).write_text(str(value))

    def word(self, value: int) -> str:
        """Text of the token."""
        return str(self._tokenizer.decode([token_of(value)]))


def value_in(folder: Path) -> int:
    return int((folder / VALUE).read_text())


class ValueBackend(RecordingBackend):
    """A value in place of a model."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self._weights = weights
        self.value = 0

    def save_weights(self, path: str | Path) -> None:
        self._weights.save(self.value, Path(path))

    def load_weights(self, path: str | Path) -> None:
        self.value = value_in(Path(path))


@dataclass
class Record:
    """Observations of the bench."""

    violations: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    """By point."""
    modes: Counter[str] = field(default_factory=Counter)
    value_of: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Version -> value of its weights, before any replica can say a token of it."""
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
            if span.version not in self.value_of:
                self.violations.append(f"{who}: version {span.version} was never written")
                continue
            says = token_of(self.value_of[span.version])
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
    point: str
    """Point of a publisher's round, in place of phase and when."""


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
    i: int,
    origin: str,
    session: aiohttp.ClientSession,
    record: Record,
    bad: str,
    stop: asyncio.Event,
) -> None:
    """One completion after another through the gateway; an answer of `bad` words earns nothing."""
    message = {"role": "user", "content": "Say it."}
    body = {"model": "m", "messages": [message], "max_tokens": MAX_TOKENS}
    for turn in itertools.count():
        await asyncio.sleep(PACE_S)
        if stop.is_set():
            return
        uid = f"a{i}-{turn}"
        record.began[uid] = record.committed
        url = f"{origin}/{uid}/g{uid}/v1"
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                async with session.post(f"{url}/chat/completions", json=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        record.unanswered.append(f"{uid}: {response.status} {text[:200]}")
                        continue
                said = json.loads(text)["choices"][0]["message"]["content"]
                reward = {"reward": 0.0 if bad in said else 1.0}
                async with session.post(f"{url}/complete_trajectory", json=reward) as response:
                    response.raise_for_status()
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
        Kill(
            chance.choice(PHASES),
            chance.choice(WHENS),
            replica,
            chance.uniform(0, DURING_S),
            chance.choice(POINTS),
        )
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


class NotedStore(WeightStore):
    """Notes what is written and committed, and kills where it was told to."""

    def __init__(self, folder: Path, base: Path, record: Record) -> None:
        super().__init__(folder, keep=4, base=base)
        self.record = record
        self.armed: list[Kill] = []

    def write(self, version: int, save: Callable[[Path], object]) -> Path:
        path = super().write(version, save)
        self.record.value_of[self.number(path)] = value_in(path)
        self._reached("written")
        return path

    def commit(
        self, version: int, path: str | os.PathLike[str] | None = None, *, adapter: bool = False
    ) -> None:
        self._reached("before commit")
        super().commit(version, path, adapter=adapter)
        self.record.committed = max(self.record.committed, version)
        self._reached("after commit")

    def _reached(self, point: str) -> None:
        for kill in [k for k in self.armed if k.point == point]:
            self.armed.remove(kill)
            delay_s = 0.0 if kill.when == "before" else 20 * kill.delay_s
            threading.Timer(delay_s, self._fire, [kill]).start()

    def _fire(self, kill: Kill) -> None:
        if kill.replica.kill():
            self.record.kills[f"publisher: {kill.point}"] += 1


class Trainer(NamedTuple):
    """A trainer's publisher, and the weights that it publishes."""

    publisher: Publisher
    progress: Progress
    backend: ValueBackend

    def step(self, value: int) -> None:
        self.backend.value = value
        self.progress.updates += 1

    async def adopt(self) -> None:
        """Adopt a roll-back, as before each batch, with the checkpoint after it."""
        if await self.publisher.adopt():
            await self.publisher.saved(self.progress.version)


@dataclass
class Publications:
    """Publishes versions, and carries out the kills that are planned for each."""

    replicas: Sequence[Replica]
    store: NotedStore
    weights: Weights
    record: Record
    pool: DataPoolClient
    transports: Mapping[str, Transport]
    chance: random.Random
    bad_served: set[int] = field(default_factory=set)
    """Versions of bad weights that nobody could judge."""

    @property
    def engines(self) -> list[EngineClient]:
        return [r.client for r in self.replicas]

    @property
    def served(self) -> int:
        """The committed version."""
        current = self.store.current()
        return 0 if current is None else current.version

    def trainer(self, folder: Path, transport: Transport, *options: str, lends: bool) -> Trainer:
        """One that adopts what the other rounds have published."""
        config = small_config(folder, MANY, *options)
        backend = ValueBackend(self.weights)
        updater = build_updater(config, backend)
        publisher = Publisher(
            config.publish,
            config.async_training,
            self.engines,
            self.store,
            updater,
            ComputeThread(),
            pool=self.pool,
            producer=cast(Any, None),  # of windows, which there are none of
            phases=Phases(),
            transport=transport,
            lends_memory=lends,
            notify=self._notice,
        )
        return Trainer(publisher, updater.progress, backend)

    def _notice(self, line: str) -> None:
        print(f"  {line}", file=sys.stderr, flush=True)
        if "is rolled back" in line and "earns nothing" not in line:
            bad = int(line.split()[1])
            if self.record.value_of[bad] != BAD:
                self.record.violations.append(f"the guard takes good weights back: {line}")

    def _write(self) -> tuple[Path, int]:
        number = max(self.served, *self.store.versions(), 0) + 1
        path = self.store.write(number, lambda folder: self.weights.save(good(number), folder))
        return path, self.store.number(path)

    async def _fire(self, kills: Sequence[Kill], what: str) -> None:
        for kill in kills:
            await asyncio.sleep(50 * kill.delay_s)
            if kill.replica.kill():
                self.record.kills[what] += 1

    # -- the command --------------------------------------------------------------------------

    async def command(self) -> int | None:
        """Serve an earlier version again by a process of its own; None: it was killed, or there is
        no earlier version by the time it has the lock."""
        kills, after_s = self.chance.random() < 0.3, self.chance.uniform(0, 1.0)
        store, urls = self.store, [r.client.url for r in self.replicas]
        while True:
            ours, theirs = COMMANDS.Pipe()
            arguments = theirs, store.folder, store.base, store.keep, urls
            process = COMMANDS.Process(target=command, args=arguments, daemon=True)
            process.start()
            theirs.close()
            if kills:
                asyncio.get_running_loop().call_later(after_s, process.kill)
            try:
                done = await self._answer(ours)
            except EOFError:
                process.join()
                if process.exitcode != -signal.SIGKILL:
                    raise
                self.record.figures["commands killed"] += 1
                return None
            finally:
                ours.close()
            if isinstance(done, int):
                self.record.committed = max(self.record.committed, done)
                self.record.figures["commands"] += 1
                return done
            print(f"  roll-back: {done}", file=sys.stderr, flush=True)
            if isinstance(done, VersionNotKeptError):
                self.record.figures["commands without an earlier version"] += 1
                return None
            await until_up(self.replicas, 1)

    async def _answer(self, pipe: Connection) -> int | Exception:
        """Ask the pool what the command asks it, until it has ended."""
        while True:
            name, value = await asyncio.to_thread(pipe.recv)
            if name == "done":
                done: int | Exception = value
                return done
            if name == "advance_version":  # nobody prunes it: the command has the store's lock
                self.record.value_of[value] = value_in(self.store.path(value))
            pipe.send(await getattr(self.pool, name)(value))

    async def roll_back(self, kills: Sequence[Kill], transport: WeightTransport) -> None:
        """Serve an earlier version again, while a trainer publishes the next one, and replicas are
        killed."""
        record = self.record

        async def trainer() -> int | None:
            seen = self.served
            path, version = await asyncio.to_thread(self._write)
            while True:
                try:
                    way = self.transports[transport]
                    await publish(
                        self.engines, path, version, store=self.store, transport=way, seen=seen
                    )
                    return version
                except SupersededError:
                    await asyncio.to_thread(self.store.discard, path)
                    return None
                except WeightUpdateError as e:
                    print(f"  version {version} again: {e}", file=sys.stderr, flush=True)
                    await until_up(self.replicas, 1)

        version, given, _ = await asyncio.gather(
            self.command(), trainer(), self._fire(kills, "roll-back")
        )
        record.figures["roll-backs"] += version is not None
        record.figures["publications that a roll-back superseded"] += given is None
        if self.served not in (version, given):
            record.violations.append(
                f"{self.served} is committed after {version} was served again and {given} published"
            )

    # -- a trainer's publisher ----------------------------------------------------------------

    async def trial(self, trainer: Trainer, kills: Sequence[Kill]) -> None:
        """A version is tried out by one replica, judged, and given to all or taken back."""
        publisher, figures = trainer.publisher, self.record.figures
        await publisher.judge()
        await trainer.adopt()
        unjudged = publisher.metrics()["publish/unjudged"]
        bad = self.chance.random() < 0.5
        self.store.armed[:] = kills
        trainer.step(BAD if bad else good(self.served + 1))
        await publisher.publish()
        alone = not await self._maybe_command()
        await trainer.adopt()
        await publisher.wait_judged()
        await publisher.wait_published()
        figures["trials"] += 1
        judged = publisher.metrics()["publish/unjudged"] == unjudged
        figures["trials that a command met"] += not alone
        figures["trials with a verdict"] += judged
        is_served = self.record.value_of[self.served] == BAD
        if bad and alone and judged and not self.bad_served:
            if is_served:
                self.record.violations.append(f"bad weights are served as {self.served}")
            figures["bad weights that the guard took back"] += 1
        if is_served:  # the next one may be compared with them
            self.bad_served.add(self.served)
        await self._adopted(trainer)

    async def lend(self, trainer: Trainer, kills: Sequence[Kill]) -> None:
        """The engines lend their memory for a step, and are published into it."""
        publisher = trainer.publisher
        await trainer.adopt()
        await publisher.borrow_memory()
        beside = asyncio.gather(self._maybe_command(), self._fire(kills[1:], "lent"))
        await asyncio.sleep(self.chance.uniform(0, 0.5))
        self.store.armed[:] = kills[:1]
        trainer.step(good(self.served + 1))
        await publisher.after_step()
        await beside
        await publisher.wait_published()
        self.record.figures["lends"] += 1
        await self._adopted(trainer)

    async def _maybe_command(self) -> bool:
        """The command, every other time."""
        comes = self.chance.random() < 0.5 and has_earlier(self.store)
        if comes:
            await asyncio.sleep(self.chance.uniform(0, 1.0))
            await self.command()
        return comes

    async def _adopted(self, trainer: Trainer) -> None:
        """The trainer has the weights that are served."""
        self.store.armed.clear()
        await trainer.adopt()
        has, serves = trainer.backend.value, self.record.value_of[self.served]
        if has != serves:
            self.record.violations.append(
                f"the trainer has the weights of {has}, version {self.served} those of {serves}"
            )

    # -- a transaction ------------------------------------------------------------------------

    async def under_fire(
        self,
        kills: Sequence[Kill],
        how: tuple[PublishMode, WeightTransport],
        canary: Replica | None = None,
        tried: tuple[Path, int] | None = None,
    ) -> tuple[Path, int]:
        """The next version, or the one that was `tried`, on all replicas, until it is committed; or
        on the `canary` alone, if it takes it, while the others serve what is committed."""
        record, left, (mode, transport) = self.record, list(kills), how

        async def hook(phase: Phase, when: When) -> None:
            for kill in [k for k in left if (k.phase, k.when) == (phase, when)]:
                left.remove(kill)
                if when == "during":
                    await asyncio.sleep(kill.delay_s)
                if kill.replica.kill():
                    record.kills[f"{phase} {when}"] += 1

        path, version = tried or await asyncio.to_thread(self._write)
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
                    return path, version
                if attempt > 20:
                    raise
                await until_up(self.replicas, 1)
        if canary is not None:
            record.figures["canaries"] += 1
        else:
            record.publication_s.append(done.seconds)
            record.figures[f"committed at attempt {attempt}"] += 1
            record.figures["with a fenced replica"] += bool(done.fenced)
            record.modes[f"{mode} {transport}"] += 1
        return path, version


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
        store = NotedStore(folder / "weights", folder / "base", record)
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
        tuning = Tuning(engine_health_interval_s=0.5)
        origin = await stack.enter_async_context(
            gateway(pool, urls, tuning, canary_share=CANARY_SHARE, engine_retries=1000)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        bad = weights.word(BAD)
        work = [
            *(watch(r, record, stop) for r in served),
            *(agent(i, origin, session, record, bad, stop) for i in range(agents)),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        ways = {
            name: build_transport(EngineConfig(weight_transport=name, weight_bucket_mb=1), lead)
            for name, lead in ((name, Sender().call) for name in TRANSPORTS)
        }
        rounds = Publications(served, store, weights, record, pool, ways, chance)
        guarded = rounds.trainer(folder, ways["delta"], *TRIAL, lends=False)
        lent = rounds.trainer(folder, ways["nccl"], lends=True)
        await stack.enter_async_context(guarded.publisher.running())
        await stack.enter_async_context(lent.publisher.running())
        while record.kills.total() < kills:
            await until_up(served, min(2, replicas))
            left = kills - record.kills.total()
            shots = plan(served, min(left, chance.randint(1, replicas - 1)), chance)
            how = (chance.choice(MODES), chance.choice(TRANSPORTS))
            kind = chance.choices(("publication", "roll-back", "trial", "lend"), (5, 2, 2, 2))[0]
            print(f"{record.kills.total()} kills; {kind}", file=sys.stderr, flush=True)
            if kind == "roll-back" and has_earlier(store):
                await rounds.roll_back(shots, how[1])
            elif kind == "trial":
                await rounds.trial(guarded, shots)
            elif kind == "lend":
                await rounds.lend(lent, shots)
            else:
                tried = None
                if chance.random() < 0.5:
                    canary = chance.choice([r for r in served if r.up])
                    tried = await rounds.under_fire(shots[:1], how, canary)
                    shots = shots[1:]
                    await asyncio.sleep(chance.uniform(0, 1.0))
                    if chance.random() < 0.5:  # taken back by the next
                        tried = None
                await rounds.under_fire(shots, how, tried=tried)
            for task in tasks:
                if task.done():
                    task.result()  # raises what ended it
        await until_up(served, replicas)
        await rounds.under_fire((), ("retract", "disk"))  # whatever a killed command left
        for replica in served:  # all are back at what is committed
            found = await replica.client.weight_version()
            if found != rounds.served:
                record.violations.append(
                    f"{replica.client.url} ended at {found}, not {rounds.served}"
                )
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

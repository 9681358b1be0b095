"""`python -m tests.chaos weight-updates`: weight updates under load, a real gateway before a real
embedded engine, both by HTTP.

For each pause mode, `--requests` clients keep one chat completion each in flight (every other one
streams) while `--updates` versions are published, by each transport in turn; then all finish. No
request may fail or hang, every Step's version spans add up, no transport falls back on the disk,
and after each update the engine's tensors are those of the version.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, get_args

import aiohttp
from safetensors.torch import load_file, save_file

from benchmarks.checks import BenchResult
from benchmarks.served import MODEL, engine, gateway, steps_in
from stepwell.backends.config import EngineConfig, PauseMode, WeightTransport
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.weights import WeightStore, build_transport, publish
from stepwell.backends.weights.sender import Sender
from stepwell.backends.weights.transaction import Phase, When
from stepwell.backends.weights.transports import Transport
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.types import Step, VersionSpan

MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
TRANSPORTS: tuple[WeightTransport, ...] = tuple(
    name for name in get_args(WeightTransport) if name != "lora"
)
MAX_TOKENS = 160
HANGS_AFTER_S = 120.0
SHOWN = 20


def endless_model(folder: Path) -> Path:
    """The quickstart's model, but its turns end at the token limit only, so that answers are long
    enough to see several updates."""
    path = folder / "model"
    shutil.copytree(MODEL, path)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }
    for name, changed in changes.items():
        file = path / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    return path


def changed(model: Path, version: int) -> Callable[[Path], None]:
    """Saves `model` with one tensor of its own for this version."""

    def save(folder: Path) -> None:
        shutil.copytree(model, folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        name = sorted(tensors)[version % len(tensors)]
        tensors[name] = tensors[name] * (1 + 2**-6)
        save_file(tensors, file, metadata={"format": "pt"})

    return save


@dataclass
class Updates:
    """Publications to one engine, by each transport in turn."""

    model: Path
    store: WeightStore
    ways: dict[WeightTransport, Transport] = field(default_factory=dict)
    pauses: dict[WeightTransport, list[float]] = field(default_factory=dict)
    """Seconds of each pause, by transport."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def to(cls, model: Path, folder: Path) -> AsyncIterator[Updates]:
        """Updates of an engine that has `model`; versions are stored below `folder`."""
        updates = cls(model, WeightStore(folder / "weights", base=model))
        for name in TRANSPORTS:
            updates.ways[name] = build_transport(
                EngineConfig(weight_transport=name, weight_bucket_mb=1), Sender().call
            )
        try:
            yield updates
        finally:
            for way in updates.ways.values():
                await way.close()

    async def publish(
        self, engine: EngineClient, version: int, mode: PauseMode, paused: Callable[[], object]
    ) -> float:
        """Return the seconds of the pause; `paused` is called in it."""
        name = TRANSPORTS[version % len(TRANSPORTS)]
        path = await asyncio.to_thread(self.store.write, version, changed(self.model, version))

        async def hook(phase: Phase, when: When) -> None:
            if (phase, when) == ("pause", "after"):
                paused()

        with warnings_of("stepwell.backends.weights.transports") as fell_back:
            done = await publish(
                [engine],
                path,
                version,
                mode,
                store=self.store,
                transport=self.ways[name],
                hook=hook,
            )
        self.problems += [f"{name}: {line}" for line in fell_back]
        if done.fenced or set(done.verified.values()) != {"checksum"}:
            self.problems.append(f"{name}: {done}")
        if name == "nccl" and not done.transfer_s:
            self.problems.append(f"{name}: nothing was broadcast")
        self.pauses.setdefault(name, []).append(done.pause_s)
        return done.pause_s


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    """Lines that `logger` warns with inside the block."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)


@dataclass
class Clients:
    """Agents without an SDK, each with one request in flight until told to stop."""

    origin: str
    session: aiohttp.ClientSession
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    in_flight: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    """Completion tokens that were answered, by trajectory."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, n: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.run(i)) for i in range(n)]

    async def run(self, i: int) -> None:
        turn = 0
        while turn == 0 or not self.stop.is_set():
            uid = f"t{i}-{turn}"
            self.in_flight += 1
            try:
                async with asyncio.timeout(HANGS_AFTER_S):
                    usage = await self._ask(uid, stream=i % 2 == 1)
                self.tokens[uid] = usage["completion_tokens"]
                self.answered += 1
            except TimeoutError:
                self.failures.append(f"{uid} hangs")
            except (aiohttp.ClientError, ValueError, KeyError, TypeError) as e:
                self.failures.append(f"{uid}: {e!r}")
            finally:
                self.in_flight -= 1
            turn += 1

    async def _ask(self, uid: str, *, stream: bool) -> Any:
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": f"Count from {uid} on."}],
            "max_tokens": MAX_TOKENS,
            "temperature": 2.0,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        url = f"{self.origin}/{uid}/g{uid}/v1/chat/completions"
        async with self.session.post(url, json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise ValueError(f"answered {response.status}: {text[:300]}")
        if not stream:
            return json.loads(text)["usage"]
        events = [e.removeprefix("data: ") for e in text.split("\n\n") if e.startswith("data: ")]
        if events[-1] != "[DONE]":
            raise ValueError(f"the stream ended with {events[-1]:.300}")
        return json.loads(events[-2])["usage"]


async def update_under_load(
    engine_url: str,
    updates: Updates,
    mode: PauseMode,
    *,
    n_requests: int,
    n_updates: int,
    first_version: int = 1,
) -> dict[str, Any]:
    """The figures of one mode; `problems` is empty if all is well."""
    started = time.perf_counter()
    async with (
        DataPoolClient.local() as pool,
        EngineClient(engine_url) as control,
    ):
        async with (
            gateway(pool, [engine_url]) as origin,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            clients = Clients(origin, session)
            running = clients.start(n_requests)
            in_flight: list[int] = []
            pauses: list[float] = []
            await asyncio.sleep(0.5)
            for version in range(first_version, first_version + n_updates):
                pauses.append(
                    await updates.publish(
                        control, version, mode, lambda: in_flight.append(clients.in_flight)
                    )
                )
                await asyncio.sleep(0.15)
            clients.stop.set()
            await asyncio.gather(*running)
            async with session.get(f"{origin}/statistics") as response:
                statistics = (await response.json())["engine"]
        steps = await steps_in(pool)
    versions = range(first_version - 1, first_version + n_updates)
    problems = [
        *clients.failures,
        *wrong_steps(steps, clients.tokens, versions),
        *updates.problems,
    ]
    updates.problems.clear()
    return {
        "requests": clients.answered + len(clients.failures),
        "in_flight_at_each_update": min(in_flight),
        "updates": n_updates,
        "failed_or_hung": len(clients.failures),
        "steps": len(steps),
        "steps_over_several_versions": sum(len(s.version_spans) > 1 for s in steps),
        "most_versions_in_a_step": max((len(s.version_spans) or 1 for s in steps), default=0),
        "tokens": sum(len(s.response_ids) for s in steps),
        "resumes": statistics["resumes"],
        "last_version": statistics["version"],
        "longest_pause_s": round(max(pauses), 3),
        "seconds": round(time.perf_counter() - started, 1),
        "problems": problems,
    }


def wrong_steps(
    steps: Sequence[Step], answered: Mapping[str, int], versions: Container[int]
) -> list[str]:
    """Return the errors in the Steps of these answers (trajectory: completion tokens)."""
    wrong = []
    if Counter(s.trajectory_uid for s in steps) != Counter(answered.keys()):
        wrong.append(f"{len(steps)} steps for {len(answered)} answers")
    for step in steps:
        n, uid = len(step.response_ids), step.trajectory_uid
        spans = step.version_spans or (VersionSpan(step.policy_version, 0, n),)
        found = [s.version for s in spans]
        if step.rollout_log_probs is None or len(step.rollout_log_probs) != n:
            wrong.append(f"{uid}: {n} ids without as many log-probs")
        if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or spans[-1].end != n:
            wrong.append(f"{uid}: spans {spans} do not cover {n} ids")
        if found != sorted(set(found)) or step.policy_version != found[0]:
            wrong.append(f"{uid}: versions {found} do not rise from {step.policy_version}")
        if not all(v in versions for v in found):
            wrong.append(f"{uid}: versions {found} were never published")
        if answered.get(uid) != n:
            wrong.append(f"{uid}: {n} ids, but {answered.get(uid)} were answered")
    return wrong


async def run(
    *,
    requests: Annotated[int, "in flight all the time"] = 200,
    updates: Annotated[int, "of weights, in each mode"] = 20,
) -> BenchResult:
    """A column of figures for each pause mode."""
    result = BenchResult()
    columns: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        model = endless_model(Path(folder))
        async with (
            engine(model, Path(folder) / "engine.log") as running,
            Updates.to(model, Path(folder)) as published,
        ):
            version = 1
            for each in MODES:
                figures = await update_under_load(
                    running.url,
                    published,
                    each,
                    n_requests=requests,
                    n_updates=updates,
                    first_version=version,
                )
                version += updates
                result.zero(**{f"{each}_problems": len(figures["problems"])})
                columns[each] = figures | {"problems": "; ".join(figures["problems"][:SHOWN])}
    result.figures["by pause mode"] = [
        {"figure": name, **{each: column[name] for each, column in columns.items()}}
        for name in columns[MODES[0]]
    ]
    result.figures["seconds of pause by transport"] = [
        {
            "transport": name,
            "updates": len(spent),
            "median": round(median(spent), 3),
            "longest": round(max(spent), 3),
        }
        for name, spent in published.pauses.items()
    ]
    return result

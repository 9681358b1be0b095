"""`python -m benchmarks path`: how many concepts one turn and two optimizer steps walk through.

    turn     second, non-streamed turn of a conversation: from the request to its answer, and to its
             Step in the pool's journal
    lease    two groups of the trainer: from the request to their Steps
    settle   the ack of these groups
    train    two optimizer steps and one publication: from leased groups to served weights, with the
             producer that draws the next prompts

Gateway, pool and trainer run in this process, where `sys.setprofile` sees them. The pool has its
journal and is reached through its socket. A turn's engine answers by a script, agents are replaced
by fixed Steps; weights are published to an embedded engine in a process of its own. Each path is
walked several times and what all walks share is counted, so timers do not change the figures.

    functions   own functions with a name; nested ones, lambdas and comprehensions do not count
    files       files that define these functions
    types       own classes that the path makes instances of

`--functions` lists the functions, too; `--write` writes the types to `docs/design/one-step.md`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import and_
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias, cast
from unittest.mock import patch

import aiohttp
import numpy as np
import uvicorn

from benchmarks.checks import BenchResult
from benchmarks.gateway.engine import Answers, Connection, Server
from benchmarks.served import MODEL, engine
from stepwell.backends.engines import connections
from stepwell.backends.engines.client import EngineClient
from stepwell.cluster.parts import Parts
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.datapool import DataPoolClient, PoolConfig, Step
from stepwell.datapool.remote import wire
from stepwell.datapool.remote.lease_keeper import LeaseKeeper
from stepwell.datapool.remote.service import PoolService
from stepwell.datapool.remote.shard import RemoteShard
from stepwell.datapool.types import TRAIN
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.server import http_protocol
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.run.trainer import build_trainer
from stepwell.trainer.config import DataConfig
from stepwell.trainer.data import PromptSource
from stepwell.trainer.rollout.worker import WorkerHandle

ROOT = Path(__file__).resolve().parents[1]
OWN = "stepwell."
ROOMS = ("gateway", "datapool", "trainer", "backends")
NODE = "this node"
WALKS = 5
"""Walks of each path that are compared, after one that fills the caches."""
CALM_S = 0.04
"""Time given to a path after its answer: what it leaves to the event loop belongs to it."""
GROUPS, ROLLOUTS = 2, 2

PAGE = ROOT / "docs/design/one-step.md"
HEADINGS = {"turn": "Types of one turn", "train": "Shapes of two optimizer steps"}
"""Sections of the page that list the types of a path, in a code block."""

PathName: TypeAlias = Literal["turn", "lease", "settle", "train"]


@dataclass(frozen=True)
class Walk:
    """Functions (`room/file.py:Class.name`) and types (`room/file.py:Class`) seen on a path."""

    functions: set[str] = field(default_factory=set)
    types: set[str] = field(default_factory=set)

    def __and__(self, other: Walk) -> Walk:
        return Walk(self.functions & other.functions, self.types & other.types)

    def files(self, rooms: Collection[str] = ROOMS) -> list[str]:
        """Files of these rooms."""
        files = {name.partition(":")[0] for name in self.functions}
        return sorted(file for file in files if file.partition("/")[0] in rooms)

    def shapes(self) -> list[str]:
        """Types of trainer and backends, and the pool's nouns."""
        known = ("trainer/", "backends/", "datapool/types.py")
        return sorted(name for name in self.types if name.startswith(known))


async def run(
    *, only: Sequence[PathName] = (), functions: bool = False, write: bool = False
) -> BenchResult:
    result = BenchResult()
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as folder:
        walks = await walk_all(Path(folder), only)
    result.figures["paths"] = [_row(name, walk) for name, walk in walks.items()]
    for name, walk in walks.items():
        types = walk.shapes() if name == "train" else walk.types
        result.figures[f"types of {name}"] = by_file(types)
        if functions:
            result.figures[f"functions of {name}"] = by_file(walk.functions)
        if write and name in HEADINGS:
            write_list(HEADINGS[name], types)
    if "turn" in walks:
        turn = walks["turn"]
        result.at_most("functions_of_a_turn", len(turn.functions), 240)
        result.at_most("files_of_a_turn", len(turn.files()), 44)
        result.at_most("files_of_a_turn_in_the_pool", len(turn.files(["datapool"])), 19)
        result.at_most("types_of_a_turn", len(turn.types), 34)
    if "lease" in walks:
        result.at_most("files_of_a_lease", len(walks["lease"].files()), 21)
    if "settle" in walks:
        result.at_most("files_of_a_settle", len(walks["settle"].files()), 19)
    if "train" in walks:
        train = walks["train"]
        result.at_most("files_of_two_steps", len(train.files(["trainer", "backends"])), 43)
        result.at_most("shapes_of_two_steps", len(train.shapes()), 26)
    return result


async def walk_all(folder: Path, only: Collection[PathName] = ()) -> dict[str, Walk]:
    """Return the paths named in `only`, or all, by name. `folder` holds the pools' journals."""
    walks: dict[str, Walk] = {}
    with Tracer().installed() as tracer:
        if not only or "turn" in only:
            walks["turn"] = await _turn(tracer, folder / "turn")
        if not only or "lease" in only or "settle" in only:
            leased, settled = await _lease_and_settle(tracer, folder / "lease")
            walks |= {"lease": leased, "settle": settled}
        if not only or "train" in only:
            walks["train"] = await _train(tracer, folder / "train")
    return {name: walk for name, walk in walks.items() if not only or name in only}


def by_file(names: Collection[str]) -> list[dict[str, str]]:
    """Rows of a table: a file, and the names in it."""
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        file, _, short = name.partition(":")
        files.setdefault(file, []).append(short)
    return [{"file": file, "names": ", ".join(short)} for file, short in files.items()]


def listed(names: Collection[str]) -> str:
    """The lines of the page that list these types."""
    return "\n".join(f"{row['file']:<45} {row['names']}" for row in by_file(names))


def list_on_page(heading: str) -> re.Match[str]:
    """The code block below a heading of the page, its lines as group 1."""
    found = re.search(rf"^## {heading}\n.*?^```\n(.*?)\n```$", PAGE.read_text(), re.M | re.S)
    if found is None:
        raise ValueError(f"{PAGE} has no list below {heading!r}")
    return found


def write_list(heading: str, names: Collection[str]) -> None:
    start, end = list_on_page(heading).span(1)
    text = PAGE.read_text()
    PAGE.write_text(text[:start] + listed(names) + text[end:])


def _row(name: str, walk: Walk) -> dict[str, Any]:
    rooms = Counter(file.partition("/")[0] for file in walk.files())
    return {
        "path": name,
        "functions": len(walk.functions),
        "files": len(walk.files()),
        **{room: rooms[room] for room in ROOMS},
        "types": len(walk.types),
    }


# -- tracing ----------------------------------------------------------------------------------


class Tracer:
    """Records walks in this thread and in those that begin while it is installed."""

    def __init__(self) -> None:
        self._walk: Walk | None = None
        self._old: dict[int, Any] = {}
        """Own objects older than the tracer, by id."""
        self._known: dict[int, Any] = {}
        """Own objects older than the walk, by id; referenced, so that no id is used again."""
        self._files: dict[str, str] = {}

    @contextmanager
    def installed(self) -> Iterator[Tracer]:
        """Profile threads that begin inside the block."""
        threading.setprofile(self._on_event)
        frozen = gc.get_freeze_count() > 0  # frozen objects are not in `gc.get_objects`
        gc.unfreeze()
        self._old = {id(each): each for each in _own_objects()}
        gc.freeze()  # millions of objects: each walk looks only at those that were made since
        try:
            yield self
        finally:
            threading.setprofile(None)
            self._old = {}
            if not frozen:
                gc.unfreeze()

    async def walk(self, go: Callable[[], Awaitable[object]]) -> Walk:
        """Return what `go`, and what it leaves to the event loop, walks through."""
        walk = Walk()
        self._known = self._old | {id(each): each for each in _own_objects()}
        await asyncio.sleep(CALM_S)  # the search stood in the way of what was due meanwhile
        self._walk = walk
        sys.setprofile(self._on_event)
        try:
            await go()
            await asyncio.sleep(CALM_S)
        finally:
            sys.setprofile(None)
            self._walk = None
            self._known = {}
        return walk

    def _on_event(self, frame: FrameType, event: str, value: Any) -> None:
        walk, code = self._walk, frame.f_code
        if walk is None or event not in ("call", "return"):
            return
        file = self._file_of(code.co_filename)
        if file and "<" not in code.co_qualname:
            walk.functions.add(f"{file}:{code.co_qualname}")
        # Constructors that dataclasses and named tuples generate are in no file.
        if event == "return" and (file or code.co_name in ("__init__", "__new__")):
            for each in (*frame.f_locals.values(), value):
                for made in each if type(each) in (list, tuple) else (each,):
                    if _is_own(type(made)) and id(made) not in self._known:
                        kind = type(made)
                        module = kind.__module__.removeprefix(OWN).replace(".", "/")
                        walk.types.add(f"{module}.py:{kind.__qualname__}")

    def _file_of(self, name: str) -> str:
        """Return `room/file.py`, or an empty string for files that are not ours."""
        if name not in self._files:
            path = Path(name).resolve()
            own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS
            self._files[name] = str(path.relative_to(ROOT)) if own else ""
        return self._files[name]


def _own_objects() -> Iterator[Any]:
    """Instances of own classes, also those that the garbage collector does not track."""
    tracked = gc.get_objects()
    found = [*_own(tracked), *_own(gc.get_referents(*tracked))]
    while found:
        yield from found
        fields = ((each, name) for each in found for name in _untracked_fields(each))
        found = _own([getattr(each, name, None) for each, name in fields])


def _own(values: Sequence[Any]) -> list[Any]:
    """The own ones of millions of objects: their few types are looked at once."""
    kinds = {kind for kind in set(map(type, values)) if _is_own(kind)}
    return [each for each in values if type(each) in kinds]


def _is_own(kind: type) -> bool:
    module = kind.__module__
    return isinstance(module, str) and module.startswith(OWN)


def _untracked_fields(value: Any) -> tuple[str, ...]:
    """Fields of a msgspec Struct that the garbage collector does not look into."""
    return () if gc.is_tracked(value) else getattr(type(value), "__struct_fields__", ())


# -- paths ------------------------------------------------------------------------------------


async def _turn(tracer: Tracer, folder: Path) -> Walk:
    walks = []
    tokenizer = ChatTokenizer.load(str(MODEL))
    async with (
        _lasting_connections(),
        scripted_engine(tokenizer) as engine_url,
        served_pool(PoolConfig(), folder) as pool,
        gateway(pool, engine_url, tokenizer) as origin,
        aiohttp.ClientSession(origin, raise_for_status=True) as session,
    ):
        for k in range(WALKS + 1):
            conversation = Conversation(session, f"t{k}", f"p{k}")
            await conversation.turn(f"What is {k} + 7?")
            walks.append(await tracer.walk(partial(conversation.turn, "And twice that?")))
            (row,) = (await pool.read_trajectories(trajectory_uid=f"t{k}")).unpack()
            if len(row.trajectory.steps) != 2:
                raise RuntimeError(f"the pool has {len(row.trajectory.steps)} Steps of two turns")
    return reduce(and_, walks[1:])


@asynccontextmanager
async def _lasting_connections() -> AsyncIterator[None]:
    """However busy the machine, the second turn has the first one's connection to the engine."""
    with patch.object(connections, "IDLE_S", 600.0):
        yield


async def _lease_and_settle(tracer: Tracer, folder: Path) -> tuple[Walk, Walk]:
    leases, settles = [], []
    async with served_pool(PoolConfig(), folder) as pool:
        keeper = LeaseKeeper(pool, TRAIN, lease_s=600.0)
        for k in range(WALKS + 1):
            uids = [f"p{k}-{i}" for i in range(GROUPS)]
            for uid in uids:
                await pool.open_group(uid, ROLLOUTS)
                await submit_group(pool, uid)
            leases.append(await tracer.walk(partial(keeper.lease, GROUPS)))
            settles.append(await tracer.walk(partial(keeper.settle, uids)))
    return reduce(and_, leases[1:]), reduce(and_, settles[1:])


async def _train(tracer: Tracer, folder: Path) -> Walk:
    config = train_config(folder)
    every = config.async_training.trigger_parameter_sync_step
    if every != 2 or config.data is None or config.data.train is None:
        raise RuntimeError(f"the quickstart publishes every {every} optimizer steps, not every 2")
    source = PromptSource(config.data.train)
    walks = []
    async with (
        engine(MODEL, folder / "engine.log") as process,
        EngineClient(process.url) as client,
        served_pool(PoolConfig(channels=config.trained_channels), folder / "pool") as pool,
    ):
        workers = [cast(WorkerHandle, FixedRollouts(pool))]
        parts = Parts(pool=pool, engines=[client], workers=workers)
        with build_trainer(config, parts, source) as trainer:
            await trainer.resume()
            async with aclosing(trainer.train(every * (WALKS + 2))) as steps:

                async def two_steps() -> None:
                    await anext(steps)
                    await anext(steps)
                    await trainer.publisher.wait_published()

                for _ in range(WALKS + 1):
                    walks.append(await tracer.walk(two_steps))
            if (version := await client.weight_version()) < WALKS:
                raise RuntimeError(f"the engine serves version {version}")
    return reduce(and_, walks[1:])


# -- what they walk through -------------------------------------------------------------------


@dataclass
class Conversation:
    """Agent that sends the whole conversation in each turn."""

    session: aiohttp.ClientSession
    trajectory_uid: str
    prompt_uid: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def turn(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self.messages, "max_tokens": 64}
        path = f"/{self.trajectory_uid}/{self.prompt_uid}/v1/chat/completions"
        async with self.session.post(path, json=body) as response:
            self.messages.append((await response.json())["choices"][0]["message"])


@dataclass
class FixedRollouts:
    """Rollout worker whose agents are replaced by the same Steps each time."""

    pool: DataPoolClient

    async def ready(self) -> None:
        return

    async def run_group(
        self, task: object, prompt_uid: str, n: int, channel: str = TRAIN, n_greedy: int = 0
    ) -> dict[str, int]:
        await submit_group(self.pool, prompt_uid)
        return {"complete": n}


async def submit_group(pool: DataPoolClient, prompt_uid: str) -> None:
    """Submit `ROLLOUTS` complete trajectories of two Steps each, with rewards 0 and 1."""
    prompt, response = list(range(10, 30)), list(range(40, 50))
    for k in range(ROLLOUTS):
        uid = f"{prompt_uid}-{k}"
        for index, ids in enumerate((prompt, [*prompt, *response, 5, 6, 7])):
            step = Step(
                prompt_ids=np.array(ids, np.int32),
                response_ids=np.array(response, np.int32),
                rollout_log_probs=np.full(len(response), -6.0, np.float32),
                trajectory_uid=uid,
                prompt_uid=prompt_uid,
                step_index=index,
                parent_index=index - 1 if index else None,
            )
            await pool.submit_step(step)
        await pool.complete_trajectory(uid, float(k % 2))


def train_config(folder: Path) -> RunConfig:
    """The quickstart on questions of a file, with small batches."""
    folder.mkdir()
    file = folder / "train.jsonl"
    rows = [{"question": f"{i} + 7?", "answer": str(i + 7), "instance_id": i} for i in range(500)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        "quickstart",
        [
            f"run.dir={folder}",
            f"rollout.n={ROLLOUTS}",
            f"trainer.train_batch_size={GROUPS}",
            "trainer.checkpoint_every=1000",
            "validation.every=0",
            "logging.wandb=disabled",
        ],
    )
    data = {"train": {"kind": "jsonl", "path": str(file), "epochs": 1, "shuffle": False}}
    return config.model_copy(update={"data": DataConfig.model_validate(data)})


@asynccontextmanager
async def scripted_engine(tokenizer: ChatTokenizer) -> AsyncIterator[str]:
    """The URL of an engine in this loop that gives every prompt the same answer."""
    end = tokenizer.special[tokenizer.template.special_tokens["eos_token"]]
    ids = [*tokenizer.encode("That makes 14.").tolist(), end]
    answer = {
        "ids": ids,
        "log_probs": [-0.5] * len(ids),
        "pieces": [""] * len(ids),
        "prompt_ids": [0],
        "tokenizer_path": str(MODEL),
    }
    server = Server(Answers(answer))
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


class _ToServer(RemoteShard):
    """Connection to a pool whose address is known."""

    def __init__(self, address: wire.PoolAddress) -> None:
        super().__init__(None)
        self._address = address

    async def find(self) -> tuple[wire.PoolAddress, str]:
        return self._address, NODE


@asynccontextmanager
async def served_pool(config: PoolConfig, folder: Path) -> AsyncIterator[DataPoolClient]:
    """A client of a pool in this loop: through its socket, with the journal of `folder`."""
    service = PoolService(config, folder)
    server = wire.Server(service, NODE)
    client = DataPoolClient([_ToServer(await server.address())])
    try:
        yield client
    finally:
        await client.close()
        server.close()
        service.close()


@asynccontextmanager
async def gateway(
    pool: DataPoolClient, engine_url: str, tokenizer: ChatTokenizer
) -> AsyncIterator[str]:
    """The origin of a gateway in this loop."""
    config = GatewayConfig(port=0, tokenizer_path=str(MODEL))
    app = create_app(config, Wiring((engine_url,)), pool, tokenizer)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=http_protocol(config),
            ws="none",
            timeout_keep_alive=75,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
        )
    )
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()  # `serve` would also take the process's signals
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        await server.shutdown()

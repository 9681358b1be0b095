"""This module looks for what keeps a run from working, or makes it slow, and says how to mend it:
`stepwell doctor`.

    this machine      Python, packages, torch and its device, a Ray that starts, disk
    a configuration   all that `stepwell train` checks; tokenizer, chat template, calls of tools
    a live run        the same, and that gateway and engines answer
    a run's folder    the files that a run goes on from, and what became of its score

A `problem` has to be mended, a `warning` costs speed or surprises. Owns what is looked at and the
words. Does not own the checks of a configuration (`run/checks.py`), which look at no running part.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.client import EngineClient
from stepwell.backends.engines.kinds import connect
from stepwell.backends.errors import BackendError, EngineError
from stepwell.backends.model_folder import read_object
from stepwell.backends.weights.store import read_current
from stepwell.cluster.ray import connected
from stepwell.config.run import RunConfig
from stepwell.datapool.errors import DataPoolError
from stepwell.errors import RunUnavailableError
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import GatewayError
from stepwell.gateway.reply.reader import ReplyFormat
from stepwell.gateway.tokens.graph import Turn
from stepwell.gateway.tokens.messages import Message
from stepwell.gateway.tokens.render import ChatRenderer, CutError
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from stepwell.layout import CHECKPOINTS, RUN_FILE, WEIGHTS
from stepwell.run.checks import check_run
from stepwell.run.folder import ANSWER_S, PACKAGES, RunFile, holder, read_run
from stepwell.track.collapse import find_collapse
from stepwell.trainer.errors import TrainerError
from stepwell.trainer.ledger import LEDGER, read_ledger
from stepwell.trainer.metrics import METRICS, read_metrics
from stepwell.version import lack_of, required, versions

State: TypeAlias = Literal["ok", "warning", "problem"]

SIGNS: dict[State, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✗", "red"),
}
KNOWN = (TrainerError, BackendError, GatewayError, DataPoolError, RunUnavailableError, OSError)
WRITE_BYTES = 64 << 20
SLOW_DISK = 50e6
"""Bytes per second below which checkpoints and weights are waited for."""
SLOW_SYNC_S = 0.05
"""A journal with durability `power` waits so long for each commit."""
FEW_BYTES = 10e9
SHM = Path("/dev/shm")
TALK: list[Message] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Are you sure?"},
]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    state: State
    text: str
    remedy: str = ""


Check: TypeAlias = Callable[[], Iterable[Finding]]


def examine(config: RunConfig | None, run: RunFile | None, folder: Path) -> Iterator[Finding]:
    """The findings, one after the other.

    Args:
        config: to look at; None: only the machine is.
        run: it is alive, and of this configuration.
        folder: in which a run writes, wrote or would write.
    """
    checks: list[tuple[str, Check]] = [
        ("python", python),
        ("packages", packages),
        ("torch", lambda: torch_device(config)),
        ("disk", lambda: disk(folder, config)),
    ]
    if run is None:
        checks.append(("ray", lambda: ray_starts(config)))
    if config is not None:
        model = str(config.model.path)
        path = config.gateway.tokenizer_path or model
        if run is None:
            checks.append(("configuration", lambda: configuration(config)))
        else:
            model, path = run.found(model), run.found(path)
        checks.append(("tokenizer", lambda: tokenizer(path, Path(model))))
        checks.append(("template", lambda: chat_template(path)))
        checks.append(("tools", lambda: tool_calls(path, config.gateway)))
        if config.engine.is_attached and run is None:
            checks.append(("engine", lambda: engines(config.engine, attached(config.engine))))
    if run is not None:
        checks.append(("gateway", lambda: gateways(run)))
        urls = () if run.engines is None else run.engines.urls
        engine = EngineConfig.model_validate(run.config["engine"])
        checks.append(("engine", lambda: engines(engine, urls)))
    if (folder / RUN_FILE).is_file():
        checks.append(("files", lambda: files(folder)))
    if (folder / METRICS).is_file():
        checks.append(("learning", lambda: learning(folder / METRICS)))
    for name, check in checks:
        try:
            yield from check()
        except KNOWN as e:  # its message has the remedy
            for line in str(e).splitlines():
                text, _, remedy = line.partition("; ")
                yield Finding(name, "problem", text, remedy)


# -- the machine -------------------------------------------------------------------------------


def python() -> Iterator[Finding]:
    where = f"{platform.python_version()} in {sys.prefix}"
    yield Finding("python", "ok", where)


def packages() -> Iterator[Finding]:
    """Packages that pyproject.toml requires are installed."""
    try:
        needed = required()
    except metadata.PackageNotFoundError:
        yield Finding("packages", "warning", "stepwell is not installed", "pip install -e .")
        return
    wrong = [(each, what) for each in needed if (what := lack_of(each)) is not None]
    for requirement, what in wrong:
        told = f"{requirement.name} {what}, not {requirement.specifier}"
        yield Finding("packages", "problem", told, f"pip install '{requirement}'")
    if not wrong:
        known = [
            f"{name} {version}" for name, version in versions(PACKAGES).items() if name in PACKAGES
        ]
        yield Finding("packages", "ok", f"all {len(needed)} are there; {', '.join(known)}")


def torch_device(config: RunConfig | None) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as e:  # OSError: a library of its own that is not found
        why = next(iter(str(e).splitlines()), type(e).__name__)
        remedy = "install it anew (docs/install.md)"
        yield Finding("torch", "problem", f"it cannot be imported ({why})", remedy)
        return

    from stepwell.backends.engines.commands import has_gpu

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("torch", "ok", f"{torch.__version__}, {len(names)} GPUs: {names[0]}")
    elif has_gpu():
        yield Finding(
            "torch",
            "problem",
            f"{torch.__version__} sees no GPU, but this machine has one",
            "install a torch for this driver (`nvidia-smi` shows its CUDA version)",
        )
    else:
        threads = torch.get_num_threads()
        yield Finding("torch", "ok", f"{torch.__version__} on the CPU, {threads} threads")
        dtypes = {}
        if config is not None:
            dtypes = {"backend.dtype": config.backend.dtype, "engine.dtype": config.engine.dtype}
        half = [key for key, dtype in dtypes.items() if dtype == "bfloat16"]
        if half and (factor := bfloat16_by_float32()) > 1:
            yield Finding(
                "torch",
                "warning",
                f"{' and '.join(half)} = bfloat16 takes {factor:.1f} × float32's time on this CPU",
                " ".join(f"{key}=float32" for key in half),
            )


def bfloat16_by_float32() -> float:
    """Time of a matrix product in bfloat16 by that in float32. Few CPUs compute in it."""
    import torch

    took = []
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.ones(256, 576, dtype=dtype), torch.ones(576, 1536, dtype=dtype)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            torch.matmul(a, b)
            times.append(time.perf_counter() - began)
        took.append(min(times))
    return took[0] / took[1]


def disk(folder: Path, config: RunConfig | None) -> Iterator[Finding]:
    """Space and speed where a run writes."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
    usage = shutil.disk_usage(there)
    probe = there / f".stepwell-doctor-{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            block = os.urandom(1 << 20)
            began = time.monotonic()
            for _ in range(WRITE_BYTES >> 20):
                file.write(block)
            os.fsync(file.fileno())
            speed = WRITE_BYTES / (time.monotonic() - began)
            syncs = [_sync_s(file.fileno()) for _ in range(16)]
    finally:
        probe.unlink(missing_ok=True)
    sync_s = statistics.median(syncs)
    told = (
        f"{there}: {usage.free / 1e9:,.0f} GB free, {speed / 1e6:,.0f} MB/s, "
        f"{sync_s * 1000:.1f} ms per sync"
    )
    if usage.free < FEW_BYTES:
        yield Finding(
            "disk", "warning", told, "free space, or set run.dir; checkpoints and weights are here"
        )
    elif speed < SLOW_DISK:
        yield Finding("disk", "warning", told, "set run.dir to a local disk: weights go through it")
    elif sync_s > SLOW_SYNC_S and config is not None and config.pool.durability == "power":
        yield Finding(
            "disk", "warning", told, "set pool.journal_dir to a local disk, or durability=process"
        )
    else:
        yield Finding("disk", "ok", told)


def _sync_s(file: int) -> float:
    began = time.monotonic()
    os.write(file, b"x" * 4096)
    os.fsync(file)
    return time.monotonic() - began


def ray_starts(config: RunConfig | None) -> Iterator[Finding]:
    """A Ray of our own, or the one that is configured."""
    address = None if config is None else config.cluster.address
    size = 256 if config is None else config.cluster.object_store_mb
    if address is None and SHM.is_dir() and shutil.disk_usage(SHM).free < size << 20:
        yield Finding(
            "ray",
            "warning",
            f"{SHM} has {shutil.disk_usage(SHM).free >> 20} MB free, Ray's store takes {size} MB",
            "give it more (`docker run --shm-size=1g`), or lower cluster.object_store_mb",
        )
    began = time.monotonic()
    with connected(address, f"stepwell-doctor-{os.getpid()}", size):
        where = "starts" if address is None else f"at {address} answers"
        yield Finding("ray", "ok", f"{where} in {time.monotonic() - began:.1f} s")


# -- a configuration ---------------------------------------------------------------------------


def configuration(config: RunConfig) -> Iterator[Finding]:
    check_run(config)
    yield Finding("configuration", "ok", f"{config.run.dir}: everything that it names is there")


def tokenizer(path: str, model: Path) -> Iterator[Finding]:
    """The model knows every id of the tokenizer, and stops where the template ends a turn."""
    known = ChatTokenizer.load(path)
    settings = _json(model / "config.json")
    text = settings.get("text_config") or settings
    size = text.get("vocab_size")
    own = 1 + max(known.special.values(), default=0)
    if size is not None and known.vocabulary > size:
        yield Finding(
            "tokenizer",
            "problem",
            f"{path} has ids up to {known.vocabulary - 1}, the model {size} rows (vocab_size)",
            "take the tokenizer of this model (gateway.tokenizer_path)",
        )
        return
    close = ChatRenderer(known).turn_close_id
    ends = {*_ids(text.get("eos_token_id")), *_ids(settings.get("eos_token_id"))}
    ends |= {*_ids(_json(model / "generation_config.json").get("eos_token_id"))}
    if close is not None and ends and close not in ends:
        yield Finding(
            "tokenizer",
            "warning",
            f"the template ends a turn with id {close}, the model stops at {sorted(ends)}: "
            "replies would run on to max_tokens",
            f"put {close} into eos_token_id of {model / 'generation_config.json'}",
        )
        return
    sizes = f"{size} rows" if size is not None else f"ids up to {own - 1}"
    yield Finding("tokenizer", "ok", f"{path}: the model's, {sizes}, a turn ends with id {close}")


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, f"the model in {path.parent}") if path.is_file() else {}


def _ids(value: Any) -> Iterable[int]:
    return () if value is None else value if isinstance(value, list) else (value,)


def chat_template(path: str) -> Iterator[Finding]:
    """A second turn extends the first one, and is what the template writes of the whole."""
    known = ChatTokenizer.load(path)
    renderer = ChatRenderer(known)
    if renderer.turn_close_id is None:
        yield Finding(
            "template",
            "warning",
            "it ends assistant turns with no special token: every later turn becomes a branch, "
            "which is trained on its own",
            "take the instruct model's chat_template.jinja",
        )
        return
    prompt = renderer.whole(TALK[:1], None, {})
    reply = [*known.encode(str(TALK[1]["content"])).tolist(), renderer.turn_close_id]
    response = np.asarray(reply, np.int32)
    turn = Turn(None, prompt, response, len(prompt) + len(response), (), False, 0)
    try:
        new = renderer.suffix(turn, TALK[:2], TALK[2:], None, {})
    except CutError as e:
        yield Finding(
            "template",
            "warning",
            f"a second turn cannot extend the first ({e.cause}): it becomes a branch",
            "take the model's own chat_template.jinja",
        )
        return
    extended = known.decode([*prompt.tolist(), *reply, *new.tolist()])
    whole = known.decode(renderer.whole(TALK, None, {}).tolist())
    if extended != whole:
        yield Finding(
            "template",
            "warning",
            f"what a second turn is shown ({extended[-60:]!r}) is not what the template writes of "
            f"the whole ({whole[-60:]!r}); the first is what is trained",
            "none is needed where the template drops or adds thoughts; else take the model's own",
        )
        return
    yield Finding("template", "ok", f"a second turn extends the first, {len(new)} tokens")


def tool_calls(path: str, gateway: GatewayConfig) -> Iterator[Finding]:
    """The gateway reads calls of tools as the template writes them."""
    known = ChatTokenizer.load(path)
    replies = ReplyFormat(known, gateway)
    if gateway.tool_parser == "none":
        yield Finding("tools", "ok", "calls of tools are text: gateway.tool_parser is none")
    elif not ChatRenderer(known).shows_tools:
        yield Finding(
            "tools",
            "warning",
            "the template leaves tools out",
            "none is needed where agents have no tools; else take the model's own",
        )
    elif not replies.reads_calls:
        yield Finding(
            "tools",
            "warning",
            "calls of tools as the template writes them are none that gateway.tool_parser "
            f"{gateway.tool_parser} reads: agents get them as text",
            "none is needed where agents have no tools; else take a model that writes calls in one "
            "of the forms of gateway.tool_parser",
        )
    else:
        yield Finding("tools", "ok", f"calls of tools are read as {replies.style}")


def files(folder: Path) -> Iterator[Finding]:
    """The files that the run in `folder` would go on from, but for its journal and the tensors.

    Raises:
        DamagedFileError: one of them is not what was written.
    """
    read_run(folder)
    current = read_current(folder / WEIGHTS)
    ledger = folder / CHECKPOINTS / LEDGER
    n = len(read_ledger(ledger)) if ledger.is_file() else 0
    served = "no version was published" if current is None else f"version {current.version}"
    state = "has ended" if holder(folder) is None else "is alive"
    yield Finding("files", "ok", f"the run {state}; {served}, {n} entries in its ledger")


def learning(metrics: Path) -> Iterator[Finding]:
    """The score of the run, alive or ended, that wrote `metrics`."""
    records = read_metrics(metrics, first=0)
    if finding := find_collapse(records):
        remedy = (
            "lower backend.lr and start over from weights of before (model.path=RUN/weights/vN)"
        )
        yield Finding("learning", "warning", finding, remedy)
    elif records:
        yield Finding("learning", "ok", f"{records[-1]['step']} optimizer steps, no collapse")


# -- what runs ---------------------------------------------------------------------------------


def gateways(run: RunFile) -> Iterator[Finding]:
    if (gateway := run.gateway) is None:
        return
    for url in gateway.urls:
        try:
            state = gateway.ask(url, "/ready")
        except OSError as e:
            yield Finding("gateway", "problem", f"{url} is not ready: {e}", "see logs/gateway.log")
        else:
            context = state["context_length"]
            yield Finding("gateway", "ok", f"{url} is ready, context {context:,} tokens")


def attached(config: EngineConfig) -> Sequence[str]:
    """Urls of the engines to attach to."""
    if config.router_url is None:
        return config.urls
    url = config.router_url

    async def ask() -> list[str]:
        async with EngineClient(url, timeout_s=ANSWER_S) as router:
            return [worker.url for worker in await router.workers()]

    return asyncio.run(ask())


def engines(config: EngineConfig, urls: Iterable[str]) -> Iterator[Finding]:
    async def ask(url: str) -> str:
        async with connect(config, url, timeout_s=ANSWER_S) as engine:
            about = await engine.about()
            path = about.model_path and f"{about.model_path}, "
            return f"{url}: {path}weights {about.name}"

    for url in urls:
        try:
            told = asyncio.run(ask(url))
        except (EngineError, ValueError, LookupError) as e:
            yield Finding(
                "engine",
                "problem",
                f"{url} does not answer: {e}",
                "start it, correct engine.urls, or see logs/engine.log",
            )
        else:
            yield Finding("engine", "ok", told)


# -- for people --------------------------------------------------------------------------------


def finding_line(finding: Finding, width: int = 13) -> RenderableType:
    """A line, and its remedy below it; `width` is the names'."""
    sign, style = SIGNS[finding.state]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column(width=width)
    line.add_column()
    text = Text(finding.text)
    if finding.remedy:
        text.append(f"\n→ {finding.remedy}", "bold")
    line.add_row(Text(sign, style), Text(finding.name, style), text)
    return line


def verdict(findings: Iterable[Finding]) -> RenderableType:
    states = [finding.state for finding in findings]
    problems, warnings = states.count("problem"), states.count("warning")
    if not problems and not warnings:
        return Text("\nno problem was found", "green")
    told = [
        f"{n} {word}{'s' * (n > 1)}"
        for n, word in ((problems, "problem"), (warnings, "warning"))
        if n
    ]
    return Group("", Text(", ".join(told), "red" if problems else "yellow"))

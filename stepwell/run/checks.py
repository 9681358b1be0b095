"""This module checks a run before anything of it is started, so that a mistake is told in one line
within seconds and costs nothing that was there.

    1  the run's folder        is it free, and can it be written?                  milliseconds
    2  files, ports, devices   model, memory, engine, what logs go to              milliseconds
    3  the data                every row is read
    4  foreign code            agent, rewards, selections, plug-ins are imported   as they take
    5  the checkpoint          is it there, and of this model and data?
    6  the architecture        is it one of transformers'?                         loads torch

The mistakes of one stage are told together; a later stage is only looked at when the one before has
none. Rooms know what is right for them (`trainer/rollout/agents.py`, `trainer/data/`,
`backends/model_folder.py`, …); here stands what is asked, in which order, of which key.

Does not own what the configuration alone shows (`config/run.py`), nor what only a running system
can know: whether an engine's url answers, whether the cluster has room. Imports neither torch
nor Ray, unless the configuration names code that does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from stepwell.backends.engines.commands import Launch, has_gpu
from stepwell.backends.engines.kinds import command_line, engine_class
from stepwell.backends.errors import BackendError
from stepwell.backends.masks import is_path, load_own
from stepwell.backends.model_folder import (
    check_architecture,
    check_tokenizer,
    check_weights,
    weight_bytes,
)
from stepwell.backends.torch.memory import LENT, MemoryEstimate, ModelShape, estimate
from stepwell.cluster.address import find_ray
from stepwell.cluster.engine_flags import engine_share
from stepwell.cluster.placement import Plan, machine, plan, trains_elsewhere, wanted_gpus
from stepwell.config.run import RunConfig
from stepwell.datapool.errors import DataPoolError
from stepwell.errors import RunUnavailableError
from stepwell.gateway.address import bind
from stepwell.gateway.errors import GatewayError, PortInUseError
from stepwell.layout import CHECKPOINTS, LOGS, POOL, WEIGHTS
from stepwell.run.folder import read_run, refuse_second_run, refuse_to_remove
from stepwell.run.resume import check_resumed, check_same_data
from stepwell.track.prometheus import check_address
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.config import DataConfig, HarborSource
from stepwell.trainer.data import PromptSource, Task, open_conversations
from stepwell.trainer.data.harbor import HarborTasks, refuse_image
from stepwell.trainer.errors import ConfigError, TrainerError
from stepwell.trainer.rewards.manager import RewardManager
from stepwell.trainer.rollout.agents import load_agent
from stepwell.trainer.rollout.harbor import BUILDS
from stepwell.trainer.sampling import GroupFilter

_KNOWN = (TrainerError, BackendError, GatewayError, DataPoolError)
_GB = 1e9
ENDS_S = 5.0
"""Processes of a run that was killed have ended within this, mostly (`cluster/guard.py`)."""

log = logging.getLogger(__name__)

Check = Callable[[RunConfig], None]


@dataclass(frozen=True, slots=True)
class Checked:
    """Data that the checks have read, so that nobody reads it again."""

    prompts: PromptSource | None
    """To train on; None: agents bring theirs."""
    conversations: PromptSource | None = None
    """To train on as they are; None: rollouts alone are trained."""


def check_run(config: RunConfig) -> Checked:
    """Everything that `stepwell train` needs.

    Raises:
        ConfigError: a line for each mistake, with the key, the value and the remedy.
    """
    if config.trainer.load_debug_rollout_data is not None:
        _all((recording,), config)
    else:
        _all((run_folder,), config)
        _all((folders, *(PARTS if config.serves else (ray_cluster, tokenizer))), config)
    return check_attached(config)


def check_attached(config: RunConfig) -> Checked:
    """Everything that `stepwell train --attach` needs: the trainer's part of it.

    Raises:
        ConfigError: as `check_run`.
    """
    _all((device, policy, wandb, tensorboard, prometheus), config)
    _all((memory,), config)
    data = config.data
    prompts = training_prompts(config) if config.has_tasks and config.sft_share < 1 else None
    conversations = None
    if data is not None and data.sft is not None:
        with named("data.sft"):
            conversations = open_conversations(data.sft, config.algorithm.sft, config.model.path)
    _all((agent, reward, backend, selections, loss_mask), config)
    if config.trainer.load_debug_rollout_data is None:
        _all((checkpoint,), config)
    from_batches = config.trainer.load_debug_rollout_data is not None
    if prompts is not None and not from_batches and (found := _resumed(config)) is not None:
        check_same_data(*found, len(prompts))
    _all((architecture,), config)
    return Checked(prompts, conversations)


def check_serving(config: RunConfig) -> None:
    """Everything that `stepwell serve` needs.

    Raises:
        ConfigError: as `check_run`.
    """
    if not config.serves:
        raise ConfigError("algorithm.kind is 'sft': nothing is served; use `stepwell train`")
    _all((run_folder, served_resume), config)
    _all((folders, *PARTS), config)
    _all((selections, loss_mask), config)


def _all(checks: Sequence[Check], config: RunConfig) -> None:
    """Raises ConfigError with the lines of all that fail."""
    lines = []
    for check in checks:
        try:
            check(config)
        except _KNOWN as e:
            lines += str(e).splitlines()
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


@contextmanager
def named(key: str) -> Iterator[None]:
    """Errors inside the block begin with `key`, which not every room knows."""
    try:
        yield
    except _KNOWN as e:
        raise ConfigError(str(e) if str(e).startswith(key) else f"{key}: {e}") from e


# -- folders ------------------------------------------------------------------------------------


def run_folder(config: RunConfig) -> None:
    _writable(config.run.dir, "run.dir")
    refuse_second_run(config.run.dir)
    refuse_to_remove(config)


def served_resume(config: RunConfig) -> None:
    if (resume := config.run.resume) not in ("auto", "never"):
        folder = config.run.dir
        raise ConfigError(
            f"run.resume is {resume}, which is for a trainer; leave it out, and give it to "
            f"`stepwell train --attach {folder}`. What is served goes on with the newest weights "
            f"(`stepwell rollback {folder} --to K` serves earlier ones)"
        )


def folders(config: RunConfig) -> None:
    """The run's folders can be written. Those in run.dir may be another user's, if root made it."""
    for name in (CHECKPOINTS, LOGS, WEIGHTS):
        _writable(config.run.dir / name, "run.dir")
    if config.pool.durability != "none":
        journal = config.pool.journal_dir
        _writable(
            config.run.dir / POOL if journal is None else journal,
            "run.dir" if journal is None else "pool.journal_dir",
        )
    if (record := config.trainer.save_debug_rollout_data) is not None:
        where = Path(record.partition("{")[0])
        _writable(where.parent if "{" in record else where, "trainer.save_debug_rollout_data")


def _writable(folder: Path, key: str) -> None:
    """It can be made and written; nothing is left of the try."""
    there = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as e:
        raise ConfigError(
            f"{key} is {str(folder)!r}, which cannot be written ({e.strerror}: {there}); name a "
            "folder that this user may make and write"
        ) from e


def _nearest(folder: Path) -> Path:
    """`folder`, or the nearest above it that is there."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(p))


# -- what listens and what computes ---------------------------------------------------------------


def ray_cluster(config: RunConfig) -> None:
    """The Ray to be joined answers."""
    if config.cluster.address is not None:
        find_ray(config.cluster.address)


def gateway_port(config: RunConfig) -> None:
    gateway = config.gateway
    if not _is_here(config):
        return
    for number in range(gateway.replicas if gateway.port else 1):
        _listen(config, gateway.host, gateway.port + number)


def _listen(config: RunConfig, host: str, port: int) -> None:
    """Listen there for a moment. If the last run in the folder did, its processes may be ending:
    it was killed just now.

    Raises:
        GatewayError: as `bind`.
    """
    give_up = time.monotonic() + (ENDS_S if port and port in _ports_before(config) else 0.0)
    while True:
        try:
            bind(host, port).close()
            return
        except PortInUseError:
            if time.monotonic() >= give_up:
                raise
        time.sleep(0.1)


def _ports_before(config: RunConfig) -> set[int | None]:
    """Ports of the last run in the folder."""
    try:
        last = read_run(config.run.dir)
    except (RunUnavailableError, DataPoolError):
        return set()
    parts = (last.gateway, last.engines)
    return {urlsplit(url).port for part in parts if part is not None for url in part.urls}


def engine_port(config: RunConfig) -> None:
    engine, count = config.engine, config.cluster.engines
    if engine.is_attached:
        return
    if engine.port and count > 1:
        raise ConfigError(
            f"engine.port is {engine.port}, but cluster.engines is {count}: they cannot share it; "
            "set engine.port to 0"
        )
    if _is_here(config):
        try:
            _listen(config, engine.host, engine.port)
        except PortInUseError as e:
            raise ConfigError(
                f"engine.port is {engine.port} on {engine.host}, which cannot be had "
                f"({getattr(e.__cause__, 'strerror', e)}); stop what uses it, or set "
                "engine.port to 0 for a free one"
            ) from e
        except GatewayError as e:
            raise ConfigError(
                f"engine.host is {engine.host!r} and engine.port is {engine.port}: "
                f"{getattr(e.__cause__, 'strerror', e)}; use an address of this machine, and a "
                "port that you may open"
            ) from e


def engine(config: RunConfig) -> None:
    """Its program is installed, what it loads is there, and it can do what is asked of it."""
    section = config.engine
    kind = engine_class(section.kind)
    kind.own_options(section.options)
    if section.weight_transport not in kind.transports:
        raise ConfigError(
            f"engine.weight_transport is {section.weight_transport!r}, and engine.kind "
            f"{section.kind!r} takes {' and '.join(kind.transports)}; choose one of those"
            f"{kind.why_not.get(section.weight_transport, '')}"
        )
    if section.release_memory and not kind.lends_memory:
        raise ConfigError(
            f"engine.release_memory is true, and engine.kind {section.kind!r} lends no memory; set "
            "it to false, and give engines GPUs of their own"
        )
    share = config.publish.canary_share
    if kind.is_behind_router and config.publish.guard is not None and share is not None:
        raise ConfigError(
            f"publish.canary_share is {share:g}, and before engines of engine.kind "
            f"{section.kind!r} a router chooses which of them answers a call, so none can try a "
            "version out; set it to null"
        )
    if section.is_attached:
        return
    path = section.model_path or config.model.path
    check_weights(path, "model.path" if path == config.model.path else "engine.model_path")
    if _is_here(config):
        command_line(section, Launch(port=1, model_path=str(path)))
    if section.python is not None and shutil.which(section.python) is None:
        raise ConfigError(
            f"engine.python is {section.python!r}, which is no program here; name an interpreter, "
            "or set it to null for this one"
        )


def tokenizer(config: RunConfig) -> None:
    path = config.gateway.tokenizer_path
    model = config.model.path
    if path is None or Path(path) == model:
        check_tokenizer(model)
    elif os.path.isdir(path):  # else the hub's, which the gateway looks up
        check_tokenizer(Path(path), "gateway.tokenizer_path")


def device(config: RunConfig) -> None:
    """A GPU where one is asked for; enough of them where there are some."""
    if not _is_here(config):
        return
    if not has_gpu():
        if config.backend.device == "cuda":
            raise ConfigError(
                "backend.device is 'cuda', but this machine shows no GPU (no /dev/nvidia*, or "
                f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}); set it to "
                "auto or cpu, or run where one is"
            )
        return
    nodes = machine()
    if config.backend.device == "cuda" and not nodes[0].gpus:
        import torch

        raise ConfigError(
            f"backend.device is 'cuda', but torch {torch.__version__} sees no GPU; install a torch "
            "for this driver (`nvidia-smi` shows its CUDA version), or set it to cpu"
        )
    plan(config, nodes)


def policy(config: RunConfig) -> None:
    """Weights of the policy, its reference and the critic are there."""
    check_weights(config.model.path)
    if config.backend.reference_path is not None:
        check_weights(config.backend.reference_path, "backend.reference_path")
    if config.algorithm.critic.path is not None and config.algorithm.estimator.critic:
        check_weights(config.algorithm.critic.path, "algorithm.critic.path")


def architecture(config: RunConfig) -> None:
    check_architecture(config.model.path)


def memory(config: RunConfig) -> None:
    """A training rank fits: states, the activations of the longest row, and the engine beside it.
    An estimate (`backends/torch/memory.py`), which what fragments can still exceed. On the CPU
    states alone are refused, and a warning is given of the rest: micro-batches need not be full."""
    if trains_elsewhere(config):
        return
    shape = ModelShape.read(config.model.path)
    shape.check_context(config.backend.context_parallel)
    if config.backend.ranks > 1 and not _is_here(config):
        return  # a single rank is this process
    on_gpu = config.backend.device != "cpu" and has_gpu()
    size = f"{shape.parameters / _GB:.2g}e9 parameters with backend.optimizer "
    size += config.backend.optimizer
    less = "take a smaller model, or backend.lora={rank: 16}"
    if on_gpu:
        if (has := gpu_bytes()) is None:
            return
        if _is_here(config):
            config = as_planned(config, plan(config, machine()))
        rank = rank_memory(config, shape, has)
        if rank.total + (LENT if config.engine.release_memory else 0) > has:
            raise ConfigError(
                f"model.path is {str(config.model.path)!r}: training {size} takes {rank} on each "
                f"of {config.backend.ranks} ranks, a GPU here has {has / _GB:.0f} GB; {less}, more "
                "backend.ranks, or a smaller backend.micro_batch_tokens"
            )
        if why := kept_beside_engine(config, rank, has):
            raise ConfigError(f"model.path is {str(config.model.path)!r}: a rank {why}")
        return
    engines = config.cluster.engines if config.engine.kind == "embedded" else 0
    rank = rank_memory(config, shape, None)
    beside = engines * weight_bytes(config.model.path)
    needed = config.backend.ranks * rank.total + beside
    has = _machine_bytes()
    if needed <= has:
        return
    of_engines = f" and {engines} × embedded engine" if engines else ""
    why = (
        f"model.path is {str(config.model.path)!r}: training {size}{of_engines} takes "
        f"{needed / _GB:.0f} GB, this machine has {has / _GB:.0f} GB; of a rank {rank}; {less}, or "
        "a smaller backend.micro_batch_tokens"
    )
    if needed - config.backend.ranks * (rank.activations + rank.head) > has:
        raise ConfigError(why)
    log.warning("%s", why)


def as_planned(config: RunConfig, planned: Plan) -> RunConfig:
    """The configuration with `cluster.placement` as it was planned: `auto` is decided."""
    if planned.mode == "plain":
        return config
    cluster = config.cluster.model_copy(update={"placement": planned.mode})
    return config.model_copy(update={"cluster": cluster})


def rank_memory(config: RunConfig, shape: ModelShape, gpu_bytes: float | None) -> MemoryEstimate:
    """Memory of one training rank at the peak of an optimizer step. Of `cluster.placement: auto` it
    is taken that no engine shares the rank's GPU (`as_planned`).

    Args:
        shape: the policy's; `ModelShape.read(config.model.path)`.
        gpu_bytes: of one GPU, of which a colocated engine keeps its share; None: on the CPU.

    Raises:
        BackendConfigError: as `ModelShape.check_context`.
    """
    shape.check_context(config.backend.context_parallel)
    backend, algorithm = config.backend, config.algorithm
    critic = None
    if algorithm.estimator.critic:
        path = algorithm.critic.path
        critic = shape if path is None else ModelShape.read(path)
    is_policy_its_reference = backend.lora is not None and backend.reference_path is None
    colocated = config.cluster.placement == "colocated" and not config.engine.release_memory
    beside = colocated and wanted_gpus(config)[1] > 0  # an embedded or attached one has none
    return estimate(
        shape,
        backend,
        backend.ranks,
        config.engine.context_length or 0,
        on_cuda=gpu_bytes is not None,
        reference=algorithm.kl.place != "none" and not is_policy_its_reference,
        critic=critic,
        engine_bytes=engine_share(config) * gpu_bytes if gpu_bytes and beside else 0.0,
    )


def kept_beside_engine(config: RunConfig, rank: MemoryEstimate, has: float) -> str:
    """Reason why an engine that lends its memory has no room to serve beside what the rank on its
    GPU keeps, with the remedy; empty: it has.

    Args:
        config: with `cluster.placement` as it was planned.
        has: bytes of the GPU.
    """
    if not config.engine.release_memory or config.cluster.placement != "colocated":
        return ""
    taken = engine_share(config) * has
    if not wanted_gpus(config)[1] or rank.kept + taken <= has:
        return ""
    return (
        f"keeps {rank.kept / _GB:.1f} GB while the engine has {taken / _GB:.1f} GB of a GPU of "
        f"{has / _GB:.0f} GB; engine.extra_args=[--mem-fraction-static="
        f"{max(0, int(100 * (has - rank.kept) / has)) / 100}] leaves that"
    )


def _machine_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    limits = [psutil.virtual_memory().total]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such cgroup, or "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def gpu_bytes() -> int | None:
    """Memory of the largest GPU here; None: nobody says. To ask torch would open the GPU in this
    process, before Ray says which one is ours."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
        return max(int(line) << 20 for line in said.split())
    except (OSError, ValueError, subprocess.SubprocessError):  # AMD's, or no driver
        return None


def _is_here(config: RunConfig) -> bool:
    """The parts run on this machine."""
    return config.cluster.address is None


# -- foreign code -----------------------------------------------------------------------------


def agent(config: RunConfig) -> None:
    rollout = config.rollout
    if rollout.agent is not None:  # else agents come by themselves
        load_agent(rollout.agent, rollout.agent_args, rollout.harness, rollout.environment)
    if rollout.harness is not None and config.data is not None:
        kind = rollout.harness.sandbox.kind
        for name in ("train", "val"):
            source = getattr(config.data, name)
            for task in HarborTasks(source) if isinstance(source, HarborSource) else ():
                with named(f"data.{name}"):
                    if kind not in BUILDS:
                        refuse_image(Path(task["harbor"]["folder"]), kind)


def reward(config: RunConfig) -> None:
    if config.rollout.reward is not None:
        with named("rollout.reward"):
            RewardManager(config.rollout.reward)


def backend(config: RunConfig) -> None:
    """torch's comes with Stepwell; another is imported, and torch with it."""
    if config.trainer.backend == "torch" and not config.backend.options:
        return
    from stepwell.backends.base import loop_backend

    name = config.trainer.backend
    found = loop_backend(name, config.backend.options)
    for key, wanted, method, remedy in (
        ("publish.guard", config.publish.guard is not None, "load_weights", "null"),
        (
            "algorithm.kl.place",
            config.algorithm.kl.place != "none",
            "compute_ref_log_probs",
            "none",
        ),
        (
            "engine.weight_transport",
            config.engine.weight_transport == "lora",
            "save_adapters",
            "disk",
        ),
    ):
        if wanted and found.lacks(method):
            raise ConfigError(
                f"trainer.backend is {name!r}, which does not implement {method}; "
                f"{key} needs it: set {key} to {remedy}, or implement it"
            )
    if config.engine.weight_transport == "lora" and found.adapters(config.backend) is None:
        raise ConfigError(
            f"engine.weight_transport is 'lora', but trainer.backend {name!r} trains whole "
            "weights; set backend.lora, or the transport to 'disk'"
        )


def selections(config: RunConfig) -> None:
    from stepwell.datapool.selection import Selection

    for name, channel in (("default", config.pool.default), *config.pool.channels.items()):
        try:
            Selection(channel.selection)
        except DataPoolError as e:
            key = name if name == "default" else f"channels.{name}"
            raise ConfigError(f"pool.{key}.{e}") from e
    GroupFilter(config.sampling)


def loss_mask(config: RunConfig) -> None:
    """Load the gateway's, if it is a path; `open_conversations` builds that of `algorithm.sft`."""
    if is_path(name := config.gateway.loss_mask_type):
        with named("gateway.loss_mask_type"):
            load_own(name)


def wandb(config: RunConfig) -> None:
    if config.logging.wandb != "online" or os.environ.get("WANDB_API_KEY"):
        return
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if any("wandb" in host for host in netrc.netrc().hosts):
            return
    raise ConfigError(
        "logging.wandb is 'online', but there is no key; set WANDB_API_KEY, run `wandb login`, or "
        "set it to offline"
    )


def tensorboard(config: RunConfig) -> None:
    from importlib.util import find_spec

    if config.logging.tensorboard and find_spec("tensorboardX") is None:
        raise ConfigError(
            "logging.tensorboard is true, but tensorboardX is not installed; "
            "pip install tensorboardX, or set it to false"
        )


def prometheus(config: RunConfig) -> None:
    if config.logging.prometheus_port is not None:
        check_address(config.gateway.host, config.logging.prometheus_port)


# -- checkpoint and data ------------------------------------------------------------------------


def recording(config: RunConfig) -> None:
    where = config.trainer.load_debug_rollout_data or ""
    if not glob(where.replace("{rollout_id}", "*") if "{" in where else f"{where}/*.pt"):
        raise ConfigError(
            f"trainer.load_debug_rollout_data is {where!r}, where no batch is recorded; name what "
            "trainer.save_debug_rollout_data named in the recorded run"
        )


def checkpoint(config: RunConfig) -> None:
    if (found := _resumed(config)) is not None:
        check_resumed(*found, config)


def _resumed(config: RunConfig) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that the run goes on from, and what it says of itself; None: it begins
    anew."""
    store = CheckpointStore(config.run.dir / CHECKPOINTS)
    path = store.find(config.run.resume)
    return None if path is None else (path, store.about(path))


def training_prompts(config: RunConfig) -> PromptSource:
    """The prompts of `data.train` that are not held out for validation.

    Raises:
        ConfigError: they cannot be read, or there is none.
    """
    data = _data_of(config)
    held_out: frozenset[str] = frozenset()
    if data.val is not None:
        with named("data.val"):
            held_out = PromptSource(data.val, tokenizer_path=config.model.path).prompts()
    if data.train is None:
        raise ConfigError("data.train is null: there are no prompts to roll out; give some")
    with named("data.train"):
        source = PromptSource(data.train, held_out, tokenizer_path=config.model.path)
        if data.val is None:
            source.hold_out()
        return source


def validation_tasks(config: RunConfig) -> list[Task]:
    """The tasks of `data.val`, or those of `data.train` that are held out for it."""
    data = _data_of(config)
    if (tasks := data.val or data.train) is None:
        raise ConfigError("data.val is null: there are no tasks to validate on; give some")
    source = PromptSource(tasks, tokenizer_path=config.model.path)
    return source.hold_out() if data.val is None else source.all()


def _data_of(config: RunConfig) -> DataConfig:
    if config.data is None:
        raise ConfigError("data is null: there are no tasks; give data.train")
    return config.data


PARTS: tuple[Check, ...] = (ray_cluster, gateway_port, engine_port, engine, tokenizer)

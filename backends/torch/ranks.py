"""Many processes behind one `TrainingBackend`: starts the ranks of a sharded model and calls them.

    RankedBackend ──call(method, args)──► rank 0 … rank n-1: a TorchBackend each (`fsdp.py`)
        (the trainer's process)  ◄── rank 0's answer

The ranks are actors, a GPU each; Ray places them, on one machine or many.

A batch is sent once, when it is converted; later calls send its columns. An error that every rank
raises (a bad batch) is raised as it is, and the ranks go on; so is that of a disk, once the others
have answered. Any other that only some raise leaves the rest waiting for a sum: then all are
stopped, and the error says which rank failed.

Does not own: the model, the sharding, who computes what (`torch/backend.py`, `fsdp.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from stepwell.backends.base import LossFn, TokenBatch, TrainingBackend
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError, BackendError, BatchError, RankError
from stepwell.backends.torch.vision import BatchPictures
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.types import Step

_GRACE_S = 10.0
"""After one rank's error, how long the others may take to raise theirs."""
_LEAD = "lead"
"""Threads of an actor for its sender: a broadcast may wait, and another call ends it."""
_OF_ALL = (BackendError, DamagedFileError)
_OF_A_DISK = (OSError, SafetensorError)
"""Raised by a rank that writes or reads alone, between two sums; the latter of a full disk."""
PLACED_S = 300.0
"""For Ray to start the ranks. One that waits longer waits for a GPU that is not there."""


Build: TypeAlias = Callable[[TorchBackendConfig, Path], TrainingBackend]
"""Makes the backend of one rank, in that rank's process."""


class Rank:
    """One rank's side of the calls: its backend and the batch that was converted last."""

    def __init__(self, build: Build, config: TorchBackendConfig, model_path: Path) -> None:
        self._backend = build(config, model_path)
        self._batch: TokenBatch | None = None

    def call(self, method: str, *args: Any) -> Any:
        """The backend's method, on this rank's batch where it takes one."""
        if method == "convert_with_pictures":
            self._batch = self._backend.convert_with_pictures(*args)
            return None
        if method in ("compute_log_probs", "compute_ref_log_probs"):
            return getattr(self._backend, method)(self._batch)
        if method == "train_step":
            columns, loss_fn, indices = args
            if self._batch is None:
                raise BatchError("train_step came before convert; convert the batch first")
            self._batch.columns = dict(columns)
            metrics = self._backend.train_step(self._batch, loss_fn, indices)
            return metrics, {k: v for k, v in self._batch.columns.items() if k not in columns}
        if method == "load_state":
            folder, state, weights_only = args
            return self._backend.load_state(folder, state, weights_only=weights_only)
        return getattr(self._backend, method)(*args)


@dataclass(eq=False, slots=True)
class RankedBatch(TokenBatch):
    """A `TokenBatch` that the ranks know by its number."""

    number: int = 0
    pictures: BatchPictures | None = None


class RankedBackend(TrainingBackend):
    """The ranks as one backend; see the module's docstring."""

    returns_columns = True
    saves_beside = True

    def __init__(self, ranks: RayRanks) -> None:
        self._ranks = ranks
        self._batches = 0
        self._sent: int | None = None

    def convert(self, steps: list[Step]) -> RankedBatch:
        """Flat columns here, rows on every rank. Raises as `TorchBackend.convert`."""
        return self.convert_with_pictures(steps, {})

    def convert_with_pictures(
        self, steps: list[Step], pictures: Mapping[str, bytes]
    ) -> RankedBatch:
        """`convert`; every rank gets all `pictures`."""
        flat = TokenBatch.of(steps)
        self._batches += 1
        own = BatchPictures(dict(pictures)) if pictures else None
        batch = RankedBatch(flat.steps, flat.offsets, flat.columns, self._batches, own)
        self._send(batch)
        return batch

    def compute_log_probs(self, batch: RankedBatch) -> Tensor:
        """log π of every response token: [T] fp32 on the CPU."""
        return self._on(batch, "compute_log_probs")

    def compute_ref_log_probs(self, batch: RankedBatch) -> Tensor:
        """log π_ref of every response token: [T] fp32 on the CPU."""
        return self._on(batch, "compute_ref_log_probs")

    def train_step(
        self, batch: RankedBatch, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        """One optimizer step of all ranks; as `TorchBackend.train_step`."""
        self._send(batch)
        metrics: dict[str, float]
        metrics, found = self._ranks.call("train_step", batch.columns, loss_fn, indices)
        batch.columns |= found
        return metrics

    def save_weights(self, path: str | Path) -> None:
        """Write a Hugging Face directory; rank 0 does, so it must see `path`."""
        # A rank's working directory need not be ours.
        self._ranks.call("save_weights", Path(path).absolute())

    def lead(self, method: str, *args: Any) -> Any:
        """Call the `Sender` of rank 0, which gathers the weights; other calls need not wait."""
        return self._ranks.lead(method, *args)

    def free_cache(self) -> None:
        """Free the cache of every rank (`TorchBackend.free_cache`)."""
        self._ranks.call("free_cache")

    def save_adapters(self, path: str | Path) -> None:
        """Write the adapters alone; as `TorchBackend.save_adapters`."""
        self._ranks.call("save_adapters", Path(path).absolute())

    def load_weights(self, path: str | Path) -> None:
        """Train on from the weights in `path`, which every rank must see."""
        self._ranks.call("load_weights", Path(path).absolute())

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Begin to write the ranks' shards into `folder`, which every rank must see."""
        state: dict[str, Any] = self._ranks.call("save_state", folder.absolute())
        return state

    def wait_saved(self) -> None:
        """Return when every rank's shards are on disk; other calls go on meanwhile."""
        self._ranks.wait_saved()

    def load_state(
        self, folder: Path, state: Mapping[str, Any], *, weights_only: bool = False
    ) -> None:
        """Go on from a folder of `save_state`, of any number of ranks."""
        self._ranks.call("load_state", folder.absolute(), dict(state), weights_only)

    def close(self) -> None:
        """End the ranks."""
        self._ranks.stop()

    def _on(self, batch: RankedBatch, method: str) -> Tensor:
        self._send(batch)
        values: Tensor = self._ranks.call(method)
        return values

    def _send(self, batch: RankedBatch) -> None:
        if self._sent != batch.number:
            pngs = {} if batch.pictures is None else batch.pictures.pngs
            self._ranks.call("convert_with_pictures", list(batch.steps), pngs)
            self._sent = batch.number


# --- ranks that are Ray actors


class _RankActor:
    """A `Rank` in a process of its own."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def listen(self) -> tuple[str, int]:
        """Rank 0: open the store where the others meet; its address."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # theirs
        self._store = TCPStore(host, 0, self._size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self,
        address: tuple[str, int],
        build: Build,
        config: TorchBackendConfig,
        path: Path,
    ) -> None:
        if self._rank != 0:
            self._store = TCPStore(*address, self._size, is_master=False)
        dist.init_process_group(
            _collectives(config), store=self._store, rank=self._rank, world_size=self._size
        )
        self._inner = Rank(build, config, path)

    @ray.method(concurrency_group=_LEAD)
    def lead(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._inner.call("lead", method, *args)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        answer = self._inner.call(method, *args)
        return answer if self._rank == 0 else None

    @ray.method(concurrency_group="disk")
    def wait_saved(self) -> None:
        self._inner.call("wait_saved")


class RayRanks:
    """`config.ranks` actors, one GPU each on CUDA. Ray must have been initialised.

    Args:
        options: Ray's actor options by rank, e.g. their places in a placement group.
    """

    def __init__(
        self,
        build: Build,
        config: TorchBackendConfig,
        model_path: Path,
        options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        default = {"num_cpus": 0, "num_gpus": 1 if _wants_gpu(config) else 0}
        remote: Any = ray.remote
        actor = remote(concurrency_groups={_LEAD: 4, "disk": 1})(_RankActor)
        self._actors: list[Any] = [
            actor.options(**(default | dict(options[rank] if options else {}))).remote(
                rank, config.ranks
            )
            for rank in range(config.ranks)
        ]
        ready = [actor.__ray_ready__.remote() for actor in self._actors]
        _, waiting = ray.wait(ready, num_returns=len(ready), timeout=PLACED_S)
        if waiting:
            self.stop()
            free, total = (
                resources.get("GPU", 0)
                for resources in (ray.available_resources(), ray.cluster_resources())  # type: ignore[no-untyped-call]  # theirs
            )
            raise BackendConfigError(
                f"backend.ranks is {config.ranks}, but Ray found no place for {len(waiting)} of "
                f"them within {PLACED_S:g} s; {free:g} of the cluster's {total:g} GPUs are free. "
                "Use fewer ranks, or free GPUs"
            )
        address = ray.get(self._actors[0].listen.remote())
        starting = [a.start.remote(address, build, config, model_path) for a in self._actors]
        self._wait(starting, "start")

    def call(self, method: str, *args: Any) -> Any:
        """`Rank.call` on every rank; rank 0's answer.

        Raises:
            RankError: a rank died, or failed alone; all are stopped.
        """
        if not self._actors:
            raise RankError(f"{method} was called on ranks that were stopped; start the run again")
        shared = ray.put(args)  # once, not once a rank
        return self._wait([a.call.remote(method, shared) for a in self._actors], method)

    def wait_saved(self) -> None:
        """`Rank.call("wait_saved")` on every rank, beside what they do.

        Raises:
            RankError: as `call`.
        """
        self._wait([a.wait_saved.remote() for a in self._actors], "wait_saved")

    def lead(self, method: str, *args: Any) -> Any:
        """A method of rank 0's `Sender`, beside whatever the ranks compute.

        Raises:
            RankError: rank 0 died, or they were stopped.
        """
        if not self._actors:
            raise RankError(f"{method} was called on ranks that were stopped; start the run again")
        try:
            return ray.get(self._actors[0].lead.remote(method, args))
        except ray.exceptions.RayTaskError as e:
            raise e.cause from e
        except ray.exceptions.RayError as e:
            raise RankError(f"rank 0 ended in {method}: {e}; resume the run") from e

    def stop(self) -> None:
        """End the ranks. Idempotent."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _wait(self, answers: list[Any], method: str) -> Any:
        pending = list(answers)
        failed: dict[int, Exception] = {}
        while pending:
            done, pending = ray.wait(pending, timeout=_GRACE_S if failed else None)
            if not done:
                break
            for ref in done:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as e:
                    failed[answers.index(ref)] = e
        if not failed:
            return ray.get(answers[0])
        rank, error = min(failed.items())
        cause = getattr(error, "cause", None)
        all_failed = len(failed) == len(answers)
        if (all_failed and isinstance(cause, _OF_ALL)) or (
            not pending and isinstance(cause, _OF_A_DISK)
        ):
            if method == "start":
                self.stop()
            raise cause
        size = len(self._actors)
        text = str(cause or error).strip() or repr(cause or error)
        self.stop()
        raise RankError(
            f"rank {rank} of {size} failed in {method}: "
            f"{text.splitlines()[-1]}; all ranks were stopped. Look into "
            "Ray's logs of that rank, then resume the run"
        ) from error


def _collectives(config: TorchBackendConfig) -> str:
    # Objects and metrics travel from CPU to CPU, weights and gradients from GPU to GPU.
    return "cpu:gloo,cuda:nccl" if _wants_gpu(config) else "gloo"


def _wants_gpu(config: TorchBackendConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def start(
    build: Build,
    config: TorchBackendConfig,
    model_path: Path,
    options: Sequence[Mapping[str, Any]] | None = None,
) -> RankedBackend:
    """`config.ranks` backends that `build` makes, as one.

    Args:
        options: Ray's actor options by rank.

    Raises:
        BackendConfigError: Ray is not running.
    """
    if not ray.is_initialized():
        raise BackendConfigError(
            f"backend.ranks is {config.ranks}, but Ray is not running; call ray.init() first"
        )
    # A rank's working directory need not be ours.
    if config.reference_path is not None:
        config = config.model_copy(update={"reference_path": config.reference_path.absolute()})
    return RankedBackend(RayRanks(build, config, model_path.absolute(), options))

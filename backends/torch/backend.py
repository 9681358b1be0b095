"""The embedded training backend: a Hugging Face causal LM, on CPU, one GPU or many.

    convert(steps)           rows (`rows.py`) + flat columns
    compute_log_probs        micro-batches, no grad
    compute_ref_log_probs    the same with the model the run started from
    train_step               each micro-batch: forward, loss_fn, backward ► clip ► step

With `ranks` > 1 this object is one of many that are called alike (`fsdp.py`); `build` gives the
one to call (`ranks.py`).

The forward pass computes in `dtype` throughout, as an engine does; master weights are float32
(`optimizer.py`). Only response positions go through the LM head, log-softmax is fp32 at each
step's temperature, and the model runs in eval mode throughout: dropout would make π differ from
itself between two calls.
Rows are padded on the right and no attention mask is passed: under causal attention what follows
a token cannot reach it, and the unmasked kernel is the fast one.

An update whose loss or gradient is not finite is not applied: weights and optimizer stay as they
were, `skipped_updates` counts it, and too many in a row raise `NonFiniteUpdateError`.

On the CPU, with the same thread count, a run is bit-identical to itself and to its continuation
from a saved state. Not thread-safe: one caller at a time. Does not own: formulas
(`trainer/algorithms/`), when weights are published or checkpoints are written (`trainer/loop.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from stepwell.backends.base import LossFn, Mean, TokenBatch, TrainingBackend
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError, BatchError, take_out
from stepwell.backends.model_folder import WEIGHT_SUFFIXES, fingerprint, module_name
from stepwell.backends.pictures import PictureProcessor, no_pictures
from stepwell.backends.rows import Layout, TokenRow, build_rows, computed_tokens, select
from stepwell.backends.torch import lora, ranks, tree
from stepwell.backends.torch.flops import peak_of, step_flops
from stepwell.backends.torch.fsdp import (
    Ranks,
    full,
    load_weights,
    reshard,
)
from stepwell.backends.torch.memory import ModelShape, choose_reduce, estimate
from stepwell.backends.torch.model import (
    Policy,
    aliases_of,
    checkpoint_layers,
    compile_layers,
    device_bytes,
    device_of,
    load_model,
    model_dir,
    no_progress_bars,
    read_model,
)
from stepwell.backends.torch.optimizer import (
    MasterWeights,
    Updates,
    build_optimizer,
    load_optimizer,
)
from stepwell.backends.torch.shards import ShardWriter, read_shards, stored_tensors
from stepwell.backends.torch.tree import is_enabled, to_device
from stepwell.backends.torch.vision import BatchPictures, Tower, freeze_tower
from stepwell.backends.weights.digest import read_tensors
from stepwell.backends.weights.sender import Sender
from stepwell.backends.weights.store import OWN_FILES
from stepwell.datapool.types import Step


@dataclass(eq=False, slots=True)
class TorchBatch(TokenBatch):
    """A `TokenBatch` and the rows that its steps are computed in."""

    rows: tuple[TokenRow, ...] = ()
    pictures: BatchPictures | None = None


class TorchBackend(TrainingBackend):
    """Trains a transformers model, on a CPU or GPUs.

    Raises:
        BackendConfigError: no model in `model_path`, or no such device.
    """

    returns_columns = True

    def __init__(self, config: TorchBackendConfig, model_path: str | Path) -> None:
        self._device = device_of(config.device)
        self._given = config
        self._config = config = config.resolved(self._device.type == "cuda")
        self._model_path = Path(model_path)
        self._ranks = Ranks.join(config.ranks, self._device, config.context_parallel)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if config.deterministic:
            # cuBLAS reads it when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        self._reference_path = config.reference_path or self._model_path
        # What the run starts with: its checkpoints must not meet other weights there.
        self._started_from = {
            "model": fingerprint(model_dir(self._model_path, "model.path")),
            "reference": fingerprint(model_dir(self._reference_path, "backend.reference_path")),
        }
        self._processor = PictureProcessor.of(self._model_path)
        with self._ranks.only_first():
            self._model = self._load(self._model_path, frozen=config.lora is not None)
            if config.lora is not None:
                lora.add_adapters(self._model, config.lora)
        self._agree(self._model)
        if config.gradient_checkpointing:
            selective = config.gradient_checkpointing == "selective"
            checkpoint_layers(self._model, selective=selective)
        if config.compile:
            compile_layers(self._model)
        self._policy = self._on_device(self._model)
        self._update_size = None if config.lora is None else lora.UpdateSize(self._model, full)
        self._aliases = aliases_of(self._model)
        # Sharded weights are float32 too, and FSDP2 gathers them in `dtype`.
        rounded = torch.float32 if config.ranks > 1 else getattr(torch, config.dtype)
        self._masters = MasterWeights(self._model, rounded)
        self._optimizer = build_optimizer(config, self._masters.parameters)
        self._shape = ModelShape.of(
            self._model.config.to_dict(), sum(p.numel() for p in self._model.parameters())
        )
        self._shape.check_context(config.context_parallel)
        of_tree = is_enabled(self._model)
        self._layout: Layout = "packed" if of_tree and config.rows != "tree" else config.rows
        self._peak = peak_of(self._device)
        self._has_bytes = min(self._ranks.gather(device_bytes(self._device, config.ranks)))
        self._writer = ShardWriter(self._ranks)
        self._reference: Policy | None = None
        self._sender = Sender()
        self._updates = Updates(config)

    @classmethod
    def build(
        cls, config: TorchBackendConfig, model_path: str | Path, **kwargs: Any
    ) -> TrainingBackend:
        """A backend in this process, or `config.ranks` of them behind one (`ranks.start`)."""
        if config.ranks == 1:
            return cls(config, model_path)
        return ranks.start(cls, config, Path(model_path), **kwargs)

    @property
    def updates(self) -> int:
        """Optimizer updates applied so far; skipped ones do not count."""
        return self._updates.applied

    def convert(self, steps: list[Step]) -> TorchBatch:
        """Rows and flat columns of `steps`.

        Raises:
            BatchError: as `convert_with_pictures`.
        """
        return self.convert_with_pictures(steps, {})

    def convert_with_pictures(self, steps: list[Step], pictures: Mapping[str, bytes]) -> TorchBatch:
        """Rows and flat columns of `steps`, whose pictures are `pictures`.

        Raises:
            BatchError: no steps, a token id outside the vocabulary, `multi_modal_data`, or pictures
                that are missing, not those of the ids, or not for this model.
        """
        batch = TorchBatch.of(steps)
        has_vision = self._processor is not None
        for step in steps:
            if step.multi_modal_data:
                raise BatchError(
                    f"{step.label} has multi_modal_data; the torch backend trains on text and "
                    "on its pictures (`Step.pictures`)"
                )
            if has_vision or step.pictures:
                self._check_pictures(step, pictures)
        batch.rows = tuple(build_rows(steps, self._config.rows))
        batch.pictures = BatchPictures(pictures) if pictures else None
        # Rows hold every token, most of them once.
        vocab = self._model.get_input_embeddings().num_embeddings
        if any(np.maximum.reduce(row.ids) >= vocab for row in batch.rows):
            raise self._unknown_token(steps, vocab)
        return batch

    def _check_pictures(self, step: Step, pictures: Mapping[str, bytes]) -> None:
        processor = self._processor
        if processor is None:
            raise BatchError(f"{step.label} has pictures, but {no_pictures(self._model_path)}")
        if np.isin(step.response_ids, processor.forbidden_ids).any():
            raise BatchError(
                f"{step.label} has a vision token in its response_ids "
                f"({', '.join(map(str, processor.forbidden_ids))}), which the model never samples"
            )
        placeholders = step.prompt_ids == processor.placeholder_id
        for picture in step.pictures:
            n_tokens = picture.width * picture.height // processor.factor**2
            run = placeholders[picture.at : picture.end]
            if picture.n_tokens != n_tokens or not run.all():
                raise BatchError(
                    f"{step.label} has {picture}, of which the model in {self._model_path} makes "
                    f"{n_tokens} placeholders (id {processor.placeholder_id}); engine and trainer "
                    "must load the same model"
                )
            if picture.digest not in pictures:
                raise BatchError(f"{step.label} has {picture}, whose bytes are not there")
        if int(placeholders.sum()) != sum(p.n_tokens for p in step.pictures):
            raise BatchError(
                f"{step.label} has placeholders (id {processor.placeholder_id}) outside its "
                "pictures; a prompt has them for its pictures alone"
            )

    def _unknown_token(self, steps: Sequence[Step], vocab: int) -> BatchError:
        step, largest = next(
            (step, largest)
            for step in steps
            if (largest := max(int(step.prompt_ids.max()), int(step.response_ids.max()))) >= vocab
        )
        return BatchError(
            f"{step.label} has token id {largest}, but the model in {self._model_path} knows "
            f"{vocab} tokens; engine and trainer must load the same model. "
            f"{take_out(step.trajectory_uid)}"
        )

    def compute_log_probs(self, batch: TorchBatch) -> Tensor:
        """log π of every response token: [T] fp32 on the CPU."""
        return self._score(self._policy, batch)

    def compute_ref_log_probs(self, batch: TorchBatch) -> Tensor:
        """log π_ref of every response token: [T] fp32 on the CPU.

        π_ref is the model in `reference_path`, or the one that the run started from: loaded at the
        first call and kept, or with LoRA the trained model with its adapters off.

        Raises:
            BackendConfigError: that directory no longer holds what the run started from.
        """
        if self._config.lora is not None and self._config.reference_path is None:
            with lora.adapters_off(self._model):
                return self._score(self._policy, batch)
        if self._reference is None:
            if fingerprint(self._reference_path) != self._started_from["reference"]:
                raise BackendConfigError(
                    f"the reference policy in {self._reference_path} is not the one that the run "
                    "started with; set backend.reference_path to a directory that holds it"
                )
            with self._ranks.only_first():
                model = self._load(self._reference_path, frozen=True)
            self._agree(model)
            self._reference = self._on_device(model.requires_grad_(False))
        return self._score(self._reference, batch)

    @torch.no_grad()
    def _score(self, policy: Policy, batch: TorchBatch) -> Tensor:
        mine: list[tuple[Tensor, Tensor]] = []
        for rows in self._micro_batches(batch.rows):
            log_probs, _, tokens = policy(batch, rows or [_shortest(batch.rows)], entropy=False)
            if rows and self._ranks.counts:
                mine.append((tokens, log_probs))
        reshard(policy)
        out = torch.empty(batch.n_tokens)
        for part in self._ranks.gather([(tokens, values.cpu()) for tokens, values in mine]):
            for tokens, log_probs in part:
                out[tokens] = log_probs
        return out

    def train_step(
        self, batch: TorchBatch, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        """One optimizer step over the steps `indices` (all if None).

        Returns:
            The means that `loss_fn` reports, and `loss`, `grad_norm` (before clipping), `lr`,
            `tokens` (trained), `padded_tokens` (computed), `rows`, `micro_batches`, `seconds`,
            `skipped` (1: this update was not applied), `skipped_updates` (so far); with adapters
            `lora/relative_norm`, |s·B·A| / |W|; on a known GPU `mfu` (`flops.py`).

        Raises:
            BatchError: `indices` is empty or not within the batch.
            NonFiniteUpdateError: more than `MAX_SKIPPED` in a row were not finite.
        """
        start = time.perf_counter()
        rows = self._selected_rows(batch, indices)
        wants = getattr(loss_fn, "entropy", "none")
        losses: list[Tensor] = []
        means: dict[str, Mean] = {}
        found: list[tuple[Tensor, Mapping[str, Tensor]]] = []
        flops = 0.0
        count = Counter(tokens=0, padded_tokens=0, micro_batches=0)
        self._optimizer.zero_grad(set_to_none=True)
        chunks = self._micro_batches(rows)
        each = self._reduce(rows) == "each"
        for number, chunk in enumerate(chunks, 1):
            self._ranks.sum_gradients(self._policy, each or number == len(chunks))
            if not chunk:
                self._idle(batch, rows)
                continue
            log_probs, entropy, tokens = self._policy(batch, chunk, entropy=wants != "none")
            if entropy is not None and wants != "gradient":
                entropy = entropy.detach()
            columns = {k: to_device(v[tokens], self._device) for k, v in batch.columns.items()}
            output = loss_fn(log_probs, entropy, columns)
            output.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            computed = computed_tokens(chunk, self._layout)
            if self._peak is not None:
                adapted = self._config.lora is not None
                of_chunk = step_flops(self._shape, chunk, computed, len(tokens), lora=adapted)
                flops += of_chunk / self._config.context_parallel
            if not self._ranks.counts:
                continue
            losses.append(output.loss.detach())
            for name, mean in output.metrics.items():
                means[name] = means[name] + mean if name in means else mean
            if output.columns:
                found.append((tokens, output.columns))
            count["tokens"] += len(tokens)
            count["padded_tokens"] += computed
            count["micro_batches"] += 1
        # Numbers are read here alone. Within a micro-batch a loss of ours waits for the device
        # once, to know which of its tokens are trained.
        loss = sum((float(one.double()) for one in losses), 0.0)
        loss, means, count = self._over_ranks(loss, means, count)
        on_cpu = [(tokens, {k: v.cpu() for k, v in columns.items()}) for tokens, columns in found]
        for part in self._ranks.gather(on_cpu):
            for tokens, columns in part:
                for name, values in columns.items():
                    column = batch.columns.setdefault(
                        name, torch.full((batch.n_tokens,), torch.nan)
                    )
                    column[tokens] = values
        grad_norm = float(
            full(
                torch.nn.utils.clip_grad_norm_(self._masters.parameters, self._config.max_grad_norm)
            )
        )
        lr, before = self._updates.lr, self.updates
        self._apply(loss, grad_norm)
        # A mean over no token is 0/0; it is left out rather than reported as 0.
        metrics = {k: float(m.total) / float(m.count) for k, m in means.items() if m.count > 0}
        return metrics | {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "rows": float(len(rows)),
            **{name: float(number) for name, number in count.items()},
            "skipped": float(self.updates == before),
            "skipped_updates": float(self._updates.skipped),
            **self._lora_metrics(),
            **self._use_metrics(flops, time.perf_counter() - start),
            "seconds": time.perf_counter() - start,
        }

    def _use_metrics(self, flops: float, seconds: float) -> dict[str, float]:
        """Share of the GPU's peak that this rank's part of an update made use of."""
        return {} if self._peak is None else {"mfu": flops / seconds / self._peak}

    def _lora_metrics(self) -> dict[str, float]:
        if self._update_size is None:
            return {}
        return {"lora/relative_norm": self._update_size.median()}

    def save_weights(self, path: str | Path) -> None:
        """Write a Hugging Face directory: weights and config of now, the rest as in `model_path`.

        The directory appears file by file; publishing it under its final name is the caller's.
        """
        target = Path(path)
        weights = self._weights(getattr(torch, self._config.dtype))
        adapters = self._adapters() if self._config.lora is not None else None
        if self._ranks.rank != 0:
            return
        if self._sender.is_used:
            self._sender.hold(weights, is_live=self._ranks.size == 1)
        with no_progress_bars():
            self._model.save_pretrained(target, state_dict=weights)
        # save_pretrained writes the dtype of the master weights.
        config = json.loads((target / "config.json").read_text())
        config["dtype"] = self._config.dtype
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        # Which may be a version of another run.
        others = {"config.json", lora.BESIDE_MERGED, *OWN_FILES}
        for file in self._model_path.iterdir():
            is_weight = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            if file.is_file() and not is_weight and file.name not in others:
                shutil.copyfile(file, target / file.name)
        if adapters is not None:
            start = self._started_from["model"]
            lora.save_tensors(target / lora.BESIDE_MERGED, adapters, start)

    def save_adapters(self, path: str | Path) -> None:
        """Write the adapters alone, as a directory that peft loads.

        Raises:
            BackendConfigError: there are none.
        """
        if self._config.lora is None:
            raise BackendConfigError(
                "save_adapters needs backend.lora, which is not set; use save_weights"
            )
        weights = self._adapters()
        if self._ranks.rank == 0:
            lora.save_adapters(self._model, Path(path), str(self._model_path), weights)

    def load_weights(self, path: str | Path) -> None:
        """Train on from the weights in `path`. Master weights are what is read there, rounded as it
        is; the optimizer begins anew, at the learning rate of now.

        Raises:
            BackendConfigError: they are of another model.
        """
        folder = Path(path)
        try:
            if self._config.lora is not None:
                own = lora.adapter_weights(self._masters.named())
                weights = lora.load_adapters(folder, own, self._started_from["model"])
            else:
                weights = self._published(folder)
            load_weights(self._model, weights)
            self._masters.load(weights)
        except RuntimeError as e:
            raise BackendConfigError(
                f"the weights in {folder} do not fit the model in {self._model_path} "
                f"({str(e).splitlines()[0]})"
            ) from e
        self._masters.round()
        self._optimizer = build_optimizer(self._config, self._masters.parameters)

    def _published(self, folder: Path) -> dict[str, Tensor]:
        """The weights in `folder`, by the model's names.

        Raises:
            RuntimeError: they are of another model.
        """
        known = self._model.state_dict().keys()
        weights = {module_name(name, known): t for name, t in read_tensors(folder)}
        if known ^ weights.keys() <= self._aliases.keys():
            return weights
        # Files may have what transformers alone puts together (experts, one by one) or leaves out.
        weights = read_model(folder, trust_remote_code=self._config.trust_remote_code)
        if wrong := (known ^ weights.keys()) - self._aliases.keys():
            raise RuntimeError(f"{sorted(wrong)[0]} is in one of the two alone")
        return weights

    def _adapters(self) -> dict[str, Tensor]:
        """Float32, whole, on the first rank."""
        return self._whole(lora.adapter_weights(self._masters.named()))

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Weights that engines load, in `dtype`; on the first rank. Tied weights stay one tensor,
        or they would be saved twice."""
        weights: dict[str, Tensor] = {}
        if self._config.lora is None:
            own = self._model.state_dict()
            whole: Iterator[tuple[str, Tensor]] = ((name, full(own[name])) for name in own)
        else:
            whole = lora.merged_weights(self._model, full)
        for name, tensor in whole:
            if self._ranks.rank != 0:
                continue
            first = self._aliases.get(name)
            if first is not None:
                weights[name] = weights[first]
            else:
                cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
                weights[name] = cast.cpu() if self._ranks.size > 1 else cast
        return weights

    def _whole(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sharded tensors gathered to the first rank's CPU, one at a time; others as they are."""
        if self._ranks.size == 1:
            return dict(weights)
        gathered = ((name, full(tensor)) for name, tensor in weights.items())
        return {name: t.cpu() for name, t in gathered if self._ranks.rank == 0}

    def _trained(self) -> dict[str, Tensor]:
        """Float32 weights that a checkpoint holds, of LoRA the adapters; live, this rank's shards.
        A tied weight is one."""
        named = self._masters.named()
        if self._config.lora is not None:
            return lora.adapter_weights(named)
        return {name: tensor for name, tensor in named.items() if name not in self._aliases}

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, RNG and counters. Tensors are live, and of a rank its shards."""
        return {
            "model": self._trained(),
            "optimizer": self._optimizer.state_dict(),
            **self._counters(),
        }

    def _counters(self) -> dict[str, Any]:
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return {
            "optimizer_name": self._config.optimizer,
            "rng": rng,
            **self._updates.state(),
            "started_from": self._started_from,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict` of as many ranks; the learning rate and its like are the
        config's.

        Raises:
            BackendConfigError: the state belongs to another model.
        """
        self._check_fits(state, {name: tensor.shape for name, tensor in state["model"].items()})
        with torch.no_grad():
            for name, tensor in self._trained().items():
                tensor.copy_(state["model"][name])
        self._go_on(state, state["optimizer"])

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Begin to write weights and optimizer into `folder`, in shards; the rest is returned."""
        optimizer = self._optimizer.state_dict()["state"]
        tensors = {f"model.{name}": tensor for name, tensor in self._trained().items()}
        plain: dict[int, dict[str, Any]] = {}
        for i, values in optimizer.items():
            plain[i] = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
            tensors |= {f"optimizer.{i}.{k}": v for k, v in values.items() if isinstance(v, Tensor)}
        self._writer.begin(tensors, folder)
        return {**self._counters(), "optimizer": plain}

    def wait_saved(self) -> None:
        """Return when the shards that `save_state` began are on disk."""
        self._writer.wait()

    def load_state(
        self, folder: Path, state: Mapping[str, Any], *, weights_only: bool = False
    ) -> None:
        """Go on from what any number of ranks wrote; the learning rate and its like are the
        config's.

        Raises:
            BackendConfigError: the state belongs to another model.
            DamagedFileError: a file is not what was written.
        """
        stored = stored_tensors(folder, self._ranks)
        model = {
            name.removeprefix("model."): found.shape
            for name, found in stored.items()
            if name.startswith("model.")
        }
        self._check_fits(state, model)
        wanted = {f"model.{name}": tensor for name, tensor in self._trained().items()}
        optimizer: dict[int, dict[str, Any]] = {i: {**v} for i, v in state["optimizer"].items()}
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        for name, found in stored.items() if not weights_only else ():
            if name.startswith("optimizer."):
                _, number, key = name.split(".", 2)
                like = trained[int(number)]
                place = (
                    torch.zeros_like(like, dtype=found.dtype)
                    if found.shape == like.shape
                    else torch.zeros(found.shape, dtype=found.dtype)
                )
                optimizer.setdefault(int(number), {})[key] = wanted[name] = place.detach()
        read_shards(wanted, folder, self._ranks)
        self._go_on(state, None if weights_only else {"state": optimizer})
        if weights_only:  # they are saved in the type in which they were trained
            self._config = self._given.resolved("cuda" in state["rng"])

    def _check_fits(self, state: Mapping[str, Any], model: Mapping[str, torch.Size]) -> None:
        """Raises BackendConfigError: weights of these names and shapes are of another model, or
        another optimizer's state is with them."""
        if state["optimizer_name"] != self._config.optimizer:
            raise BackendConfigError(
                f"the checkpoint was trained with optimizer {state['optimizer_name']!r}, but "
                f"backend.optimizer is {self._config.optimizer!r}; its state is of no use to it. "
                "Resume with the same one"
            )
        own = self._trained()
        why = None
        if self._config.lora is not None:
            if state["started_from"]["model"] != self._started_from["model"]:
                why = "its adapters belong to other weights"
            elif own.keys() != model.keys():
                why = "its adapters are not on the modules that backend.lora names"
        elif odd := sorted(own.keys() ^ model.keys()):
            why = f"{odd[0]} is in one of the two alone"
        if why is None:
            wrong = (name for name, tensor in own.items() if tensor.shape != model[name])
            if (name := next(wrong, None)) is not None:
                why = f"{name} is {list(model[name])} there and {list(own[name].shape)} here"
        if why is not None:
            raise BackendConfigError(
                f"the checkpoint does not fit the model in {self._model_path} ({why}); resume "
                "with the model it was written with"
            )

    def _go_on(self, state: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> None:
        """Take over the rest of a state whose weights are loaded."""
        self._masters.round()
        if optimizer is not None:
            load_optimizer(self._optimizer, dict(optimizer))
        # A resumed run has the reference of its first process, or none.
        self._started_from = state["started_from"]
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self._device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self._device)
        self._updates.load(state)

    def lead(self, method: str, *args: Any) -> Any:
        """Call the `Sender` of this process."""
        return self._sender.call(method, *args)

    def free_cache(self) -> None:
        """Gradients and what torch keeps for the next step go back to the device; weights and
        optimizer state stay."""
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the gradients and the reference; weights and optimizer go with the object."""
        self._optimizer.zero_grad(set_to_none=True)
        self._reference = None

    def _selected_rows(self, batch: TorchBatch, indices: Sequence[int] | None) -> list[TokenRow]:
        if indices is None:
            return list(batch.rows)
        wanted = set(indices)
        n = len(batch.steps)
        if not wanted or min(wanted) < 0 or max(wanted) >= n:
            raise BatchError(
                f"indices is {sorted(wanted)!s:.80}; give some of the steps 0..{n - 1}"
            )
        return select(batch.rows, batch.steps, wanted)

    def _micro_batches(self, rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
        return self._ranks.rounds(rows, self._config.micro_batch_tokens, self._layout)

    def _on_device(self, model: Any) -> Policy:
        """`model`, ready to score rows; sharded if there are ranks to share it."""
        tower = self._tower_of(model)
        policy = Policy(model, self._config, self._device, tower, self._ranks.context)
        self._place(policy, tower)
        return policy

    def _place(self, policy: torch.nn.Module, tower: Tower | None) -> None:
        dtype = getattr(torch, self._config.dtype)
        self._ranks.place(policy, self._device, dtype, None if tower is None else tower.module)

    def _reduce(self, rows: Sequence[TokenRow]) -> Literal["each", "last"]:
        """Choose the time at which ranks sum the gradients of an update on `rows`."""
        if self._ranks.size == 1:
            return "each"
        longest = max(row.n_inputs for row in rows)
        ranks, on_cuda = self._ranks.size, self._device.type == "cuda"
        last = estimate(self._shape, self._config, ranks, longest, on_cuda=on_cuda, reduce="last")
        return choose_reduce(last, self._has_bytes, self._config.reduce)

    def _load(self, path: Path, *, frozen: bool) -> Any:
        """The model in `path`, which rank 0 alone reads (`Ranks.place`)."""
        model = load_model(path, self._config, frozen=frozen, empty=self._ranks.rank > 0)
        if self._processor is not None:
            freeze_tower(model, getattr(torch, self._config.dtype))
        return model

    def _agree(self, model: Any) -> None:
        """Rows are packed where they are on rank 0, which has proved it on the weights."""
        if self._ranks.gather(is_enabled(model))[0] and not is_enabled(model):
            tree.enable(model, probe=False)

    def _tower_of(self, model: Any) -> Tower | None:
        if self._processor is None:
            return None
        return Tower(model, self._processor, self._device, getattr(torch, self._config.dtype))

    def _idle(self, batch: TorchBatch, rows: Sequence[TokenRow]) -> None:
        """A round in which this rank has no rows: the others cannot do without it."""
        log_probs, _, _ = self._policy(batch, [_shortest(rows)], entropy=False)
        (log_probs.sum() * 0).backward()

    def _over_ranks(
        self, loss: float, means: Mapping[str, Mean], count: Counter[str]
    ) -> tuple[float, dict[str, Mean], Counter[str]]:
        """The sums of all ranks, in the order of ranks: the same to the last bit on each."""
        if self._ranks.size == 1:
            return loss, dict(means), count
        on_cpu = {name: Mean(m.total.cpu(), m.count.cpu()) for name, m in means.items()}
        mine = (loss, on_cpu, count)
        total: dict[str, Mean] = {}
        parts = self._ranks.gather(mine)
        for _, part, _ in parts:
            for name, mean in part.items():
                total[name] = total[name] + mean if name in total else mean
        counts = Counter({name: sum(c[name] for _, _, c in parts) for name in count})
        return sum(part[0] for part in parts), total, counts

    def _apply(self, loss: float, grad_norm: float) -> None:
        """Step the optimizer, unless the update is not finite."""
        if not (np.isfinite(loss) and np.isfinite(grad_norm)):
            self._optimizer.zero_grad(set_to_none=True)
            self._updates.skip(f"loss is {loss} and grad_norm {grad_norm}")
            return
        for group in self._optimizer.param_groups:
            group["lr"] = self._updates.lr
        self._optimizer.step()
        self._masters.round()
        self._updates.apply()


def _shortest(rows: Sequence[TokenRow]) -> TokenRow:
    return min(rows, key=lambda row: row.n_inputs)

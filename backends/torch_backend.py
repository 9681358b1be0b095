"""The embedded training backend: a Hugging Face causal LM and AdamW, on CPU or one GPU.

    convert(steps)       rows (`rows.py`) + flat columns
    compute_log_probs    micro-batches, no grad
    train_step           zero grad ► each micro-batch: forward, loss_fn, backward ► clip ► step

Only response positions go through the LM head, log-softmax is fp32 at each step's temperature, and
the model runs in eval mode throughout: dropout would make π differ from itself between two calls.
Rows are padded on the right and no attention mask is passed: under causal attention what follows
a token cannot reach it, and the unmasked kernel is the fast one.

An update whose loss or gradient is not finite is not applied: weights and optimizer stay as they
were, `skipped_updates` counts it, and too many in a row raise `NonFiniteUpdateError`.

On the CPU, with the same thread count, a run is bit-identical to itself and to its continuation
from a `state_dict`. Not thread-safe: one caller at a time. Does not own: formulas
(`trainer/losses.py`), when weights are published or checkpoints are written (`trainer/loop.py`).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from backends.base import LossFn, Mean, TokenBatch, TrainingBackend
from backends.errors import BackendConfigError, BatchError, NonFiniteUpdateError
from backends.rows import Row, build_rows, micro_batches, select
from backends.torch_config import TorchBackendConfig
from datapool.types import Step

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


@dataclass(eq=False, slots=True)
class TorchBatch(TokenBatch):
    """A `TokenBatch` and the rows that its steps are computed in."""

    rows: tuple[Row, ...] = ()


class TorchBackend(TrainingBackend):
    """Trains the model in `model_path`; see the module's docstring.

    Raises:
        BackendConfigError: no model in `model_path`, or no such device.
    """

    def __init__(self, config: TorchBackendConfig, model_path: str | Path) -> None:
        self._config = config
        self._model_path = Path(model_path)
        self._device = _device(config.device)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        self._model = _load(self._model_path, config).to(self._device).eval()
        self._optimizer = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": decay}
                for group, decay in (
                    ([p for p in self._parameters() if p.ndim >= 2], config.weight_decay),
                    ([p for p in self._parameters() if p.ndim < 2], 0.0),
                )
                if group
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._updates = 0
        self._skipped_updates = 0
        self._skipped_in_a_row = 0

    @property
    def updates(self) -> int:
        """Optimizer updates applied so far; skipped ones do not count."""
        return self._updates

    def convert(self, steps: list[Step]) -> TorchBatch:
        """Rows and flat columns of `steps`.

        Raises:
            BatchError: no steps, a token id outside the vocabulary, or multi-modal data.
        """
        flat = TokenBatch.of(steps)
        for step in steps:
            if step.multi_modal_data:
                raise BatchError(
                    f"{_name(step)} has multi_modal_data; the torch backend trains on text only"
                )
        rows = tuple(build_rows(steps, self._config.rows))
        # Rows hold every token, most of them once.
        vocab = self._model.get_input_embeddings().num_embeddings
        if any(np.maximum.reduce(row.ids) >= vocab for row in rows):
            raise self._unknown_token(steps, vocab)
        return TorchBatch(flat.steps, flat.offsets, flat.columns, rows)

    def _unknown_token(self, steps: Sequence[Step], vocab: int) -> BatchError:
        step, largest = next(
            (step, largest)
            for step in steps
            if (largest := max(int(step.prompt_ids.max()), int(step.response_ids.max()))) >= vocab
        )
        return BatchError(
            f"{_name(step)} has token id {largest}, but the model in {self._model_path} knows "
            f"{vocab} tokens; engine and trainer must load the same model"
        )

    @torch.no_grad()
    def compute_log_probs(self, batch: TorchBatch) -> Tensor:
        """log π of every response token: [T] fp32 on the CPU."""
        out = torch.empty(batch.n_tokens)
        for rows in micro_batches(batch.rows, self._config.micro_batch_tokens):
            log_probs, _, tokens = self._forward(batch, rows, entropy=False)
            out[tokens] = log_probs.cpu()
        return out

    def train_step(
        self, batch: TorchBatch, loss_fn: LossFn, indices: Sequence[int] | None = None
    ) -> dict[str, float]:
        """One optimizer step over the steps `indices` (all if None).

        Returns:
            The means that `loss_fn` reports, and `loss`, `grad_norm` (before clipping), `lr`,
            `tokens` (trained), `padded_tokens` (computed), `rows`, `micro_batches`, `seconds`,
            `skipped_updates` (so far).

        Raises:
            BatchError: `indices` is empty or not within the batch.
            NonFiniteUpdateError: more than `max_skipped_updates` in a row were not finite.
        """
        start = time.perf_counter()
        rows = self._selected_rows(batch, indices)
        wants = getattr(loss_fn, "entropy", "none")
        loss = torch.zeros((), dtype=torch.float64)
        means: dict[str, Mean] = {}
        n_tokens = n_padded = n_micro_batches = 0
        self._optimizer.zero_grad(set_to_none=True)
        for chunk in micro_batches(rows, self._config.micro_batch_tokens):
            log_probs, entropy, tokens = self._forward(batch, chunk, entropy=wants != "none")
            if entropy is not None and wants != "gradient":
                entropy = entropy.detach()
            columns = {k: v[tokens].to(self._device) for k, v in batch.columns.items()}
            output = loss_fn(log_probs, entropy, columns)
            output.loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            loss += output.loss.detach().double().cpu()
            for name, mean in output.metrics.items():
                means[name] = means[name] + mean if name in means else mean
            n_tokens += len(tokens)
            n_padded += len(chunk) * chunk[0].n_inputs
            n_micro_batches += 1
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self._parameters(), self._config.max_grad_norm)
        )
        lr = self._apply(float(loss), grad_norm)
        # A mean over no token is 0/0; it is left out rather than reported as 0.
        metrics = {k: float(m.total) / float(m.count) for k, m in means.items() if m.count > 0}
        return metrics | {
            "loss": float(loss),
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": float(n_tokens),
            "padded_tokens": float(n_padded),
            "rows": float(len(rows)),
            "micro_batches": float(n_micro_batches),
            "skipped_updates": float(self._skipped_updates),
            "seconds": time.perf_counter() - start,
        }

    def save_weights(self, path: str | Path) -> None:
        """Write a Hugging Face directory: weights and config of now, the rest as in `model_path`.

        The directory appears file by file; publishing it under its final name is the caller's.
        """
        target = Path(path)
        dtype = getattr(torch, self._config.dtype)
        with _no_progress_bars():
            self._model.save_pretrained(target, state_dict=self._weights(dtype))
        # save_pretrained writes the dtype of the master weights.
        config = json.loads((target / "config.json").read_text())
        config["dtype"] = self._config.dtype
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in self._model_path.iterdir():
            is_weight = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            if file.is_file() and not is_weight and file.name != "config.json":
                shutil.copyfile(file, target / file.name)

    def _weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The state dict in `dtype`. Tied weights stay one tensor, or they would be saved twice."""
        cast: dict[tuple[int, torch.Size], Tensor] = {}
        weights = {}
        for name, tensor in self._model.state_dict().items():
            key = (tensor.data_ptr(), tensor.shape)
            if key not in cast:
                cast[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
            weights[name] = cast[key]
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Weights (fp32), optimizer, RNG and counters. Tensors are live: write, then train on."""
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "rng": rng,
            "updates": self._updates,
            "skipped_updates": self._skipped_updates,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; the learning rate and its like are the config's.

        Raises:
            BackendConfigError: the state belongs to another model.
        """
        try:
            self._model.load_state_dict(state["model"])
        except RuntimeError as e:
            raise BackendConfigError(
                f"the checkpoint does not fit the model in {self._model_path} "
                f"({str(e).splitlines()[0]}); resume with the model it was written with"
            ) from e
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        torch.set_rng_state(state["rng"]["cpu"].cpu())
        if self._device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"].cpu(), self._device)
        self._updates = state["updates"]
        self._skipped_updates = state["skipped_updates"]
        self._skipped_in_a_row = state["skipped_in_a_row"]

    def close(self) -> None:
        """Free the gradients; weights and optimizer go with the object."""
        self._optimizer.zero_grad(set_to_none=True)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _selected_rows(self, batch: TorchBatch, indices: Sequence[int] | None) -> list[Row]:
        if indices is None:
            return list(batch.rows)
        wanted = set(indices)
        n = len(batch.steps)
        if not wanted or min(wanted) < 0 or max(wanted) >= n:
            raise BatchError(
                f"indices is {sorted(wanted)!s:.80}; give some of the steps 0..{n - 1}"
            )
        return select(batch.rows, wanted)

    def _forward(
        self, batch: TorchBatch, rows: Sequence[Row], *, entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(log π, entropy | None, token index): [n] each, of the response tokens in `rows`."""
        segments = [(r, s) for r, row in enumerate(rows) for s in row.segments]
        width = max(row.n_inputs for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for r, row in enumerate(rows):
            ids[r, : row.n_inputs] = row.ids[: row.n_inputs]
        offsets = batch.offsets.tolist()

        def flat(ranges: Iterator[tuple[int, int]]) -> Tensor:
            return torch.from_numpy(np.concatenate([np.arange(a, a + n) for a, n in ranges]))

        # Position p of a row is predicted by the hidden state at p - 1.
        positions = flat((r * width + s.start - 1, s.length) for r, s in segments)
        tokens = flat((offsets[s.step], s.length) for _, s in segments)
        targets = torch.from_numpy(
            np.concatenate([rows[r].ids[s.start : s.end] for r, s in segments]).astype(np.int64)
        )
        temperatures = torch.tensor([batch.steps[s.step].temperature for _, s in segments])
        temperature = temperatures.repeat_interleave(torch.tensor([s.length for _, s in segments]))

        on = self._device
        with self._autocast(), self._only_positions(positions.to(on)):
            output = self._model(input_ids=torch.from_numpy(ids).to(on), use_cache=False)
        logits = output.logits[0].float() / temperature.to(on).unsqueeze(-1)
        all_log_probs = torch.log_softmax(logits, dim=-1)
        log_probs = all_log_probs.gather(-1, targets.to(on).unsqueeze(-1)).squeeze(-1)
        h = -(all_log_probs.exp() * all_log_probs).sum(-1) if entropy else None
        return log_probs, h, tokens

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.dtype == "bfloat16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    @contextmanager
    def _only_positions(self, positions: Tensor) -> Iterator[None]:
        """The LM head sees the hidden states at `positions` ([n], into batch × width) alone.

        A hook, and the model's own forward: what a family does to its logits afterwards (Gemma's
        soft cap, Cohere's and Granite's scale) stays part of π.
        """

        def pick(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden, *rest = args
            return (hidden.flatten(0, 1)[positions].unsqueeze(0), *rest)

        handle = self._model.get_output_embeddings().register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()

    def _apply(self, loss: float, grad_norm: float) -> float:
        """Step the optimizer, unless the update is not finite; the learning rate used."""
        warmup = self._config.warmup_steps
        lr = self._config.lr * min(1.0, (self._updates + 1) / max(1, warmup))
        if not (np.isfinite(loss) and np.isfinite(grad_norm)):
            self._optimizer.zero_grad(set_to_none=True)
            self._skipped_updates += 1
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row > self._config.max_skipped_updates:
                raise NonFiniteUpdateError(
                    f"loss is {loss} and grad_norm {grad_norm} at update {self._updates}, "
                    f"{self._skipped_in_a_row} in a row (max_skipped_updates "
                    f"{self._config.max_skipped_updates}); the weights are untouched. Lower lr "
                    f"({self._config.lr:g}) or look at the batch"
                )
            return lr
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._updates += 1
        self._skipped_in_a_row = 0
        return lr


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendConfigError("backend.device is 'cuda', but torch sees no GPU; use 'auto'")
    return torch.device(name)


def _load(path: Path, config: TorchBackendConfig) -> Any:
    if not (path / "config.json").is_file():
        raise BackendConfigError(
            f"model.path is {str(path)!r}, which has no config.json; "
            "point it at a Hugging Face model directory"
        )
    try:
        with _no_progress_bars():
            return AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.float32,
                attn_implementation=config.attention,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
            )
    except (OSError, ValueError, ImportError) as e:
        raise BackendConfigError(
            f"model.path {str(path)!r} cannot be loaded: {str(e).strip().splitlines()[0]}"
        ) from e


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A bar per published version would tear the live display apart."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs


def _name(step: Step) -> str:
    return f"step {step.trajectory_uid!r}[{step.step_index}]"

"""A Hugging Face causal LM as the torch backend trains it: where it runs, in which type, with which
attention, and how rows go through it to log π and entropy of the response tokens alone.

    rows ──prepare──► Inputs ──model──► logits at n positions ──score──► log π [n], entropy [n]

Rows are padded on the right and no attention mask is passed: under causal attention what follows
a token cannot reach it, and the unmasked kernel is the fast one. Where tree attention is enabled on
the model (`tree.enable`), rows share what they begin with.

Only response positions go through the LM head. Log-softmax is fp32 at each step's temperature.

Owns: loading, the model's inputs, the choice of positions, the scoring of logits. Does not own:
which rows there are and how they are split (`rows.py`), updates, checkpoints, saved weights
(`torch/backend.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from stepwell.backends.base import TokenBatch
from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.model_loading import load_causal_lm
from stepwell.backends.pictures import PictureProcessor
from stepwell.backends.rows import TokenRow
from stepwell.backends.torch import tree
from stepwell.backends.torch.chunked_head import chunk_tokens, chunked
from stepwell.backends.torch.context import Context
from stepwell.backends.torch.tree import Tree, is_enabled, pack, to_device
from stepwell.backends.torch.vision import BatchPictures, Tower

NEVER = -1e30
"""Logit of a token that is never sampled: its probability is 0."""


class Policy(torch.nn.Module):
    """The model and how its rows are scored, as one module: the root that FSDP2 shards. What
    belongs to no layer (embedding, LM head) is therefore whole until the end of the backward
    pass, where the chunked head is computed again."""

    def __init__(
        self,
        model: Any,
        config: TorchBackendConfig,
        device: torch.device,
        tower: Tower | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._device = device
        self._tower = tower
        self._context = context
        vocab = model.get_input_embeddings().num_embeddings
        self._chunk = chunk_tokens(config.logits_mb, vocab)
        self._share = config.rows == "tree"

    def forward(
        self, batch: TokenBatch, rows: Sequence[TokenRow], *, entropy: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(log π, entropy | None, token index): [n] each, of the response tokens in `rows`."""
        return forward(
            self.model,
            batch,
            rows,
            device=self._device,
            entropy=entropy,
            chunk=self._chunk,
            tower=self._tower,
            share=self._share,
            context=self._context,
        )


# ── rows through the model ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False, slots=True)
class Inputs:
    """One micro-batch as the model sees it; n is the number of response tokens in its rows."""

    ids: Tensor
    """int64, [rows, width], on the device; [1, tokens] of a tree."""
    positions: Tensor
    """int64, [n], on the device: indices into rows x width whose hidden states predict."""
    targets: Tensor
    """int64, [n], on the device: the tokens they predict."""
    temperature: Tensor
    """float32, [n], on the device."""
    tokens: Tensor
    """int64, [n], on the CPU: indices into the columns of the batch."""
    tree: Tree | None = None
    """Attention's argument; None for padded rows."""
    pictures: Sequence[tuple[str, Tensor]] = ()
    """Digest of each picture, and indices into rows x width of its placeholders."""
    rotary: Tensor | None = None
    """int64, [3, rows, width], on the device: positions where there are pictures."""
    context: Context | None = None
    """Ranks that have a part of the tree each; None: `ids` are the whole. With some, `positions`,
    `targets` and `temperature` are those of this rank, `own` of the n."""
    own: Tensor | None = None
    """int64, on the device: which of the n response tokens this rank scores."""

    def shared(self, context: Context) -> Inputs:
        """The part of a packed micro-batch that this rank feeds and scores."""
        ids = context.part(self.ids)
        m = ids.shape[1]
        own = torch.nonzero(self.positions // m == context.rank).squeeze(1)
        return replace(
            self,
            ids=ids,
            positions=self.positions[own] - context.rank * m,
            targets=self.targets[own],
            temperature=self.temperature[own],
            context=context,
            own=own,
        )

    def whole(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Scores of all n response tokens, of those that this rank has."""
        if self.context is None or self.own is None:
            return [*scores]
        return self.context.whole(scores, self.own, len(self.tokens))

    def model_kwargs(self, tower: Tower | None, pictures: BatchPictures | None) -> dict[str, Any]:
        """Arguments of the model's forward; `tower` and `pictures` where there are some."""
        kwargs: dict[str, Any] = {"use_cache": False}
        if self.rotary is not None and tower is not None and pictures is not None:
            kwargs["inputs_embeds"] = tower.embed(self.ids, self.pictures, pictures)
            kwargs["position_ids"] = self.rotary
        else:
            kwargs["input_ids"] = self.ids
        if self.tree is None:
            return kwargs
        depths = to_device(torch.from_numpy(self.tree.position_ids)[None], self.ids.device)
        if self.context is not None:
            depths, kwargs["context"] = self.context.part(depths), self.context
        return {"position_ids": depths, **kwargs, "tree": self.tree}


def prepare(
    batch: TokenBatch,
    rows: Sequence[TokenRow],
    device: torch.device,
    *,
    as_tree: bool = False,
    share: bool = True,
    processor: PictureProcessor | None = None,
    context: Context | None = None,
) -> Inputs:
    """The inputs for `rows`, which belong to `batch`: padded, or packed as a prefix tree; without
    `share` that is end to end. With `context`, this rank's part of them."""
    members = [(r, i) for r, row in enumerate(rows) for i in row.steps]
    steps = [batch.steps[i] for _, i in members]
    starts, lengths = [len(s.prompt_ids) for s in steps], [len(s.response_ids) for s in steps]
    # Position p of a row is predicted by the hidden state at p - 1.
    fed = [row.compared[: row.n_inputs] for row in rows]
    packed = pack(fed, share=share) if as_tree else None
    if packed is not None:
        ids = packed.ids[None].astype(np.int64)
        if processor is not None:
            ids[ids < 0] = processor.placeholder_id
        picked = [
            packed.where[r][start - 1 : start - 1 + n]
            for (r, _), start, n in zip(members, starts, lengths, strict=True)
        ]
        positions = torch.from_numpy(np.concatenate(picked))
    else:
        width = max(row.n_inputs for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for r, row in enumerate(rows):
            ids[r, : row.n_inputs] = row.ids[: row.n_inputs]
        firsts = [r * width + start - 1 for (r, _), start in zip(members, starts, strict=True)]
        positions = _ranges(firsts, lengths)
    pictures: Sequence[tuple[str, Tensor]] = ()
    rotary = None
    if processor is not None and any(row.pictures for row in rows):
        at_rows = packed.where if packed is not None else None
        rotary, pictures = _places(rows, ids.shape, at_rows, processor)
    offsets = batch.offsets.tolist()
    targets = np.concatenate([step.response_ids for step in steps])
    temperatures = torch.tensor([step.temperature for step in steps])
    inputs = Inputs(
        ids=to_device(torch.from_numpy(ids), device),
        positions=to_device(positions, device),
        targets=to_device(torch.from_numpy(targets.astype(np.int64)), device),
        temperature=to_device(temperatures.repeat_interleave(torch.tensor(lengths)), device),
        tokens=_ranges([offsets[i] for _, i in members], lengths),
        tree=packed,
        pictures=pictures,
        rotary=None if rotary is None else to_device(rotary, device),
    )
    return inputs if context is None else inputs.shared(context)


def _places(
    rows: Sequence[TokenRow],
    shape: tuple[int, ...],
    where: Sequence[npt.NDArray[np.int64]] | None,
    processor: PictureProcessor,
) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Rotary positions [3, rows, width], and each picture's indices into rows x width, once for
    all rows that share it. `where` is of a tree: the place of each row's tokens."""
    rotary = np.zeros((3, shape[0] * shape[1]), dtype=np.int64)
    places: dict[int, tuple[str, Tensor]] = {}
    for r, row in enumerate(rows):
        n = row.n_inputs
        at = where[r] if where is not None else np.arange(r * shape[1], r * shape[1] + n)
        rotary[:, at] = processor.positions(row.ids[:n], row.pictures)
        for picture in row.pictures:
            own = at[picture.at : picture.end]
            places.setdefault(int(own[0]), (picture.digest, torch.from_numpy(own)))
    return torch.from_numpy(rotary.reshape(3, *shape)), [*places.values()]


def forward(
    model: Any,
    batch: TokenBatch,
    rows: Sequence[TokenRow],
    *,
    device: torch.device,
    entropy: bool,
    chunk: int | None = None,
    tower: Tower | None = None,
    share: bool = True,
    context: Context | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(log π, entropy | None, token index): [n] each, of the response tokens in `rows`.

    The model computes in the type of its weights, scoring is always fp32. With `chunk`, logits of
    at most so many tokens exist at once (`chunked_head.py`).
    """
    processor = None if tower is None else tower.processor
    as_tree = is_enabled(model)
    inputs = prepare(
        batch, rows, device, as_tree=as_tree, share=share, processor=processor, context=context
    )
    kwargs = inputs.model_kwargs(tower, pictures_of(batch))
    forbidden = None if tower is None else tower.forbidden
    if chunk is not None and len(inputs.positions) > chunk:

        def score_part(logits: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
            targets, temperature = inputs.targets[part], inputs.temperature[part]
            return score(logits, targets, temperature, entropy=entropy, forbidden=forbidden)

        log_probs, h = chunked(model, kwargs, inputs.positions, score_part, chunk=chunk)
    else:
        with only_positions(model, inputs.positions):
            output = model(**kwargs)
        log_probs, h = score(
            output.logits[0],
            inputs.targets,
            inputs.temperature,
            entropy=entropy,
            forbidden=forbidden,
        )
    log_probs, *rest = inputs.whole([log_probs] if h is None else [log_probs, h])
    h = rest[0] if rest else None
    return log_probs, h, inputs.tokens


def pictures_of(batch: TokenBatch) -> BatchPictures | None:
    """Pictures of a batch, if it has some."""
    return getattr(batch, "pictures", None)


def score(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    entropy: bool,
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log π of `targets` [n] and the entropy of π: softmax(logits [n, vocab] / temperature [n]),
    where `forbidden` ids have no probability."""
    if forbidden is not None:
        # Not -inf, of which the entropy would be NaN.
        logits = logits.float().index_fill(-1, forbidden, NEVER)
    all_log_probs = torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)
    log_probs = all_log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    h = -(all_log_probs.exp() * all_log_probs).sum(-1) if entropy else None
    return log_probs, h


@contextmanager
def only_positions(model: Any, positions: Tensor) -> Iterator[None]:
    """The LM head sees the hidden states at `positions` ([n], into batch x width) alone.

    A hook, and the model's own forward: what a family does to its logits afterwards (Gemma's
    soft cap, Cohere's and Granite's scale) stays part of π.
    """

    def pick(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1).index_select(0, positions).unsqueeze(0), *rest)

    handle = model.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _ranges(starts: Iterable[int], lengths: Iterable[int]) -> Tensor:
    """The indices of all ranges, one after another."""
    ranges = [np.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(ranges))


# ── loading ───────────────────────────────────────────────────────────────────────────────────────


def device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendConfigError("backend.device is 'cuda', but torch sees no GPU; use 'auto'")
    return torch.device(name)


def device_bytes(device: torch.device, ranks: int) -> float:
    """Memory that one of `ranks` ranks has: its GPU's, or its share of this machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / ranks


def load_model(path: Path, config: TorchBackendConfig, *, frozen: bool, empty: bool = False) -> Any:
    """The model on the CPU, in eval mode; in float32 unless `frozen`, which no update rounds.

    Args:
        empty: on the meta device, without reading weights: another rank sends them.
    """
    options: dict[str, Any] = {
        "dtype": getattr(torch, config.dtype) if frozen else torch.float32,
        "attn_implementation": config.attention,
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": True,
    }
    try:
        with no_progress_bars():
            model = load_causal_lm(path, empty=empty, **options)
    except (OSError, ValueError, ImportError) as e:
        why = str(e).strip().splitlines()[0]
        if "attn_implementation" in why:
            raise BackendConfigError(
                f"backend.attention is {config.attention!r}, which the model in {str(path)!r} has "
                "not; set it to 'eager'"
            ) from e
        raise BackendConfigError(f"the model in {str(path)!r} cannot be loaded: {why}") from e
    dtype = getattr(torch, config.dtype)
    if config.rows == "tree":
        tree.enable(model, dtype, probe=not empty)
    elif config.context_parallel > 1:
        wanted = f"backend.context_parallel is {config.context_parallel}"
        tree.enable(model, dtype, probe=not empty, wanted=wanted, remedy="set it to 1")
    elif config.attention == "sdpa" and device_of(config.device).type == "cuda" and not empty:
        # Else (sliding windows, sinks) rows are padded: the same update, for more tokens.
        with suppress(BackendConfigError):
            tree.enable(model, dtype)
    model.eval()
    return model


def read_model(path: Path, *, trust_remote_code: bool) -> dict[str, Tensor]:
    """The weights of the model in `path` by the names of its module, in the type that they have
    there.

    Raises:
        RuntimeError: it is no model, or not a whole one.
    """
    try:
        with no_progress_bars():
            model, found = load_causal_lm(
                path,
                trust_remote_code=trust_remote_code,
                dtype="auto",
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError) as e:
        raise RuntimeError(f"it cannot be loaded: {e}") from e
    if missing := sorted(found["missing_keys"]):
        raise RuntimeError(f"{missing[0]} is not there")
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def model_dir(path: Path, key: str) -> Path:
    if not (path / "config.json").is_file():
        raise BackendConfigError(
            f"{key} is {str(path)!r}, which has no config.json; "
            "point it at a Hugging Face model directory"
        )
    return path


def layers_of(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def compile_layers(model: Any) -> None:
    """Compile each layer, once for all of one form and for rows of any length."""
    for layer in layers_of(model):
        layer.compile(dynamic=True)


def checkpoint_layers(model: Any, *, selective: bool = False) -> None:
    """Keep of each layer its input; if `selective`, also what its attention puts out."""
    layers = layers_of(model)
    if not layers:
        raise BackendConfigError(
            f"backend.gradient_checkpointing is on, but {type(model).__name__} has no layers that "
            "support it; turn it off and lower micro_batch_tokens instead"
        )
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _kept_operations())
    model.gradient_checkpointing_enable(options)
    for layer in layers:
        # Layers checkpoint in training mode only; what is in them (dropout) stays in eval mode.
        layer.training = True
        for name, value in vars(layer).items():  # dropout that is a function has its rate there
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)


def _kept_operations() -> list[Any]:
    """Attention in all its kernels: the one part whose cost grows with the square of a row."""
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    kept = [getattr(torch.ops.aten, name).default for name in names]
    return [*kept, torch.ops.torch_attn._varlen_attn.default, torch.ops.higher_order.flex_attention]


def aliases_of(model: Any) -> dict[str, str]:
    """Name of a tied weight -> the first name of the same weight."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer.", ".")
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A bar per published version would tear the live display apart."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs

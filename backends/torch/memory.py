"""Memory of one training rank, estimated from a model's config.json: no model is loaded.

    states        weights, gradients, optimizer    shared by all ranks (FSDP2)
                  reference, critic                where there is one
    of a step     activations                      the longest micro-batch, layer by layer
                  head                             logits that exist at once, several times over
                  gathered                         what FSDP2 makes whole for a moment
    others'       engine, context                  on a GPU: an engine beside the rank, CUDA itself

Worked example: Qwen3-4B, bfloat16, Adam, one GPU. 4.0e9 parameters × (4 master + 2 + 4 gradient + 8
moments) = 72 GB before the first activation: no 80 GB GPU holds it with a row of 16,384 tokens.
LoRA of rank 16 takes 8 GB of weights and 0.5 GB for its adapters.

The activations are the tensors that autograd saves in a decoder layer of transformers (norm in
float32, attention, gated MLP); `tests/backends/test_memory.py` holds the sum against measured
peaks.
Owns the arithmetic. Does not own how much memory there is, nor what is refused
(`stepwell/run/checks.py`). Loads no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from stepwell.backends.config import TorchBackendConfig
from stepwell.backends.errors import BackendConfigError
from stepwell.backends.model_folder import count_parameters, read_object
from stepwell.backends.pictures import MODEL_TYPES

CUDA_CONTEXT = 1.2e9
"""Bytes that CUDA's context, cuBLAS and NCCL take on a GPU before any tensor."""
LENT = CUDA_CONTEXT + 1e9
"""Bytes that an engine keeps of a GPU while its memory is lent."""
_MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0, "adafactor": 0.0, "sgd": 0.0}
"""Bytes of state per parameter."""
_HEAD_COPIES = 5
"""float32 copies of the logits of one chunk at the peak of its backward pass."""
_ENTROPY_COPIES = 2
_NO_QK_NORM = frozenset({"llama", "qwen2", "qwen2_moe", "mistral", "mixtral", "phi3", "gpt2"})
"""Families that do not normalise queries and keys; others are taken to."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes, as far as its memory depends on them."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    queries: int
    """Width of all query heads together."""
    key_heads: int
    keys: int
    """Width of all key heads together."""
    inner: int
    """Width of the MLP that one token goes through: of all its experts together."""
    vocab: int
    tied: bool
    qk_norm: bool
    experts_per_token: int = 0
    """0: the MLP is dense."""
    reads_pictures: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> ModelShape:
        """The shape in a config.json; `parameters` are derived from it unless they are given."""
        text = {**config, **(config.get("text_config") or {})}

        def size(*names: str, default: int = 0) -> int:
            found = next((text[name] for name in names if text.get(name)), default)
            return int(max(found) if isinstance(found, list) else found)  # one for each layer

        hidden, layers = size("hidden_size", "n_embd"), size("num_hidden_layers", "n_layer")
        heads = size("num_attention_heads", "n_head", default=1)
        head = size("head_dim", default=hidden // heads)
        key_heads = size("num_key_value_heads", default=heads)
        queries, keys = heads * head, key_heads * head
        n_experts = size("num_experts", "num_local_experts", "n_routed_experts")
        active = size("num_experts_per_tok", default=1) if n_experts else 0
        inner = size("intermediate_size", "n_inner", default=4 * hidden)
        if n_experts:
            inner = size("moe_intermediate_size", default=inner) * active
        vocab, tied = size("vocab_size"), bool(text.get("tie_word_embeddings", not hidden))
        if parameters is None:
            attention = hidden * (2 * queries + 2 * keys)
            experts = 3 * hidden * inner * (n_experts / active if n_experts else 1)
            router = hidden * n_experts
            norms = 2 * hidden + 2 * head
            embedding = vocab * hidden * (1 if tied else 2)
            parameters = int(layers * (attention + experts + router + norms) + embedding + hidden)
        return cls(
            parameters=parameters,
            layers=layers,
            hidden=hidden,
            heads=heads,
            queries=queries,
            key_heads=key_heads,
            keys=keys,
            inner=inner,
            vocab=vocab,
            tied=tied,
            qk_norm=text.get("model_type") not in _NO_QK_NORM,
            experts_per_token=active,
            reads_pictures=config.get("model_type") in MODEL_TYPES and "vision_config" in config,
        )

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """The shape of the model in `folder`, parameters counted in its files of weights.

        Raises:
            BackendConfigError: its config.json cannot be read.
        """
        config = read_object(folder / "config.json", f"the model in {folder}")
        return cls.of(config, count_parameters(folder) or None)

    @property
    def embedding(self) -> int:
        """Parameters that belong to no layer: embedding and LM head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> float:
        """Parameters of one layer."""
        return max(0, self.parameters - self.embedding) / max(1, self.layers)

    def check_context(self, ranks: int) -> None:
        """Refuse a `backend.context_parallel` that this model cannot be trained with.

        Raises:
            BackendConfigError: it does not divide the heads, or the model reads pictures.
        """
        if self.reads_pictures and ranks > 1:
            raise BackendConfigError(
                f"backend.context_parallel is {ranks}, but the model reads pictures, whose rows "
                "ranks do not share; set it to 1"
            )
        if self.heads % ranks:
            fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise BackendConfigError(
                f"backend.context_parallel is {ranks}, which does not divide the model's "
                f"{self.heads} attention heads; take one of {', '.join(map(str, fits))}"
            )

    def adapters(self, rank: int, target: str | tuple[str, ...]) -> int:
        """Parameters of LoRA adapters of `rank` on the modules that `target` names."""
        h, q, k, i = self.hidden, self.queries, self.keys, self.inner
        sides = {"q_proj": h + q, "k_proj": h + k, "v_proj": h + k, "o_proj": q + h}
        if not self.experts_per_token:  # peft's all-linear does not see fused experts
            sides |= {"gate_proj": h + i, "up_proj": h + i, "down_proj": i + h}
        chosen = sides if isinstance(target, str) else [name for name in target if name in sides]
        return self.layers * rank * sum(sides[name] for name in chosen)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of an optimizer step."""

    weights: float
    """Master weights, and the copy that computes in bfloat16."""
    gradients: float
    optimizer: float
    reference: float
    critic: float
    activations: float
    head: float
    gathered: float
    engine: float
    context: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def kept(self) -> float:
        """Bytes that stay on the device between optimizer steps, when gradients were freed; of a
        critic all of its states."""
        return self.weights + self.optimizer + self.reference + self.critic + self.context

    def parts(self) -> dict[str, float]:
        """Name and bytes of each part that is not 0."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: size for name, size in named.items() if size}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in self.parts().items())
        return f"{_gb(self.total)} GB ({parts})"


def estimate(
    model: ModelShape,
    backend: TorchBackendConfig,
    ranks: int,
    longest_row: int,
    *,
    on_cuda: bool,
    reference: bool = False,
    critic: ModelShape | None = None,
    entropy: bool = False,
    engine_bytes: float = 0.0,
    reduce: Literal["each", "last"] = "each",
) -> MemoryEstimate:
    """Memory of one of `ranks` ranks at the peak of an optimizer step.

    Args:
        longest_row: tokens of the longest row; it goes alone where it exceeds
            `micro_batch_tokens`, over the ranks of `context_parallel`.
        reference: a frozen copy of the model is kept for a KL term.
        critic: value model on the same device, if one is trained.
        entropy: with a gradient through it.
        engine_bytes: share of the device that an engine keeps while the rank computes.
        reduce: of `backend.reduce`; without effect on one rank.
    """
    backend = backend.resolved(on_cuda)
    compute = 2 if backend.dtype == "bfloat16" else 4
    rounded = backend.dtype == "bfloat16" and ranks == 1
    """One process keeps a bfloat16 copy beside its masters; FSDP2 makes it as it gathers."""
    sharded = model.parameters / ranks
    tokens = max(backend.micro_batch_tokens, -(-longest_row // backend.context_parallel))
    trained = float(model.parameters)
    frozen = 0.0
    if backend.lora is not None:
        trained = model.adapters(backend.lora.rank, backend.lora.target_modules)
        frozen = sharded * compute
    moments = _MOMENTS[backend.optimizer] + (4.0 if backend.momentum else 0.0)
    state = trained / ranks

    def weights_of(parameters: float) -> float:
        return parameters * (4 + (compute if rounded else 0))

    gathered = 0.0
    if ranks > 1:
        # Of the root (until the backward pass ends) and of two layers: weights as they compute;
        # of the root and a layer the gradient as computed, and in float32 on its way to the sum.
        root, layer = model.embedding, model.layer
        moving = 0 if backend.lora is not None else compute + 4
        gathered = root * (compute + moving) + layer * (2 * compute + moving)
        if reduce == "last":
            gathered += 4 * trained
    elif rounded and backend.lora is None:
        gathered = model.vocab * model.hidden * compute * 2.0  # gradients on their way to a master
    of_critic = 0.0
    if critic is not None:  # it has no adapters
        share = critic.parameters / ranks
        of_critic = weights_of(share) + (4 + moments) * share
    chunk = max(1, backend.logits_mb * 1_000_000 // (4 * max(1, model.vocab)))
    copies = _HEAD_COPIES + (_ENTROPY_COPIES if entropy else 0)
    logits = 4.0 * model.vocab * min(tokens, chunk) * copies
    return MemoryEstimate(
        weights=frozen + weights_of(state),
        gradients=4 * state,
        optimizer=moments * state,
        reference=sharded * compute if reference else 0.0,
        critic=of_critic,
        activations=_activations(model, backend, compute) * tokens,
        head=logits + tokens * model.hidden * compute,
        gathered=gathered,
        engine=engine_bytes,
        context=CUDA_CONTEXT if on_cuda else 0.0,
    )


def _activations(model: ModelShape, backend: TorchBackendConfig, compute: int) -> float:
    """Bytes per token between forward and backward pass, at their peak.

    A layer saves for its backward pass: of each norm the input in float32, normalised as computed,
    and its output; queries, keys, values and the attention's output; gate, up, their activation
    and product. With adapters the linear layers' own inputs are only saved for them, and a frozen
    norm saves one tensor less.
    """
    h, q, k, i = model.hidden, model.queries, model.keys, model.inner
    of_norm = 1 if compute == 4 else 2  # float32 counts twice in bfloat16's units
    per_norm = of_norm + (1 if backend.lora is None else 0) + 1
    layer = 2 * per_norm * h + 2 * q + 2 * k + 4 * i
    if model.qk_norm:
        layer += (per_norm - 1) * (q + k)
    if backend.lora is not None:
        layer += 7 * backend.lora.rank
    if (sharing := backend.context_parallel) > 1:
        # Key heads are repeated until the ranks divide them, and attention's output is saved by
        # heads and by tokens.
        copies = math.lcm(model.key_heads, sharing) // model.key_heads
        layer += 2 * (copies - 1) * k + q
    if model.experts_per_token:
        layer += 2 * model.experts_per_token * h  # a copy for each expert, and of its output
    # The backward pass of the layer at work: gradients of the MLP's parts and of the stream.
    working = (3 * i + 2 * h) * compute
    if backend.gradient_checkpointing:
        kept = h + (q if backend.gradient_checkpointing == "selective" else 0)
        return model.layers * kept * compute + layer * compute + working
    return model.layers * layer * compute + working


def choose_reduce(
    last: MemoryEstimate, has: float, wanted: Literal["auto", "each", "last"]
) -> Literal["each", "last"]:
    """Choose how often ranks sum their gradients: once a step where `last` fits into 0.9 of the
    `has` bytes of a device, else once a micro-batch."""
    if wanted != "auto":
        return wanted
    return "last" if last.total <= 0.9 * has else "each"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size < 99.5e9 else f"{math.ceil(size / 1e9)}"

"""Ranks that share one model: sharded weights (FSDP2, `fully_shard`), shared micro-batches.

    rank 0   rows 0, 2, …  ─► loss, backward ─┐ reduce-scatter: the gradient of the sum,
    rank 1   rows 1, 3, …  ─► loss, backward ─┘ each rank keeps and updates its shard of it

Every rank makes the same calls with the same arguments. Losses are sums, so ranks add up as
micro-batches do, and one process computes the same update. Published weights are gathered whole;
checkpoints are written in shards (`shards.py`) that a run with another number of ranks can read.

Owns: this process's place among the ranks, sharding, gathering, who computes which rows.
Does not own: starting the processes (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from stepwell.backends.errors import BackendConfigError, BackendError
from stepwell.backends.rows import Layout, TokenRow, computed_tokens, micro_batches
from stepwell.backends.torch.context import Context

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that share the model; alone if `mesh` is None."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    context: Context | None = None
    """Ranks that share its micro-batches; None: it has its own."""

    @classmethod
    def join(cls, expected: int, device: torch.device, context: int = 1) -> Ranks:
        """The place in the process group, which must have `expected` ranks, of which `context`
        neighbours share their micro-batches.

        Raises:
            BackendConfigError: it has another number, or there is none.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size != expected:
            raise BackendConfigError(
                f"backend.ranks is {expected}, but {size} process{'es' * (size > 1)} share the "
                f"model; set backend.ranks={size} or start {expected} ranks"
            )
        if size == 1:
            return cls()
        mesh = init_device_mesh(device.type, (size,))
        return cls(dist.get_rank(), size, mesh, Context.join(context))

    @property
    def counts(self) -> bool:
        """This rank speaks for a micro-batch: it has it alone, or first of those that share it."""
        return self.context is None or self.context.rank == 0

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, by rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def only_first(self) -> Iterator[None]:
        """An error that only rank 0 can meet: every rank raises it, or none.

        Raises:
            BackendError: rank 0 raised one.
        """
        error: BackendError | None = None
        try:
            yield
        except BackendError as e:
            error = e
        if found := next((e for e in self.gather(error) if e is not None), None):
            raise found

    def place(
        self,
        policy: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        tower: nn.Module | None = None,
    ) -> None:
        """Put `policy` on `device`; with others, shard it over the ranks, layer by layer.

        The frozen `tower` in it stays whole on every rank: a rank computes it for the pictures of
        its own rows, and to gather a shard all ranks would have to come at once.

        Only rank 0's weights need be there; the others' may be on the meta device: rank 0 sends
        each tensor, of which a rank keeps its shard. Weights are gathered and computed with in
        `dtype`, gradients summed in float32.
        """
        if self.mesh is None:
            policy.to(device)
            return
        weights = policy.state_dict() if self.rank == 0 else {}
        self._shard(policy, dtype, tower)
        if self.rank == 0:
            policy.to(device)
        else:
            policy.to_empty(device=device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(policy, weights, options=options)
        for buffer in policy.buffers():  # rotary frequencies are in no state_dict
            dist.broadcast(buffer, 0)

    def _shard(self, policy: nn.Module, dtype: torch.dtype, tower: nn.Module | None) -> None:
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if dtype != torch.float32 else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        whole = set() if tower is None else set(tower.modules())
        ignored = None if tower is None else set(tower.parameters())
        layers = [
            m
            for m in policy.modules()
            if isinstance(m, GradientCheckpointingLayer) and m not in whole
        ]
        for module in [*layers, policy]:
            fully_shard(module, mesh=self.mesh, mp_policy=precision, ignored_params=ignored)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # The sum over ranks, not the mean; and gloo has no reduction that scales.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, policy: nn.Module, now: bool) -> None:
        """Choose whether the next backward pass ends with the sum over ranks, or adds to the whole
        gradient that each rank keeps until then (`backend.reduce`)."""
        if isinstance(policy, FSDPModule):
            policy.set_requires_gradient_sync(now)

    def rounds(
        self, rows: Sequence[TokenRow], budget: int, form: Layout = "merged"
    ) -> list[list[TokenRow]]:
        """This rank's micro-batches, one a round; an empty one where there are too few rows. Ranks
        that share theirs have the same ones, of `budget` tokens for each of them.

        All ranks compute a round together and wait for the slowest, so a round's micro-batches
        are neighbours by size, and all are as small as the number of rounds that `budget`
        (computed tokens) asks for allows.
        """
        sharing = 1 if self.context is None else self.context.size
        groups, mine, budget = self.size // sharing, self.rank // sharing, budget * sharing
        chunks = list(micro_batches(rows, budget, form))
        if groups == 1:
            return chunks
        slots = -(-len(chunks) // groups) * groups
        low, high = 1, budget
        while low < high:
            middle = (low + high) // 2
            smaller = list(micro_batches(rows, middle, form))
            if len(smaller) <= slots:
                chunks, high = smaller, middle
            else:
                low = middle + 1
        chunks.sort(key=lambda chunk: -computed_tokens(chunk, form))
        chunks += [[]] * (slots - len(chunks))
        # Every other round backwards, or the first rank would always have the longest.
        return [
            chunks[start + (mine if number % 2 == 0 else groups - 1 - mine)]
            for number, start in enumerate(range(0, slots, groups))
        ]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(module: nn.Module) -> None:
    """Free the weights that a forward pass without a backward pass left whole."""
    if isinstance(module, FSDPModule):
        module.reshard()


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into those of a model that may be sharded; others stay as they are.

    Raises:
        RuntimeError: a name or a shape is not the model's.
    """
    own = model.state_dict()
    placed = {}
    for name, value in weights.items():
        like = own.get(name)
        if isinstance(like, DTensor) and like.shape == value.shape:
            whole = value.to(like.device)
            value = distribute_tensor(whole, like.device_mesh, like.placements)
        placed[name] = value
    model.load_state_dict(placed, strict=False)

"""Work of an optimizer step in floating-point operations, for the share of a GPU's peak (MFU).

    forward   2 × weights of a token's path × tokens + 4 × width × pairs of attention + head
    backward  twice that; with adapters once, and what adapters add is left out

Recomputation (gradient checkpointing, the chunked head) is not counted: it is not the model's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

from stepwell.backends.rows import TokenRow
from stepwell.backends.torch.memory import ModelShape

PEAK = MappingProxyType(
    {
        "B200": 2250e12,
        "H200": 989e12,
        "H100 PCIe": 756e12,
        "H100": 989e12,
        "A100": 312e12,
        "L40S": 362e12,
        "RTX 4090": 165e12,
    }
)
"""Dense bfloat16 operations per second by a part of the device's name; the vendor's figures."""


def step_flops(
    shape: ModelShape, rows: Sequence[TokenRow], computed: int, trained: int, *, lora: bool
) -> float:
    """Operations of forward and backward pass over a micro-batch.

    Args:
        computed: tokens that went through the model. A tree's share of the attention is taken to
            be its share of the tokens.
        trained: tokens that went through the LM head.
    """
    fed = sum(row.n_inputs for row in rows)
    pairs = sum(row.n_inputs * (row.n_inputs + 1) / 2 for row in rows) * min(1.0, computed / fed)
    path = shape.hidden * (2 * shape.queries + 2 * shape.keys + 3 * shape.inner)
    layers = shape.layers * (2 * path * computed + 4 * shape.queries * pairs)
    return (layers + 2 * shape.hidden * shape.vocab * trained) * (2 if lora else 3)


def peak_of(device: torch.device) -> float | None:
    """Operations per second of a GPU by its name; None: a CPU, or a GPU that is not in `PEAK`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK.items() if part in name), None)

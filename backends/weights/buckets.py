"""Weights as flat buckets: the bytes of some tensors one behind another, and what they are.

A bucket has at most `limit` bytes, or one tensor that is larger. Tensors of wider types come first,
so that each stands at a multiple of its element's size, as SGLang asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stepwell.backends.engines.api import Bucket


def pack(weights: dict[str, Tensor], limit: int | None) -> Iterator[tuple[Bucket, Tensor]]:
    """Buckets and their bytes. `weights` is emptied: no tensor is held twice."""
    names: list[str] = []
    size = 0
    for name in sorted(weights, key=lambda name: -weights[name].element_size()):
        nbytes = weights[name].nbytes
        if names and limit is not None and size + nbytes > limit:
            yield _bucket([(n, weights.pop(n)) for n in names])
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield _bucket([(n, weights.pop(n)) for n in names])


def _bucket(named: list[tuple[str, Tensor]]) -> tuple[Bucket, Tensor]:
    names, tensors = zip(*named, strict=True)
    bucket = Bucket(
        names,
        tuple(str(t.dtype).removeprefix("torch.") for t in tensors),
        tuple(tuple(t.shape) for t in tensors),
    )
    return bucket, torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors])


def size_of(bucket: Bucket) -> int:
    """Bytes of the bucket.

    Raises:
        ValueError: a type is none of torch's, or a shape is negative.
    """
    return sum(_sizes(bucket))


def views(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a bucket, in its bytes."""
    at = 0
    for name, dtype, shape, size in zip(*bucket, _sizes(bucket), strict=True):
        yield name, flat[at : at + size].view(getattr(torch, dtype)).reshape(shape)
        at += size


def _sizes(bucket: Bucket) -> list[int]:
    sizes = []
    for name, dtype, shape in zip(*bucket, strict=True):
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or any(n < 0 for n in shape):
            raise ValueError(f"{name} cannot be {dtype} {shape}")
        sizes.append(math.prod(shape) * kind.itemsize)
    return sizes

"""Hashes of a version's tensors, so that a replica that loaded other bytes is caught.

SGLang's `/weights_checker` answers a hash per parameter, of its own layout and, on a GPU, of its
own kernel: replicas of one layout must agree with each other. The embedded engine answers the same
way with the SHA-256 of the tensors as the checkpoint names them, so its answer is held against the
checkpoint (`checkpoint_hashes`). `compare` says which was done.

Owns hashes. Does not own the requests (`backends/engines/client.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

_COMPUTED = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis")
"""Buffers that an engine computes: not weights (SGLang leaves them out, too)."""


def tensor_hash(tensor: Tensor) -> str:
    """16 hex digits of the SHA-256 of the tensor's bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]


def model_hashes(model: Any) -> dict[str, str]:
    """Name -> hash of every weight of a torch model; tied ones once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor_hash(t) for name, t in named if not any(c in name for c in _COMPUTED)}


def overall_hash(hashes: Mapping[str, str]) -> str:
    """One digest of many, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(name.encode())
        digest.update(hashes[name].encode())
    return digest.hexdigest()


def read_tensors(
    folder: str | Path, only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a directory's safetensors files, one at a time; `only` some of them."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if only is None or name in only:
                    yield name, tensors.get_tensor(name)


def tensor_names(folder: str | Path) -> set[str]:
    """Names of all tensors of a directory's safetensors files."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


RankHashes: TypeAlias = tuple[str, Mapping[str, str]]
"""Answer of one rank of an engine: its layout (ranks of one layout hold the same tensors), and the
hashes by name."""


def checkpoint_hashes(folder: str | Path, dtype: str, *, prefix: str = "") -> dict[str, str]:
    """Name -> hash of every tensor of a checkpoint, as the embedded engine holds it.

    Args:
        dtype: of the engine, as torch names it; "auto" is the checkpoint's own.
        prefix: what the engine puts before the names.
    """
    import torch

    def cast(tensor: Tensor) -> Tensor:
        if dtype == "auto" or not tensor.is_floating_point():
            return tensor
        return tensor.to(getattr(torch, dtype))

    return {prefix + name: tensor_hash(cast(tensor)) for name, tensor in read_tensors(folder)}


def compare(
    answers: Mapping[str, Sequence[RankHashes] | None], expected: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], dict[str, str]]:
    """Compare the replicas' hashes with the checkpoint's, or with each other.

    Args:
        answers: by replica; None: it has no checksum endpoint. One without a tensor says nothing.
        expected: the checkpoint's, by replica, for embedded engines.

    Returns:
        (replica -> how it was verified: `checksum`, `agreement` or `version`, replica -> what is
        wrong with it). By `agreement` is told only that replicas of a layout differ, not which is
        wrong: all but the first are named.
    """
    how: dict[str, str] = {}
    wrong: dict[str, str] = {}
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for replica, answer in answers.items():
        ranks = answer or ()
        if not any(hashes for _, hashes in ranks):
            how[replica] = "version"
            continue
        known = expected.get(replica, {})
        unknown = any(hashes.keys() - known.keys() for _, hashes in ranks)
        how[replica] = "agreement" if unknown else "checksum"
        for layout, hashes in ranks:
            bad = [n for n, found in hashes.items() if known.get(n, found) != found]
            if bad:
                wrong[replica] = f"{len(bad)} of {len(hashes)} tensors differ, as {bad[0]}"
            for name in sorted(hashes.keys() - known.keys()):
                other, hash_ = first.setdefault((layout, name), (replica, hashes[name]))
                if hash_ != hashes[name]:
                    wrong[replica] = f"tensor {name} differs from that of {other}"
    return how, wrong

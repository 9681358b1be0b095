"""Hashes of a version's tensors, so that a replica that loaded others is caught.

SGLang's `/weights_checker` answers a hash per parameter: on a CPU the first 16 hex digits of the
SHA-256 of its bytes, on a GPU another one, of its own kernel. The embedded engine answers the same
way, always with the former. What a checkpoint should hash to is computed here:

    engine's parameter                     from the checkpoint
    model.norm.weight                      the tensor, in the engine's dtype
    …self_attn.qkv_proj.weight             q_proj, k_proj, v_proj one after another (SGLang fuses)
    …mlp.gate_up_proj.weight               gate_proj, up_proj
    model.embed_tokens.weight, lm_head     also with rows of zeros up to a multiple of 64 (SGLang)

A parameter of another layout (sharded over ranks, quantised, hashed on a GPU, fused otherwise) is
not foretold: replicas of one layout must then agree with each other. `compare` says which was done.

Owns hashes. Does not own the requests (`backends/engines/client.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PADDED = ("embed_tokens.", "lm_head.")
VOCAB_MULTIPLE = 64
_COMPUTED = ("cos_sin_cache", "cos_cache", "sin_cache", "inv_freq", "freqs_cis")
"""Buffers that an engine computes: not weights (SGLang leaves them out, too)."""


def tensor_hash(*parts: Tensor, zeros: int = 0) -> str:
    """16 hex digits of the SHA-256 of the parts' bytes one after another, and `zeros` bytes 0."""
    import torch

    digest = hashlib.sha256()
    for part in parts:
        flat = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    digest.update(bytes(zeros))
    return digest.hexdigest()[:16]


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


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a directory's safetensors files, one at a time."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)


@dataclass(frozen=True, slots=True)
class RankHashes:
    """Hashes that one rank of an engine answered."""

    hashes: Mapping[str, str]
    layout: str
    """Ranks of one layout hold the same tensors."""
    whole: bool
    """It holds whole tensors, hashed on a CPU: they can be foretold."""


class Expected:
    """The hashes that a checkpoint's tensors must have in an engine of one dtype."""

    def __init__(self, folder: str | Path, dtype: str, *, prefix: str = "") -> None:
        """`dtype`: of the engine, as torch names it; "auto" is the checkpoint's own. `prefix`: what
        the engine puts before the names."""
        self._tensors = {prefix + name: tensor for name, tensor in read_tensors(folder)}
        self._dtype = dtype
        self._known: dict[str, frozenset[str] | None] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def hashes(self, name: str) -> frozenset[str] | None:
        """The hashes that parameter `name` may have; None if it cannot be foretold."""
        if name not in self._known:
            self._known[name] = self._compute(name)
        return self._known[name]

    def _compute(self, name: str) -> frozenset[str] | None:
        if name in self._tensors:
            tensor = self._cast(self._tensors[name])
            hashes = {tensor_hash(tensor)}
            if any(p in name for p in PADDED) and tensor.dim() == 2:
                rows = -len(tensor) % VOCAB_MULTIPLE
                zeros = rows * tensor.shape[1] * tensor.element_size()
                hashes.add(tensor_hash(tensor, zeros=zeros))
            return frozenset(hashes)
        for fused, parts in FUSED.items():
            names = [name.replace(fused, part) for part in parts]
            if fused in name and all(n in self._tensors for n in names):
                return frozenset({tensor_hash(*(self._cast(self._tensors[n]) for n in names))})
        return None

    def _cast(self, tensor: Tensor) -> Tensor:
        import torch

        if self._dtype == "auto" or not tensor.is_floating_point():
            return tensor
        return tensor.to(getattr(torch, self._dtype))


def compare(
    answers: Mapping[str, Sequence[RankHashes] | None], expected: Mapping[str, Expected]
) -> tuple[dict[str, str], dict[str, str]]:
    """Hold the replicas' hashes against what was meant.

    Args:
        answers: by replica; None: it has no checksum endpoint.
        expected: by replica, for those whose engine holds whole tensors.

    Returns (replica -> how it was verified: `checksum`, `agreement` or `version`, replica -> what
    is wrong with it). By `agreement` is told only that replicas of a layout differ, not which is
    wrong: all but the first are named.
    """
    how: dict[str, str] = {}
    wrong: dict[str, str] = {}
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for replica, ranks in answers.items():
        if ranks is None:
            how[replica] = "version"
            continue
        how[replica] = "checksum"
        for rank in ranks:
            foretold = expected.get(replica) if rank.whole else None
            bad, open_ = _hold(rank.hashes, foretold)
            if bad:
                wrong[replica] = f"{len(bad)} of {len(rank.hashes)} tensors differ, as {bad[0]}"
            if open_ and how[replica] == "checksum":
                how[replica] = "agreement"
            for name in open_:
                first = seen.setdefault((rank.layout, name), (replica, rank.hashes[name]))
                if first[1] != rank.hashes[name]:
                    wrong[replica] = f"tensor {name} differs from that of {first[0]}"
    return how, wrong


def _hold(hashes: Mapping[str, str], foretold: Expected | None) -> tuple[list[str], list[str]]:
    """(names whose hash is wrong, names that cannot be foretold)."""
    bad, unknown = [], []
    for name, found in hashes.items():
        accepted = foretold.hashes(name) if foretold is not None else None
        if accepted is None:
            unknown.append(name)
        elif found not in accepted:
            bad.append(name)
    return bad, unknown

"""Handles of tensors in memory that two processes share, in SGLang's form: no byte is sent.

SGLang's `/update_weights_from_tensor` takes named tensors as torch's `ForkingPickler` writes them:
on a GPU a CUDA IPC handle and an offset, on a CPU the name of a shared memory object. A GPU is
named by its UUID, since two processes may number their GPUs differently; SGLang's reader takes it.

What is read is only ever built by the few functions of torch that stand in `_ALLOWED`.
"""

from __future__ import annotations

import base64
import io
import mmap
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from stepwell.backends.engines.api import Bucket
from stepwell.backends.weights.buckets import views

_DEVICE = 6
"""Position of the device in the arguments of torch's `rebuild_cuda_tensor`."""
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch", "Tensor"),
        ("torch.storage", "TypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.serialization", "_get_layout"),
    }
)


def shared_tensors(
    bucket: Bucket, flat: Tensor, *, readers: int = 1, on_host: bool = False
) -> tuple[Tensor, str]:
    """A copy of the bucket in memory that others can map, and its tensors' handles as text.

    Args:
        readers: processes that will read it, once each. torch removes a memory object's name with
            its last reference, and each reader gives one up that it takes to be its own.
        on_host: not on the GPU, if there is one.
    """
    if torch.cuda.is_available() and not on_host:
        buffer = flat.cuda()
        torch.cuda.synchronize()
    else:
        buffer = flat.clone()
    stream = io.BytesIO()
    _Pickler(stream, readers).dump(list(views(bucket, buffer)))
    return buffer, base64.b64encode(stream.getvalue()).decode()


def memory_name(buffer: Tensor) -> str | None:
    """Name of the machine's memory that `shared_tensors` has put a bucket into; None: it is a
    GPU's."""
    if buffer.is_cuda:
        return None
    storage: Any = buffer.untyped_storage()
    return str(storage._share_filename_cpu_()[1].decode())


def free_memory(name: str) -> None:
    """Free memory that a reader which died has never given up; no-op if all have, and where names
    are not files (macOS). Nobody may be reading it.

    The name stays, with the page in which torch counts readers: torch ends a process that is the
    last to give up memory whose name has gone, and one may have it mapped still.
    """
    with suppress(FileNotFoundError):
        os.truncate(Path("/dev/shm", name.lstrip("/")), mmap.PAGESIZE)


def read_shared(text: str) -> dict[str, Tensor]:
    """Copies of the tensors that handles name.

    Raises:
        ValueError: it is not what `shared_tensors` writes.
        RuntimeError: the memory is not there.
    """
    named = _Unpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
    return {str(name): tensor.clone() for name, tensor in named}


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, readers: int) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._readers = readers

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.dtype):
            return NotImplemented
        if isinstance(obj, torch.UntypedStorage):
            storage: Any = obj
            named = storage._share_filename_cpu_()
            for _ in range(self._readers):
                storage._shared_incref()
            return reductions.rebuild_storage_filename, (type(obj), *named)
        if isinstance(obj, torch.TypedStorage):
            return reductions.reduce_typed_storage(obj)  # type: ignore[no-untyped-call]  # theirs
        if not isinstance(obj, Tensor):
            return NotImplemented
        build, args = reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]  # theirs
        if obj.is_cuda:
            uuid = str(torch.cuda.get_device_properties(args[_DEVICE]).uuid)
            args = (*args[:_DEVICE], uuid, *args[_DEVICE + 1 :])
        return build, args


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _ALLOWED:
            raise ValueError(f"{module}.{name} is not part of a tensor's handle")
        if name == "rebuild_cuda_tensor":
            return _rebuild_cuda_tensor
        return super().find_class(module, name)


def _rebuild_cuda_tensor(*args: Any) -> Tensor:
    wanted = args[_DEVICE]
    for device in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(device).uuid) == wanted:
            args = (*args[:_DEVICE], device, *args[_DEVICE + 1 :])
            built: Tensor = reductions.rebuild_cuda_tensor(*args)  # type: ignore[no-untyped-call]  # theirs
            return built
    raise ValueError(f"GPU {wanted} is not visible to this process")

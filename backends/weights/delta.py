"""A directory with those tensors of a version that differ from the version before it.

    .tmp-PID@MACHINE-delta8/
      model.safetensors   the tensors that changed, whole
      config.json
      delta.json          {"since": "7"}: complete only beside the weights of version 7

An engine that has version 7 reads these few files in place of the whole version. SGLang replaces
the tensors that a directory names and keeps the others. Tensors are compared by their hashes.

Owns the directory's content. Does not own who may load it (`transports.py`). Importing it loads no
torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stepwell.datapool.sealed import read_sealed, sealed_json

DELTA = "delta.json"


def write_delta(path: Path, changed: Collection[str], since: int, folder: Path) -> None:
    """Write the tensors `changed` of the version in `path`, which differs in them from `since`."""
    from safetensors.torch import save_file

    from stepwell.backends.weights.digest import read_tensors

    folder.mkdir()
    tensors: dict[str, Any] = dict(read_tensors(path, changed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(path / "config.json", folder / "config.json")
    (folder / DELTA).write_bytes(sealed_json({"since": str(since)}))


def since(folder: Path) -> str | None:
    """The version that the tensors in `folder` complete; None: they are a whole version.

    Raises:
        DamagedFileError: it does not say.
    """
    try:
        return str(read_sealed(folder / DELTA, "publish again, by disk")["since"])
    except (FileNotFoundError, NotADirectoryError):
        return None

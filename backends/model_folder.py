"""This module looks at a Hugging Face model directory without loading it, so that a model that
cannot be trained is refused in milliseconds: files that are missing, cut off or only pointers.

    config.json        which architecture it is
    *.safetensors      each begins with the names, shapes and places of its tensors: their number of
                       parameters is exact, and a file that was cut off is shorter than it says
    tokenizer, chat template

Owns what is read of the folder. Does not own loading it (`torch/backend.py`, the engines) or the
memory that training it takes (`torch/memory.py`). Loads no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stepwell.backends.errors import BackendConfigError

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_POINTER = b"version https://git-lfs"
_END = 1 << 16
"""Bytes at each end of a file that its fingerprint reads."""


def check_weights(folder: Path, key: str = "model.path") -> None:
    """Raises BackendConfigError: `folder` is no model directory, or its weights are not whole."""
    whose = f"{key} is {str(folder)!r}"
    config = read_object(folder / "config.json", whose)
    if not {"model_type", "architectures"} & config.keys():
        raise BackendConfigError(
            f"{whose}, whose config.json names no model_type; point it at a Hugging Face model "
            "directory"
        )
    files = _weights(folder)
    if not files:
        raise BackendConfigError(
            f"{whose}, which has no weights (*.safetensors); download the whole model"
        )
    if missing := [file.name for file in files if not file.is_file()]:
        raise BackendConfigError(
            f"{whose}, which lacks {len(missing)} of {len(files)} files of weights "
            f"({missing[0]} first); download it again"
        )
    for file in files:
        _check_file(file, whose)


def check_architecture(folder: Path, key: str = "model.path") -> None:
    """Raises BackendConfigError: the installed transformers does not know it. Imports that, but no
    model."""
    config = read_object(folder / "config.json", f"{key} is {str(folder)!r}")
    kind = config.get("model_type")
    if kind is None or "auto_map" in config:  # it brings its own code
        return
    import transformers
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        raise BackendConfigError(
            f"{key} is {str(folder)!r}, of the architecture {kind!r}, which transformers "
            f"{transformers.__version__} does not know; install a release that does, or take "
            "another model"
        )


def check_tokenizer(folder: Path, key: str = "model.path") -> None:
    """Raises BackendConfigError: `folder` has no tokenizer, or one without a chat template."""
    whose = f"{key} is {str(folder)!r}"
    if not folder.is_dir():
        raise BackendConfigError(f"{whose}, where no folder is; name one with a tokenizer")
    settings = folder / "tokenizer_config.json"
    known = read_object(settings, whose) if settings.is_file() else {}
    has_it = (folder / "tokenizer.json").exists()
    if not known and not has_it:
        raise BackendConfigError(
            f"{whose}, which has no tokenizer; add the model's tokenizer.json and "
            "tokenizer_config.json"
        )
    if not has_it:
        raise BackendConfigError(
            f"{whose}, which has no tokenizer.json; add the model's, or of a tokenizer in another "
            "form write it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if not known.get("chat_template") and not any((folder / name).exists() for name in TEMPLATES):
        raise BackendConfigError(
            f"{whose}, whose tokenizer has no chat template (a base model has none); add a "
            "chat_template.jinja, such as that of its instruct model"
        )


def fingerprint(folder: Path) -> str:
    """Tells one directory of weights from another, by what is cheap to read: names, sizes and ends
    of the files of weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in WEIGHT_SUFFIXES:
            size = file.stat().st_size
            with file.open("rb") as f:
                head = f.read(_END)
                f.seek(max(0, size - _END))
                digest.update(f"{file.name} {size} ".encode() + head + f.read(_END))
    return digest.hexdigest()


def count_parameters(folder: Path) -> int:
    """Count parameters: exactly in safetensors, else by size, at two bytes each."""
    total = 0
    for file in _weights(folder):
        if file.suffix == ".safetensors":
            with safe_open(file, "numpy") as tensors:
                names = tensors.keys()
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
        else:
            total += file.stat().st_size // 2
    return total


def weight_bytes(folder: Path) -> int:
    """Bytes of all files of weights, which an engine loads."""
    return sum(file.stat().st_size for file in _weights(folder))


def _weights(folder: Path) -> list[Path]:
    """The files that are loaded, as transformers chooses them: safetensors before others, one file
    before many. The same weights, or their index alone, may lie beside them in another format."""
    for one, index in zip(_WHOLE, _INDICES, strict=True):
        if (folder / one).is_file():
            return [folder / one]
        if (folder / index).is_file():
            shards = read_object(folder / index, f"the model in {folder}").get("weight_map", {})
            return sorted({folder / name for name in shards.values()})
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _check_file(file: Path, whose: str) -> None:
    try:
        with file.open("rb") as f:
            first = f.read(len(_POINTER))
        if first == _POINTER:
            raise BackendConfigError(
                f"{whose}, whose {file.name} is a Git LFS pointer, not the weights; run "
                "`git lfs pull` there, or `hf download`"
            )
        if file.suffix == ".safetensors":
            with safe_open(file, "numpy"):  # its header says how long the file is
                pass
    except SafetensorError as e:
        raise BackendConfigError(
            f"{whose}, whose {file.name} is cut off or damaged ({e}); download it again"
        ) from e
    except OSError as e:
        raise BackendConfigError(
            f"{whose}, whose {file.name} cannot be read ({e}); download it again"
        ) from e


def read_object(file: Path, whose: str) -> dict[str, Any]:
    """The object in a JSON file of a model.

    Raises:
        BackendConfigError: `file` is missing, unreadable or no such file; begins with `whose`.
    """
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except FileNotFoundError:
        raise BackendConfigError(
            f"{whose}, which has no {file.name}; point it at a Hugging Face model directory"
        ) from None
    except (OSError, ValueError) as e:
        raise BackendConfigError(
            f"{whose}, whose {file.name} cannot be read ({e}); download the model again"
        ) from e
    return found


# ── names of tensors ──────────────────────────────────────────────────────────────────────────────

_BASE = "model."
_DEEPER = (("visual.", _BASE + "visual."), (_BASE, _BASE + "language_model."))
"""Prefixes in the files of a model that reads pictures, and in the module that is loaded."""


def module_name(name: str, own: Container[str]) -> str:
    """Name in a loaded module, whose own names are `own`, of a tensor of its files."""
    if name not in own:
        for outer, inner in _DEEPER:
            if name.startswith(outer):
                return inner + name.removeprefix(outer)
    return name


def checkpoint_name(name: str) -> str:
    """Name in the files of a tensor of a loaded model that reads pictures."""
    for outer, inner in _DEEPER:
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name

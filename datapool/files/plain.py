"""Values of no fixed type as JSON text, and back exactly.

What JSON has not, or would change, is `{"__stepwell__": kind, "value": …}`: bytes, arrays, tuples,
NaN, mappings with keys that are no strings; arrays in base64 of the `.npy` format. Nothing is ever
pickled. What cannot be carried is an ExportError that names it.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.datapool.errors import ExportError

_TAG = "__stepwell__"


def dumps(value: Any, what: str) -> str:
    """`value` as JSON; `what` it is, for messages.

    Raises:
        ExportError: it holds something that cannot be carried, or itself.
    """
    try:
        # ASCII, so that a lone surrogate in an agent's text cannot break the file's UTF-8.
        return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ExportError(
            f"{what} is {value!r:.120}, which no file can carry ({e}); use JSON values, bytes or "
            "NumPy arrays of numbers or strings"
        ) from e


def _plain(value: Any) -> Any:
    """`value` in JSON's types; what JSON has not, or would change, is tagged."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: "float", "value": str(float(value))}
    if isinstance(value, Mapping):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_TAG: "mapping", "value": [[_plain(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [_plain(item) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {_TAG: "ndarray", "value": npy(value, "array")}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return _plain(value.item())
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not supported")


def loads(text: str) -> Any:
    """What `dumps` was given."""
    return json.loads(text, object_hook=_revive)


def _revive(found: dict[str, Any]) -> Any:
    if _TAG not in found:
        return found
    return _REVIVE[found[_TAG]](found["value"])


def npy(value: Any, what: str) -> str:
    """An array as base64 of the `.npy` format.

    Raises:
        ExportError: it holds objects, or is of a subclass.
    """
    # A subclass may hold what .npy does not (the mask of a masked array).
    if type(value) is not np.ndarray:
        raise ExportError(f"{what} is a {type(value).__qualname__}; pass a plain NumPy array")
    buffer = io.BytesIO()
    try:
        np.save(buffer, value, allow_pickle=False)
    except ValueError as e:
        raise ExportError(f"{what} has dtype {value.dtype}; pass numbers or strings") from e
    return base64.b64encode(buffer.getbuffer()).decode()


def from_npy(text: str) -> npt.NDArray[Any]:
    """What `npy` was given."""
    array: npt.NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


_REVIVE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "mapping": dict,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "ndarray": from_npy,
}


def check_text(value: Any, what: str) -> None:
    """Raises ExportError if it is not None and no text that a file can hold."""
    if value is None:
        return
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as e:
        raise ExportError(f"{what} is {value!r}; pass text that UTF-8 can write") from e


def check_int(value: int | None, what: str) -> None:
    """Raises ExportError if it does not fit into the 64 bits of a column."""
    if value is not None and not -(2**63) <= value < 2**63:
        raise ExportError(f"{what} is {value}; pass an integer of 64 bits")

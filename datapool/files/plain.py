"""This module writes values of no fixed type as text, and reads them back exactly.

JSON; what JSON has not, or would change, is `{"__stepwell__": kind, "value": …}`: bytes, arrays,
tuples, NaN, mappings with keys that are no strings. Arrays are base64 of the `.npy` format. Nothing
is ever pickled. What cannot be carried is an `ExportError` that names it.
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
        return _ENCODER.encode(_plain(value))
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
    return _DECODER.decode(text)


def _revive(found: dict[str, Any]) -> Any:
    return _REVIVE[found[_TAG]](found["value"]) if _TAG in found else found


def npy(value: Any, what: str) -> str:
    """An array as base64 of the `.npy` format.

    Raises:
        ExportError: it holds objects, or is of a subclass.
    """
    # A subclass may hold what .npy does not (the mask of a masked array).
    if type(value) is not np.ndarray or value.dtype.hasobject:
        raise ExportError(
            f"{what} has dtype {getattr(value, 'dtype', None)} and type "
            f"{type(value).__qualname__}; pass a plain NumPy array of numbers or strings"
        )
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, value, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode()


def from_npy(text: str) -> npt.NDArray[Any]:
    """What `npy` was given."""
    buffer = io.BytesIO(base64.b64decode(text))
    array: npt.NDArray[Any] = np.lib.format.read_array(buffer, allow_pickle=False)
    return array


_REVIVE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "mapping": dict,
    "tuple": tuple,
    "bytes": base64.b64decode,
    "ndarray": from_npy,
}


# ASCII, so that a lone surrogate in an agent's text cannot break the file's UTF-8.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_hook=_revive)


def check_text(value: Any, what: str) -> None:
    """Raises ExportError if it is no text that a file can hold."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError) as e:
        raise ExportError(f"{what} is {value!r}; pass text that UTF-8 can write") from e

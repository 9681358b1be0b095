"""Objects named by a configuration: `package.module:name` or `package.module.name`."""

from __future__ import annotations

import importlib
from typing import Any


def resolve(path: str) -> Any:
    """What `path` names.

    Raises:
        ImportError: there is no such module, or nothing of that name in it. What the module itself
            raises at import passes through.
    """
    module_name, sep, name = path.partition(":")
    if not sep:
        module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (AttributeError, ValueError) as e:
        raise ImportError(str(e)) from e

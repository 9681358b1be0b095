"""Objects named by a configuration: `package.module:name` or `package.module.name`."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any


def resolve(path: str) -> Any:
    """What `path` names.

    Raises:
        ImportError: there is no such module, or nothing of that name in it. What the module itself
            raises at import passes through.
    """
    try:
        return resolve_name(path)
    except (AttributeError, ValueError) as e:
        raise ImportError(str(e)) from e

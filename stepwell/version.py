"""The version of Stepwell, as in `pyproject.toml`, and those of what it runs with."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable

__version__ = "0.1.0"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of Stepwell, Python and those of `packages` that are installed here."""
    found = {"stepwell": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

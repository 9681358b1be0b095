"""The version of Stepwell, as in `pyproject.toml`, and those of what it runs with."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only who asks for packages needs it
    from packaging.requirements import Requirement

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


def required() -> list[Requirement]:
    """Packages that Stepwell requires here, without their markers; those of its extras left out.

    Raises:
        PackageNotFoundError: Stepwell itself is not installed.
    """
    from packaging.requirements import Requirement

    asked = map(Requirement, importlib.metadata.requires("stepwell") or ())
    found = [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in found:
        requirement.marker = None
    return found


def lack_of(requirement: Requirement) -> str | None:
    """State of a package that is not here as it is required; None: it is."""
    try:
        has = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "is missing"
    return None if requirement.specifier.contains(has, prereleases=True) else f"is {has}"

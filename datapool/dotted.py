"""Objects named by a configuration: `package.module:name`, `package.module.name`, or
`path/to/file.py:name`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from stepwell.datapool.own_loop import ENDS


def resolve(path: str) -> Any:
    """Return the object that `path` names.

    Raises:
        ImportError: there is no such module, or nothing of that name in it. What the module itself
            raises at import passes through, if it is an `Exception`: a SystemExit, or the panic of
            a package that is written in Rust, is an ImportError.
    """
    try:
        return _named(path)
    except (Exception, *ENDS):
        raise
    except BaseException as e:  # foreign code may not end who imports it
        raise ImportError(f"{type(e).__name__}: {e}") from e


def _named(path: str) -> Any:
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        module = module_of(file)
        if not hasattr(module, name):
            raise ImportError(f"{file} has no {name!r}")
        return getattr(module, name)
    try:
        return resolve_name(path)
    except (AttributeError, ValueError) as e:
        raise ImportError(str(e)) from e


def module_of(path: str) -> ModuleType:
    """The module in the file at `path`, loaded once.

    Raises:
        ImportError: there is no such file. What the module itself raises passes through.
    """
    file = Path(path).expanduser().resolve()
    name = f"stepwell_file_{file.with_suffix('')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"there is no file {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # pickle looks there
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever it raised: half a module would be found the next time
        del sys.modules[name]
        raise
    return module

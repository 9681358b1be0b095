"""This module loads the functions that a configuration names, so that a wrong name fails before
anything is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from stepwell.datapool.dotted import resolve
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import GatewayConfigError

Function: TypeAlias = Callable[..., Any]


def load_function(config: GatewayConfig, key: str) -> Function | None:
    """What `gateway.KEY` names as `package.module:name` (or `package.module.name`).

    Raises:
        GatewayConfigError
    """
    path = getattr(config, key)
    if path is None:
        return None
    try:
        found = resolve(path)
    except ImportError as e:
        raise GatewayConfigError(
            f"gateway.{key} is {path!r}, which cannot be imported ({e}); "
            "name a function as package.module:function"
        ) from e
    if not callable(found):
        raise GatewayConfigError(f"gateway.{key} is {path!r}, which cannot be called")
    function: Function = found
    return function

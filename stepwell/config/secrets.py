"""Hides what a resolved configuration holds under names of secrets, before it goes into a file or
to a tracker's server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepwell.config.run import RunConfig

HIDDEN = "**********"
_SECRET = re.compile(
    r"(?i)(^|[_-])(authorization|cookie|credentials?|passw(or)?d|secret|token"
    r"|(api|access|admin|private|secret)[_-]?keys?)$"
    r"|(?-i:^[A-Z0-9_]*(KEY|PASS|PASSWORD|_PWD|TOKEN|SECRET)$)"  # variables: OPENAI_KEY, PGPASSWORD
)
_FILLED_IN = re.compile(r"(Bearer )?\{\w+\}")
"""A name in braces, such as the `{api_key}` of a harness, which each rollout has another of."""
_PASSWORD = re.compile(r"(?<=://)([^/@:\s]*):[^/@\s]+@")


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration, less what stands under a name such as HF_TOKEN or Authorization:
    it goes into a file and to a tracker's server."""
    hidden: dict[str, Any] = _hide(config.model_dump(mode="json"))
    return hidden


def _is_secret(name: str, value: Any) -> bool:
    is_filled_in = isinstance(value, str) and _FILLED_IN.fullmatch(value) is not None
    return _SECRET.search(name) is not None and not is_filled_in


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: HIDDEN if v and _is_secret(str(k), v) else _hide(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_hide(v) for v in value]
    return _PASSWORD.sub(rf"\1:{HIDDEN}@", value) if isinstance(value, str) else value

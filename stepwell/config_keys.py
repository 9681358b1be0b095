"""This module finds the keys of a configuration in the models of its sections, so that errors and
`stepwell config --keys` know every key with its type, default and meaning.

Owns: the walk over the models. Does not own the models (`config.py` and each room's sections) nor
the values (`presets.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from stepwell.config import RunConfig

ROOT: tuple[Any, ...] = (RunConfig,)
"""The types of a whole configuration, where every walk begins."""


def models_of(types: Sequence[Any], value: object) -> list[type[BaseModel]]:
    """The sections that `value` may be, given its types. Where sections differ by `kind` and
    `value` names one, that one alone."""
    models = [m for t in types for m in _members(t) if _is_model(m)]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    return [m for m in models if kind in kinds_of(m)] or models


def kinds_of(model: type[BaseModel]) -> tuple[Any, ...]:
    """The values of `kind` that choose `model` among several sections."""
    field = model.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def named_by(model: type[BaseModel]) -> str | None:
    """The key of `model` that text alone stands for."""
    return getattr(model, "named_by", None)


def types_of(types: Sequence[Any], value: object, key: str) -> list[Any]:
    """The types of what stands under `key` in `value`, given the types of `value`."""
    fields = [m.model_fields[key] for m in models_of(types, value) if key in m.model_fields]
    if fields:
        return [field.annotation for field in fields]
    return [item for t in types for m in _members(t) for item in _items(m)]


def fields_at(raw: object, parts: Sequence[str]) -> list[str]:
    """The keys that the section at `parts` of the configuration `raw` has."""
    types: Sequence[Any] = ROOT
    value = raw
    for part in parts:
        types = types_of(types, value, part)
        value = child(value, part)
    return list(dict.fromkeys(f for m in models_of(types, value) for f in m.model_fields))


def child(value: object, part: str) -> object:
    """What stands under `part` in a mapping or a list; None if nothing does."""
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
        return value[int(part)]
    return None


def all_keys() -> list[str]:
    """Every key that takes a value, by its full name; `*` stands for names that users choose."""
    return list(dict.fromkeys(_walk(ROOT, "")))


def _walk(types: Sequence[Any], prefix: str) -> list[str]:
    found: list[str] = []
    members = [m for t in types for m in _members(t)]
    if any(map(_is_model, members)):  # a section that may be left out: null is no key of it
        members = [m for m in members if m is not type(None)]
    for member in members:
        if _is_model(member):
            for name, field in member.model_fields.items():
                found += _walk([field.annotation], f"{prefix}{name}.")
        elif get_origin(member) is dict and any(map(_is_model, _members(get_args(member)[1]))):
            found += _walk([get_args(member)[1]], f"{prefix}*.")
        else:
            found.append(prefix.removesuffix("."))
    return found


def _is_model(t: Any) -> bool:
    return isinstance(t, type) and issubclass(t, BaseModel)


def _members(t: Any) -> list[Any]:
    """`A | B` and `Annotated[A | B, …]` as A and B."""
    if get_origin(t) is Annotated:
        return _members(get_args(t)[0])
    if get_origin(t) in (Union, UnionType):
        return [m for arg in get_args(t) for m in _members(arg)]
    return [t]


def _items(t: Any) -> list[Any]:
    """The type of the values in `dict[K, V]`, `list[V]` or `tuple[V, …]`."""
    if get_origin(t) is dict:
        return [get_args(t)[1]]
    return list(get_args(t)[:1]) if get_origin(t) in (list, tuple) else []

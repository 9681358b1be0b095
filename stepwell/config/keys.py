"""This module finds the keys of a configuration in the models of its sections, so that errors and
`stepwell config --keys` know every key with its type, default and meaning.

Owns: the walk over the models. Does not own the models (`config/run.py` and each room's sections)
nor the values (`config/load.py`).
"""

from __future__ import annotations

import difflib
import functools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from stepwell.backends.registry import Registry
from stepwell.config.migration import known_as
from stepwell.config.run import RunConfig
from stepwell.trainer.errors import ConfigError

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


def by_kind(model: type[BaseModel]) -> Callable[[str], dict[str, str]] | None:
    """Spells out text alone where `model` is one of several kinds; None if it is not."""
    if "kind" not in model.model_fields:
        return None
    spelled_out: Callable[[str], dict[str, str]] | None = getattr(model, "spelled_out", None)
    return spelled_out or (lambda kind: {"kind": kind})


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


def holds(value: object, part: str) -> bool:
    """True if `value`, a mapping or a list, has something under `part`."""
    if isinstance(value, list):
        return part.isdecimal() and int(part) < len(value)
    return isinstance(value, Mapping) and part in value


def child(value: Any, part: str) -> Any:
    """Return the value under `part` in a mapping or a list; None if there is none."""
    if not holds(value, part):
        return None
    return value[int(part)] if isinstance(value, list) else value[part]


def leaves(value: object, parts: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value below `parts` that is no section, or an empty one, with its key."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*parts, str(key)))
    else:
        yield parts, value


@dataclass(frozen=True)
class Key:
    """One key that takes a value."""

    name: str
    """Its full name; `*` in it stands for names that users choose."""
    type: str
    """With its bounds."""
    default: object
    """`PydanticUndefined` if the key has to be given."""
    meaning: str
    kinds: tuple[str, ...] = ()
    """The kinds of its section that have it; empty if the section has no kinds."""


def keys() -> list[Key]:
    """Every key. One whose meaning depends on the kind of its section comes several times."""
    found: dict[tuple[str, ...], Key] = {}
    for key in _walk(ROOT, "", None):
        same = found.setdefault((key.name, key.type, repr(key.default), key.meaning), key)
        if same is not key:
            kinds = tuple(dict.fromkeys((*same.kinds, *key.kinds)))
            found[key.name, key.type, repr(key.default), key.meaning] = replace(same, kinds=kinds)
    return list(found.values())


def all_keys() -> list[str]:
    """The names of all keys."""
    return list(dict.fromkeys(key.name for key in keys()))


def find_keys(pattern: str) -> list[Key]:
    """The keys whose name holds `pattern`, or is like it if it is a glob.

    Raises:
        ConfigError: no key is like it.
    """
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    found = [key for key in keys() if fnmatchcase(key.name, glob)]
    if not found:
        near = difflib.get_close_matches(pattern, all_keys(), n=1, cutoff=0.5)
        hint = known_as(pattern) or (f"did you mean {near[0]!r}?" if near else "")
        raise ConfigError(f"no key is like {pattern!r}; {hint or 'give a part of its name'}")
    return found


def show_keys(pattern: str, config: RunConfig | None = None, *, width: int) -> str:
    """`find_keys` for a terminal of `width` columns; with the values of `config` where they are not
    the defaults."""
    values = {} if config is None else config.model_dump(mode="json")
    return "\n\n".join(_shown(key, values, width) for key in find_keys(pattern))


def _shown(key: Key, values: Mapping[str, Any], width: int) -> str:
    default = told_default(key)
    told = default if default == REQUIRED else f"default {default}"
    value: object = values
    for part in key.name.split("."):
        value = value[part] if isinstance(value, Mapping) and part in value else PydanticUndefined
    if value is not PydanticUndefined and (now := _plain(value)) != default:
        told = now if told == REQUIRED else f"{now} ({told})"
    of = f", for kind {_listed(key.kinds)}" if key.kinds else ""
    head = f"{key.name}: {key.type}, {told}{of}"
    wrap = functools.partial(
        textwrap.wrap, width=width, subsequent_indent="    ", break_on_hyphens=False
    )
    return "\n".join([*wrap(head), *wrap(key.meaning, initial_indent="    ")])


REQUIRED = "required"


def told_default(key: Key) -> str:
    """The default as YAML spells it in a line, or that there is none."""
    return REQUIRED if key.default is PydanticUndefined else _plain(key.default)


def _listed(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _plain(value: object) -> str:
    """A value as YAML spells it in a line."""
    if value is PydanticUndefined:
        return ""
    return json.dumps(to_jsonable_python(value), ensure_ascii=False)


def _walk(types: Sequence[Any], prefix: str, field: FieldInfo | None) -> Iterator[Key]:
    members = [m for t in types for m in _members(t)]
    sections = [m for m in members if _is_model(m)]
    named = [m for m in members if get_origin(m) is dict and _models(get_args(m)[1])]
    if len(sections) > 1:
        about = [f"{_listed(kinds_of(m))}: {(m.__doc__ or '').partition('.')[0]}" for m in sections]
        kinds = [kind for m in sections for kind in kinds_of(m)]
        yield Key(f"{prefix}kind", _listed(kinds), PydanticUndefined, f"{'; '.join(about)}.")
    for model in sections:
        for name, inner in model.model_fields.items():
            if name == "kind" and len(sections) > 1:
                continue
            if (registry := getattr(model, "own_keys", {}).get(name)) is not None:
                yield from _own_keys(registry, f"{prefix}{name}.")
                continue
            for key in _walk([inner.annotation], f"{prefix}{name}.", inner):
                shared = all(name in m.model_fields for m in sections)
                yield key if shared or key.kinds else replace(key, kinds=kinds_of(model))
    for mapping in named:
        yield from _walk([get_args(mapping)[1]], f"{prefix}*.", None)
    if field is not None and not sections and not named:
        yield Key(
            prefix.removesuffix("."),
            _type(field),
            field.get_default(call_default_factory=True, validated_data={}),
            " ".join((field.description or "").split()),
        )


def _own_keys(registry: Registry[Any], prefix: str) -> Iterator[Key]:
    """The hyper-parameters that one loss, estimator or method has alone."""
    for found in registry.survey():
        if found.state == "ready":
            for key in _walk([registry.load(found.name).options], prefix, None):
                yield replace(key, kinds=(found.name,))


def _type(field: FieldInfo) -> str:
    """The type and bounds of a key, in words."""
    names = list(dict.fromkeys(_word(m) for m in _members(field.annotation)))
    bounds = []
    for bound in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if (limit := getattr(bound, attribute, None)) is not None:
                bounds.append(
                    f" {sign} {limit:g}" if isinstance(limit, float) else f" {sign} {limit}"
                )
    return names[0] + ",".join(bounds) + "".join(f" or {name}" for name in names[1:])


def _word(t: Any) -> str:
    if get_origin(t) is Literal:
        return _listed([str(value) for value in get_args(t)])
    if get_origin(t) in (list, tuple):
        inner = [a for a in get_args(t) if a is not Ellipsis]
        return f"list of {' and '.join(dict.fromkeys(_word(a) for a in inner))}"
    if get_origin(t) is dict:
        return "mapping"
    if get_origin(t) in (Annotated, Union, UnionType):
        return " or ".join(dict.fromkeys(map(_word, _members(t))))
    names = {str: "text", Path: "path", bool: "true or false", type(None): "null", Any: "anything"}
    return names.get(t) or str(t.__name__)


def _models(t: Any) -> list[Any]:
    return [m for m in _members(t) if _is_model(m)]


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

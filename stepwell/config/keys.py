"""This module finds the keys of a configuration in the models of its sections, so that errors and
`stepwell config --keys` know every key with its type, default and meaning.

Owns: the walk over the models. Does not own the models (`config/run.py` and each room's sections)
nor the values (`config/load.py`).
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined, core_schema, to_jsonable_python

from stepwell.config.migration import known_as
from stepwell.config.run import RunConfig
from stepwell.datapool.config import AT_HOME, members_of
from stepwell.trainer.errors import ConfigError

ROOT: tuple[Any, ...] = (RunConfig,)
"""The types of a whole configuration, where every walk begins."""


def models_of(types: Sequence[Any], value: object) -> list[type[BaseModel]]:
    """The sections that `value` may be, given its types. Where sections differ by `kind` and
    `value` names one, that one alone."""
    models = [m for t in types for m in members_of(t) if _is_model(m)]
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
    return [item for t in types for m in members_of(t) for item in _items(m)]


def takes_path(types: Sequence[Any], value: object, key: str) -> bool:
    """True if what stands under `key` in `value`, given the types of `value`, may be a path, or a
    list of them."""
    fields = [m.model_fields[key] for m in models_of(types, value) if key in m.model_fields]
    is_list = isinstance(child(value, key), list)
    return any(
        _is_path(field.annotation, is_list) or (AT_HOME in field.metadata and not is_list)
        for field in fields
    )


def _is_path(annotation: Any, is_list: bool) -> bool:
    if annotation is Path or AT_HOME in getattr(annotation, "__metadata__", ()):
        return not is_list
    of_items = get_origin(annotation) in (tuple, list)
    return (is_list or not of_items) and any(
        _is_path(each, is_list and not of_items) for each in get_args(annotation)
    )


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
    for key in _walk(_schema_of(RunConfig), ""):
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


class _Schema(GenerateJsonSchema):
    """JSON schema with the defaults of factories, and with `options`: for each loss, estimator or
    method its name and the schema of what it alone takes."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        factory = schema.get("default_factory")
        if factory is None:
            return super().get_default_value(schema)
        return factory({}) if schema.get("default_factory_takes_data") else factory()  # type: ignore[call-arg]

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        model = super().model_schema(schema)
        for name, registry in getattr(schema["cls"], "own_keys", {}).items():
            ready = [found.name for found in registry.survey() if found.state == "ready"]
            options = [[each, _schema_of(registry.load(each).options)] for each in ready]
            model["properties"][name]["options"] = options
        return model


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of `model` with each `$ref` replaced by what it refers to."""
    whole = model.model_json_schema(schema_generator=_Schema)

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            node = whole["$defs"][node["$ref"].rpartition("/")[2]] | node
        return {k: inlined(v) for k, v in node.items() if k not in ("$ref", "$defs")}

    inline: dict[str, Any] = inlined(whole)
    return inline


def _walk(node: dict[str, Any], prefix: str) -> Iterator[Key]:
    """The keys at and below `prefix`, given its schema."""
    members = _alternatives(node)
    sections = [m for m in members if "properties" in m]
    named = [m["additionalProperties"] for m in members if _is_section(m)]
    kinds = [_values(section["properties"].get("kind", {})) for section in sections]
    if len(sections) > 1:
        about = [
            f"{_listed(own)}: {_first_sentence(section.get('description', ''))}"
            for own, section in zip(kinds, sections, strict=True)
        ]
        every = _listed([kind for own in kinds for kind in own])
        yield Key(f"{prefix}kind", every, PydanticUndefined, f"{'; '.join(about)}.")
    for own, section in zip(kinds, sections, strict=True):
        for name, inner in section["properties"].items():
            if name == "kind" and len(sections) > 1:
                continue
            shared = all(name in other["properties"] for other in sections)
            for key in _walk(inner, f"{prefix}{name}."):
                yield key if shared or key.kinds else replace(key, kinds=tuple(own))
    for values in named:
        yield from _walk(values, f"{prefix}*.")
    for name, options in node.get("options", ()):
        for key in _walk(options, prefix):
            yield replace(key, kinds=(name,))
    if not sections and not named and "options" not in node:
        meaning = " ".join(node.get("description", "").split())
        default = node.get("default", PydanticUndefined)
        yield Key(prefix.removesuffix("."), _word(node), default, meaning)


def _first_sentence(text: str) -> str:
    """Without its point. A point within a name or a number ends none."""
    return re.split(r"\.(?: |$)", " ".join(text.split()), maxsplit=1)[0]


def _alternatives(node: Any) -> list[dict[str, Any]]:
    """The schemas of which a value has to meet one."""
    either = node.get("anyOf") or node.get("oneOf") or [node]
    return [node] if either == [node] else [m for each in either for m in _alternatives(each)]


def _values(node: dict[str, Any]) -> list[Any]:
    return [node["const"]] if "const" in node else node.get("enum", [])


def _is_section(node: Any) -> bool:
    """True if `node` maps names to sections."""
    values = node.get("additionalProperties")
    return isinstance(values, dict) and any("properties" in m for m in _alternatives(values))


def _word(node: dict[str, Any]) -> str:
    """The type and bounds of a value, in words."""
    if len(several := _alternatives(node)) > 1:
        return " or ".join(dict.fromkeys(map(_word, several)))
    if values := _values(node):
        return _listed([str(value) for value in values])
    kind = node.get("type", "anything")
    if kind == "array":
        items = node.get("prefixItems") or [node["items"]]
        return f"list of {' and '.join(dict.fromkeys(map(_word, items)))}"
    if "properties" in node:
        return str(node["title"])
    bounds = [f" {sign} {node[bound]:.12g}" for bound, sign in _BOUNDS.items() if bound in node]
    word = _WORDS.get(node.get("format", kind), str(kind))
    return word + ",".join(bounds)


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_WORDS = {
    "string": "text",
    "path": "path",
    "password": "secret",
    "integer": "int",
    "number": "float",
    "boolean": "true or false",
    "object": "mapping",
}


def _is_model(t: Any) -> bool:
    return isinstance(t, type) and issubclass(t, BaseModel)


def _items(t: Any) -> list[Any]:
    """The type of the values in `dict[K, V]`, `list[V]` or `tuple[V, …]`."""
    if get_origin(t) is dict:
        return [get_args(t)[1]]
    return list(get_args(t)[:1]) if get_origin(t) in (list, tuple) else []

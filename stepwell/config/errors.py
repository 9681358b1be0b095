"""This module words the errors of a configuration: one line each, with the key as the file spells
it, its value, and what is right.

Owns: how pydantic's errors are told, and what is suggested for an unknown key. Does not own other
frameworks' names (`config/migration.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stepwell.config.keys import (
    ROOT,
    all_keys,
    child,
    fields_at,
    holds,
    leaves,
    models_of,
    types_of,
)
from stepwell.config.migration import known_as


@dataclass(frozen=True)
class Problem:
    """One line about one key."""

    parts: tuple[str, ...]
    """The key; empty where several sections do not fit together."""
    text: str


def explain(
    error: ValidationError, raw: Mapping[str, Any], typed: Mapping[tuple[str, ...], str] = {}
) -> Iterator[Problem]:
    """The problems of the configuration `raw`.

    Args:
        typed: numbers and booleans as the command line has them, by key.
    """
    wanted: dict[tuple[str, ...], list[str]] = {}
    values: dict[tuple[str, ...], object] = {}
    for detail in error.errors():
        parts = _key(detail, raw)
        if detail["type"] == "extra_forbidden":
            yield from _unknown(parts, detail["input"], raw)
        elif detail["type"] == "missing":
            yield Problem(parts, f"{'.'.join(parts)} is missing; add it")
        elif detail["type"] == "value_error":
            text = str(detail["ctx"]["error"])
            if parts:
                key = ".".join(parts)
                yield Problem(parts, text if text.startswith(f"{key}.") else f"{key}: {text}")
            else:  # sections that do not fit together: the line begins with a key
                first = tuple(text.partition(" ")[0].split("."))
                yield Problem(first if _given(first, raw) else (), text)
        else:  # what may be one of several types has an error for each
            tagged = detail["type"].startswith("union_tag")
            parts = (*parts, "kind") if tagged else parts
            values[parts] = child(detail["input"], "kind") if tagged else detail["input"]
            wanted.setdefault(parts, []).append(_wanted(detail, parts, typed.get(parts)))
    for parts, texts in wanted.items():
        if not _given(parts, raw) and any(
            _given(p, raw) for p in wanted if values[p] == values[parts]
        ):
            continue  # filled in from another key, which is the wrong one
        told = ", or ".join(dict.fromkeys(texts)).replace(", or be ", ", or ")
        key = ".".join(parts)
        value = typed.get(parts) or told_value(values[parts])
        yield Problem(parts, f"{key} is {value}; it should {told}")


def told_value(value: object) -> str:
    """A value as YAML spells it, cut short."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def nearest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """`; did you mean …?`, or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def _key(detail: ErrorDetails, raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key of the error, as the file spells it. pydantic's location also has the names of
    a union's members, which no file has."""
    parts: list[str] = []
    value: object = raw
    types: Sequence[Any] = ROOT
    last = len(detail["loc"]) - 1
    for i, part in enumerate(map(str, detail["loc"])):
        known = any(part in model.model_fields for model in models_of(types, value))
        if known or holds(value, part) or (i == last and detail["type"] == "missing"):
            parts.append(part)
            types, value = types_of(types, value, part), child(value, part)
    return tuple(parts)


def _given(parts: Sequence[str], raw: object) -> bool:
    """True if the configuration itself has the key."""
    for part in parts:
        if not holds(raw, part):
            return False
        raw = child(raw, part)
    return True


def _wanted(detail: ErrorDetails, parts: Sequence[str], typed: str | None) -> str:
    """Return the demand on the value, such as "be a path", from pydantic's words.

    Args:
        typed: the value, if it is a number or a boolean of the command line.
    """
    kind, value = detail["type"], detail["input"]
    if kind in ("model_type", "model_attributes_type"):
        return "be a section, {key: value, …}"
    if kind == "dict_type":
        return "be a mapping, {name: value, …}"
    if kind in ("tuple_type", "list_type"):
        return "be a list, [a, b, …]"
    if kind == "path_type":
        return "be a path"
    if kind == "string_type":
        if isinstance(value, int | float):
            quoted = f'"{typed or told_value(value)}"'
            item = any(part.isdecimal() for part in parts)  # lists are given whole
            return f"be text, in quotes: {quoted if item else '.'.join(parts) + f'={quoted!r}'}"
        return "be text"
    if kind in ("union_tag_invalid", "literal_error"):
        names = detail["ctx"]["expected_tags" if kind == "union_tag_invalid" else "expected"]
        given = child(value, "kind") if kind == "union_tag_invalid" else value
        known = [name.strip("' ") for name in names.replace(" or ", ", ").split(",")]
        return f"be {names}{nearest(str(given), known)}"
    before, should, after = detail["msg"].partition(" should ")
    after = after.partition(", unable to parse")[0]
    return after if should else f"be otherwise: {before}"


def _unknown(parts: tuple[str, ...], value: object, raw: Mapping[str, Any]) -> Iterator[Problem]:
    """A key that no section has. Of a whole section, each key that another framework knows."""
    whole = [leaf for leaf, _ in leaves(value, parts)]
    known = {leaf: text for leaf in whole if (text := known_as(".".join(leaf)))}
    for leaf in whole if known else [parts]:
        key = ".".join(leaf)
        hint = known.get(leaf) or _suggestion(leaf, whole, raw)
        yield Problem(leaf, f"{key} is not a known key; {hint}")


def _suggestion(
    parts: tuple[str, ...], whole: Sequence[tuple[str, ...]], raw: Mapping[str, Any]
) -> str:
    """The nearest key beside it; else keys of that name in other sections; else all beside it."""
    beside = fields_at(raw, parts[:-1])
    if near := nearest(parts[-1], beside, cutoff=0.6):
        return near.removeprefix("; ")
    names = {leaf[-1] for leaf in whole}
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] in names]
    if 0 < len(elsewhere) <= 4:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"known keys: {', '.join(beside)}"

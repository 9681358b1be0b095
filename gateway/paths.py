"""This module reads the names in a URL's path, so that an id may hold any character.

An id with a slash comes percent-encoded (`harbor%2Fhello-world:0`), but servers decode a path
before they hand it on. Routes therefore see the path decoded but for `%` and `/` in its segments
(`routing_path`), and what they take from it is decoded by `uid_of`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias
from urllib.parse import quote, unquote

from pydantic import AfterValidator
from starlette.types import Scope

UNDER = "/{trajectory_uid}/{prompt_uid}/v1"
"""What the paths of a trajectory's own routes begin with."""


GEMINI_BASES = (f"{UNDER}beta", UNDER, "/v1beta", "/v1")
"""Beginnings of the paths of Gemini's API. Google's SDK says `v1` since version 3; before, and in
other clients, `v1beta`."""
_GEMINI_ENDS = (":generateContent", ":streamGenerateContent", ":countTokens")


def is_gemini(path: str) -> bool:
    """True for paths of Gemini's API, also of what is not served of it."""
    return path.endswith(_GEMINI_ENDS) or "/v1beta/" in path


def routing_path(scope: Scope) -> str:
    """The path of a request as routes match it."""
    raw: bytes | None = scope.get("raw_path")
    path: str = scope["path"]
    if raw is None:  # a server that does not tell it
        return path.replace("%", "%25")
    if b"%" not in raw:
        return path
    segments = raw.decode("ascii", "replace").split("/")
    return "/".join(unquote(s).replace("%", "%25").replace("/", "%2F") for s in segments)


def uid_of(segment: str) -> str:
    """The id in a segment of a `routing_path`."""
    return unquote(segment) if "%" in segment else segment


Uid: TypeAlias = Annotated[str, AfterValidator(uid_of)]
"""A path parameter of a route."""


def quoted(uid: str) -> str:
    """As a part of a URL's path; what may stand there stays as it is (RFC 3986)."""
    return quote(uid, safe="!$&'()*+,;=:@")

"""Bodies of LLM calls in `/openapi.json`, as the vendors' SDKs type them.

FastAPI describes everything else. The fields of a call are checked in `dialects/`, but
conversations are best typed by the SDKs. An SDK that is not installed leaves a body an object. Made
by a process (`openapi_process.py`) on the first request for it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from stepwell.datapool.dotted import resolve

TITLE = "Stepwell gateway"
GEMINI = "gemini"
"""The body of Gemini's API, which has no type in its SDK: only its fields do."""
_GEMINI_TYPES: Mapping[str, tuple[str, str]] = {
    "contents": ("array", "Content"),
    "systemInstruction": ("object", "Content"),
    "tools": ("array", "Tool"),
    "toolConfig": ("object", "ToolConfig"),
    "generationConfig": ("object", "GenerationConfig"),
    "safetySettings": ("array", "SafetySetting"),
}
"""Fields of Gemini's API, and their types in `google.genai.types`, which has none of the body."""
_STREAM = {"type": "boolean", "description": "Answer with server-sent events."}
TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_NAME = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
STEP: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["prompt_ids", "response_ids", "trajectory_uid", "prompt_uid", "step_index"],
    "properties": {
        **dict.fromkeys(("prompt_ids", "response_ids"), TOKEN_IDS),
        **dict.fromkeys(("trajectory_uid", "prompt_uid"), _NAME),
        **dict.fromkeys(("step_index", "policy_version"), _COUNT),
        "parent_index": {"type": ["integer", "null"]},
        "reward": {"type": ["number", "null"]},
        "is_last": {"type": "boolean"},
        "metadata": {"type": "object"},
        "rollout_log_probs": {"type": ["array", "null"], "items": {"type": "number"}},
        "finish_reason": {"type": ["string", "null"]},
        "version_spans": {"type": "array", "items": {"type": "object"}},
        "multi_modal_data": {"type": ["object", "null"]},
        "routed_experts": {"type": ["array", "null"], "items": {}},
    },
}
"""A white-box agent's Step."""
_KEYS: Mapping[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
}
"""Ways to send a key, if there are keys (`access.py`)."""


def described(endpoints: Sequence[APIRoute], bodies: Mapping[str, str]) -> dict[str, Any]:
    """The document of all endpoints.

    Args:
        bodies: by path, the dotted path of the type of its body, or `GEMINI`.
    """
    document = get_openapi(title=TITLE, version="0.1.0", routes=endpoints)
    components = document.setdefault("components", {})
    components["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]
    definitions = components.setdefault("schemas", {})
    for path, kind in bodies.items():
        is_gemini = kind == GEMINI
        schema = _gemini_schema(definitions) if is_gemini else _sdk_schema(kind, definitions)
        content = {"application/json": {"schema": schema}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document


def _sdk_schema(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    try:
        kind = resolve(path)
    except ImportError:
        return {"type": "object", "properties": {"stream": _STREAM}}
    schema, definitions_of_it = _schema(kind)
    definitions.update(definitions_of_it)
    return {
        **schema,
        "properties": {"stream": _STREAM, **schema["properties"]},
        # The SDKs also want what this gateway does not: any model is served.
        "required": [field for field in schema.get("required", ()) if field != "model"],
    }


def _gemini_schema(definitions: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, (form, kind) in _GEMINI_TYPES.items():
        try:
            its, definitions_of_it = _schema(resolve(f"google.genai.types:{kind}"))
        except ImportError:
            its, definitions_of_it = {"type": "object"}, {}
        definitions.update(definitions_of_it)
        properties[name] = {"type": "array", "items": its} if form == "array" else its
    return {"type": "object", "required": ["contents"], "properties": properties}


@functools.cache
def _schema(kind: type) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The JSON schema of an SDK's type, and what it refers to. To make one takes half a second, and
    each stands at two paths."""
    schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
    return schema, schema.pop("$defs", {})

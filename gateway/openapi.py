"""`/openapi.json`: what the gateway serves, with the body of each LLM endpoint as its SDK types it.

FastAPI describes its own routes and leaves out the plain ones (`routes.py`), which are described
here; their fields are checked in `dialects/`, but conversations are best typed by the vendors'
SDKs. Made on the first request for it. An SDK that is not installed leaves a body an object.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.routing import Route

from stepwell.datapool.dotted import resolve
from stepwell.gateway.lifecycle import CompleteTrajectory
from stepwell.gateway.paths import is_gemini

_PARAMS = "CreateParamsNonStreaming"
SDK_TYPES: Mapping[str, str] = {
    "chat/completions": f"openai.types.chat.completion_create_params:Completion{_PARAMS}",
    "completions": f"openai.types.completion_create_params:Completion{_PARAMS}",
    "responses": f"openai.types.responses.response_create_params:Response{_PARAMS}",
    "messages": f"anthropic.types.message_create_params:Message{_PARAMS}",
    "messages/count_tokens": (
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams"
    ),
}
"""By path below `/v1/`."""
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
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_NAME = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_STEP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["prompt_ids", "response_ids", "trajectory_uid", "prompt_uid", "step_index"],
    "properties": {
        **dict.fromkeys(("prompt_ids", "response_ids"), _TOKEN_IDS),
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
_OWN: Mapping[str, dict[str, Any]] = {
    "/generate": {
        "type": "object",
        "description": "The fields of a chat completion; `prompt_ids` instead of `messages`.",
        "properties": {
            "trajectory_uid": {"type": "string"},
            "prompt_uid": {"type": "string"},
            "messages": {"type": "array", "items": {"type": "object"}},
            "prompt_ids": _TOKEN_IDS,
            "max_tokens": {"type": "integer", "minimum": 1},
            "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        },
    },
    "/submit_steps": {
        "type": "object",
        "required": ["steps"],
        "properties": {
            "channel": {"type": "string"},
            "steps": {"type": "array", "items": _STEP, "minItems": 1},
        },
    },
    "/compute_reward": {"type": "object"},
    "complete_trajectory": CompleteTrajectory.model_json_schema(),
}
"""Bodies of the gateway's own plain routes."""
_KEYS: Mapping[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
}
"""How a key is sent, if there are keys (`keys.py`)."""


def described(app: FastAPI) -> dict[str, Any]:
    """The document of all routes of `app`, its plain ones too."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    components["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]
    definitions = components.setdefault("schemas", {})
    for route in app.routes:
        if type(route) is Route and route.include_in_schema:
            document["paths"][route.path_format] = _described(route, definitions)
    return document


def _described(route: Route, definitions: dict[str, Any]) -> dict[str, Any]:
    _, found, below = route.path.partition("/v1/")
    operation: dict[str, Any] = {
        "summary": inspect.getdoc(route.endpoint) or below or route.path,
        "responses": {"200": {"description": "Successful Response"}},
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ],
    }
    path = below if found else route.path
    schema = _sdk_schema(path, definitions) if path in SDK_TYPES else _OWN.get(path)
    if is_gemini(path):
        schema = _gemini_schema(definitions)
    if schema is not None:
        content = {"application/json": {"schema": schema}}
        operation["requestBody"] = {"required": path != "complete_trajectory", "content": content}
    methods = (route.methods or set()) - {"HEAD"}
    return {method.lower(): operation for method in sorted(methods)}


def _sdk_schema(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    try:
        kind = resolve(SDK_TYPES[path])
    except ImportError:
        return {"type": "object", "properties": {"stream": _STREAM}}
    schema, definitions_of_it = _schema(kind)
    definitions.update(definitions_of_it)
    return {
        **schema,
        "properties": {**schema["properties"], "stream": _STREAM},
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

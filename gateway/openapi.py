"""`/openapi.json`: what the gateway serves, with the body of each LLM endpoint as its SDK types it.

The hot routes take bare requests, so FastAPI knows nothing of their bodies; the vendors' SDKs do.
Made on the first request for it. An SDK that is not installed leaves its endpoint's body an object.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

SDK_TYPES: Mapping[str, tuple[str, str]] = {
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsNonStreaming",
    ),
    "/v1/completions": (
        "openai.types.completion_create_params",
        "CompletionCreateParamsNonStreaming",
    ),
    "/v1/responses": (
        "openai.types.responses.response_create_params",
        "ResponseCreateParamsNonStreaming",
    ),
    "/v1/messages": ("anthropic.types.message_create_params", "MessageCreateParamsNonStreaming"),
    "/v1/messages/count_tokens": (
        "anthropic.types.message_count_tokens_params",
        "MessageCountTokensParams",
    ),
}
_STREAM = {"type": "boolean", "description": "Answer with server-sent events."}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_STEP = {
    "type": "object",
    "additionalProperties": False,
    "required": ["prompt_ids", "response_ids", "trajectory_uid", "prompt_uid", "step_index"],
    "properties": {
        "prompt_ids": _TOKEN_IDS,
        "response_ids": _TOKEN_IDS,
        "reward": {"type": ["number", "null"]},
        "trajectory_uid": {"type": "string", "minLength": 1},
        "prompt_uid": {"type": "string", "minLength": 1},
        "step_index": {"type": "integer", "minimum": 0},
        "policy_version": {"type": "integer", "minimum": 0},
        "is_last": {"type": "boolean"},
        "metadata": {"type": "object"},
        "rollout_log_probs": {"anyOf": [_NUMBERS, {"type": "null"}]},
        "finish_reason": {"type": ["string", "null"]},
        "parent_index": {"type": ["integer", "null"]},
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
}
"""Bodies of the gateway's own bare routes."""


_KEYS: Mapping[str, dict[str, str]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""How a key is sent, if there are keys (`keys.py`)."""


def install_openapi(app: FastAPI) -> None:
    """Let `app` describe the bodies of its bare routes."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _describe(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]  # FastAPI's documented way


def _describe(document: dict[str, Any]) -> None:
    components = document.setdefault("components", {})
    definitions = components.setdefault("schemas", {})
    components["securitySchemes"] = _KEYS
    document["security"] = [{}, *({name: []} for name in _KEYS)]
    bodies: dict[str, dict[str, Any]] = {}
    for path, operations in document["paths"].items():
        _, found, below = path.partition("/v1/")
        plain = f"/v1/{below}" if found else path
        for operation in operations.values():
            _name_path_parameters(path, operation)
        operation = operations.get("post")
        if operation is None or "requestBody" in operation:
            continue
        if plain in SDK_TYPES and plain not in bodies:
            bodies[plain] = _sdk_schema(plain, definitions)
        schema = bodies.get(plain) or _OWN.get(plain)
        if schema is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema}},
            }


def _name_path_parameters(path: str, operation: dict[str, Any]) -> None:
    """A handler that does not take its path's parameters leaves them undocumented."""
    named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
    for name in re.findall(r"{(\w+)}", path):
        if name not in named:
            operation.setdefault("parameters", []).append(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            )


def _sdk_schema(path: str, definitions: dict[str, Any]) -> dict[str, Any]:
    module, name = SDK_TYPES[path]
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError:
        return {"type": "object", "properties": {"stream": _STREAM}}
    schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
    definitions.update(schema.pop("$defs", {}))
    schema["properties"]["stream"] = _STREAM
    # The SDKs also want what this gateway does not: any model is served.
    schema["required"] = [field for field in schema.get("required", ()) if field != "model"]
    return schema

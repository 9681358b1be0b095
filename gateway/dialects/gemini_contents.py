"""Gemini's contents and tools as the gateway's messages and tools.

    contents ──► messages     a functionResponse becomes a tool message, in wire order
    tools ──► functions       an OpenAPI schema becomes a JSON schema

Agents return the ids of calls, leave them out (Gemini 2 has none), or make their own. Calls are
therefore numbered in the order of the conversation (`call_0`, `call_1`, …; Kimi's and Mistral's in
the form that their chat templates take), in what is answered and in what is sent back, so that both
are the same whatever ids they have.

Does not own: the fields around them, answers (`gemini.py`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic.alias_generators import to_camel

from stepwell.gateway.dialects.base import NOTHING, Known
from stepwell.gateway.dialects.params import need, optional, wrong
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.calls import numbered_id
from stepwell.gateway.tokens.messages import (
    AssistantTurn,
    Message,
    Tool,
    Tools,
    content_of,
    in_call_order,
)

_SNAKE = (
    "additional_properties",
    "allowed_function_names",
    "any_of",
    "cached_content",
    "candidate_count",
    "code_execution",
    "code_execution_result",
    "computer_use",
    "enable_enhanced_civic_answers",
    "enterprise_web_search",
    "executable_code",
    "file_data",
    "file_uri",
    "exa_ai_search",
    "file_search",
    "frequency_penalty",
    "function_call",
    "function_calling_config",
    "function_declarations",
    "function_response",
    "generate_content_request",
    "generation_config",
    "google_maps",
    "google_search",
    "google_search_retrieval",
    "include_server_side_tool_invocations",
    "include_thoughts",
    "inline_data",
    "max_items",
    "max_length",
    "max_output_tokens",
    "max_properties",
    "mcp_servers",
    "media_resolution",
    "mime_type",
    "min_items",
    "min_length",
    "min_properties",
    "parallel_ai_search",
    "parameters_json_schema",
    "partial_args",
    "presence_penalty",
    "property_ordering",
    "response_json_schema",
    "response_logprobs",
    "response_mime_type",
    "response_modalities",
    "response_schema",
    "retrieval_config",
    "safety_settings",
    "service_tier",
    "stop_sequences",
    "stream_function_call_arguments",
    "system_instruction",
    "thinking_budget",
    "thinking_config",
    "thinking_level",
    "thought_signature",
    "tool_call",
    "tool_config",
    "tool_response",
    "top_k",
    "top_p",
    "url_context",
    "will_continue",
)
NAMES: Mapping[str, str] = {name: to_camel(name) for name in _SNAKE}
"""Google's API takes its fields in both forms, and its own examples use both."""
_MEDIA = ("inlineData", "fileData", "executableCode", "codeExecutionResult", "toolCall")
_DATA = ("text", "functionCall", "functionResponse", *_MEDIA, "toolResponse")
"""A part has one of them."""
_SERVERS = frozenset(
    (
        "codeExecution",
        "enterpriseWebSearch",
        "exaAiSearch",
        "fileSearch",
        "googleMaps",
        "googleSearch",
        "googleSearchRetrieval",
        "parallelAiSearch",
        "retrieval",
        "urlContext",
    )
)
"""Tools that Google's servers run."""


def camel(sent: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object with its known fields in camel case.

    Raises:
        RequestError: a field is there in both forms.
    """
    if NAMES.keys().isdisjoint(sent):
        return sent
    named = {NAMES.get(name, name): value for name, value in sent.items()}
    if len(named) < len(sent):
        name = next(n for n in sent if n in NAMES and NAMES[n] in sent)
        raise RequestError(f"{name} and {NAMES[name]} are one field; send one of them", name)
    return named


# -- contents --------------------------------------------------------------------------------


@dataclass(slots=True)
class Conversation:
    """Messages of a request, read content by content."""

    messages: list[Message] = field(default_factory=list)
    n_outside: int = 0
    """Messages that are not of the contents: the system's, or none."""
    n_calls: int = 0
    """Function calls so far."""
    known: Known = field(default_factory=Known)
    numbered: Callable[[int, str], str] = numbered_id
    """Id of a call by its number and the tool's name."""
    _turn: AssistantTurn | None = None
    """The model's turn that is being read."""
    _of_id: dict[str | None, deque[str]] = field(default_factory=dict)
    """Ids of the last turn's calls by those that were sent."""
    _of_name: dict[str | None, deque[str]] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)

    @classmethod
    def read(
        cls,
        system: Any,
        contents: list[Any],
        known: Known = NOTHING,
        numbered: Callable[[int, str], str] = numbered_id,
    ) -> Conversation:
        """
        Raises:
            RequestError
        """
        conversation = cls(n_calls=known.start.n_calls, known=known, numbered=numbered)
        if system is not None and (text := system_text(system)):
            conversation.messages.append({"role": "system", "content": text})
        conversation.n_outside = n_outside = len(conversation.messages)
        for i, content in enumerate(contents):
            n, n_calls = len(conversation.messages), conversation.n_calls
            turn = conversation._turn
            conversation._add(content, f"contents[{known.place(i)}]")
            if conversation._turn is not None and conversation._turn is not turn:
                known.cut(i, n - n_outside, n_calls)
        if conversation._turn is not None:
            raise RequestError(
                "contents ends with the model's turn, which this gateway does not continue; end "
                "with a user's text or a functionResponse",
                "contents",
            )
        known.cut(len(contents), len(conversation.messages) - n_outside, conversation.n_calls)
        conversation.messages = in_call_order(conversation.messages)
        return conversation

    def _add(self, content: Any, where: str) -> None:
        if not isinstance(content, dict):
            raise wrong(where, content, "send an object with role and parts")
        role = content.get("role")
        if self._turn is not None and role != "model":
            self._turn.end()
            self._turn = None
        if role in ("user", "function", None):
            self._add_user(content, where)
        elif role == "model":
            self._add_model(content, where)
        else:
            raise wrong(f"{where}.role", role, "send user or model")

    def _add_user(self, content: Mapping[str, Any], where: str) -> None:
        """Responses become messages of their own, in wire order; what is between them, users'."""
        said: list[str | Message] = []
        n = len(self.messages)

        def flush() -> None:
            if said:
                self.messages.append({"role": "user", "content": content_of(said)})
                said.clear()

        for part, at in parts_of(content, where):
            if "functionResponse" in part:
                flush()
                self.messages.append(self._response(part["functionResponse"], at))
            elif "inlineData" in part or "fileData" in part:
                said.append(_picture(part, at, self.known))
            elif text := _text(part, at, "text, inlineData and functionResponse"):
                if part.get("thought"):
                    raise wrong(f"{at}.thought", True, "thoughts are the model's; leave it out")
                said.append(text)
        flush()
        if len(self.messages) == n:
            self.messages.append({"role": "user", "content": ""})

    def _add_model(self, content: Mapping[str, Any], where: str) -> None:
        """Parts are pieces of one text; nothing was between them. So are contents."""
        if self._turn is None:
            self._turn = AssistantTurn()
            self.messages.append(self._turn.message)
            self._of_id.clear()
            self._of_name.clear()
        for part, at in parts_of(content, where):
            if "functionCall" in part:
                self._turn.add_call(self._call(part["functionCall"], f"{at}.functionCall"))
            elif text := _text(part, at, "text and functionCall"):
                self._turn.add("reasoning_content" if part.get("thought") else "content", text)

    def _call(self, sent: Any, where: str) -> dict[str, Any]:
        if not isinstance(sent, dict):
            raise wrong(where, sent, "send the call's name and args")
        sent = camel(sent)
        name, args = need(sent, "name", str, where), sent.get("args")
        if not isinstance(args, dict | None):
            raise wrong(f"{where}.args", args, "send an object")
        if sent.get("partialArgs"):
            raise wrong(f"{where}.partialArgs", sent["partialArgs"], "send whole args")
        call_id = self.numbered(self.n_calls, name)
        self.n_calls += 1
        self._of_id.setdefault(optional(sent, "id", where), deque()).append(call_id)
        self._of_name.setdefault(name, deque()).append(call_id)
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": args or {}},
        }

    def _response(self, sent: Any, where: str) -> Message:
        where = f"{where}.functionResponse"
        if not isinstance(sent, dict):
            raise wrong(where, sent, "send the name of the function and its response")
        sent = camel(sent)
        name, sent_id = need(sent, "name", str, where), optional(sent, "id", where)
        if sent.get("willContinue"):
            raise wrong(f"{where}.willContinue", True, "send the whole response at once")
        response = sent.get("response")
        if not isinstance(response, dict | None):
            raise wrong(f"{where}.response", response, "send an object")
        call_id = self._find(sent_id, name) or sent_id or name
        parts = [_picture(part, at, self.known) for part, at in parts_of(sent, where)]
        text = response_text(response)
        content = content_of([text, *parts] if text or not parts else parts)
        return {"role": "tool", "content": content, "tool_call_id": call_id}

    def _find(self, sent_id: str | None, name: str) -> str | None:
        """The call that a response answers: that of its id, else the first one of its name."""
        queues = [self._of_name.get(name)]
        if sent_id is not None:
            queues.insert(0, self._of_id.get(sent_id))
        for queue in queues:
            while queue:
                if (call_id := queue.popleft()) not in self._answered:
                    self._answered.add(call_id)
                    return call_id
        return None


def response_text(response: Mapping[str, Any] | None) -> str:
    """A function's response as the model reads it. Google's API says that `output` holds the
    output and `error` the error, and that without them all of it is the output."""
    if not response:
        return ""
    if response.keys() == {"error"}:
        text = _as_text(response["error"])
        return text if "error" in text.lower() else f"Error: {text}"
    return _as_text(response["output"] if response.keys() == {"output"} else response)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def system_text(content: Any) -> str:
    """Text of `systemInstruction`: a content, its parts, or the text itself."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        content = {"parts": content}
    if not isinstance(content, dict):
        raise wrong("systemInstruction", content, "send an object with parts of text")
    parts = parts_of(content, "systemInstruction")
    return "\n".join(text for part, at in parts if (text := _text(part, at, "text")))


def parts_of(content: Mapping[str, Any], where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Parts with their places; Google's API also takes a single one without a list."""
    parts = content.get("parts")
    if isinstance(parts, dict):
        parts = [parts]
    if not isinstance(parts, list | None):
        raise wrong(f"{where}.parts", parts, "send a list of parts")
    for i, part in enumerate(parts or ()):
        at = f"{where}.parts[{i}]"
        if not isinstance(part, dict):
            raise wrong(at, part, "send an object with text")
        part = camel(part)
        yield (
            {k: v for k, v in part.items() if v is not None} if None in part.values() else part,
            at,
        )


def _picture(part: Mapping[str, Any], where: str, known: Known) -> Message:
    """The part that stands for a picture."""
    for name, field_name in (("inlineData", "data"), ("fileData", "fileUri")):
        if name not in part:
            continue
        sent = camel(need(part, name, dict, where, "send mimeType and data"))
        media = optional(sent, "mimeType", f"{where}.{name}") or ""
        if not media.lower().startswith("image/"):
            remedy = "send text; or a picture (image/png, image/jpeg), to a model with vision"
            raise wrong(f"{where}.{name}.mimeType", media, remedy)
        at = f"{where}.{name}.{field_name}"
        resolution = part.get("mediaResolution")
        return known.picture(sent.get(field_name), at, mediaResolution=resolution)
    raise wrong(where, part, "send a picture as inlineData")


def _text(part: Mapping[str, Any], where: str, supported: str) -> str:
    """The text of a part; one that only has a signature has none."""
    for name in _DATA:
        if name in part and name != "text":
            remedy = f"this gateway supports {supported} here"
            raise wrong(f"{where}.{name}", part[name], remedy)
    return need(part, "text", str, where) if "text" in part or not _is_signature(part) else ""


def _is_signature(part: Mapping[str, Any]) -> bool:
    return "thoughtSignature" in part or "thought" in part


# -- tools -----------------------------------------------------------------------------------


def read_tools(sent: list[Any]) -> tuple[Tools, list[str]]:
    """The functions shown to the model, and what is left out.

    Raises:
        RequestError
    """
    tools: list[Tool] = []
    ignored: list[str] = []
    for i, tool in enumerate(sent):
        where = f"tools[{i}]"
        if not isinstance(tool, dict):
            raise wrong(where, tool, "send an object with functionDeclarations")
        for name, value in camel(tool).items():
            if value is None:
                continue
            if name == "functionDeclarations":
                if not isinstance(value, list):
                    raise wrong(f"{where}.{name}", value, "send a list")
                places = (f"{where}.{name}[{j}]" for j in range(len(value)))
                tools += (
                    _declared(each, at, ignored) for each, at in zip(value, places, strict=True)
                )
            elif name in _SERVERS:
                ignored.append(f"{where}.{name}")
            elif name == "mcpServers":
                remedy = "connect the agent to them and send their tools as functionDeclarations"
                raise wrong(f"{where}.{name}", value, remedy)
            else:
                raise wrong(f"{where}.{name}", value, "declare functions in functionDeclarations")
    return Tools(tools), ignored


def _declared(sent: Any, where: str, ignored: list[str]) -> Tool:
    if not isinstance(sent, dict):
        raise wrong(where, sent, "send a function with a name")
    sent = camel(sent)
    function: dict[str, Any] = {"name": need(sent, "name", str, where)}
    if (about := optional(sent, "description", where)) is not None:
        function["description"] = about
    openapi, schema = sent.get("parameters"), sent.get("parametersJsonSchema")
    if openapi is not None and schema is not None:
        raise wrong(f"{where}.parametersJsonSchema", schema, "leave it out, or parameters")
    if openapi is not None:
        schema = json_schema(need(sent, "parameters", dict, where, "send a schema"))
    elif schema is not None:
        schema = json_schema(need(sent, "parametersJsonSchema", dict, where, "send a JSON schema"))
    function["parameters"] = {"type": "object", "properties": {}} if schema is None else schema
    for name in ("response", "responseJsonSchema", "behavior"):
        if sent.get(name) is not None and (told := f"functionDeclarations.{name}") not in ignored:
            ignored.append(told)
    return {"type": "function", "function": function}


_SIZES = frozenset(
    ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
)


def json_schema(schema: Any) -> Any:
    """An OpenAPI schema of Google's API as a JSON schema: its types have capitals, its sizes may be
    texts, `nullable` is a type, and `propertyOrdering` is the order of the properties. A JSON
    schema stays as it is; Gemini CLI sends some with types in capitals."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in camel(schema).items():
        if value is None:
            continue
        if name == "type" and isinstance(value, str):
            if value != "TYPE_UNSPECIFIED":
                made["type"] = value.lower()
        elif name in ("properties", "defs", "$defs") and isinstance(value, dict):
            name = "$defs" if name == "defs" else name
            made[name] = {each: json_schema(its) for each, its in value.items()}
        elif name == "ref" and isinstance(value, str):
            made["$ref"] = value.replace("#/defs/", "#/$defs/", 1)
        elif name in ("allOf", "anyOf", "oneOf", "prefixItems") and isinstance(value, list):
            made[name] = [*map(json_schema, value)]
        elif name in ("items", "additionalProperties"):
            made[name] = json_schema(value)
        elif name in _SIZES and isinstance(value, str) and value.isdecimal() and len(value) < 20:
            made[name] = int(value)
        elif name == "example":
            made["examples"] = [value]
        else:
            made[name] = value
    if made.pop("nullable", None) is True:
        if isinstance(kind := made.get("type"), str):
            made["type"] = [kind, "null"]
        if isinstance(options := made.get("anyOf"), list):
            made["anyOf"] = [*options, {"type": "null"}]
        if isinstance(values := made.get("enum"), list):
            made["enum"] = [*values, None]
    order, properties = made.pop("propertyOrdering", None), made.get("properties")
    if isinstance(order, list) and isinstance(properties, dict):
        first = [name for name in order if isinstance(name, str) and name in properties]
        made["properties"] = {name: properties[name] for name in (*first, *properties)}
    return made

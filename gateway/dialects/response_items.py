"""Items and tools of the Responses API as messages and tools of the gateway, and what was answered.

    input items ──► Conversation ──► messages        reasoning, message and call items that stand
    tools       ──► Toolbox      ──► tools           together are one assistant message
    answers     ──► ResponseStore ──► `previous_response_id`, `item_reference`, GET

Owns: the meaning of items, the flat names under which the model sees tools of a namespace, sealed
reasoning, the bounded memory of answers. Does not own: a request's other fields, answers and events
(`openai_responses.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from stepwell.gateway.errors import RequestError, UnknownItemError
from stepwell.gateway.tokens.messages import Message, Tool

Item: TypeAlias = dict[str, Any]
FindItem: TypeAlias = Callable[[str], Item | None]
"""An item of a stored answer by its id."""

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal"})
_ROLES = {"user": "user", "system": "system", "developer": "system"}
_SUPPORTED_ITEMS = (
    "message, reasoning, function_call, function_call_output, custom_tool_call, "
    "custom_tool_call_output and item_reference"
)

# -- tools -----------------------------------------------------------------------------------

_HOSTED = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Tools that OpenAI runs, or trained its models to use: this model cannot call them."""
_FREEFORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""How a custom tool, whose input is plain text, is shown to the model."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class Toolbox:
    """The request's tools that the model can call."""

    shown: list[Tool] = field(default_factory=list)
    """For the chat template, under flat names."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """By flat name."""
    echo: list[dict[str, Any]] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)
    """Tools left out, as `path=type`."""
    ignored: list[str] = field(default_factory=list)
    """What else was left aside of them."""

    def add(self, tools: Sequence[Any], where: str) -> None:
        """
        Raises:
            RequestError: a tool is malformed, of an unknown type, or named as another one.
        """
        for i, tool in enumerate(tools):
            self._add(tool, f"{where}[{i}]")

    def flat_name(self, name: str, namespace: str | None) -> str:
        """The name that the model knows; clients may drop the namespace when they replay a call."""
        if namespace is not None:
            return _flat(namespace, name)
        if name in self.names:
            return name
        known = [flat for flat, tool in self.names.items() if tool.name == name]
        return known[0] if len(known) == 1 else name

    def client_name(self, flat: str) -> ToolName:
        """What the client calls the tool that the model called; any other name stays."""
        return self.names.get(flat) or ToolName(flat)

    def _add(self, tool: Any, where: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if not isinstance(tool, dict) or not isinstance(kind, str):
            raise RequestError(f"{where}.type is {kind!r:.80}; send 'function'", f"{where}.type")
        if kind in ("function", "custom"):
            self._add_callable(tool, where, None)
            return
        if kind == "namespace":
            self._add_namespace(tool, where)
            return
        if kind not in _HOSTED:
            raise RequestError(
                f"{where}.type is {kind!r:.80}; this gateway supports function, custom and "
                "namespace tools",
                f"{where}.type",
            )
        self.hosted.append(f"{where}={kind}")

    def _add_namespace(self, tool: dict[str, Any], where: str) -> None:
        namespace = _name(tool, where)
        about = _description(tool, where)
        tools = tool.get("tools")
        if not isinstance(tools, list):
            raise RequestError(f"{where}.tools is {tools!r:.80}; send a list", f"{where}.tools")
        echo = []
        for i, each in enumerate(tools):
            at = f"{where}.tools[{i}]"
            if not isinstance(each, dict) or each.get("type") not in ("function", "custom"):
                kind = each.get("type") if isinstance(each, dict) else each
                raise RequestError(
                    f"{at}.type is {kind!r:.80}; a namespace holds function and custom tools",
                    f"{at}.type",
                )
            # The namespace has no place in a chat template; its first tool introduces it.
            echo.append(self._add_callable(each, at, namespace, about if i == 0 else ""))
        self.echo.append({**tool, "description": about, "tools": echo})

    def _add_callable(
        self, tool: dict[str, Any], where: str, namespace: str | None, about: str = ""
    ) -> dict[str, Any]:
        name = _name(tool, where)
        flat = name if namespace is None else _flat(namespace, name)
        description = "\n\n".join(filter(None, (about, _description(tool, where))))
        is_custom = tool["type"] == "custom"
        if is_custom:
            parameters: Any = _FREEFORM
            description = self._with_format(tool, where, description)
            echo = tool
        else:
            parameters = tool.get("parameters")
            if parameters is not None and not isinstance(parameters, dict):
                raise RequestError(
                    f"{where}.parameters is {parameters!r:.80}; send a JSON schema",
                    f"{where}.parameters",
                )
            echo = {"description": None, "parameters": None, "strict": None, **tool}
        function: dict[str, Any] = {"name": flat}
        if description:
            function["description"] = description
        function["parameters"] = parameters or {"type": "object", "properties": {}}
        shown = {"type": "function", "function": function}
        if flat not in self.names:
            self.names[flat] = ToolName(name, namespace, is_custom)
            self.shown.append(shown)
        elif shown not in self.shown:
            raise RequestError(
                f"{where}.name is {name!r:.80}, and another tool is called {flat!r:.80} too; "
                "rename one",
                f"{where}.name",
            )
        if namespace is None:
            self.echo.append(echo)
        return echo

    def _with_format(self, tool: dict[str, Any], where: str, description: str) -> str:
        """A grammar is told to the model, not enforced."""
        form = tool.get("format")
        kind = form.get("type") if isinstance(form, dict) else None
        if form is None or kind == "text":
            return description
        grammar = form.get("definition") if isinstance(form, dict) else None
        if kind != "grammar" or not isinstance(grammar, str):
            raise RequestError(
                f"{where}.format is {form!r:.80}; send type 'text' or 'grammar' with a definition",
                f"{where}.format",
            )
        self.ignored.append(f"{where}.format=grammar")
        return f"{description}\n\nThe input follows this grammar:\n{grammar}".strip()


def _flat(namespace: str, name: str) -> str:
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name is {name!r:.80}; send a name", f"{where}.name")
    return name


def _description(tool: Mapping[str, Any], where: str) -> str:
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(
            f"{where}.description is {description!r:.80}; send text", f"{where}.description"
        )
    return description or ""


# -- reasoning -------------------------------------------------------------------------------

_SEAL = "stepwell1."


def seal(reasoning: str) -> str:
    """`encrypted_content`: the reasoning with a mark that shows damage. Not secret: the model's
    thoughts are the trainer's own, and a client may send any reasoning it likes anyway."""
    data = reasoning.encode()
    return _SEAL + base64.urlsafe_b64encode(_mark(data) + data).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning in an `encrypted_content`; None: it was not made here.

    Raises:
        ValueError: it was made here and is damaged.
    """
    if not sealed.startswith(_SEAL):
        return None
    try:
        raw = base64.b64decode(sealed[len(_SEAL) :], altchars=b"-_", validate=True)
    except ValueError as e:
        raise ValueError("it is no base64") from e
    mark, data = raw[:_MARK_BYTES], raw[_MARK_BYTES:]
    if mark != _mark(data):
        raise ValueError("its mark does not fit its text")
    return data.decode()


_MARK_BYTES = 12


def _mark(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_MARK_BYTES, person=b"stepwell").digest()


# -- items -----------------------------------------------------------------------------------


class Conversation:
    """Messages of a conversation, item by item.

    Reasoning, messages and calls of the assistant that stand together are one assistant message,
    whatever their ids; anything else ends it. Tool outputs are put in the order of their calls, as
    templates tell them apart by their place only.
    """

    def __init__(
        self, known: Sequence[Message], toolbox: Toolbox, find: FindItem = lambda _: None
    ) -> None:
        """
        Args:
            known: what came before (a stored response); not changed.
        """
        self.ignored: list[str] = []
        self._messages = list(known)
        self._toolbox = toolbox
        self._find = find
        self._assistant: Message | None = None
        """The assistant message that is being put together."""

    def add(self, item: Any, where: str) -> None:
        """
        Raises:
            RequestError: names the item's field, its value and the remedy.
            UnknownItemError: a reference to an item that is not stored.
        """
        if not isinstance(item, dict):
            raise RequestError(f"{where} is {item!r:.80}; send an object", where)
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if "id" in item else None
        read = self._READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise RequestError(
                f"{where}.type is {kind!r:.80}; this gateway supports {_SUPPORTED_ITEMS}",
                f"{where}.type",
            )
        read(self, item, where)

    def messages(self) -> list[Message]:
        """The whole conversation."""
        return _in_call_order(self._messages)

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role == "assistant":
            text = _text(item.get("content"), f"{where}.content", "")
            self._open()["content"] += text
            return
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestError(
                f"{where}.role is {role!r:.80}; send user, assistant, system or developer",
                f"{where}.role",
            )
        text = _text(item.get("content"), f"{where}.content", "\n")
        self._append({"role": _ROLES[role], "content": text})

    def _reasoning(self, item: Item, where: str) -> None:
        text = self._reasoning_text(item, where)
        message = self._open()
        if text:
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _reasoning_text(self, item: Item, where: str) -> str:
        sealed = item.get("encrypted_content")
        if isinstance(sealed, str) and sealed:
            try:
                text = unseal(sealed)
            except ValueError as e:
                raise RequestError(
                    f"{where}.encrypted_content was changed ({e}); send it as it came, or drop "
                    "the reasoning item",
                    f"{where}.encrypted_content",
                ) from e
            if text is not None:
                return text
            self.ignored.append(f"{where}.encrypted_content=foreign")
        for name, kind, joint in (
            ("content", "reasoning_text", ""),
            ("summary", "summary_text", "\n\n"),
        ):
            parts = item.get(name)
            if parts is None:
                continue
            if not isinstance(parts, list):
                raise RequestError(
                    f"{where}.{name} is {parts!r:.80}; send a list of {kind} parts",
                    f"{where}.{name}",
                )
            texts = [_reasoning_part(p, kind, f"{where}.{name}[{i}]") for i, p in enumerate(parts)]
            if any(texts):
                return joint.join(texts)
        stored = self._find(item["id"]) if isinstance(item.get("id"), str) else None
        if stored is not None and stored is not item and stored["type"] == "reasoning":
            return self._reasoning_text({**stored, "id": None}, where)
        return ""

    def _function_call(self, item: Item, where: str) -> None:
        arguments = item.get("arguments")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, str | dict):
            raise RequestError(
                f"{where}.arguments is {arguments!r:.80}; send JSON text", f"{where}.arguments"
            )
        self._call(item, arguments, where)

    def _custom_call(self, item: Item, where: str) -> None:
        text = item.get("input")
        if not isinstance(text, str):
            raise RequestError(f"{where}.input is {text!r:.80}; send text", f"{where}.input")
        self._call(item, {"input": text}, where)

    def _call(self, item: Item, arguments: str | dict[str, Any], where: str) -> None:
        call_id = _call_id(item, where)
        namespace = item.get("namespace")
        if namespace is not None and not isinstance(namespace, str):
            raise RequestError(
                f"{where}.namespace is {namespace!r:.80}; send a name", f"{where}.namespace"
            )
        name = self._toolbox.flat_name(_name(item, where), namespace)
        function = {"name": name, "arguments": arguments}
        calls = self._open().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, item: Item, where: str) -> None:
        call_id = _call_id(item, where)
        output = item.get("output")
        text = "" if output is None else _text(output, f"{where}.output", "\n")
        self._append({"role": "tool", "content": text, "tool_call_id": call_id})

    def _reference(self, item: Item, where: str) -> None:
        item_id = item.get("id")
        stored = self._find(item_id) if isinstance(item_id, str) else None
        if stored is None:
            raise UnknownItemError(
                f"Item with id {item_id!r:.80} not found ({where}). Items are not persisted when "
                "`store` is set to false, and not forever otherwise. Send the item itself.",
                "input",
            )
        self.add(stored, where)

    def _more_tools(self, item: Item, where: str) -> None:
        """Read before the conversation; see `additional_tools`."""

    def _open(self) -> Message:
        if self._assistant is None:
            self._assistant = {"role": "assistant", "content": ""}
            self._messages.append(self._assistant)
        return self._assistant

    def _append(self, message: Message) -> None:
        self._assistant = None
        self._messages.append(message)

    _READERS: ClassVar[Mapping[str, Callable[[Conversation, Item, str], None]]] = {
        "message": _message,
        "reasoning": _reasoning,
        "function_call": _function_call,
        "function_call_output": _output,
        "custom_tool_call": _custom_call,
        "custom_tool_call_output": _output,
        "item_reference": _reference,
        "additional_tools": _more_tools,
    }


def additional_tools(items: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    """Tools that come as items of the input, each list with its path."""
    found = []
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            where = f"input[{i}].tools"
            tools = item.get("tools")
            if not isinstance(tools, list):
                raise RequestError(f"{where} is {tools!r:.80}; send a list", where)
            found.append((where, tools))
    return found


def _in_call_order(messages: list[Message]) -> list[Message]:
    """Runs of tool outputs in the order of the calls before them."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or len(message.get("tool_calls") or ()) < 2:
            continue
        start = end = at + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        order = {call["id"]: i for i, call in enumerate(message["tool_calls"])}
        messages[start:end] = sorted(
            messages[start:end], key=lambda m: order.get(m["tool_call_id"], len(order))
        )
    return messages


def _call_id(item: Item, where: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise RequestError(
            f"{where}.call_id is {call_id!r:.80}; send the id of the call", f"{where}.call_id"
        )
    return call_id


def _reasoning_part(part: Any, kind: str, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestError(f"{where} is {part!r:.80}; send a {kind} part", where)
    return text


def _text(content: Any, where: str, joint: str) -> str:
    """Text of a message or tool output."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} is {content!r:.80}; send text or a list of parts", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        text = None
        if isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part, dict):
            text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{i}].type is {kind!r:.80}; this gateway serves a model of text: send "
                "input_text or output_text parts",
                f"{where}[{i}]",
            )
        texts.append(text)
    return joint.join(texts)


# -- what was answered -----------------------------------------------------------------------

_ENTRY_CHARS = 2_000
"""What an answer takes besides its texts."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer that a client may refer to."""

    response: dict[str, Any]
    """As it was sent."""
    input: tuple[Item, ...]
    """The request's own items."""
    messages: tuple[Message, ...]
    """The conversation up to and with the answer; instructions are not carried over."""
    trajectory_uid: str

    def n_chars(self) -> int:
        n = _ENTRY_CHARS + len(str(self.response))  # it repeats the tools
        for message in self.messages:
            n += len(message["content"]) + len(message.get("reasoning_content") or "")
            n += len(str(message.get("tool_calls") or ""))
        return n


class ResponseStore:
    """Answers up to a number of characters; the least recently used go first."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._n_chars = 0
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._items: dict[str, tuple[Item, str]] = {}
        """Each with its trajectory."""

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        n_chars = stored.n_chars()
        self.delete(stored.response["id"])
        self._stored[stored.response["id"]] = stored, n_chars
        self._n_chars += n_chars
        uid = stored.trajectory_uid
        self._items.update((item["id"], (item, uid)) for item in stored.response["output"])
        while self._n_chars > self._max_chars:
            self.delete(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        stored = self._stored.get(response_id)
        if stored is None:
            return None
        self._stored.move_to_end(response_id)
        return stored[0]

    def item(self, item_id: str) -> tuple[Item, str] | None:
        """An item of a stored answer, and the trajectory that it belongs to."""
        return self._items.get(item_id)

    def forget(self, trajectory_uid: str) -> None:
        """Delete the answers of a trajectory."""
        stored = [each for each, _ in self._stored.values()]
        for each in stored:
            if each.trajectory_uid == trajectory_uid:
                self.delete(each.response["id"])

    def delete(self, response_id: str) -> None:
        stored, n_chars = self._stored.pop(response_id, (None, 0))
        self._n_chars -= n_chars
        for item in stored.response["output"] if stored is not None else ():
            self._items.pop(item["id"], None)


def listed(stored: StoredResponse) -> list[Item]:
    """The input items of a stored answer as the API lists them: with ids, content in parts."""
    uid = stored.response["id"].partition("_")[2]
    items = []
    for i, item in enumerate(stored.input):
        shown = {**item, "id": item.get("id") or f"in_{uid}_{i}"}
        shown["type"] = item.get("type") or ("message" if "role" in item else "item_reference")
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            part: dict[str, Any] = {"type": kind, "text": item["content"]}
            shown["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
        if shown["type"] not in ("reasoning", "additional_tools"):
            shown.setdefault("status", "completed")
        items.append(shown)
    return items


def custom_input(arguments: str) -> str:
    """The input of a custom tool, out of the call's arguments; other arguments as they are."""
    value = json.loads(arguments)
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments

"""Items and tools of the Responses API as messages and tools of the gateway.

    input items ──► Conversation ──► messages        reasoning, message and call items that stand
    tools       ──► Toolbox      ──► tools           together are one assistant message

Owns: the meaning of items, the flat names under which the model sees tools of a namespace, sealed
reasoning. Does not own: a request's other fields and stored answers (`openai_responses.py`), new
answers and events (`response_answer.py`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stepwell.gateway.dialects.base import NOTHING, Known
from stepwell.gateway.dialects.computer import (
    COMPUTER,
    OPENAI_TYPES,
    computer_arguments,
    openai_computer,
)
from stepwell.gateway.dialects.params import need, optional, wrong
from stepwell.gateway.errors import UnknownItemError
from stepwell.gateway.tokens.messages import (
    AssistantTurn,
    Message,
    Tool,
    Tools,
    content_of,
    in_call_order,
    parse_arguments,
)

Item: TypeAlias = dict[str, Any]
FindItem: TypeAlias = Callable[[str], Item | None]
"""An item of a stored answer by its id."""

_ROLES = {"user": "user", "system": "system", "developer": "system"}

# -- tools -----------------------------------------------------------------------------------

_FREEFORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""Parameters with which a custom tool, whose input is plain text, is shown to the model."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the client names it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    computer: str | None = None
    """Type of the computer tool that it is."""


@dataclass(slots=True)
class Toolbox:
    """The request's tools that the model can call."""

    shown: list[Tool] = field(default_factory=list)
    """For the chat template, under flat names."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """By flat name."""
    echo: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    """Tools left out, as `path=type`, and what was left aside of others."""

    @classmethod
    def read(cls, tools: Sequence[Any]) -> Toolbox:
        """
        Raises:
            RequestError: a tool is malformed, or named as another one.
        """
        box = cls()
        for i, tool in enumerate(tools):
            at = f"tools[{i}]"
            match tool:
                case {"type": "function" | "custom"}:
                    box.echo.append(box._callable(tool, at))
                case {"type": "namespace"}:
                    box.echo.append(box._namespace(tool, at))
                case {"type": str(kind)} if kind in OPENAI_TYPES:
                    box._add(openai_computer(tool, at), ToolName(COMPUTER, computer=kind), at)
                    box.echo.append(tool)
                case {"type": str(kind)} if kind.isascii() and kind.isidentifier():
                    # OpenAI runs it, or trained its models to use it.
                    box.ignored.append(f"{at}={kind}")
                case _:
                    other = tool.get("type") if isinstance(tool, dict) else tool
                    remedy = "this gateway supports function, custom and namespace tools"
                    raise wrong(f"{at}.type", other, remedy)
        box.shown = Tools(box.shown)
        return box

    def flat_name(self, name: str, namespace: str | None) -> str:
        """The name that the model knows; clients may drop the namespace when they replay a call."""
        if namespace is not None:
            return _flat(namespace, name)
        known = [flat for flat, tool in self.names.items() if tool.name == name]
        return known[0] if name not in self.names and len(known) == 1 else name

    def client_name(self, flat: str) -> ToolName:
        """Return the client's name for the tool that the model called; any other name stays."""
        return self.names.get(flat) or ToolName(flat)

    def _namespace(self, tool: dict[str, Any], where: str) -> dict[str, Any]:
        namespace, about = _name(tool, where), optional(tool, "description", where) or ""
        echo = []
        for i, each in enumerate(need(tool, "tools", list, where, "send a list")):
            at = f"{where}.tools[{i}]"
            match each:
                case {"type": "function" | "custom"}:
                    # It has no place in a chat template; its first tool introduces it.
                    echo.append(self._callable(each, at, namespace, about if i == 0 else ""))
                case _:
                    kind = each.get("type") if isinstance(each, dict) else each
                    remedy = "a namespace holds function and custom tools"
                    raise wrong(f"{at}.type", kind, remedy)
        return {**tool, "description": about, "tools": echo}

    def _callable(
        self, tool: dict[str, Any], where: str, namespace: str | None = None, about: str = ""
    ) -> dict[str, Any]:
        name = _name(tool, where)
        flat = name if namespace is None else _flat(namespace, name)
        own = optional(tool, "description", where) or ""
        description = f"{about}\n\n{own}".strip() if about else own
        parameters: Mapping[str, Any] | None
        if is_custom := tool["type"] == "custom":
            parameters, echo = _FREEFORM, tool
            description = self._with_format(tool, where, description)
        else:
            parameters = tool.get("parameters")
            if not isinstance(parameters, dict | None):
                raise wrong(f"{where}.parameters", parameters, "send a JSON schema")
            echo = {"description": None, "parameters": None, "strict": None, **tool}
        function: dict[str, Any] = {"name": flat}
        if description:
            function["description"] = description
        function["parameters"] = parameters or {"type": "object", "properties": {}}
        shown = {"type": "function", "function": function}
        self._add(shown, ToolName(name, namespace, is_custom), where)
        return echo

    def _add(self, shown: Tool, name: ToolName, where: str) -> None:
        flat = shown["function"]["name"]
        if flat not in self.names:
            self.names[flat] = name
            self.shown.append(shown)
        elif shown not in self.shown:
            raise wrong(f"{where}.name", name.name, f"another tool is called {flat!r:.80} too")

    def _with_format(self, tool: dict[str, Any], where: str, description: str) -> str:
        """A grammar is told to the model, not enforced."""
        match tool.get("format"):
            case None | {"type": "text"}:
                return description
            case {"type": "grammar", "definition": str(grammar)}:
                self.ignored.append(f"{where}.format=grammar")
                return f"{description}\n\nThe input follows this grammar:\n{grammar}".strip()
        remedy = "send type 'text' or 'grammar' with a definition"
        raise wrong(f"{where}.format", tool["format"], remedy)


def _flat(namespace: str, name: str) -> str:
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def _name(tool: Mapping[str, Any], where: str) -> str:
    if name := need(tool, "name", str, where, "send a name"):
        return name
    raise wrong(f"{where}.name", name, "send a name")


def custom_input(arguments: str) -> str:
    """The input of a custom tool, out of the call's arguments; other arguments as they are, behind
    a space, as an input may be JSON, too."""
    match json.loads(arguments):
        case {"input": str(text), **rest} if not rest:
            return text
    return f" {arguments}"


def custom_arguments(text: str) -> str | dict[str, Any]:
    """Arguments of the call of a custom tool whose input is `text`: the reverse."""
    if text.startswith(" {") and isinstance(parse_arguments(text), dict):
        return text
    return {"input": text}


# -- reasoning -------------------------------------------------------------------------------

_SEAL = "stepwell1."


def seal(reasoning: str) -> str:
    """`encrypted_content`. Not secret: the model's thoughts are the trainer's own, and a client may
    send any reasoning it likes anyway."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning in an `encrypted_content`; None: it was not made here, or changed."""
    if not sealed.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(sealed[len(_SEAL) :], altchars=b"-_", validate=True).decode()
    except ValueError:
        return None


# -- compaction ------------------------------------------------------------------------------

_SUMMARY = "Summary of the conversation before this message:\n\n"


def is_summary(content: str | list[Message]) -> bool:
    """Return whether a user's message is what a compaction became."""
    return isinstance(content, str) and content.startswith(_SUMMARY)


# -- items -----------------------------------------------------------------------------------


class Conversation:
    """Messages of a conversation, item by item.

    Reasoning, messages and calls of the assistant that stand together are one assistant message,
    whatever their ids; anything else ends it. Tool outputs are put in the order of their calls, as
    templates tell them apart by their place only.
    """

    def __init__(
        self,
        before: Sequence[Message],
        toolbox: Toolbox,
        find: FindItem = lambda _: None,
        *,
        known: Known = NOTHING,
    ) -> None:
        """
        Args:
            before: what came before (a stored response); not changed.
        """
        self.ignored: list[str] = [*known.start.ignored]
        self.looks_up = False
        """Items were looked up, which may be another time's or another caller's."""
        self._messages = list(before)
        self._known = known
        self._n_added = 0
        self._toolbox = toolbox
        self._find = find
        self._turn: AssistantTurn | None = None
        """The assistant message that is being put together."""

    def add(self, item: Any) -> None:
        """
        Raises:
            RequestError: names the item's field, its value and the remedy.
            UnknownItemError: a reference to an item that is not stored.
        """
        self._add(item, f"input[{self._known.place(self._n_added)}]")
        self._n_added += 1

    def _add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise wrong(where, item, "send an object")
        kind, role = item.get("type"), item.get("role")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if "id" in item else None
        match kind:
            case "message" if role == "assistant":
                self._open().add("content", _text(item, "content", where, ""))
            case "message":
                if not isinstance(role, str) or role not in _ROLES:
                    remedy = "send user, assistant, system or developer"
                    raise wrong(f"{where}.role", role, remedy)
                shown = _content if role == "user" else _lines
                content = shown(item, "content", where, self._known)
                self._append({"role": _ROLES[role], "content": content})
            case "reasoning":
                turn = self._open()  # before what its items leave aside
                turn.add("reasoning_content", self._reasoning(item, where))
            case "function_call":
                arguments = item.get("arguments")
                if not isinstance(arguments, str | dict | None):
                    raise wrong(f"{where}.arguments", arguments, "send JSON text")
                self._call(item, {} if arguments is None else arguments, where)
            case "custom_tool_call":
                self._call(item, custom_arguments(need(item, "input", str, where)), where)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _call_id(item, where)
                absent = item.get("output") is None
                content = "" if absent else _content(item, "output", where, self._known)
                self._append({"role": "tool", "content": content, "tool_call_id": call_id})
            case "computer_call":
                self._call({**item, "name": COMPUTER}, computer_arguments(item, where), where)
            case "computer_call_output":
                call_id = _call_id(item, where)
                shot = need(item, "output", dict, where, "send a computer_screenshot")
                part = _picture(shot, f"{where}.output", self._known)
                self._append({"role": "tool", "content": [part], "tool_call_id": call_id})
            case "compaction" | "compaction_summary":
                summary = unseal(need(item, "encrypted_content", str, where))
                if summary is None:
                    sealed = item["encrypted_content"]
                    remedy = "it was made elsewhere; send the conversation itself"
                    raise wrong(f"{where}.encrypted_content", sealed, remedy)
                self._append({"role": "user", "content": _SUMMARY + summary})
            case "item_reference":
                self._reference(item.get("id"), where)
            case _:
                remedy = (
                    "this gateway supports message, reasoning, function_call, custom_tool_call, "
                    "computer_call, their outputs, compaction, and item_reference"
                )
                raise wrong(f"{where}.type", kind, remedy)

    def messages(self) -> list[Message]:
        """The whole conversation."""
        if self._turn is None:
            self._cut()
        self._end_turn()
        return in_call_order(self._messages)

    def _cut(self) -> None:
        self._known.cut(self._n_added, len(self._messages), ignored=self.ignored)

    def _reasoning(self, item: Item, where: str) -> str:
        sealed = item.get("encrypted_content")
        if isinstance(sealed, str) and sealed:
            if (text := unseal(sealed)) is not None:
                return text
            self.ignored.append(f"{where}.encrypted_content=foreign")
        for name, joint in (("content", ""), ("summary", "\n\n")):
            if item.get(name) is not None and (text := _text(item, name, where, joint)):
                return text
        stored = self._look_up(item.get("id"))
        if stored is not None and stored is not item and stored["type"] == "reasoning":
            return self._reasoning({**stored, "id": None}, where)
        return ""

    def _call(self, item: Item, arguments: str | dict[str, Any], where: str) -> None:
        call_id, namespace = _call_id(item, where), optional(item, "namespace", where)
        name = self._toolbox.flat_name(_name(item, where), namespace)
        function = {"name": name, "arguments": arguments}
        self._open().add_call({"id": call_id, "type": "function", "function": function})

    def _reference(self, item_id: Any, where: str) -> None:
        stored = self._look_up(item_id)
        if stored is None:
            raise UnknownItemError(
                f"Item with id {item_id!r:.80} not found ({where}). Items are not persisted when "
                "`store` is set to false, and not forever otherwise. Send the item itself.",
                "input",
            )
        self._add(stored, where)

    def _look_up(self, item_id: Any) -> Item | None:
        self.looks_up = True
        return self._find(item_id) if isinstance(item_id, str) else None

    def _open(self) -> AssistantTurn:
        if self._turn is None:
            self._cut()
            self._turn = AssistantTurn()
            self._messages.append(self._turn.message)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    def _append(self, message: Message) -> None:
        self._end_turn()
        self._messages.append(message)


def _call_id(item: Item, where: str) -> str:
    return need(item, "call_id", str, where, "send the id of the call")


def _lines(holder: Mapping[str, Any], name: str, where: str, known: Known) -> str:
    return _text(holder, name, where, "\n")


def _content(holder: Mapping[str, Any], name: str, where: str, known: Known) -> str | list[Message]:
    """Texts, as lines, and pictures of a user's message or a tool's output."""
    content = holder.get(name)
    if not isinstance(content, list):
        return _text(holder, name, where, "\n")
    parts: list[str | Message] = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type") in ("input_image", "computer_screenshot"):
            parts.append(_picture(part, f"{where}.{name}[{i}]", known))
        else:
            parts.append(_text({name: [part]}, name, where, "", first=i))
    return content_of(parts)


def _picture(part: Mapping[str, Any], where: str, known: Known) -> Message:
    source, at = part.get("image_url"), f"{where}.image_url"
    if source is None and isinstance(file_id := part.get("file_id"), str):
        source, at = f"file:{file_id}", f"{where}.file_id"
    return known.picture(source, at, image_detail=part.get("detail"))


def _text(holder: Mapping[str, Any], name: str, where: str, joint: str, first: int = 0) -> str:
    """Text of a message, tool output or thought.

    Args:
        first: place of the first part of a list.
    """
    content, where = holder.get(name), f"{where}.{name}"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, "send text or a list of parts")
    texts = []
    for i, part in enumerate(content, first):
        match part:
            case {"type": "refusal", "refusal": str(text)} | {"text": str(text)}:
                texts.append(text)
            case _:
                remedy = (
                    "send parts with text: input_text, output_text, reasoning_text, summary_text; "
                    "or input_image in what a user or a tool says"
                )
                raise wrong(f"{where}[{i}]", part, remedy)
    return joint.join(texts)

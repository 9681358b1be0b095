"""The computer tools of OpenAI and Anthropic as functions that any model can call.

    {"type": "computer_use_preview", "display_width": 1024, …} ──► function `computer`, of OpenAI's
    {"type": "computer_20250124", "display_width_px": 1024, …} ──► or of Anthropic's actions
    call ──► `computer_call` item │ `tool_use` block       as the vendor's own model makes it

The vendors trained their models on these tools and send no schema; here the model reads the actions
in the function's parameters. Does not own: the items and blocks around them, screenshots
(`response_items.py`, `anthropic_messages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from stepwell.gateway.dialects.params import need, wrong
from stepwell.gateway.tokens.messages import Tool

COMPUTER: Final = "computer"
"""Name of the function."""
OPENAI_TYPES: Final = ("computer", "computer_use_preview")
_INTEGER: Mapping[str, Any] = {"type": "integer"}
_TEXTS: Mapping[str, Any] = {"type": "array", "items": {"type": "string"}}
_POINT: Mapping[str, Any] = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}


def openai_computer(tool: Mapping[str, Any], where: str) -> Tool:
    """The function for a tool of one of `OPENAI_TYPES`."""
    actions = (
        "click",
        "double_click",
        "drag",
        "keypress",
        "move",
        "screenshot",
        "scroll",
        "type",
        "wait",
    )
    spot = {"type": "object", "properties": {"x": _INTEGER, "y": _INTEGER}}
    properties = {
        "type": {"type": "string", "enum": [*actions]},
        "x": _INTEGER,
        "y": _INTEGER,
        "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]},
        "text": {"type": "string"},
        "keys": _TEXTS,
        "path": {"type": "array", "items": spot},
        "scroll_x": _INTEGER,
        "scroll_y": _INTEGER,
    }
    kind = tool.get("environment")
    display = _display(tool, "display_width", "display_height", where)
    about = f"A computer ({kind})" if isinstance(kind, str) else "A computer"
    return _function(f"{about}{display}. One action; a screenshot answers.", properties, "type")


def anthropic_computer(tool: Mapping[str, Any], where: str) -> Tool:
    """The function for a tool of type `computer_YYYYMMDD`."""
    actions = (
        "cursor_position",
        "double_click",
        "hold_key",
        "key",
        "left_click",
        "left_click_drag",
        "left_mouse_down",
        "left_mouse_up",
        "middle_click",
        "mouse_move",
        "right_click",
        "screenshot",
        "scroll",
        "triple_click",
        "type",
        "wait",
        "zoom",
    )
    properties = {
        "action": {"type": "string", "enum": [*actions]},
        "coordinate": _POINT,
        "start_coordinate": _POINT,
        "text": {"type": "string"},
        "duration": {"type": "number"},
        "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
        "scroll_amount": _INTEGER,
        "region": {**_POINT, "minItems": 4, "maxItems": 4},
    }
    display = _display(tool, "display_width_px", "display_height_px", where)
    return _function(f"A computer{display}. One action.", properties, "action")


def _function(about: str, properties: Mapping[str, Any], required: str) -> Tool:
    schema = {"type": "object", "properties": {**properties}, "required": [required]}
    function = {"name": COMPUTER, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


def _display(tool: Mapping[str, Any], width: str, height: str, where: str) -> str:
    if tool.get(width) is None and tool.get(height) is None:
        return ""
    sizes = [need(tool, name, int, where, "send pixels") for name in (width, height)]
    return f" with a display of {sizes[0]} x {sizes[1]} pixels, (0, 0) at the top left"


def computer_arguments(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments of the call that a `computer_call` item is. Clients add null fields."""
    if (actions := item.get("actions")) is not None:
        if not isinstance(actions, list) or not all(isinstance(each, dict) for each in actions):
            raise wrong(f"{where}.actions", actions, "send a list of actions")
        if len(actions) != 1:
            return {"actions": [*map(_without_nulls, actions)]}
        return _without_nulls(actions[0])
    return _without_nulls(need(item, "action", dict, where, "send the action"))


def computer_fields(arguments: str, *, is_preview: bool) -> dict[str, Any]:
    """Fields of the `computer_call` item that a call with these arguments is."""
    action = orjson.loads(arguments)  # integers beyond 64 bits as floats, as answers can hold them
    fields: dict[str, Any] = {"action": action} if is_preview else {"actions": [action]}
    if isinstance(action, dict) and action.keys() == {"actions"}:
        fields = action
    return {**fields, "pending_safety_checks": []}


def _without_nulls(action: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in action.items() if value is not None}

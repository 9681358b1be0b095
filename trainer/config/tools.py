"""A file of tools, in verl's form. Loads no tool.

::

    tools:
      - class_name: examples.tools.search:Search      # a Tool, or a plain function
        config: { corpus: examples/tools/corpus.jsonl }
        timeout_s: 10
      - class_name: my.package.weather                # a function: the schema is its signature
      - class_name: my.package.Gsm8kTool              # a class of the shape of verl's BaseTool
        config: { type: native }
        tool_schema: { type: function, function: { name: …, description: …, parameters: … } }
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from stepwell.datapool.config import Section


class ToolConfig(Section):
    """One tool."""

    class_name: str = Field(min_length=1)
    """Dotted path (`package.module.Name` or `package.module:Name`) of a `Tool`, of a class of the
    shape of verl's `BaseTool`, or of a function."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The tool's own settings."""
    tool_schema: dict[str, Any] | None = None
    """OpenAI function schema; null derives it from the signature."""
    timeout_s: float | None = Field(default=None, gt=0)
    """One call may take this long; null: the tool box's `timeout_s`."""


class ToolBoxConfig(Section):
    """The tools of an agent and the limits of their calls."""

    tools: tuple[ToolConfig, ...] = ()
    max_turns: int = Field(default=8, ge=1)
    """Replies of the policy in a rollout of `ToolAgent`."""
    timeout_s: float = Field(default=30.0, gt=0)
    """One call may take this long; then the model is told so."""
    max_parallel_calls: int = Field(default=8, ge=1)
    """Calls of one reply that are run, all at once; the model is told of those that are not."""
    max_response_chars: int = Field(default=8192, ge=16)
    """A longer result is cut in the middle before the model sees it."""

"""Tools for white-box agents: schemas, a life cycle, parallel calls with limits, a ready loop.

`ToolBox` holds an agent's tools, `ToolBox.session` their instances in one rollout, `ToolAgent` is
the loop around them. Tools written for verl run as they are (`verl.py`). Black-box agents bring
their own tools and need none of this. Examples that run: `examples/tools/`.

Does not own: the parsing of tool calls out of the policy's text (the gateway).
"""

from stepwell.trainer.config import ToolBoxConfig, ToolConfig
from stepwell.trainer.errors import ToolConfigError, ToolError, ToolUnavailableError
from stepwell.trainer.tools.agent import ToolAgent, ToolRun
from stepwell.trainer.tools.base import FunctionTool, Tool
from stepwell.trainer.tools.session import CallResult, ToolBox, ToolSession

__all__ = [
    "CallResult",
    "FunctionTool",
    "Tool",
    "ToolAgent",
    "ToolBox",
    "ToolBoxConfig",
    "ToolConfig",
    "ToolConfigError",
    "ToolError",
    "ToolRun",
    "ToolSession",
    "ToolUnavailableError",
]

"""What can go wrong with a tool, and who hears of it.

::

    stepwell.trainer.errors.TrainerError
    ├── ToolConfigError(ValueError)         a tool that cannot be made; the run does not start
    ├── ToolError(ValueError)               said to the model, in the tool message, as it stands
    └── ToolUnavailableError(RuntimeError)  ends the rollout: aborted with this reason, not scored

Whatever else a tool raises is said to the model too, with its type. A tool raises
`ToolUnavailableError` where going on would train the model on a failure of the machinery.
"""

from __future__ import annotations

from stepwell.trainer.errors import TrainerError


class ToolConfigError(TrainerError, ValueError):
    """A tool cannot be found or made."""


class ToolError(TrainerError, ValueError):
    """The call was wrong or came to nothing; the message is for the model to read."""


class ToolUnavailableError(TrainerError, RuntimeError):
    """The tool does not work at all: the rollout is void, through no fault of the policy."""

"""The section `rollout.environment`: an environment that answers the policy's replies.

Loads no environment.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from stepwell.datapool.config import Section

ENVIRONMENT: Final = "environment"
"""`rollout.agent` of a run whose agent is `rollout.environment`."""


class OpenEnvConfig(Section):
    """An OpenEnv server (`openenv` 0.10), whose `reset` and `step` a rollout calls; an address
    alone is its `url`."""

    named_by = "url"

    url: str = Field(pattern="^(https?|wss?)://.")
    """Address of the server, e.g. http://localhost:8000."""
    action_key: str | None = None
    """Field of the environment's action that is the policy's reply; null: the reply is the action,
    a JSON object."""
    observation_key: str | None = None
    """Field of an observation that the policy reads; null: all of it, as JSON."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `reset`; those of the task's `metadata.reset` go over them."""
    system: str | None = None
    """System message; null: none."""
    max_turns: int = Field(default=16, ge=1)
    """Replies of the policy in a rollout, at most."""
    message_timeout_s: float = Field(default=60.0, gt=0)
    """The server answers within this."""

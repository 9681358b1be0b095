"""The gateway's configuration section.

Owns: names, bounds and meaning of every gateway option. Does not own: reading YAML
(`trainer/config.py`). Imports neither torch nor transformers.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Thinking = Literal["preserve", "template"]
ToolParser = Literal["auto", "hermes", "none"]
ReasoningParser = Literal["auto", "think", "none"]


class SamplingOverrides(BaseModel):
    """Sampling parameters forced on every call; null leaves the agent its choice."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """-1 is no limit."""


class NormalizeRule(BaseModel):
    """In messages of `role`, what matches the regular expression `pattern` is replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "tool"] = "system"
    pattern: str
    replacement: str = ""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ValueError(f"pattern is {pattern!r}, no regular expression ({e})") from e
        return pattern


class GatewayConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    """Address to listen on. There are no keys yet, so only loopback addresses are accepted."""
    port: int = Field(default=8100, ge=0, le=65535)
    """0 takes a free port."""
    public_url: str | None = None
    """Origin handed out in `base_url`; null: http://host:port as bound."""
    tokenizer_path: str | None = None
    """Folder with the tokenizer and chat template of the served model."""
    engine_urls: tuple[str, ...] = ()
    """SGLang servers (or embedded engines); a trajectory stays on one. Filled in by the trainer."""
    served_model_name: str = Field(default="stepwell", min_length=1)
    """The name `/v1/models` lists and replies carry; requests may name any model."""
    channel: str = Field(default="train", min_length=1)
    """Channel of trajectories that were not registered for another."""

    context_length: int | None = Field(default=None, ge=2)
    """Prompt plus response tokens that fit; null: asked of the engine (`max_model_len`)."""
    default_max_tokens: int | None = Field(default=None, ge=1)
    """Response limit of a request that sets none; null: whatever fits in the context."""
    default_temperature: float = Field(default=1.0, ge=0, le=2)
    """Temperature of a request that sets none."""
    sampling_overrides: SamplingOverrides = SamplingOverrides()

    thinking: Thinking = "preserve"
    """`preserve` keeps past thinking in the prompt, token for token; `template` follows the chat
    template: where it strips past thinking, the conversation goes on as a branch."""
    tool_parser: ToolParser = "auto"
    """How tool calls are read from the response: `hermes` is <tool_call>{json}</tool_call>; `auto`
    uses the tokenizer's `response_template` if it has one, else `hermes`."""
    reasoning_parser: ReasoningParser = "auto"
    """`think` returns <think>…</think> as `reasoning_content`; `auto` does so if the chat template
    mentions <think>."""
    chat_template_args: dict[str, Any] = {}
    """Passed to the chat template on every call, under a request's `chat_template_kwargs`."""
    normalize: tuple[NormalizeRule, ...] = ()
    """Applied in order to each message before it is compared and rendered: for text that an agent
    changes on every call, such as a clock in its system prompt."""
    conversation_idle_s: float = Field(default=600.0, gt=0)
    """A trajectory that was made for a conversation without one (no URL, key or header names it)
    is completed, unscored, when it has had no call for this long."""
    sanitize_control_tokens: bool = True
    """Text of control tokens inside user and tool messages is tokenised as plain text."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """One call may take this long in the engine, resumptions included; then 504."""
    engine_connect_timeout_s: float = Field(default=10.0, gt=0)
    engine_retries: int = Field(default=4, ge=0)
    """Further tries (over all engines) of a call that failed before its first token."""
    retry_backoff_s: float = Field(default=0.2, ge=0)
    """Pause before the first such retry; doubles with each, up to 5 s."""
    pool_timeout_s: float = Field(default=60.0, gt=0)
    """The DataPool must answer within this; then 503 and nothing is acknowledged."""
    keepalive_s: float = Field(default=15.0, gt=0)
    """A stream without a token for this long carries an SSE comment, so that no proxy cuts it."""

    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Larger request bodies are refused with 413."""
    offload_chars: int = Field(default=8192, ge=0)
    """Prompts with more new text than this are rendered and tokenised in a thread."""
    render_threads: int = Field(default=2, ge=1, le=64)
    prompt_cache_tokens: int = Field(default=4_000_000, ge=0)
    """Tokens of whole prompts kept, so that the rollouts of one prompt tokenise it once."""
    remembered_calls: int = Field(default=64, ge=1)
    """Finished calls kept per trajectory to answer a client's retries."""
    remembered_trajectories: int = Field(default=100_000, ge=1)
    """Ids of closed trajectories kept in order to answer 410."""

    reward_fn: str | None = None
    """Dotted path of the function behind `/compute_reward`, called with the body's fields."""
    log_level: Literal["critical", "error", "warning", "info", "debug"] = "warning"

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError as e:
            raise ValueError(f"host is {host!r}; give an IP address or localhost") from e
        if not loopback:
            raise ValueError(
                f"host is {host!r}, but the gateway has no keys yet; listen on 127.0.0.1 and put "
                "a proxy or an ssh tunnel in front"
            )
        return host

    @field_validator("engine_urls")
    @classmethod
    def _plain_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"engine_urls holds {url!r}; write http://host:port")
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="after")
    def _limits_agree(self) -> GatewayConfig:
        if (
            self.context_length is not None
            and self.default_max_tokens is not None
            and self.default_max_tokens >= self.context_length
        ):
            raise ValueError(
                f"default_max_tokens is {self.default_max_tokens} but context_length is "
                f"{self.context_length}; leave room for a prompt"
            )
        return self

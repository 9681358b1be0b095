"""The gateway's configuration section, and what it is told at its start beside it (`Wiring`): the
engines, its number among replicas, so that no option holds what only the start can know.

Owns: names, bounds and meaning of every gateway option. Does not own: reading YAML
(`stepwell/config/load.py`). Imports neither torch nor transformers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from stepwell.backends.config import EngineConfig
from stepwell.backends.masks import check_mask_name
from stepwell.datapool.config import Section, TextPath
from stepwell.datapool.dotted import resolve
from stepwell.gateway.errors import GatewayConfigError

Thinking = Literal["preserve", "template"]
CallStyle: TypeAlias = Literal[
    "hermes",
    "qwen3_coder",
    "glm45",
    "deepseekv3",
    "deepseekv31",
    "kimi_k2",
    "minimax-m2",
    "mistral",
    "llama3_json",
]
"""Forms in which models write calls of tools."""
ToolParser = Literal["auto", CallStyle, "none"]
ReasoningParser = Literal["auto", "think", "none"]


class NormalizeRule(Section):
    """In messages of `role`, what matches the regular expression `pattern` is replaced."""

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


MIN_KEY_LENGTH = 16
REMEMBERED = 100_000
"""Ids of closed trajectories kept in order to answer 410."""
MOST_OF_A_GROUP = 1024
LAST_START = "rollout_buffer.json"
"""File of a run's folder: the last `/start_rollout`, for a gateway that is started again."""


def _strong(key: SecretStr) -> SecretStr:
    """Refuse a key that can be guessed, cannot be sent or looks like a trajectory's; the error does
    not show it."""
    text = key.get_secret_value()
    if len(text) < MIN_KEY_LENGTH or not re.fullmatch(r"[!-~]+", text):
        raise ValueError(
            f"the key has {len(text)} characters; use at least {MIN_KEY_LENGTH}, ASCII "
            "without spaces, e.g. from: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    if text.startswith("sw."):
        raise ValueError("the key begins with 'sw.', as keys of trajectories do")
    return key


def _address(host: str) -> str:
    try:
        is_loopback(host)
    except ValueError as e:
        raise ValueError(f"host is {host!r}; give an IP address or localhost") from e
    return host


def _host_name(host: str) -> str:
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"allowed_hosts holds {host!r}; write a name without a port")
    return host.lower().rstrip(".")


def _origin(origin: str) -> str:
    if not re.fullmatch(r"[\w+.-]+://[\w.:\[\]-]+", origin):
        raise ValueError(f"allowed_origins holds {origin!r}; write https://name:port, with no path")
    return origin.lower()


Key: TypeAlias = Annotated[SecretStr, AfterValidator(_strong)]
HostName: TypeAlias = Annotated[str, AfterValidator(_host_name)]
Origin: TypeAlias = Annotated[str, AfterValidator(_origin)]


OPERATORS: Final = "admin"
"""Stands for the admin keys where ids end in `@NAME`, so no agent key has this name."""


class AgentKey(Section):
    """A key for LLM calls, for declaring groups, and for opening, closing and scoring
    trajectories."""

    # Errors do not quote what was given, which may be a key.
    model_config = ConfigDict(hide_input_in_errors=True)

    key: Key
    """Write `"${oc.env:NAME}"`, so that the key is in the environment and in no file."""
    channel: str | None = Field(default=None, min_length=1)
    """Channel of the Steps that are called with this key; null: `gateway.channel`. A key with a
    channel owns what it opens, against other agent keys; keys without one share what they open."""


class GroupsConfig(Section):
    """Grouping of conversations whose agents name no trajectory. What an agent's service declares
    (`POST /v1/groups`, the header `x-prompt-uid`) is a group whatever `form` says."""

    form: Literal["declared", "first_prompt", "single"] = "single"
    """`single`: each conversation is a group of its own. `first_prompt`: conversations that begin
    with the same messages and tools are. `declared`: what nobody declared is answered and not
    stored."""
    n: int = Field(default=8, ge=1, le=MOST_OF_A_GROUP)
    """Conversations of one group; the next one begins another group."""
    within_s: float = Field(default=900.0, gt=0)
    """For so long from its first call on a group takes conversations; then it is served with those
    that are complete. Longer than `conversation_idle_s`, if nobody completes them."""


class PicturesConfig(Section):
    """Bounds of what calls bring in pictures, where the served model takes them."""

    max_body_bytes: int = Field(default=128 * 1024 * 1024, ge=1024)
    """Bytes of a call's body with its pictures; without them it may have 12 MB at most. 50
    screenshots of 1 MB are 67 MB."""
    max_count: int = Field(default=100, ge=1)
    """Pictures of one body, those of the whole conversation."""
    max_pixels: int = Field(default=40_000_000, ge=1, le=178_000_000)
    """Width times height of one as it is sent; a larger one is refused before it is decoded (Pillow
    opens none above 178 million). The model's own processor says what it is resized to."""


class GatewayConfig(Section):
    # Errors do not quote what was given, which may be a key.
    model_config = ConfigDict(hide_input_in_errors=True)

    host: Annotated[str, AfterValidator(_address)] = "127.0.0.1"
    """Address to listen on. One that other machines reach needs keys."""
    admin_keys: tuple[Key, ...] = ()
    """Bearer keys for everything. Write `"${oc.env:STEPWELL_ADMIN_KEY}"`, so that the key is in the
    environment and in no file. The first signs the keys of trajectories; all are valid. A run adds
    one of its own for its rollouts and commands, in its folder's `gateway_key`."""
    agent_keys: dict[str, AgentKey] = Field(default_factory=dict)
    """By a name that may be shown, as `{bot: {key: "${oc.env:BOT_KEY}", channel: bot}}`."""
    port: int = Field(default=8100, ge=0, le=65535)
    """0 takes a free port."""
    public_url: str | None = None
    """Origin handed out in `base_url`; null: http://host:port as bound. With several `replicas` it
    holds `{replica}`, which becomes the number of one."""
    tokenizer_path: TextPath | None = None
    """Folder with the tokenizer and chat template of the served model. Default `model.path`."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Gateways that share the work, each on a port of its own: `port`, `port` + 1, …"""
    served_model_name: str = Field(default="stepwell", min_length=1)
    """The name `/v1/models` lists and replies carry; requests may name any model."""
    channel: str = Field(default="train", min_length=1)
    """Channel of trajectories that were not registered for another."""
    groups: GroupsConfig = GroupsConfig()
    holdout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that go to the channel `val` instead, if nobody chose theirs."""

    context_length: int | None = Field(default=None, ge=2)
    """Prompt plus response tokens that fit; null: asked of the engine (`max_model_len`)."""

    thinking: Thinking = "preserve"
    """`preserve` keeps past thinking in the prompt, token for token; `template` follows the chat
    template: where it strips past thinking, the conversation goes on as a branch."""
    tool_parser: ToolParser = "auto"
    """Format of tool calls in the response, by SGLang's names: `hermes` is
    <tool_call>{json}</tool_call>, `qwen3_coder` <tool_call> around <function=…><parameter=…>,
    `glm45` <tool_call> around <arg_key>…<arg_value>… (GLM-4.5 to 4.7), `deepseekv3`,
    `deepseekv31`, `kimi_k2` and `minimax-m2` the sections of those models, `mistral` [TOOL_CALLS]
    before a JSON array or before NAME[ARGS]{json}, `llama3_json` a bare JSON object. `auto` is
    whichever of them reads a call as the chat template writes it, else `hermes`."""
    reasoning_parser: ReasoningParser = "auto"
    """`think` returns <think>…</think> as `reasoning_content`; `auto` does so if the chat template
    mentions <think>."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template on every call, under a request's `chat_template_kwargs`."""
    normalize: tuple[NormalizeRule, ...] = ()
    """Applied in order to each message before it is compared and rendered: for text that an agent
    changes on every call, such as a clock in its system prompt."""
    conversation_idle_s: float = Field(default=600.0, gt=0)
    """A trajectory that was made for a conversation without one (no URL, key or header names it)
    is completed, unscored, when it has had no call for this long. Any other is then asked about at
    the pool, and let go if that has closed it."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """One call may take this long in the engine, resumptions included; then 504."""
    engine_retries: int = Field(default=8, ge=0)
    """Further tries (over all engines) of a call whose engine failed, was lost or is busy, with
    pauses that double from at most 0.2 s to 5 s: 8 tries wait for an engine for 11 to 21 s."""
    on_pool_failure: Literal["refuse", "serve_unrecorded"] = "refuse"
    """`refuse`: without the pool a call answers 503. `serve_unrecorded`: it is answered, its
    trajectory is not stored any more, and recording goes on with new ones."""

    allowed_hosts: tuple[HostName, ...] = ()
    """Further names that requests may have in their Host header, beside IP addresses, localhost,
    host.docker.internal and the host of `public_url`. On loopback others are refused (DNS
    rebinding)."""
    allowed_origins: tuple[Origin, ...] = ()
    """Web pages that may send requests from a browser, as `https://name:port`; others may not."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Larger request bodies are refused with 413, and those that are text, without ids and
    log-probs, from 12 MB on."""
    pictures: PicturesConfig = PicturesConfig()
    max_concurrent_calls: int | None = Field(default=None, ge=1)
    """Calls being generated at once; more wait their turn. null: the engines queue them."""
    queue_timeout_s: float = Field(default=60.0, gt=0)
    """A call waits so long for its turn, then 429; or for room in the pool's channel, if that
    blocks, then 503. Both with Retry-After."""
    max_turns: int | None = Field(default=None, ge=1)
    """Calls of one trajectory; the next one gets a 400."""
    stored_response_chars: int = Field(default=2**28, ge=0)
    """Text of all Responses API answers kept for `previous_response_id`; the least recently used go
    first. 0 keeps none."""

    keep_messages: bool = True
    """The messages that each turn adds are kept with its Step (`metadata["messages"]`), for people
    who read trajectories and for exports of text. Training reads ids only. Calls of tools are in
    `metadata["turn"]` in any case: by that note another gateway goes on."""
    redact_messages: str | None = None
    """Dotted path of a function that is given a turn's messages, a list that it may change, and
    returns those to keep; calls of tools in `metadata["turn"]` and the ids stay. It runs on the
    event loop, so it must be quick; where it fails, none are kept."""

    reward_fn: str | None = None
    """Dotted path of the function behind `/compute_reward`, called with the body's fields. One of
    Stepwell's own, `stepwell.trainer.rewards.maths:deepscaler` for instance, is called in a process
    that is ended after 60 s; one of yours in the gateway, as it may hold a model."""
    loss_mask_type: str = "auto"
    """Tokenisation of `/buffer/write` items that hold messages alone (slime's name): `auto`,
    `prefix`, `qwen`, `llama3`, `distill_qwen`, or the path of a class or function of your own,
    `package.module:Name` or `path/to/file.py:Name` (docs/design/data.md, "Messages")."""
    rollout_generators: tuple[str, ...] = ()
    """Modules that `/start_rollout` (slime's Rollout Buffer API) may run, each by its `TASK_TYPE`:
    dotted paths, or paths of .py files, with `run_rollout(data)` (docs/design/gateway.md). Beside
    them there are `chat`, also as `math`, a client loop over a file of prompts that `reward_fn`
    scores, and `external`, which runs nothing."""
    rollout_batch_groups: int | None = Field(default=None, ge=1)
    """Groups in one answer of `/get_rollout_data`: so many or none. Set it to slime's
    `--rollout-batch-size`, whose consumer throws away what it gets beyond a batch; null: all that
    are ready."""

    @field_validator("loss_mask_type")
    @classmethod
    def _mask_is_known(cls, name: str) -> str:
        return check_mask_name(name)

    @field_validator("admin_keys", mode="before")
    @classmethod
    def _one_or_more(cls, keys: Any) -> Any:
        """One key needs no list. What is wrong is told without the key."""
        keys = (keys,) if isinstance(keys, str | SecretStr) else keys
        if not isinstance(keys, list | tuple) or not all(
            isinstance(k, str | SecretStr) for k in keys
        ):
            raise ValueError(
                'keys are a list of strings in quotes, e.g. ["${oc.env:STEPWELL_ADMIN_KEY}"]'
            )
        return keys

    @field_validator("agent_keys", mode="before")
    @classmethod
    def _have_names(cls, keys: Any) -> Any:
        """Refuse agent keys without names, or with a reserved one; the error shows no key."""
        if not isinstance(keys, Mapping):
            raise ValueError(
                'agent_keys have names, as in {bot: {key: "${oc.env:BOT_KEY}"}}; a channel may '
                "stand beside each key"
            )
        if OPERATORS in keys:
            raise ValueError(
                f"agent_keys holds the name {OPERATORS!r}, which stands for the admin keys in ids "
                f"(session-ID@{OPERATORS}); choose another name"
            )
        return keys

    @model_validator(mode="after")
    def _others_need_keys(self) -> GatewayConfig:
        if not is_loopback(self.host) and not self.admin_keys and not self.agent_keys:
            raise ValueError(
                f"host is {self.host!r}, which other machines reach, but there are no keys yet; "
                "set admin_keys, e.g. to ${oc.env:STEPWELL_ADMIN_KEY}, or listen on 127.0.0.1"
            )
        agents = (each.key for each in self.agent_keys.values())
        secrets = [k.get_secret_value() for k in (*self.admin_keys, *agents)]
        if len(set(secrets)) < len(secrets):
            raise ValueError("admin_keys and agent_keys hold a key twice; use different ones")
        return self

    @model_validator(mode="after")
    def _replicas_have_addresses(self) -> GatewayConfig:
        if self.replicas == 1:
            return self
        if self.public_url is not None and "{replica}" not in self.public_url:
            raise ValueError(
                f"public_url is {self.public_url!r} but replicas is {self.replicas}; each has an "
                "address of its own: write {replica} where its number (from 0) goes"
            )
        if self.port and self.port + self.replicas - 1 > 65535:
            raise ValueError(
                f"port is {self.port} and replicas is {self.replicas}, whose ports would end at "
                f"{self.port + self.replicas - 1}; choose a lower port, or 0 for free ones"
            )
        return self

    def function(self, key: str) -> Callable[..., Any] | None:
        """The function that `gateway.KEY` names as `package.module:name`; None: it names none.

        Raises:
            GatewayConfigError: it cannot be loaded, which is told before anything is served.
        """
        path = getattr(self, key)
        if path is None:
            return None
        try:
            found = resolve(path)
        except ImportError as e:
            raise GatewayConfigError(
                f"gateway.{key} is {path!r}, which cannot be imported ({e}); "
                "name a function as package.module:function"
            ) from e
        if not callable(found):
            raise GatewayConfigError(f"gateway.{key} is {path!r}, which cannot be called")
        function: Callable[..., Any] = found
        return function

    @property
    def channels(self) -> tuple[str, ...]:
        """Channels of agents that come by themselves, without what is held out: the gateway's own,
        and those of agent keys."""
        chosen = (key.channel for key in self.agent_keys.values())
        return tuple(dict.fromkeys((self.channel, *filter(None, chosen))))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Times and sizes that nobody needs to choose, each with the reason for its value. Tests and
    benches choose others."""

    retry_backoff_s: float = 0.2
    """Longest pause before the first retry of a call at an engine; doubles with each, up to 5 s. An
    engine that is only busy is free again within it."""
    engine_health_interval_s: float = 5.0
    """Between two checks of an engine. A broken call has its engine checked at once, so this only
    bounds how long new weights of an idle engine go unnoticed."""
    engine_health_timeout_s: float = 5.0
    """For a check. An engine whose loop prefills a long prompt answers late, and is well."""
    engine_circuit_failures: int = 3
    """Bad answers in a row (5xx, 429, nonsense) after which an engine gets no calls. One may be the
    call's own fault."""
    engine_circuit_open_s: float = 1.0
    """Minimum seconds the circuit stays open; then a successful check closes it."""
    engine_version_grace_s: float = 10.0
    """Seconds that calls wait for newer weights when all engines that answer came back with older
    ones than were seen before: a publication to a restarted engine takes seconds. Then the newest
    there are serve them."""
    pool_timeout_s: float = 60.0
    """For an answer of the pool; then 503 and nothing is acknowledged. A pool that is started again
    replays its journal within it."""
    pool_patience_s: float = 2.0
    """For the pool, or for room in it, in an LLM call with `on_pool_failure: serve_unrecorded`: an
    agent with users notices more."""
    keepalive_s: float = 15.0
    """Without a token; then a stream carries an SSE comment. Proxies cut silent ones after 30 s or
    more."""
    max_header_bytes: int = 64 * 1024
    """Larger request headers are refused with 431. The longest that agents send have 8 KB."""
    header_timeout_s: float = 10.0
    """For a request's headers; then 408."""
    max_unauthenticated_connections: int = 1024
    """Connections of one address on which no request was authorised yet; of more, the oldest are
    closed. A fleet of agents behind one address opens as many at once. Without keys there is no
    bound."""
    body_timeout_s: float = 60.0
    """For a request's body; then 408. The largest takes 5 s at 50 Mbit/s."""
    offload_chars: int = 8192
    """Prompts with more new text than this are rendered and tokenised in a thread: a millisecond of
    work is worth two switches."""
    max_message_bytes: int = 256 * 1024
    """JSON of one turn's messages; a Step whose turn has more keeps none."""
    log_level: str = "warning"
    """Lowest level that the HTTP server (uvicorn) logs: below it there is nothing of use."""


TUNING: Final = Tuning()


def is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


@dataclass(frozen=True, slots=True)
class ChannelSampling:
    """Sampling parameters of all calls of a channel. None: as the agent asks."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 is no limit."""
    max_tokens: int | None = None
    """Longest response of one call; one that asks for less gets less."""
    stop: tuple[str, ...] | None = None
    """Texts that end a response, beside those that the agent asks for; cut off alike."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that do."""
    max_response_tokens: int | None = None
    """Tokens of a conversation behind its first prompt."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Engines of a gateway, how it samples with them, and its place among several gateways."""

    engine_urls: tuple[str, ...] = ()
    """Addresses of the engines; a trajectory stays on one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Kind of all of them, and the options of that kind: how they are asked."""
    lora_path: str | None = None
    """Name of the LoRA adapter that generates; None: the engines' model itself."""
    sampling: Mapping[str, ChannelSampling] = field(default_factory=dict)
    """Sampling by channel; in a channel that is not named, agents choose."""
    canary_share: float = 0.0
    """Share of new trajectories that go to an engine whose version is not committed, while there is
    one."""
    replica: int = 0
    """Index of this gateway among those that share the work."""
    replica_urls: tuple[str, ...] = ()
    """Origins of all of them."""
    run_dir: Path | None = None
    """Folder of the run, whose files the dashboard shows; None: there is none."""
    archive_dir: Path | None = None
    """Folder of what left the pool; None: there is none."""
    tuning: Tuning = TUNING
    read_only: bool = False
    """The run is over: the pool is only read."""

    def __post_init__(self) -> None:
        urls = tuple(dict.fromkeys(url.rstrip("/") for url in self.engine_urls))
        object.__setattr__(self, "engine_urls", urls)

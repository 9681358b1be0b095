"""This module makes the exact prompt of a call, so that it extends what was sampled before it.

    ChatRequest ──attach──► the turn that it extends ──render what is new──► Prompt
                    └── none ──► rendered whole, once for all rollouts of one prompt

Long texts are rendered and tokenised in a thread. Owns: what is asked for in no dialect, and its
ids. Does not own: the turns (`tokens/graph.py`), templates (`tokens/render.py`), how it is sampled
(`call.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from stepwell.datapool.types import TokenIds
from stepwell.gateway.config import GatewayConfig
from stepwell.gateway.errors import RequestError
from stepwell.gateway.reply.parser import THINK_CLOSE, THINK_OPEN
from stepwell.gateway.tokens.graph import Attachment, BranchCause, Turn, TurnGraph, join
from stepwell.gateway.tokens.messages import Key, Message, Normalizer, Tool, exact_key, root_key
from stepwell.gateway.tokens.render import ChatRenderer, CutError


@dataclass(slots=True)  # not frozen: that doubles the time to make one, and every call does
class ChatRequest:
    """A call in no dialect. Sampling parameters are as asked; None takes the gateway's default."""

    messages: list[Message]
    tools: list[Tool] | None = None
    template_args: Mapping[str, Any] | None = None
    prompt_ids: TokenIds | None = None
    """White-box: the exact prompt; messages are then empty."""
    prompt_text: str | None = None
    """Completions: the prompt without a chat template; messages are then empty."""
    is_completion: bool = False
    """The reply is plain text: nothing in it is a tool call or a thought."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float | None = None
    n_logprobs: int | None = None
    """Log-probs for the answer, each with this many alternatives (0: none); None: not asked for.
    Steps have their log-probs anyway."""
    constraint: tuple[str, str] | None = None
    """(kind, text) of what the engine is to constrain sampling to, e.g. ("json_schema", …)."""
    forced_tool: str | None = None
    """The reply has to call a tool: this one, or any for ""."""
    prefill: str = ""
    """The reply goes on from this text, which the agent wrote itself; no `forced_tool` then."""
    parallel_tool_calls: bool = True
    """False: generation ends with the first tool call."""
    stream: bool = False
    parse_tools: bool = True
    stores_step: bool = True
    """False: white-box, the agent submits its own Steps."""
    is_kept: bool = True
    """False: nothing of it outlives its answer in any memory here."""
    began_at: float = field(default_factory=time.perf_counter)
    """When the request had been read."""
    constraint_field: str = "response_format"
    """The request's own field that `constraint` came from, for the engine's refusal."""

    @property
    def plain(self) -> str | bytes | None:
        """The prompt that the turn graph matches as it stands: a text, or ids as bytes."""
        if self.prompt_ids is not None and self.stores_step:
            return self.prompt_ids.tobytes()
        return self.prompt_text


@dataclass(slots=True)
class Prompt:
    ids: TokenIds
    new_ids: TokenIds
    """What `ids` adds to the parent's tokens; all of `ids` without a parent."""
    parent: Turn | None
    attachment: Attachment | None
    """None: the prompt came as ids and is no part of the graph."""
    root: Key
    cause: BranchCause | None
    forced: str = ""
    """The beginning of the reply, which the prompt ends with."""
    n_forced: int = 0
    """Its ids."""


class Prompts:
    """Makes prompts. Owned by the app's lifespan."""

    def __init__(
        self, config: GatewayConfig, renderer: ChatRenderer, threads: ThreadPoolExecutor
    ) -> None:
        self.renderer = renderer
        self._config = config
        self._threads = threads
        self._rendering: dict[Key, asyncio.Future[TokenIds]] = {}
        """Whole prompts under way, by their `exact_key`."""
        self._normalize = Normalizer(config.normalize)
        self._template = renderer.tokenizer.template_text

    def normalised(self, request: ChatRequest) -> ChatRequest:
        """`request` with `gateway.normalize` applied to its messages, and without arguments that
        the chat template never reads: they would only tell equal conversations apart."""
        if request.template_args:
            read = {k: v for k, v in request.template_args.items() if k in self._template}
            request = replace(request, template_args=read)
        if not self._normalize.rules:
            return request
        return replace(request, messages=self._normalize(request.messages))

    async def prepare(
        self,
        graph: TurnGraph,
        request: ChatRequest,
        context: int | None = None,
        catch_up: Callable[[], Awaitable[bool]] | None = None,
    ) -> Prompt:
        """The exact prompt of a request and the turn it extends.

        Args:
            context: texts that certainly have more tokens are refused before they are made.
            catch_up: brings turns that other gateways stored into `graph`; whether there are any.
                Called if the request holds a reply that `graph` does not.
        """
        template_args = self._template_args(request)
        root = root_key(request.tools, template_args)
        if (plain := request.plain) is not None:
            return await self._prepare_plain(graph, plain, root, context)
        if request.prompt_ids is not None:
            return Prompt(request.prompt_ids, request.prompt_ids, None, None, root, None)
        messages = request.messages
        attachment = graph.attach(root, messages)
        unknown = (m["role"] == "assistant" for m in messages[attachment.n_known :])
        if catch_up is not None and any(unknown) and await catch_up():
            attachment = graph.attach(root, messages)
        parent, cause = attachment.turn, attachment.cause
        new_ids: TokenIds | None = None
        if parent is not None:
            known, new = messages[: attachment.n_known], messages[attachment.n_known :]
            try:
                suffix = partial(self.renderer.suffix, context=context)
                new_ids = await self._offload(
                    new, suffix, parent, known, new, request.tools, template_args
                )
            except CutError as e:
                parent, cause = None, e.cause
        if new_ids is None:
            new_ids = await self._whole(request, template_args, context)
        n_forced = 0
        if forced := self.forced_text(request, new_ids):
            forced_ids = self.renderer.tokenizer.encode(forced)
            new_ids, n_forced = join([new_ids, forced_ids]), len(forced_ids)
        ids = new_ids if parent is None else join([*parent.arrays(), new_ids])
        return Prompt(ids, new_ids, parent, attachment, root, cause, forced, n_forced)

    def forced_text(self, request: ChatRequest, prompt_ids: TokenIds) -> str:
        """The beginning of the reply that the request prescribes, behind this prompt."""
        if request.forced_tool is not None:
            return self.renderer.call_opening(request.forced_tool or None, prompt_ids) or ""
        if not request.prefill:
            return ""
        tail = self.renderer.tokenizer.decode(prompt_ids[-8:].tolist())
        opens_thought = tail.rstrip().endswith(THINK_OPEN)
        return f"{THINK_CLOSE}\n\n{request.prefill}" if opens_thought else request.prefill

    async def _prepare_plain(
        self, graph: TurnGraph, plain: str | bytes, root: Key, context: int | None
    ) -> Prompt:
        attachment = graph.attach_text(plain)
        parent, cause = attachment.turn, attachment.cause
        rest = plain[attachment.n_known :]
        if parent is not None and not rest:
            # A reply that was cut off goes on. A child is longer than its parent, so the new turn
            # is its sibling, of the very same tokens.
            new_ids = join([parent.new_prompt_ids, parent.response_ids])
            parent = parent.parent
            cause = "continued" if parent is None else None
        elif isinstance(rest, bytes):
            new_ids = np.frombuffer(rest, np.int32)
        else:
            new_ids = await self._offload_text(rest, context)
            if parent is None:
                new_ids = join([self.renderer.tokenizer.begin(rest), new_ids])
        ids = new_ids if parent is None else join([*parent.arrays(), new_ids])
        if len(ids) == 0:
            raise RequestError("prompt is empty; send some text", "prompt")
        return Prompt(ids, new_ids, parent, attachment, root, cause)

    async def _offload_text(self, text: str, context: int | None) -> TokenIds:
        encode = self.renderer.tokenizer.encode
        if len(text) <= self._config.offload_chars:
            return encode(text, context)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, encode, text, context)

    async def count_tokens(self, graph: TurnGraph | None, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would have in a trajectory; nothing is stored."""
        return len((await self.prepare(graph or TurnGraph(), self.normalised(request))).ids)

    def _template_args(self, request: ChatRequest) -> dict[str, Any]:
        return {**self._config.chat_template_args, **(request.template_args or {})}

    async def _whole(
        self,
        request: ChatRequest,
        template_args: Mapping[str, Any],
        context: int | None,
    ) -> TokenIds:
        """Ids of a whole prompt."""
        messages, tools = request.messages, request.tools
        whole = self.renderer.whole
        if not request.is_kept:
            return await self._offload(messages, whole, messages, tools, template_args, context)
        key = exact_key(messages, tools, template_args)
        if (ids := self.renderer.cached(key)) is not None:
            return ids
        under_way = self._rendering.get(key)
        if under_way is None:  # rollouts of one prompt begin together: the first one renders
            work = self._offload(messages, whole, messages, tools, template_args, context)
            under_way = self._rendering[key] = asyncio.ensure_future(work)
            under_way.add_done_callback(lambda done: self._rendered(key, done))
        # It is not the first one's own: that one may leave while others wait.
        return await asyncio.shield(under_way)

    def _rendered(self, key: Key, done: asyncio.Future[TokenIds]) -> None:
        del self._rendering[key]
        if not done.cancelled() and done.exception() is None:
            self.renderer.remember(key, done.result())

    async def _offload(self, messages: Sequence[Message], work: Any, *args: Any) -> TokenIds:
        """Render and tokenise, in a thread if it is long enough to hold the event loop up."""
        n_chars = sum(len(m.get("content") or "") for m in messages)
        if n_chars <= self._config.offload_chars:
            ids: TokenIds = work(*args)
            return ids
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

"""This module makes the exact prompt of a call, so that it extends what was sampled before it.

    ChatRequest ──attach──► the turn that it extends ──render what is new──► its ids
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
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from cachetools import LRUCache

from stepwell.backends.engines.api import Sampling
from stepwell.backends.pictures import PictureProcessor
from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import TokenIds
from stepwell.gateway.config import TUNING, GatewayConfig, Tuning
from stepwell.gateway.errors import ContextLengthError, RequestError
from stepwell.gateway.pictures import RequestPictures
from stepwell.gateway.reply.parser import THINK_CLOSE, THINK_OPEN
from stepwell.gateway.tokens.graph import BranchCause, Turn, TurnGraph, join
from stepwell.gateway.tokens.messages import (
    Key,
    Keys,
    Message,
    Normalizer,
    Tool,
    Tools,
    dumps,
    exact_key,
    holds_much,
    n_chars_of,
    pictures_in,
    root_key,
    system_of,
)
from stepwell.gateway.tokens.render import ChatRenderer, CutError

T = TypeVar("T")

SHORT_TOKENS = 4096
"""Tokens of a conversation whose messages are kept, to be compared with the next request's. Of
longer ones the body's bytes are known (`known_bodies.py`)."""
WHOLE_TOKENS = 2048
"""Tokens of a prompt that is made, and written as JSON, as one array. What a longer one begins with
is known in both forms from the call before."""
CACHED_TOKENS = 4_000_000
"""Tokens of whole prompts that are kept, so that the rollouts of one prompt tokenise it once."""


_NOT_YET: Any = msgspec.UNSET
"""A field that `Prompts.prepare` sets."""


class ChatRequest(msgspec.Struct, eq=False):
    """A call in no dialect, from its body to its exact prompt. Sampling parameters are as asked;
    None takes the gateway's default. `Prompts.prepare` sets the fields of the prompt, from `ids`
    on; a copy (`changed`) has none of them yet."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None = None
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
    stop_token_ids: tuple[int, ...] = ()
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
    first_call: int | None = None
    """Number of the reply's first tool call, where calls are numbered; None: ids are random."""
    stream: bool = False
    parse_tools: bool = True
    stores_step: bool = True
    """False: white-box, the agent submits its own Steps."""
    is_big: bool = False
    """Others go on between what the event loop does for it."""
    is_kept: bool = True
    """False: nothing of it outlives its answer in any memory here."""
    began_at: float = msgspec.field(default_factory=time.perf_counter)
    """Time (`time.perf_counter()`) when the request had been read."""
    constraint_field: str = "response_format"
    """The request's own field that `constraint` came from, for the engine's refusal."""
    sources: RequestPictures | None = None
    """Pictures that its body brings."""
    ids: TokenIds = msgspec.field(default=_NOT_YET)
    """The exact prompt."""
    new_ids: TokenIds = msgspec.field(default=_NOT_YET)
    """The ids behind the parent's tokens; all of `ids` without a parent."""
    pieces: Sequence[TokenIds] = msgspec.field(default=_NOT_YET)
    """Arrays that `ids` is made of: those of the turns before, and what is new. Empty if it is
    short."""
    parent: Turn | None = msgspec.field(default=_NOT_YET)
    """The turn that the prompt extends."""
    n_known: int = msgspec.field(default=_NOT_YET)
    """Messages (or characters, or bytes) that the deepest turn covers which the request goes on
    from; the rest are new. That turn is the parent, if the template can extend it."""
    cause: BranchCause | None = msgspec.field(default=_NOT_YET)
    """Why nothing was extended; None for the first call and for extensions."""
    forced: str = msgspec.field(default=_NOT_YET)
    """The beginning of the reply, which the prompt ends with."""
    n_forced: int = msgspec.field(default=_NOT_YET)
    """Its ids."""
    sampling: Sampling = msgspec.field(default=_NOT_YET)
    """Parameters as they are used; set by `Calls.start`."""
    pictures: tuple[Picture, ...] = ()
    """All pictures of the prompt, in order."""
    new_pictures: tuple[Picture, ...] = ()
    """Pictures in `new_ids`."""
    _keys: Keys | None = None

    def changed(self, **fields: Any) -> ChatRequest:
        """A copy with other fields, whose prompt is not made yet."""
        given = {name: getattr(self, name) for name in _ASKED}
        return ChatRequest(**given | fields)

    @property
    def plain(self) -> str | bytes | None:
        """The prompt that is no messages: a text, or ids as bytes."""
        return self.prompt_text if self.prompt_ids is None else self.prompt_ids.tobytes()

    @property
    def keys(self) -> Keys:
        """Keys of its messages, under the root of all else that shapes the prompt. Made when they
        are asked for; of a copy with other messages or tools anew."""
        return self._keys or self.keys_from(None)

    def keys_from(self, before: Keys | None) -> Keys:
        """`keys`, which go on from those `before` if its conversation does."""
        if self._keys is None:
            root = root_key(self.tools, self.template_args or {})
            self._keys = Keys(root, self.messages, before)
        return self._keys

    @property
    def n_first(self) -> int:
        """Tokens of the conversation's first prompt."""
        first, turn = self.new_ids, self.parent
        while turn is not None:
            first, turn = turn.new_prompt_ids, turn.parent
        return len(first)


_FIELDS = [field.name for field in msgspec.structs.fields(ChatRequest)]
_ASKED = _FIELDS[: _FIELDS.index("ids")]
"""Fields of a request that are not made of the others: they come first."""


class Prompts:
    """Makes prompts. Owned by the app's lifespan."""

    def __init__(
        self,
        config: GatewayConfig,
        renderer: ChatRenderer,
        threads: ThreadPoolExecutor,
        tuning: Tuning = TUNING,
        vision: PictureProcessor | None = None,
    ) -> None:
        """`vision`: None: the model takes no pictures."""
        self.renderer = renderer
        self.vision = vision
        self.cached: LRUCache[Key, TokenIds] = LRUCache(CACHED_TOKENS, len)
        """Whole prompts by their `exact_key`: somebody's text."""
        self._config = config
        self._offload_chars = tuning.offload_chars
        self._threads = threads
        self._rendering: dict[Key, asyncio.Future[TokenIds]] = {}
        """Prompts that are being rendered."""
        self._normalize = Normalizer(config.normalize)
        self._template = renderer.tokenizer.template_text

    def forget(self) -> None:
        """Let go of all text, and keep none of what is being rendered."""
        self.cached.clear()
        self._rendering.clear()

    def normalised(self, request: ChatRequest) -> ChatRequest:
        """`request` with `gateway.normalize` applied to its messages and over the gateway's
        template arguments. Those of its own that the chat template never reads are left out: they
        would only tell equal conversations apart."""
        given, own = self._config.chat_template_args, request.template_args
        if given or own:
            read = {k: v for k, v in (own or {}).items() if k in self._template}
            request = request.changed(template_args={**given, **read})
        if self._normalize.rules:
            request = request.changed(messages=self._normalize(request.messages))
        return request

    def refuse_too_long(self, request: ChatRequest, context: int) -> None:
        """Refuse what users, systems and tools say, and arguments that stay text, if by their
        length alone they have more tokens than fit, before anything of it is hashed, rendered or
        tokenised.

        Raises:
            ContextLengthError
        """
        said = (m.get("content") for m in request.messages if m["role"] != "assistant")
        calls = (c for m in request.messages for c in m.get("tool_calls") or ())
        arguments = (c["function"]["arguments"] for c in calls)
        as_text = (a for a in arguments if isinstance(a, str) and holds_much(a))
        n_chars = sum(map(n_chars_of, (*said, *as_text, request.prompt_text)))
        n = self.renderer.tokenizer.fewest_of(n_chars)
        if n >= context:
            raise ContextLengthError.of(n, context, at_least=True)

    def refuse_other_ids(self, ids: TokenIds, where: str) -> None:
        """Refuse ids in what a white-box agent sends that the model has not, or has for pictures,
        of which there are none.

        Raises:
            RequestError
        """
        self._refuse_unknown_ids(ids, where)
        if self.vision is None:
            return
        found = ids[np.isin(ids, self.vision.forbidden_ids)]
        if len(found):
            raise _no_picture(where, found)

    async def prepare(
        self, graph: TurnGraph, request: ChatRequest, context: int | None = None
    ) -> None:
        """Find the turn that a normalised request extends, and make its exact prompt.

        Args:
            context: prompts that leave no room for one token are refused; texts that certainly have
                more tokens before they are made.

        Raises:
            RequestError: the chat template refuses the conversation, there is no text, or an id is
                none of the model's.
            ContextLengthError
        """
        if request.is_big:
            await asyncio.sleep(0)
        keys, plain = request.keys_from(graph.keys), request.plain
        attached, n_known, cause = graph.attach(keys.root, keys if plain is None else plain)
        if request.is_big:
            await asyncio.sleep(0)
        parent, forced, n_forced = attached, "", 0
        if plain is not None:
            parent, new_ids = await self._plain(plain[n_known:], attached, context)
            if attached is not None and parent is None:
                cause = "continued"
        else:
            extending: TokenIds | None = None
            if attached is not None:
                try:
                    suffix = self._suffix(attached, request, keys, n_known, context)
                    extending = suffix if isinstance(suffix, np.ndarray) else await suffix
                except CutError as e:
                    parent, cause = None, e.cause
            new_ids = await self._whole(request, context) if extending is None else extending
            if request.prefill or request.forced_tool is not None:
                forced = self.forced_text(request, new_ids)
                forced_ids = self.renderer.tokenizer.encode(forced)
                new_ids, n_forced = join([new_ids, forced_ids]), len(forced_ids)
        request.parent, request.n_known, request.cause = parent, n_known, cause
        request.forced, request.n_forced = forced, n_forced
        request.new_ids = new_ids
        if self.vision is not None:
            _place_pictures(request, self.vision)
        n_before = 0 if parent is None else parent.n_tokens
        if n_before + len(new_ids) > WHOLE_TOKENS:
            request.pieces = [new_ids] if parent is None else [*parent.arrays(), new_ids]
            ids = new_ids if parent is None else join(request.pieces)
        else:
            request.pieces = ()
            ids = new_ids if parent is None else graph.ids_behind(parent, new_ids)
        request.ids = ids
        if request.is_kept:  # of calls of tools the garbage collector would walk through each part
            is_short = len(ids) <= SHORT_TOKENS and not (request.tools or keys.has_calls)
            graph.keys = keys if is_short and type(request.messages) is list else None
        # Engines refuse a request whose prompt and response reach the context length.
        if context is not None and context - len(ids) - 1 < 1:
            raise ContextLengthError.of(len(ids), context)

    def _suffix(
        self, turn: Turn, request: ChatRequest, keys: Keys, n_known: int, context: int | None
    ) -> TokenIds | Awaitable[TokenIds]:
        """Ids that extend `turn` by the messages behind the first `n_known`; long ones are waited
        for.

        Raises:
            CutError: the template gives no safe place to cut.
        """
        messages, tools, args = request.messages, request.tools, request.template_args or {}
        system, new = system_of(messages), messages[n_known:]
        key = keys.after(len(system))
        if (n_chars := _length(new, tools, args)) <= self._offload_chars:
            return self.renderer.suffix(turn, system, new, tools, args, context, key)
        given = turn, system, new, tools, args, context, key
        return self._offload(n_chars, partial(self.renderer.suffix, *given))

    def forced_text(self, request: ChatRequest, prompt_ids: TokenIds) -> str:
        """The beginning of the reply that the request prescribes, behind this prompt."""
        if request.forced_tool is not None:
            name, tools = request.forced_tool or None, request.tools
            return self.renderer.call_opening(name, tools, prompt_ids) or ""
        if not request.prefill:
            return ""
        tail = self.renderer.tokenizer.decode(prompt_ids[-8:].tolist())
        opens_thought = tail.rstrip().endswith(THINK_OPEN)
        return f"{THINK_CLOSE}\n\n{request.prefill}" if opens_thought else request.prefill

    async def _plain(
        self, rest: str | bytes, attached: Turn | None, context: int | None
    ) -> tuple[Turn | None, TokenIds]:
        """The turn that a prompt which is no messages extends, and the ids behind it.

        Args:
            rest: what follows the conversation of `attached`.

        Raises:
            RequestError, ContextLengthError: as `prepare`.
        """
        if attached is not None and not rest:
            # A reply that was cut off goes on. A child is longer than its parent, so the new turn
            # is its sibling, of the very same tokens.
            return attached.parent, join([attached.new_prompt_ids, attached.response_ids])
        if isinstance(rest, bytes):
            new_ids = np.frombuffer(rest, np.int32)
            self._refuse_unknown_ids(new_ids, "prompt")
        else:
            tokenizer = self.renderer.tokenizer
            new_ids = await self._offload(len(rest), lambda: tokenizer.encode(rest, context))
            if attached is None:
                new_ids = join([tokenizer.begin(rest), new_ids])
        if attached is None and len(new_ids) == 0:
            raise RequestError("prompt is empty; send some text", "prompt")
        return attached, new_ids

    def _refuse_unknown_ids(self, ids: TokenIds, where: str) -> None:
        vocabulary = self.renderer.tokenizer.vocabulary
        if len(ids) and (most := int(ids.max())) >= vocabulary:
            # An engine may take it; the trainer's embedding has no such row.
            raise RequestError(
                f"{where} holds the token id {most}; the model's lie in [0, {vocabulary})", where
            )

    async def _whole(self, request: ChatRequest, context: int | None) -> TokenIds:
        """Ids of a whole prompt."""
        messages = request.messages
        given = [*messages], request.tools, request.template_args or {}
        n_chars = _length(*given)
        if not request.is_kept:
            return await self._offload(n_chars, lambda: self.renderer.whole(*given, context))
        key = exact_key(*given)
        if (ids := self.cached.get(key)) is not None:
            return ids
        under_way = self._rendering.get(key)
        if under_way is None:  # rollouts of one prompt begin together: the first one renders
            work = self._offload(n_chars, lambda: self.renderer.whole(*given, context))
            under_way = self._rendering[key] = asyncio.ensure_future(work)
            under_way.add_done_callback(lambda done: self._rendered(key, done))
        # It is not the first one's own: that one may leave while others wait.
        return await asyncio.shield(under_way)

    def _rendered(self, key: Key, done: asyncio.Future[TokenIds]) -> None:
        is_made = not done.cancelled() and done.exception() is None
        if self._rendering.get(key) is not done:  # forgotten meanwhile
            return
        del self._rendering[key]
        if is_made:
            with suppress(ValueError):  # larger alone than all that is kept
                self.cached[key] = done.result()

    async def _offload(self, n_chars: int, work: Callable[[], T]) -> T:
        """Render and tokenise, in a thread if it is long enough to hold the event loop up."""
        if n_chars <= self._offload_chars:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _place_pictures(request: ChatRequest, vision: PictureProcessor) -> None:
    """Set the pictures of a request whose new ids are made.

    Raises:
        RequestError: ids that stand for pictures are there without one.
    """
    parent, new_ids = request.parent, request.new_ids
    request.pictures = before = () if parent is None else parent.all_pictures()
    parts: Sequence[Message] = ()
    if request.plain is None:
        parts = pictures_in(request.messages[request.n_known if parent is not None else 0 :])
    n_placeholders = sum(part["n_tokens"] for part in parts)
    vision_ids = new_ids[np.isin(new_ids, vision.forbidden_ids)]
    if len(vision_ids) != n_placeholders + 2 * len(parts):
        field_name = "messages" if request.plain is None else "prompt"
        raise _no_picture(field_name, vision_ids)
    if not parts:
        request.new_pictures = ()
        return
    offset = 0 if parent is None else parent.n_tokens
    places, n, found = np.flatnonzero(new_ids == vision.placeholder_id).tolist(), 0, []
    for part in parts:
        size = part["width"], part["height"]
        found.append(Picture(part["digest"], *size, offset + places[n], part["n_tokens"]))
        n += part["n_tokens"]
    request.new_pictures = tuple(found)
    request.pictures = (*before, *found)


def _no_picture(where: str, ids: TokenIds) -> RequestError:
    return RequestError(
        f"{where} hold ids of vision tokens ({sorted({*ids.tolist()})}) where no picture stands; "
        "leave them out, and send pictures as parts of messages",
        where,
    )


def _length(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    template_args: Mapping[str, Any],
) -> int:
    """About how many characters a template has to make of them."""
    if not (tools or template_args):
        n_chars = 0
        for message in messages:
            if len(message) != 2 or type(message["content"]) is not str:
                break
            n_chars += len(message["content"])
        else:
            return n_chars
    if isinstance(tools, Tools):
        n_tools = 0 if tools.is_written else tools.n_chars
        return len(dumps([messages, template_args])) + n_tools
    return len(dumps([messages, tools, template_args]))

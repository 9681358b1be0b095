"""The seam between inference engines and all that use them: what Stepwell asks of an engine.

    GenerateRequest ──► Engine.sample ──► Output, Output, …    token ids in, sampled token ids out
    Engine.abort, pause ─► update_weights_from_disk ─► continue_      a publication
    Engine.check, state, max_model_len                         how it is, and what fits

The gateway samples over several engines with these methods (`gateway/engine/`): it goes on after an
abort, and on another engine after a loss. Publications and supervisors use the others. `client.py`
implements all of them for SGLang's API, which the embedded engine speaks as well, `vllm.py` for
vLLM's, and a package may bring one more (`docs/engines.md`): nobody but `kinds.py` sees which one
it has. `HttpEngine` is the part that all HTTP servers have in common: it asks with typed errors.
Does not own the connections (`connections.py`), or retries.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeAlias

import msgspec
import orjson
from pydantic import BaseModel, ValidationError

from stepwell.backends.config import EngineConfig, PauseMode, WeightTransport
from stepwell.backends.engines.connections import ConnectionPool
from stepwell.backends.errors import (
    BackendConfigError,
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from stepwell.datapool.config import Section
from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import CANARY, TokenIds, VersionSpan

if TYPE_CHECKING:
    from stepwell.backends.engines.commands import CommandLine, Launch

CONTROL_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0
NOT_THERE = frozenset({404, 405, 501})
"""Statuses by which a server says that it has no such endpoint."""
_NO_ROUTE = frozenset({403, 404, 501})
"""The same to `OPTIONS`, which few endpoints take; vLLM forbids what it was not started for."""

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probs, best first."""


class Sampling(msgspec.Struct):
    """Sampling parameters as really used; `top_k` -1 is no limit."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    n_top_logprobs: int = 0
    """Alternatives returned per token."""
    constraint: tuple[str, str] | None = None
    """(kind, text): "json_schema", "regex", "ebnf" or "structural_tag"."""

    def of_sample(self, number: int) -> Sampling:
        """Return the parameters of one of several samples of a prompt: each has a seed of its own,
        as vLLM's."""
        if self.seed is None:
            return self
        seed = (self.seed + number + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self, seed=seed)


class PromptPictures(NamedTuple):
    """Pictures of a prompt, each a run of placeholders in its ids, and the way to their bytes."""

    places: Sequence[Picture]
    """All of them, in order."""
    read: Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]]
    """The canonical PNGs of these digests, for an engine that has not seen them."""
    placeholder_id: int
    owner: str = ""
    """Owner of the prompt: prefixes that an engine keeps for one owner serve no other."""


class GenerateRequest(NamedTuple):
    """One prompt to sample from."""

    rid: str
    """Name for `Engine.abort`, of no other request: 2 s after a stream's end SGLang aborts what has
    its name."""
    input_ids: TokenIds
    sampling: Sampling
    max_new_tokens: int
    """At most what `sampling` says: less if some of the response is in `input_ids` already."""
    stream: bool = False
    """Outputs come as tokens are sampled, otherwise one comes at the end."""
    adapter: str | None = None
    pieces: Sequence[TokenIds] = ()
    """Arrays that `input_ids` is made of, if later requests have the same objects: what is made of
    them for the wire may be kept."""
    pictures: PromptPictures | None = None
    """None: the prompt has none."""
    masked_ids: tuple[int, ...] = ()
    """Ids that the model may not sample: those of its vision tokens."""
    known_version: int | None = None
    """Weight version that the engine was last seen to have; None: not known."""

    @property
    def drawing_seed(self) -> int | None:
        """Seed for an engine that draws one number after another: of a response that goes on it is
        another one, or the numbers of its beginning would be drawn again."""
        seed, n = self.sampling.seed, self.sampling.max_new_tokens - self.max_new_tokens
        if seed is None or not n:
            return seed
        digest = hashlib.blake2b(f"{seed} {n}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, signed=True)


class Output(NamedTuple):
    """Tokens of one request that were sampled since the output before."""

    ids: list[int]
    log_probs: list[float]
    """One per id."""
    top_log_probs: Sequence[TopLogProbs] = ()
    """One per id if `Sampling.n_top_logprobs`, else empty."""
    version: int | None = None
    """Weight version that the engine has now; None: it does not say."""
    is_canary: bool = False
    """True if `version` is on trial and not committed (`publish.canary_share`)."""
    finish: str | None = None
    """Reason of the end, in the last output: "stop", "length", or "abort", after which another
    request may go on from what was sampled."""
    matched: int | str | None = None
    """Token id or stop string that ended a `stop`."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its cache; in the last output."""
    spans: Sequence[VersionSpan] | None = None
    """Versions that sampled the request's tokens, in the last output; None: the engine does not
    say, and `version` of each output has to do."""


OnOutput: TypeAlias = Callable[[Output], None]
"""Callback that takes each output, in the order in which they were sampled, outside any task. What
it raises ends the request and comes out of `Engine.sample`."""


class EngineState(NamedTuple):
    """An engine as it answers now. The defaults are of one that does not say."""

    version: int | None = None
    """Version of its weights; None: it does not say, or they are of another publisher."""
    is_canary: bool = False
    """True if `version` is on trial and not committed (`publish.canary_share`)."""
    model_path: str = ""
    """Directory of the weights that it serves, on its machine."""
    dtype: str = "auto"
    device: str = "cpu"
    ranks: int = 1
    """Processes over which it shards the weights."""
    is_embedded: bool = False
    """True: it hashes tensors as `weights/digest.py` does, and loads what a session brought at its
    end."""

    @classmethod
    def of(cls, weight_version: Any) -> EngineState:
        """State of an engine that names its weights `weight_version`; no version if that is of
        another publisher."""
        try:
            return cls(version_number(weight_version), is_canary(weight_version))
        except ValueError:
            return cls()

    @property
    def name(self) -> str:
        """The version as it is published: "7", of a canary "7-canary"."""
        return f"{self.version}{CANARY}" if self.is_canary else str(self.version)


class Bucket(NamedTuple):
    """Tensors whose bytes stand one behind another in one flat buffer."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Torch's names, e.g. "bfloat16"."""
    shapes: tuple[tuple[int, ...], ...]


class Meeting(NamedTuple):
    """A process group as its members find it. Rank 0 is the sender."""

    name: str
    world_size: int
    backend: str
    """"gloo", "nccl", or "raw_nccl": a communicator without a torch group."""
    host: str
    port: int
    timeout_s: float
    """Seconds for all to join."""
    unique_id: str = ""
    """NCCL's, in base64, of "raw_nccl"."""


class Routes(NamedTuple):
    """HTTP routes that a run asks of an engine -> what is lost without each."""

    read: Mapping[str, str] = MappingProxyType({})
    """Routes whose answers are read."""
    needed: Mapping[str, str] = MappingProxyType({})
    """Commands without which a run does not train."""
    optional: Mapping[str, str] = MappingProxyType({})
    """Commands of single features."""
    features: Mapping[str, Sequence[str]] = MappingProxyType({})
    """Setting -> the routes of `optional` that it needs."""
    tested: str = ""
    """Server and version that the table was tested with."""
    generate: str = ""
    """Route that samples."""


class Engine(ABC):
    """One engine, asked over its network address. Use as `async with`, or call `close()`.

    A package adds an engine by a class of this kind, in one file (docs/engines.md). What is not
    abstract has a default that an engine may leave as it is.

    Raises (every method):
        EngineUnavailableError: nobody answers there, or the connection broke.
        EngineTimeoutError: no answer in time.
        EngineRequestError: the engine refused (4xx).
        EngineInternalError: the engine failed (5xx), or its answer makes no sense.
    """

    options: ClassVar[type[BaseModel]] = Section
    """The model of `engine.options`: fields with a type, a default and a docstring."""
    transports: ClassVar[tuple[WeightTransport, ...]] = ("disk",)
    """Values of `engine.weight_transport` that it takes."""
    why_not: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Reasons why it takes no other, for the refusal, where there is more to say than that."""
    group_backend: ClassVar[str] = "nccl"
    """Kind of the process group of its GPUs (`Meeting.backend`)."""
    lends_memory: ClassVar[bool] = False
    """It has `release_memory` and `resume_memory` (`engine.release_memory`)."""
    is_behind_router: ClassVar[bool] = False
    """A router chooses which engine answers a call: none can try a version out alone
    (`publish.canary_share`)."""
    routes: ClassVar[Routes] = Routes()
    """Looked for when a run connects, and by `stepwell doctor --engine`."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        options: BaseModel | None = None,
        connections: ConnectionPool | None = None,
    ) -> None:
        """
        Args:
            timeout_s: seconds that an answer may take, but for tokens and weights.
            options: an instance of the class's `options`.
            connections: shared with other engines; None: its own.
        """
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.own = self.options() if options is None else options
        self.connections = ConnectionPool() if connections is None else connections

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.url, self.own)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close idle connections. Idempotent."""
        self.connections.close()

    @classmethod
    def own_options(cls, given: Mapping[str, Any]) -> BaseModel:
        """`engine.options` as this engine's own model.

        Raises:
            BackendConfigError: a key is not the model's, or a value is wrong.
        """
        try:
            return cls.options.model_validate(given)
        except ValidationError as e:
            wrong = e.errors()[0]
            key = ".".join(map(str, ("engine.options", *wrong["loc"])))
            raise BackendConfigError(
                f"{key} is {wrong['input']!r:.80}: {wrong['msg']}; the options of {cls.__name__} "
                f"are {', '.join(cls.options.model_fields) or 'none'}"
            ) from e

    @classmethod
    def command_line(cls, config: EngineConfig, launch: Launch) -> CommandLine:
        """Build the command line of such an engine, for Stepwell to start and supervise.

        Raises:
            BackendConfigError: it can only be attached to.
            EngineStartError: what it needs is not on this machine; the message has the remedy.
        """
        raise BackendConfigError(
            f"engine.kind is {config.kind!r}, which Stepwell cannot launch; start the engine and "
            "name it in engine.urls"
        )

    # -- generation ---------------------------------------------------------------------------

    @abstractmethod
    async def sample(self, request: GenerateRequest, on_output: OnOutput) -> None:
        """Sample a response; returns behind the output with `finish`. Waits without limit: a paused
        engine answers when it is continued. When this is cancelled nobody reads the answer, which
        an engine may not notice at once: `abort` tells it."""

    @abstractmethod
    async def abort(self, rid: str | None = None) -> None:
        """End a request with what it has, or all of them; unknown ones are no error."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "abort", *, timeout_s: float | None = None) -> None:
        """Sample nothing until `continue_`. What runs ends ("abort"), or waits with its cache
        ("in_place") or without it ("retract")."""

    @abstractmethod
    async def continue_(self) -> None:
        """Sample again; what waits goes on. No error if it is not paused."""

    # -- weights ------------------------------------------------------------------------------

    @abstractmethod
    async def update_weights_from_disk(
        self,
        path: str,
        version: int | str,
        *,
        flush_cache: bool = True,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """Load weights from a Hugging Face directory that the engine's machine can read; they are
        named `version` from then on. An engine that is not paused finishes what runs first."""

    async def init_weights_update_group(self, meeting: Meeting, rank: int) -> None:
        """Join a process group, the first of its processes as `rank`; returns when it is in."""
        raise self._no_tensors()

    async def destroy_weights_update_group(self, name: str) -> None:
        """Leave the group."""
        raise self._no_tensors()

    async def begin_weight_update(self) -> None:
        """Open a session, outside which no tensors are taken."""
        raise self._no_tensors()

    async def update_weights_from_distributed(
        self, bucket: Bucket, group: str, *, version: int | str | None, flush_cache: bool = True
    ) -> None:
        """Take a bucket that rank 0 of the group broadcasts; within a session.

        Args:
            version: given with the last bucket: name of all that the session brought.
        """
        raise self._no_tensors()

    async def update_weights_from_tensor(
        self, handles: Sequence[str], *, version: int | str | None, flush_cache: bool = True
    ) -> None:
        """Take tensors from memory that is shared with the sender (`weights/ipc.py`), likewise.

        Args:
            handles: for each of the engine's ranks.
        """
        raise self._no_tensors()

    async def end_weight_update(self, version: int | str | None = None) -> None:
        """Close the session; `version` as it was given with the last bucket."""
        raise self._no_tensors()

    def _no_tensors(self) -> EngineRequestError:
        return EngineRequestError(
            f"{self} takes weights from disk only: set engine.weight_transport to disk"
        )

    @abstractmethod
    async def state(self) -> EngineState:
        """Return the version of its weights; answered also while it is paused. Gateways ask often;
        other fields may have their defaults."""

    async def weight_version(self) -> int:
        """Return the version that `state` has.

        Raises:
            ValueError: it has none that Stepwell published.
        """
        version = (await self.state()).version
        if version is None:
            raise ValueError(f"{self.url} names no weight version")
        return version

    async def about(self) -> EngineState:
        """Return what `state` does, with the facts that publications need besides."""
        return await self.state()

    async def weight_hashes(self) -> list[dict[str, Any]] | None:
        """Per rank `checksums` (parameter -> hash) and `parallelism_info`; None: it has none."""
        return None

    async def release_memory(self) -> None:
        """Free the memory of a paused engine (`lends_memory`)."""
        raise EngineRequestError(f"{self} lends no memory: set engine.release_memory to false")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Take the memory back: all of it, or that of `tags` (`weights`, `kv_cache`)."""
        raise EngineRequestError(f"{self} lends no memory: set engine.release_memory to false")

    # -- information --------------------------------------------------------------------------

    @abstractmethod
    async def check(self) -> None:
        """Raise unless the engine can generate."""

    @abstractmethod
    async def max_model_len(self) -> int:
        """Tokens that fit, prompt and response."""

    async def why_not_trainable(self) -> str | None:
        """Return why the answers of a server that was started so cannot be trained on, with the
        remedy; None: they can. Asked when a run attaches to it."""
        return None

    async def check_generates(self) -> None:
        """Raise unless the engine generated a token just now; not asked while it is paused."""
        await self.check()

    async def health(self) -> bool:
        """Return true if `check` passes. Does not raise."""
        try:
            await self.check()
        except EngineError:
            return False
        return True

    async def name(self) -> str:
        """The server's name for itself, e.g. "sglang 0.5.9"; empty if it has none."""
        return ""


def _restored(kind: type[Engine], url: str, options: BaseModel) -> Engine:
    return kind(url, options=options)


def version_number(weight_version: Any) -> int:
    """Stepwell publishes decimal integers, a canary's with a suffix; SGLang's initial "default" is
    version 0.

    Raises:
        ValueError: another version scheme; somebody else publishes to this engine.
    """
    if weight_version == "default":
        return 0
    digits = weight_version.removesuffix(CANARY) if isinstance(weight_version, str) else ""
    number = int(digits) if digits.isdecimal() else weight_version
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(
            f"weight_version is {weight_version!r:.80}; Stepwell publishes decimal integers. "
            "Does something else publish weights to this engine?"
        )
    return number


def is_canary(weight_version: Any) -> bool:
    """Return true if an engine has a version that is not committed (`publish.canary_share`)."""
    return isinstance(weight_version, str) and weight_version.endswith(CANARY)


# -- engines that are HTTP servers ----------------------------------------------------------------


class HttpEngine(Engine):
    """An engine that is an HTTP server at `url`: `_ask` returns a 2xx answer, parsed if it is JSON,
    and raises an `EngineError` for anything else."""

    async def has_route(self, path: str) -> bool:
        """Return true if the server has the endpoint `path`. Asks by `OPTIONS`: nothing happens."""
        try:
            await self._ask(path, method="OPTIONS")
        except (EngineRequestError, EngineInternalError) as e:
            return e.status not in _NO_ROUTE
        return True

    async def served_model(self) -> dict[str, Any]:
        """The first entry of `/v1/models`: `id`, `owned_by` (the server's kind), `max_model_len`;
        empty if there is none."""
        try:
            entry = (await self._ask("/v1/models"))["data"][0]
        except (LookupError, TypeError):
            return {}
        return entry if isinstance(entry, dict) else {}

    async def max_model_len(self) -> int:
        """Tokens that fit, prompt and response."""
        length = (await self.served_model()).get("max_model_len")
        if type(length) is not int or length < 2:
            raise EngineInternalError(f"{self.url}/v1/models names no max_model_len")
        return length

    def _at(self, path: str) -> str:
        """The url of the endpoint `path`."""
        return self.url + path

    async def _object(
        self, path: str, body: Any = None, *, has: Sequence[str] = (), **how: Any
    ) -> dict[str, Any]:
        answer = await self._ask(path, body, **how)
        if not isinstance(answer, dict) or not answer.keys() >= set(has):
            wanted = f"object with {', '.join(has)}" if has else "object"
            raise EngineInternalError(f"{self.url}{path} answered no {wanted}, but {answer!r:.200}")
        return answer

    async def _ask(
        self, path: str, body: Any = None, *, method: str = "", timeout_s: float | None = -1.0
    ) -> Any:
        """The answer, parsed if it is JSON; POST if there is a body. `timeout_s`: None waits
        without limit, negative is the client's default."""
        limit = self.timeout_s if timeout_s is not None and timeout_s < 0 else timeout_s
        method, url = method or ("GET" if body is None else "POST"), self._at(path)
        data = () if body is None else (orjson.dumps(body),)
        try:
            async with asyncio.timeout(limit):
                status, content = await self.connections.request(method, url, data)
        except TimeoutError as e:
            raise EngineTimeoutError(f"{url} did not answer within {limit:g} s") from e
        except ConnectionError as e:
            raise unavailable(url, e) from e
        if not 200 <= status < 300:
            raise refusal(url, status, f"answered {status}", words_of(content))
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError:
            return content


def is_missing(error: EngineError) -> bool:
    """The server has no such endpoint."""
    return getattr(error, "status", None) in NOT_THERE


def unavailable(url: str, e: ConnectionError) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"no engine answers at {url} ({e}); is it running, is the url right?",
        refused=isinstance(e, ConnectionRefusedError),
    )


def refusal(url: str, status: int, what: str, words: str) -> EngineError:
    """
    Args:
        what: the engine did.
        words: its own about that.
    """
    kind = EngineRequestError if status < 500 else EngineInternalError
    what, message = f"the engine {what}", f"{url} {what}: {words}"
    return kind(message, status=status, what=what, words=words)


def words_of(content: bytes) -> str:
    """The human part of an error's body."""
    try:
        parsed = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace").strip()
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if isinstance(inner, str) and isinstance(parsed, dict):  # a title, and the words beside it
        inner = parsed.get("message", inner)
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)

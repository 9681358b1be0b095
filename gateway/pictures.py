"""This module takes the pictures out of a request's body before anything else of it is read, so
that a conversation of 50 screenshots is parsed, compared and kept as the text that it is without.

    body   {"messages":[… "url":"data:image/png;base64,iVBOR… 1.3 MB …" … ]}
    text   {"messages":[… "url":"picture:5f2b…" … ]}                SHA-256 of what stood there
    part   {"type":"image","digest":…,"width":…,"height":…,"n_tokens":…}       of a message

A picture is hashed as it stands in the body; one that the same key sent before is known by that and
not decoded again. Others are decoded in threads (`backends/pictures.py` has the rules). What is
kept of a picture is its digest and size; its bytes are there while a request that brings it is.

A string that looks like a picture and stands somewhere else (in a tool's arguments, say) is put
back, and the body is read again.

Owns: the search for pictures in bodies, the memory of known ones, a request's own bytes. Does not
own: the parts that hold pictures in each wire format (`dialects/`), how one is decoded, where its
placeholders stand (`prompt.py`), where it is stored (the pool).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import orjson
from cachetools import LRUCache

from stepwell.backends.errors import PictureError
from stepwell.backends.pictures import (
    CanonicalPicture,
    PictureBounds,
    PictureProcessor,
    from_base64,
    no_pictures,
)
from stepwell.gateway.config import PicturesConfig
from stepwell.gateway.errors import BodyTooLargeError, ContextLengthError, RequestError
from stepwell.gateway.tokens.folder import model_folder
from stepwell.gateway.tokens.messages import Message

KNOWN_PICTURES = 65_536
"""Pictures that are not decoded again; some 300 bytes each."""
THREADS = 2
"""Threads that decode, and pictures of one request that are there or wait for one: what others send
is decoded in between, and a request that has gone leaves no queue behind."""
LEAST_CHARS = 32
"""Characters of the shortest string that is looked at without `data:`; no picture is shorter."""
NAME: Final = "picture:"
"""Prefix of a picture's name in the text."""
_KEYS = re.compile(rb'"(?:url|image_url|data)"\s*:\s*"')
"""Keys of strings that may be pictures, in the four dialects. In a text they have backslashes."""
_NAMES = re.compile(f"{NAME}([0-9a-f]{{64}})")
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_\\"
"""Bytes of base64 in a JSON string: both alphabets, and escapes."""
_SHOWN = 40
"""Characters of what was sent that an error shows."""
_SEND = "send the picture itself, in base64"


class KnownPicture(NamedTuple):
    """A picture as the model sees it, without its bytes."""

    digest: str
    width: int
    height: int
    n_tokens: int

    @classmethod
    def of(cls, made: CanonicalPicture) -> KnownPicture:
        return cls(made.digest, made.width, made.height, made.n_tokens)

    def part(self) -> Message:
        """The part of a message's content that stands for it."""
        return {"type": "image", **self._asdict()}


class RequestPictures:
    """The pictures of one request, and their bytes for as long as it is in flight."""

    def __init__(
        self,
        body: bytes,
        spans: Mapping[str, tuple[int, int]],
        context: float,
        left: Collection[str] = (),
    ) -> None:
        """`left`: names of what stays in the body, since it stands where no picture can be."""
        self.known: dict[str, KnownPicture | str] = {}
        """By name; a text is the reason why it is refused. Without those that were not decoded,
        since the ones before them fill the model's context."""
        self.n_tokens = 0
        """Tokens of the known pictures, each counted once."""
        self.pngs: dict[str, bytes] = {}
        """Canonical pictures that this request was the first to bring, by digest."""
        self.ignored: list[str] = []
        """Names of options that were left aside, for `Parsed.ignored`."""
        self._body, self._spans, self._context, self._left = body, spans, context, left

    @property
    def names(self) -> Collection[str]:
        """Names of all pictures of the body."""
        return self._spans.keys()

    @property
    def fill_context(self) -> bool:
        return self.n_tokens >= self._context

    @property
    def is_shown(self) -> bool:
        """False: a model is not shown them, so their bytes are not needed."""
        return self._context < math.inf

    def add(self, name: str, known: KnownPicture | str) -> None:
        """Set what a picture turned out to be."""
        self.known[name] = known
        if isinstance(known, KnownPicture):
            self.n_tokens += known.n_tokens

    def part(self, source: Any, where: str) -> Message:
        """The part of a message that stands for a picture.

        Args:
            source: what stands for it in the text.
            where: the path of `source`.

        Raises:
            RequestError: it is no picture, or is refused.
            ContextLengthError: those before it have more tokens than fit.
        """
        found = None
        if isinstance(source, str) and source.startswith(NAME):
            name = source.removeprefix(NAME)
            found = self.known.get(name)
            if found is None and name in self._spans:
                raise ContextLengthError.of(self.n_tokens, int(self._context), at_least=True)
        if isinstance(found, KnownPicture):
            return found.part()
        if found is not None:
            raise RequestError(f"{where} is a picture that is refused: {found}", where)
        if self._left and isinstance(source, str) and _name_of(source.encode()) in self._left:
            raise RequestError(
                f"{where} is a picture, and the very same string stands as a text, too, where no "
                "picture can be; leave it out there",
                where,
            )
        shown = f"{source[:_SHOWN]!r}" if isinstance(source, str) else f"{source!r:.80}"
        if isinstance(source, str) and re.match(r"[a-z][a-z0-9+.-]*:", source):
            raise RequestError(
                f"{where} is the address {shown}, which is not fetched; {_SEND}", where
            )
        raise RequestError(f"{where} is {shown}, which is no picture in base64; {_SEND}", where)

    def without_bytes(self) -> RequestPictures:
        """The same names, for a text that is read again when the request is long over."""
        pictures = RequestPictures(b"", {}, self._context, self._left)
        pictures.known = self.known
        return pictures

    def source(self, name: str) -> bytes:
        """A picture as it stands in the body."""
        start, end = self._spans[name]
        return self._body[start:end]

    def json(self, digest: str) -> orjson.Fragment:
        """A picture that the body brings, as the JSON string that stands there."""
        name = self.name_of(digest)
        return orjson.Fragment(b"null" if name is None else b'"%b"' % self.source(name))

    def name_of(self, digest: str) -> str | None:
        """The name of a picture that the body brings; None: it brings none of this digest."""
        for name, known in self.known.items():
            if isinstance(known, KnownPicture) and known.digest == digest:
                return name
        return None

    def named_in(self, text: str) -> set[str]:
        """Names that stand in a text, where no picture can be."""
        return {name for name in _NAMES.findall(text) if name in self._spans}


class PictureReader:
    """Reads the pictures of a gateway's requests. Owned by the app's lifespan."""

    def __init__(self, processor: PictureProcessor, config: PicturesConfig) -> None:
        self.processor = processor
        self._config = config
        self._threads = ThreadPoolExecutor(THREADS, "gateway-pictures")
        self._known: LRUCache[tuple[str, str], KnownPicture] = LRUCache(KNOWN_PICTURES)
        """By owner and name: how long a picture takes tells nobody what another key sent."""
        self._decoding: dict[tuple[str, str], asyncio.Future[CanonicalPicture]] = {}
        self.n_decoded = 0

    @classmethod
    def of(cls, folder: str | None, config: PicturesConfig) -> PictureReader | None:
        """The pictures of the model in a folder; None: it takes none."""
        if folder is None or no_pictures(found := model_folder(folder)):
            return None
        processor = PictureProcessor.of(found, PictureBounds(max_pixels=config.max_pixels))
        return None if processor is None else cls(processor, config)

    def forget(self) -> None:
        """Know no picture any more."""
        self._known.clear()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def take(
        self, body: bytes, owner: str | None, context: float, left: Collection[str] = ()
    ) -> tuple[bytes, RequestPictures]:
        """Take the pictures out of a body, and decode those that are not known, until they fill the
        model's context: a few kB of JPEG may be 40 MB as the model sees it.

        Args:
            owner: of the request's key; no other owner's pictures count as known.
            context: tokens that fit; infinite: the pictures are only counted, and their bytes are
                not held.
            left: as `RequestPictures`.

        Raises:
            RequestError: there are more than one body may bring.
        """
        run = asyncio.get_running_loop().run_in_executor
        text, spans, n = await run(self._threads, _without_pictures, body, frozenset(left))
        if n > self._config.max_count:
            raise BodyTooLargeError(
                f"the request's body brings {n} pictures, and may bring {self._config.max_count} "
                "(gateway.pictures.max_count); send fewer",
                None,
            )
        pictures = RequestPictures(body, spans, context, left)
        new = []
        for name in spans:
            if (known := self._known.get((owner or "", name))) is not None:
                pictures.add(name, known)
            else:
                new.append(name)
        waiting = iter(new)

        async def read() -> None:
            for name in waiting:
                if pictures.fill_context:
                    return
                pictures.add(name, await self._read(pictures, name, owner or ""))

        await asyncio.gather(*(read() for _ in new[:THREADS]))
        return text, pictures

    async def pngs(self, pictures: RequestPictures, digests: Sequence[str]) -> dict[str, bytes]:
        """Return the canonical pictures that the request brings, by digest."""
        found = {digest: pictures.pngs[digest] for digest in digests if digest in pictures.pngs}
        run = asyncio.get_running_loop().run_in_executor
        for digest in digests:
            if digest not in found and (name := pictures.name_of(digest)) is not None:
                made = await run(self._threads, self._canonical, pictures.source(name))
                found[digest] = pictures.pngs[digest] = made.png
        return found

    async def _read(self, pictures: RequestPictures, name: str, owner: str) -> KnownPicture | str:
        """A picture that was not known; a text: why it is refused."""
        key = owner, name
        if (known := self._known.get(key)) is not None:  # another request brought it meanwhile
            return known
        under_way = self._decoding.get(key)
        if under_way is None:  # rollouts of one prompt bring it together: the first one decodes
            run = asyncio.get_running_loop().run_in_executor
            under_way = run(self._threads, self._canonical, pictures.source(name))
            self._decoding[key] = under_way
            under_way.add_done_callback(partial(self._decoded, key))
            self.n_decoded += 1
        try:  # the request may leave while others wait for the picture
            made = await asyncio.shield(under_way)
        except PictureError as e:
            return str(e)
        if pictures.is_shown:
            pictures.pngs[made.digest] = made.png
        return KnownPicture.of(made)

    def _decoded(self, key: tuple[str, str], made: asyncio.Future[CanonicalPicture]) -> None:
        """It is known from the moment at which it is not under way any more."""
        del self._decoding[key]
        if not made.cancelled() and made.exception() is None:
            self._known[key] = KnownPicture.of(made.result())

    def _canonical(self, source: bytes) -> CanonicalPicture:
        return self.processor.canonical(bytes_of(source))


def _without_pictures(
    body: bytes, left: frozenset[str]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """The body with names for its pictures, their places by name, and how many there are."""
    view = memoryview(body)
    spans: dict[str, tuple[int, int]] = {}
    pieces: list[bytes | memoryview] = []
    at = n = 0
    found = _KEYS.search(body)
    while found is not None:
        start = found.end()
        end = body.find(b'"', start)
        if end < 0:
            break
        if _may_be_picture(body, found, start, end):
            name = _name_of(view[start:end])
            if name not in left:
                spans.setdefault(name, (start, end))
                pieces += (view[at:start], f"{NAME}{name}".encode())
                at, n = end, n + 1
            found = _KEYS.search(body, end)
        else:
            found = _KEYS.search(body, start)
    if not n:
        return body, spans, 0
    return b"".join((*pieces, view[at:])), spans, n


def _name_of(source: bytes | memoryview) -> str:
    return hashlib.sha256(source).hexdigest()


def _may_be_picture(body: bytes, found: re.Match[bytes], start: int, end: int) -> bool:
    if body[end - 1 : end] == b"\\":  # a quotation mark within a text
        return False
    if body.startswith(b"data:", start):
        return True
    if not found[0].startswith(b'"data"') or end - start < LEAST_CHARS:
        return False
    beginning = body[start : start + LEAST_CHARS].translate(None, _BASE64)
    return not beginning and not body[start:end].translate(None, _BASE64)


def bytes_of(source: bytes) -> bytes:
    """The file in a JSON string, which is base64 or a data URL of it.

    Raises:
        PictureError
    """
    if b"\\" in source:  # "\/", as some clients write it, or lines
        try:
            source = orjson.loads(b'"%b"' % source).encode()
        except ValueError as e:
            raise PictureError("it is no text that JSON can hold") from e
    if source.startswith(b"data:"):
        head, _, source = source.partition(b",")
        media, *options = head[len(b"data:") :].decode("latin-1").lower().split(";")
        if not media.startswith("image/"):
            raise PictureError(
                f"its media type is {media[:_SHOWN]!r}; send image/png or image/jpeg"
            )
        if "base64" not in options:
            raise PictureError("its data URL is not in base64; send data:image/png;base64,…")
    return from_base64(source)

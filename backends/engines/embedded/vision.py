"""Pictures of requests: what the engine holds of them, and what one request computes of its own.

    image_data ──take──► StoredPicture ──place──► Vision: shadow ids, rotary positions
      "sha256:…" known         (of one salt)          │ embeddings, once per picture, when a
      base64 PNG  decoded                             ▼ prefill first reaches it
                                                 the model's forward

A PNG that a client sent once is held, so that it may name it by digest in later requests; digests
are told apart by `extra_key`, SGLang's salt of the prefix cache, so that what one owner sent is
unknown under another's. The least recently used ones go first; a client sends those again.

Owns: the store, the expansion of placeholders. Does not own: the rules of pictures
(`backends/pictures.py`), the tower's forward (`model.py`).
"""

from __future__ import annotations

import base64
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from stepwell.backends.errors import PictureError
from stepwell.backends.pictures import PictureProcessor, decode, digest_of
from stepwell.datapool.pictures import Picture, shadow_ids

BY_DIGEST = "sha256:"
"""Prefix of an entry of `image_data` that names a picture sent before."""
MAX_STORED_BYTES = 512 * 2**20


class MissingPicturesError(LookupError):
    """Pictures that a request names are not held here; the client has to send them."""

    def __init__(self, digests: Sequence[str]) -> None:
        super().__init__(f"{len(digests)} pictures of image_data are not held here; send them")
        self.digests = list(digests)


class StoredPicture(NamedTuple):
    """A canonical picture."""

    digest: str
    png: bytes
    width: int
    height: int
    n_tokens: int


class PictureStore:
    """The pictures that clients have sent. Safe to use from several threads."""

    def __init__(self, processor: PictureProcessor, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.processor = processor
        self._max_bytes = max_bytes
        self._held: OrderedDict[tuple[str, str], StoredPicture] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def take(self, image_data: Sequence[str], salt: str) -> list[StoredPicture]:
        """The pictures of a request, in order; new ones are decoded, checked and held.

        Raises:
            MissingPicturesError: some are named by a digest that is not held under this salt.
            PictureError: an entry is no canonical picture.
        """
        found: list[StoredPicture | None] = []
        missing: list[str] = []
        for entry in image_data:
            if not entry.startswith(BY_DIGEST):
                found.append(None)
                continue
            digest = entry.removeprefix(BY_DIGEST)
            with self._lock:
                held = self._held.get((salt, digest))
                if held is not None:
                    self._held.move_to_end((salt, digest))
            if held is None:
                missing.append(digest)
            found.append(held)
        if missing:
            raise MissingPicturesError(missing)
        return [
            held or self._add(self._read(i, entry), salt)
            for i, (held, entry) in enumerate(zip(found, image_data, strict=True))
        ]

    def _read(self, i: int, entry: str) -> StoredPicture:
        processor = self.processor
        try:
            png = base64.b64decode(entry.rpartition(",")[2], validate=True)
            image = decode(png, processor.canonical_bounds)
            if processor.grid_size(*image.size) != image.size:
                raise PictureError(
                    f"it is {image.width}x{image.height}, not on the model's grid of "
                    f"{processor.factor}; send canonical pictures"
                )
        except ValueError as e:  # ours, binascii's, and of text that is not ASCII
            raise PictureError(f"image_data[{i}]: {e}") from e
        n_tokens = image.width * image.height // processor.factor**2
        return StoredPicture(digest_of(image), _as_png(image, png), *image.size, n_tokens)

    def _add(self, picture: StoredPicture, salt: str) -> StoredPicture:
        key = (salt, picture.digest)
        with self._lock:
            if key in self._held:  # as it came first: another encoding has another size
                picture = self._held[key]
            else:
                self._bytes += len(picture.png)
                self._held[key] = picture
            self._held.move_to_end(key)
            while self._bytes > self._max_bytes and len(self._held) > 1:
                _, gone = self._held.popitem(last=False)
                self._bytes -= len(gone.png)
        return picture


def _as_png(image: Image.Image, data: bytes) -> bytes:
    """The picture's own bytes if they are a PNG."""
    if data.startswith(b"\x89PNG"):
        return data
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


class Vision:
    """The pictures of one request's prompt, in it."""

    def __init__(
        self,
        processor: PictureProcessor,
        prompt_ids: Sequence[int],
        pictures: Sequence[StoredPicture],
    ) -> None:
        """`prompt_ids` has one placeholder for each picture.

        Raises:
            PictureError: it has more or fewer, or what is no id.
        """
        try:
            ids = np.asarray(prompt_ids, dtype=np.int64)
        except OverflowError as e:
            raise PictureError("The input_ids hold values outside the vocabulary.") from e
        places = np.flatnonzero(ids == processor.placeholder_id)
        if len(places) != len(pictures):
            raise PictureError(
                f"input_ids has {len(places)} placeholders (id {processor.placeholder_id}) for "
                f"{len(pictures)} pictures in image_data; write one for each"
            )
        lengths = np.ones(len(ids), dtype=np.int64)
        lengths[places] = [picture.n_tokens for picture in pictures]
        starts = np.cumsum(lengths) - lengths
        self.prompt_ids: list[int] = np.repeat(ids, lengths).tolist()
        """With `n_tokens` placeholders for each picture."""
        self.pictures = [
            Picture(p.digest, p.width, p.height, int(at), p.n_tokens)
            for p, at in zip(pictures, starts[places], strict=True)
        ]
        self.shadow = shadow_ids(self.prompt_ids, self.pictures)
        self.embeddings: list[Tensor | None] = [None] * len(pictures)
        """[n_tokens, hidden] of each picture, once it is computed."""
        self._pngs = [picture.png for picture in pictures]
        self._positions = processor.positions(self.prompt_ids, self.pictures)
        self._next = int(self._positions.max()) + 1 - len(self.prompt_ids)

    def within(self, start: int, end: int) -> list[int]:
        """Indices of the pictures that have a placeholder in [start, end)."""
        return [i for i, p in enumerate(self.pictures) if p.at < end and p.end > start]

    def png(self, i: int) -> bytes:
        return self._pngs[i]

    def positions(self, at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rotary positions [3, n] of the tokens at places `at` [n] of prompt and output."""
        prompt = len(self.prompt_ids)
        return np.where(
            at < prompt, self._positions[:, np.minimum(at, prompt - 1)], at + self._next
        )

    def forget(self) -> None:
        """The weights were replaced: embeddings are computed again where they are needed."""
        self.embeddings = [None] * len(self.pictures)

"""Pictures as Qwen2-VL and Qwen2.5-VL see them: one canonical form, made once, that no processor
changes any more.

    bytes of a stranger ──canonical──► PNG on the model's grid ──features──► pixel_values, grid
                                       digest, width, height, n_tokens

A picture that an agent sends is decoded by the rules below and resized to the grid of the model's
own processor; that PNG is what the engine gets, what the pool stores and what training reads. On it
the processor's resize is the identity, so engine and trainer compute the same features.

Rules of `canonical`, in their order:

- PNG, JPEG, WebP and GIF are read, by their content; anything else is refused.
- Bytes, sides and pixels are bounded (`PictureBounds`), before anything is decoded.
- Damaged and truncated files are refused; rows that a whole PNG lacks are black. Of several frames
  the first is taken.
- The EXIF orientation is applied; one that cannot be read counts as none.
- 16-bit channels keep their high byte. A 16-bit RGB file with a transparent colour is refused.
- Grey, one-bit and palette pictures become RGB by value. CMYK becomes RGB by
  (255 - ink)(255 - K) / 255. Colour profiles and gamma are ignored.
- Transparency, by alpha, palette or transparent colour, is laid over white.
- A picture longer than 200 times its other side is refused, as the processor does; the rest is
  resized (bicubic) to sides that are multiples of patch x merge within the model's pixel range.

The model's minimum and maximum of pixels are those of its `preprocessor_config.json`, which the
engine's own processor reads, too.

Owns: the rules, the digest, the model's placeholders, features and positions of pictures. Does not
own: where pictures are stored (the pool), where they stand in a prompt (the gateway).
"""

from __future__ import annotations

import binascii
import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from stepwell.backends.errors import PictureError

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")
"""Values of `model_type` whose pictures are trained."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_ASPECT = 200
"""Longest side over shortest side, as the processor bounds it."""
_ORIENTATION = 0x0112
"""EXIF's tag; its values 2 to 8 and what undoes them."""
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_PNG_TURNS = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Beginnings of what may say in a PNG how it lies; none of them is ever compressed."""


class PictureSpan(Protocol):
    """Size of a picture and the place of its placeholders; the pool's `Picture` is one."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def at(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...


class CanonicalPicture(NamedTuple):
    """A picture on the model's grid."""

    png: bytes
    digest: str
    """SHA-256 of `RGB <width> <height>` and a line feed, then the RGB bytes: 64 hex digits."""
    width: int
    height: int
    n_tokens: int
    """Placeholders in the prompt."""


@dataclass(frozen=True, slots=True)
class PictureBounds:
    """Bounds of one picture."""

    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000
    """Width x height; decoding takes up to four bytes for each."""
    max_side: int = 16_384


@dataclass(frozen=True)
class PictureProcessor:
    """The pictures of one model folder. Safe to use from several threads."""

    folder: Path
    placeholder_id: int
    """Stands `n_tokens` times for each picture."""
    start_id: int
    """Written by the chat template in front of the placeholders."""
    end_id: int
    """Written by the chat template behind the placeholders."""
    forbidden_ids: tuple[int, ...]
    """Ids of vision tokens, which a model may never sample: the next forward would take them for
    pictures."""
    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    resample: Image.Resampling
    bounds: PictureBounds

    @classmethod
    def of(
        cls, model_path: str | Path, bounds: PictureBounds | None = None
    ) -> PictureProcessor | None:
        """The processor of a model folder; None if it takes no pictures, for `no_pictures` says
        which reason."""
        folder = Path(model_path)
        if no_pictures(folder):
            return None
        config = _read_json(folder / "config.json")
        placeholder_id, start_id, end_id = (
            config[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")
        )
        others = (config.get("video_token_id"), config.get("vision_token_id"))
        settings = _processor_settings(folder)
        size = settings.get("size") or {}
        return cls(
            folder=folder,
            placeholder_id=placeholder_id,
            start_id=start_id,
            end_id=end_id,
            forbidden_ids=tuple(
                sorted({placeholder_id, start_id, end_id, *(i for i in others if i is not None)})
            ),
            min_pixels=settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
            max_pixels=settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
            patch_size=settings.get("patch_size", 14),
            merge_size=settings.get("merge_size", 2),
            resample=Image.Resampling(settings.get("resample", Image.Resampling.BICUBIC)),
            bounds=bounds or PictureBounds(),
        )

    @property
    def factor(self) -> int:
        """Pixels along each side of what one placeholder stands for."""
        return self.patch_size * self.merge_size

    @property
    def canonical_bounds(self) -> PictureBounds:
        """Bounds of a canonical picture: its PNG may be several times as long as the photograph
        that it was made of."""
        most = max(self.bounds.max_pixels, self.max_pixels)
        return replace(self.bounds, max_bytes=4 * most, max_pixels=most)

    def canonical(self, data: bytes) -> CanonicalPicture:
        """Decode a picture by the rules of this module and resize it to the model's grid.

        Raises:
            PictureError: it is refused, with the reason.
        """
        image = decode(data, self.bounds)
        width, height = self.grid_size(*image.size)
        if image.size != (width, height):
            image = image.resize((width, height), self.resample)
        png = io.BytesIO()
        image.save(png, "PNG", compress_level=3)
        n_tokens = (width // self.factor) * (height // self.factor)
        return CanonicalPicture(png.getvalue(), digest_of(image), width, height, n_tokens)

    def n_tokens(self, data: bytes) -> int:
        """Placeholders of a picture, by its size alone: its pixels are not decoded.

        Raises:
            PictureError: as `canonical`, but for damaged pixels.
        """
        width, height = self.grid_size(*size_of(data, self.bounds))
        return (width // self.factor) * (height // self.factor)

    def grid_size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that the processor resizes such a picture to, and leaves as it is.

        Raises:
            PictureError: it is too long for its other side.
        """
        for _ in range(8):
            if max(width, height) > MAX_ASPECT * min(width, height):
                raise PictureError(
                    f"the picture is {width}x{height}; one side may be at most {MAX_ASPECT} times "
                    "the other"
                )
            resized = self._resized(width, height)
            if resized == (width, height):
                return resized
            width, height = resized
        raise PictureError(
            f"a picture of {width}x{height} has no size of {self.min_pixels} to {self.max_pixels} "
            f"pixels on a grid of {self.factor}"
        )

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """`smart_resize` of Qwen's processor."""
        factor = self.factor
        w, h = round(width / factor) * factor, round(height / factor) * factor
        if w * h > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            w = max(factor, math.floor(width / scale / factor) * factor)
            h = max(factor, math.floor(height / scale / factor) * factor)
        elif w * h < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            w = math.ceil(width * scale / factor) * factor
            h = math.ceil(height * scale / factor) * factor
        return w, h

    def features(self, pngs: Sequence[bytes]) -> dict[str, npt.NDArray[Any]]:
        """Inputs of the vision tower for canonical pictures.

        Returns:
            `pixel_values`, float32 [patches of all pictures, patch dim], and `image_grid_thw`,
            int64 [pictures, 3], in patches.

        Raises:
            PictureError: a picture is not a PNG on the model's grid.
        """
        images = []
        for png in pngs:
            image = decode(png, self.canonical_bounds)
            if self._resized(*image.size) != image.size:
                raise PictureError(
                    f"a picture is {image.width}x{image.height}, which is not on the grid of "
                    f"{self.factor} of the model in {self.folder}; it was made for another model"
                )
            images.append(image)
        made = self._image_processor(images, do_resize=False, return_tensors="np")
        return {name: made[name] for name in ("pixel_values", "image_grid_thw")}

    @cached_property
    def _image_processor(self) -> Any:
        # By its class: Auto picks another one, of other roundings, where torchvision is installed.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil.from_pretrained(self.folder, local_files_only=True)

    def positions(
        self, ids: Sequence[int] | npt.NDArray[Any], pictures: Sequence[PictureSpan]
    ) -> npt.NDArray[np.int64]:
        """Rotary positions (time, height, width) of each token, [3, len(ids)]: text counts on by
        one; a picture's tokens are its grid from there, and text goes on behind its longer side."""
        out = np.empty((3, len(ids)), dtype=np.int64)
        at = position = 0
        for picture in pictures:
            if picture.at >= len(ids):
                break
            out[:, at : picture.at] = np.arange(position, position + picture.at - at)
            position += picture.at - at
            at = picture.at + picture.n_tokens
            rows, columns = picture.height // self.factor, picture.width // self.factor
            # A row may end within a picture.
            grid = out[:, picture.at : at]
            n = grid.shape[1]
            grid[0] = position
            grid[1] = position + np.repeat(np.arange(rows), columns)[:n]
            grid[2] = position + np.tile(np.arange(columns), rows)[:n]
            position += max(rows, columns)
        if at < len(ids):
            out[:, at:] = np.arange(position, position + len(ids) - at)
        return out


def no_pictures(model_path: str | Path) -> str:
    """Reason why the model in a folder takes no pictures; empty if it takes them."""
    folder = Path(model_path)
    config = _read_json(folder / "config.json")
    kind = config.get("model_type")
    if "vision_config" not in config:
        return f"the model in {folder} ({kind}) reads text only"
    if kind not in MODEL_TYPES:
        known = " and ".join(MODEL_TYPES)
        return f"pictures of model_type {kind!r} are not supported; those of {known} are"
    if not _processor_settings(folder):
        return f"the model in {folder} has no preprocessor_config.json"
    return ""


def _processor_settings(folder: Path) -> Mapping[str, Any]:
    """Settings of the image processor; empty if the folder has none."""
    settings = _read_json(folder / "preprocessor_config.json")
    return settings or _read_json(folder / "processor_config.json").get("image_processor") or {}


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


# ── decoding ──────────────────────────────────────────────────────────────────────────────────────


def from_base64(text: bytes) -> bytes:
    """The file in a text of base64: either alphabet, with or without its end, in lines or not.

    Raises:
        PictureError: it is none.
    """
    text = text.translate(bytes.maketrans(b"-_", b"+/"), b"\r\n ").rstrip(b"=")
    if not text:
        raise PictureError("it is empty")
    try:
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error as e:
        raise PictureError(f"it is not base64 ({e})") from e


def digest_of(image: Image.Image) -> str:
    """Digest of a canonical picture's pixels."""
    found = hashlib.sha256(b"RGB %d %d\n" % image.size)
    found.update(image.tobytes())
    return found.hexdigest()


def decode(data: bytes, bounds: PictureBounds) -> Image.Image:
    """An RGB picture of its own size, by the rules of this module.

    Raises:
        PictureError: it is refused, with the reason.
    """
    with _opened(data, bounds) as image:
        orientation = _orientation(image)
        rgb = _to_rgb(image, depth=data[24] if image.format == "PNG" else 8)
    return _turned(rgb, orientation)


def upright(image: Image.Image) -> Image.Image:
    """The picture as its EXIF orientation says, which a PNG made of it does not say any more."""
    return _turned(image, _orientation(image))


def size_of(data: bytes, bounds: PictureBounds) -> tuple[int, int]:
    """(width, height) of the picture that `decode` would return, of its header alone.

    Raises:
        PictureError: it is refused.
    """
    with _opened(data, bounds) as image:
        width, height = image.size
        # Of a PNG, Pillow decodes all pixels to look for a turn behind them.
        if image.format == "PNG" and not any(mark in data for mark in _PNG_TURNS):
            return width, height
        # The last four orientations lie on their side.
        return (height, width) if _orientation(image) > 4 else (width, height)


@contextmanager
def _opened(data: bytes, bounds: PictureBounds) -> Iterator[Image.Image]:
    """The file as Pillow opens it, within the bounds; what Pillow raises is a PictureError."""
    if len(data) > bounds.max_bytes:
        raise PictureError(f"the picture has {len(data)} bytes; at most {bounds.max_bytes}")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(image, bounds)
            yield image
    except PictureError:
        raise
    except UnidentifiedImageError as e:
        raise PictureError("the picture is not a readable PNG, JPEG, WebP or GIF") from e
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise PictureError(f"the picture has more than {bounds.max_pixels} pixels") from e
    except Exception as e:  # Pillow's decoders raise a dozen types on damaged files
        raise PictureError(f"the picture is damaged: {e or type(e).__name__}") from e


def _check_size(image: Image.Image, bounds: PictureBounds) -> None:
    width, height = image.size
    if min(width, height) < 1:
        raise PictureError(f"the picture is {width}x{height}; it has no pixels")
    if max(width, height) > bounds.max_side:
        raise PictureError(
            f"the picture is {width}x{height}; a side has at most {bounds.max_side} pixels"
        )
    if width * height > bounds.max_pixels:
        raise PictureError(
            f"the picture is {width}x{height}, {width * height} pixels; at most {bounds.max_pixels}"
        )


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - a broken EXIF block says nothing; the picture is beside it
        return 1


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    turned = _TRANSPOSE.get(orientation)
    return image if turned is None else image.transpose(turned)


def _to_rgb(image: Image.Image, *, depth: int) -> Image.Image:
    """`depth`: bits of a channel in the file."""
    image.load()
    key = image.info.get("transparency")
    if image.mode == "L" and isinstance(key, int) and depth < 8:
        # Pillow scales the pixels of 2 and 4 bits to 8, but not this value.
        image.info["transparency"] = key * 255 // (2**depth - 1)
    if image.mode.startswith("I;16"):
        values = np.asarray(image).astype(np.uint16)
        grey = (values >> 8).astype(np.uint8)
        if isinstance(key, int):
            grey[values == key] = 255
        return Image.fromarray(grey).convert("RGB")
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"):
        raise PictureError(f"the picture has pixels of mode {image.mode!r}, which are not read")
    if image.mode == "RGB" and key is not None and depth == 16:
        raise PictureError("the picture is 16-bit RGB with a transparent colour, which is not read")
    if image.mode in ("LA", "PA", "RGBA") or key is not None:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    # A copy, even of RGB: the file behind it is closed.
    return image.convert("RGB")

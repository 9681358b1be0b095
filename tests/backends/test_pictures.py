"""Canonical pictures: each hostile or odd file is read by the stated rules or refused with its
reason, and what was made is what the model's own processor makes of it."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from stepwell.backends.engines.embedded.vision import PictureStore
from stepwell.backends.errors import PictureError
from stepwell.backends.pictures import (
    PictureBounds,
    PictureProcessor,
    decode,
    no_pictures,
    size_of,
)
from tests.vision_model import make_vision_model, png

BOUNDS = PictureBounds()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def processor(folder: Path) -> PictureProcessor:
    found = PictureProcessor.of(folder)
    assert found is not None
    return found


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def plain(color: Any = (200, 30, 60), mode: str = "RGB", size: tuple[int, int] = (64, 48)) -> Any:
    return Image.new(mode, size, color)


def png_of(width: int, height: int, depth: int, kind: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG by hand: of modes that Pillow does not write, and of sizes that it would not."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    body = b"".join(chunk(c[:4], c[4:]) for c in chunks)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + body
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def animated(format: str) -> bytes:
    first, second = plain((255, 0, 0)), plain((0, 0, 255))
    return saved(
        first, format, save_all=True, append_images=[second], duration=50, loop=0, lossless=True
    )


def turned(orientation: int) -> bytes:
    """Red on the left and blue on the right, as stored."""
    image = plain((255, 0, 0), size=(80, 40))
    image.paste((0, 0, 255), (40, 0, 80, 40))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, "PNG", exif=exif)


def broken_exif() -> bytes:
    data = saved(plain(), "JPEG", quality=100, subsampling=0)
    junk = b"Exif\x00\x00" + b"\xff" * 40
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(junk) + 2) + junk + data[2:]


def palette(**options: Any) -> bytes:
    image = Image.new("P", (64, 48), 0)
    image.putpalette([10, 200, 30, 90, 90, 90])
    return saved(image, **options)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "not a readable"),
    "text": (lambda: b"hello, I am a picture", "not a readable"),
    "html": (lambda: b"<html><img src=x></html>", "not a readable"),
    "svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not a readable"),
    "bmp": (lambda: saved(plain(), "BMP"), "not a readable"),
    "tiff": (lambda: saved(plain(), "TIFF"), "not a readable"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable"),
    "png's signature alone": (lambda: png()[:8], "not a readable"),
    "png cut in its pixels": (lambda: png(256, 256)[:-400], "damaged"),
    "png of a wrong checksum": (lambda: png()[:29] + bytes(4) + png()[33:], "not a readable"),
    "png of no pixels": (lambda: png_of(0, 0, 8, 2, b""), "no"),
    "jpeg cut in its pixels": (lambda: saved(plain(size=(512, 512)), "JPEG")[:700], "damaged"),
    "webp cut": (lambda: saved(Image.effect_noise((256, 256), 90), "WEBP")[:500], "damaged"),
    "gif cut": (lambda: saved(Image.effect_noise((256, 256), 90), "GIF")[:900], "damaged"),
    "bomb of 169 Mpx": (lambda: png_of(13_000, 13_000, 1, 0, bytes(1626 * 13_000)), "at most 4000"),
    "bomb of 2 Gpx": (lambda: png_of(46_000, 46_000, 1, 0, bytes(100)), "more than"),
    "side of 65535": (lambda: png_of(65_535, 1, 8, 0, bytes(65_536)), "a side has at most"),
    "too many bytes": (lambda: png() + bytes(BOUNDS.max_bytes), "bytes; at most"),
    "16-bit RGB with a transparent colour": (
        lambda: png_of(1, 1, 16, 2, bytes(7), b"tRNS" + bytes(6)),
        "16-bit RGB",
    ),
}

WHITE, BLACK = (255, 255, 255), (0, 0, 0)
READ: dict[str, tuple[Callable[[], bytes], tuple[int, int, int]]] = {
    "grey": (lambda: saved(plain(77, "L")), (77, 77, 77)),
    "one bit": (lambda: saved(plain(1, "1")), WHITE),
    "16-bit grey": (
        lambda: saved(Image.fromarray(np.full((48, 64), 30_000, np.uint16))),
        (117, 117, 117),
    ),
    "16-bit grey with its value transparent": (
        lambda: png_of(1, 1, 16, 0, b"\x00\x75\x30", b"tRNS\x75\x30"),
        WHITE,
    ),
    "2-bit grey with its value transparent": (
        lambda: png_of(1, 1, 2, 0, b"\x00\x40", b"tRNS\x00\x01"),
        WHITE,
    ),
    "4-bit grey with its value transparent": (
        lambda: png_of(1, 1, 4, 0, b"\x00\x30", b"tRNS\x00\x03"),
        WHITE,
    ),
    "4-bit grey with another value transparent": (
        lambda: png_of(1, 1, 4, 0, b"\x00\x50", b"tRNS\x00\x00"),
        (85, 85, 85),
    ),
    "16-bit RGB": (lambda: png_of(1, 1, 16, 2, b"\x00\x75\x30\x10\xff\x00\x01"), (117, 16, 0)),
    "palette": (palette, (10, 200, 30)),
    "palette with its colour transparent": (lambda: palette(transparency=0), WHITE),
    "hidden colours": (lambda: saved(plain((9, 99, 199, 0), "RGBA")), WHITE),
    "half transparent": (lambda: saved(plain((0, 0, 0, 128), "RGBA")), (127, 127, 127)),
    "grey with alpha": (lambda: saved(plain((0, 51), "LA")), (204, 204, 204)),
    "transparent colour": (lambda: saved(plain(), transparency=(200, 30, 60)), WHITE),
    "CMYK": (lambda: saved(plain((0, 255, 255, 0), "CMYK"), "JPEG", quality=100), (255, 0, 0)),
    "animated gif": (lambda: animated("GIF"), (255, 0, 0)),
    "animated png": (lambda: animated("PNG"), (255, 0, 0)),
    "animated webp": (lambda: animated("WEBP"), (255, 0, 0)),
    "webp with alpha": (lambda: saved(plain((1, 2, 3, 0), "RGBA"), "WEBP", lossless=True), WHITE),
    "png of fewer rows than it says": (lambda: png_of(64, 64, 8, 2, bytes(193)), BLACK),
    "broken EXIF": (broken_exif, (200, 30, 60)),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_picture_is_refused_with_its_reason(
    name: str, processor: PictureProcessor
) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(PictureError, match=reason):
        processor.canonical(make())


@pytest.mark.parametrize("name", READ)
def test_an_odd_picture_is_read_by_the_stated_rules(name: str, processor: PictureProcessor) -> None:
    make, expected = READ[name]
    found = np.asarray(decode(make(), BOUNDS)).reshape(-1, 3).astype(int)
    assert np.abs(found - np.array(expected)).max() <= (2 if name in ("broken EXIF", "CMYK") else 0)
    assert processor.canonical(make()).n_tokens >= 4


def lying(where: str) -> bytes:
    """A PNG of 64 x 48 that lies on its side, as a chunk in front of the pixels or behind says."""
    image = plain()
    if where == "xmp":
        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", '<a tiff:Orientation="6"/>')
        return saved(image, pnginfo=info)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(image, exif=exif)
    at = data.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(data[at : at + 4])
    return data if where == "front" else data[:at] + data[end:-12] + data[at:end] + data[-12:]


@pytest.mark.parametrize("where", ["front", "behind", "xmp"])
def test_the_size_of_a_png_is_that_of_its_turn_wherever_it_says_so(where: str) -> None:
    data = lying(where)
    assert decode(data, BOUNDS).size == size_of(data, BOUNDS) == (48, 64)


def test_the_size_of_a_png_is_known_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of screenshots is measured at each start."""
    loaded: list[Any] = []
    monkeypatch.setattr(PngImageFile, "load", lambda image: loaded.append(image))
    assert size_of(saved(plain()), BOUNDS) == (64, 48)
    assert not loaded


def test_pictures_are_turned_as_their_exif_says() -> None:
    for orientation in range(1, 9):
        image = decode(turned(orientation), BOUNDS)
        assert image.size == ((80, 40) if orientation < 5 else (40, 80))
        corner = (0, 0, 255) if orientation in (2, 3, 7, 8) else (255, 0, 0)
        assert image.getpixel((1, 1)) == corner, orientation


def test_a_picture_longer_than_its_bound_is_refused(processor: PictureProcessor) -> None:
    with pytest.raises(PictureError, match="at most 200 times"):
        processor.canonical(saved(plain(size=(4000, 3))))


def test_the_processor_changes_nothing_of_a_canonical_picture(
    folder: Path, processor: PictureProcessor
) -> None:
    own: Any = AutoImageProcessor.from_pretrained(folder)
    draw = np.random.default_rng(0)
    for size in [
        (56, 56),
        (1, 1),
        (1280, 800),
        (3, 500),
        (777, 13),
        *draw.integers(1, 900, (20, 2)),
    ]:
        width, height = map(int, size)
        if max(width, height) > 200 * min(width, height):
            continue
        made = processor.canonical(png(width, height, seed=width))
        again = processor.canonical(made.png)
        assert again.digest == made.digest
        assert again[2:] == made[2:]
        assert smart_resize(made.height, made.width, 28, 56 * 56, 28 * 28 * 64) == (
            made.height,
            made.width,
        )
        image = Image.open(io.BytesIO(made.png))
        theirs = own(images=image, return_tensors="np")
        ours = processor.features([made.png])
        assert np.array_equal(ours["pixel_values"], theirs["pixel_values"])
        assert np.array_equal(ours["image_grid_thw"], theirs["image_grid_thw"])
        assert ours["image_grid_thw"].prod() // 4 == made.n_tokens


def test_a_canonical_picture_may_be_longer_than_the_file_that_it_was_made_of(
    processor: PictureProcessor,
) -> None:
    """A photograph is several times as long as a PNG."""
    noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    photo = saved(Image.fromarray(noise), "JPEG", quality=50)
    own = replace(processor, bounds=PictureBounds(max_bytes=len(photo)))
    made = own.canonical(photo)
    assert len(made.png) > 3 * len(photo)
    assert own.features([made.png])["image_grid_thw"].prod() // 4 == made.n_tokens
    (held,) = PictureStore(own).take([base64.b64encode(made.png).decode()], "")
    assert held.digest == made.digest


def test_a_picture_made_for_another_model_is_refused(processor: PictureProcessor) -> None:
    with pytest.raises(PictureError, match="not on the grid"):
        processor.features([png(60, 56)])


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_and_features_are_those_of_the_model(kind: Any, tmp_path: Path) -> None:
    folder = make_vision_model(tmp_path, kind=kind)
    processor = PictureProcessor.of(folder)
    assert processor is not None
    model: Any = AutoModelForImageTextToText.from_pretrained(folder).eval()
    made = [processor.canonical(png(*size)) for size in ((100, 70), (300, 120), (56, 56))]
    ids, pictures = [1, 2, 3], []
    for picture in made:
        ids.append(processor.start_id)
        at = SimpleNamespace(at=len(ids), **picture._asdict())
        ids += [processor.placeholder_id] * picture.n_tokens + [processor.end_id, 7]
        pictures.append(at)
    features = {
        name: torch.from_numpy(value)
        for name, value in processor.features([p.png for p in made]).items()
    }
    tokens = torch.tensor([ids])
    kinds = (tokens == processor.placeholder_id).int()
    theirs, _ = model.model.get_rope_index(tokens, kinds, features["image_grid_thw"])
    ours = processor.positions(ids, pictures)
    assert np.array_equal(ours, theirs[:, 0].numpy())
    for end in range(len(ids)):  # a chunk may end inside a picture
        assert np.array_equal(processor.positions(ids[:end], pictures)[:, :end], ours[:, :end])


def test_models_without_pictures_say_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert PictureProcessor.of(tmp_path) is None
    assert "text only" in no_pictures(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {}}')
    assert PictureProcessor.of(tmp_path) is None
    assert "'qwen3_vl' are not supported" in no_pictures(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    assert "preprocessor_config.json" in no_pictures(tmp_path)

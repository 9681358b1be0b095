"""Pictures in rows: `image_key`, and the `<image>` in a prompt that stands for each.

    row     {"prompt": "<image>Find x.", "images": [{"bytes": …}]}
    task    messages: [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}},
                {"type": "text", "text": "Find x."}]}]

A part `{"type": "image"}` of a message stands for a picture like `<image>`, and a part `image_url`
with a data URL is one of its own. A picture is a path (from the working folder, or beside the
file), a data URL, bytes, an object with `bytes` or `path`, as `datasets` stores images, or a PIL
image. Bytes go to the agent as they are; the gateway reads them by its rules.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stepwell.backends.errors import PictureError
from stepwell.backends.pictures import from_base64, upright
from stepwell.trainer.data.columns import refuse_videos
from stepwell.trainer.errors import DataError

PLACEHOLDER = "<image>"
_DATA_URL = re.compile(r"data:image/[^,]*;base64(;[^,]*)?,", re.IGNORECASE)
_FORMATS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


def with_pictures(
    prompt: str | list[dict[str, Any]], value: Any, folder: Path | None, where: str
) -> str | list[dict[str, Any]]:
    """The prompt with the pictures in `value` in the places of its `<image>`.

    Args:
        folder: where paths may begin, beside the working folder.

    Raises:
        DataError: there are more or fewer of one than of the other, or a picture cannot be read.
    """
    pictures = [] if value is None else list(value) if _is_list(value) else [value]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    places = [n for m in messages for n in _places(m.get("content"), where)]
    n = sum(places)
    if n != len(pictures):
        raise DataError(
            f"{where} has {len(pictures)} pictures and {n} {PLACEHOLDER} in its prompt; write one "
            "for each"
        )
    if not n:
        return prompt
    urls = iter([_url(p, folder, f"{where}: picture {i}") for i, p in enumerate(pictures)])
    return [{**m, "content": _parts(m.get("content"), urls)} for m in messages]


def is_picture(part: Any) -> bool:
    """Return whether a part of a message is a picture with its bytes."""
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def picture_bytes(part: Mapping[str, Any]) -> bytes:
    """Bytes of a part that `with_pictures` made.

    Raises:
        DataError: a row's own data URL has them in another form than base64.
    """
    url = _url_of(part)
    try:
        if not _DATA_URL.match(url):
            raise PictureError("its data URL does not say so")
        return from_base64(url.partition(",")[2].encode(errors="replace"))
    except PictureError as e:
        raise DataError(f"the picture {url!r:.80} is no base64 ({e}); store its bytes") from e


def _url_of(part: Mapping[str, Any]) -> Any:
    """The url of a part `image_url`, which the gateway takes as a text, too."""
    url = part.get("image_url")
    return url.get("url") if isinstance(url, Mapping) else url


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or type(value).__name__ == "ndarray"


def _places(content: Any, where: str) -> Iterator[int]:
    """Number of pictures that each part of a message stands for.

    Raises:
        DataError: a part is a video, a sound, or a picture at an address.
    """
    for part in content if isinstance(content, list) else [content]:
        refuse_videos(part, where)
        if is_picture(part):
            url = _url_of(part)
            if not isinstance(url, str) or not url.startswith("data:"):
                raise DataError(
                    f"{where} has a picture {url!r:.80}; addresses are not read: store its bytes"
                )
            _check_data_url(url, where)
            yield 0
        elif _is_place(part):
            yield 1
        else:
            text = part.get("text") if isinstance(part, dict) else part
            yield text.count(PLACEHOLDER) if isinstance(text, str) else 0


def _check_data_url(url: str, where: str) -> None:
    """
    Raises:
        DataError: the gateway would refuse it in each rollout.
    """
    if not _DATA_URL.match(url):
        raise DataError(
            f"{where}: the picture {url!r:.80} is no data:image/…;base64,…; store its bytes"
        )


def _is_place(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def _parts(content: Any, urls: Iterator[str]) -> Any:
    """Parts of a message; the text alone where it has no picture."""
    found: list[Any] = []
    is_text = True
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if _is_place(part):
            text = PLACEHOLDER
        if not isinstance(text, str) or PLACEHOLDER not in text:
            found.append(part)
            continue
        is_text = False
        for i, piece in enumerate(re.split(PLACEHOLDER, text)):
            if i:
                found.append({"type": "image_url", "image_url": {"url": next(urls)}})
            if piece:
                found.append({"type": "text", "text": piece})
    return content if is_text else found


def _url(picture: Any, folder: Path | None, where: str) -> str:
    if isinstance(picture, str) and picture.startswith("data:"):
        _check_data_url(picture, where)
        return picture
    data = _bytes(picture, folder, where)
    kind = next((kind for head, kind in _FORMATS.items() if data.startswith(head)), None)
    if kind is None:
        raise DataError(f"{where} is no PNG, JPEG, WebP or GIF")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _bytes(picture: Any, folder: Path | None, where: str) -> bytes:
    if isinstance(picture, Mapping):
        data = picture.get("bytes")
        path = picture.get("path") or picture.get("image") or picture.get("url")
        return _bytes(data if data else path, folder, where)
    if isinstance(picture, bytes | bytearray):
        return bytes(picture)
    if hasattr(picture, "save"):
        out = io.BytesIO()
        try:
            upright(picture).save(out, "PNG")
        except OSError as e:
            raise DataError(f"{where} cannot be stored as PNG ({e}); convert it to RGB") from e
        return out.getvalue()
    if not isinstance(picture, str):
        raise DataError(
            f"{where} is {picture!r:.80}; it is a path, a data URL, bytes, or an object with bytes "
            "or path"
        )
    if "://" in (path := picture.removeprefix("file://")):
        raise DataError(f"{where} is {picture!r:.80}; addresses are not read: store its bytes")
    places = [Path(path)] if folder is None else [Path(path), folder / path]
    for place in places:
        try:
            return place.read_bytes()
        except OSError:
            continue
    raise DataError(
        f"{where} is {picture!r:.80}, which cannot be read from "
        f"{' or '.join(str(place.parent) for place in places)}"
    )

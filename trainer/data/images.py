"""Pictures in rows: `image_key`, and the `<image>` in a prompt that stands for each.

    row     {"prompt": "<image>Find x.", "images": [{"bytes": …}]}
    task    messages: [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}},
                {"type": "text", "text": "Find x."}]}]

A picture is a path (from the working folder, or beside the file), a data URL, bytes, an object with
`bytes` or `path`, as `datasets` stores images, or a PIL image. Bytes go to the agent as they are;
the gateway reads them by its rules.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepwell.trainer.errors import DataError

PLACEHOLDER = "<image>"
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
    n = sum(text.count(PLACEHOLDER) for m in messages for text in _texts(m.get("content")))
    if n != len(pictures):
        raise DataError(
            f"{where} has {len(pictures)} pictures and {n} {PLACEHOLDER} in its prompt; write one "
            "for each"
        )
    if not n:
        return prompt
    urls = iter([_url(p, folder, f"{where}: picture {i}") for i, p in enumerate(pictures)])
    return [{**m, "content": _parts(m.get("content"), urls)} for m in messages]


def picture_bytes(part: Mapping[str, Any]) -> bytes:
    """Bytes of a part that `with_pictures` made.

    Raises:
        DataError: a row's own data URL has them in another form than base64.
    """
    url = part["image_url"]["url"]
    try:
        return base64.b64decode(url.partition(",")[2])
    except ValueError as e:
        raise DataError(f"the picture {url!r:.80} is no base64 ({e}); store its bytes") from e


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) or type(value).__name__ == "ndarray"


def _texts(content: Any) -> Iterable[str]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _parts(content: Any, urls: Iterator[str]) -> Any:
    """Parts of a message; the text alone where it has no picture."""
    if not any(PLACEHOLDER in text for text in _texts(content)):
        return content
    found: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            found.append(part)
            continue
        for i, piece in enumerate(re.split(PLACEHOLDER, text)):
            if i:
                found.append({"type": "image_url", "image_url": {"url": next(urls)}})
            if piece:
                found.append({"type": "text", "text": piece})
    return found


def _url(picture: Any, folder: Path | None, where: str) -> str:
    if isinstance(picture, str) and picture.startswith("data:"):
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
        picture.save(out, "PNG")
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

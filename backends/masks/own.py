"""Loss-mask generators of somebody's own, named by a configuration.

    package.module:Name  path/to/file.py:Name  path/to/file.py:Name(tokenizer_type)
        │
        ├─ a LossMaskGenerator                   built as Name(tokenizer, chat_template_kwargs)
        ├─ a class with get_loss_mask            slime's shape: Name(tokenizer[, tokenizer_type=…]),
        │                                        then get_loss_mask(messages[, tools])
        └─ a function                            Name(tokenizer, messages[, tools=…])
                                                 the last two return (token_ids [T], loss_mask [T])

A name is code that is loaded, so it comes from a configuration and from nowhere else. Does not own:
the built-in names (`__init__.py`).
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stepwell.backends.errors import MaskError
from stepwell.backends.masks.base import LossMaskGenerator, MaskedRow, Message, Tool, Turn
from stepwell.datapool.dotted import resolve
from stepwell.datapool.own_loop import ENDS

_PATH = re.compile(r"(?P<path>[^()]+[:.][^()]+?)(?:\((?P<type>[\w.-]+)\))?")


def is_path(name: str) -> bool:
    """Return true if `name` is the path of a generator and not a built-in name."""
    return _PATH.fullmatch(name) is not None


def load_own(name: str) -> Callable[[Any, Mapping[str, Any]], LossMaskGenerator]:
    """Return what builds the generator that `name` leads to, given a tokenizer and arguments of
    the chat template.

    Raises:
        MaskError: it cannot be imported, or is neither class nor function of a known shape.
    """
    if (match := _PATH.fullmatch(name)) is None:
        raise MaskError(f"{name!r} is no path; name package.module:Name or path/to/file.py:Name")
    path, tokenizer_type = match["path"], match["type"]
    try:
        found = resolve(path)
    except Exception as e:  # importing it runs foreign code
        raise MaskError(
            f"{path!r} cannot be imported ({type(e).__name__}: {e!s:.200}); name "
            "package.module:Name or path/to/file.py:Name"
        ) from e
    is_class = isinstance(found, type)
    in_slimes_shape = is_class and callable(getattr(found, "get_loss_mask", None))
    if tokenizer_type is not None and not in_slimes_shape:
        raise MaskError(
            f"{path!r} is given the tokenizer_type {tokenizer_type!r}, but is no class with "
            "get_loss_mask; leave the brackets out"
        )
    if is_class and issubclass(found, LossMaskGenerator):
        return lambda tokenizer, kwargs: _built(path, found, tokenizer, kwargs)
    if in_slimes_shape:
        more = {} if tokenizer_type is None else {"tokenizer_type": tokenizer_type}
        return lambda tokenizer, kwargs: _OwnMasks(
            path, _built(path, found, _Tokenizer(tokenizer, kwargs), **more).get_loss_mask
        )
    if inspect.isfunction(found):
        return lambda tokenizer, kwargs: _OwnMasks(path, found, _Tokenizer(tokenizer, kwargs))
    raise MaskError(
        f"{path!r} is {found!r:.80}; name a LossMaskGenerator, a class with "
        "get_loss_mask(messages), or a function (tokenizer, messages)"
    )


def _built(path: str, kind: type, *args: Any, **kwargs: Any) -> Any:
    try:
        return kind(*args, **kwargs)
    except MaskError:
        raise
    except ENDS:
        raise
    except BaseException as e:  # foreign code
        raise MaskError(f"{path!r} cannot be built ({type(e).__name__}: {e!s:.200})") from e


class _OwnMasks(LossMaskGenerator):
    """Rows of a function that returns ids and mask: one row, of a turn per run of ones."""

    def __init__(self, path: str, function: Callable[..., Any], *first: Any) -> None:
        self._path = path
        self._function = function
        self._first = first
        parameters = inspect.signature(function).parameters
        self._takes_tools = "tools" in parameters or any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        )
        self._one_at_a_time = threading.Lock()  # whoever wrote it thought of one thread

    def rows(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> list[MaskedRow]:
        if tools and not self._takes_tools:
            raise MaskError(
                f"the conversation has tools, which {self._path!r} is not given; add a parameter "
                "tools to it"
            )
        given = {"tools": list(tools) if tools else None} if self._takes_tools else {}
        try:
            with self._one_at_a_time:
                found = self._function(*self._first, [dict(m) for m in messages], **given)
        except MaskError:
            raise
        except ENDS:
            raise
        except BaseException as e:  # foreign code
            raise MaskError(f"{self._path!r} failed ({type(e).__name__}: {e!s:.200})") from e
        try:
            ids, mask = (np.asarray(column) for column in found)
            is_whole = ids.dtype.kind in "iu" and ids.ndim == 1 and ids.shape == mask.shape
            is_whole &= bool(np.isin(mask, (0, 1)).all()) and ids.min(initial=0) >= 0
        except (TypeError, ValueError):
            is_whole = False
        if not is_whole:
            raise MaskError(
                f"{self._path!r} returned {found!r:.80}; return (token_ids, loss_mask), two lists "
                "of one length, of ids and of 0 and 1"
            )
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        if not len(edges) or edges[0] == 0:
            what = "begins with 1, before which there is no context" if len(edges) else "has no 1"
            raise MaskError(f"the loss mask that {self._path!r} returned {what}")
        turns = tuple(
            Turn(None, int(start), int(end), has_loss=True) for start, end in edges.reshape(-1, 2)
        )
        until = turns[-1].end
        return [MaskedRow(ids[:until].astype(np.int32), mask[:until].astype(np.int8), turns)]


class _Tokenizer:
    """A tokenizer as generators of slime's shape know it: `apply_chat_template` applies the
    configured arguments, and returns a list of ids as it did before transformers 5."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._arguments = {"return_dict": False, **arguments}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer.apply_chat_template(*args, **{**self._arguments, **kwargs})

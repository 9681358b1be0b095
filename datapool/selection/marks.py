"""What people say of groups and trajectories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Final, cast

from stepwell.datapool.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Marks:
    """What people say of a group or of a trajectory. The default says nothing.

    Raises:
        InvalidRequestError: a field is of another type, or `quality` is not finite.
    """

    trainable: bool | None = None
    """False: not served until this changes. None: nobody has said."""
    quality: float | None = None
    """Any finite scale; `min_quality` of the channel reads it."""
    tags: frozenset[str] = frozenset()
    """`require_tags` and `exclude_tags` of the channel read them."""
    note: str = ""
    """For people; nothing reads it."""

    def __post_init__(self) -> None:
        quality, tags = self.quality, cast(Any, self.tags)
        if not isinstance(self.trainable, bool | None):
            raise _malformed("trainable", self.trainable, "True, False, or None for not marked")
        if quality is not None:
            number = isinstance(quality, int | float) and not isinstance(quality, bool)
            if not number or not math.isfinite(quality):
                raise _malformed("quality", quality, "a finite number, or None for not marked")
            object.__setattr__(self, "quality", float(quality))
        if isinstance(tags, str) or not isinstance(tags, Iterable):
            raise _malformed("tags", tags, "a list of strings")
        tags = list(tags)
        for tag in tags:
            if not isinstance(tag, str) or not tag:
                raise InvalidRequestError(
                    f"tags holds {tag!r:.80}; pass strings that are not empty"
                )
        object.__setattr__(self, "tags", frozenset(tags))
        if not isinstance(self.note, str):
            raise _malformed("note", self.note, "a string")

    def merged(self, update: Mapping[str, Any]) -> Marks:
        """These marks with the fields in `update` replaced; None clears one (RFC 7396).

        Raises:
            InvalidRequestError: no such field, or a malformed value.
        """
        known = [f.name for f in fields(self)]
        for name in update:
            if name not in known:
                near = get_close_matches(str(name), known, 1, 0.0)[0]
                raise InvalidRequestError(
                    f"marks have no field {name!r} (did you mean {near!r}?); "
                    f"they have {', '.join(known)}"
                )
        return replace(
            self, **{k: getattr(UNMARKED, k) if v is None else v for k, v in update.items()}
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON values only; `UNMARKED.merged` of it gives the same marks."""
        return asdict(self) | {"tags": sorted(self.tags)}


def _malformed(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r:.80}; pass {wanted}")


UNMARKED: Final = Marks()

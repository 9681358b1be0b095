"""This module turns a trajectory into rows of columns, and back exactly, so that `datasets` can
train on a file and a pool can take it back.

    ExportedTrajectory ──to_rows──► row, row, …  (one per branch) ──from_rows──► ExportedTrajectory

One row per *branch* (`datapool/branches.py`) of the tree that its steps form::

    steps        s0: P0 R0            s1: P0 R0 U1 R1         s2: P0 R0 U2 R2
    input_ids                         P0 R0 U1 R1             P0 R0 U2 R2
    loss_mask                         .. ## .. ##             .. .. .. ##      R0 is trained once
    log_probs    0 elsewhere             ## .. ##                ## .. ##      also where masked
    versions     -1 elsewhere            ## .. ##                ## .. ##

A step that is on several branches is trained in the first one, in order of the leaves'
`step_index`; so the sum of `loss_mask` over a trajectory is its number of response tokens.
`loss_mask` does not look at `state`: whoever trains on the rows filters out `open` ones if need be.

Unknown is null, never 0: `log_probs` is null as a whole unless all responses of the row have
theirs, so 0 stands only where nothing was sampled; if some have, they are in `steps[].log_probs`.
`images` has the row's pictures in the order of their placeholders, as bytes or as paths from the
file's folder. What has no fixed type is text: JSON, with bytes and arrays as
`{"__stepwell__": kind, "value": …}` (base64; of arrays the `.npy` format), and so a mapping that
has integers or this very key among its keys (a list of its items). Nothing is pickled.

`schema()` names and types the columns of both formats. `steps` is the table of the row's steps with
everything a Step has, and the only thing that reading back looks at, beside `input_ids`,
`log_probs` and what is of the trajectory. Owns the row form. Does not own the file (`export.py`).
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]

from stepwell.datapool.branches import branches
from stepwell.datapool.errors import DamagedFileError, ExportError
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import Step, Trajectory, VersionSpan

SCHEMA_VERSION = 3
"""Raised when a reader of the version before would misread the rows."""

Row: TypeAlias = dict[str, Any]
PlacedRow: TypeAlias = tuple[str, Row]
"""File and line or row, for messages; and what stands there."""

TOKEN_COLUMNS = ("input_ids", "loss_mask", "log_probs", "versions")
_OF_STEPS = (
    "step_index",
    "parent_index",
    "policy_version",
    "finish_reason",
    "reward",
    "is_last",
)
"""Columns of a step that are a field of `Step` as it is."""
_OF_TRAJECTORIES = ("channel", "state", "reason", "group_state", "outcome", "n_rollouts")
"""The same of a row, and of `ExportedTrajectory`."""


def schema() -> Any:
    """The columns, as a `pyarrow.Schema`.

    `load_dataset("json", …, features=Features.from_arrow_schema(schema()))` gives a JSONL file the
    exact types of Parquet; without, JSON's integers are 64 bits wide and its floats double, and a
    column that is null all through the first 10 MB of a file has no type.
    """
    text, whole, number = pa.string(), pa.int64(), pa.float64()
    span = pa.struct(dict.fromkeys(("version", "start", "end"), whole))
    picture = {"digest": text, **dict.fromkeys(("width", "height", "at", "n_tokens"), whole)}
    picture["sha256"] = text  # of the PNG
    image = {"bytes": pa.binary(), "path": text}
    origin = {"stepwell_version": text, "schema_version": whole}
    origin |= {"exported_at": number, "source": text}
    step = {
        "step_index": whole,
        "parent_index": whole,  # as stored; null: a root
        "prompt_start": pa.int32(),  # the prompt is input_ids[:response_start]; from here it is new
        "response_start": pa.int32(),
        "response_end": pa.int32(),
        "trained": pa.bool_(),  # whether loss_mask is 1 there
        "policy_version": whole,
        "version_spans": pa.list_(span),  # relative to the response
        "finish_reason": text,
        "reward": number,
        "log_probs": pa.list_(pa.float32()),  # only where the row's are null
        "is_last": pa.bool_(),
        "pictures": pa.list_(pa.struct(picture)),  # of the new prompt tokens
        **dict.fromkeys(("metadata", "multi_modal_data", "routed_experts"), text),
    }
    columns = {
        **dict.fromkeys(("channel", "prompt_uid", "trajectory_uid"), text),
        "attempt": whole,
        "position": whole,  # of the trajectory in the file, from 0
        "branch": whole,  # of the row in the trajectory, from 0
        "n_branches": whole,
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "log_probs": pa.list_(pa.float32()),
        "versions": pa.list_(whole),
        "reward": number,  # of the trajectory, also of steps that are not in this row
        "steps": pa.list_(pa.struct(step)),  # root to leaf
        "images": pa.list_(
            pa.struct(image)
        ),  # of the row's prompts, as `datasets.Image` reads them
        **dict.fromkeys(("state", "reason", "group_state"), text),
        "outcome": number,
        "n_rollouts": whole,
        **dict.fromkeys(("metadata", "marks", "group_metadata", "group_marks"), text),
        "provenance": pa.struct(origin),
    }
    return pa.schema(list(columns.items()))


COLUMNS: tuple[str, ...] = tuple(schema().names)


def provenance(source: str) -> dict[str, Any]:
    """Return the origin of a file. `source`: the writer's name for itself."""
    try:
        release = version("stepwell")
    except PackageNotFoundError:
        release = "unknown"
    return {
        "stepwell_version": release,
        "schema_version": SCHEMA_VERSION,
        "exported_at": time.time(),
        "source": source,
    }


# -- values of no fixed type -------------------------------------------------------------------

TAG = "__stepwell__"
"""Key of a value that JSON has no word for."""


def dumps(value: Any, what: str) -> str | None:
    """`value` as text, None as it is; `what` it is, for messages.

    Raises:
        ExportError: it holds something that cannot be carried, or itself.
    """
    try:
        if value is None:
            return None
        carried = value if _is_carried(value) else _as_items(value)
        # ASCII, so that a lone surrogate in an agent's text cannot break the file's UTF-8.
        return json.dumps(carried, separators=(",", ":"), default=_tagged)
    except (TypeError, ValueError, RecursionError) as e:
        raise ExportError(
            f"{what} is {value!r:.120}, which no file can carry ({e}); use JSON values, bytes or "
            "NumPy arrays of numbers or strings"
        ) from e


def _is_carried(value: Any) -> bool:
    """False if JSON, or `loads`, would make another mapping of one."""
    if isinstance(value, dict):
        return TAG not in value and all(
            type(key) is str and _is_carried(item) for key, item in value.items()
        )
    return not isinstance(value, list | tuple) or all(map(_is_carried, value))


def _as_items(value: Any) -> Any:
    """The value with each mapping of which JSON, or `loads`, would make another one as its items:
    agents write what keys they like."""
    if isinstance(value, list | tuple):
        return [*map(_as_items, value)]
    if not isinstance(value, dict):
        return value
    items = {key: _as_items(item) for key, item in value.items()}
    is_ours = all(isinstance(key, str | int) for key in value)
    if is_ours and (TAG in value or not all(isinstance(key, str) for key in value)):
        return {TAG: "mapping", "value": [*items.items()]}
    return items


def _tagged(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes | bytearray):
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) is np.ndarray:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, value, allow_pickle=False)
        return {TAG: "ndarray", "value": base64.b64encode(buffer.getbuffer()).decode()}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not supported")


def loads(text: str | None) -> Any:
    """Return the value that `dumps` was given."""
    return None if text is None else json.loads(text, object_hook=_untagged)


def _untagged(found: dict[str, Any]) -> Any:
    if TAG not in found:
        return found
    if found[TAG] == "mapping":
        return dict(found["value"])
    data = base64.b64decode(found["value"])
    if found[TAG] == "bytes":
        return data
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


# -- writing -----------------------------------------------------------------------------------


def named_image(digest: str) -> dict[str, Any]:
    """An entry of `images` that names a picture and has no bytes."""
    return {"bytes": None, "path": f"{digest}.png"}


def to_rows(
    exported: ExportedTrajectory,
    position: int,
    origin: Mapping[str, Any],
    image_of: Callable[[str], dict[str, Any]] = named_image,
) -> Iterator[Row]:
    """The branches of a trajectory, which is the `position`-th of the file.

    Args:
        image_of: a picture's entry in `images`, by digest.

    Raises:
        ExportError: it has a value that no row can carry.
    """
    trajectory, steps = exported.trajectory, exported.trajectory.steps
    owner = f"trajectory {trajectory.trajectory_uid!r}"
    paths = branches(steps)
    head = {
        **{name: getattr(exported, name) for name in _OF_TRAJECTORIES},
        "prompt_uid": trajectory.prompt_uid,
        "trajectory_uid": trajectory.trajectory_uid,
        "attempt": trajectory.attempt,
        "position": position,
        "n_branches": len(paths),
        "reward": trajectory.reward,
        "metadata": dumps(trajectory.metadata, f"{owner}: metadata"),
        **{
            name: dumps(getattr(exported, name), f"{owner}: {name}")
            for name in ("marks", "group_metadata", "group_marks")
        },
        "provenance": origin,
    }
    table = [_columns_of(step) for step in steps]
    sums = {d: hashlib.sha256(png).hexdigest() for d, png in exported.pictures.items()}
    done: set[int] = set()
    for branch, path in enumerate(paths):
        tokens, places = _along(steps, path, done)
        done.update(path)
        entries = [table[i] | place for i, place in zip(path, places, strict=True)]
        for i, entry in zip(path, entries, strict=True):
            new = [p for p in steps[i].pictures if p.at >= entry["prompt_start"]]
            entry["pictures"] = [p._asdict() | {"sha256": sums.get(p.digest)} for p in new]
        images = [image_of(picture.digest) for picture in steps[path[-1]].pictures]
        yield head | tokens | {"branch": branch, "steps": entries, "images": images}


def _columns_of(step: Step) -> dict[str, Any]:
    owner = step.label
    return {
        **{name: getattr(step, name) for name in _OF_STEPS},
        "version_spans": [
            {"version": s.version, "start": s.start, "end": s.end} for s in step.version_spans
        ],
        **{
            name: dumps(getattr(step, name), f"{owner}: {name}")
            for name in ("metadata", "multi_modal_data", "routed_experts")
        },
    }


def _along(
    steps: Sequence[Step], path: Sequence[int], done: Collection[int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the columns that follow from the steps of a branch: those of its row, and of each
    step."""
    leaf = steps[path[-1]]
    mask = np.zeros(leaf.n_tokens, np.int8)
    log_probs = np.zeros(leaf.n_tokens, np.float32)
    versions = np.full(leaf.n_tokens, -1, np.int64)
    is_known = all(steps[i].rollout_log_probs is not None for i in path)
    places: list[dict[str, Any]] = []
    end = 0
    for i in path:
        step, prompt_start, known = steps[i], end, steps[i].rollout_log_probs
        start, end = len(step.prompt_ids), step.n_tokens
        mask[start:end] = i not in done
        versions[start:end] = step.policy_version
        for span in step.version_spans:
            versions[start + span.start : start + span.end] = span.version
        if known is not None:
            log_probs[start:end] = known
        place = {"prompt_start": prompt_start, "response_start": start, "response_end": end}
        own = None if is_known or known is None else known.tolist()
        places.append({**place, "trained": i not in done, "log_probs": own})
    tokens = {
        "input_ids": leaf.token_ids,
        "loss_mask": mask,
        "log_probs": log_probs if is_known else None,
        "versions": versions,
    }
    return tokens, places


# -- reading -----------------------------------------------------------------------------------


def check_row(row: Mapping[str, Any], where: str) -> None:
    """
    Raises:
        ExportError: another schema, or a missing column.
    """
    if missing := sorted(set(COLUMNS).difference(row)):
        foreign = "was not exported by Stepwell: it " if "provenance" in missing else ""
        raise ExportError(
            f"{where} {foreign}lacks column {', '.join(missing)}; pass a file that `export` wrote, "
            "with all of its columns"
        )
    origin = row["provenance"]
    written = origin.get("schema_version") if isinstance(origin, Mapping) else origin
    if written != SCHEMA_VERSION:
        raise ExportError(
            f"{where}: schema_version is {written}, this release reads {SCHEMA_VERSION} only; "
            f"use Stepwell {origin and origin.get('stepwell_version')}, which wrote it"
        )


def by_trajectory(rows: Iterable[PlacedRow]) -> Iterator[list[PlacedRow]]:
    """The rows of each trajectory."""
    for _, together in groupby(rows, key=lambda r: (r[1]["position"], r[1]["trajectory_uid"])):
        yield list(together)


def from_rows(rows: Iterable[PlacedRow], folder: Path) -> Iterator[ExportedTrajectory]:
    """The trajectories that `to_rows` was given.

    Args:
        folder: of the file, from which the paths of pictures go.

    Raises:
        ExportError: a row of one is missing, or no trajectory can be made of them.
    """
    for branches_of_one in by_trajectory(rows):
        where, head = branches_of_one[0]
        if len(branches_of_one) != head["n_branches"]:
            raise ExportError(
                f"{where}: {len(branches_of_one)} of the {head['n_branches']} rows of trajectory "
                f"{head['trajectory_uid']!r} are here; the file was cut off or filtered by rows: "
                "keep all rows of a trajectory or none"
            )
        try:
            exported = _trajectory([row for _, row in branches_of_one], folder)
        except MALFORMED as e:
            raise malformed(where, e) from e
        yield exported


MALFORMED: Final = (
    *(AttributeError, LookupError, TypeError, ValueError, OverflowError),
    RecursionError,  # thousands of brackets
)
"""Errors that reading a row raises which nobody here wrote."""


def malformed(where: str, e: Exception) -> ExportError:
    return ExportError(f"{where} is malformed ({type(e).__name__}: {e}); export it again")


class _Pictures(Mapping[str, bytes]):
    """PNG by digest, read when it is asked for."""

    def __init__(self) -> None:
        self.images: dict[str, tuple[Path, bytes | None, str | None]] = {}
        """Path, bytes if they are in the file, and SHA-256."""

    def __getitem__(self, digest: str) -> bytes:
        path, data, known = self.images[digest]
        if data is None:
            try:
                data = path.read_bytes()
            except OSError as e:
                raise ExportError(f"picture {path} cannot be read ({e}); export it again") from e
        if hashlib.sha256(data).hexdigest() != known:
            raise DamagedFileError(f"picture {path} is not what was exported; export it again")
        return data

    def __iter__(self) -> Iterator[str]:
        return iter(self.images)

    def __len__(self) -> int:
        return len(self.images)


def _trajectory(rows: Sequence[Row], folder: Path) -> ExportedTrajectory:
    head = rows[0]
    found: dict[int, Step] = {}
    known = _Pictures()
    for row in rows:
        tokens, log_probs = np.asarray(row["input_ids"]), row["log_probs"]
        pictures: list[Picture] = []
        images = iter(row["images"] or ())
        for entry in row["steps"]:
            for each in entry["pictures"] or ():
                named = {name: each[name] for name in Picture._fields}
                pictures.append(Picture(**named))
                image = next(images, None)
                if image is None:
                    raise LookupError("a row has fewer images than pictures")
                if each["sha256"] is not None:
                    data = image["bytes"]
                    data = base64.b64decode(data) if isinstance(data, str) else data
                    known.images[each["digest"]] = folder / image["path"], data, each["sha256"]
            if entry["step_index"] not in found:
                found[entry["step_index"]] = _step(row, entry, tokens, log_probs, pictures)
    trajectory = Trajectory(
        head["trajectory_uid"],
        head["prompt_uid"],
        tuple(found[index] for index in sorted(found)),
        loads(head["metadata"]),
        head["attempt"],
    )
    others = {name: loads(head[name]) for name in ("marks", "group_metadata", "group_marks")}
    return ExportedTrajectory(
        trajectory=trajectory,
        pictures=known,
        **{name: head[name] for name in _OF_TRAJECTORIES},
        **others,
    )


def _step(
    row: Row,
    entry: Mapping[str, Any],
    tokens: npt.NDArray[Any],
    log_probs: Any,
    pictures: Sequence[Picture],
) -> Step:
    start, end = entry["response_start"], entry["response_end"]
    return Step(
        trajectory_uid=row["trajectory_uid"],
        prompt_uid=row["prompt_uid"],
        prompt_ids=tokens[:start],
        response_ids=tokens[start:end],
        rollout_log_probs=entry["log_probs"] if log_probs is None else log_probs[start:end],
        version_spans=tuple(VersionSpan(**span) for span in entry["version_spans"]),
        metadata=loads(entry["metadata"]),
        multi_modal_data=loads(entry["multi_modal_data"]),
        routed_experts=loads(entry["routed_experts"]),
        pictures=tuple(pictures),
        **{name: entry[name] for name in _OF_STEPS},
    )

"""Files of the archive: a row per trajectory, columnar, with a sealed footer.

    token_ids   prompt of each root, new ids, response ids of each step    a shared prefix once
    log_probs   of the responses of steps that have them                   byte-stream-split
    steps       list of structs: what else is known of each step           its text is in `messages`

    PAR1 │ row groups of about 8 MB │ footer: schema, statistics, `stepwell.seal`

The seal is the XXH3-128 of all bytes before the footer; the catalogue has that of the whole file.
DuckDB, pandas, polars and `datasets` read the files as they are. Owns the form. Does not own what a
trajectory is (`conversations.py`), nor names (`folder.py`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped,unused-ignore]
import pyarrow.compute as pc  # type: ignore[import-untyped,unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped,unused-ignore]
from xxhash import xxh3_128_hexdigest

from stepwell.datapool.codec import HEADER_BYTES, Headers, extra_of, pictures_of
from stepwell.datapool.core.channel import GROUP_DROPPED
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.archive.conversations import (
    MESSAGES,
    Conversation,
    Feedback,
    TimedStep,
    first_and_last,
    text_of,
)
from stepwell.datapool.files.columns import TAG, dumps, loads
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.selection import UNMARKED, Marks
from stepwell.datapool.types import (
    UNKNOWN,
    Step,
    Trajectory,
    VersionSpan,
    user_of,
    without_tokens,
)

FORM: Final = "1"
SEAL: Final = b"stepwell.seal"
_FORM: Final = b"stepwell.archive"
GROUP_BYTES: Final = 8 << 20
"""Bytes of tokens and text of a row group, about: what is read to see one trajectory."""
REMEDY: Final = (
    "restore it from a copy, or remove it and run `stepwell archive check` again, which takes it "
    "out of the catalogue"
)

_TEXT, _INT, _TIME = pa.string(), pa.int32(), pa.timestamp("us", "UTC")
_STEP = {
    "step_index": _INT,
    "parent_index": _INT,  # null: a root
    "base_index": _INT,  # the step whose tokens its prompt begins with; null: none
    "n_prompt": _INT,
    "n_new": _INT,  # prompt tokens that are in `token_ids` for this step
    "n_response": _INT,
    "has_log_probs": pa.bool_(),
    "policy_version": pa.int64(),
    "reward": pa.float64(),  # its own, without the outcome
    "finish_reason": _TEXT,
    "is_last": pa.bool_(),
    "at": _TIME,  # when the pool stored it
    "messages": _TEXT,  # JSON: what was said since the step before, and the reply
    "metadata": _TEXT,  # JSON, without the messages
    "more": _TEXT,  # JSON: spans, multi-modal data, routed experts, own pictures and their keys
}
TRAJECTORIES: Final = pa.schema(
    {
        **dict.fromkeys(("channel", "prompt_uid", "trajectory_uid"), _TEXT),
        "attempt": _INT,
        "part": pa.int64(),  # 0: the trajectory; else a step that came too late for it
        "state": _TEXT,  # complete, aborted, late
        "reason": _TEXT,  # why it was aborted
        "left": _TEXT,  # acked: a trainer took its group; dropped; late
        "drop_reason": _TEXT,
        "reward": pa.float64(),
        "outcome": pa.float64(),
        **dict.fromkeys(("oldest_version", "newest_version"), pa.int64()),
        **dict.fromkeys(("n_steps", "n_tokens", "n_response_tokens"), _INT),
        **dict.fromkeys(("opened_at", "closed_at", "leased_at", "left_at"), _TIME),
        **dict.fromkeys(("data_source", "instance_id", "user"), _TEXT),
        "tags": pa.list_(_TEXT),
        **dict.fromkeys(("first_user", "last_reply"), _TEXT),
        **dict.fromkeys(("metadata", "group_metadata", "marks", "group_marks"), _TEXT),
        "n_rollouts": _INT,
        "steps": pa.list_(pa.struct(_STEP)),
        "token_ids": pa.list_(pa.int32()),
        "log_probs": pa.list_(pa.float32()),
    },
    {_FORM: FORM.encode()},
)
FEEDBACK: Final = pa.schema(
    {
        **dict.fromkeys(("channel", "prompt_uid", "trajectory_uid"), _TEXT),
        "part": pa.int64(),
        "at": _TIME,
        "reward": pa.float64(),
        "step_index": _INT,
        "why": _TEXT,
    },
    {_FORM: FORM.encode()},
)
_PLAIN: Final = ("channel", "prompt_uid", "trajectory_uid", "attempt", "part", "state", "reason")
_PLAIN_TOO: Final = ("left", "drop_reason", "outcome", "n_rollouts")
_PICTURES: Final = 3
"""Index in `more` of the pictures; their keys follow."""
_DICTIONARY: Final = ["channel", "state", "reason", "left", "drop_reason", "data_source", "user"]


def _json(value: Any, what: str) -> str | None:
    if value is None:
        return None
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # bytes, arrays, keys that are integers
        return dumps(value, what)
    return text if TAG not in text else dumps(value, what)


def _marks(marks: Marks) -> str | None:
    """Marks as JSON; null where nobody has marked it."""
    return None if marks == UNMARKED else _json(marks.as_dict(), "marks")


def _micros(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


# -- writing -----------------------------------------------------------------------------------


def trajectory_table(conversations: Sequence[Conversation]) -> Any:
    """A table of these trajectories, in order."""
    columns: dict[str, list[Any]] = {name: [] for name in TRAJECTORIES.names[:-3]}
    steps = _StepColumns([step for each in conversations for step in each.steps])
    ends: dict[str, list[int]] = {name: [0] for name in ("steps", "token_ids", "log_probs")}
    end = 0
    for each in conversations:
        begin, end = end, end + len(each.steps)
        first, last = first_and_last(steps.add(begin, end))
        about = {**each.group_metadata, **each.metadata}
        versions = steps.versions[begin:end]
        n_tokens = sum(steps.n_tokens[begin:end])
        row: dict[str, Any] = {name: getattr(each, name) for name in (*_PLAIN, *_PLAIN_TOO)}
        row |= {
            "reward": each.reward,
            "oldest_version": min(versions, default=None),
            "newest_version": max(versions, default=None),
            "n_steps": len(each.steps),
            "n_tokens": n_tokens,
            "n_response_tokens": sum(steps.n_response[begin:end]),
            "opened_at": _micros(each.opened_at),
            "closed_at": _micros(each.closed_at),
            "leased_at": _micros(each.leased_at),
            "left_at": _micros(each.left_at),
            "data_source": _text(about.get("data_source")),
            "instance_id": _text(about.get("instance_id")),
            "user": user_of(each.metadata, each.group_metadata),
            "tags": sorted(each.marks.tags | each.group_marks.tags),
            "first_user": first,
            "last_reply": last,
            "metadata": _json(each.metadata, "metadata"),
            "group_metadata": _json(dict(each.group_metadata), "group_metadata"),
            "marks": _marks(each.marks),
            "group_marks": _marks(each.group_marks),
        }
        for name, column in columns.items():
            column.append(row[name])
        ends["steps"].append(end)
        ends["token_ids"].append(ends["token_ids"][-1] + n_tokens)
        ends["log_probs"].append(ends["log_probs"][-1] + sum(steps.n_log_probs[begin:end]))
    arrays = [
        pa.array(column, TRAJECTORIES.field(name).type, from_pandas=False)
        for name, column in columns.items()
    ]
    rewards = [each.step_rewards for each in conversations for _ in each.steps]
    flat = {
        "steps": steps.array(rewards),
        "token_ids": pa.array(np.frombuffer(b"".join(steps.token_ids), np.int32)),
        "log_probs": pa.array(np.frombuffer(b"".join(steps.log_probs), np.float32)),
    }
    for name, values in flat.items():
        offsets = pa.array(ends[name], pa.int32())
        arrays.append(pa.ListArray.from_arrays(offsets, values, TRAJECTORIES.field(name).type))
    return pa.Table.from_arrays(arrays, schema=TRAJECTORIES)


class _StepColumns:
    """Steps by column: what is in their headers at once, all else with `add`."""

    def __init__(self, steps: Sequence[TimedStep]) -> None:
        self._steps = steps
        self._headers = headers = Headers([step.packed.payload for step in steps])
        self._at = [step.at for step in steps]
        self._has_prompt = np.array([step.packed.prompt is not None for step in steps], bool)
        self.versions: list[int] = headers["policy_version"].tolist()
        self.n_response: list[int] = headers["n_response"].tolist()
        self.n_log_probs: list[int] = (headers["n_response"] * headers.has_log_probs).tolist()
        self._n_new = np.where(self._has_prompt, headers["n_prompt"], headers["n_new"])
        self.n_tokens: list[int] = (self._n_new + headers["n_response"]).tolist()
        self.token_ids: list[memoryview] = []
        """Each step's prompt if it has one, then its own."""
        self.log_probs: list[memoryview] = []
        self._said: list[str | None] = []
        self._metadata: list[str | None] = []
        self._more: list[str | None] = []
        own = HEADER_BYTES + 4 * (headers["n_new"] + headers["n_response"])
        self._log_probs_at: list[int] = own.tolist()

    def add(self, begin: int, end: int) -> list[Any]:
        """Add the content of steps begin … end - 1, all before them having been added; what was
        said in them."""
        messages: list[Any] = []
        for i in range(begin, end):
            packed, _, keys = self._steps[i]
            if packed.prompt is not None:
                self.token_ids.append(memoryview(packed.prompt))
            payload, log_at = memoryview(packed.payload), self._log_probs_at[i]
            self.token_ids.append(payload[HEADER_BYTES:log_at])
            extra_at = log_at + 4 * self.n_log_probs[i]
            self.log_probs.append(payload[log_at:extra_at])
            metadata, *more = extra = extra_of(payload[extra_at:])
            if own_pictures := pictures_of(extra):
                more.append([keys.get(picture.digest) for picture in own_pictures])
            said = None
            if isinstance(metadata, dict) and metadata.get(MESSAGES) is not None:
                said = metadata.pop(MESSAGES)
            if isinstance(said, list):
                messages += said
            self._said.append(_json(said, "messages"))
            self._metadata.append(_json(metadata, "metadata"))
            self._more.append(dumps(more, "multi_modal_data") if more else None)
        return messages

    def array(self, rewards: Sequence[Mapping[int, float]]) -> Any:
        """The column `steps`.

        Args:
            rewards: those that were set later, of each step's trajectory, by index.
        """
        headers = self._headers
        indexes, own = headers["step_index"], headers["own_reward"].copy()
        for i, later in enumerate(rewards):
            if later:
                own[i] = later.get(int(indexes[i]), own[i])
        parents, bases = headers["parent"], headers["base_index"]
        columns = {
            "step_index": pa.array(indexes),
            "parent_index": pa.array(parents, mask=parents < 0),
            "base_index": pa.array(bases, mask=bases < 0),
            "n_prompt": pa.array(headers["n_prompt"]),
            "n_new": pa.array(self._n_new),
            "n_response": pa.array(headers["n_response"]),
            "has_log_probs": pa.array(headers.has_log_probs),
            "policy_version": pa.array(headers["policy_version"]),
            "reward": pa.array(own, mask=np.isnan(own)),
            "finish_reason": pa.array(headers.finish_reasons, _TEXT),
            "is_last": pa.array(headers.is_last),
            "at": pa.array(np.rint(np.array(self._at, float) * 1e6).astype(np.int64)).cast(_TIME),
            "messages": pa.array(self._said, _TEXT),
            "metadata": pa.array(self._metadata, _TEXT),
            "more": pa.array(self._more, _TEXT),
        }
        fields = [pa.field(*field) for field in _STEP.items()]
        return pa.StructArray.from_arrays([columns[name] for name in _STEP], fields=fields)


def feedback_table(of: Sequence[Feedback]) -> Any:
    """A table of these rewards, in order."""
    rows = [f._asdict() for f in of]
    for row in rows:
        row["part"], row["at"] = row.pop("row"), _micros(row["at"])
    return pa.Table.from_pylist(rows, schema=FEEDBACK)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else str(value)


def file_bytes(table: Any) -> bytes:
    """A sealed Parquet file of the table."""
    sink = io.BytesIO()
    has_tokens = "log_probs" in table.column_names
    split = {"log_probs.list.element": "BYTE_STREAM_SPLIT"}
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=[name for name in _DICTIONARY if name in table.column_names],
        column_encoding=split if has_tokens else None,
        write_page_checksum=True,
        write_page_index=False,
        write_statistics=[n for n in table.column_names if n not in ("steps", "token_ids")],
    ) as writer:
        n = _rows_of_a_group(table)
        for at in range(0, len(table), n):
            writer.write_table(table.slice(at, n), row_group_size=n)
        # Nothing but the footer is written after this.
        writer.add_key_value_metadata({SEAL.decode(): xxh3_128_hexdigest(sink.getbuffer())})
    return sink.getvalue()


def _rows_of_a_group(table: Any) -> int:
    n = len(table) * GROUP_BYTES // max(1, int(table.nbytes))
    return max(1, min(len(table), n))


# -- reading -----------------------------------------------------------------------------------


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """The rows of a file; all of them are checked against its seal.

    Raises:
        DamagedFileError: it is not what was written.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    check_bytes(path, data)
    with _telling(path):
        # `pq.read_table` takes a third longer for a small file: it makes a dataset of it first.
        table = pq.ParquetFile(pa.BufferReader(data)).read(columns)
    known = table.schema.metadata or {}
    return table.replace_schema_metadata({key: known[key] for key in known if key != SEAL})


def check_bytes(path: Path, data: bytes) -> int:
    """Check the content of a file; the number of its rows.

    Raises:
        DamagedFileError: it is not what was written.
    """
    if len(data) < 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise _damaged(path, "it was cut off, or is no Parquet file")
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    with _telling(path):
        metadata = pq.read_metadata(pa.BufferReader(data))
        written = (metadata.metadata or {}).get(SEAL)
    if written is None or footer < 4 or written.decode() != xxh3_128_hexdigest(data[:footer]):
        raise _damaged(path, "its content is not that of its seal")
    return int(metadata.num_rows)


def read_row(path: Path, row_group: int, row: int) -> dict[str, Any]:
    """One row of a file, with arrays for tokens and log-probs. The pages that are read are checked.

    Raises:
        DamagedFileError: they are not what was written.
        OSError: the file cannot be read; FileNotFoundError: it was replaced or removed.
    """
    with _telling(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        chosen = file.read_row_group(row_group).slice(row, 1)
        (found,) = chosen.drop_columns(["token_ids", "log_probs"]).to_pylist()
        for name in ("token_ids", "log_probs"):
            found[name] = chosen[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return dict(found)


def row_groups(path: Path) -> list[int]:
    """Numbers of rows of the row groups of a file."""
    with _telling(path):
        metadata = pq.read_metadata(path)
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


class _telling:  # noqa: N801 - reads as a function
    """Errors of Arrow inside the block are damage of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, pa.ArrowException) or (
            isinstance(error, OSError) and error.errno is None
        ):
            raise _damaged(self._path, str(error).splitlines()[0]) from error


def _damaged(path: Path, why: str) -> DamagedFileError:
    return DamagedFileError(f"{path} is damaged: {why}; {REMEDY}")


def said_in(table: Any, rows: Sequence[int]) -> Iterator[str]:
    """All that was said in each of these rows of a table."""
    if not rows:
        return
    steps = table["steps"].combine_chunks()
    ends = steps.offsets.to_pylist()
    messages = steps.values.field("messages").to_pylist()
    for row in rows:
        kept = messages[ends[row] : ends[row + 1]]
        said = (text_of(each) for text in kept if text is not None for each in _read_list(text))
        yield "\n".join(filter(None, said))


def _read_list(text: str) -> list[Any]:
    """The list in a JSON text; an empty one for anything else, as agents submit it, too."""
    try:
        value = orjson.loads(text) if TAG not in text else loads(text)
    except orjson.JSONDecodeError:  # half a surrogate
        value = loads(text)
    return value if isinstance(value, list) else []


def exported(rows: Sequence[dict[str, Any]]) -> ExportedTrajectory:
    """The trajectory of these rows: its own, and those of steps that came late, in order. A
    complete one is as a consumer gets it: the outcome is in the reward of its last step. A step
    that came late with the index of another one is behind all others."""
    head = rows[0]
    stored: dict[int, _StoredStep] = {}
    again: list[_StoredStep] = []
    chains: dict[int, Any] = {}
    for row in rows:
        at = log_at = 0
        for each in row["steps"]:
            end = at + each["n_new"] + each["n_response"]
            own, at = row["token_ids"][at:end], end
            base = chains.get(each["base_index"]) if each["base_index"] is not None else None
            if each["base_index"] is not None and base is None:
                base = np.zeros(each["n_prompt"] - each["n_new"], np.int32)  # it was not archived
            tokens = own if base is None else np.concatenate([base, own])
            known = None
            if each["has_log_probs"]:
                known = row["log_probs"][log_at : log_at + each["n_response"]]
                log_at += each["n_response"]
            chains.setdefault(each["step_index"], tokens)
            step = _StoredStep(row, each, tokens, known)
            first = stored.setdefault(each["step_index"], step)
            if not any(step.is_same(other) for other in (first, *again)):
                again.append(step)  # else it is the first one, or was sent again
    for index, step in enumerate(again, max(stored, default=0) + 1):
        stored[index] = step
    served = _served(head, max(stored, default=0))
    steps: dict[int, Step] = {}
    for index, step in sorted(stored.items()):
        changed = served.get(index, {}) if step.row is head else {}
        steps[index] = _step(step, {"step_index": index} | changed, steps)
    trajectory = Trajectory(
        head["trajectory_uid"],
        head["prompt_uid"],
        tuple(steps.values()),
        loads(head["metadata"]) or {},
        head["attempt"],
    )
    return ExportedTrajectory(
        trajectory=trajectory,
        channel=head["channel"],
        state=head["state"],
        reason=head["drop_reason"] if head["reason"] in (None, GROUP_DROPPED) else head["reason"],
        outcome=None if served else head["outcome"],
        n_rollouts=head["n_rollouts"],
        marks=loads(head["marks"]),
        group_metadata=loads(head["group_metadata"]) or {},
        group_marks=loads(head["group_marks"]),
    )


class _StoredStep(NamedTuple):
    """A step as a file has it."""

    row: Mapping[str, Any]
    """Row of its trajectory."""
    fields: Mapping[str, Any]
    tokens: Any
    """Prompt and response."""
    log_probs: Any

    def is_same(self, other: _StoredStep) -> bool:
        """Return whether both have the same tokens and messages."""
        is_same = self.fields["messages"] == other.fields["messages"]
        return is_same and np.array_equal(self.tokens, other.tokens)


def _served(head: Mapping[str, Any], last_index: int) -> dict[int, dict[str, Any]]:
    """Fields that the last step of a complete trajectory has for a consumer, by its index: the
    outcome is in its reward. Empty for one that is not complete, or has no step.

    Args:
        last_index: of all steps, also those that came late.
    """
    if head["state"] != "complete" or not head["steps"]:
        return {}
    last = max(head["steps"], key=lambda step: step["step_index"])
    reward = last["reward"]
    if head["outcome"] is not None:
        reward = (reward or 0.0) + head["outcome"]
    is_last = last["is_last"] or last["step_index"] == last_index
    return {last["step_index"]: {"reward": reward, "is_last": is_last}}


def _step(stored: _StoredStep, changed: Mapping[str, Any], before: Mapping[int, Step]) -> Step:
    """A stored step with these fields changed.

    Args:
        before: Steps of the trajectory before it, by index.
    """
    row, each, tokens = stored.row, {**stored.fields, **changed}, stored.tokens
    n = each["n_prompt"]
    metadata = loads(each["metadata"]) or {}
    if each["messages"] is not None:
        metadata[MESSAGES] = loads(each["messages"])
    more = loads(each["more"]) or ((), None, None)
    spans, multi_modal_data, routed_experts, *_ = more
    pictures = tuple(pictures_of((metadata, *more)))
    if (base := before.get(each["base_index"])) is not None:
        pictures = base.pictures + pictures
    is_text = not len(tokens)  # of an import
    step = Step(
        prompt_ids=UNKNOWN if is_text else tokens[:n],
        response_ids=UNKNOWN if is_text else tokens[n:],
        reward=each["reward"],
        trajectory_uid=row["trajectory_uid"],
        prompt_uid=row["prompt_uid"],
        step_index=each["step_index"],
        policy_version=each["policy_version"],
        is_last=each["is_last"],
        metadata=metadata,
        rollout_log_probs=stored.log_probs,
        finish_reason=each["finish_reason"],
        parent_index=each["parent_index"],
        version_spans=tuple(VersionSpan(*span) for span in spans),
        multi_modal_data=multi_modal_data,
        routed_experts=routed_experts,
        pictures=pictures,
    )
    return without_tokens(step) if is_text else step


def picture_keys(row: Mapping[str, Any]) -> dict[str, str]:
    """Key of each stored picture of a row's steps, by digest."""
    found: dict[str, str] = {}
    for step in row["steps"]:
        if step["more"] is not None and (more := loads(step["more"]))[_PICTURES:]:
            pictures, keys = more[_PICTURES:]
            named = zip(pictures, keys, strict=True)
            found |= {picture[0]: key for picture, key in named if key is not None}
    return found


def all_picture_keys(table: Any) -> set[str]:
    """Keys of all stored pictures of a table's rows."""
    more = pc.list_flatten(table["steps"]).combine_chunks().field("more")
    rows = [{"steps": [{"more": text}]} for text in more.drop_null().to_pylist()]
    return {key for row in rows for key in picture_keys(row).values()}


def without(table: Any, gone: Iterable[int]) -> Any:
    """The table without these rows."""
    mask = np.ones(len(table), bool)
    mask[list(gone)] = False
    return table.filter(pa.array(mask))

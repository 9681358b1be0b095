"""Files of trajectories: what is in a row, that reading gives back what was written, and what a
damaged, foreign or edited file says."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.datapool.errors import DamagedFileError, ExportError
from stepwell.datapool.files.columns import SCHEMA_VERSION, schema
from stepwell.datapool.files.deletion import delete_from_export
from stepwell.datapool.files.export import read, write
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.ops import Delete
from stepwell.datapool.sealed import sidecar_of
from stepwell.datapool.types import Step, Trajectory, VersionSpan
from tests.builders import step
from tests.helpers import full_disk

BOTH = pytest.mark.parametrize("suffix", ["parquet", "jsonl"])


def exported(*steps: Step, **fields: Any) -> ExportedTrajectory:
    trajectory = {k: fields.pop(k) for k in ("metadata", "attempt") if k in fields}
    uid = steps[0].trajectory_uid if steps else "t"
    return ExportedTrajectory(trajectory=Trajectory(uid, "p", steps, **trajectory), **fields)


def build_chain(uid: str = "t", n: int = 3, **fields: Any) -> ExportedTrajectory:
    """Each prompt extends the tokens before it by one."""
    steps, tokens = [], [1]
    for i in range(n):
        response = [10 + i, 20 + i]
        steps.append(
            step(
                tokens,
                response,
                index=i,
                uid=uid,
                parent_index=i - 1 if i else None,
                rollout_log_probs=[-0.1, -0.2 - i],
                policy_version=i,
                is_last=i == n - 1,
                reward=1.0 if i == n - 1 else None,
            )
        )
        tokens = [*tokens, *response, 30 + i]
    return exported(*steps, **fields)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """`path` again, with other rows in the same schema, as whoever changes a file is told to."""
    sidecar_of(path).unlink()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema=schema()), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------------- rows


@BOTH
def test_a_chain_of_calls_is_one_row_with_every_response_in_its_place(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    summary = write(path, [build_chain(n=3)])
    (row,) = rows_of(path)
    assert row["input_ids"] == [1, 10, 20, 30, 11, 21, 31, 12, 22]
    assert row["loss_mask"] == [0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert row["versions"] == [-1, 0, 0, -1, 1, 1, -1, 2, 2]
    assert [round(p, 4) for p in row["log_probs"]] == [0, -0.1, -0.2, 0, -0.1, -1.2, 0, -0.1, -2.2]
    assert [s["reward"] for s in row["steps"]] == [None, None, 1.0]
    assert row["reward"] == 1.0
    bounds = [(s["prompt_start"], s["response_start"], s["response_end"]) for s in row["steps"]]
    assert bounds == [(0, 1, 3), (3, 4, 6), (6, 7, 9)]
    assert [s["is_last"] for s in row["steps"]] == [False, False, True]
    assert (summary.n_trajectories, summary.n_rows, summary.n_steps) == (1, 1, 3)


@BOTH
def test_a_step_on_two_branches_is_trained_in_the_first_and_shown_in_both(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(
        path,
        [
            exported(
                step([1], [2], rollout_log_probs=[-0.5]),
                step([1, 2, 3], [4], index=1, parent_index=0, rollout_log_probs=[-0.25]),
                step([1, 2, 5], [6], index=2, parent_index=0, rollout_log_probs=[-2.0]),
            )
        ],
    )
    first, second = rows_of(path)
    assert (first["input_ids"], first["loss_mask"]) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert (second["input_ids"], second["loss_mask"]) == ([1, 2, 5, 6], [0, 0, 0, 1])
    assert first["log_probs"] == [0.0, -0.5, 0.0, -0.25]
    assert second["log_probs"] == [0.0, -0.5, 0.0, -2.0]
    assert [(r["branch"], r["n_branches"]) for r in (first, second)] == [(0, 2), (1, 2)]
    assert [s["trained"] for s in second["steps"]] == [False, True]


def test_a_false_parent_index_starts_a_branch_and_is_kept_as_it_was(tmp_path):
    trajectory = exported(
        step([1], [2]),
        step([9, 9, 9], [4], index=2, parent_index=0),
        step([1, 2, 3], [5], index=3, parent_index=1),
    )
    write(tmp_path / "x.jsonl", [trajectory])
    rows = rows_of(tmp_path / "x.jsonl")
    assert [r["input_ids"] for r in rows] == [[1, 2], [9, 9, 9, 4], [1, 2, 3, 5]]
    assert [r["loss_mask"] for r in rows] == [[0, 1], [0, 0, 0, 1], [0, 0, 0, 1]]
    assert list(read(tmp_path / "x.jsonl")) == [trajectory]


def test_a_step_that_names_no_parent_begins_a_branch(tmp_path):
    """The pool finds the parent of each step that it stores; nobody looks for it again."""
    trajectory = exported(step([1], [2]), step([1, 2], [3], index=1))
    write(tmp_path / "x.jsonl", [trajectory])
    assert [r["loss_mask"] for r in rows_of(tmp_path / "x.jsonl")] == [[0, 1], [0, 0, 1]]


def test_steps_with_images_are_joined_only_where_parent_index_says_so(tmp_path):
    one, other = ({"image": np.full((2, 2), value, np.uint8)} for value in (1, 2))
    steps = (
        step([1], [2], multi_modal_data=one),
        step([1, 2, 3], [4], index=1, multi_modal_data=other),
        step([1, 2, 3], [5], index=2, multi_modal_data=one, parent_index=0),
    )
    write(tmp_path / "x.jsonl", [exported(*steps)])
    rows = rows_of(tmp_path / "x.jsonl")
    assert [[s["step_index"] for s in r["steps"]] for r in rows] == [[1], [0, 2]]
    assert list(read(tmp_path / "x.jsonl")) == [exported(*steps)]


def test_versions_follow_the_spans_of_a_call_that_saw_a_weight_update(tmp_path):
    spans = (VersionSpan(3, 0, 1), VersionSpan(5, 1, 3))
    spanning = step([1, 1], [2, 3, 4], policy_version=3, version_spans=spans)
    write(tmp_path / "x.jsonl", [exported(spanning)])
    assert rows_of(tmp_path / "x.jsonl")[0]["versions"] == [-1, -1, 3, 5, 5]


@BOTH
def test_unknown_log_probs_and_rewards_are_null_and_never_zero(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(path, [exported(step([1], [2, 3], rollout_log_probs=None))])
    (row,) = rows_of(path)
    assert (row["log_probs"], row["reward"]) == (None, None)
    assert (row["steps"][0]["log_probs"], row["steps"][0]["reward"]) == (None, None)


@BOTH
def test_log_probs_of_a_row_that_lacks_some_stand_with_their_steps(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    known = step([1, 2, 3], [4, 5], index=1, parent_index=0, rollout_log_probs=[-0.5, -0.25])
    write(path, [exported(step([1], [2], rollout_log_probs=None), known)])
    (row,) = rows_of(path)
    assert row["log_probs"] is None
    assert [s["log_probs"] for s in row["steps"]] == [None, [-0.5, -0.25]]


# ---------------------------------------------------------------------------- round trip

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)
wide_tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
numbers = st.floats(allow_nan=False, allow_infinity=False)
arrays = st.builds(
    lambda values, dtype: np.array(values, dtype),
    st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=2), max_size=3),
    st.sampled_from(["u1", "<i8", ">i4", "f4", "f8", "c8", "U3", "?"]),
)
any_text = st.text(st.characters(), max_size=5)  # lone surrogates too
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text
values = st.recursive(
    scalars | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
metadata = st.dictionaries(any_text, values, max_size=3)
array_metadata = st.dictionaries(any_text, values | arrays | st.lists(arrays), max_size=3)


@st.composite
def step_trees(draw: Any, uid: str) -> tuple[Step, ...]:
    """Steps with gaps between their indices: roots, children, forks, undeclared children, false
    and dangling parents; a small vocabulary, so that some extend others by accident."""
    steps: list[Step] = []
    index = draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(tokens | wide_tokens)
        parent: int | None = None
        kind = draw(st.sampled_from(["root", "child", "undeclared", "false", "dangling"]))
        if steps and kind in ("child", "undeclared"):
            stem = draw(st.sampled_from(steps))
            more = draw(st.lists(st.integers(0, 2), max_size=3))
            prompt = [*stem.prompt_ids.tolist(), *stem.response_ids.tolist(), *more]
            parent = stem.step_index if kind == "child" else None
        elif steps and kind == "false":
            parent = draw(st.sampled_from(steps)).step_index
        elif index and kind == "dangling":
            parent = draw(st.integers(0, index - 1))
        response = draw(tokens | wide_tokens)
        n = len(response)
        spans = tuple(
            VersionSpan(draw(st.integers(0, 9)), a, a + 1)
            for a in range(n if draw(st.booleans()) else 0)
        )
        oldest = min((s.version for s in spans), default=draw(st.integers(0, 2**62)))
        log_probs = st.lists(
            st.floats(-(2.0**99), 0, width=32) | st.floats(-20, 0, width=32), min_size=n, max_size=n
        )
        steps.append(
            step(
                prompt,
                response,
                index=index,
                uid=uid,
                reward=draw(st.none() | st.floats(-1e9, 1e9)),
                policy_version=oldest,
                version_spans=spans,
                is_last=draw(st.booleans()),
                metadata=draw(array_metadata),
                rollout_log_probs=draw(st.none() | log_probs),
                finish_reason=draw(st.sampled_from([None, "stop", "length", "abort"])),
                parent_index=parent,
                multi_modal_data=draw(st.none() | array_metadata),
                routed_experts=draw(st.none() | arrays),
            )
        )
        index += draw(st.integers(1, 3))
    return tuple(steps)


@st.composite
def exported_trajectories(draw: Any) -> ExportedTrajectory:
    uid = draw(st.text(min_size=1, max_size=5))
    return exported(
        *draw(step_trees(uid)),
        metadata=draw(metadata),
        attempt=draw(st.integers(0, 3)),
        channel=draw(st.sampled_from(["train", "val"])),
        state=draw(st.sampled_from(["open", "complete", "aborted", "acked"])),
        reason=draw(st.none() | st.text(max_size=5)),
        group_state=draw(st.sampled_from([None, "open", "ready", "held", "leased"])),
        outcome=draw(st.none() | st.floats(-1e9, 1e9)),
        n_rollouts=draw(st.none() | st.integers(1, 64)),
        marks=draw(st.none() | metadata),
        group_metadata=draw(metadata),
        group_marks=draw(st.none() | metadata),
    )


@pytest.mark.slow
@BOTH
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(batch=st.lists(exported_trajectories(), max_size=3))
def test_reading_gives_back_what_was_written(tmp_path, suffix, batch):
    path = tmp_path / f"x.{suffix}"
    summary = write(path, batch, overwrite=True)
    assert list(read(path)) == batch
    rows = rows_of(path)
    steps = [step for e in batch for step in e.trajectory.steps]
    assert summary.n_rows == len(rows)
    assert summary.n_steps == len(steps)
    # Every response token is trained once, and where the table says it is.
    trained = [
        (
            row["position"],
            s["step_index"],
            row["input_ids"][s["response_start"] : s["response_end"]],
        )
        for row in rows
        for s in row["steps"]
        if s["trained"]
    ]
    assert sorted(trained) == [
        (i, s.step_index, s.response_ids.tolist())
        for i, e in enumerate(batch)
        for s in e.trajectory.steps
    ]
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(len(s.response_ids) for s in steps)


@BOTH
def test_a_trajectory_without_steps_has_no_row_and_is_counted(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    summary = write(path, [exported(state="open"), build_chain()])
    assert (summary.n_trajectories, summary.n_without_steps) == (1, 1)
    assert list(read(path)) == [build_chain()]


@BOTH
def test_an_export_of_nothing_reads_as_nothing(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    assert write(path, []).n_rows == 0
    assert list(read(path)) == []


def test_parquet_is_written_and_read_in_row_groups_of_bounded_size(tmp_path):
    taken = 0

    def many() -> Iterator[ExportedTrajectory]:
        nonlocal taken
        for i in range(2500):
            taken = i + 1
            yield build_chain(f"t{i}", n=1)

    write(tmp_path / "x.parquet", many())
    groups = pq.ParquetFile(tmp_path / "x.parquet").metadata
    assert taken == 2500
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [2048, 452]
    big = [exported(step(list(range(400_000)), [1], uid=u)) for u in "abcd"]
    write(tmp_path / "y.parquet", big)
    assert pq.ParquetFile(tmp_path / "y.parquet").metadata.num_row_groups == 2


# ---------------------------------------------------------------------------- datasets


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`load(path)`: the file through the real `datasets.load_dataset`, offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import datasets

    def load_file(path: Path, **options: Any) -> Any:
        kind = {".parquet": "parquet", ".jsonl": "json"}[path.suffix]
        cache = str(tmp_path / "cache")
        return datasets.load_dataset(
            kind, data_files=str(path), split="train", cache_dir=cache, **options
        )

    return load_file


def varied() -> list[ExportedTrajectory]:
    """Nulls and values in every column that may be null."""
    spans = (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    return [
        exported(step([1], [2], uid="bare")),
        build_chain("chain", metadata={"tool": "python"}, n_rollouts=4, marks={"quality": 0.5}),
        exported(
            step([1], [2], finish_reason="stop", uid="tree"),
            step(
                [1, 2, 3],
                [4, 5],
                index=1,
                uid="tree",
                policy_version=1,
                version_spans=spans,
                rollout_log_probs=[-0.3, -1.7],
                reward=-0.5,
                parent_index=0,
                multi_modal_data={"image": b"\x89PNG"},
                routed_experts=np.arange(4, dtype=np.int16).reshape(2, 2),
            ),
            step([1, 2, 6], [7], index=2, uid="tree", parent_index=0),
            state="open",
            reason="agent_died",
            group_state="open",
            outcome=1.5,
            group_metadata={"task": 3},
            group_marks={"note": "odd"},
        ),
    ]


def test_the_columns_and_their_types_are_those_that_files_of_this_version_have():
    numbers = {"input_ids": "int32", "loss_mask": "int8", "log_probs": "float", "versions": "int64"}
    integers = ("attempt", "position", "branch", "n_branches", "n_rollouts")
    found = {field.name: str(field.type) for field in schema()}
    assert {n: found[n] for n in numbers} == {n: f"list<item: {t}>" for n, t in numbers.items()}
    assert {n for n, t in found.items() if t == "int64"} == set(integers)
    assert {n for n, t in found.items() if t == "double"} == {"reward", "outcome"}
    assert found["provenance"] == (
        "struct<stepwell_version: string, schema_version: int64, exported_at: double, "
        "source: string>"
    )
    assert found["steps"] == (
        "list<item: struct<step_index: int64, parent_index: int64, prompt_start: int32, "
        "response_start: int32, response_end: int32, trained: bool, policy_version: int64, "
        "version_spans: list<item: struct<version: int64, start: int64, end: int64>>, "
        "finish_reason: string, reward: double, log_probs: list<item: float>, is_last: bool, "
        "pictures: list<item: struct<digest: string, width: int64, height: int64, at: int64, "
        "n_tokens: int64, sha256: string>>, "
        "metadata: string, multi_modal_data: string, routed_experts: string>>"
    )
    texts = {"channel", "prompt_uid", "trajectory_uid", "state", "reason", "group_state"}
    texts |= {"metadata", "marks", "group_metadata", "group_marks"}
    assert {n for n, t in found.items() if t == "string"} == texts
    assert found["images"] == "list<item: struct<bytes: binary, path: string>>"
    others = {*numbers, *integers, *texts, "reward", "outcome", "provenance", "steps", "images"}
    assert others == set(found)


def test_datasets_loads_parquet_with_the_columns_of_the_schema(tmp_path, load):
    summary = write(tmp_path / "x.parquet", varied())
    loaded = load(tmp_path / "x.parquet")
    assert loaded.features.arrow_schema.remove_metadata() == schema()
    assert len(loaded) == summary.n_rows == 4
    assert sum(map(sum, loaded["loss_mask"])) == 1 + 6 + 4
    assert loaded["trajectory_uid"] == ["bare", "chain", "tree", "tree"]


def test_both_formats_load_to_the_same_values(tmp_path, load):
    write(tmp_path / "x.parquet", varied())
    write(tmp_path / "x.jsonl", varied())
    parquet, jsonl = (load(tmp_path / f"x.{s}").to_list() for s in ("parquet", "jsonl"))
    for row in (*parquet, *jsonl):
        row["provenance"].pop("exported_at")
    assert parquet == jsonl


def test_arrow_itself_reads_jsonl_without_loss(tmp_path):
    # Its reader loses nulls at the head of a list (apache/arrow#51305); we must write none.
    path = tmp_path / "x.jsonl"
    write(path, varied())
    table = pyarrow.json.read_json(path)
    table.validate(full=True)
    assert table.to_pylist() == rows_of(path)


def test_jsonl_loads_with_the_types_of_parquet_if_given_the_schema(tmp_path, load):
    import datasets

    write(tmp_path / "x.jsonl", varied())
    features = datasets.Features.from_arrow_schema(schema())
    loaded = load(tmp_path / "x.jsonl", features=features)
    assert loaded.features == features
    write(tmp_path / "x.parquet", varied())
    assert loaded["log_probs"][:] == load(tmp_path / "x.parquet")["log_probs"][:]


@BOTH
def test_a_loaded_row_is_an_sft_example(tmp_path, load, suffix):
    import torch

    write(tmp_path / f"x.{suffix}", [build_chain()])
    row = load(tmp_path / f"x.{suffix}")[0]
    ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
    labels = torch.where(mask == 1, ids, -100)
    assert labels.tolist() == [-100, 10, 20, -100, 11, 21, -100, 12, 22]
    logits = torch.zeros(1, len(ids), 50)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[1:])
    assert loss.item() == pytest.approx(np.log(50), rel=1e-5)


def test_a_selection_of_trajectories_saved_by_datasets_reads_back(tmp_path, load):
    write(tmp_path / "x.jsonl", varied())
    kept = load(tmp_path / "x.jsonl").filter(lambda row: row["reward"] is not None)
    kept.to_parquet(str(tmp_path / "y.parquet"))
    assert list(read(tmp_path / "y.parquet")) == varied()[1:]


# ---------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"metadata": {"a": [object()]}}, "step 't'[4]: metadata"),
        ({"metadata": {"a": {1, 2}}}, "builtins.set"),
        ({"multi_modal_data": {"x": np.array([None])}}, "Object arrays"),
        ({"multi_modal_data": {"x": np.ma.array([1], mask=[1])}}, "MaskedArray"),
        ({"routed_experts": np.array([{}])}, "step 't'[4]: routed_experts"),
    ],
)
@BOTH
def test_what_no_row_can_carry_is_an_error_that_names_the_step(tmp_path, suffix, fields, named):
    with pytest.raises(ExportError) as caught:
        write(
            tmp_path / f"x.{suffix}", [build_chain(), exported(step([1], [2], index=4, **fields))]
        )
    assert named in str(caught.value)
    assert list(tmp_path.iterdir()) == []


ODD = {"__stepwell__": "bytes", "value": 5, "more": {0: ["zero", {"__stepwell__": None}]}}


@BOTH
def test_metadata_of_any_keys_comes_back_exactly_and_can_be_deleted(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    odd = exported(step([1], [2], metadata=ODD), metadata=ODD | {"user": "eve"}, group_metadata=ODD)
    write(path, [odd, build_chain("other")])
    (back, _) = read(path)
    assert back.trajectory.steps[0].metadata == ODD
    assert (back.trajectory.metadata, back.group_metadata) == (ODD | {"user": "eve"}, ODD)
    assert delete_from_export(path, Delete(user="eve")) == [odd.trajectory.trajectory_uid]


def test_a_value_that_contains_itself_is_an_error(tmp_path):
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(ExportError, match=r"step 't'\[0\]: metadata"):
        write(tmp_path / "x.jsonl", [exported(step([1], [2], metadata=loop))])


def test_log_probs_of_single_steps_may_be_rounded_as_a_float32_is(tmp_path):
    path = tmp_path / "x.jsonl"
    known = step([1, 2, 3], [4, 5], index=1, parent_index=0, rollout_log_probs=[-0.1, -0.7])
    write(path, [exported(step([1], [2], rollout_log_probs=None), known)])
    (row,) = rows_of(path)
    row["steps"][1]["log_probs"] = [-0.1, -0.7]
    rewrite(path, [row])
    assert list(read(path)) == [exported(step([1], [2], rollout_log_probs=None), known)]


# ---------------------------------------------------------------------------- files


@BOTH
def test_an_existing_file_is_kept_unless_it_may_be_overwritten(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(path, [build_chain("a")])
    with pytest.raises(ExportError, match="exists; choose another path, or pass overwrite=True"):
        write(path, [build_chain("b")])
    assert list(read(path)) == [build_chain("a")]
    write(path, [build_chain("b")], overwrite=True)
    assert list(read(path)) == [build_chain("b")]


@BOTH
def test_an_export_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(path, [build_chain("old")])

    def failing() -> Iterator[ExportedTrajectory]:
        yield build_chain("new")
        # While it is being written, nothing half-made has the final name.
        assert list(read(path)) == [build_chain("old")]
        raise ConnectionError("the pool is gone")

    with pytest.raises(ConnectionError):
        write(path, failing(), overwrite=True)
    assert list(read(path)) == [build_chain("old")]
    assert sorted(tmp_path.iterdir()) == [path, sidecar_of(path)]


@BOTH
def test_an_export_that_the_disk_has_no_room_for_leaves_the_old_one_with_its_digest(
    tmp_path, suffix
):
    path = tmp_path / f"x.{suffix}"
    write(path, [build_chain("old")])
    with full_disk(), pytest.raises(OSError, match="File too large"):
        write(path, [build_chain("new")], overwrite=True)
    assert sorted(tmp_path.iterdir()) == [path, sidecar_of(path)]
    assert list(read(path)) == [build_chain("old")]


def test_a_full_disk_raises_and_leaves_nothing_behind(tmp_path):
    program = """
import resource, signal, sys
from pathlib import Path
from stepwell.datapool.files.export import write
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.types import Step, Trajectory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
step = Step(prompt_ids=range(200_000), response_ids=[1], trajectory_uid="t", prompt_uid="p")
one = ExportedTrajectory(trajectory=Trajectory("t", "p", (step,)))
for name in ("x.jsonl", "x.parquet"):
    try:
        write(Path(sys.argv[1]) / name, [one])
    except OSError as e:
        print("OSError", e)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": "."},
    )
    assert done.stdout.count("OSError") == 2, done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.jsonl", b'{"text": "hello"}\n', "was not exported by Stepwell"),
        ("x.jsonl", b"hello\n", "line 1 is no JSON"),
        ("x.jsonl", b"3\n", "line 1 is no JSON object"),
        ("x.jsonl", b"[" * 100_000, "line 1 is no JSON"),
        ("x.parquet", b"", "truncated, damaged or no Parquet"),
        ("x.parquet", b"PAR1 and then nothing of the kind", "truncated, damaged or no Parquet"),
    ],
)
def test_a_file_that_is_not_ours_is_an_error(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError) as caught:
        list(read(tmp_path / name))
    assert named in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@BOTH
def test_a_value_of_100_000_levels_is_an_error_of_its_row(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(path, [build_chain()])
    rows = rows_of(path)
    rewrite(path, [{**rows[0], "metadata": "[" * 100_000}])
    with pytest.raises(ExportError, match="is malformed"):
        list(read(path))
    with pytest.raises(ExportError, match="is malformed"):
        delete_from_export(path, Delete(user="u"))


def test_a_parquet_file_of_someone_else_is_an_error(tmp_path):
    pq.write_table(pa.table({"text": ["hello"]}), tmp_path / "x.parquet")
    with pytest.raises(ExportError, match="was not exported by Stepwell"):
        list(read(tmp_path / "x.parquet"))


def test_a_missing_file_is_a_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read(tmp_path / "x.parquet"))


@BOTH
def test_a_missing_column_is_named(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(path, [build_chain()])
    if suffix == "parquet":
        pq.write_table(pq.read_table(path).drop_columns(["steps"]), path)
        sidecar_of(path).unlink()
    else:
        rows = rows_of(path)
        del rows[0]["steps"]
        rewrite(path, rows)
    with pytest.raises(ExportError, match="lacks column steps"):
        list(read(path))


@BOTH
@pytest.mark.parametrize("other", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 1])
def test_another_schema_is_refused_by_the_release_that_wrote_it(tmp_path, suffix, other):
    path = tmp_path / f"x.{suffix}"
    write(path, [build_chain()])
    rows = rows_of(path)
    rows[0]["provenance"] |= {"schema_version": other, "stepwell_version": "7.8.9"}
    rewrite(path, rows)
    with pytest.raises(ExportError, match=rf"schema_version is {other}, .* Stepwell 7\.8\.9"):
        list(read(path))


@BOTH
def test_a_file_cut_off_anywhere_is_an_error_or_a_whole_beginning(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    batch = [*varied(), build_chain("z")]
    write(path, batch)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedFileError, match=f"{path} is damaged"):
        list(read(path))
    sidecar_of(path).unlink()
    for length in range(1, len(content), max(1, len(content) // 97)):
        path.write_bytes(content[:length])
        got: list[ExportedTrajectory] = []
        error = None
        try:
            got.extend(read(path))
        except ExportError as e:
            error = str(e)
        if error is not None:
            assert str(path) in error
        else:
            # Only a cut between two lines of JSON can go unseen, and then between trajectories.
            assert suffix == "jsonl"
            assert content[length - 1 : length] == b"\n" or content[length : length + 1] == b"\n"
        assert got == batch[: len(got)]


def test_a_flipped_byte_in_a_parquet_page_is_an_error(tmp_path):
    path = tmp_path / "x.parquet"
    rng = np.random.default_rng(0)
    long = step(rng.integers(0, 9999, 5000).tolist(), [1])
    write(path, [exported(long)])
    content = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0)
    ids = next(
        c
        for i in range(column.num_columns)
        if (c := column.column(i)).path_in_schema.startswith("input_ids")
    )
    start = ids.dictionary_page_offset if ids.has_dictionary_page else ids.data_page_offset
    content[start + ids.total_compressed_size // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=f"{path} is damaged"):
        list(read(path))
    sidecar_of(path).unlink()  # Parquet has checksums of its own
    with pytest.raises(ExportError, match="damaged"):
        list(read(path))


@BOTH
def test_a_missing_row_of_a_trajectory_is_an_error(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    write(path, varied())
    rewrite(path, rows_of(path)[:-1])
    with pytest.raises(ExportError, match="1 of the 2 rows of trajectory 'tree'"):
        list(read(path))


def test_a_reward_edited_wherever_it_stands_is_read(tmp_path):
    path = tmp_path / "x.jsonl"
    write(path, [build_chain()])
    (row,) = rows_of(path)
    row["steps"][-1]["reward"] = row["reward"] = 0.25
    rewrite(path, [row])
    (found,) = read(path)
    assert found.trajectory.reward == 0.25


def test_a_file_says_where_it_comes_from(tmp_path):
    write(tmp_path / "x.jsonl", [build_chain()], source="pool 'a', channel 'train'")
    (row,) = rows_of(tmp_path / "x.jsonl")
    assert row["provenance"]["source"] == "pool 'a', channel 'train'"
    assert row["provenance"]["schema_version"] == SCHEMA_VERSION
    assert row["provenance"]["exported_at"] > 1.7e9


@pytest.mark.parametrize("name", ["x.csv", "x"])
def test_an_unknown_suffix_names_the_known_ones(tmp_path, name):
    with pytest.raises(ExportError, match=r"pass a path in \.parquet or \.jsonl"):
        write(tmp_path / name, [])
    with pytest.raises(ExportError, match=r"pass a path in \.parquet or \.jsonl"):
        list(read(tmp_path / name))


@BOTH
@pytest.mark.parametrize(
    "wrong", [{"channel": "\ud800"}, {"n_rollouts": 2**70}, {"state": object()}]
)
def test_a_value_that_its_column_cannot_carry_is_refused(tmp_path, suffix, wrong):
    with pytest.raises(ExportError, match="a value that no column can carry"):
        write(tmp_path / f"x.{suffix}", [build_chain(**wrong)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": [[1]]},
        {"input_ids": None},
        {"input_ids": []},
        {"input_ids": [1, 10, 20, 30, 11, 21, 31, 12, 2**32 + 22]},
        {"steps": 3},
        {"metadata": "{"},
        {"metadata": '{"__stepwell__": "pickle", "value": ""}'},
        {"provenance": None},
        {"log_probs": ["a"]},
        {"log_probs": [None, -0.5]},
    ],
)
def test_a_malformed_row_is_an_error_that_names_its_line(tmp_path, change):
    path = tmp_path / "x.jsonl"
    write(path, [build_chain()])
    (row,) = rows_of(path)
    rewrite(path, [row | change])
    with pytest.raises(ExportError, match=rf"{path}: line 1"):
        list(read(path))


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ExportError("x.parquet: no")))
    assert isinstance(error, ValueError)
    assert str(error) == "x.parquet: no"

"""The prompt source: order, epochs, what was put back, what is saved, what is refused."""

import datetime
import gzip
import json
import random
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer

from stepwell.trainer.config import DataConfig, SourceConfig, Truncation
from stepwell.trainer.data import PromptSource, Task
from stepwell.trainer.data.prompt_length import PromptMeter
from stepwell.trainer.errors import DataError, DataExhaustedError
from stepwell.trainer.ledger import Ledger
from stepwell.trainer.rollout.producer import new_uid

WriteLines = Callable[..., Path]


def config(**fields: Any) -> SourceConfig:
    source: SourceConfig = TypeAdapter(SourceConfig).validate_python(fields)
    return source


def chain_sum(**fields: Any) -> SourceConfig:
    return config(**{"kind": "reasoning_gym", "dataset": "chain_sum", "size": 10} | fields)


def jsonl(path: Path, **fields: Any) -> SourceConfig:
    return config(kind="jsonl", path=path, **fields)


def take(source: PromptSource, n: int) -> list[str]:
    return [source.next()["instance_id"] for _ in range(n)]


@pytest.fixture(autouse=True)
def caches_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def write(tmp_path: Path) -> WriteLines:
    def write(*rows: Any) -> Path:
        path = tmp_path / "some.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return path

    return write


def next_or_none(source: PromptSource) -> Task | None:
    try:
        return source.next()
    except DataExhaustedError:
        return None


# ── epochs and order ─────────────────────────────────────────────────────────────────────────────


def test_every_task_comes_once_an_epoch_in_another_order_each_time() -> None:
    source = PromptSource(chain_sum())
    first, second = take(source, 10), take(source, 10)
    assert len(set(first)) == 10
    assert Counter(first) == Counter(second)
    assert first != second


def test_the_order_depends_on_the_shuffle_seed_alone() -> None:
    order = take(PromptSource(chain_sum(shuffle_seed=1)), 20)
    assert take(PromptSource(chain_sum(shuffle_seed=1)), 20) == order
    assert take(PromptSource(chain_sum(shuffle_seed=2)), 20) != order


def test_without_shuffling_the_order_is_the_sources_own() -> None:
    source = PromptSource(chain_sum(shuffle=False, seed=100, size=3))
    assert take(source, 4) == ["chain_sum-100", "chain_sum-101", "chain_sum-102", "chain_sum-100"]


def test_after_the_last_epoch_the_source_says_so_and_stays_exhausted() -> None:
    source = PromptSource(chain_sum(epochs=2, size=3))
    take(source, 6)
    for _ in range(2):
        with pytest.raises(DataExhaustedError, match="all 2 epochs of 3 tasks are done"):
            source.next()


def test_all_gives_every_task_in_order_and_moves_nothing() -> None:
    source = PromptSource(chain_sum())
    before = source.state_dict()
    assert [t["instance_id"] for t in source.all()] == [f"chain_sum-{i}" for i in range(10)]
    assert source.state_dict() == before


# ── what comes back ──────────────────────────────────────────────────────────────────────────────


def test_a_task_that_was_put_back_comes_before_anything_new() -> None:
    source = PromptSource(chain_sum(size=5))
    handed_out = [source.next() for _ in range(3)]
    source.put_back([handed_out[1]])
    assert source.next() == handed_out[1]
    assert {source.next()["instance_id"] for _ in range(2)}.isdisjoint(
        t["instance_id"] for t in handed_out
    )


def test_a_task_put_back_after_the_last_epoch_is_still_handed_out() -> None:
    source = PromptSource(chain_sum(epochs=1, size=2))
    last = [source.next(), source.next()][-1]
    source.put_back([last])
    assert source.next() == last
    with pytest.raises(DataExhaustedError):
        source.next()


# ── ids to skip ──────────────────────────────────────────────────────────────────────────────────


def test_skipped_ids_are_never_handed_out_and_more_may_be_skipped_on_resume(tmp_path: Path) -> None:
    source = PromptSource(chain_sum(skip_instance_ids=["chain_sum-3", "chain_sum-5"]))
    seen = take(source, 8)
    assert sorted(seen) == [f"chain_sum-{i}" for i in (0, 1, 2, 4, 6, 7, 8, 9)]
    ids = tmp_path / "done.txt"
    ids.write_text("chain_sum-3\n\nchain_sum-5 \nchain_sum-7\n")
    again = PromptSource(chain_sum(skip_instance_ids=str(ids)))
    again.load_state_dict(source.state_dict())
    assert sorted(take(again, 7)) == [f"chain_sum-{i}" for i in (0, 1, 2, 4, 6, 8, 9)]


def test_an_id_that_is_skipped_on_resume_is_not_handed_out_again_either() -> None:
    """A prompt that kills its worker is in flight when the run is stopped, and so comes back."""
    source = PromptSource(chain_sum(size=3, shuffle=False))
    source.put_back([source.next() for _ in range(3)])
    again = PromptSource(chain_sum(size=3, shuffle=False, skip_instance_ids=["chain_sum-1"]))
    again.load_state_dict(source.state_dict())
    assert sorted(take(again, 2)) == ["chain_sum-0", "chain_sum-2"]


def test_a_list_of_ids_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(DataError, match=r"skip_instance_ids is .*gone.txt.*one id a line"):
        PromptSource(chain_sum(skip_instance_ids="gone.txt"))


# ── save and load ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("handed_out", [0, 3, 10, 17])
def test_a_restored_source_goes_on_exactly_where_it_stood(handed_out: int) -> None:
    source = PromptSource(chain_sum())
    tasks = [source.next() for _ in range(handed_out)]
    source.put_back(tasks[:2])
    state = json.loads(json.dumps(source.state_dict()))
    restored = PromptSource(chain_sum())
    restored.load_state_dict(state)
    assert take(restored, 25) == take(source, 25)


@given(st.lists(st.sampled_from(["next", "back", "save"]), max_size=40), st.integers(0, 99))
def test_whatever_happens_a_restored_source_repeats_and_skips_nothing(
    moves: list[str], seed: int
) -> None:
    draw = random.Random(seed)
    source = PromptSource(chain_sum(size=6, epochs=1, shuffle_seed=seed))
    out: list[Task] = []
    for move in moves:
        if move == "next":
            if (task := next_or_none(source)) is not None:
                out.append(task)
            else:
                assert not source.waiting
                assert len(out) == 6
        elif move == "back" and out:
            source.put_back([out.pop(draw.randrange(len(out)))])
        elif move == "save":
            state = json.loads(json.dumps(source.state_dict()))
            source = PromptSource(chain_sum(size=6, epochs=1, shuffle_seed=seed))
            source.load_state_dict(state)
    rest = list(iter(lambda: next_or_none(source), None))
    ids = [t["instance_id"] for t in out + rest]
    assert sorted(ids) == sorted({f"chain_sum-{i}" for i in range(6)})


def test_the_state_of_other_data_is_refused_by_what_differs() -> None:
    state = PromptSource(chain_sum(size=10)).state_dict()
    with pytest.raises(DataError, match=r"other data: size 10 \(now 11\)"):
        PromptSource(chain_sum(size=11)).load_state_dict(state)


def test_the_state_of_a_file_that_grew_is_refused(write: WriteLines) -> None:
    rows = [{"question": q, "answer": "1"} for q in "abc"]
    state = PromptSource(jsonl(write(*rows))).state_dict()
    with pytest.raises(DataError, match=r"tasks 3 \(now 4\)"):
        PromptSource(jsonl(write(*rows, rows[0]))).load_state_dict(state)


def test_more_epochs_may_be_asked_for_on_resume() -> None:
    source = PromptSource(chain_sum(epochs=1, size=4))
    take(source, 4)
    longer = PromptSource(chain_sum(epochs=2, size=4))
    longer.load_state_dict(source.state_dict())
    assert len(set(take(longer, 4))) == 4


# ── reasoning_gym ────────────────────────────────────────────────────────────────────────────────


def test_a_reasoning_gym_task_carries_question_answer_and_where_it_came_from() -> None:
    task = PromptSource(chain_sum(seed=7, shuffle=False)).next()
    assert task["instance_id"] == "chain_sum-7"
    assert task["data_source"] == "chain_sum"
    assert task["metadata"]["expression"] in task["question"]
    assert eval(task["metadata"]["expression"]) == int(task["answer"])
    assert json.loads(json.dumps(task)) == task


def test_params_reach_the_data_set() -> None:
    tasks = PromptSource(chain_sum(params={"min_terms": 2, "max_terms": 2})).all()
    assert {t["metadata"]["num_terms"] for t in tasks} == {2}


def test_an_unknown_data_set_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="dataset is 'chain_sums', which reasoning_gym"):
        PromptSource(chain_sum(dataset="chain_sums"))


def test_an_unknown_param_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"params holds terms, .*known: .*max_terms"):
        PromptSource(chain_sum(params={"terms": 2}))


def test_a_param_that_the_data_set_refuses_is_told_with_its_reason() -> None:
    with pytest.raises(DataError, match="refuses: max_terms must be >= min_terms"):
        PromptSource(chain_sum(params={"min_terms": 9}))
    for dataset, params in (
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 1}]}),
        ("arc_agi", {"board_format_opts": {"row_delimiter": ";"}}),
    ):
        with pytest.raises(DataError, match=rf"which {dataset} refuses: 'dict' object has no att"):
            PromptSource(chain_sum(dataset=dataset, params=params))


# ── training and evaluation apart ────────────────────────────────────────────────────────────────


def test_training_and_evaluation_with_overlapping_seeds_are_refused() -> None:
    """reasoning_gym draws problem i from seed + i, so seeds 1 and 2 share all but one problem."""
    fields = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    with pytest.raises(ValidationError, match=r"\[1, 2001\).*\[2, 130\).*2001 or more"):
        DataConfig.model_validate(
            {
                "train": {**fields, "size": 2000, "seed": 1},
                "val": {**fields, "size": 128, "seed": 2},
            }
        )
    DataConfig.model_validate(
        {"train": {**fields, "size": 2000, "seed": 1}, "val": {**fields, "size": 128, "seed": 2001}}
    )


def test_a_problem_of_the_evaluation_set_is_never_handed_out_for_training() -> None:
    few = {"params": {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}}
    evaluation = PromptSource(chain_sum(size=50, seed=10_000, **few))
    plain = PromptSource(chain_sum(size=300, **few))
    assert plain.prompts() & evaluation.prompts(), "one-digit sums repeat across seeds"
    training = PromptSource(chain_sum(size=300, **few), exclude=evaluation.prompts())
    kept = {t["instance_id"] for t in training.all()}
    assert set(take(training, 2 * len(kept))) == kept
    assert not {t["question"] for t in training.all()} & evaluation.prompts()


def test_a_label_that_a_data_frame_misses_is_none(tmp_path: Path) -> None:
    rows = '{"question": "a", "answer": NaN}\n{"question": "b", "answer": 2.5}'
    (tmp_path / "t.jsonl").write_text(rows)
    tasks = PromptSource(jsonl(tmp_path / "t.jsonl")).all()
    assert [task["answer"] for task in tasks] == [None, 2.5]


def test_half_a_character_in_an_id_is_a_question_mark(tmp_path: Path) -> None:
    """The ledger could not name it, and the run ended when the task was issued."""
    (tmp_path / "t.jsonl").write_text('{"question": "a", "answer": 1, "instance_id": "\\ud800x"}')
    (task,) = PromptSource(jsonl(tmp_path / "t.jsonl")).all()
    Ledger(tmp_path / "ledger.jsonl").issued(new_uid(task), task["instance_id"])
    assert task["instance_id"] == "?x"


def environments(path: Path, *own: dict[str, Any]) -> Path:
    """Tasks with one prompt, each in an environment of its own."""
    rows = [{"question": "Play.", "answer": None, "metadata": metadata} for metadata in own]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("name", ["reset", "index"])
def test_one_prompt_in_several_environments_is_several(tmp_path: Path, name: str) -> None:
    """OpenEnv has them by `metadata.reset`, a taskset of verifiers' by the place in it."""
    taskset = {"taskset": "wordle"} if name == "index" else {}
    metadata = [{name: {"seed": i}, **taskset} for i in range(20)]
    train = jsonl(environments(tmp_path / "t.jsonl", *metadata))
    val = jsonl(environments(tmp_path / "v.jsonl", metadata[3], {name: {"seed": 99}, **taskset}))
    assert len(PromptSource(train, exclude=PromptSource(val).prompts()).all()) == 19
    source = PromptSource(train)
    assert len(source.hold_out()) == 2
    assert len(source.all()) == 18


def test_a_prompt_in_one_environment_is_one_whatever_else_is_said_of_it(tmp_path: Path) -> None:
    source = PromptSource(jsonl(environments(tmp_path / "t.jsonl", {"index": 1}, {"index": 2})))
    with pytest.raises(DataError, match=r"has 1 prompt, .* tasks with other prompts"):
        source.hold_out()


def test_excluding_everything_is_refused_at_once() -> None:
    source = PromptSource(chain_sum())
    with pytest.raises(
        DataError, match=r"data\.train .* no tasks left: all 10 are also in data\.val"
    ):
        PromptSource(chain_sum(), exclude=source.prompts())


# ── JSONL ────────────────────────────────────────────────────────────────────────────────────────


def only(path: Path, **fields: Any) -> Task:
    (task,) = PromptSource(jsonl(path, **fields)).all()
    return task


def test_a_jsonl_line_becomes_a_task_by_its_keys(write: WriteLines) -> None:
    path = write({"problem": "2 + 2?", "solution": ["4", "four"], "info": {"level": 1}})
    assert only(
        path, prompt_key="problem", label_key="solution", metadata_key="info", data_source="sums"
    ) == {
        "instance_id": "some-1",
        "data_source": "sums",
        "question": "2 + 2?",
        "answer": ["4", "four"],
        "metadata": {"level": 1},
    }


def test_a_list_of_messages_is_kept_as_messages(write: WriteLines) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    task = only(write({"prompt": messages, "answer": "a"}), prompt_key="prompt")
    assert task["messages"] == messages
    assert "question" not in task


def test_an_instance_id_is_kept_where_there_is_one_and_assigned_where_not(
    write: WriteLines,
) -> None:
    path = write(
        {"question": "a", "answer": "1", "instance_id": "mine"},
        {"question": "b", "answer": "2", "metadata": {"instance_id": 7}},
        "",
        {"question": "c", "answer": "3"},
    )
    assert [t["instance_id"] for t in PromptSource(jsonl(path)).all()] == ["mine", "7", "some-4"]


@pytest.mark.parametrize("instance_id", ["django/django-1", "a b?c#d%e", "é/", "plain-1.2_3~4"])
def test_any_instance_id_makes_a_prompt_uid_that_may_stand_in_a_url(
    write: WriteLines, instance_id: str
) -> None:
    task = only(write({"question": "a", "answer": "1", "instance_id": instance_id}))
    assert task["instance_id"] == instance_id
    uid = new_uid(task)
    assert quote(uid, safe="") == uid
    assert uid != new_uid(task)


def test_an_instance_id_that_occurs_twice_is_refused(write: WriteLines) -> None:
    row = {"question": "a", "answer": "1", "instance_id": "mine"}
    with pytest.raises(
        DataError, match=r"some.jsonl:2: instance_id 'mine' is that of .*some.jsonl:1"
    ):
        PromptSource(jsonl(write(row, row)))


def test_data_without_labels_is_read_when_told_so(write: WriteLines) -> None:
    path = write({"question": "a"})
    with pytest.raises(DataError, match=r"some.jsonl:1 has no answer; .*label_key"):
        PromptSource(jsonl(path))
    assert only(path, label_key=None)["answer"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"some.jsonl:2 is no JSON"),
        ("[" * 100_000, r"some.jsonl:2 is no JSON"),
        ("[1]", r"some.jsonl:2 holds a list"),
        ('{"answer": "1"}', r"some.jsonl:2 has no 'question'; set prompt_key.*it has answer"),
        ('{"question": "", "answer": "1"}', r"some.jsonl:2: question is ''"),
        ('{"question": "a", "answer": "1", "metadata": 3}', r"some.jsonl:2: metadata is 3"),
        (
            '{"question": "a", "answer": "1", "metadata": "%s"}' % ("[" * 100_000),
            r"some.jsonl:2: metadata is '\[\[",
        ),
        (
            '{"question": "\\ud800", "answer": "1"}',
            r"some.jsonl:2: question holds a lone surrogate",
        ),
    ],
)
def test_a_bad_line_is_refused_by_its_number(write: WriteLines, line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptSource(jsonl(write({"question": "a", "answer": "1"}, line)))


def test_a_missing_file_and_an_empty_one_are_refused_by_path(
    tmp_path: Path, write: WriteLines
) -> None:
    with pytest.raises(DataError, match=r"path is .*nowhere.jsonl.*cannot be read"):
        PromptSource(jsonl(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="has no tasks"):
        PromptSource(jsonl(write()))


def test_a_folder_of_files_is_one_data_set_whose_ids_do_not_collide(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        for name in ("b", "a"):
            line = json.dumps({"question": f"{folder}{name}", "answer": ""})
            (tmp_path / folder / f"{name}.jsonl").write_text(line)
    tasks = PromptSource(jsonl(tmp_path / "*" / "*.jsonl", shuffle=False)).all()
    assert [t["question"] for t in tasks] == ["xa", "xb", "ya", "yb"]
    assert [t["instance_id"] for t in tasks] == ["x-a-1", "x-b-1", "y-a-1", "y-b-1"]
    one = PromptSource(jsonl(tmp_path / "y")).all()
    assert [t["instance_id"] for t in one] == ["a-1", "b-1"]


@given(st.lists(st.text(max_size=12), min_size=1, max_size=6), st.booleans())
def test_any_text_is_read_back_from_its_line(texts: list[str], ends: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.jsonl"
        lines = [json.dumps({"question": f"q{t}", "answer": t}, ensure_ascii=False) for t in texts]
        clean = [ln.encode("utf-8", "surrogatepass") for ln in lines]
        path.write_bytes(b"\n".join(clean) + b"\n" * ends)
        assert [t["answer"] for t in PromptSource(jsonl(path)).all()] == texts


def test_a_mark_of_the_byte_order_before_the_first_line_is_no_part_of_it(tmp_path: Path) -> None:
    """Editors and spreadsheets of Windows write one, with lines that end in two characters."""
    rows, ids = tmp_path / "rows.jsonl", tmp_path / "ids.txt"
    lines = (json.dumps({"instance_id": str(i), "question": "a"}) for i in range(3))
    rows.write_text("\r\n".join(lines), encoding="utf-8-sig")
    ids.write_text("0\r\n", encoding="utf-8-sig")
    source = PromptSource(jsonl(rows, label_key=None, skip_instance_ids=ids))
    assert [task["instance_id"] for task in source.all()] == ["1", "2"]


def test_numbers_that_only_python_reads_are_read(write: WriteLines) -> None:
    task = only(write('{"question": "a", "answer": 123456789012345678901234567890}'))
    assert task["answer"] == 123456789012345678901234567890


def test_lines_stay_on_disk(write: WriteLines) -> None:
    """Memory that is held after opening does not grow with what the lines hold."""

    def held(size: int) -> int:
        path = write(*({"question": "x" * size, "answer": str(i)} for i in range(300)))
        tracemalloc.start()
        source = PromptSource(jsonl(path))
        try:
            assert len(source) == 300
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert held(10_000) < held(10) + 300 * 1_000


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
def test_tools_are_read_as_a_list_or_as_its_text(write: WriteLines, tools: Any) -> None:
    row = {"question": "a", "answer": "1", "tools": tools}
    assert only(write(row), tool_key="tools")["tools"] == [TOOL]
    assert "tools" not in only(write(row))


def test_a_row_without_tools_has_none(write: WriteLines) -> None:
    row = {"question": "a", "answer": "1", "tools": []}
    assert "tools" not in only(write(row), tool_key="tools")


def test_tools_that_are_none_are_refused_by_their_row(write: WriteLines) -> None:
    row = {"question": "a", "answer": "1", "tools": ["f"]}
    with pytest.raises(DataError, match=r"some.jsonl:1: tools is \['f'\]; it is a list of tools"):
        PromptSource(jsonl(write(row), tool_key="tools"))


def test_a_key_with_dots_reaches_into_objects_as_verls_data_needs(write: WriteLines) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": json.dumps({"split": "train"}),
    }
    keys = {"prompt_key": "prompt", "label_key": "reward_model.ground_truth"}
    assert only(write(row), **keys, metadata_key="extra_info") == {
        "instance_id": "some-1",
        "data_source": "openai/gsm8k",
        "messages": row["prompt"],
        "answer": "4",
        "metadata": {"split": "train"},
    }


# ── Parquet and Hugging Face ─────────────────────────────────────────────────────────────────────

CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
    {"role": "tool", "content": "4", "tool_call_id": "1"},
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two files and an empty one; the schema gives every message all fields, as Parquet does."""
    (tmp_path / "table").mkdir()
    for part, size in enumerate((3, 0, 2)):
        rows = [{"prompt": CHAT, "answer": "4", "extra": {"n": n, "none": None}} for n in range(3)]
        pq.write_table(
            pa.Table.from_pylist(rows).slice(0, size),
            tmp_path / "table" / f"part-{part}.parquet",
        )
    return tmp_path / "table"


def test_parquet_rows_are_tasks_whose_messages_hold_no_nulls_of_the_schema(table: Path) -> None:
    source = PromptSource(
        config(kind="parquet", path=table, prompt_key="prompt", metadata_key="extra", shuffle=False)
    )
    assert [t["instance_id"] for t in source.all()] == [
        "part-0-0",
        "part-0-1",
        "part-0-2",
        "part-2-0",
        "part-2-1",
    ]
    task = source.next()
    assert task["messages"] == CHAT
    assert task["metadata"] == {"n": 0, "none": None}
    assert task["data_source"] == "part-0"


def test_what_json_has_not_becomes_text(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "1", "metadata": {"day": datetime.date(2026, 1, 2)}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    task = only_of(kind="parquet", path=tmp_path / "t.parquet")
    assert task["metadata"] == {"day": "2026-01-02"}


def test_text_in_a_column_of_bytes_is_text(tmp_path: Path) -> None:
    """As tools write Parquet that do not say that a column is UTF-8."""
    rows = {"question": ["Wie groß?".encode()], "answer": [b"1"], "metadata": [b'{"n": 1}']}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    task = only_of(kind="parquet", path=tmp_path / "t.parquet")
    assert (task["question"], task["answer"], task["metadata"]) == ("Wie groß?", "1", {"n": 1})


def test_prompts_of_a_slice_are_measured(tmp_path: Path) -> None:
    made = datasets.Dataset.from_dict({"question": ["a", "b " * 90], "answer": ["1", "2"]})
    made.to_parquet(str(tmp_path / "t.parquet"))

    def kept(split: str) -> int:
        source = config(
            kind="huggingface", path=str(tmp_path / "t.parquet"), split=split, max_prompt_tokens=40
        )
        return len(PromptSource(source, tokenizer_path=MODEL))

    assert kept("train[:1]") == 1
    with pytest.raises(DataError, match="all 1 prompts are longer"):
        kept("train[1:]")


def test_a_hugging_face_data_set_is_read_from_disk_by_split(tmp_path: Path) -> None:
    made = datasets.DatasetDict(
        {s: datasets.Dataset.from_dict({"question": [s], "answer": ["1"]}) for s in ("train", "b")}
    )
    made.save_to_disk(str(tmp_path / "saved"))
    task = only_of(kind="huggingface", path=tmp_path / "saved", split="b")
    assert (task["question"], task["instance_id"]) == ("b", "saved-b-0")
    with pytest.raises(DataError, match=r"split is 'c'; .*saved with train, b"):
        only_of(kind="huggingface", path=tmp_path / "saved", split="c")


def test_a_hugging_face_folder_of_files_is_read_with_slices(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    lines = [{"question": f"q{i}", "answer": "1", "meta": {f"k{i}": i}} for i in range(4)]
    (tmp_path / "hub" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = PromptSource(
        config(
            kind="huggingface", path=str(tmp_path / "hub"), split="train[1:3]", metadata_key="meta"
        )
    )
    tasks = source.all()
    assert [t["question"] for t in tasks] == ["q1", "q2"]
    assert [t["metadata"] for t in tasks] == [{"k1": 1}, {"k2": 2}], "objects keep their own keys"
    assert [t["instance_id"] for t in tasks] == ["hub-train-1-3-0", "hub-train-1-3-1"]


CELLS = 'question,answer,metadata\nseven,007,"{""k"": 1}"\n"a\nb",NA,\n42?,42,\nnone,,\n'


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz"])
def test_cells_of_a_csv_file_are_their_text(tmp_path: Path, name: str) -> None:
    """`datasets` guesses their types: one empty cell makes 42.0 of 42, which no answer matches."""
    text = CELLS.replace(",", "\t") if name == "t.tsv" else CELLS
    packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(packed)
    tasks = PromptSource(config(kind="huggingface", path=str(tmp_path / name))).all()
    assert [task["question"] for task in tasks] == ["seven", "a\nb", "42?", "none"]
    assert [task["answer"] for task in tasks] == ["007", "NA", "42", None]
    assert [task["metadata"] for task in tasks] == [{"k": 1}, {}, {}, {}]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("t.xlsx", b"PK", r"no \.xlsx is read; name a file that ends in \.csv, \.tsv, "),
        ("tasks", b"{}", "no file without an ending is read"),
        ("t.csv", b"question,answer\nSay a, b,7\n", "more cells .*; quote a cell with a ','"),
        ("t.csv", b"question,answer\nhi,7,\n", r"more cells .*, or end rows without it"),
        ("t.csv", b"", "EmptyDataError: No columns"),
        ("t.csv", "frage,größe\n".encode("latin-1"), "UnicodeDecodeError.*; write UTF-8"),
    ],
)
def test_a_file_that_is_no_table_is_refused_without_asking_the_hub(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        PromptSource(config(kind="huggingface", path=str(tmp_path / name)))


def test_columns_of_media_that_no_row_fills_are_no_media(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"question": ["a", "b"], "answer": ["1", "2"]}
    nothing = {"audio": ["", None], "videos": pa.array([[], None], pa.large_list(pa.string()))}
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({**rows, **nothing}), path)
    assert [t["question"] for t in PromptSource(config(kind="parquet", path=path)).all()] == [
        "a",
        "b",
    ]
    pq.write_table(pa.table({**rows, **nothing, "audio": ["", "cat.wav"]}), path)
    with pytest.raises(DataError, match=r"t row 1 .*audio"):
        PromptSource(config(kind="parquet", path=path))


MEDIA_ROWS: dict[str, Any] = {
    "images": {"images": ["cat.png"]},
    "image": {"image": "cat.png"},
    "videos": {"videos": [{"path": "cat.mp4"}]},
    "audio": {"audio": {"path": "cat.wav"}},
    "<image> in prompt": {"prompt": "<image>Find x."},
    "<video> in prompt": {"prompt": [{"role": "user", "content": "Look: <video>"}]},
    "<audio> in prompt": {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "<audio>"}]}]
    },
    "a part of type 'image_url' in prompt": {
        "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    },
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("what", MEDIA_ROWS)
def test_a_row_about_an_image_is_refused_and_not_trained_on_its_text(
    tmp_path: Path, what: str, kind: str
) -> None:
    absent: dict[str, Any] = {"images": [], "image": None}
    row = {"prompt": "Find x.", "answer": "1", **MEDIA_ROWS[what]}
    path = tmp_path / f"some.{kind}"
    if kind == "jsonl":
        rows = [{"prompt": "a", "answer": "1", **absent}, row]
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(DataError, match=rf"{what}; videos and sounds are not trained"):
        PromptSource(config(kind=kind, path=path, prompt_key="prompt", label_key="answer"))


def test_the_first_row_with_an_image_is_named_however_late_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    rows = [{"question": "a?", "answer": "1", "images": []} for _ in range(1_500)]
    rows[1_234] = {**rows[0], "images": ["cat.png"]}
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match="row 1234 has images"):
        PromptSource(config(kind="parquet", path=path))


def test_columns_that_no_task_is_made_of_are_not_read(tmp_path: Path) -> None:
    features = datasets.Features(
        {"question": datasets.Value("string"), "picture": datasets.List(datasets.Image())}
    )
    rows = {"question": ["a?"], "picture": [[{"bytes": b"no image", "path": None}]]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "i.parquet"))
    task = only_of(kind="parquet", path=tmp_path / "i.parquet", label_key=None)
    assert task["question"] == "a?"
    with pytest.raises(DataError, match=r"has no 'prompt'.*it has picture, question"):
        only_of(
            kind="parquet",
            path=tmp_path / "i.parquet",
            prompt_key="prompt",
            label_key="question",
        )


def only_of(**fields: Any) -> Task:
    fields["path"] = str(fields["path"])
    (task,) = PromptSource(config(**fields)).all()
    return task


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": "1"}, {"question": "", "answer": "1"}], "t row 1: question"),
        ([{"question": "a"}], "t row 0 has no answer"),
        (
            [{"question": "a", "answer": "1", "instance_id": 3}] * 2,
            "t row 1: instance_id '3' is that of t row 0",
        ),
        ([], "t.parquet has no tasks"),
    ],
)
def test_a_bad_row_of_a_table_is_refused_at_the_start(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    schema = None if rows else pa.schema([("question", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=message):
        PromptSource(config(kind="parquet", path=tmp_path / "t.parquet"))


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_text("not a table")
    with pytest.raises(DataError, match=r"no.parquet.*cannot be read"):
        PromptSource(config(kind="parquet", path=tmp_path / "no.parquet"))
    with pytest.raises(DataError, match=r"no \*.parquet in"):
        PromptSource(config(kind="parquet", path=tmp_path / "gone"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data set .*empty.* cannot be loaded"):
        PromptSource(config(kind="huggingface", path=str(tmp_path / "empty")))


# ── long prompts ─────────────────────────────────────────────────────────────────────────────────

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def tokens(task: Task) -> int:
    """Prompt tokens of a task, as the gateway will count them."""
    messages = task.get("messages") or [{"role": "user", "content": task["question"]}]
    ids = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(
        messages, tools=task.get("tools"), add_generation_prompt=True, return_dict=False
    )
    return len(ids)


def long_prompts(path: Path, limit: int, **fields: Any) -> PromptSource:
    fields = {"max_prompt_tokens": limit, "shuffle": False, "label_key": None} | fields
    return PromptSource(jsonl(path, **fields), tokenizer_path=MODEL)


def test_prompts_beyond_the_limit_are_left_out_template_and_tools_counted(
    write: WriteLines,
) -> None:
    path = write(
        {"question": "a"},
        {"question": "b " * 200},
        {"question": "c", "tools": [TOOL]},
    )
    sizes = [tokens(t) for t in PromptSource(jsonl(path, label_key=None, tool_key="tools")).all()]
    limit = sizes[2] - 1
    assert sizes[0] <= limit < sizes[1]
    kept = long_prompts(path, limit, tool_key="tools").all()
    assert [t["instance_id"] for t in kept] == ["some-1"], "ids are those of the lines"
    kept = long_prompts(path, limit + 1, tool_key="tools").all()
    assert [t["instance_id"] for t in kept] == ["some-1", "some-3"]


def test_text_that_no_tokenizer_takes_is_refused_by_its_line(write: WriteLines) -> None:
    path = write({"question": "a"}, {"question": "\ud800", "instance_id": "\ud800"})
    with pytest.raises(DataError, match=r"some.jsonl:2: question holds a lone surrogate"):
        long_prompts(path, 40)


def test_when_every_prompt_is_too_long_the_shortest_is_named(write: WriteLines) -> None:
    path = write({"question": "b " * 90}, {"question": "b " * 30})
    shortest = min(tokens(t) for t in PromptSource(jsonl(path, label_key=None)).all())
    with pytest.raises(DataError, match=rf"all 2 prompts .*the shortest has {shortest}\)"):
        long_prompts(path, 10)


def test_a_prompt_that_is_too_long_and_not_to_be_left_out_is_refused(write: WriteLines) -> None:
    path = write({"question": "a"}, {"question": "b " * 90})
    with pytest.raises(
        DataError,
        match=r"some.jsonl:2: the prompt has \d+ tokens.*overlong_prompts, or set truncation",
    ):
        long_prompts(path, 40, filter_overlong_prompts=False)


LONG: dict[str, Any] = {
    "question": [
        {"role": "system", "content": "Rules. " * 3},
        {"role": "user", "content": "one two three four five six seven eight nine ten " * 2},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [{"type": "text", "text": "1 2 3 4 5 6 7 8 9 10 11 12"}]},
    ]
}


def words(task: Task) -> str:
    texts = [
        m["content"] if isinstance(m["content"], str) else m["content"][0]["text"]
        for m in task["messages"][1:]
    ]
    return "|".join(texts)


@pytest.mark.parametrize(
    ("side", "begins", "ends"),
    [("left", False, True), ("right", True, False), ("middle", True, True)],
)
def test_cutting_takes_text_from_the_named_side_and_is_told(
    write: WriteLines, caplog: pytest.LogCaptureFixture, side: str, begins: bool, ends: bool
) -> None:
    path = write(LONG, {"question": "short"})
    source = long_prompts(path, 80, filter_overlong_prompts=False, truncation=side)
    task, short = source.next(), source.next()
    whole = LONG["question"]
    cut = task["truncated_tokens"]
    assert (
        f"1 of 2 prompts are cut to max_prompt_tokens = 80 (truncation: {side}), {cut} tokens"
        in (caplog.text)
    )
    assert cut > 0
    assert "truncated_tokens" not in short
    assert words(task).startswith("one two") is begins
    assert words(task).endswith("11 12") is ends
    assert task["messages"][0] == whole[0], "system messages are not cut"
    assert [m["role"] for m in task["messages"]] == [m["role"] for m in whole]
    text_only = [{**m, "content": words({"messages": [{}, m]})} for m in task["messages"][1:]]
    length = tokens({"messages": [task["messages"][0], *text_only]})
    assert 70 < length <= 80, "as little as needed"


@given(
    text=st.text(min_size=30, max_size=120),
    limit=st.integers(30, 60),
    side=st.sampled_from(["left", "right", "middle"]),
)
def test_a_cut_prompt_fits_and_holds_nothing_that_was_not_in_it(
    text: str, limit: int, side: Truncation
) -> None:
    meter = PromptMeter(MODEL, {})
    task = {"question": text}
    (before,) = meter.count([task])
    try:
        cut = meter.truncate(task, limit, side)
    except DataError:
        (empty,) = meter.count([{"question": ""}])
        assert empty >= limit - 8, "only the markup is left"
        return
    (after,) = meter.count([cut])
    assert after <= max(limit, min(before, limit))
    kept = cut["question"]
    if "truncated_tokens" not in cut:
        assert kept == text
    elif side == "left":
        assert text.endswith(kept)
    elif side == "right":
        assert text.startswith(kept)
    else:
        assert any(
            text.startswith(kept[:i]) and text.endswith(kept[i:]) for i in range(len(kept) + 1)
        )


def test_what_must_not_be_cut_is_refused_when_it_is_too_long(write: WriteLines) -> None:
    messages = [{"role": "system", "content": "Rules. " * 30}, {"role": "user", "content": "hi"}]
    path = write({"question": "hi"}, {"question": messages})
    with pytest.raises(DataError, match=r"some.jsonl:2: the prompt cannot be cut to .* = 40"):
        long_prompts(path, 40, filter_overlong_prompts=False, truncation="left")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncation": "left", "max_prompt_tokens": 9}, "filter_overlong_prompts leaves nothing"),
        ({"truncation": "left", "filter_overlong_prompts": False}, "set max_prompt_tokens"),
        ({"truncation": "top"}, "'left', 'right', 'middle' or 'error'"),
    ],
)
def test_truncation_that_could_never_happen_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        jsonl(Path("x.jsonl"), **fields)


def test_conversations_that_are_trained_as_they_are_are_never_cut() -> None:
    cut = {"truncation": "left", "filter_overlong_prompts": False, "max_prompt_tokens": 9}
    with pytest.raises(ValidationError, match=r"sft.truncation is 'left': a conversation"):
        DataConfig.model_validate({"sft": {"kind": "jsonl", "path": "x.jsonl", **cut}})


def test_an_evaluation_has_no_epochs() -> None:
    val = {"kind": "jsonl", "path": "x.jsonl", "epochs": 2}
    with pytest.raises(ValidationError, match=r"val.epochs is 2, .* set validation.n"):
        DataConfig.model_validate({"val": val})


def test_measuring_without_a_tokenizer_is_refused(write: WriteLines, tmp_path: Path) -> None:
    path = write({"question": "a"})
    with pytest.raises(DataError, match=r"max_prompt_tokens is 5.*tokenizer_path"):
        PromptSource(jsonl(path, label_key=None, max_prompt_tokens=5))
    with pytest.raises(DataError, match="no tokenizer can be loaded from"):
        PromptSource(jsonl(path, label_key=None, max_prompt_tokens=5), tokenizer_path=tmp_path)


# ── configuration ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sise": 3}, "sise"),
        ({"size": 0}, "size"),
        ({"kind": "csv"}, "'reasoning_gym', 'jsonl', 'parquet', 'huggingface'"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_a_wrong_key_or_value_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        chain_sum(**fields)

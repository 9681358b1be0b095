"""The prompt source: order, epochs, what was put back, what is saved, what is refused."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from trainer.data import DataError, DataExhaustedError, PromptSource, Task
from trainer.data_config import DataConfig, SourceConfig

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


@pytest.fixture
def write(tmp_path: Path) -> WriteLines:
    def write(*rows: Any) -> Path:
        path = tmp_path / "some.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return path

    return write


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


def test_the_state_of_other_data_is_refused_by_what_differs() -> None:
    state = PromptSource(chain_sum(size=10)).state_dict()
    with pytest.raises(DataError, match=r"other data: size 10 \(now 11\)"):
        PromptSource(chain_sum(size=11)).load_state_dict(state)


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


def test_excluding_everything_is_refused_at_once() -> None:
    source = PromptSource(chain_sum())
    with pytest.raises(DataError, match="no tasks left: all 10 are excluded"):
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
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
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


def test_an_instance_id_that_occurs_twice_is_refused(write: WriteLines) -> None:
    row = {"question": "a", "answer": "1", "instance_id": "mine"}
    with pytest.raises(DataError, match="instance_id 'mine' occurs 2 times"):
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
        ("[1]", r"some.jsonl:2 holds a list"),
        ('{"answer": "1"}', r"some.jsonl:2: question is None.*the line has answer"),
        ('{"question": "", "answer": "1"}', r"some.jsonl:2: question is ''"),
        ('{"question": "a", "answer": "1", "metadata": 3}', r"some.jsonl:2: metadata is 3"),
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


# ── configuration ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sise": 3}, "sise"),
        ({"size": 0}, "size"),
        ({"kind": "csv"}, "'reasoning_gym', 'jsonl'"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_a_wrong_key_or_value_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        chain_sum(**fields)

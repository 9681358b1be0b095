"""The document of slime's data source, with and without buffer: its classes, calls, shapes, files
and examples, as it has them. Where slime is installed (`make test-slime`), its own classes take the
same arguments and give the same samples."""

from __future__ import annotations

import json
import logging
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from stepwell.backends.slime.sample import SlimeSample, sample_class
from stepwell.datapool.sealed import sealed
from stepwell.trainer.errors import CheckpointError, ConfigError, DataError
from stepwell.trainer.slime import data_source as ours
from stepwell.trainer.slime.data_source import (
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    pop_first,
)
from tests.backends.slime_itself import HAS_SLIME, slime

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
N_PROMPTS = 5

Make = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    rows = (
        {"text": f"q{i} {'long ' * i}", "answer": f"a{i}", "metadata": {"level": i}, "tools": tools}
        for i in range(N_PROMPTS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def args(prompts: Path, tmp_path: Path) -> Callable[..., Namespace]:
    """The options of the document's table, and the others that its constructor reads."""

    def make(**given: Any) -> Namespace:
        plain = {
            "rollout_global_dataset": True,
            "rollout_shuffle": False,
            "n_samples_per_prompt": 2,
            "buffer_filter_path": None,
            "rollout_max_prompt_len": None,
            "input_key": "text",
            "label_key": "answer",
            "metadata_key": "metadata",
            "tool_key": None,
            "multimodal_keys": None,
            "prompt_data": str(prompts),
            "hf_checkpoint": str(MODEL),
            "apply_chat_template": False,
            "apply_chat_template_kwargs": {},
            "rollout_seed": 42,
            "dump_details": None,
            "save": str(tmp_path),
            "load": str(tmp_path),
        }
        return Namespace(**plain | given)

    return make


def numbers(groups: list[list[Any]]) -> list[list[int]]:
    return [[sample.index for sample in group] for group in groups]


def names(groups: list[list[Any]]) -> list[str]:
    """The prompt of each group, whose samples all have the same."""
    assert all(sample.prompt == group[0].prompt for group in groups for sample in group)
    return [group[0].prompt.split()[0] for group in groups]


# -- RolloutDataSource ---------------------------------------------------------------------------


def test_a_source_begins_at_the_start_of_epoch_0(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(args())
    assert (source.epoch_id, source.sample_index, source.sample_offset) == (0, 0, 0)
    assert source.metadata == {}
    assert len(source) == len(source.dataset) == N_PROMPTS
    assert [sample.label for sample in source.dataset.samples] == [f"a{i}" for i in range(5)]
    assert RolloutDataSource(args(rollout_global_dataset=False)).dataset is None


def test_get_samples_gives_groups_whose_samples_are_numbered(
    args: Callable[..., Namespace],
) -> None:
    source = RolloutDataSource(args())
    groups = source.get_samples(2)
    assert names(groups) == ["q0", "q1"]
    assert numbers(groups) == [[0, 1], [2, 3]]
    assert (source.sample_offset, source.sample_index, source.epoch_id) == (2, 4, 0)
    first, second = groups[0]
    assert (first.label, first.metadata) == ("a0", {"level": 0})
    assert first.status == sample_class().Status.PENDING
    first.metadata["level"] = 9
    assert second.metadata == source.dataset[0].metadata == {"level": 0}


def test_the_end_of_an_epoch_is_gone_over(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(args())
    assert names(source.get_samples(5)) == ["q0", "q1", "q2", "q3", "q4"]
    assert (source.epoch_id, source.sample_offset) == (0, 5)
    assert names(source.get_samples(2)) == ["q0", "q1"]
    assert (source.epoch_id, source.sample_offset) == (1, 2)
    assert names(source.get_samples(4)) == ["q2", "q3", "q4", "q0"]
    assert (source.epoch_id, source.sample_offset) == (2, 1)


def test_more_than_an_epoch_is_handed_out_whole(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(args())
    assert len(source.get_samples(12)) == 12
    assert (source.epoch_id, source.sample_offset) == (2, 2)


def test_each_epoch_is_shuffled_by_the_seed_and_its_number(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(args(rollout_shuffle=True, rollout_seed=3))
    for epoch in range(3):
        random.seed(3 + epoch)
        order = list(range(N_PROMPTS))
        random.shuffle(order)
        assert names(source.get_samples(N_PROMPTS)) == [f"q{i}" for i in order]


def test_without_a_global_dataset_samples_are_empty_but_for_their_index(
    args: Callable[..., Namespace],
) -> None:
    source = RolloutDataSource(args(rollout_global_dataset=False))
    groups = source.get_samples(2)
    assert numbers(groups) == [[0, 1], [2, 3]]
    assert {(s.prompt, s.response, s.reward) for g in groups for s in g} == {("", "", None)}


def test_position_and_data_can_be_set(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(args())
    source.epoch_id, source.sample_offset, source.sample_index = 3, 4, 100
    groups = source.get_samples(2)
    assert (names(groups), numbers(groups)) == (["q4", "q0"], [[100, 101], [102, 103]])
    assert source.epoch_id == 4
    source.dataset.samples = [sample for sample in source.dataset.samples if sample.label > "a2"]
    assert len(source) == 2
    source.dataset = None
    assert source.get_samples(1)[0][0].prompt == ""


def test_a_read_only_source_raises_what_slimes_does(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSource(args())
    with pytest.raises(RuntimeError, match="read-only"):
        source.add_samples(source.get_samples(1))


# -- save and load -------------------------------------------------------------------------------


def state_file(folder: Path, rollout_id: int | None) -> Path:
    return folder / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def test_save_writes_the_documented_file_with_the_documented_keys(
    args: Callable[..., Namespace], tmp_path: Path
) -> None:
    source = RolloutDataSource(args())
    source.get_samples(3)
    source.metadata["stage"] = "warm-up"
    source.save(7)
    state = torch.load(state_file(tmp_path, 7), weights_only=True)  # as slime reads it
    documented = {"sample_offset": 3, "epoch_id": 0, "sample_index": 6, "sample_group_index": 3}
    assert {name: state[name] for name in documented} == documented
    assert state["metadata"] == {"stage": "warm-up"}


def test_a_restarted_source_goes_on_after_the_rollout_that_was_saved(
    args: Callable[..., Namespace],
) -> None:
    source = RolloutDataSourceWithBuffer(args(rollout_shuffle=True))
    source.get_samples(7)
    source.add_samples(source.get_samples(1))
    source.save(4)
    expected = [[s.to_dict() for s in g] for g in source.get_samples(6)]
    again = RolloutDataSourceWithBuffer(args(rollout_shuffle=True))
    again.load(4)
    assert [[s.to_dict() for s in g] for g in again.get_samples(6)] == expected


@pytest.mark.parametrize("with_group_index", [True, False], ids=["slime 0.3", "as documented"])
def test_a_state_that_slime_wrote_is_gone_on_from(
    args: Callable[..., Namespace], tmp_path: Path, with_group_index: bool
) -> None:
    state = {
        "sample_offset": 2,
        "epoch_id": 3,
        "sample_index": 34,
        "metadata": {"0": ["math_001"], "stage": {"level": 2}},
        **({"sample_group_index": 17} if with_group_index else {}),
    }
    path = state_file(tmp_path, 5)
    path.parent.mkdir()
    torch.save(state, path)
    source = RolloutDataSource(args(rollout_shuffle=True))
    source.load(5)
    assert (source.sample_offset, source.epoch_id, source.sample_index) == (2, 3, 34)
    assert source.sample_group_index == 17
    assert source.metadata == {"0": ["math_001"], "stage": {"level": 2}}
    order = list(range(N_PROMPTS))
    random.Random(42 + 3).shuffle(order)
    assert names(source.get_samples(3)) == [f"q{i}" for i in order[2:]]


def test_a_state_that_could_not_be_read_again_is_not_written(
    args: Callable[..., Namespace], tmp_path: Path
) -> None:
    source = RolloutDataSourceWithBuffer(args())
    source.update_metadata({"seen": {1, 2}, "scores": np.arange(3), "at": (1.5, None)})
    source.save(4)
    again = RolloutDataSource(args())
    again.load(4)
    assert again.metadata["seen"] == {1, 2}
    (group,) = source.get_samples(1)
    group[0].metadata["file"] = tmp_path
    source.add_samples([group])
    with pytest.raises(CheckpointError, match=r"state_dict_5\.pt is not written, .* keep numbers"):
        source.save(5)
    assert not state_file(tmp_path, 5).exists()


def test_a_state_that_is_of_other_data_or_runs_code_is_refused(
    args: Callable[..., Namespace], tmp_path: Path
) -> None:
    path = state_file(tmp_path, 5)
    path.parent.mkdir()
    torch.save({"sample_offset": 6, "epoch_id": 0, "sample_index": 12, "metadata": {}}, path)
    with pytest.raises(DataError, match=r"sample_offset 6, and an epoch of prompt_data .* has 5"):
        RolloutDataSource(args()).load(5)
    torch.save({"sample_index": 0, "metadata": {"path": tmp_path}}, path)
    with pytest.raises(CheckpointError, match=r"state_dict_5\.pt cannot be read .*; remove it"):
        RolloutDataSource(args()).load(5)
    path.write_bytes(sealed(path.read_bytes()))  # a digest is no signature: anybody can make one
    with pytest.raises(CheckpointError, match=r"state_dict_5\.pt cannot be read .*; remove it"):
        RolloutDataSource(args()).load(5)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds no position in the data"):
        RolloutDataSource(args()).load(5)
    RolloutDataSource(args()).save(6)
    with pytest.raises(DataError, match=r"other data: order \"the file's\" \(now 42\)"):
        RolloutDataSource(args(rollout_shuffle=True)).load(6)


def test_a_checkpoint_without_a_state_is_said_in_a_line(
    args: Callable[..., Namespace], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = RolloutDataSource(args())
    source.load(-1)
    source.load()
    source.load(5)
    (first, none, resumed) = caplog.records
    assert (first.levelname, none.levelname, resumed.levelname) == ("INFO", "INFO", "WARNING")
    assert "state_dict_5.pt does not exist: the data begin at their start" in resumed.getMessage()
    assert names(source.get_samples(1)) == ["q0"]


def test_without_a_global_dataset_or_a_folder_nothing_is_saved_or_loaded(
    args: Callable[..., Namespace], tmp_path: Path
) -> None:
    for given in ({"rollout_global_dataset": False}, {"save": None, "load": None}):
        source = RolloutDataSource(args(**given))
        source.save(0)
        source.load(0)
    assert not state_file(tmp_path, 0).exists()


# -- RolloutDataSourceWithBuffer -----------------------------------------------------------------


def test_the_buffer_goes_first_and_the_data_fill_up(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSourceWithBuffer(args())
    assert (source.buffer, source.buffer_filter) == ([], pop_first)
    begun = source.get_samples(2)
    source.add_samples(begun)
    assert source.get_buffer_length() == 2
    assert source._get_samples_from_buffer(0) == []
    samples = source.get_samples(3)
    assert samples[:2] == begun
    assert names(samples) == ["q0", "q1", "q2"]
    assert source.get_buffer_length() == 0
    assert source._get_samples_from_buffer(1) == []


def test_a_class_of_ones_own_may_override_what_comes_from_the_buffer(
    args: Callable[..., Namespace],
) -> None:
    class NothingTwice(RolloutDataSourceWithBuffer):
        def _get_samples_from_buffer(self, num_samples: int) -> list[list[Any]]:
            return []

    source = NothingTwice(args())
    source.add_samples(source.get_samples(1))
    assert names(source.get_samples(1)) == ["q1"]


@pytest.mark.parametrize("wrong", ["tuple", "no group", "small group"])
def test_groups_that_are_none_raise_what_slimes_do(
    args: Callable[..., Namespace], wrong: str
) -> None:
    source = RolloutDataSourceWithBuffer(args())
    group = source.get_samples(1)[0]
    samples: Any = {"tuple": (group,), "no group": group, "small group": [group, group[:1]]}[wrong]
    with pytest.raises(AssertionError):
        source.add_samples(samples)
    source.add_samples([])
    assert source.get_buffer_length() == 0


def test_metadata_is_added_to_and_read(args: Callable[..., Namespace]) -> None:
    source = RolloutDataSourceWithBuffer(args())
    source.update_metadata({"0": ["math_001"]})
    source.update_metadata({"1": ["math_002"]})
    assert source.get_metadata() is source.metadata
    assert source.metadata == {"0": ["math_001"], "1": ["math_002"]}


def test_pop_first_takes_the_oldest_out(args: Callable[..., Namespace]) -> None:
    buffer = RolloutDataSource(args()).get_samples(3)
    first, second, third = buffer
    assert pop_first(None, None, buffer, 2) == [first, second]
    assert buffer == [third]
    assert pop_first(None, None, buffer, 5) == [third]


# -- usage, as it is documented ------------------------------------------------------------------


def custom_buffer_filter(
    args: Any, rollout_id: Any, buffer: list[list[Any]], num_samples: int
) -> list[list[Any]]:
    """The document's: the groups whose first reward is highest, which stay in the buffer."""
    return sorted(buffer, key=lambda group: group[0].reward, reverse=True)[:num_samples]


def test_a_custom_filter_chooses_what_goes_out_again(args: Callable[..., Namespace]) -> None:
    path = f"{__name__}.custom_buffer_filter"
    source = RolloutDataSourceWithBuffer(args(buffer_filter_path=path))
    groups = source.get_samples(3)
    for group, reward in zip(groups, (0.2, 0.9, 0.5), strict=True):
        for sample in group:
            sample.reward = reward
    source.add_samples(groups)
    assert names(source.get_samples(2)) == ["q1", "q2"]
    assert source.get_buffer_length() == 3  # as with slime's: it takes nothing out
    with pytest.raises(ConfigError, match=r"buffer_filter_path is 'no\.where'"):
        RolloutDataSourceWithBuffer(args(buffer_filter_path="no.where"))


def test_what_over_sampling_left_goes_out_in_the_next_rollout(
    args: Callable[..., Namespace],
) -> None:
    source = RolloutDataSourceWithBuffer(args())
    filtered, rollout_batch_size = source.get_samples(4), 3
    if hasattr(source, "add_samples") and len(filtered) > rollout_batch_size:
        source.add_samples(filtered[rollout_batch_size:])
    assert names(source.get_samples(3)) == ["q3", "q4", "q0"]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [("[1:3]", [1, 2]), ("[:2]", [0, 1]), ("[-2:]", [3, 4]), ("[:-4]", [0]), ("[3:99]", [3, 4])],
)
def test_a_path_may_name_a_range_of_its_rows(
    args: Callable[..., Namespace], prompts: Path, rows: str, wanted: list[int]
) -> None:
    """slime 0.3's form, `data.jsonl@[0:1000]`."""
    part = args(prompt_data=f"{prompts}@{rows}")
    source = RolloutDataSource(part)
    assert names(source.get_samples(len(source))) == [f"q{i}" for i in wanted]
    longest = len(_tokens(args)[wanted[0]])
    short = RolloutDataSource(Namespace(**vars(part) | {"rollout_max_prompt_len": longest}))
    assert names(short.get_samples(len(short))) == [f"q{wanted[0]}"]
    with pytest.raises(DataError, match=r"@\[9:\]', which has no rows"):
        RolloutDataSource(args(prompt_data=f"{prompts}@[9:]"))


def test_prompts_longer_than_the_limit_are_left_out(
    args: Callable[..., Namespace],
) -> None:
    whole = [len(ids) for ids in _tokens(args)]
    source = RolloutDataSource(args(rollout_max_prompt_len=whole[2]))
    assert names(source.get_samples(len(source))) == ["q0", "q1", "q2"]
    with pytest.raises(DataError, match="rollout_max_prompt_len is 1, and all 5 prompts are long"):
        RolloutDataSource(args(rollout_max_prompt_len=1))
    with pytest.raises(ConfigError, match=r"rollout_max_prompt_len is 9, .* set --hf-checkpoint"):
        RolloutDataSource(args(rollout_max_prompt_len=9, hf_checkpoint=None))


def test_messages_are_measured_as_the_models_template_renders_them(
    args: Callable[..., Namespace], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "messages.jsonl"
    asked = [[{"role": "user", "content": "word " * n}] for n in (1, 9)]
    path.write_text("".join(json.dumps({"text": m, "answer": "a"}) + "\n" for m in asked))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rendered = tokenizer.apply_chat_template(asked[0], tokenize=False, add_generation_prompt=True)
    limit = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
    source = RolloutDataSource(args(prompt_data=str(path), rollout_max_prompt_len=limit))
    assert [sample.prompt for sample in source.dataset.samples] == asked[:1]


def test_prompts_of_a_table_have_their_tools(
    args: Callable[..., Namespace], prompts: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for row in rows:
        row["tools"] = json.dumps(row["tools"])
    path = tmp_path / "prompts.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = RolloutDataSource(args(prompt_data=str(path), tool_key="tools"))
    sample = source.get_samples(2)[1][0]
    assert (sample.label, sample.metadata["level"]) == ("a1", 1)
    assert sample.metadata["tools"][0]["function"]["name"] == "look_up"


def test_the_chat_template_is_applied_and_the_tokenizer_dumped(
    args: Callable[..., Namespace], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    source = RolloutDataSource(args(apply_chat_template=True, dump_details=str(tmp_path / "d")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "d" / "tokenizer")
    message = {"role": "user", "content": "q0 "}
    expected = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert source.get_samples(1)[0][0].prompt == expected != "q0 "


def _tokens(args: Callable[..., Namespace]) -> list[list[int]]:
    from transformers import AutoTokenizer

    texts = [sample.prompt for sample in RolloutDataSource(args()).dataset.samples]
    ids: list[list[int]] = AutoTokenizer.from_pretrained(MODEL)(texts)["input_ids"]
    return ids


# -- Sample --------------------------------------------------------------------------------------


def test_a_sample_has_the_documented_fields_and_survives_its_dictionary() -> None:
    sample = SlimeSample(
        index=3,
        prompt="2 + 2",
        tokens=[1, 2],
        response="4",
        response_length=1,
        label="4",
        reward=1.0,
        loss_mask=[1],
        status=SlimeSample.Status.ABORTED,
        metadata={"level": 1},
    )
    value = sample.to_dict()
    assert value["status"] == "aborted"
    assert SlimeSample.from_dict(value) == sample
    assert sample.get_reward_value(Namespace(reward_key=None)) == 1.0
    sample.reward = {"score": 0.5, "format": 1.0}
    assert sample.get_reward_value(Namespace(reward_key="score")) == 0.5
    assert SlimeSample().status is SlimeSample.Status.PENDING


def test_truncated_says_how_a_sample_ended() -> None:
    assert SlimeSample(index=1, truncated=False).status is SlimeSample.Status.COMPLETED
    assert SlimeSample(index=1, truncated=True).status is SlimeSample.Status.TRUNCATED
    assert "truncated" not in SlimeSample(truncated=True).to_dict()


# -- slime's own classes -------------------------------------------------------------------------


needs_slime = pytest.mark.skipif(not HAS_SLIME, reason="make test-slime runs it, where slime is")


@pytest.fixture
def both(args: Callable[..., Namespace]) -> Callable[..., tuple[Any, Any]]:
    """slime's class and ours of one name, of the same arguments."""

    def make(name: str = "RolloutDataSourceWithBuffer", **given: Any) -> tuple[Any, Any]:
        theirs = getattr(slime("rollout.data_source"), name)
        return theirs(args(**given)), getattr(ours, name)(args(**given))

    return make


def state_of(source: Any) -> tuple[Any, ...]:
    return (
        source.sample_offset,
        source.epoch_id,
        source.sample_index,
        source.sample_group_index,
        source.metadata,
        len(source),
    )


GIVEN: list[dict[str, Any]] = [
    {},
    {"rollout_shuffle": True},
    {"rollout_shuffle": True, "rollout_seed": 7, "n_samples_per_prompt": 3},
    {"apply_chat_template": True, "rollout_shuffle": True},
    {"rollout_max_prompt_len": 12, "rollout_shuffle": True},
    {"apply_chat_template": True, "rollout_max_prompt_len": 40},
    {"rollout_global_dataset": False},
    {"label_key": None},
    {"tool_key": "tools"},
]


@needs_slime
@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_slimes_own_source_gives_the_same_samples(
    both: Callable[..., tuple[Any, Any]], given: dict[str, Any]
) -> None:
    theirs, mine = both(**given)
    for wanted in (2, 3, 1, 0, 4, 2):
        expected, found = theirs.get_samples(wanted), mine.get_samples(wanted)
        assert [[s.to_dict() for s in g] for g in found] == [
            [s.to_dict() for s in g] for g in expected
        ]
        assert all(type(s) is sample_class() for g in found for s in g)
        theirs.add_samples(expected[1:])
        mine.add_samples(found[1:])
        assert state_of(mine) == state_of(theirs)
        assert mine.get_buffer_length() == theirs.get_buffer_length()


@needs_slime
@pytest.mark.parametrize("given", GIVEN[:3], ids=str)
def test_each_goes_on_from_what_the_other_saved(
    both: Callable[..., tuple[Any, Any]], given: dict[str, Any]
) -> None:
    for writer in (0, 1):
        pair = both("RolloutDataSource", **given)
        pair[writer].get_samples(7)
        pair[writer].metadata["stage"] = writer
        pair[writer].save(writer)
        reader = both("RolloutDataSource", **given)[1 - writer]
        reader.load(writer)
        assert state_of(reader) == state_of(pair[writer])
        expected, found = pair[writer].get_samples(6), reader.get_samples(6)
        assert [[s.to_dict() for s in g] for g in found] == [
            [s.to_dict() for s in g] for g in expected
        ]


@needs_slime
def test_slimes_own_classes_raise_what_ours_do(both: Callable[..., tuple[Any, Any]]) -> None:
    for source in both("RolloutDataSource"):
        with pytest.raises(RuntimeError, match="read-only"):
            source.add_samples(source.get_samples(1))
    for source in both():
        group = source.get_samples(1)[0]
        for wrong in ((group,), group, [group, group[:1]]):
            with pytest.raises(AssertionError):
                source.add_samples(wrong)

"""The tables of docs/migration.md, from which unknown keys are answered, name keys that exist."""

from pathlib import Path

import pytest

from stepwell.config_keys import all_keys
from stepwell.migration import rows, tables
from tests.stepwell.configuring import fails

DOCUMENT = Path(__file__).parents[2] / "docs" / "migration.md"


def test_every_row_of_the_document_is_known() -> None:
    names = [name for _, head, (name, *_) in tables(DOCUMENT.read_text()) if head[-1] == "note"]
    assert [f"`{row.name}`" for row in rows()] == names
    assert len(rows()) > 300
    assert {row.source for row in rows()} == {"verl", "slime", "TRL", "prime-rl", "Claw-R1"}


def test_what_a_document_describes_is_no_option() -> None:
    text = "## a\n\n| x | y | note |\n| --- | --- | --- |\n| `f` | `g` | |\n\n" + (
        "| of the document | here | held by |\n| --- | --- | --- |\n| `h(a \\| b)` | `i` | `j` |\n"
    )
    assert [(head[-1], cells) for _, head, cells in tables(text)] == [
        ("note", ["`f`", "`g`", ""]),
        ("held by", ["`h(a \\| b)`", "`i`", "`j`"]),
    ]


def test_every_key_that_a_name_leads_to_exists() -> None:
    keys = set(all_keys())
    assert not [row for row in rows() if not set(row.ours) <= keys]


def test_no_name_is_a_key_of_ours() -> None:
    keys = set(all_keys())
    assert not [row.name for row in rows() if row.name in keys]


def test_a_name_without_a_counterpart_says_why() -> None:
    assert not [row for row in rows() if not row.ours and not row.note]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor_rollout_ref.rollout.n=8", "it is verl's name for rollout.n"),
        ("num_generations=8", "it is TRL's name for rollout.n"),
        ("trainer.num_generations=8", "it is TRL's name for rollout.n"),
        ("update-weights-interval=2", "async_training.trigger_parameter_sync_step"),
        ("rollout-batch-size=8", "trainer.train_batch_size"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "it is verl's name for algorithm.kl.kl_coef"),
        ("rollout.n_samples_per_prompt=8", "it is slime's name for rollout.n"),
        ("per_device_train_batch_size=8", "backend.micro_batch_tokens"),
        ("orchestrator.group_size=8", "it is prime-rl's name for rollout.n"),
        ("num_iterations=2", "it is TRL's name for async_training.ppo_epochs"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "async_training.ppo_epochs"),
        ("trainer.val_only=true", "it is verl's name for validation.only"),
        ("debug-train-only=true", "trainer.load_debug_rollout_data"),
        ("over-sampling-filter-path=a:b", "sampling.over_sampling_filter"),
        ("trainer.lr=1e-5", "backend.lr"),
    ],
)
def test_another_frameworks_name_is_answered_with_ours(override: str, said: str) -> None:
    message = fails(override)
    assert f"{override.partition('=')[0]} is not a known key; " in message
    assert said in message
    assert len(message.splitlines()) == 1


def test_every_name_in_a_section_of_another_framework_gets_a_line() -> None:
    said = fails("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=1")
    assert len(said.splitlines()) == 2

"""The tables of docs/migration.md, from which unknown keys are answered, name keys that exist."""

import json
import re
from pathlib import Path

import pytest

from stepwell.cli.main import main
from stepwell.config.keys import all_keys
from stepwell.config.migration import find, known_as, rows, tables
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


def test_a_name_that_is_a_key_of_ours_is_that_key() -> None:
    keys = set(all_keys())
    assert {row.ours for row in rows() if row.name in keys} > {("algorithm.gamma",)}
    assert not [row for row in rows() if row.name in keys and row.ours != (row.name,)]


def test_a_name_without_a_counterpart_says_why_and_has_become_no_key() -> None:
    missing = [row for row in rows() if not row.ours]
    assert not [row for row in missing if not row.note]
    ours = {re.sub(r"\.train\b", "", key).replace(".", "_"): key for key in all_keys()}
    alike = {row.name: ours.get(row.name.replace(".", "_")) for row in missing}
    assert not {name: key for name, key in alike.items() if key}


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
        (
            "rollout-num-gpus-per-node=8",
            "slime's rollout_num_gpus_per_node has no counterpart: not",
        ),
        ("data.train.use_shm=true", "verl's data.use_shm has no counterpart: not needed because"),
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


# -- what the documents name ----------------------------------------------------------------------

SLIME = """
actor_num_gpus_per_node actor_num_nodes agent_rollout_buffer_url apply_chat_template
buffer_filter_path colocate custom_generate_function_path custom_rm_path debug_rollout_only
debug_train_only disable_rewards_normalization dump_details dynamic_sampling_filter_path
eval_function_path fetch_trajectory_retry_times global_batch_size group_rm hf_checkpoint input_key
label_key load load_debug_rollout_data loss_mask_type metadata_key n_samples_per_prompt num_rollout
over_sampling_batch_size over_sampling_filter_path prompt_data reward_key rm_type
rollout_batch_size rollout_function_path rollout_global_dataset rollout_max_prompt_len
rollout_max_response_len rollout_num_gpus rollout_num_gpus_per_engine rollout_num_gpus_per_node
rollout_seed rollout_shuffle rollout_skip_special_tokens rollout_stop rollout_stop_token_ids
rollout_temperature rollout_top_k rollout_top_p save save_debug_rollout_data sglang_router_ip
sglang_router_port sglang_router_request_timeout_secs sglang_server_concurrency start_rollout_id
tool_key use_wandb wandb_always_use_train_step
"""
"""Options of slime that the documents of its data source, its core and its Agent Rollout name."""

VERL = """
actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.rollout.free_cache_engine
actor_rollout_ref.rollout.max_model_len actor_rollout_ref.rollout.multi_turn.enable
actor_rollout_ref.rollout.multi_turn.max_turns actor_rollout_ref.rollout.multi_turn.tool_config_path
actor_rollout_ref.rollout.n actor_rollout_ref.rollout.response_length
actor_rollout_ref.rollout.val_kwargs.temperature actor_rollout_ref.rollout.val_kwargs.top_k
actor_rollout_ref.rollout.val_kwargs.top_p algorithm.adv_estimator algorithm.gamma
algorithm.kl_penalty algorithm.lam algorithm.norm_adv_by_std_in_grpo algorithm.use_kl_in_reward
custom_reward_function.name custom_reward_function.path custom_reward_function.reward_kwargs
data.cache_dir data.chat_template_func data.custom_cls.name data.custom_cls.path
data.filter_overlong_prompts data.filter_overlong_prompts_workers data.filter_prompts data.image_key
data.max_prompt_length data.max_response_length data.need_tools_kwargs data.prompt_key
data.return_full_prompt data.return_raw_chat data.reward_fn_key data.train_files data.truncation
data.use_shm data.video_key reward_model.launch_reward_fn_async reward_model.reward_manager
reward_model.sandbox_fusion.max_concurrent reward_model.sandbox_fusion.url trainer.balance_batch
trainer.critic_warmup trainer.experiment_name trainer.logger trainer.profile_steps
trainer.project_name trainer.rollout_data_dir trainer.save_freq trainer.test_freq
trainer.total_epochs trainer.total_training_steps trainer.val_before_train trainer.val_only
"""
"""Keys of verl that the document of its training loop names."""


@pytest.mark.parametrize(
    ("framework", "text", "flag"),
    [
        ("slime", SLIME, "--{}"),
        ("slime", SLIME, "{}"),
        ("verl", VERL, "{}"),
        ("verl", VERL, "+{}=1"),
    ],
)
def test_every_option_that_the_documents_name_is_answered(
    framework: str, text: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = text.split()
    asked = [flag.format(n.replace("_", "-") if flag.startswith("--") else n) for n in names]
    assert main(["config", "--from", framework, *asked]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in told] == names
    assert len(SLIME.split()) == 57


def test_the_error_for_an_unknown_key_says_what_the_command_says() -> None:
    keys = set(all_keys())
    for framework, names in (("slime", SLIME), ("verl", VERL)):
        for name in set(names.split()) - keys:
            [row] = find(framework, name)
            assert row.text in (known_as(name) or ""), name


def test_a_key_of_ours_is_not_answered_with_itself() -> None:
    [row] = find("verl", "algorithm.gamma")
    assert row.text == known_as("algorithm.gamma") == "it has the same name here"
    assert known_as("async_training.use_rollout_log_probs") is None


def test_the_end_of_a_dotted_name_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--from", "verl", "custom_cls.path", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["name"], row["ours"]) == ("data.custom_cls.path", ["data.train.cls"])
    assert row["text"].startswith("it is verl's name for data.train.cls (")


def test_no_name_at_all_lists_a_framework(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--from", "prime-rl"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "model.name: it is prime-rl's name for model.path"
    assert len(told) == sum(row.source == "prime-rl" for row in rows())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["slime", "--rollout-batchsize"], "close to it: rollout_batch_size"),
        (["verl", "trainer.truncation_side"], "data.truncation"),
        (["slime", "zzz"], "stepwell config --from slime lists all"),
        (["megatron", "lr"], "give one of verl, slime, trl, prime-rl, claw-r1"),
        (["verl", "--keys", "lr"], "leave out --config and --keys"),
    ],
)
def test_a_name_that_nobody_knows_is_told_with_what_is_close(
    asked: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--from", *asked]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert (told.out, len(told.err.splitlines())) == ("", 1)

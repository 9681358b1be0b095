"""SFT through the loop: conversations are trained once each, alone or mixed with rollouts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer

from stepwell.backends.errors import BackendConfigError
from stepwell.config.load import load_config
from stepwell.datapool.types import SFT, TRAIN, Group, Trajectory
from stepwell.quickstart.conversations import conversations as quickstarts
from stepwell.run import checks
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.config import JsonlSource, SftConfig
from stepwell.trainer.data import Conversations, open_conversations
from stepwell.trainer.errors import ConfigError, DataError
from stepwell.trainer.ledger import audit
from stepwell.trainer.sampling import CHANNEL, sft_groups
from stepwell.trainer.updater import Prepared, Updater
from tests.trainer.small_run import SmallRun, conversation, local_pool, small_config, small_run
from tests.trainer.test_loop_losses import ROOT, groups, updater_of

MODEL = ROOT / "examples/quickstart/model"
ONLY_SFT = ("algorithm.kind=sft", "async_training.trigger_parameter_sync_step=2")
HALF = ("sampling.channels={train: 0.5, sft: 0.5}",)


def conversations(n: int = 1) -> list[Group]:
    """Groups as the trainer leases them from channel `sft`."""
    rows = Conversations(JsonlSource(kind="jsonl", path=Path("x.jsonl")), SftConfig(), MODEL)

    def leased(i: int) -> Group:
        task = conversation(i)
        uid = str(task["instance_id"])
        steps = tuple(rows.written(task, uid).steps)
        return Group(uid, (Trajectory(uid, uid, steps),), metadata={CHANNEL: SFT})

    return [leased(i) for i in range(n)]


# ── the loss ─────────────────────────────────────────────────────────────────────────────────────


def gradient(updater: Updater, batch: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient and metrics of one optimizer step; with β1 = 0 it is AdamW's first moment."""
    torch.set_num_threads(1)
    prepared = updater.prepare(batch)
    (mini,) = prepared.mini_batches
    metrics = updater.step(prepared, mini.steps)
    state = updater.backend.state_dict()["optimizer"]["state"]
    return {key: state[key]["exp_avg"].clone() for key in state}, metrics


@pytest.mark.parametrize("form", ["step", "merged", "tree"])
def test_the_gradient_of_a_mixed_batch_is_the_share_weighted_sum_of_the_two(
    tmp_path: Path, form: str
) -> None:
    options = (f"backend.rows={form}", "backend.betas=[0.0,0.95]", "backend.max_grad_norm=1e9")
    rl, sft = groups(), conversations(3)
    with ExitStack() as stack:
        of_rl, of_sft, of_both = (
            gradient(stack.enter_context(updater_of(tmp_path, *options)), batch)
            for batch in (rl, sft, [rl[0], *sft, rl[1]])
        )
    for name, found in of_both[0].items():
        expected = 0.4 * of_rl[0][name] + 0.6 * of_sft[0][name]
        size = float(expected.abs().max())
        assert torch.allclose(found, expected, rtol=0, atol=1e-5 * max(size, 1e-6)), name
    assert of_both[1]["sft/loss"] == pytest.approx(of_sft[1]["loss"], abs=1e-5)
    total = 0.4 * of_rl[1]["loss"] + 0.6 * of_sft[1]["loss"]
    assert of_both[1]["loss"] == pytest.approx(total, abs=1e-5)
    assert of_both[1]["policy/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert "policy/ratio" not in of_sft[1]


@pytest.mark.parametrize("mode", ["token-mean", "trajectory-mean"])
def test_the_loss_is_the_mean_likelihood_of_what_the_assistant_said(
    tmp_path: Path, mode: str
) -> None:
    batch = conversations(2)
    with updater_of(tmp_path, f"algorithm.sft.loss_agg_mode={mode}") as updater:
        converted = updater.backend.convert([s for g in batch for s in g.steps])
        nll = -updater.backend.compute_log_probs(converted)
        _, metrics = gradient(updater, batch)
    if mode == "token-mean":
        expected = nll.mean()
    else:
        of = [sum(len(s.response_ids) for s in g.steps) for g in batch]
        expected = torch.stack([part.mean() for part in nll.split(of)]).mean()
    assert metrics["sft/loss"] == pytest.approx(float(expected), abs=1e-4)
    assert metrics["loss"] == pytest.approx(metrics["sft/loss"], abs=1e-5)


def test_conversations_are_spread_over_the_optimizer_steps_of_a_lease(tmp_path: Path) -> None:
    with updater_of(
        tmp_path, "async_training.require_batches=2", "rollout.max_outstanding_groups=64"
    ) as updater:
        prepared: Prepared = updater.prepare([*groups(), *conversations(3)])
    minis = prepared.mini_batches
    held = [[g.metadata.get(CHANNEL, TRAIN) for g in mini.groups] for mini in minis]
    assert held == [[TRAIN, SFT], [TRAIN, SFT, SFT]]
    sft = prepared.batch.columns["sft_coef"]
    for mini, share in zip(minis, (1 / 2, 2 / 3), strict=True):
        chosen = torch.zeros(len(prepared.batch.steps))
        chosen[mini.steps] = 1
        assert float(sft[prepared.batch.expand(chosen) > 0].sum()) == pytest.approx(share)


def test_what_the_critic_alone_is_trained_on_leaves_the_conversations_to_the_policy(
    tmp_path: Path,
) -> None:
    options = ("algorithm.adv_estimator=gae", "algorithm.critic.warmup_updates=1")
    with updater_of(tmp_path, *options) as updater:
        _, metrics = gradient(updater, [*groups(), *conversations()])
        prepared = updater.prepare(groups())
        alone = updater.step(prepared, prepared.mini_batches[0][0])
    assert metrics["sft/loss"] > 0
    assert metrics["skipped"] == 0
    assert "critic/loss" in metrics
    assert "sft/loss" not in alone


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────


def trained(run: SmallRun) -> list[list[str]]:
    """Rows of each update, by name."""
    return [
        list(dict.fromkeys(s.prompt_uid.rpartition("-")[0] for s in steps))
        for steps in run.backend.steps
    ]


async def test_sft_alone_trains_every_row_once_and_asks_for_no_engine(tmp_path: Path) -> None:
    config = small_config(tmp_path, *ONLY_SFT, sft=5)
    async with small_run(config) as run:
        records = await run.train()
        assert (await run.pool.get_statistics(SFT))["groups"]["acked"] == 5
    assert trained(run) == [["sft0", "sft1"], ["sft2", "sft3"], ["sft4"]]
    assert run.backend.scored == 0  # no proximal policy, no advantage
    assert all("advantages" not in columns for columns in run.backend.columns)
    assert [r["sft/share"] for r in records] == [1.0] * 3
    assert all("reward/mean" not in r for r in records)
    assert not run.rollouts.begun
    found = audit(config.run.dir / "ledger.jsonl", [f"sft{i}" for i in range(5)], SFT)
    assert (found.trained, found.skipped, found.doubled, found.in_flight) == (5, (), (), ())
    assert run.engine.version == 1  # published after two updates, and no more for the third


async def test_a_killed_run_goes_on_with_the_rows_that_no_checkpoint_holds(tmp_path: Path) -> None:
    config = small_config(tmp_path, *ONLY_SFT, "trainer.checkpoint_every=2", sft=12)
    pool, store = local_pool(config), CheckpointStore(tmp_path / "checkpoints", 2)
    async with small_run(config, pool=pool, checkpoints=store) as run:
        training = run.trainer.train(6)
        async for record in training:
            if record["step"] == 3:
                break  # one update beyond the checkpoint
    first = trained(run)
    async with small_run(config, pool=pool, checkpoints=store, backend=run.backend) as again:
        assert await again.trainer.resume()
        await again.train(6)
    assert len(first) == 3
    rows = [f"sft{i}" for i in range(12)]
    counted = {row for update in first[:2] + trained(again)[3:] for row in update}
    assert counted == set(rows)
    found = audit(config.run.dir / "ledger.jsonl", rows, SFT)
    assert (found.trained, found.skipped, found.doubled) == (12, (), ())


async def test_channels_are_mixed_by_their_shares(tmp_path: Path) -> None:
    mix = ("sampling.channels={train: 0.75, sft: 0.25}", "trainer.total_steps=6")
    config = small_config(tmp_path, *mix, sft=8)
    async with small_run(config) as run:
        records = await run.train()
    assert [r.get("sft/share", 0) for r in records] == [0, 0.5] * 3
    assert [sum(n.startswith("sft") for n in names) for names in trained(run)] == [0, 1] * 3
    assert all(r["reward/mean"] == 0.5 for r in records)
    assert {"sft/tokens", "pool/sft/ready", "pool/ready"} <= records[1].keys()
    ledger = config.run.dir / "ledger.jsonl"
    assert audit(ledger, [f"sft{i}" for i in range(8)], SFT).trained == 3
    assert audit(ledger, [f"train{i}" for i in range(200)]).trained == 9
    assert audit(ledger).doubled == audit(ledger).skipped == ()


async def test_a_resumed_mixture_goes_on_in_both_channels(tmp_path: Path) -> None:
    config = small_config(tmp_path, *HALF, "trainer.checkpoint_every=2", sft=20)
    pool, store = local_pool(config), CheckpointStore(tmp_path / "checkpoints", 2)
    async with small_run(config, pool=pool, checkpoints=store) as run:
        async for record in run.trainer.train(6):
            if record["step"] == 3:
                break
    async with small_run(config, pool=pool, checkpoints=store) as again:
        again.engine.version = run.engine.version
        assert await again.trainer.resume()
        await again.train(6)
    for channel, name in ((SFT, "sft"), (TRAIN, "train")):
        rows = [f"{name}{i}" for i in range(20)]
        found = audit(config.run.dir / "ledger.jsonl", rows, channel)
        assert (found.trained, found.skipped, found.doubled) == (6, (), ())


@pytest.mark.parametrize("mode", ["async", "sync", "one_step_off"])
async def test_when_the_conversations_are_used_up_rollouts_take_their_places(
    tmp_path: Path, mode: str
) -> None:
    told: list[str] = []
    mix = (*HALF, f"async_training.mode={mode}", "trainer.starvation_timeout_s=5")
    config = small_config(tmp_path, *mix, sft=2)
    async with small_run(config, notify=told.append) as run:
        records = await run.train()
    assert [r.get("sft/share", 0) for r in records] == [0.5, 0.5, 0, 0]
    assert [r["groups"] for r in records] == [2] * 4
    assert [t.partition(":")[0] for t in told].count("data.sft is used up") == 1


async def test_when_the_prompts_are_used_up_the_run_ends(tmp_path: Path) -> None:
    config = small_config(tmp_path, *HALF, train=2, sft=20)
    async with small_run(config) as run:
        records = await run.train()
    assert len(records) == 2


async def test_conversations_do_not_go_stale_and_no_filter_takes_them_out(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        *HALF,
        "async_training.mode=sync",
        "async_training.trigger_parameter_sync_step=1",
        "sampling.filters=[nonzero_std]",
        "pool.default.max_staleness=0",
        "pool.default.selection.filters=[scored]",
        sft=20,
    )
    async with small_run(config) as run:
        records = await run.train()
        dropped = (await run.pool.get_statistics(SFT))["groups"]["dropped"]
    assert [r["sft/share"] for r in records] == [0.5] * 4
    assert run.trainer.progress.version == 4
    assert dropped == 0


def test_of_any_number_of_batches_the_share_is_exact() -> None:
    for share in (0.1, 0.3, 1 / 3, 0.999):
        counts = [sft_groups(k, 8, share) for k in range(200)]
        steps = [b - a for a, b in pairwise(counts)]
        assert set(steps) <= {int(8 * share), int(8 * share) + 1}
        assert abs(sum(steps) - 199 * 8 * share) < 1
    assert sft_groups(10, 8, 0.1) == 8


# ── data ─────────────────────────────────────────────────────────────────────────────────────────


def table(folder: Path, *rows: dict[str, Any], **keys: Any) -> JsonlSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        "quickstart", ["algorithm.kind=sft", f"data.sft={path}", f"run.dir={folder}"]
    )
    assert config.data is not None
    assert isinstance(config.data.sft, JsonlSource)
    return config.data.sft.model_copy(update=keys)


def says(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(said)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]}


ASKED_ALONE = {"messages": [{"role": "user", "content": "hello"}]}
MASKED = {
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "no", "step_loss_mask": 0},
    ]
}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (ASKED_ALONE, "none of 1 messages is the assistant's"),
        (MASKED, "step_loss_mask is 0 on all"),
        ({"messages": "hello"}, "it is a question alone; prompt_key names a list of messages"),
        ({"prompt": "hello"}, "has no 'messages'; set prompt_key"),
    ],
)
def test_a_row_that_cannot_be_trained_is_told_before_the_run(
    tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        open_conversations(table(tmp_path, says("a", "b"), row), SftConfig(), MODEL)


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_a_table_gives_the_same_steps_as_lines_of_json(tmp_path: Path, kind: str) -> None:
    """verl's SFT trainer reads `messages` and `tools` from Parquet:
    https://verl.readthedocs.io/en/latest/advance/sft_trainer.html."""
    rows = list(quickstarts(3))
    lines = table(tmp_path, *rows, shuffle=False)
    file = tmp_path / "rows.parquet"
    Dataset.from_list(rows).to_parquet(file)
    config = load_config(
        "quickstart", ["algorithm.kind=sft", f"data.sft={{kind: {kind}, path: {file}}}"]
    )
    assert config.data is not None
    assert config.data.sft is not None
    stored = config.data.sft
    ours, theirs = (
        [
            step.token_ids.tolist()
            for task in open_conversations(source, SftConfig(), MODEL)
            for step in Conversations(source, SftConfig(), MODEL).written(task, "p").steps
        ]
        for source in (lines, stored)
    )
    assert ours == theirs
    assert len(ours) == 6


def test_tools_and_system_prompts_are_context_and_long_conversations_are_left_out(
    tmp_path: Path,
) -> None:
    long = says("a", "word " * 200)
    data = table(tmp_path, says("a", "b"), long, max_prompt_tokens=100)
    source = open_conversations(data, SftConfig(), MODEL)
    assert [t["messages"][1]["content"] for t in source] == ["b"]


def test_the_mask_is_the_one_that_is_named(tmp_path: Path) -> None:
    config = SftConfig(loss_mask_type="distill_qwen")
    with pytest.raises(DataError, match="loss_mask_type is 'distill_qwen': Distill"):
        open_conversations(table(tmp_path, says("a", "b")), config, MODEL)


OWN = """
from stepwell.backends.masks import MultiTurnLossMaskGenerator


class CustomTaskLossMaskGenerator(MultiTurnLossMaskGenerator):
    def get_custom_multi_turn_loss_mask(self, messages):
        ids = self.tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
        said = self.tokenizer(messages[-1]["content"])["input_ids"]
        return ids + said, [0] * len(ids) + [1] * len(said)

    def get_loss_mask(self, messages):
        if self.tokenizer_type == "custom_task":
            return self.get_custom_multi_turn_loss_mask(messages)
        return super().get_loss_mask(messages)
"""


def test_a_mask_generator_of_slimes_shape_is_named_by_its_path(tmp_path: Path) -> None:
    """`--loss-mask-type custom_task` of slime's Agent Rollout."""
    file = tmp_path / "my_masks.py"
    file.write_text(OWN)
    path = f"{file}:CustomTaskLossMaskGenerator"
    data = table(tmp_path, says("a", "b"))
    (task,) = open_conversations(data, SftConfig(), MODEL)
    tokenizer, texts = AutoTokenizer.from_pretrained(MODEL), []
    for name in (f"{path}(custom_task)", path):
        masks = Conversations(data, SftConfig(loss_mask_type=name), MODEL)
        (step,) = masks.written(task, "p").steps
        texts.append(tokenizer.decode(step.response_ids))
    assert texts == ["b", "b<|im_end|>\n"]
    with pytest.raises(DataError, match=r"loss_mask_type is '.*:Nothing': .* cannot be imported"):
        open_conversations(data, SftConfig(loss_mask_type=f"{file}:Nothing"), MODEL)


# ── configuration ────────────────────────────────────────────────────────────────────────────────


def test_a_path_alone_is_what_sft_trains_on(tmp_path: Path) -> None:
    path = tmp_path / "said.jsonl"
    config = load_config(
        None, [f"data={path}", "algorithm.kind=sft", "data.sft.tool_key=null"], here=False
    )
    assert config.data is not None
    assert isinstance(config.data.sft, JsonlSource)
    assert (config.data.sft.path, config.data.sft.prompt_key) == (path, "messages")
    assert (config.data.train, config.data.sft.tool_key) == (None, None)
    assert (config.sft_share, config.serves) == (1.0, False)


CONVERSATIONS = "data.sft=said.jsonl"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["sampling.channels={train: 0.9, sft: 0.1}"], "data.sft is missing"),
        ([CONVERSATIONS], "nobody trains on it; set sampling.channels"),
        ([CONVERSATIONS, "sampling.channels={sft: 1}"], "set algorithm.kind to sft instead"),
        (
            [CONVERSATIONS, "sampling.channels={train: 1, sft: 1}", "algorithm.kind=sft"],
            "set algorithm.kind to rl to mix them",
        ),
        ([CONVERSATIONS, "sampling.channels={train: 1, val: 1}"], "sampling.channels.val"),
        (["algorithm.sft.loss_mask_type=qwn"], "choose one of auto, distill_qwen, prefix"),
        (
            [CONVERSATIONS, "algorithm.kind=sft", "publish.guard={}"],
            "publish.guard judges versions by the rewards of rollouts",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config("quickstart", overrides)


def test_an_agent_of_an_sft_run_validates_and_needs_tasks() -> None:
    with pytest.raises(ConfigError, match="only validates, but data"):
        load_config(
            None, [CONVERSATIONS, "algorithm.kind=sft", "rollout.agent=my:agent"], here=False
        )
    config = load_config("quickstart", [CONVERSATIONS, "algorithm.kind=sft"])
    assert (config.serves, config.has_tasks) == (True, True)


@pytest.mark.parametrize("name", ["verl", "slime"])
def test_a_backend_whose_own_trainer_runs_the_loop_is_refused_by_name(name: str) -> None:
    mix = [CONVERSATIONS, "sampling.channels={train: 0.9, sft: 0.1}", f"trainer.backend={name}"]
    with pytest.raises(BackendConfigError, match=f"trainer.backend is '{name}'"):
        checks.backend(load_config("quickstart", mix))


def test_conversations_that_cannot_be_read_are_told_by_their_key(tmp_path: Path) -> None:
    overrides = [f"data.sft={tmp_path / 'none.jsonl'}", "algorithm.kind=sft"]
    config = load_config(None, [*overrides, f"run.dir={tmp_path}", "logging.wandb=disabled"])
    with pytest.raises(ConfigError, match=r"data\.sft: path is .*none\.jsonl', which cannot be"):
        checks.check_run(config)

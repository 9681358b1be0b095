"""Our samples in slime's own code: `make test-slime` runs these tests."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from stepwell.backends.masks import MultiTurnLossMaskGenerator
from stepwell.backends.pictures import decode
from stepwell.backends.slime.backend import SlimeBackend, train_data
from stepwell.backends.slime.images import train_inputs
from stepwell.backends.slime.sample import SlimeSample, as_slime
from stepwell.backends.slime.samples import groups_of, to_samples
from stepwell.datapool import PoolConfig, connect, start_data_pool
from stepwell.trainer.algorithms.advantages.columns import compute_advantages
from stepwell.trainer.config import AdvantageConfig, RolloutConfig
from stepwell.trainer.rollout.worker import RolloutWorker
from stepwell.trainer.slime.buffer import generate_rollout as generate_agent_rollout
from stepwell.trainer.slime.data_source import PoolDataSource, RolloutDataSourceWithBuffer
from stepwell.trainer.slime.rollout import REWARD_HOOK, generate_rollout
from tests.backends.random_groups import TEMPERATURE, random_groups, steps_of
from tests.backends.slime_itself import HAS_SLIME, advantages, rollout_manager, slime
from tests.backends.test_vision_training import Album
from tests.gateway.conftest import QUICKSTART, hf_tokenizer, save_tokenizer, worlds  # noqa: F401 - a fixture
from tests.gateway.test_rollout_buffer import TOOLS, Consumer
from tests.vision_model import make_vision_model

pytestmark = pytest.mark.skipif(not HAS_SLIME, reason="make test-slime runs it, where slime is")


@pytest.fixture
def args() -> Namespace:
    """slime's arguments as its parser leaves them, as far as they are read here."""
    return Namespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        custom_reward_post_process_path=REWARD_HOOK,
        reward_key=None,
        rollout_top_p=1.0,
        rollout_temperature=1.0,
        rollout_batch_size=4,
        n_samples_per_prompt=6,
        global_batch_size=24,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=64,
        balance_by_flops=False,
        balance_data=False,
        load_debug_rollout_data=None,
        save_debug_rollout_data=None,
        debug_rollout_only=False,
        ci_test=False,
        custom_rollout_log_function_path=None,
        custom_eval_rollout_log_function_path=None,
        log_reward_category=None,
        log_passrate=False,
        sglang_speculative_algorithm=None,
        rollout_num_gpus=0,
        wandb_always_use_train_step=False,
        use_wandb=False,
        use_tensorboard=False,
        rollout_global_dataset=True,
        save_interval=1,
        async_save=False,
        num_rollout=10,
        save=None,
        load=None,
        prompt_data=None,
        debug_train_only=False,
    )


def test_a_sample_is_slimes_own_class_and_survives_its_dictionary() -> None:
    sample_class = slime("utils.types").Sample
    for ours in to_samples(random_groups(16)).flat:
        theirs = as_slime(ours)
        assert type(theirs) is sample_class
        assert sample_class.from_dict(theirs.to_dict()) == theirs
        kept = {k: v for k, v in theirs.to_dict().items() if k in ours.to_dict()}
        assert kept == ours.to_dict()
        theirs._validate_response_metadata_lengths()
        assert theirs.effective_response_length == sum(ours.loss_mask or [])


def test_our_sample_has_every_field_of_slimes_own() -> None:
    theirs = slime("utils.types").Sample
    assert theirs().to_dict() == SlimeSample().to_dict()
    assert [f.name for f in fields(theirs)] == [f.name for f in fields(SlimeSample)]
    assert {s.value for s in theirs.Status} == set(SlimeSample.Status)
    full = {"tokens": [1, 2], "response_length": 1, "loss_mask": [1], "status": "failed", "own": 1}
    given = SlimeSample().to_dict() | full
    assert theirs.from_dict(given).to_dict() == SlimeSample.from_dict(given).to_dict() == given


@pytest.mark.parametrize("group_size", [None, 6])
def test_slimes_conversion_gives_our_train_data(args: Namespace, group_size: int | None) -> None:
    ours = to_samples(random_groups(), group_size=group_size).flat
    theirs = rollout_manager(args)._convert_samples_to_train_data([as_slime(s) for s in ours])
    expected = train_data(SlimeBackend(), ours)
    assert expected.keys() - theirs.keys() == {"weight_versions"}
    assert theirs == {name: expected[name] for name in theirs}


def test_slimes_advantages_are_stepwells_however_many_samples_a_trajectory_has() -> None:
    groups = random_groups()
    samples = to_samples(groups).flat
    of_tokens = compute_advantages(groups, AdvantageConfig()).columns["advantages"]
    wanted, first = {}, 0
    for step in steps_of(groups):
        wanted[step.trajectory_uid] = float(of_tokens[first])
        first += len(step.response_ids)
    found = advantages(train_data(SlimeBackend(), samples))
    for sample, values in zip(samples, found, strict=True):
        expected = torch.full_like(values, wanted[sample.metadata["trajectory_uid"]])
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


def test_slimes_own_normalisation_is_another_one_which_is_why_there_is_a_hook(
    args: Namespace,
) -> None:
    samples = [as_slime(s) for s in to_samples(random_groups()).flat]
    manager = rollout_manager(args)
    _, hooked = manager._post_process_rewards(samples)
    manager.custom_reward_post_process_func = None
    _, plain = manager._post_process_rewards(samples)
    assert max(abs(a - b) for a, b in zip(hooked, plain, strict=True)) > 0.1


# -- pictures --------------------------------------------------------------------------------------


class Processor:
    """The parts that `Qwen2VLProcessor`, which needs torchvision, is made of: image processor,
    tokenizer, one placeholder for each cell of the merged grid."""

    def __init__(self, folder: Path) -> None:
        self.image_processor: Any = AutoImageProcessor.from_pretrained(folder)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def __call__(
        self, text: str, images: list[Image.Image], **kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        assert kwargs["text_kwargs"]["return_mm_token_type_ids"] is False
        made = self.image_processor(images=images, **kwargs["images_kwargs"])
        first, *rest = text.split("<|image_pad|>")
        for grid, part in zip(made["image_grid_thw"], rest, strict=True):
            first += "<|image_pad|>" * int(grid.prod() // 4) + part
        return {**self.tokenizer([first], return_tensors=None), **made}


def test_slimes_rollout_makes_the_same_of_a_prompt_with_pictures(
    args: Namespace, tmp_path: Path
) -> None:
    folder = make_vision_model(tmp_path)
    album, processor = Album(folder), Processor(folder)
    encode = processor.tokenizer.encode
    steps, theirs = [], []
    for n, sizes in enumerate([[(84, 84)], [(56, 56), (112, 56), (84, 84)], []]):
        pictures = [album.picture(10 * n + i, size) for i, size in enumerate(sizes)]
        said = f"Look {n}: "
        parts = [part for p in pictures for part in (p, *encode(" and "))]
        step = album.step(f"t{n}", 0, *encode(said), *parts, response=[50, 51])
        steps.append(replace(step, reward=float(n)))
        prompt = said + "<|vision_start|><|image_pad|><|vision_end|> and " * len(sizes)
        images = [decode(p.png, album.processor.bounds) for p in pictures]
        sample = slime("utils.types").Sample(
            prompt=prompt, multimodal_inputs={"images": images or None}
        )
        prepare = slime("rollout.sglang_rollout")._prepare_prompt_ids
        assert prepare(sample, processor.tokenizer, processor) == step.prompt_ids.tolist()
        theirs.append(sample.multimodal_train_inputs)
    inputs = train_inputs(folder, steps, album.pngs)
    ours = to_samples(groups_of(steps), inputs=inputs).flat
    data = rollout_manager(args)._convert_samples_to_train_data([as_slime(s) for s in ours])
    own = train_data(SlimeBackend(), ours)["multimodal_train_inputs"]
    assert data["multimodal_train_inputs"] == own
    for found, wanted in zip(own, theirs, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert [m is None for m in own] == [False, False, True]


# -- the whole way -----------------------------------------------------------------------------


@pytest.fixture
def pool_name(cluster: str) -> Iterator[str]:
    name = uuid.uuid4().hex
    handle = start_data_pool(PoolConfig(), name=name)
    yield name
    ray.kill(handle)


async def submit(name: str, channel: str) -> None:
    pool = connect(name)
    for group in random_groups(8):
        await pool.open_group(group.prompt_uid, len(group.trajectories), channel=channel)
        for trajectory in group.trajectories:
            await pool.submit_steps(trajectory.steps, channel)


async def test_slimes_rollout_manager_runs_on_the_pool(
    args: Namespace, pool_name: str, tmp_path: Path
) -> None:
    """`generate` as slime's loop calls it: rollout, checks, metrics, conversion, split over ranks;
    then `save`, and `eval`."""
    await submit(pool_name, "train")
    await submit(pool_name, "val")
    args.save = args.load = str(tmp_path)
    args.stepwell_pool = pool_name
    args.rollout_temperature = TEMPERATURE
    source = PoolDataSource(args)
    manager: Any = rollout_manager(args, source, generate_rollout)
    manager.eval_generate_rollout = generate_rollout
    manager.train_parallel_config = {
        "dp_size": 2,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    manager.load(-1)
    for rollout_id in (0, 1):
        shares = [ray.get(box.inner) for box in manager.generate(rollout_id)]
        rollouts = {r for share in shares for r in share["rollout_ids"]}
        assert rollouts == set(range(24 * rollout_id, 24 * rollout_id + 24))
        assert all(share["global_batch_sizes"] == [24] for share in shares)
        trained = sum(int(mask.sum()) for share in shares for mask in share["loss_masks"])
        assert trained > 0
        manager.save(rollout_id)
    manager.eval(2)
    pool = connect(pool_name)
    for channel in ("train", "val"):
        assert (await pool.get_statistics(channel))["groups"]["acked"] == 8
    source.pool.close()


async def test_slimes_rollout_manager_trains_an_agent_rollout_with_its_own_normalisation(
    worlds: Callable[..., Any],  # noqa: F811
    args: Namespace,
) -> None:
    world = await worlds("chatml")
    vars(args).update(
        rollout_buffer_url=world.url,
        rollout_task_type="external",
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        fetch_trajectory_retry_times=-1,
        rollout_max_response_len=64,
        num_epoch=1,
        hf_checkpoint=None,
        prompt_data=None,
        rollout_global_dataset=False,
        use_wandb=False,
        use_tensorboard=False,
    )
    source = slime("rollout.data_source").RolloutDataSourceWithBuffer(
        Namespace(**vars(args), buffer_filter_path=None)
    )
    manager = rollout_manager(args, source, generate_agent_rollout)
    manager.custom_reward_post_process_func = None
    consumer = Consumer(world.url)
    for i in range(4):
        said = {"role": "assistant", "content": f"fine {i}"}
        item = {"uid": f"u{i}", "instance_id": f"id{i // 2}", "reward": i % 2, "extra_info": {}}
        messages = [{"role": "user", "content": "q"}, said]
        assert (await consumer.post("/buffer/write", {**item, "messages": messages}))[0] == 200
    samples, metrics = await asyncio.to_thread(manager._get_rollout_data, 0)
    data = manager._convert_samples_to_train_data(samples)
    assert data["sample_indices"] == ["id0", "id0", "id1", "id1"]
    assert data["raw_reward"] == [0, 1, 0, 1]
    assert data["rewards"] == pytest.approx([-(0.5**0.5), 0.5**0.5] * 2, abs=1e-4)
    assert data["tokens"] == [world.stored(f"u{i}")[0].token_ids.tolist() for i in range(4)]
    assert data["rollout_ids"] == [0, 1, 2, 3]
    assert metrics["stepwell/samples_without_log_probs"] == 4


OURS = MultiTurnLossMaskGenerator

TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "uno"}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "é?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nlook", "step_loss_mask": 0},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
        {"role": "assistant", "content": "fifteen"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "no  more"},
        {"role": "user", "content": "bye"},
    ],
]


@pytest.mark.parametrize("messages", TALKS)
@pytest.mark.parametrize(
    ("family", "tokenizer_type"),
    [
        *product(("chatml", "qwen3"), ("qwen", "qwen3", "qwen3_5", "distill_qwen")),
        *product(("deepseek",), ("qwen", "distill_qwen")),
    ],
)
def test_our_generator_of_slimes_shape_gives_slimes_ids_and_masks(
    family: str, tokenizer_type: str, messages: list[dict[str, Any]]
) -> None:
    theirs, ours = (
        kind(hf_tokenizer(family), tokenizer_type=tokenizer_type)
        for kind in (slime("utils.mask_utils").MultiTurnLossMaskGenerator, OURS)
    )
    for tools in (None, TOOLS):
        ids, mask = ours.get_loss_mask(messages, tools)
        assert (ids, mask) == theirs.get_loss_mask(messages, tools)
        assert ours.get_response_lengths([mask]) == theirs.get_response_lengths([mask])
        said = ours.get_text_from_loss_mask(ids, mask)
        assert said == theirs.get_text_from_loss_mask(ids, mask)
        assert said


async def test_a_generator_that_subclasses_slimes_own_class_tokenises_what_is_written(
    worlds: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "my_masks.py"
    file.write_text(
        "from slime.utils.mask_utils import MultiTurnLossMaskGenerator\n\n"
        "class Custom(MultiTurnLossMaskGenerator):\n"
        "    def get_loss_mask(self, messages):\n"
        "        assert self.tokenizer_type == 'custom_task'\n"
        "        self.tokenizer_type = 'distill_qwen'\n"
        "        found = super().get_loss_mask(messages)\n"
        "        self.tokenizer_type = 'custom_task'\n"
        "        return found\n"
    )
    world = await worlds("chatml", loss_mask_type=f"{file}:Custom(custom_task)")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "fine"}]
    sent = {"uid": "a", "instance_id": 0, "reward": 1, "extra_info": {}, "messages": messages}
    assert (await Consumer(world.url).post("/buffer/write", sent))[0] == 200
    (step,) = world.stored("a")
    assert step.response_ids.tolist() == world.ids("fine", close=False)


async def test_slimes_own_consumer_reads_text_only_rollouts_from_our_buffer(
    worlds: Callable[..., Any],  # noqa: F811
    args: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unchanged, with its polling, its grouping and its own masks."""
    slime("utils.types")
    theirs = importlib.import_module("slime_plugins.rollout_buffer.rollout_buffer_example")
    monkeypatch.setattr(theirs, "time", SimpleNamespace(sleep=lambda _: None, time=time.time))
    world = await worlds("quickstart")
    vars(args).update(
        rollout_buffer_url=world.url,
        rollout_task_type="external",
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        fetch_trajectory_retry_times=1,
        rollout_max_response_len=64,
        num_epoch=1,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=1,
        hf_checkpoint=str(QUICKSTART),
        loss_mask_type="qwen",
        rollout_global_dataset=False,
    )
    consumer = Consumer(world.url)
    for i, uid in enumerate("abcd"):
        said = {"role": "assistant", "content": f"fine {uid}"}
        item = {"uid": uid, "instance_id": i // 2, "reward": 1, "extra_info": {}}
        messages = [{"role": "user", "content": "q"}, said]
        assert (await consumer.post("/buffer/write", {**item, "messages": messages}))[0] == 200
    source = RolloutDataSourceWithBuffer(args)
    rollout = theirs.generate_rollout_async(args, 0, source)
    (samples,) = await asyncio.to_thread(asyncio.run, rollout)
    ours = {s.trajectory_uid: s for s in world.stored()}
    assert len(samples) == 2
    for sample in samples:
        step = ours[sample.prompt]  # slime keeps an item's uid there
        assert sample.tokens[: step.n_tokens] == step.token_ids.tolist()
        # Its masks train the line break behind the close, too; ours end with the close.
        assert sample.loss_mask == [1] * (len(step.response_ids) + 1)


class Tools:
    """The sandbox of examples/retool, without a sandbox."""

    def get_tool_specs(self) -> list[Any]:
        return []

    async def execute_tool(self, name: str, arguments: Any) -> str:
        return "42"


async def local_search(url: str, query: str, topk: int, proxy: Any = None) -> list[Any]:
    """The retriever of examples/search-r1, without an index."""
    return [{"document": {"contents": '"A title"\na page'}}]


STANDS_IN: dict[str, dict[str, Any]] = {
    "local_search_server": {"local_search": local_search},
    "tool_sandbox": {
        "SEMAPHORE": asyncio.Semaphore(4),
        "TOOL_CONFIGS": {"max_turns": 3, "max_tool_calls": 3},
        "tool_registry": Tools(),
    },
}
"""Stand-ins for the modules that the examples import beside slime."""


@pytest.mark.parametrize(
    ("agent", "says", "stops"),
    [
        (
            "search-r1/generate_with_search",
            ("<search>x</search>", "<answer>she</answer>"),
            ("</search>", "</answer>"),
        ),
        ("retool/generate_with_retool", ("<code>6*7</code>", "Answer: \\boxed{42}"), (None, None)),
    ],
)
async def test_slimes_own_examples_of_generate_functions_run_as_they_are(
    worlds: Any,  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: str,
    says: tuple[str, str],
    stops: tuple[str | None, str | None],
) -> None:
    """With slime's Sample, GenerateState and HTTP client; each turn becomes a Step."""
    folder, module = agent.split("/")
    slime("rollout.sglang_rollout")  # with what stands in for what is not installed
    root = Path(importlib.import_module("slime.utils").__path__[0]).parents[1]
    monkeypatch.syspath_prepend(root / "examples" / folder)
    for name, members in STANDS_IN.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(members)
        monkeypatch.setitem(sys.modules, name, stand_in)
    world = await worlds()
    said = [
        world.say(text, close=stop is None, matched=stop, version=str(version))
        for version, (text, stop) in enumerate(zip(says, stops, strict=True))
    ]
    config = RolloutConfig(agent=f"{module}:generate", max_attempts=1)
    worker = RolloutWorker(config, [world.url], tokenizer_path=Path(save_tokenizer(tmp_path)))
    await world.pool.open_group("p", 1)
    task = {"question": "who wrote it", "answer": "she", "metadata": {}}
    named = {**task, "instance_id": "q", "data_source": "books"}
    assert await worker.run_group(named, "p", 1) == {"complete": 1}
    await worker.close()
    steps = await world.pool.fetch_batch(timeout_s=10)
    assert steps is not None
    assert [s.response_ids.tolist() for s in steps] == [one.ids for one in said]
    assert [s.policy_version for s in steps] == [0, 1]
    assert all(s.rollout_log_probs is not None for s in steps)

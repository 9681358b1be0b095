"""Rewards as users of verl and slime have them: signatures, names and data sources, unchanged.

Forms: verl 0.9, docs/preparation/reward_function.rst, docs/advance/reward_loop.rst,
verl/workers/reward_manager/{naive,batch}.py, verl/utils/reward_score/__init__.py; slime 0.3.1,
slime/rollout/rm_hub/__init__.py (`--custom-rm-path`, `--group-rm`, `--rm-type`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import Step, Trajectory
from stepwell.trainer.config import RewardConfig
from stepwell.trainer.errors import RewardCrashError, RewardLoadError, RewardValueError
from stepwell.trainer.rewards.base import RewardResult, RewardSample
from stepwell.trainer.rewards.data_sources import USUAL
from stepwell.trainer.rewards.loading import load_reward
from stepwell.trainer.rewards.manager import RewardManager

MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(code: str, name: str = "") -> str:
        path = tmp_path / "mine.py"
        path.write_text(code)
        return f"{path}{name}"

    return write


def sample(answer: str = "4", source: str = "any", **info: Any) -> RewardSample:
    steps = tuple(
        Step(
            prompt_ids=[1, 2, *([3, 9] if k else [])],
            response_ids=[3 + k],
            rollout_log_probs=[-0.5],
            trajectory_uid="t",
            prompt_uid="p",
            step_index=k,
            parent_index=0 if k else None,
            policy_version=7,
            finish_reason="stop",
        )
        for k in range(2)
    )
    info = {"question": "2 + 2?", "responses": ["call", answer], "agent_reward": None, **info}
    return RewardSample(source, answer, "4", info, "p", Trajectory("t", "p", steps))


async def outcomes(*samples: RewardSample, **config: Any) -> list[Any]:
    manager = RewardManager(RewardConfig(**config))
    try:
        scored: list[Any] = await manager.score(samples)
        return scored
    finally:
        await manager.aclose()


async def the_score(function: str, *samples: RewardSample, **config: Any) -> Any:
    results = await outcomes(*(samples or [sample()]), function=function, **config)
    return [r.score if isinstance(r, RewardResult) else r for r in results]


# ── verl ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "signature",
    [
        "data_source, solution_str, ground_truth, extra_info=None",
        "solution_str, ground_truth, **kwargs",
        "*, extra_info, ground_truth, solution_str, data_source, **kwargs",
        "extra_info, ground_truth, solution_str, data_source='other'",
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_verls_function_gets_its_arguments_by_name(
    write: Write, signature: str, kind: str
) -> None:
    """`custom_reward_function.path` alone: the function is `compute_score`."""
    path = write(
        f"{kind} compute_score({signature}):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': True}\n"
    )
    assert await outcomes(sample(), function=path) == [RewardResult(1.0, {"acc": True})]


async def test_verls_batch_function_gets_its_lists_by_name(write: Write) -> None:
    """`reward_model.reward_manager=batch`; verl/workers/reward_manager/batch.py."""
    path = write(
        "def many(solution_strs, ground_truths, data_sources, extra_infos, scale):\n"
        "    return [{'score': scale * int(s), 'n': len(data_sources)} for s in solution_strs]\n",
        ":many",
    )
    config = {"function": path, "kwargs": {"scale": 2}, "manager": "batch"}
    results = await outcomes(sample("1"), sample("2"), **config)
    assert results == [RewardResult(2.0, {"n": 2}), RewardResult(4.0, {"n": 2})]


async def test_reward_kwargs_reach_verls_function(write: Write) -> None:
    """`custom_reward_function.reward_kwargs`; the parameters are those of a generative reward
    model's function (docs/advance/reward_loop.rst)."""
    path = write(
        "async def compute_score_gsm8k(data_source: str, solution_str: str, ground_truth: str,\n"
        "        extra_info: dict, reward_router_address: str, reward_model_tokenizer):\n"
        "    assert reward_model_tokenizer.encode('2')\n"
        "    return {'score': len(reward_router_address + extra_info['question'])}\n",
        ":compute_score_gsm8k",
    )
    kwargs = {"reward_router_address": "h:1", "reward_model_tokenizer": str(MODEL)}
    assert await the_score(path, kwargs=kwargs) == [9.0]
    with pytest.raises(RewardLoadError, match="reward_model_tokenizer='/no'"):
        load_reward(path, {**kwargs, "reward_model_tokenizer": "/no"})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("naive", "naive"), ("batch", "batch"), ("dapo", "auto"), ("prime", "parallel")],
)
def test_verls_names_of_managers_are_known(theirs: Any, ours: str) -> None:
    assert RewardConfig(function="f1", manager=theirs).manager == ours


# ── slime ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("manager", ["auto", "parallel"])
async def test_slimes_function_gets_args_and_a_sample(
    write: Write, kind: str, manager: str
) -> None:
    path = write(
        f"{kind} custom_rm(args, sample, **kwargs):\n"
        "    assert sample.prompt == '2 + 2?' and sample.label == '4'\n"
        "    assert sample.tokens == [1, 2, 3, 9, 4] and sample.loss_mask == [1, 0, 1]\n"
        "    assert sample.response_length == 3 and sample.reward is None\n"
        "    assert sample.status == sample.Status.COMPLETED\n"
        "    assert sample.weight_versions == ['7', '7']\n"
        "    return args.bonus + float(sample.response == sample.label) + sample.metadata['x']\n",
        ":custom_rm",
    )
    assert await the_score(path, sample(x=3), kwargs={"bonus": 10}, manager=manager) == [14.0]


async def test_slimes_group_function_gets_the_samples_of_a_group(write: Write) -> None:
    """`--group-rm`."""
    path = write(
        "async def group_rm(args, samples, **kwargs):\n"
        "    longest = max(len(s.response) for s in samples)\n"
        "    return [float(len(s.response) == longest) for s in samples]\n",
        ":group_rm",
    )
    assert await the_score(path, sample("a"), sample("bb"), manager="group") == [0.0, 1.0]


async def test_slimes_function_scores_a_trajectory_with_pictures(write: Write) -> None:
    path = write(
        "def rm(args, sample):\n"
        "    assert sample.tokens == [1, 2, 3, 9, 4]\n"
        "    return float(sample.response == sample.label)\n",
        ":rm",
    )
    scored = sample()
    assert scored.trajectory is not None
    picture = Picture("a" * 64, 28, 28, 1, 1)
    steps = tuple(replace(s, pictures=(picture,)) for s in scored.trajectory.steps)
    trajectory = replace(scored.trajectory, steps=steps)
    assert await the_score(path, replace(scored, trajectory=trajectory)) == [1.0]


async def test_an_argument_that_is_not_known_here_is_missing_with_the_remedy(write: Write) -> None:
    path = write("def rm(args, sample): return args.rollout_max_len\n", ":rm")
    (missing,) = await the_score(path)
    assert isinstance(missing, RewardCrashError)
    assert "args.rollout_max_len is not known here; set it in the kwargs" in str(missing)


async def test_a_dict_of_slimes_is_read_by_the_reward_key(write: Write) -> None:
    """`--reward-key`."""
    path = write("def rm(args, sample): return {'acc': 1, 'pred': '4'}\n", ":rm")
    assert await outcomes(sample(), function=path, reward_key="acc") == [
        RewardResult(1.0, {"pred": "4"})
    ]


async def test_the_rm_type_of_a_tasks_metadata_chooses_the_reward() -> None:
    cases = [
        ("dapo", "Answer: 4", 1.0),
        ("boxed_f1", r"\boxed{4}", 1.0),
        ("exact_match", "5", 0.0),
    ]
    results = await outcomes(*(sample(answer, rm_type=name) for name, answer, _ in cases))
    found = [(*case[:2], r.score) for case, r in zip(cases, results, strict=True)]
    assert found == cases


async def test_the_rm_type_of_a_task_names_no_code() -> None:
    """A data set is no place from which modules are imported."""
    (result,) = await outcomes(sample(rm_type="shutil:which"))
    assert isinstance(result, RewardValueError)
    assert "'shutil:which', which is not built in; name it in rollout.reward" in str(result)


async def test_random_is_0_or_1() -> None:
    scores = await the_score("random", *[sample() for _ in range(50)])
    assert set(scores) == {0.0, 1.0}


@pytest.mark.parametrize("name", ["ifbench", "boxed_ifbench"])
def test_what_is_not_ours_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(RewardLoadError, match=r"allenai/IFBench.*name a function"):
        load_reward(name)


@pytest.mark.parametrize("signature", ["answer, truth, more", "solution_str, ground_truth"])
def test_another_signature_is_refused_with_those_there_are(write: Write, signature: str) -> None:
    path = write(f"def wrong({signature}): ...\n", ":wrong")
    with pytest.raises(RewardLoadError, match=r"wrong\(data_source.* or as wrong\(args, sample\)"):
        load_reward(path)


# ── data sources ─────────────────────────────────────────────────────────────────────────────────

GSM8K = "She pays 3 * 6 = 18 dollars.\n#### 18"


USUAL_CASES: list[tuple[str, str, Any, float]] = [
    ("openai/gsm8k", GSM8K, "18", 1.0),
    ("openai/gsm8k", GSM8K, GSM8K, 1.0),
    ("openai/gsm8k", "#### 1,018.", "1018", 1.0),
    ("openai/gsm8k", "It is 18", "18", 0.0),
    ("openai/gsm8k", "#### 17", "18", 0.0),
    ("lighteval/MATH", r"so \boxed{\frac{1}{2}}", r"\frac12", 1.0),
    ("lighteval/MATH", "so 1/2", r"\frac12", 0.0),
    ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{3}", "3", 1.0),
    ("HuggingFaceH4/MATH-500", r"\boxed{4}", "3", 0.0),
    ("hendrycks_math", r"so \boxed{\frac{1}{2}}", r"\frac12", 1.0),
    ("hendrycks_math", "so 1/2", r"\frac12", 0.0),
    ("math_dapo", "Answer: 34", "34", 1.0),
    ("math_dapo", "34", "34", -1.0),
    ("aime_2025", "Answer: 204", "204", 1.0),
    ("numina_olympiads", r"thus \boxed{x+1}", "1+x", 1.0),
    ("searchR1_nq", "<answer>The Beatles.</answer>", {"target": ["beatles"]}, 1.0),
    ("searchR1_nq", "The Beatles", {"target": ["beatles"]}, 0.0),
    ("searchR1_nq", "<answer>beatles</answer>" * 11, {"target": ["beatles"]}, 0.25),
    ("apps", "print(int(input()) * 2)", '{"inputs": ["3\\n"], "outputs": ["6\\n"]}', 1.0),
    ("mbpp", "def f(x): return 2 * x", ["assert f(2) == 4", "assert f(2) == 5"], 0.5),
]


@pytest.mark.slow
async def test_a_usual_data_set_is_scored_without_a_function() -> None:
    """One after the other, so that one process of each kind is started."""
    samples = [RewardSample(source, said, truth, {}) for source, said, truth, _ in USUAL_CASES]
    results = await outcomes(*samples, concurrency=1)
    assert not [r for r in results if not isinstance(r, RewardResult)]
    found = [(*case[:3], r.score) for case, r in zip(USUAL_CASES, results, strict=True)]
    assert found == USUAL_CASES


def test_every_usual_reward_is_there() -> None:
    for function in {*USUAL.values()}:
        load_reward(function)


@pytest.mark.parametrize(
    ("config", "source", "message"),
    [
        ({}, "llava_v1_5_mix", "its answers are free text about images"),
        ({}, "mine", "name its function in rollout.reward.by_data_source"),
        ({"manager": "group", "by_data_source": {"a": "f1"}}, "math", "one sample at a time"),
    ],
)
async def test_a_data_set_without_a_reward_is_missing_by_name(
    config: dict[str, Any], source: str, message: str
) -> None:
    (missing,) = await outcomes(sample(source=source), **config)
    assert isinstance(missing, RewardValueError)
    assert repr(source) in str(missing)
    assert message in str(missing)


@pytest.mark.parametrize(
    ("kwargs", "answer", "score"),
    [
        ({"method": "flexible"}, "It is 18.", 1.0),
        ({"method": "flexible"}, "none", 0.0),
        ({"format_score": 0.1}, "#### 17", 0.1),
        ({"score": 2.0}, "#### 18", 2.0),
    ],
)
async def test_gsm8k_takes_verls_arguments(
    kwargs: dict[str, Any], answer: str, score: float
) -> None:
    case = RewardSample("openai/gsm8k", answer, "18", {})
    assert await the_score("gsm8k", case, kwargs=kwargs) == [score]


# ── rewards per step ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("manager", ["naive", "parallel", "batch", "group"])
async def test_a_function_may_return_a_reward_per_step(write: Write, manager: str) -> None:
    one = "[None, 0.5] if a[1] == 'last' else {'score': [1, 0.5], 'note': 2}"
    many = f"[{one} for a in zip(*a)]"
    path = write(f"def f(*a): return {many if manager in ('batch', 'group') else one}\n", ":f")
    results = await outcomes(sample("last"), sample("both"), function=path, manager=manager)
    assert results == [
        RewardResult(0.5, {}, (None, 0.5)),
        RewardResult(1.5, {"note": 2}, (1.0, 0.5)),
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0]", "returned 1 rewards for 2 steps"),
        ("[None, None]", "return a number"),
        ("[1.0, 'a']", "return a number"),
        ("(1.0, {'pred': 4})", "return a number"),
    ],
)
async def test_a_list_that_is_no_reward_per_step_is_missing(
    write: Write, returned: str, message: str
) -> None:
    missing: Sequence[Any] = await the_score(write(f"def f(*a): return {returned}\n", ":f"))
    assert isinstance(missing[0], RewardValueError)
    assert message in str(missing[0])

"""SGLang is started with the options that the run's own keys ask for; given ones win."""

from __future__ import annotations

import pytest

from stepwell.cluster.engine_flags import flags_of_run
from stepwell.config.load import load_config
from stepwell.config.run import RunConfig
from stepwell.trainer.errors import ConfigError


def sglang(*overrides: str) -> RunConfig:
    return load_config("quickstart", ["engine.kind=sglang", *overrides])


def told(*overrides: str, mode: str = "disaggregated") -> list[str]:
    return list(flags_of_run(sglang(*overrides), mode == "colocated"))


def test_one_gpu_and_no_adapters_need_no_option() -> None:
    assert told() == []


def test_several_gpus_are_a_tensor_parallel_size_unless_the_split_is_given() -> None:
    assert told("cluster.gpus_per_engine=4") == ["--tp-size", "4"]
    for given in ('[--tp-size,"2"]', "[--tp=2]", '[--pp-size,"4"]', '[--ep-size,"4",--enable-x]'):
        assert told("cluster.gpus_per_engine=4", f"engine.extra_args={given}") == []


LORA = ("engine.weight_transport=lora", "backend.lora.rank=8")


def test_published_adapters_are_enabled_with_their_rank_and_modules() -> None:
    enabled = ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules"]
    assert told(*LORA) == [*enabled, "all"]
    modules = "backend.lora.target_modules=[q_proj,v_proj]"
    assert told(*LORA, modules) == [*enabled, "q_proj", "v_proj"]
    own = 'engine.extra_args=[--max-lora-rank,"64"]'
    assert told(*LORA, own) == ["--enable-lora", "--lora-target-modules", "all"]
    assert told("backend.lora.rank=8") == [], "merged weights need no adapters"


def test_adapters_that_a_service_trains_are_of_its_own_rank() -> None:
    at_tinker = ("trainer.backend=tinker", "engine.weight_transport=lora")
    options = "backend.options={base_model: Qwen/Qwen3-8B, rank: 64}"
    enabled = ["--enable-lora", "--max-lora-rank", "64", "--lora-target-modules", "all"]
    assert told(*at_tinker, options) == enabled
    assert told(*at_tinker, options.replace(", rank: 64", ""))[2] == "32"


def test_modules_as_a_regular_expression_have_to_be_listed_for_sglang() -> None:
    pattern = r"backend.lora.target_modules='.*\.q_proj'"
    with pytest.raises(ConfigError, match=r"target_modules.*--lora-target-modules"):
        told(*LORA, pattern)
    own = "engine.extra_args=[--lora-target-modules,q_proj]"
    assert told(*LORA, pattern, own) == ["--enable-lora", "--max-lora-rank", "8"]


def test_beside_a_trainer_on_its_gpu_it_takes_less_of_the_memory() -> None:
    assert told(mode="colocated") == ["--mem-fraction-static", "0.4"]
    own = 'engine.extra_args=[--mem-fraction-static,"0.5"]'
    assert told(own, mode="colocated") == []


@pytest.mark.parametrize("kind", ["embedded", "attach"])
def test_other_engines_are_told_nothing(kind: str) -> None:
    urls = ["engine.urls=[http://127.0.0.1:1]"] if kind == "attach" else []
    config = load_config("quickstart", [f"engine.kind={kind}", *urls, *LORA])
    assert flags_of_run(config, True) == ()

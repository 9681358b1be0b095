"""Continuous batching is exact: whatever is batched, reused, moved or retracted, the log-probs are
those of a plain full forward."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BloomConfig, PretrainedConfig, RwkvConfig

from stepwell.backends.engines.embedded import scheduler as scheduler_module
from stepwell.backends.engines.embedded.model import ModelRunner, WeightLoadError
from stepwell.backends.engines.embedded.reply import Reply, StopStrings
from stepwell.backends.engines.embedded.request import InvalidRequestError, Request, SamplingParams
from stepwell.backends.engines.embedded.scheduler import Scheduler
from tests.backends.models import VOCAB, save_model

IDS = range(15, 95)


def make(path: Path, *, max_running: int = 4, n_retained: int = 4, **runner: Any) -> Scheduler:
    model = ModelRunner(
        str(path), dtype="float32", max_running=max_running, n_retained=n_retained, **runner
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    return Scheduler(model, stop_strings=StopStrings(tokenizer), model_path=str(path))


def submit(scheduler: Scheduler, prompt: list[int], n: int = 12, **params: Any) -> Request:
    sampling = SamplingParams.model_validate({"max_new_tokens": n, "ignore_eos": True, **params})
    request = Request(f"r{random.random()}", list(prompt), sampling, return_logprob=True)
    scheduler.validate(request)
    scheduler.submit(request)
    return request


def run(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        scheduler.step()
        scheduler.take_changed()


def assert_exact(reference: Any, request: Request, temperature: float = 1.0) -> None:
    assert request.finished
    expected = reference.log_probs(request.prompt_ids, request.output_ids, temperature)
    actual = torch.tensor(request.output_log_probs)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["base", "llama"])
def test_staggered_requests_of_all_lengths_are_exact_over_reused_rows_and_prefixes(
    architecture: str, model_dirs: Any, reference: Callable[..., Any]
) -> None:
    rng = random.Random(0)
    path = getattr(model_dirs, architecture)
    scheduler = make(path)
    common = [rng.choice(IDS) for _ in range(40)]
    requests: list[Request] = []
    for _ in range(40):
        kind = rng.random()
        own = [rng.choice(IDS) for _ in range(rng.randint(1, 30))]
        finished = [r for r in requests if r.finished]
        if kind < 0.4:
            prompt = common[: rng.randint(1, 40)] + own
        elif kind < 0.7 and finished:
            earlier = rng.choice(finished)
            prompt = earlier.prompt_ids + earlier.output_ids + own
        else:
            prompt = own
        if len(prompt) < 400:
            requests.append(submit(scheduler, prompt, rng.randint(1, 25)))
        for _ in range(rng.randint(0, 6)):
            if scheduler.has_work:
                scheduler.step()
    run(scheduler)
    assert scheduler.reused_tokens > 300, "the test means to reuse prefixes"
    for request in requests:
        assert len(request.output_ids) == request.limit
        assert_exact(reference(path), request)


def test_a_long_prompt_is_computed_in_chunks_while_others_decode(
    model_dirs: Any, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PREFILL_BUDGET", 32)
    scheduler = make(model_dirs.base)
    rng = random.Random(1)
    short = submit(scheduler, [rng.choice(IDS) for _ in range(5)], 40)
    scheduler.step()
    long = submit(scheduler, [rng.choice(IDS) for _ in range(300)], 10)
    while not long.output_ids:
        before = len(short.output_ids)
        scheduler.step()
        assert len(short.output_ids) == before + 1
    assert len(short.output_ids) > 5, "the long prompt took several steps"
    run(scheduler)
    for request in (short, long):
        assert_exact(reference(model_dirs.base), request)


def test_a_group_computes_its_prompt_once(model_dirs: Any, reference: Callable[..., Any]) -> None:
    scheduler = make(model_dirs.base, max_running=8)
    prompt = list(IDS)[:60]
    group = [submit(scheduler, prompt, 8) for _ in range(8)]
    run(scheduler)
    assert scheduler.prefilled_tokens == 60 + 7
    assert sorted(r.cached_tokens for r in group) == [0] + [59] * 7
    for request in group:
        assert_exact(reference(model_dirs.base), request)


def test_seven_tenths_temperature_is_scored_at_seven_tenths(
    model_dirs: Any, reference: Callable[..., Any]
) -> None:
    scheduler = make(model_dirs.base)
    request = submit(scheduler, [20, 30, 40], 20, temperature=0.7, top_p=0.9)
    run(scheduler)
    assert_exact(reference(model_dirs.base), request, 0.7)


def test_a_retracted_request_keeps_its_tokens_and_goes_on_exactly(
    model_dirs: Any, reference: Callable[..., Any]
) -> None:
    scheduler = make(model_dirs.base)
    requests = [submit(scheduler, [20 + i] * (5 + i), 30) for i in range(3)]
    for _ in range(8):
        scheduler.step()
    kept = [list(r.output_ids) for r in requests]
    scheduler.pause("retract")
    assert not scheduler.running
    assert not scheduler.has_work
    scheduler.resume()
    run(scheduler)
    for request, before in zip(requests, kept, strict=True):
        assert request.output_ids[: len(before)] == before
        assert request.num_retractions == 1
        assert_exact(reference(model_dirs.base), request)


def test_weights_change_between_two_tokens_of_a_request_held_in_place(
    model_dirs: Any, reference: Callable[..., Any]
) -> None:
    scheduler = make(model_dirs.base)
    held = submit(scheduler, [20, 30, 40, 50, 60, 70], 20)
    for _ in range(8):
        scheduler.step()
    cut = len(held.output_ids)
    scheduler.pause("in_place")
    scheduler.update_weights(str(model_dirs.new), "1")
    scheduler.resume()
    fresh = submit(scheduler, [20, 30, 40, 50, 60, 70], 20)
    run(scheduler)
    assert [(s.version, s.start, s.end) for s in held.spans] == [("0", 0, cut), ("1", cut, 20)]
    assert fresh.cached_tokens == 0, "KV of the old weights was lent to a new request"
    assert_exact(reference(model_dirs.new), fresh)


def test_an_answer_names_the_version_of_its_last_token_whatever_was_loaded_since(
    model_dirs: Any,
) -> None:
    scheduler = make(model_dirs.base)
    aborted = submit(scheduler, [20, 30, 40], 20)
    for _ in range(4):
        scheduler.step()
    reply = Reply(aborted, AutoTokenizer.from_pretrained(model_dirs.base))
    scheduler.pause("abort")
    scheduler.update_weights(str(model_dirs.new), "7")
    answer = json.loads(reply.body(scheduler.weight_version) or b"")
    assert answer["output_ids"] == aborted.output_ids != []
    assert answer["meta_info"]["weight_version"] == "0"


def test_a_refused_checkpoint_leaves_the_weights_untouched(
    model_dirs: Any, reference: Callable[..., Any], tmp_path: Path
) -> None:
    import shutil

    truncated = tmp_path / "truncated"
    shutil.copytree(model_dirs.new, truncated)
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    scheduler = make(model_dirs.base)
    for bad in (model_dirs.wide, model_dirs.llama, truncated, tmp_path / "absent"):
        with pytest.raises(WeightLoadError, match="Failed to load weights"):
            scheduler.update_weights(str(bad), "9")
    assert scheduler.weight_version == "0"
    request = submit(scheduler, [20, 30, 40])
    run(scheduler)
    assert_exact(reference(model_dirs.base), request)


def test_weights_that_are_not_finite_are_refused(model_dirs: Any, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(model_dirs.new, tmp_path / "nan")
    file = tmp_path / "nan" / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightLoadError, match="not finite"):
        make(model_dirs.base).update_weights(str(tmp_path / "nan"), "1")


def test_cancelling_frees_the_row_for_the_next(model_dirs: Any) -> None:
    scheduler = make(model_dirs.base, max_running=1)
    first, second = submit(scheduler, [20, 30], 100), submit(scheduler, [40, 50], 3)
    scheduler.step()
    assert scheduler.running == [first]
    scheduler.cancel(first)
    run(scheduler)
    assert second.finish_reason == {"type": "length", "length": 3}
    assert first.finish_reason is not None
    assert first.finish_reason["type"] == "abort"
    scheduler.cancel(first)
    assert first.finish_reason["type"] == "abort"


def test_zero_new_tokens_end_at_once(model_dirs: Any) -> None:
    scheduler = make(model_dirs.base)
    request = submit(scheduler, [20, 30, 40, 50], 0)
    run(scheduler)
    assert request.output_ids == []
    assert request.finish_reason == {"type": "length", "length": 0}


def test_without_a_limit_a_request_ends_at_the_context_length(model_dirs: Any) -> None:
    scheduler = make(model_dirs.base, context_length=40)
    request = submit(scheduler, [20, 30, 40], None)  # type: ignore[arg-type]  # null is allowed
    run(scheduler)
    assert request.finish_reason == {"type": "length", "length": 37}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1000], "outside the vocabulary"), ([20] * 512, "longer than the model")],
)
def test_prompts_that_cannot_be_served_are_refused(
    prompt: list[int], message: str, model_dirs: Any
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        submit(make(model_dirs.base), prompt, 1)


def test_a_context_longer_than_the_model_is_refused(model_dirs: Any) -> None:
    with pytest.raises(ValueError, match="context_length is 4096"):
        make(model_dirs.base, context_length=4096)


def test_a_request_that_is_aborted_before_its_turn_ends_without_a_token(model_dirs: Any) -> None:
    scheduler = make(model_dirs.base, max_running=1)
    running, waiting = (submit(scheduler, [40, 41, 42], 8) for _ in range(2))
    scheduler.step()
    assert list(scheduler.waiting) == [waiting]
    scheduler.abort(waiting.rid)
    assert waiting.finished
    assert waiting.output_ids == []
    assert waiting.finish_reason["type"] == "abort"
    run(scheduler)
    assert len(running.output_ids) == 8


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, context_length=64),
            "its logits in pieces differ from those of the whole by .* of their range",
        ),
        (
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
            "its forward fails with the cache .ValueError: too many values to unpack",
        ),
    ],
    ids=["takes-no-cache", "takes-no-mask"],
)
def test_a_model_whose_decoding_is_not_its_forward_is_refused_when_it_is_loaded(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    path = save_model(config, tmp_path / "model")
    with pytest.raises(ValueError, match=reason) as e:
        ModelRunner(str(path), context_length=64)
    assert f"model_type {config.model_type!r}" in str(e.value)
    assert "use SGLang or vLLM" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_model_for_which_there_is_no_memory_is_not_said_to_need_another_engine(
    model_dirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRunner, "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        ModelRunner(str(model_dirs.base), context_length=64)

"""vLLM's API as the seam reads it, on answers of a real vLLM 0.32.0 (`make record-vllm`)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.api import (
    Bucket,
    EngineState,
    GenerateRequest,
    Meeting,
    Output,
    PromptPictures,
    Sampling,
)
from stepwell.backends.engines.commands import CommandLine, Launch
from stepwell.backends.engines.kinds import command_line, connect
from stepwell.backends.engines.routes import check_routes
from stepwell.backends.engines.vllm import GENERATE, VllmEngine, _Reader
from stepwell.backends.errors import (
    EngineError,
    EngineInternalError,
    EngineRequestError,
    EngineStartError,
    EngineUnavailableError,
)
from stepwell.config.load import load_config
from stepwell.datapool.types import VersionSpan
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.engine import Sampler
from stepwell.run.checks import engine as check_engine_of
from stepwell.show.engine import check_engine
from stepwell.trainer.errors import ConfigError
from tests.backends.engines.exchanges import MODEL, PROMPT, save_new
from tests.backends.engines.record_vllm import FIXTURES
from tests.gateway.conftest import serving

WIRE = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/shutdown_weight_transfer_engine",
)
MEETING = Meeting("g", 5, "raw_nccl", "10.0.0.1", 0, 60.0, base64.b64encode(b"u" * 128).decode())
BUCKET = Bucket(("a", "b"), ("float32", "bfloat16"), ((2, 3), (5,)))
INIT_INFO = {
    "nccl_unique_id_b64": MEETING.unique_id,
    "rank_offset": 1,
    "world_size": 5,
    "packed": True,
    "packed_buffer_size_bytes": 1 << 40,
    "packed_num_buffers": 1,
}
UPDATE_INFO = {
    "names": ["a", "b"],
    "dtype_names": ["float32", "bfloat16"],
    "shapes": [[2, 3], [5]],
}


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


@dataclass
class Scripted:
    """A server that answers as a real vLLM was recorded to; what was asked is in `asked`."""

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path -> a recorded answer, or one that a test made."""
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("v1_models", "version", "weight_info", "is_paused", "drop_cache"):
            self.give(name)
        for name in ("pause_keep", "resume", "load", "name_version", "abort", "abort_all"):
            self.give(name)
        models = self.answers["/v1/models"]
        models["text"] = models["text"].replace("MODEL_DIR", str(MODEL))

    def give(self, name: str, path: str = "", **changes: Any) -> None:
        """Answer as recorded under `name` from now on."""
        found = recorded(name) | changes
        self.answers[path or found["path"].partition("?")[0]] = found

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.asked.append((path, json.loads(body) if body else None))
        found = self.answers.get(request.url.path)
        if found is None:
            return Response('{"detail":"Not Found"}', 404, media_type="application/json")
        streams = found["text"].startswith("data:")
        kind = "text/event-stream" if streams else "application/json"
        return Response(found["text"], found["status"], media_type=kind)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def request_of(*, stream: bool = False, n: int = 100, **sampling: Any) -> GenerateRequest:
    settings = Sampling(n, **{"temperature": 1.0, **sampling})
    return GenerateRequest("me", np.array(PROMPT, np.int32), settings, n, stream=stream)


async def sampled(name: str, **request: Any) -> list[Output]:
    """Outputs of the answer that was recorded under `name`."""
    server, outputs = Scripted(), list[Output]()
    server.give(name)
    asked = request_of(stream=recorded(name)["text"].startswith("data:"), **request)
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        await engine.sample(asked, outputs.append)
    return outputs


def ids_of(outputs: list[Output]) -> list[int]:
    return [i for output in outputs for i in output.ids]


# -- what it answers ------------------------------------------------------------------------------


async def test_an_answer_has_ids_log_probs_its_end_and_the_versions_that_sampled_it() -> None:
    [output] = await sampled("whole")
    choice = json.loads(recorded("whole")["text"])["choices"][0]
    n = len(choice["token_ids"])
    assert output.ids == choice["token_ids"]
    assert output.log_probs == [e["logprob"] for e in choice["logprobs"]["content"]]
    assert (output.finish, output.version, output.spans) == ("stop", 0, [VersionSpan(0, 0, n)])
    assert choice["stop_reason"] is None, "vLLM names no end that is the model's own"
    assert output.matched == output.ids[-1]


async def test_a_stream_hands_on_each_chunk_and_its_end_last() -> None:
    outputs = await sampled("stream")
    [whole] = await sampled("whole")
    assert ids_of(outputs) == whole.ids[:6]
    assert len(outputs) == 6
    assert [o.finish for o in outputs] == [None] * 5 + ["length"]
    assert outputs[-1].spans == [VersionSpan(0, 0, 6)]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_stream_is_read_alike_wherever_its_bytes_are_cut(size: int) -> None:
    data = recorded("stream")["text"].encode()
    found: list[list[Output]] = []
    for step in (size, len(data)):
        outputs: list[Output] = []
        reader = _Reader("url", request_of(stream=True), outputs.append)
        has_ended = [reader.feed(data[i : i + step]) for i in range(0, len(data), step)]
        assert has_ended[-1]
        found.append(outputs)
    assert found[0] == found[1]


async def test_alternatives_are_the_likeliest_whatever_was_sampled() -> None:
    [output] = await sampled("tops", n_top_logprobs=2)
    content = json.loads(recorded("tops")["text"])["choices"][0]["logprobs"]["content"]
    assert len(output.top_log_probs) == 3
    for top, entry in zip(output.top_log_probs, content, strict=True):
        ranked = {e["rank"]: (e["token_id"], e["logprob"]) for e in entry["top_logprobs"]}
        assert list(top) == [ranked[1], ranked[2]]


async def test_what_stopped_it_is_named() -> None:
    [by_id] = await sampled("stop_id")
    assert (by_id.finish, by_id.matched, by_id.ids[-1]) == ("stop", 310, 310)
    [by_text] = await sampled("stop_string")
    assert (by_text.finish, by_text.matched) == ("stop", "calc")


@pytest.mark.parametrize("name", ["aborted", "aborted_with_all", "cut_by_a_pause"])
async def test_what_is_aborted_ends_with_what_it_has(name: str) -> None:
    outputs = await sampled(name)
    n = len(ids_of(outputs))
    assert 0 < n < 900
    assert (outputs[-1].finish, outputs[-1].spans) == ("abort", [VersionSpan(0, 0, n)])


async def test_an_update_within_a_call_gives_two_spans() -> None:
    outputs = await sampled("held_over_an_update")
    spans = outputs[-1].spans
    assert spans is not None
    assert [s.version for s in spans] == [0, 7]
    edges = [0, *(s.end for s in spans)]
    assert [s.start for s in spans] == edges[:-1]
    assert edges[-1] == len(ids_of(outputs)) == 900
    assert outputs[-1].version == 7


async def test_a_canary_says_so() -> None:
    [output] = await sampled("of_a_canary")
    assert (output.version, output.is_canary) == (8, True)
    server = Scripted()
    server.give("weight_info", text='{"weight_version": "8-canary"}')
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        assert (await engine.state()).name == "8-canary"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_long", "longer than the maximum model length"),
        ("nothing", "at least 1 item"),
        ("no_such_token", "out of vocabulary"),
    ],
)
async def test_what_it_refuses_is_refused_in_its_words(name: str, words: str) -> None:
    with pytest.raises(EngineRequestError) as e:
        await sampled(name)
    assert e.value.status == 400
    assert words in e.value.words


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    answer = json.loads(recorded("whole")["text"])
    change(answer)
    return json.dumps(answer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed(lambda a: a["choices"][0].pop("weight_versions")), "older than vLLM 0.32.0"),
        (changed(lambda a: a["choices"][0]["token_ids"].append(9)), "log-probs of other tokens"),
        (
            changed(lambda a: a["choices"][0]["weight_versions"][0].update(version="x")),
            "weight_version is no number",
        ),
        ('{"choices": 3}', "another shape than vLLM's"),
        ('{"error": {"message": "core died"}}', "core died"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_error(text: str, words: str) -> None:
    server = Scripted()
    server.give("whole", text=text)
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        with pytest.raises(EngineInternalError, match=words):
            await engine.sample(request_of(), lambda _: None)


async def test_a_stream_that_breaks_off_is_no_answer() -> None:
    server = Scripted()
    events = recorded("stream")["text"].split("\n\n")
    server.give("stream", text="\n\n".join(events[:3]) + "\n\n")
    outputs: list[Output] = []
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        with pytest.raises(EngineUnavailableError, match="without a finish reason"):
            await engine.sample(request_of(stream=True), outputs.append)
    assert len(outputs) == 3


# -- what it is asked -----------------------------------------------------------------------------


async def test_a_request_says_all_that_shapes_the_answer() -> None:
    server = Scripted()
    server.give("stream")
    asked = request_of(
        stream=True,
        n=6,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=("end",),
        stop_token_ids=(7,),
        n_top_logprobs=2,
        constraint=("regex", "a|b"),
    )
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        await engine.sample(asked, lambda _: None)
        await engine.abort("me")
        await engine.abort()
    path, body = server.asked[0]
    assert path == GENERATE
    assert body == {
        "request_id": "me",
        "token_ids": PROMPT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "max_tokens": 6,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 3,
            "logprobs": 3,
            "detokenize": True,
            "stop": ["end"],
            "skip_special_tokens": False,
            "stop_token_ids": [7],
            "structured_outputs": {"regex": "a|b"},
        },
    }
    ids = {"request_ids": ["generate-tokens-me"]}
    assert server.asked[1:] == [("/inference/v1/abort_requests", ids), ("/abort_requests", {})]


async def test_a_seeded_response_that_goes_on_has_another_seed() -> None:
    """vLLM draws one number after another: those of the beginning would come again."""
    server = Scripted()
    asked = request_of(n=6, seed=3)
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        for left in (6, 4, 4, 2):
            server.give("whole")
            await engine.sample(asked._replace(max_new_tokens=left), lambda _: None)
    whole, four, again, two = (body["sampling_params"]["seed"] for _, body in server.asked)
    assert (whole, four) == (3, again)
    assert len({whole, four, two}) == 3
    assert all(-(2**63) <= seed < 2**63 for seed in (four, two))


async def test_ids_that_the_model_may_not_sample_are_told() -> None:
    """Ids of vision tokens, which the trainer masks, too."""
    server = Scripted()
    server.give("whole")
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        await engine.sample(request_of()._replace(masked_ids=(5, 6)), lambda _: None)
    _, body = server.asked[0]
    assert body["sampling_params"]["logit_bias"] == {"5": -100.0, "6": -100.0}


async def test_pictures_are_refused() -> None:
    pictures = PromptPictures([], dict, 1)  # type: ignore[arg-type]  # never read
    async with VllmEngine("http://127.0.0.1:9") as engine:
        with pytest.raises(EngineRequestError, match="takes no pictures: it is vLLM"):
            await engine.sample(request_of()._replace(pictures=pictures), lambda _: None)


@pytest.mark.parametrize("temperature", [0.001, 0.0099])
async def test_a_temperature_that_it_would_raise_in_silence_is_refused(temperature: float) -> None:
    """vLLM takes 0.01 then, and the log-probs would be of another policy than the Step says."""
    server = Scripted()
    server.give("whole")
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        with pytest.raises(EngineRequestError, match=rf"temperature is {temperature}.*0\.01") as e:
            await engine.sample(request_of(temperature=temperature), lambda _: None)
    assert e.value.status == 400
    assert server.asked == []


async def test_pauses_keep_requests_and_retract_drops_their_cache() -> None:
    server = Scripted()
    server.give("pause_keep", "/pause")
    drop = "/reset_prefix_cache?reset_running_requests=true"
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        for mode, paths in (
            ("abort", ["/pause?mode=abort"]),
            ("in_place", ["/pause?mode=keep"]),
            ("retract", ["/pause?mode=keep", drop]),
        ):
            server.asked.clear()
            await engine.pause(mode)  # type: ignore[arg-type]  # the three that there are
            assert server.paths == paths


async def test_an_update_pauses_an_engine_that_is_not_paused_until_its_version_is_named(
    tmp_path: Path,
) -> None:
    new = save_new(tmp_path / "new")
    server = Scripted()
    server.give("pause_keep", "/pause")
    drop = "/reset_prefix_cache?reset_running_requests=true"
    update = ["/collective_rpc", "/update_weight_version", drop]
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        await engine.update_weights_from_disk(str(new), 7)
        asked = dict(server.asked)
        assert server.paths[2:] == ["/pause?mode=wait", *update, "/resume"]
        assert asked["/collective_rpc"]["kwargs"] == {"weights_path": str(new)}
        assert asked["/update_weight_version"] == {"new_version": "7"}
        server.give("is_paused", text='{"is_paused": true}')
        server.asked.clear()
        await engine.update_weights_from_disk(str(new), 7, flush_cache=False)
        assert server.paths[2:] == update[:2]
        # One that fails is not left paused.
        server.give("is_paused")
        server.give("pause_keep", "/pause", status=500, text='{"error": "it does not end"}')
        server.asked.clear()
        with pytest.raises(EngineInternalError, match="it does not end"):
            await engine.update_weights_from_disk(str(new), 8)
        assert server.paths[-1] == "/resume", "it may wait all the same"
        server.give("pause_keep", "/pause")
        server.give("load_nowhere", "/collective_rpc")
        server.asked.clear()
        with pytest.raises(EngineInternalError):
            await engine.update_weights_from_disk(str(new), 8)
        assert server.paths[-1] == "/resume"
        # What it answers then, or that it is gone, is not told in place of the reason.
        server.give("resume", status=404, text='{"error": "nobody is here"}')
        with pytest.raises(EngineInternalError, match="collective_rpc"):
            await engine.update_weights_from_disk(str(new), 8)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _reshaped(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, file)


def _renamed(file: Path) -> None:
    save_file({f"x.{name}": t for name, t in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (Path.unlink, "no safetensors files"),
        (_cut, "model.safetensors is damaged"),
        (lambda file: file.write_bytes(b"\xff" * 20), "is damaged"),
        (_reshaped, "model.norm.weight has the shape"),
        (_renamed, "no tensor of the engine's"),
    ],
)
async def test_weights_that_would_end_the_engine_are_not_sent(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    new = save_new(tmp_path / "new")
    spoil(new / "model.safetensors")
    server = Scripted()
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        with pytest.raises(EngineRequestError, match="Failed to load") as e:
            await engine.update_weights_from_disk(str(new), 7)
    assert words in str(e.value)
    assert server.paths == ["/v1/models"]


async def test_hashes_of_emptied_tensors_are_none() -> None:
    server = Scripted()
    server.give("weight_checker")
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        assert await engine.weight_hashes() is None
        server.give("weight_checker", text='{"checksums": {"a": "1", "b": "2"}}')
        [rank] = await engine.weight_hashes() or ()
        assert rank["checksums"] == {"a": "1", "b": "2"}
        del server.answers["/weight_checker"]
        assert await engine.weight_hashes() is None


async def test_it_says_what_it_is_and_what_fits() -> None:
    async with serving(Scripted().app()) as url, VllmEngine(url) as engine:
        assert await engine.name() == "vllm 0.32.0"
        assert await engine.max_model_len() == 2048
        assert await engine.about() == EngineState(0, model_path=str(MODEL))
        assert (await engine.state()) == EngineState(0)


async def test_which_folder_an_update_named_is_not_known() -> None:
    """A publication that fails would bring it back to the weights of its start, under the number of
    the update."""
    server = Scripted()
    server.give("weight_info_of_7")
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        assert await engine.about() == EngineState(7)


async def test_the_gateway_samples_from_it_by_its_kind() -> None:
    server = Scripted()
    server.give("whole")
    server.answers["/health"] = {"text": "", "status": 200}
    async with serving(server.app()) as url:
        kind = EngineConfig(kind="vllm", urls=(url,))
        sampler = Sampler(GatewayConfig(), Wiring((url,), kind))
        try:
            await sampler.start()
            await sampler.ready()
            assert await sampler.context_length() == 2048
            prompt = np.array(PROMPT, np.int32)
            found = await sampler.generate(prompt, Sampling(100, 1.0), affinity="t")
        finally:
            await sampler.close()
    assert found.finish_reason == "stop"
    assert found.spans == (VersionSpan(0, 0, len(found.response_ids)),)


# -- how it is started ----------------------------------------------------------------------------


def line(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, **fields: Any) -> CommandLine:
    monkeypatch.setattr("stepwell.backends.engines.commands.has_gpu", lambda: gpu)
    settings = {"kind": "vllm", "model_path": "/models/base", "python": "/opt/bin/python"}
    config = EngineConfig.model_validate({**settings, **fields})
    return command_line(config, Launch(31000, "/run/weights/v7", "7"))


def test_its_command_line_has_the_flags_that_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = line(monkeypatch, gpu=True, context_length=512, extra_args=("--enforce-eager",))
    flags = {a: b for a, b in pairwise(made.argv) if a.startswith("--")}
    assert made.argv[:3] == ["/opt/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert flags["--model"] == "/run/weights/v7"
    assert flags["--tokenizer"] == "/models/base"
    assert (flags["--port"], flags["--max-model-len"]) == ("31000", "512")
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert "--enable-scale-out" in flags
    assert flags["--dtype"] == "auto"
    assert made.argv[-1] == "--enforce-eager"
    assert made.env == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    on_cpu = line(monkeypatch, gpu=False)
    assert "float32" in on_cpu.argv
    assert on_cpu.env["PYTHONPATH"].endswith("vllm_cpu")


def test_a_configuration_that_asks_it_for_what_it_has_not_is_refused() -> None:
    base = ["engine.kind=vllm", "engine.python=python"]
    for key, words in (
        ("engine.weight_transport=ipc", r"engine\.weight_transport is 'ipc', and"),
        ("engine.release_memory=true", r"engine\.release_memory is true, and engine\.kind 'vllm'"),
        ("engine.options={x: 1}", r"engine\.options\.x is 1: .* options of VllmEngine are none"),
    ):
        config = load_config("quickstart", [*base, key, "async_training.partial_rollout=true"])
        with pytest.raises((ConfigError, EngineError, ValueError), match=words):
            check_engine_of(config)


async def test_weights_go_by_its_native_wire_bucket_by_bucket() -> None:
    """The contract of vLLM 0.32.0's `api_router.py`, `NCCLWeightTransferInitInfo` and
    `NCCLWeightTransferUpdateInfo`; `real_vllm.py` builds both of what is asked here."""
    server = Scripted()
    for path in WIRE:
        server.answers[path] = {"status": 200, "text": '{"message": "done"}'}
    server.answers["/get_world_size"] = {"status": 200, "text": '{"world_size": 4}'}
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        assert (await engine.about()).ranks == 4
        server.asked.clear()
        await engine.init_weights_update_group(MEETING, 1)
        await engine.begin_weight_update()
        for version in (None, "7"):
            await engine.update_weights_from_distributed(
                BUCKET, "g", version=version, flush_cache=version is not None
            )
        await engine.end_weight_update("7")
        await engine.destroy_weights_update_group("g")
    assert [(path, body) for path, body in server.asked if path != "/is_paused"] == [
        ("/init_weight_transfer_engine", {"init_info": INIT_INFO}),
        ("/pause?mode=wait", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": UPDATE_INFO}),
        ("/update_weights", {"update_info": UPDATE_INFO}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/finish_weight_update", {"weight_version": "7"}),
        ("/resume", {}),
        ("/shutdown_weight_transfer_engine", {}),
    ]


async def test_a_session_that_does_not_open_leaves_it_generating() -> None:
    server = Scripted()
    server.answers["/start_weight_update"] = {"status": 500, "text": '{"error": "not so"}'}
    async with serving(server.app()) as url, VllmEngine(url) as engine:
        with pytest.raises(EngineError, match="not so"):
            await engine.begin_weight_update()
    assert server.paths == ["/is_paused", "/pause?mode=wait", "/start_weight_update", "/resume"]


def test_it_is_launched_for_that_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    made = line(monkeypatch, gpu=True, weight_transport="nccl")
    at = made.argv.index("--weight-transfer-config")
    assert json.loads(made.argv[at + 1]) == {"backend": "nccl"}


async def test_it_is_attached_by_its_urls() -> None:
    config = EngineConfig(kind="vllm", urls=("http://a:1",))
    assert config.is_attached
    async with connect(config, config.urls[0]) as engine:
        assert isinstance(engine, VllmEngine)


ATTACHED = EngineConfig(kind="vllm", urls=("http://a:1",))


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs", None])
async def test_a_server_whose_log_probs_are_not_of_what_it_samples_is_refused(
    mode: str | None,
) -> None:
    """vLLM's default are those at temperature 1, whatever the request's is."""
    server = Scripted()
    info = {"vllm_config": {"model_config": {"logprobs_mode": mode}}}
    if mode is not None:  # without, it does not say
        server.answers["/server_info"] = {"status": 200, "text": json.dumps(info)}
    async with serving(server.app()) as url, connect(ATTACHED, url) as engine:
        checking = check_routes(engine, ATTACHED, publishes=True)
        if mode == "raw_logprobs":
            with pytest.raises(EngineStartError, match=r"gives raw_logprobs.*--logprobs-mode proc"):
                await checking
        else:
            await checking
        found = await asyncio.to_thread(lambda: [*check_engine(url, "vllm")])
    told = [f.state for f in found if f.name == "answers"]
    assert told == (["problem"] if mode == "raw_logprobs" else [])


# -- the mended reload of a CPU -------------------------------------------------------------------


def test_a_reload_on_a_cpu_packs_what_was_kept_once_more(tmp_path: Path) -> None:
    """`vllm_cpu/sitecustomize.py` around a module of vLLM's name."""
    import subprocess
    import sys

    hook = Path(__file__).parents[3] / "backends" / "engines" / "vllm_cpu"
    package = tmp_path / "vllm" / "model_executor" / "model_loader" / "reload"
    package.mkdir(parents=True)
    (package / "inplace.py").write_text(
        "def finalize_layerwise_reload(model, config):\n    model.done.append(config)\n"
    )
    code = """
from types import SimpleNamespace as N
from vllm.model_executor.model_loader.reload import inplace
packed = []
method = N(process_weights_after_loading=lambda layer: packed.append(layer.name))
def layer(name, n, **more):
    return N(name=name, weight=N(numel=lambda: n), quant_method=method, **more)
layers = [layer("head", 4, cpu_linear=1), layer("emptied", 0, cpu_linear=1), layer("norm", 4)]
model = N(done=[], modules=lambda: layers)
inplace.finalize_layerwise_reload(model, "config")
print(model.done, packed)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{hook}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['config'] ['head']\n", done.stderr

"""Engines answer as a real SGLang was recorded to (`make record-sglang`): status, keys, types and,
where they are not the clock's or the server's own, values. So the embedded engine cannot drift from
it where no SGLang is installed; on a real one (`make test-sglang`) this checks the recording."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stepwell.backends.engines.supervisor import Supervisor
from tests.backends.engines.embedded_here import embedded_here
from tests.backends.engines.exchanges import EXCHANGES, FIXTURES, MODEL, Asker, save_new

LEFT_OUT = {
    "model_info.embedding": "it serves no embedding models",
    "get_model_info.embedding": "likewise",
    **dict.fromkeys(
        (
            f"{path}.{parser}"
            for path in ("model_info", "get_model_info")
            for parser in ("tool_call_parser", "reasoning_parser")
        ),
        "text is parsed by the gateway; servers are launched without parsers since the recording",
    ),
    **dict.fromkeys(
        (
            f"loads.loads.0.{key}"
            for key in (
                "num_waiting_uncached_tokens",
                "num_active_tokens",
                "num_prealloc_ready_tokens",
                "gen_throughput",
                "total_prefill_busy_us",
                "decode_moments",
                "memory",
                "disaggregation",
                "queues",
            )
        ),
        "of SGLang's own scheduler; nothing of ours reads it",
    ),
}
"""Keys of SGLang's that are not compared, each with the reason."""

OWN = {
    "id": "chosen by the server, unless it is the model's",
    "e2e_latency": "the clock's",
    "timestamp": "the clock's",
    "created": "the clock's",
    "response_sent_to_client_ts": "the clock's",
    "owned_by": "the server's",
    "max_total_num_tokens": "the size of its cache",
    "memory": "SGLang's weights are what the machine had less of when they were loaded",
}
"""Values that are not compared, each with the reason."""

OWN_WORDS = {
    "update_nowhere.message",  # the library's that failed
    "loads.version",
}

CHANCE = {"text", "output_ids", "completion_tokens", "start", "end"}
"""Values that depend on when a request in flight was interrupted."""

TOLERANCE = 1e-4
"""Largest difference of log-probs, in nats: two implementations in float32."""


@pytest.fixture(scope="module")
def served(
    engine_kind: str, make_engine_config: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """An engine of the recorded model: its url and the folder of the new weights."""
    folder = tmp_path_factory.mktemp("recorded")
    with ExitStack() as stack:
        if engine_kind == "embedded":
            url = stack.enter_context(embedded_here(MODEL, "float32"))
        else:
            config = make_engine_config(engine_kind, MODEL, max_running_requests=8)
            supervisor = Supervisor(config, folder / "logs")
            stack.callback(supervisor.stop)
            url = supervisor.start()
        yield url, save_new(folder / "new")


def compare(recorded: Any, answer: Any, where: str, own: Set[str]) -> None:
    """Fail at the first difference that nothing above excuses; keys in `own` may have any value."""
    if isinstance(recorded, dict):
        assert isinstance(answer, dict), where
        missing = {k for k in recorded.keys() - answer.keys() if f"{where}.{k}" not in LEFT_OUT}
        assert not missing, f"{where} lacks {sorted(missing)}"
        for name in recorded.keys() & answer.keys():
            if f"{where}.{name}" in LEFT_OUT:
                continue
            compare(recorded[name], answer[name], f"{where}.{name}", own)
        return
    excused = where in OWN_WORDS or not own.isdisjoint(where.split(".")[1:])
    if isinstance(recorded, list):
        assert isinstance(answer, list), where
        assert excused or len(recorded) == len(answer), where
        for i, (a, b) in enumerate(zip(recorded, answer, strict=False)):
            compare(a, b, f"{where}.{i}", own)
        return
    assert type(recorded) is type(answer), f"{where}: {answer!r} instead of {recorded!r}"
    if isinstance(recorded, float):
        recorded = pytest.approx(recorded, abs=TOLERANCE)
    assert excused or answer == recorded, f"{where}: {answer!r} instead of {recorded!r}"


def test_every_exchange_is_recorded_and_nothing_else() -> None:
    assert {path.stem for path in FIXTURES.glob("*.json")} == set(EXCHANGES)


@pytest.mark.parametrize("name", EXCHANGES)
async def test_an_answer_is_what_a_real_sglang_says(name: str, served: tuple[str, Path]) -> None:
    recorded = json.loads((FIXTURES / f"{name}.json").read_text())
    async with aiohttp.ClientSession() as http:
        asker = Asker(http, *served)
        answer = await asker.answer(EXCHANGES[name])
        for _ in range(4):  # a request may have ended before it was to be interrupted
            if not EXCHANGES[name].in_flight or interrupted(answer):
                break
            answer = await asker.answer(EXCHANGES[name])
    assert answer["status"] == recorded["status"], answer
    own = OWN.keys() - ({"id"} if name in ("generate", "v1_models") else set())
    if name.endswith("_in_flight"):
        own |= CHANCE
    compare(recorded.get("body"), answer.get("body"), name, own)
    if "stream" in recorded:
        compare(recorded["stream"][-1], answer["stream"][-1], name, own)
        if len(answer["stream"]) > 1:  # tokens that come quickly share a chunk
            shape = {*own, *CHANCE, "output_token_logprobs", "output_token_logprobs_length"}
            compare(recorded["stream"][0], answer["stream"][0], name, shape)


def interrupted(answer: dict[str, Any]) -> bool:
    meta = answer["body"]["meta_info"]
    return meta["finish_reason"]["type"] == "abort" or len(meta["weight_versions"]) > 1

"""`make record-vllm`: asks a real vLLM what `VllmEngine` asks, and writes the answers.

    fixtures_vllm/NAME.json     {"engine": …, "method": …, "path": …, "asked": …, "status": …, …}

`test_vllm.py` gives them again. The model is the quickstart's, committed; `new` is the same with
its last norm doubled. Run it when vLLM's pin changes, and read the difference.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.supervisor import Supervisor
from stepwell.backends.engines.vllm import GENERATE
from tests.backends.engines import doctor_answers, table
from tests.backends.engines.exchanges import MODEL, PROMPT, save_new

FIXTURES = Path(__file__).parent / "fixtures_vllm"


@dataclass
class Recorder:
    """Calls a server and keeps what it answers, paths replaced by names."""

    http: aiohttp.ClientSession
    url: str
    paths: dict[str, str]
    engine: str
    names: list[str] = field(default_factory=list)

    async def ask(self, name: str, method: str, path: str, body: Any = None) -> None:
        async with self.http.request(method, self.url + path, json=body) as answer:
            text, status = await answer.text(), answer.status
        asked = json.dumps(body)
        for found, given in self.paths.items():
            text, asked = text.replace(found, given), asked.replace(found, given)
        kept = {
            "engine": self.engine,
            "method": method,
            "path": path,
            "asked": json.loads(asked),
            "status": status,
            "text": text,
        }
        whole = json.dumps(kept, indent=1, ensure_ascii=False)
        (FIXTURES / f"{name}.json").write_text(whole + "\n")
        self.names.append(name)
        print(status, name, flush=True)

    async def generate(self, name: str, n: int = 6, **fields: Any) -> None:
        params = {"max_tokens": n, "temperature": 0, "logprobs": 0, "detokenize": False}
        body = {
            "request_id": name,
            "token_ids": fields.pop("ids", PROMPT),
            "stream": fields.pop("stream", False),
            "sampling_params": params | fields,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        await self.ask(name, "POST", GENERATE, body)

    @asynccontextmanager
    async def in_flight(self, name: str, **fields: Any) -> AsyncIterator[None]:
        """A long request while the body runs, then its answer."""
        task = asyncio.create_task(self.generate(name, 900, ignore_eos=True, **fields))
        await asyncio.sleep(1.0)
        yield
        await task


async def record(url: str, new: Path, engine: str) -> None:
    async with aiohttp.ClientSession() as http:
        to = Recorder(http, url, {str(new): "NEW_DIR", str(MODEL): "MODEL_DIR"}, engine)
        for path in ("/v1/models", "/version", "/weight_info", "/is_paused"):
            await to.ask(path.strip("/").replace("/", "_"), "GET", path)
        await to.generate("whole", 100)
        await to.generate("stream", stream=True, ignore_eos=True)
        await to.generate("tops", 3, logprobs=3, temperature=1.0, seed=1, ignore_eos=True)
        await to.generate("stop_id", 60, stop_token_ids=[310])
        stop = {"detokenize": True, "skip_special_tokens": False}
        await to.generate("stop_string", 60, stop=["no such text", "calc"], **stop)
        await to.generate("too_long", ids=[5] * 3000)
        await to.generate("nothing", ids=[])
        await to.generate("no_such_token", ids=[99999999])
        await to.ask("no_such_route", "GET", "/model_info")
        async with to.in_flight("aborted", stream=True):
            ids = {"request_ids": ["generate-tokens-aborted"]}
            await to.ask("abort", "POST", "/inference/v1/abort_requests", ids)
        async with to.in_flight("aborted_with_all"):
            await to.ask("abort_all", "POST", "/abort_requests", {})
        async with to.in_flight("cut_by_a_pause"):
            await to.ask("pause_abort", "POST", "/pause?mode=abort", {})
        await to.ask("resume", "POST", "/resume", {})
        async with to.in_flight("held_over_an_update", stream=True):
            await to.ask("pause_keep", "POST", "/pause?mode=keep", {})
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
            await to.ask("load", "POST", "/collective_rpc", load)
            name = {"new_version": "7"}
            await to.ask("name_version", "POST", "/update_weight_version", name)
            drop = "/reset_prefix_cache?reset_running_requests=true"
            await to.ask("drop_cache", "POST", drop, {})
            await to.ask("resume_again", "POST", "/resume", {})
        await to.ask("weight_info_of_7", "GET", "/weight_info")
        await to.generate("updated")
        checksum = {"action": "checksum"}
        await to.ask("weight_checker", "POST", "/weight_checker", checksum)
        await to.ask("name_canary", "POST", "/update_weight_version", {"new_version": "8-canary"})
        await to.generate("of_a_canary")
        # Ends the engine core: the last one.
        load = {"method": "reload_weights", "kwargs": {"weights_path": "/nonexistent"}}
        await to.ask("load_nowhere", "POST", "/collective_rpc", load)


def main() -> int:
    engine = f"vllm {table.version('vllm')}"
    FIXTURES.mkdir(exist_ok=True)
    for old in FIXTURES.glob("*.json"):
        old.unlink()
    config = EngineConfig(kind="vllm", model_path=MODEL, max_running_requests=8, stream_interval=1)
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(config, folder)
        try:
            url = supervisor.start()
            asyncio.run(doctor_answers.record(url, engine))
            asyncio.run(record(url, save_new(Path(folder) / "new"), engine))
        finally:
            supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

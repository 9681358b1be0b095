"""`make record-sglang`: asks a real SGLang every exchange, and all that `stepwell doctor --engine`
asks, and writes the fixtures.

Run it when SGLang's pin changes, and read the difference: it is what changed in the API.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from pathlib import Path

import aiohttp

from stepwell.backends.config import EngineConfig
from stepwell.backends.engines.commands import interpreter
from stepwell.backends.engines.supervisor import Supervisor
from tests.backends.engines import doctor_answers
from tests.backends.engines.exchanges import EXCHANGES, FIXTURES, MODEL, Asker, save_new


async def record(url: str, new: Path, engine: str) -> None:
    async with aiohttp.ClientSession() as http:
        asker = Asker(http, url, new)
        for name, exchange in EXCHANGES.items():
            answer = await asker.answer(exchange)
            asked = {"method": exchange.call.method, "path": exchange.call.path}
            whole = {"engine": engine, **asked, **answer}
            text = json.dumps(whole, indent=1, ensure_ascii=False)
            (FIXTURES / f"{name}.json").write_text(text + "\n")
            print(f"{answer['status']} {name}", flush=True)


def main() -> None:
    config = EngineConfig(kind="sglang", model_path=MODEL, max_running_requests=8)
    version = "import importlib.metadata as m; print('sglang', m.version('sglang'))"
    argv = [str(interpreter(config, "sglang", "make install-sglang")), "-c", version]
    engine = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    for old in FIXTURES.glob("*.json"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        supervisor = Supervisor(config, folder)
        try:
            url = supervisor.start()
            asyncio.run(doctor_answers.record(url, engine))
            asyncio.run(record(url, save_new(Path(folder) / "new"), engine))
        finally:
            supervisor.stop()


if __name__ == "__main__":
    main()

"""Schemathesis against a real gateway with a scripted engine and the pool core.

    python -m tests.gateway.fuzz [CASES_PER_OPERATION]

Requests are generated from the gateway's own OpenAPI document; a 500 is a failure. `make fuzz`
sends more than 10,000.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

from gateway.app import create_app
from gateway.config import GatewayConfig
from tests.gateway.conftest import LocalPool, Sampled, ScriptedEngine, make_tokenizer, serving


async def fuzz(cases_per_operation: int, seed: int | None = None) -> tuple[int, str]:
    """(exit status, report) of Schemathesis."""
    tokenizer = make_tokenizer("qwen3")
    eos = tokenizer.hf.eos_token_id
    said = Sampled([*tokenizer.encode("fine").tolist(), eos])
    engine = ScriptedEngine(default=lambda _: said)
    with tempfile.TemporaryDirectory() as folder:
        async with serving(engine.app(), graceful=False) as engine_url:
            config = GatewayConfig(port=0, engine_urls=[engine_url])
            async with serving(create_app(config, LocalPool(), tokenizer)) as url:
                command = [
                    *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
                    *("--checks", "not_a_server_error", "--phases", "fuzzing", "--no-color"),
                    *("--max-examples", str(cases_per_operation), "--warnings", "off"),
                    # A busy machine is no failure.
                    *("--wait-for-schema", "60", "--request-timeout", "60"),
                    *(() if seed is None else ("--seed", str(seed))),
                ]
                process = await asyncio.create_subprocess_exec(
                    *command,
                    cwd=folder,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                )
                out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


if __name__ == "__main__":
    status, report = asyncio.run(fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
    print(report)
    sys.exit(status)

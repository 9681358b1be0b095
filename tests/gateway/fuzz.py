"""Requests that nobody wrote, against a real gateway, a scripted engine and a pool of this process.

    python -m tests.gateway.fuzz [CASES_PER_OPERATION]

A 500 is a failure. Schemathesis generates requests from the gateway's own OpenAPI document;
white-box prompts, whose ids may decode to any markup, are drawn here. `make fuzz` sends more than
10,000.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import tempfile
from collections.abc import Sequence

import aiohttp

from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.tokens.tokenizer import ChatTokenizer
from tests.gateway.conftest import (
    Sampled,
    ScriptedEngine,
    eos_id,
    local_pool,
    make_tokenizer,
    serving,
)

MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|im_start|>",
    "<|im_end|>",
    "assistant\n",
    '{"name": "f", "arguments": {"x": 1}}',
    '{"name": 3}',
    '{"name": "f"',
    "[1]",
    "3",
    "null",
    "NaN",
    "[" * 2000,
    "\n",
    "fine",
)
"""Pieces that a prompt or a reply may be put together from."""


AGAIN = 3
"""Further runs for operations on which the generator gave up."""
_GIVEN_UP = re.compile(r"^_+ ([A-Z]+ /\S*) _+\nSchema Error\n", re.MULTILINE)
_ERRORS = re.compile(r"^  🚫 (.+): (\d+)$", re.MULTILINE)


def given_up(report: str) -> list[str]:
    """The operations on which Schemathesis gave up, if nothing else went wrong: it may draw a
    schema that it can draw no value from (4.32: a `not` that it does not spell out), and then ends
    that operation."""
    operations: list[str] = _GIVEN_UP.findall(report)
    is_all = _ERRORS.findall(report) == [("Schema Error", str(len(operations)))]
    return operations if is_all and "= FAILURES =" not in report else []


async def fuzz(cases_per_operation: int, seed: int | None = None) -> tuple[int, str]:
    """(exit status, report) of both."""
    draw = random.Random(seed)
    status, report = await _fuzz_operations(make_tokenizer("qwen3"), cases_per_operation, seed)
    for family in ("quickstart", "qwen3", "llama3"):
        n = 25 * cases_per_operation
        failures = await _fuzz_white_box(make_tokenizer(family), n, draw)
        report += f"\nwhite-box prompts of {family}: {n} generated, "
        report += "\n".join([f"{len(failures)} failed", *failures])
        status = status or bool(failures)
    return status, report


async def _fuzz_operations(
    tokenizer: ChatTokenizer, cases_per_operation: int, seed: int | None
) -> tuple[int, str]:
    said = Sampled([*tokenizer.encode("fine").tolist(), eos_id(tokenizer)])
    engine = ScriptedEngine(default=lambda _: said)
    with tempfile.TemporaryDirectory() as folder:
        async with engine.running() as engine_url:
            config = GatewayConfig(port=0)
            async with (
                local_pool() as pool,
                serving(create_app(config, Wiring((engine_url,)), pool, tokenizer)) as url,
            ):
                status, report = await _schemathesis(url, folder, cases_per_operation, seed)
                reports = [report]
                for _ in range(AGAIN):
                    if not (operations := given_up(reports[-1])):
                        break
                    seed = None if seed is None else seed + 1
                    status, report = await _schemathesis(
                        url, folder, cases_per_operation, seed, operations
                    )
                    reports.append(report)
    return status, "\n".join(reports)


async def _schemathesis(
    url: str,
    folder: str,
    cases_per_operation: int,
    seed: int | None,
    operations: Sequence[str] = (),
) -> tuple[int, str]:
    """Exit status and report of one run.

    Args:
        operations: none: all.
    """
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{url}/openapi.json",
        "--checks",
        "not_a_server_error",
        "--phases",
        "fuzzing",
        "--no-color",
        "--max-examples",
        str(cases_per_operation),
        "--warnings",
        "off",
        # A busy machine is no failure.
        "--wait-for-schema",
        "60",
        "--request-timeout",
        "60",
        *(() if seed is None else ("--seed", str(seed))),
        *(argument for name in operations for argument in ("--include-name", name)),
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def _fuzz_white_box(tokenizer: ChatTokenizer, n: int, draw: random.Random) -> list[str]:
    """Prompts and replies whose ids decode to markup; those that a 500 answered."""

    def ids(least: int) -> list[int]:
        if draw.random() < 0.2:
            return draw.choices(range(tokenizer.vocabulary), k=draw.randint(max(least, 1), 12))
        text = "".join(draw.choices(MARKUP, k=draw.randint(least, 8)))
        return tokenizer.encode(text).tolist()

    end: int = eos_id(tokenizer)
    engine = ScriptedEngine(default=lambda _: Sampled([*ids(0), end]), context_length=100_000)
    failures = []
    async with engine.running() as engine_url:
        config = GatewayConfig(port=0)
        async with (
            local_pool() as pool,
            serving(create_app(config, Wiring((engine_url,)), pool, tokenizer)) as url,
            aiohttp.ClientSession() as session,
        ):
            for _ in range(n):
                body = {"prompt_ids": ids(1), "max_tokens": draw.choice([1, 4, 50_000])}
                async with session.post(f"{url}/generate", json=body) as response:
                    if response.status == 500:
                        failures.append(f"{body!s:.500}: {(await response.text())!s:.200}")
    return failures


if __name__ == "__main__":
    status, report = asyncio.run(fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
    print(report)
    sys.exit(status)

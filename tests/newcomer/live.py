"""This module plays the newcomer with live traffic: serve, call, attach a trainer, look inside, and
the mistakes that only a running system can answer.

    stepwell serve ──► service.py of README calls it ──► stepwell train --attach ──► connect
                                └──────────── goes on until the end ────────────┘
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.newcomer.mistakes import LOADED, RUNNING, Mistake, make
from tests.newcomer.user import ROOT, Step, User, WentWrongError, documented, emptied, where

TRAINED_STEPS = 4
PACKAGES = ("openai", "ai", "@ai-sdk/openai-compatible", "zod", "typescript", "@types/node")
TYPED = "(low: number, high: number) {"
STRICT = ("--strict", "--noEmit", "--skipLibCheck")
NODE = ("--module", "nodenext", "--target", "es2022", "--types", "node")
CALLED_S = 30.0
"""The first Steps of the service are in the pool within this."""
CONNECT = """\
import asyncio, sys
import stepwell

async def main():
    async with stepwell.connect("runs/live") as pool:
        statistics = await pool.get_statistics("train")
        await stepwell.export_channel(pool, "rollouts.jsonl", overwrite=True)
        print(statistics["steps"]["accepted"])

asyncio.run(main())
"""
COLLECT = """\
import asyncio
import stepwell
from stepwell.backends.base import build_backend

async def main():
    backend = build_backend("jsonl", "batches")
    async with stepwell.connect("runs/live") as pool:
        lease = await pool.lease_batch(timeout_s=60)
        backend.convert(lease.steps)
        await pool.ack(lease.lease_id)

asyncio.run(main())
"""
CLOSED = """\
import asyncio, sys
from openai import APIStatusError, AsyncOpenAI

async def main():
    client = AsyncOpenAI(max_retries=0)
    ask = client.chat.completions
    messages = [{"role": "user", "content": "1 + 1 ="}]
    began = await client.post("/../init_trajectory", body={}, cast_to=object)
    ours = AsyncOpenAI(base_url=began["base_url"] + "/v1", max_retries=0)
    await ours.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    await ours.post("/complete_trajectory", body={"reward": 1.0}, cast_to=object)
    await ours.chat.completions.create(model="policy", messages=messages, max_tokens=4)

try:
    asyncio.run(main())
except APIStatusError as e:
    sys.exit(f"{e.status_code}: {e.body['message']}")
"""
NO_SUCH = """\
import asyncio, sys
from openai import APIStatusError, AsyncOpenAI

async def main():
    body = {"trajectory_uid": "t-17", "reward": 1.0}
    await AsyncOpenAI(max_retries=0).post("/rewards", body=body, cast_to=object)

try:
    asyncio.run(main())
except APIStatusError as e:
    sys.exit(f"{e.status_code}: {e.body['message']}")
"""
CONNECT_DEAD = """\
import asyncio, sys
import stepwell

async def main():
    async with stepwell.connect("runs/live"):
        pass

try:
    asyncio.run(main())
except stepwell.RunUnavailableError as e:
    sys.exit(str(e))
"""
ENDED = (
    Mistake(
        "to attach to a run that has ended",
        ("stepwell", "train", "--attach", "runs/live"),
        ("runs/live", "not alive"),
    ),
    Mistake(
        "to connect to a run that has ended",
        ("python", "-c", CONNECT_DEAD),
        ("runs/live", "not alive"),
        LOADED,
    ),
)


def live_traffic(user: User) -> None:
    folder = emptied(user.folder / "live")
    (folder / "service.py").write_text(documented("service.py"))
    try:
        _serve(user, folder)
    except WentWrongError as e:
        user.add(Step("live traffic", 0.0, str(e)))
        return
    for mistake in ENDED:
        user.add(make(user, mistake, folder))


def _serve(user: User, folder: Path) -> None:
    serve = ("stepwell", "serve", "--config", "live", "gateway.port=0")
    log = folder / "serve.log"
    began = time.monotonic()
    with user.background(*serve, cwd=folder, log=log) as serving:
        url = where(folder / "runs/live", serving, log)["gateway"]["urls"][0]
        user.add(Step("stepwell serve --config live", time.monotonic() - began))
        openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "any"}
        calls = folder / "service.log"
        with user.background(
            "python", "service.py", cwd=folder, log=calls, environment=openai
        ) as service:
            with user.step("service.py of README calls it"):
                _called(user, folder, service, calls)
            with user.step(f"stepwell train --attach runs/live ({TRAINED_STEPS} steps)"):
                attach = ("stepwell", "train", "--attach", "runs/live")
                user.run(*attach, f"trainer.total_steps={TRAINED_STEPS}", cwd=folder, within_s=600)
                if service.poll() is not None:
                    raise WentWrongError(f"the service ended: {calls.read_text()[-300:].strip()}")
                _check_version(user, folder, openai)
            with user.step("stepwell.connect: statistics, export"):
                user.run("python", "-c", CONNECT, cwd=folder)
            _javascript(user, folder, openai)
            with user.step("the plug-in takes a batch of live traffic"):
                user.run("pip", "install", "--quiet", "--no-deps", ROOT / "examples" / "plugin")
                user.run("python", "-c", COLLECT, cwd=folder)
                if not list((folder / "batches").iterdir()):
                    raise WentWrongError("batches/ is empty")
        _running_mistakes(user, folder, url, openai)
    with user.step("Ctrl-C ends it"):
        if serving.returncode not in (0, 130):
            raise WentWrongError(f"exit code {serving.returncode}: {log.read_text()[-300:]}")


def _javascript(user: User, folder: Path, openai: dict[str, str]) -> None:
    """The service and the agent of docs/agents.md, with the packages from npm."""
    here = emptied(folder / "javascript")
    for file in ("service.mjs", "agent.mjs"):
        (here / file).write_text(documented(file, "docs/agents.md"))
    with user.step(f"npm install {' '.join(PACKAGES)}"):
        user.run("npm", "install", "--no-audit", "--no-fund", *PACKAGES, cwd=here)
    with user.step("both are TypeScript, to its strict compiler, as the page says"):
        for name in ("service", "agent"):
            text = (here / f"{name}.mjs").read_text()
            (here / f"{name}.mts").write_text(text.replace("(low, high) {", TYPED))
        user.run("npx", "tsc", *STRICT, *NODE, "service.mts", "agent.mts", cwd=here)
    with user.step("service.mjs and agent.mjs of docs/agents.md call it"):
        calls = here / "service.log"
        before = _accepted(user, folder)
        with user.background("node", "service.mjs", cwd=here, log=calls, environment=openai) as it:
            answer = user.run("node", "agent.mjs", cwd=here, environment=openai).out
            if "outcome: 'complete'" not in answer:
                raise WentWrongError(f"the agent was answered {answer[-300:].strip()}")
            until = time.monotonic() + CALLED_S
            while _accepted(user, folder) < before + 8:
                if it.poll() is not None or time.monotonic() > until:
                    raise WentWrongError(f"the service: {calls.read_text()[-300:].strip()}")


def _accepted(user: User, folder: Path) -> int:
    """Steps in the pool."""
    return int(user.run("python", "-c", CONNECT, cwd=folder).out.split()[-1])


def _called(user: User, folder: Path, service: subprocess.Popen[str], calls: Path) -> None:
    until = time.monotonic() + CALLED_S
    while time.monotonic() < until:
        if service.poll() is not None:
            raise WentWrongError(f"it ended: {calls.read_text()[-300:].strip()}")
        if _accepted(user, folder) > 0:
            return
    raise WentWrongError(f"no Step after {CALLED_S:g} s")


def _check_version(user: User, folder: Path, openai: dict[str, str]) -> None:
    """New weights answer."""
    version = _headers(user, folder, openai)["x-stepwell-version"]
    if int(version) < 1:
        raise WentWrongError(f"weights of version {version} answer")


def _headers(user: User, folder: Path, openai: dict[str, str]) -> dict[str, Any]:
    code = (
        "import json, openai; client = openai.OpenAI(); "
        "reply = client.chat.completions.with_raw_response.create(model='policy', "
        "messages=[{'role': 'user', 'content': 'Hello'}], max_tokens=4); "
        "print(json.dumps(dict(reply.headers)))"
    )
    headers: dict[str, Any] = json.loads(
        user.run("python", "-c", code, cwd=folder, environment=openai).out
    )
    return headers


def _running_mistakes(user: User, folder: Path, url: str, openai: dict[str, str]) -> None:
    port = url.rpartition(":")[2]
    serve = ("stepwell", "serve", "--config", "live")
    for mistake in (
        Mistake(
            "the same run twice", (*serve, "gateway.port=0"), ("another run is alive", "runs/live")
        ),
        Mistake(
            "a port that is taken",
            (*serve, "run.name=other", f"gateway.port={port}"),
            ("gateway.port", port),
        ),
        Mistake(
            "a call of a trajectory that has ended",
            ("python", "-c", CLOSED),
            ("410", "takes no more calls"),
            RUNNING,
            openai,
        ),
        Mistake(
            "a reward for a trajectory that nobody knows",
            ("python", "-c", NO_SUCH),
            ("404", "t-17"),
            RUNNING,
            openai,
        ),
    ):
        user.add(make(user, mistake, folder))

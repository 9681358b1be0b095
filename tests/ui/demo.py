"""A gateway with something to look at: agents that talked through it, a trainer's files, and what
an attacker would write.

    python -m tests.ui.demo [PORT]        serves it until it is stopped
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
from PIL import Image

from stepwell.backends.pictures import digest_of
from stepwell.datapool.config import ArchiveConfig, ChannelConfig, PoolConfig, SelectionConfig
from stepwell.datapool.files.archive.archiver import Archive, archive_waiting
from stepwell.datapool.files.archive.launch import Settings
from stepwell.datapool.files.trained import TrainedTrajectory, write_trained
from stepwell.datapool.pictures import Picture
from stepwell.datapool.remote.client import DataPoolClient
from stepwell.datapool.sealed import sealed, write_sealed
from stepwell.datapool.types import Group, Step
from stepwell.gateway.app import create_app
from stepwell.gateway.config import GatewayConfig, Wiring
from stepwell.gateway.server import http_protocol
from tests.gateway.conftest import Sampled, ScriptedEngine, eos_id, make_tokenizer, serving

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
TRAINED_STEPS = 40


@dataclass
class Demo:
    url: str
    pool: DataPoolClient
    run_dir: Path
    app: Any


@asynccontextmanager
async def demo(
    run_dir: Path,
    *,
    port: int = 0,
    pool: DataPoolClient | None = None,
    archived: bool = True,
    **options: Any,
) -> AsyncIterator[Demo]:
    """The gateway with its pool; `options` are the gateway's."""
    tokenizer = make_tokenizer("quickstart")
    eos = eos_id(tokenizer)
    engine = ScriptedEngine(default=lambda _: Sampled([*tokenizer.encode("12").tolist(), eos]))
    zero_variance = ChannelConfig(selection=SelectionConfig(filters=("zero_variance",)))
    folder = run_dir / "archive" if archived else None
    archive = ArchiveConfig(enabled=archived, dir=folder)
    pool_config = PoolConfig(channels={"train": zero_variance}, archive=archive)
    async with (
        engine.running() as engine_url,
        DataPoolClient.local(pool_config, run_dir / "pool") as own,
    ):
        config = GatewayConfig(port=port, **options)
        wiring = Wiring((engine_url,), run_dir=run_dir, archive_dir=folder)
        app = create_app(config, wiring, pool or own, tokenizer)
        async with serving(app, http=http_protocol(config), port=port) as url:
            yield Demo(url, pool or own, run_dir, (app, engine, tokenizer))


async def show_picture(demo: Demo, uid: str) -> str:
    """A trajectory whose user shows a picture, in a group of its own; the picture's digest."""
    pixels = Image.new("RGB", (56, 28), (200, 30, 30))
    png = io.BytesIO()
    pixels.save(png, "PNG")
    digest = digest_of(pixels)
    picture = Picture(digest, 56, 28, 1, 2)
    part = {"type": "image", "digest": digest, "width": 56, "height": 28, "n_tokens": 2}
    asked = [part, {"type": "text", "text": "Which colour is it?"}]
    step = Step(
        prompt_ids=[7, 8, 8, 9],
        response_ids=[4, 5],
        rollout_log_probs=[-0.5, -0.25],
        trajectory_uid=uid,
        prompt_uid=uid,
        metadata={
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "Red."},
            ]
        },
        finish_reason="stop",
        pictures=(picture,),
    )
    await demo.pool.open_group(uid, 1)
    await demo.pool.submit_step(step, pictures={digest: png.getvalue()})
    await demo.pool.complete_trajectory(uid, 1.0)
    return digest


async def archive_all(demo: Demo) -> None:
    """Archive what left the pool, as the process beside a pool does."""
    (port,) = demo.pool.shards
    identity = port.service.incarnation.pool
    config = PoolConfig(archive=ArchiveConfig(dir=demo.run_dir / "archive"))
    settings = Settings.of(config, demo.run_dir / "pool", identity, 0)
    assert settings is not None
    archive = Archive(settings)
    while await archive_waiting(archive, port):
        pass
    archive.close()


async def fill(demo: Demo, groups: int = 6, rollouts: int = 4, key: str | None = None) -> None:
    """Agents answer questions with a calculator: some right, one hostile, one still running."""
    _, engine, tokenizer = demo.app
    eos = eos_id(tokenizer)
    draw = random.Random(7)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    pool = demo.pool
    async with httpx.AsyncClient(base_url=demo.url, timeout=30, headers=headers) as http:
        for g in range(groups):
            a, b, c = (draw.randint(11, 999) for _ in range(3))
            prompt = f"chain_sum/{1000 + g}"
            about = {"source": "chain_sum", "answer": a + b - c}
            await pool.open_group(prompt, rollouts, metadata=about)
            for r in range(rollouts):
                uid = f"{prompt}:{r}" if (g, r) != (1, 1) else f"{prompt}:{HOSTILE}"
                base = f"/{quote(uid, safe='')}/{quote(prompt, safe='')}/v1"
                right = g == 0 or (r + g) % 3 != 0
                said = f"{a + b - c if right else a + b + c}"
                arguments = {"expression": f"{a} + {b} - {c}"}
                call = json.dumps({"name": "calculator", "arguments": arguments})
                call = f"<tool_call>\n{call}\n</tool_call>"
                versions = [("3", 0, 4), ("4", 4, 10_000)] if r == 2 else None
                messages: list[dict[str, Any]] = [
                    {
                        "role": "system",
                        "content": "You can use a calculator. Answer with one number.",
                    },
                    {
                        "role": "user",
                        "content": f"State the final answer to: {a} + {b} - {c} ="
                        + (HOSTILE if (g, r) == (1, 1) else ""),
                    },
                ]
                for turn, text in enumerate([call, f"The answer is {said}."]):
                    ids = [*tokenizer.encode(text).tolist(), eos]
                    spans = versions and [(v, s, min(e, len(ids))) for v, s, e in versions]
                    engine.script.append(Sampled(ids, version=str(3 + g // 3), versions=spans))
                    body = {"model": "m", "messages": messages, "tools": [CALCULATOR]}
                    answer = (await http.post(f"{base}/chat/completions", json=body)).json()
                    message = answer["choices"][0]["message"]
                    messages.append(message)
                    if turn == 0:
                        name = HOSTILE if (g, r) == (1, 1) else f"{a + b - c}"
                        for each in message.get("tool_calls") or []:
                            messages.append(
                                {"role": "tool", "tool_call_id": each["id"], "content": name}
                            )
                    if (g, r) == (groups - 1, 1) and turn == 0:  # a side question: a branch
                        side = [
                            messages[0],
                            {"role": "user", "content": "Is it even? Say yes or no."},
                        ]
                        engine.script.append(Sampled([*tokenizer.encode("no").tolist(), eos]))
                        await http.post(
                            f"{base}/chat/completions", json={"model": "m", "messages": side}
                        )
                if (g, r) == (groups - 1, rollouts - 1):
                    continue  # it is still running
                await http.post(f"{base}/complete_trajectory", json={"reward": float(right)})
        await pool.mark(f"chain_sum/{1002}", tags=["looked at"], note="a good one")
        await pool.mark(trajectory_uid=f"chain_sum/{1001}:2", tags=["suspicious"], quality=0.2)


async def train(demo: Demo, steps: int = TRAINED_STEPS) -> None:
    """Write what a trainer would leave behind: metrics of `steps` optimizer steps, and what two of
    them were trained on."""
    page = await demo.pool.read_trajectories(limit=100, state=["complete"])
    whole = [each.trajectory for each in page.unpack()]
    write_run(demo.run_dir, steps)
    for step in (steps - 1, steps):
        prompts = sorted({t.prompt_uid for t in whole})
        prompt = prompts[step % len(prompts)]
        group = Group(prompt, tuple(t for t in whole if t.prompt_uid == prompt))
        write_trained(
            demo.run_dir, step, {"policy_version": step // 2, "groups": 8}, _trained(group), 1 << 28
        )


def _trained(group: Group) -> list[TrainedTrajectory]:
    rewards = np.array([t.reward or 0.0 for t in group.trajectories])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    rng = np.random.default_rng(0)
    found = []
    for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
        columns = []
        for step in trajectory.steps:
            n = len(step.response_ids)
            prox = step.rollout_log_probs + rng.normal(0, 0.15, n)
            weights = np.minimum(1, np.exp(prox - step.rollout_log_probs))
            columns.append(
                {
                    "advantages": np.full(n, advantage),
                    "weights": weights,
                    "prox_log_probs": prox,
                    "mask": np.ones(n),
                }
            )
        found.append(TrainedTrajectory(trajectory, tuple(columns)))
    return found


def write_run(folder: Path, steps: int) -> None:
    """`metrics.jsonl` and `run.json` of a run that learns."""
    draw = random.Random(3)
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            learnt = 1 - math.exp(-step / 14)
            record: dict[str, float] = {
                "step": step,
                "policy_version": step // 2,
                "reward/mean": 0.25 + 0.65 * learnt + draw.gauss(0, 0.04),
                "groups": 8,
                "trajectories": 64,
                "tokens": 1900 + draw.randint(-200, 200),
                "tokens_per_s": 5200 + draw.gauss(0, 500),
                "loss": -0.1 + draw.gauss(0, 0.05),
                "grad_norm": 0.9 * math.exp(-step / 20) + abs(draw.gauss(0.2, 0.05)),
                "policy/entropy": 0.8 * math.exp(-step / 12) + 0.04,
                "staleness/mean": 0.4 + draw.random() * 0.3,
                "staleness/max": 1.0 + (step % 3) * 0.5,
                "off_policy/kl_k1": 2e-4 * (1 + draw.random()),
                "off_policy/weight_mean": 0.998,
                "off_policy/lag_0-1/tokens": 1500.0,
                "off_policy/lag_1-2/tokens": 380.0,
                "off_policy/lag_2-4/tokens": 40.0 + step,
                "groups/no_signal": 0.3 * learnt,
                "publish/seconds": 0.18 + draw.random() * 0.1,
                "publish/version": step // 2,
                "time/wait_s": 0.4,
                "time/train_s": 0.7,
                "time/prepare_s": 0.36,
                "time/publish_s": 0.02,
                "time/step_s": 1.55,
                "wait/trainer_starved": 0.26 + draw.gauss(0, 0.05),
                "wait/generation_saturated": 0.05,
            }
            if step % 2:
                record["log_prob_gap"] = 0.002 + draw.random() * 0.002
            if step % 10 == 0:
                record |= {"val/score": 0.2 + 0.7 * learnt, "val/step": step}
            file.write(sealed(json.dumps(record).encode()))
    about = {
        "name": "arithmetic",
        "started_at": "2026-11-23T10:00:00Z",
        "git": "01a2439f0c",
        "versions": {"stepwell": "0.1.0", "python": "3.11", "torch": "2.9", "ray": "2.51"},
        "config": {"model": {"path": "quickstart/model"}, "trainer": {"backend": "torch"}},
    }
    write_sealed(folder / "run.json", about)


def in_order(values: Sequence[Any], *, descending: bool) -> list[Any]:
    """Values as a list that is sorted by them has them: those that are none come last."""
    known = sorted((v for v in values if v is not None), reverse=descending)
    return known + [None] * (len(values) - len(known))


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = int(sys.argv[1]) if len(sys.argv) > 1 else 8110
        async with demo(Path(folder), port=port) as served:
            await fill(served)
            await train(served)
            print(f"{served.url}/ui", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

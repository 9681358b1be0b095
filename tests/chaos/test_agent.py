"""The agent's notes are what the pool holds and the trainer was given, pictures included; a picture
that is damaged or another one is found."""

from __future__ import annotations

import asyncio
import random
import shutil
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepwell.backends.pictures import PictureProcessor
from stepwell.backends.torch.backend import TorchBackend
from stepwell.config.load import load_config
from stepwell.datapool.pictures import Picture
from stepwell.datapool.store.picture_folder import PICTURES, SECRET
from stepwell.datapool.types import Group, Step, Trajectory
from stepwell.layout import CHECKPOINTS
from stepwell.trainer.ledger import LEDGER, Ledger
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import record_batch
from tests.chaos import agent as agent_module
from tests.chaos.agent import FOLDER, OnPurposeError, agent, data_url, digest_of, picture
from tests.chaos.lives import Run
from tests.chaos.scenarios import OPTIONS
from tests.chaos.verify import (
    Rollout,
    Stored,
    Trained,
    Verdict,
    check_trained,
    read_agents,
    read_pool,
)
from tests.gateway.conftest import World, worlds
from tests.vision_model import make_vision_model

__all__ = ["worlds"]
ROLLOUTS = 8


@pytest.mark.usefixtures("worlds")
async def test_the_verifier_finds_every_picture_that_an_agent_has_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    make: Callable[..., Any] = request.getfixturevalue("worlds")
    monkeypatch.setenv(FOLDER, str(tmp_path / "agents"))
    monkeypatch.setattr(agent_module, "THINKS_S", 0.0)
    agent_module._log.cache_clear()
    folder = str(make_vision_model(tmp_path / "model"))
    world: World = await make(family=folder, tokenizer_path=folder, pool_folder=tmp_path / "pool")
    ended = await asyncio.gather(
        *(
            agent({"question": "2 + 2 ="}, world.base_url(f"t{i}", f"p{i // 4}"), "any")
            for i in range(ROLLOUTS)
        ),
        return_exceptions=True,
    )
    assert all(isinstance(end, float | OnPurposeError) for end in ended)
    rollouts = read_agents(tmp_path / "agents")
    shown = {
        digest for r in rollouts.values() for e in r.answered.values() for digest in e["pictures"]
    }
    assert len(shown) > 3

    def copied(name: str) -> Path:
        shutil.copytree(tmp_path / "pool", tmp_path / name)
        return tmp_path / name

    found = read_pool(copied("sound"))
    assert found.bad_pictures == []
    assert found.stored == {
        uid: {
            call: Stored(len(entry["log_probs"]), entry["pictures"])
            for call, entry in rollout.answered.items()
        }
        for uid, rollout in rollouts.items()
    }
    damaged = copied("damaged")
    for file in (p for p in (damaged / PICTURES).iterdir() if p.name != SECRET):
        content = bytearray(file.read_bytes())
        content[9] ^= 1
        file.write_bytes(content)
    assert {line.split(":")[0] for line in read_pool(damaged).bad_pictures} == {
        uid for uid, r in rollouts.items() if any(e["pictures"] for e in r.answered.values())
    }


def test_a_batch_that_was_trained_with_other_pictures_is_found(tmp_path: Path) -> None:
    options = (f"model.path={make_vision_model(tmp_path / 'model')}", f"run.dir={tmp_path / 'run'}")
    config = load_config("quickstart", [*OPTIONS, *options])
    dice = random.Random(3)
    images = [picture(dice) for _ in range(20)]
    same_size = [image for image in images if image.size == images[0].size][:2]
    processor = PictureProcessor.of(config.model.path)
    assert processor is not None
    made = [processor.canonical(b64decode(data_url(i).partition(",")[2])) for i in same_size]
    pngs = {one.digest: one.png for one in made}
    assert [*pngs] == [digest_of(image) for image in same_size]
    backend = TorchBackend(config.backend, config.model.path)
    steps = []
    for k, one in enumerate(made):
        placeholders = [processor.placeholder_id] * one.n_tokens
        step = Step(
            prompt_ids=[40 + k, processor.start_id, *placeholders, processor.end_id],
            response_ids=[50, 51, 52],
            rollout_log_probs=[0.0, 0.0, 0.0],
            trajectory_uid=f"t{k}",
            prompt_uid="p",
            reward=0.5,
            is_last=True,
            metadata={"call_id": f"c{k}"},
            pictures=(Picture(one.digest, one.width, one.height, 2, one.n_tokens),),
        )
        log_probs = backend.compute_log_probs(backend.convert_with_pictures([step], pngs))
        steps.append(replace(step, rollout_log_probs=log_probs.numpy()))
    backend.close()
    group = Group("p", tuple(Trajectory(s.trajectory_uid, "p", (s,)) for s in steps))
    ledger = Ledger(config.run.dir / CHECKPOINTS / LEDGER)
    ledger.issued("p", "i")
    ledger.trained(1, ["p"])
    ledger.close()
    rollouts = {
        step.trajectory_uid: Rollout(
            "p",
            {
                step.metadata["call_id"]: {
                    "log_probs": step.rollout_log_probs,
                    "pictures": [one.digest],
                    "began": 0.0,
                }
            },
            0.5,
            ["returned"],
        )
        for step, one in zip(steps, made, strict=True)
    }
    run = Run(tmp_path / "chaos", ())

    def verdict(name: str, pictures: dict[str, bytes]) -> Counter[str]:
        record_batch(str(tmp_path / name), [group], Progress(), pictures)
        found, trained = Verdict(), Trained(config, tmp_path / name)
        check_trained(config, run, trained, rollouts, found)
        return found.figures

    sound = verdict("sound", pngs)
    assert (sound["steps_changed"], sound["versions_wrong"], sound["steps_recomputed"]) == (0, 0, 2)
    one, other = pngs.items()
    wrong = verdict("swapped", {one[0]: other[1], other[0]: one[1]})
    assert wrong["steps_changed"] == 2
    assert wrong["versions_wrong"] == 2

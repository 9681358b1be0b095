"""`python -m tests.chaos artefact-damage`: a flipped bit in any file that a run writes and reads
again is an error that names the file, or harmless; none is silent.


Each artefact is written by the code that writes it in a run, and read by the code that reads it.
A trial flips one bit of one file and reads. Silent: the reader gives something else than before and
raises nothing. The journal is `journal_damage.py`'s.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from benchmarks.checks import BenchResult
from stepwell.backends.base import NO_PICTURES
from stepwell.backends.weights import WeightStore, check_version, read_current
from stepwell.config.load import load_config
from stepwell.datapool.errors import DamagedFileError
from stepwell.datapool.files.export import read, write
from stepwell.datapool.files.trained import (
    TrainedTrajectory,
    read_about,
    read_trained,
    write_trained,
)
from stepwell.datapool.inspect.pages import ExportedTrajectory
from stepwell.datapool.ops import OpenTrajectory, PutPictures
from stepwell.datapool.pictures import Picture
from stepwell.datapool.remote.start import _note_started, _was_started
from stepwell.datapool.store.picture_folder import PICTURES, PictureFolder
from stepwell.datapool.types import Group, Step, Trajectory
from stepwell.gateway.ui.run_folder import RunFolder
from stepwell.run.folder import begin, read_run
from stepwell.track.summary import read_summary, write_summary
from stepwell.track.trackers import _run_id
from stepwell.trainer.checkpoint import CheckpointStore
from stepwell.trainer.ledger import Ledger, audit, read_ledger
from stepwell.trainer.metrics import MetricsWriter, read_metrics
from stepwell.trainer.progress import Progress
from stepwell.trainer.recording import load_recording, record_batch
from stepwell.trainer.samples import read_samples, write_samples
from stepwell.trainer.slime.data_source import RolloutDataSource
from stepwell.trainer.slime.pool import FILE, SlimePool
from tests.chaos.agent import digest_of, picture
from tests.chaos.trials import result_of
from tests.datapool.test_archive import Archived
from tests.trainer.test_slime_rollout import slime_args

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Artefact:
    files: Sequence[Path]
    """Damaged one at a time."""
    read: Callable[[], Any]
    """Returns what a run would take from the files."""


@dataclass(frozen=True, slots=True)
class Trial:
    artefact: str
    file: str
    outcome: str
    """raised, harmless or silent; unnamed: the error does not name the file."""
    said: str = ""


def write_artefacts(folder: Path, seed: int) -> dict[str, Artefact]:
    """One of each kind, as a run writes it."""
    chance = random.Random(seed)
    return {
        **_of_weights(folder / "weights"),
        **_of_checkpoints(folder / "checkpoints", seed),
        **_of_exports(folder / "exports", chance),
        **_of_a_pool(folder / "pool", chance),
        **_of_slime(folder / "slime"),
        **_of_the_run(folder / "run", chance),
    }


def _of_weights(folder: Path) -> dict[str, Artefact]:
    store = WeightStore(folder, keep=8)

    def save(version: Path) -> None:
        version.mkdir()
        (version / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 384}))
        (version / "model.safetensors").write_bytes(bytes(range(256)) * 4)

    for version in (18, 38):
        store.write(version, save)
        store.commit(version)
    store.write_again(39, 18)
    store.refuse_roll_backs("the backend has no load_weights()")
    committed = folder / "v38"

    def served() -> Any:
        found = read_current(folder)
        if found is not None:
            check_version(folder, found.path)
        return found, [file.read_bytes() for file in sorted(committed.iterdir())]

    def rolled_back() -> Any:
        check_version(folder, folder / "v39")
        return store.weights_of(39)

    return {
        "current version": Artefact([folder / "current.json"], lambda: read_current(folder)),
        "weights": Artefact(sorted(committed.iterdir()), served),
        "roll-back": Artefact([folder / "v39" / "origin.json"], lambda: store.weights_of(39)),
        "roll-backs refused": Artefact([folder / "refused.json"], store.why_refused),
        "rolled-back weights": Artefact(sorted((folder / "v39").iterdir()), rolled_back),
    }


def _of_checkpoints(folder: Path, seed: int) -> dict[str, Artefact]:
    store = CheckpointStore(folder, keep=2, keep_best=1)
    generator = torch.Generator().manual_seed(seed)
    state = {"backend": {"w": torch.randn(16, 16, generator=generator)}, "pending": ["p7"]}
    path = store.save(7, state, {"model_path": "model", "backend": "torch"})
    store.score(7, 0.5)

    def loaded() -> Any:
        found = store.load(path)
        return store.about(path), store.scores(), found["backend"]["w"].numpy().tobytes()

    ledger = Ledger(folder / "ledger.jsonl")
    for k in range(40):
        ledger.issued(f"p{k}-ab12", f"p{k}")
    for k in range(10):
        ledger.trained(k + 1, [f"p{3 * k}-ab12", f"p{3 * k + 1}-ab12"])
        ledger.dropped(f"p{3 * k + 2}-ab12", "deadline", returned=k % 2 == 0)
    ledger.close()

    def told() -> Any:
        return read_ledger(folder / "ledger.jsonl"), audit(folder / "ledger.jsonl")

    return {
        "checkpoint": Artefact([*sorted(path.iterdir()), folder / "scores.json"], loaded),
        "ledger": Artefact([folder / "ledger.jsonl"], told),
    }


def _trajectories(
    chance: random.Random, pictures: Mapping[str, bytes] = NO_PICTURES
) -> list[Trajectory]:
    """Four trajectories of a step each, two a group.

    Args:
        pictures: the first of each group shows all of them, the second the first one.
    """

    def random_step(uid: str) -> Step:
        n = chance.randrange(8, 40)
        shown = list(pictures)[: None if uid.endswith("0") else 1]
        return Step(
            prompt_ids=[chance.randrange(1000) for _ in range(20)],
            response_ids=[chance.randrange(1000) for _ in range(n)],
            rollout_log_probs=[-chance.random() for _ in range(n)],
            reward=chance.random(),
            trajectory_uid=uid,
            prompt_uid=uid[0],
            step_index=0,
            policy_version=3,
            is_last=True,
            metadata={"finish": "stop"},
            pictures=[Picture(digest, 56, 56, 2 + 6 * i, 4) for i, digest in enumerate(shown)],
        )

    return [Trajectory(uid, uid[0], (random_step(uid),)) for uid in ("a0", "a1", "b0", "b1")]


def _pictures(chance: random.Random) -> dict[str, bytes]:
    """PNG of two pictures, by digest."""
    found = {}
    for _ in range(2):
        image, png = picture(chance), io.BytesIO()
        image.save(png, "PNG")
        found[digest_of(image)] = png.getvalue()
    return found


def _of_exports(folder: Path, chance: random.Random) -> dict[str, Artefact]:
    folder.mkdir()
    pictures = _pictures(chance)
    exported = [
        ExportedTrajectory(trajectory=trajectory, pictures=pictures)
        for trajectory in _trajectories(chance, pictures)
    ]
    found = {}
    for suffix in ("jsonl", "parquet"):
        path = folder / f"x.{suffix}"
        write(path, exported)
        beside = sorted(path.with_name(f"{path.name}.pictures").iterdir())
        files = [path, path.with_name(f"{path.name}.sha256"), *beside]
        found[suffix] = Artefact(files, lambda path=path: list(read(path)))  # type: ignore[misc]
    return found


def _of_a_pool(folder: Path, chance: random.Random) -> dict[str, Artefact]:
    """Pictures beside a journal, and an archive of what left it."""
    folder.mkdir()
    archived, pictures = Archived(folder), _pictures(chance)
    for trajectory in _trajectories(chance, pictures):
        (step,) = trajectory.steps
        uid, prompt_uid = trajectory.trajectory_uid, f"p-{trajectory.trajectory_uid}"
        archived.pool("apply", OpenTrajectory(uid, prompt_uid, 0))
        archived.pool("apply", PutPictures(uid, pictures))
        archived.pool("submit_step", replace(step, prompt_uid=prompt_uid))
        if prompt_uid != "p-b1":  # which stays
            archived.pool("ack", archived.pool("lease_batch", 1).lease_id)
    archived.archive()
    archived.reader.delete("trajectory", "a1")
    archived.pool.journal.close()
    beside, archive = folder / "pool" / PICTURES, folder / "archive"

    def in_the_pool() -> Any:
        store = PictureFolder(beside, power=False)
        return {key: store.read(key) for key in sorted(store.keys())}

    def in_the_archive() -> Any:
        return [archived.reader.read(uid) for uid in ("a0", "a1", "b0")]

    (file,) = (archive / "trajectories").iterdir()
    files = [file, *sorted((archive / "pictures" / file.stem).iterdir()), archive / "deleted.jsonl"]
    return {
        "pictures": Artefact(sorted(beside.iterdir()), in_the_pool),
        "archive": Artefact(files, in_the_archive),
    }


def _of_slime(folder: Path) -> dict[str, Artefact]:
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"input": f"q{k}", "label": "a"}) + "\n" for k in range(5))
    )
    args = slime_args(prompt_data=str(prompts), label_key="label", save=folder, load=folder)
    source = RolloutDataSource(args)
    source.get_samples(3)
    source.update_metadata({"curriculum": 4})
    source.save(4)

    def resumed() -> Any:
        again = RolloutDataSource(args)
        again.load(4)
        return again.state_dict()

    pool = SlimePool(None, "train", 60.0, save=folder)  # type: ignore[arg-type]
    pool._rollout_of = {f"p{k}": k // 4 for k in range(16)}
    pool._write()
    reader = SlimePool(None, "train", 60.0, load=folder)  # type: ignore[arg-type]
    pool.close()
    reader.close()
    return {
        "slime's state": Artefact([folder / "rollout" / "global_dataset_state_dict_4.pt"], resumed),
        "slime's groups": Artefact([folder / FILE], reader._read),
    }


def _of_the_run(folder: Path, chance: random.Random) -> dict[str, Artefact]:
    folder.mkdir()
    begin(load_config("quickstart", [f"run.dir={folder}"]))
    view = RunFolder(folder)
    pictures = _pictures(chance)
    trajectories = _trajectories(chance, pictures)
    columns = [({"advantages": np.ones(len(t.steps[0].response_ids))},) for t in trajectories]
    trained = [TrainedTrajectory(t, c) for t, c in zip(trajectories, columns, strict=True)]
    write_trained(folder, 3, {"loss": 0.5}, trained, 1 << 20)
    with MetricsWriter(folder) as metrics:
        for k in range(1, 20):
            metrics.write({"step": k, "loss": chance.random(), "lr": 1e-6})
    write_summary(folder, {"optimizer_steps": 19, "eval_after": 0.9})
    samples = folder / "validation" / "step_2.jsonl"
    write_samples(samples, [{"answer": str(k), "score": k / 7} for k in range(9)])
    recording = folder / "replay"
    group = Group("a", tuple(trajectories[:2]))
    record_batch(str(recording), [group], Progress(updates=3), pictures)
    _run_id(folder / "wandb" / "stepwell_run_id")
    _note_started(folder / "pool", 3)

    def recorded() -> Any:
        found = load_recording(recording / "3.pt")
        steps = [t.steps for g in found.groups for t in g.trajectories]
        return steps, found.progress, found.pictures

    def shown() -> Any:
        folder_view = RunFolder(folder)
        return folder_view.steps(), folder_view.series(["loss"])

    def figures() -> Any:
        return read_metrics(folder / "metrics.jsonl")

    pool = folder / "pool"
    wandb = folder / "wandb" / "stepwell_run_id"
    return {
        "run.json": Artefact([folder / "run.json"], lambda: read_run(folder)),
        "run.json on the dashboard": Artefact([folder / "run.json"], view.run),
        "trained": Artefact(
            [folder / "trained" / f"{3:012d}.jsonl"],
            lambda: (read_about(folder, 3), read_trained(folder, 3)),
        ),
        "metrics": Artefact([folder / "metrics.jsonl"], figures),
        "metrics on the dashboard": Artefact([folder / "metrics.jsonl"], shown),
        "summary": Artefact([folder / "summary.json"], lambda: read_summary(folder)),
        "samples": Artefact([samples], lambda: read_samples(samples)),
        "recording": Artefact(
            [recording / "3.pt", *sorted((recording / "pictures").iterdir())], recorded
        ),
        "wandb's id": Artefact([wandb], lambda: _run_id(wandb)),
        "shards": Artefact([pool / "shards"], lambda: _was_started(pool, 3)),
    }


# -- trials ----------------------------------------------------------------------------------------


def run_trials(n: int, seed: int, folder: Path) -> list[Trial]:
    """`n` trials over all files in turn; the same for the same seed."""
    artefacts = write_artefacts(folder, seed)
    places = [
        (name, artefact, file) for name, artefact in artefacts.items() for file in artefact.files
    ]
    sound = {name: _plain(artefact.read()) for name, artefact in artefacts.items()}
    chance = random.Random(seed)
    return list(_trials(n, places, sound, chance))


def _trials(
    n: int,
    places: Sequence[tuple[str, Artefact, Path]],
    sound: Mapping[str, str],
    chance: random.Random,
) -> Iterator[Trial]:
    for k in range(n):
        name, artefact, file = places[k % len(places)]
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            same = _plain(artefact.read()) == sound[name]
            yield Trial(name, file.name, "harmless" if same else "silent")
        except DamagedFileError as e:
            yield Trial(name, file.name, "raised" if file.name in str(e) else "unnamed", str(e))
        finally:
            file.write_bytes(content)


def _plain(value: Any) -> str:
    """A text that differs wherever the values do."""
    if isinstance(value, Step):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        return _plain(list(value.items()))
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if is_dataclass(value):
        return _plain([getattr(value, field.name) for field in fields(value)])
    return repr(value)


def summary(trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    by_file: dict[str, Counter[str]] = {}
    for trial in trials:
        by_file.setdefault(f"{trial.artefact}: {trial.file}", Counter())[trial.outcome] += 1
    total = Counter(trial.outcome for trial in trials)
    wrong = [t for t in trials if t.outcome in ("silent", "unnamed")]
    return {
        "seed": seed,
        "trials": len(trials),
        "files": len(by_file),
        "outcomes": {k: total[k] for k in ("raised", "harmless", "unnamed", "silent")},
        "by_file": {name: dict(counts) for name, counts in by_file.items()},
        "failures": [[t.artefact, t.file, t.outcome, t.said] for t in wrong[:SHOWN]],
    }


async def run(
    *,
    trials: int = 1000,
    seed: Annotated[int | None, "default: a random one"] = None,
) -> BenchResult:
    def try_all(seed: int, folder: Path) -> Mapping[str, Any]:
        return summary(run_trials(trials, seed, folder), seed)

    # In a thread: what archives has a loop of its own.
    return await asyncio.to_thread(result_of, try_all, seed, "stepwell-artefacts-")

"""Training on pictures: log π is that of a plain forward and of the engine that sampled; every row
form gives one loss and one gradient; nothing of the vision tower moves."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from stepwell.backends.base import LossOutput, TokenBatch
from stepwell.backends.config import CriticConfig, LoraConfig, TorchBackendConfig, VerlConfig
from stepwell.backends.engines.embedded.model import ModelRunner
from stepwell.backends.engines.embedded.reply import StopStrings
from stepwell.backends.engines.embedded.request import Request, SamplingParams
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.engines.embedded.vision import StoredPicture, Vision
from stepwell.backends.errors import BatchError, UnsupportedByBackendError
from stepwell.backends.pictures import CanonicalPicture, PictureProcessor
from stepwell.backends.rows import RowForm
from stepwell.backends.torch.backend import TorchBackend
from stepwell.backends.torch.critic import Critic
from stepwell.backends.trl.backend import TrlBackend
from stepwell.backends.verl.backend import VerlBackend
from stepwell.backends.weights.digest import checkpoint_hashes
from stepwell.datapool.pictures import Picture
from stepwell.datapool.types import Step
from tests.backends.models import qwen3, save_model
from tests.backends.processes_of_ranks import run_ranks
from tests.vision_model import make_vision_model, png
from tests.vision_reference import VisionReference

SIZES = [(56, 56), (84, 84), (112, 56)]
CLOSE = 5e-6


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp(request.param), kind=request.param)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("qwen2"))


class Album:
    """Canonical pictures of a model, and steps with them."""

    def __init__(self, folder: Path) -> None:
        found = PictureProcessor.of(folder)
        assert found is not None
        self.processor = found
        self.pngs: dict[str, bytes] = {}

    def picture(self, seed: int, size: tuple[int, int] = (56, 56)) -> CanonicalPicture:
        made = self.processor.canonical(png(*size, seed=seed))
        self.pngs[made.digest] = made.png
        return made

    def prompt(
        self, *parts: int | CanonicalPicture, after: Step | None = None
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """Ids with the placeholders, and the pictures, behind the step `after`."""
        ids = [] if after is None else after.token_ids.tolist()
        pictures = [] if after is None else list(after.pictures)
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                continue
            ids.append(self.processor.start_id)
            at = len(ids)
            pictures.append(Picture(part.digest, part.width, part.height, at, part.n_tokens))
            ids += [self.processor.placeholder_id] * part.n_tokens + [self.processor.end_id]
        return ids, tuple(pictures)

    def step(
        self,
        uid: str,
        index: int,
        *parts: int | CanonicalPicture,
        response: Sequence[int],
        after: Step | None = None,
        temperature: float = 1.0,
    ) -> Step:
        ids, pictures = self.prompt(*parts, after=after)
        return Step(
            prompt_ids=np.array(ids, np.int32),
            response_ids=np.array(response, np.int32),
            trajectory_uid=uid,
            prompt_uid="p",
            step_index=index,
            parent_index=None if after is None else after.step_index,
            pictures=pictures,
            metadata={"sampling_params": {"temperature": temperature}},
        )

    def conversations(self, seed: int = 0) -> list[Step]:
        """Two trajectories that begin alike, up to a picture of one size; a branch; text alone."""
        rng = random.Random(seed)

        def text(n: int) -> list[int]:
            return [rng.randrange(30, 120) for _ in range(n)]

        system, question = text(12), text(5)
        steps = []
        for uid, shown in (("a", 1), ("b", 2), ("c", 1)):
            picture = self.picture(shown, (84, 84))
            first = self.step(uid, 0, *system, picture, *question, response=text(4))
            second = self.step(
                uid, 1, *text(2), self.picture(3), *text(2), response=text(3), after=first
            )
            third = self.step(
                uid, 2, *text(3), self.picture(4), response=text(5), after=second, temperature=0.7
            )
            branch = self.step(uid, 3, *text(2), self.picture(5), response=text(3), after=first)
            steps += [first, second, third, branch]
        return [*steps, self.step("d", 0, *text(9), response=text(4))]


def expected(folder: Path, steps: Sequence[Step], pngs: Mapping[str, bytes]) -> Tensor:
    reference = VisionReference(folder)
    with torch.no_grad():
        return torch.cat(
            [
                reference.log_probs(
                    s.prompt_ids.tolist(),
                    s.response_ids.tolist(),
                    [pngs[p.digest] for p in s.pictures],
                    s.temperature,
                )
                for s in steps
            ]
        )


def backend(folder: Path, rows: RowForm = "merged", **options: Any) -> TorchBackend:
    form = {"rows": rows, "lr": 1e-2, "micro_batch_tokens": 150, "dtype": "float32", **options}
    return TorchBackend(TorchBackendConfig.model_validate(form), folder)


class Loss:
    """A weighted sum of log-probs and entropies."""

    entropy = "gradient"

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]
    ) -> LossOutput:
        assert entropy is not None
        return LossOutput((columns["weight"] * (log_probs + 0.1 * entropy)).sum(), {})


def gradient(made: TorchBackend, batch: Any) -> tuple[dict[str, Tensor], float]:
    """Gradient of every parameter by one update, and its loss."""
    draw = torch.Generator().manual_seed(0)
    batch.columns["weight"] = torch.randn(batch.n_tokens, generator=draw)
    found: dict[str, Tensor] = {}
    apply = made._apply

    def look(loss: float, grad_norm: float) -> float:
        found.update(
            {n: p.grad.clone() for n, p in made._model.named_parameters() if p.grad is not None}
        )
        return apply(loss, grad_norm)

    made._apply = look  # type: ignore[method-assign]  # to see the gradient before the step
    metrics = made.train_step(batch, Loss())
    return found, metrics["loss"]


@pytest.mark.parametrize("rows", ["step", "merged", "tree"])
def test_log_probs_are_those_of_a_plain_forward(folder: Path, rows: RowForm) -> None:
    album = Album(folder)
    steps = album.conversations()
    made = backend(folder, rows)
    found = made.compute_log_probs(made.convert_with_pictures(steps, album.pngs))
    assert (found - expected(folder, steps, album.pngs)).abs().max() < CLOSE


def test_every_row_form_has_the_same_loss_and_gradient(folder: Path) -> None:
    album = Album(folder)
    steps = album.conversations(1)
    results = {}
    for rows in ("step", "merged", "tree"):
        made = backend(folder, rows, max_grad_norm=1e9)
        batch = made.convert_with_pictures(steps, album.pngs)
        results[rows] = gradient(made, batch)
    exact, loss = results["step"]
    assert exact
    assert not any("visual" in name for name in exact)
    size = max(float(g.abs().max()) for g in exact.values())
    for rows in ("merged", "tree"):
        own, own_loss = results[rows]
        assert own_loss == pytest.approx(loss, rel=1e-5)
        assert own.keys() == exact.keys()
        worst = max(float((own[n] - exact[n]).abs().max()) for n in exact)
        assert worst < 1e-5 * size, rows


def test_the_shadow_array_keeps_pictures_of_one_size_apart_in_a_tree(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, the trajectories of another picture get the first one's."""
    album = Album(qwen2)
    steps = album.conversations()
    made = backend(qwen2, "tree", micro_batch_tokens=10_000)
    monkeypatch.setattr("stepwell.backends.rows.TokenRow.compared", property(lambda row: row.ids))
    found = made.compute_log_probs(made.convert_with_pictures(steps, album.pngs))
    assert (found - expected(qwen2, steps, album.pngs)).abs().max() > 1e-2


def test_a_tree_computes_the_beginning_of_one_picture_once(qwen2: Path) -> None:
    album = Album(qwen2)
    steps = album.conversations()
    tokens = {}
    for rows in ("step", "merged", "tree"):
        made = backend(qwen2, rows, micro_batch_tokens=100_000)
        batch = made.convert_with_pictures(steps, album.pngs)
        batch.columns["weight"] = torch.ones(batch.n_tokens)
        tokens[rows] = made.train_step(batch, Loss())["padded_tokens"]
    assert tokens["tree"] < 0.7 * tokens["merged"] < 0.7 * tokens["step"]


def test_each_picture_of_a_batch_is_computed_once(qwen2: Path) -> None:
    album = Album(qwen2)
    steps = album.conversations()
    made = backend(qwen2, "merged", micro_batch_tokens=40)
    calls = []
    visual = made._model.base_model.visual
    visual.register_forward_hook(lambda *_: calls.append(1))
    batch = made.convert_with_pictures(steps, album.pngs)
    made.compute_log_probs(batch)
    batch.columns["weight"] = torch.ones(batch.n_tokens)
    for indices in ([0, 1, 2, 3], [4, 5, 6, 7, 8]):
        made.train_step(batch, Loss(), indices)
    assert len(calls) == len(album.pngs) == 5


def update_of_ranks(
    rank: int, ranks: int, folder: Path, saved: Path, dtype: str
) -> tuple[Tensor, dict[str, float], Tensor, Tensor]:
    """Log-probs before an update, after it, and of a process that goes on from its checkpoint."""
    album = Album(folder)
    shown = [*range(30, 60), album.picture(1, (84, 84)), 60, album.picture(2)]
    steps = [
        album.step("a", 0, *shown, response=[70, 71, 72]),
        album.step("b", 0, *range(30, 65), response=[80, 81]),
        album.step("c", 0, *range(35, 66), response=[81, 82]),
    ]
    options = {"ranks": ranks, "device": "cpu", "micro_batch_tokens": 40, "dtype": dtype}
    made = backend(folder, **options)
    batch = made.convert_with_pictures(steps, album.pngs)
    before = made.compute_log_probs(batch)
    batch.columns["weight"] = torch.ones(batch.n_tokens)
    metrics = made.train_step(batch, Loss())
    state = made.save_state(saved / "backend")
    made.wait_saved()
    again = backend(folder, **options)
    again.load_state(saved / "backend", state)
    after = again.compute_log_probs(again.convert_with_pictures(steps, album.pngs))
    return before, metrics, made.compute_log_probs(batch), after


@pytest.mark.timeout(900)  # processes that import torch, on a machine that may be busy
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_whose_rows_have_pictures_or_none_compute_as_one_process(
    dtype: str, qwen2: Path, tmp_path: Path
) -> None:
    """Each rank computes the pictures of its own rows, when it comes to them."""
    one = update_of_ranks(0, 1, qwen2, tmp_path / "one", dtype)
    close = {"atol": 1e-5 if dtype == "float32" else 0.1, "rtol": 0.0}
    for found in run_ranks(2, update_of_ranks, 2, qwen2, tmp_path / "two", dtype):
        for a, b in ((found[0], one[0]), (found[2], one[2]), (found[3], found[2])):
            torch.testing.assert_close(a, b, **close)
        assert found[1]["loss"] == pytest.approx(
            one[1]["loss"], rel=1e-4 if dtype == "float32" else 0.02
        )


ADAPTERS = LoraConfig(rank=4, target_modules="all-linear")
FORMS: list[tuple[RowForm, LoraConfig | None, bool]] = [
    ("step", None, True),
    ("merged", None, False),
    ("tree", None, True),
    ("step", ADAPTERS, False),
    ("tree", ADAPTERS, True),
    ("tree", ADAPTERS, False),
]
"""Rows, adapters, and whether all pictures are in one row, so that a rank has none."""


class FormOfRanks(NamedTuple):
    """Results of one form of rows on one rank."""

    before: Tensor
    """Log-probs."""
    metrics: dict[str, float]
    after: Tensor
    """Log-probs after an update."""
    written: dict[str, Tensor]
    """Weights that were saved."""
    pictures: int
    """Pictures that this rank computed in all."""


def forms_of_ranks(rank: int, ranks: int, folder: Path, saved: Path) -> list[FormOfRanks]:
    """A branched conversation of two pictures, and as many of text alone, in each form of rows."""
    album = Album(folder)
    shown = [*range(30, 60), album.picture(1, (84, 84)), 60, album.picture(3), 61]
    first = album.step("a", 0, *shown, response=[70, 71, 72])
    branches = [
        album.step("a", 1, 31, album.picture(2), 32, response=[73, 74], after=first),
        album.step("a", 2, 33, response=[75], after=first),
    ]
    texts = [
        album.step(uid, 0, *range(30, 120), response=[80 + i, 81]) for i, uid in enumerate("bcdef")
    ]
    found = []
    for rows, lora, in_one_row in FORMS:
        steps = [first, *texts] if in_one_row else [first, *branches, *texts]
        # Steps of AdamW hang on the sign of gradients that are next to nothing; SGD's do not.
        options = {"ranks": ranks, "device": "cpu", "optimizer": "sgd", "lr": 0.1, "lora": lora}
        made = backend(folder, rows, micro_batch_tokens=120, **options)
        calls: list[int] = []
        tower = next(m for n, m in made._model.named_modules() if n.endswith("visual"))
        tower.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        batch = made.convert_with_pictures(steps, album.pngs)
        before = made.compute_log_probs(batch)
        batch.columns["weight"] = torch.ones(batch.n_tokens)
        metrics = made.train_step(batch, Loss())
        target = saved / f"{len(found)}"
        made.save_weights(target)
        if ranks > 1:
            torch.distributed.barrier()
        written = {}
        for file in target.glob("*.safetensors"):
            written |= load_file(file)
        after = made.compute_log_probs(batch)
        found.append(FormOfRanks(before, metrics, after, written, len(calls)))
    return found


@pytest.mark.timeout(900)
@pytest.mark.long
def test_every_row_form_is_the_same_on_ranks_also_if_one_of_them_has_no_pictures(
    qwen2: Path, tmp_path: Path
) -> None:
    alone = forms_of_ranks(0, 1, qwen2, tmp_path / "one")
    original = load_file(qwen2 / "model.safetensors")
    tower = [name for name in original if "visual" in name]
    assert tower
    both = run_ranks(2, forms_of_ranks, 2, qwen2, tmp_path / "two")
    for form, one, *of_ranks in zip(FORMS, alone, *both, strict=True):
        case = f"{form}"
        for two in of_ranks:
            for a, b in ((two.before, one.before), (two.after, one.after)):
                assert (a - b).abs().max() < 1e-5, case
            for name in ("loss", "grad_norm"):
                assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-4), case
        assert max(two.pictures for two in of_ranks) > 0, case
        if form[-1]:
            assert min(two.pictures for two in of_ranks) == 0, case
        written = of_ranks[0].written
        assert written.keys() == original.keys()
        assert all(torch.equal(written[name], original[name]) for name in tower), case
        assert not torch.equal(one.before, one.after)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_the_tower_is_trained(qwen2: Path, lora: LoraConfig | None, dtype: str) -> None:
    album = Album(qwen2)
    steps = album.conversations()
    made = backend(qwen2, "tree", lora=lora, dtype=dtype)
    model = made._model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = made.convert_with_pictures(steps, album.pngs)
    batch.columns["weight"] = torch.ones(batch.n_tokens)
    made.train_step(batch, Loss())
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert not any("visual" in name for name in moved)
    if lora is not None:
        adapted = {name for name, _ in model.named_parameters() if ".lora_" in name}
        assert adapted == {n for n in adapted if ".language_model." in n}


def test_written_weights_are_those_of_the_files_and_the_engine_loads_them(
    qwen2: Path, tmp_path: Path
) -> None:
    album = Album(qwen2)
    steps = album.conversations()
    made = backend(qwen2, "merged")
    batch = made.convert_with_pictures(steps, album.pngs)
    batch.columns["weight"] = torch.ones(batch.n_tokens)
    made.train_step(batch, Loss())
    made.save_weights(tmp_path / "new")
    after = made.compute_log_probs(batch)
    runner = ModelRunner(str(qwen2), dtype="float32")
    runner.load_weights(str(tmp_path / "new"))
    assert runner.hashes() == {
        name: value
        for name, value in checkpoint_hashes(tmp_path / "new", "float32").items()
        if name in runner.hashes()
    }
    expect = expected(tmp_path / "new", steps, album.pngs)
    assert (after - expect).abs().max() < CLOSE
    again = backend(qwen2, "merged")
    again.load_weights(tmp_path / "new")
    assert torch.equal(
        again.compute_log_probs(again.convert_with_pictures(steps, album.pngs)), after
    )


def test_a_critic_values_steps_with_pictures(qwen2: Path) -> None:
    album = Album(qwen2)
    steps = album.conversations()
    policy = backend(qwen2, "tree")
    batch: TokenBatch = policy.convert_with_pictures(steps, album.pngs)
    options = TorchBackendConfig.model_validate(
        {"rows": "tree", "lr": 1e-2, "micro_batch_tokens": 150, "dtype": "float32"}
    )
    critic = Critic(CriticConfig(), options, qwen2)
    batch.columns["values"] = critic.values(batch)
    batch.columns["returns"] = torch.ones(batch.n_tokens)
    critic.update(batch)
    assert (critic.values(batch) != 0).any()


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


def test_steps_whose_pictures_do_not_fit_are_refused(qwen2: Path, tmp_path: Path) -> None:
    album = Album(qwen2)
    processor = album.processor
    picture = album.picture(1)
    step = album.step("a", 0, 40, picture, 41, response=[50])
    made = backend(qwen2)
    with pytest.raises(BatchError, match="bytes are not there"):
        made.convert(steps=[step])
    wrong = step.pictures[0]._replace(width=84)
    with pytest.raises(BatchError, match=r"makes 6 placeholders"):
        made.convert_with_pictures([replace(step, pictures=(wrong,))], album.pngs)
    with pytest.raises(BatchError, match="outside its pictures"):
        made.convert([replace(step, pictures=())])
    with pytest.raises(BatchError, match="vision token in its response_ids"):
        made.convert_with_pictures(
            [replace(step, response_ids=np.array([processor.start_id], np.int32))], album.pngs
        )
    text_only = TorchBackend(
        TorchBackendConfig(rows="merged"), save_model(qwen3(vocab_size=300), tmp_path)
    )
    with pytest.raises(BatchError, match="reads text only"):
        text_only.convert_with_pictures([step], album.pngs)


def test_a_backend_that_trains_on_text_refuses_pictures_by_name() -> None:
    with pytest.raises(UnsupportedByBackendError, match="TrlBackend trains on text only"):
        TrlBackend.__new__(TrlBackend).convert_with_pictures([], {})


# ── engine and trainer ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_engine_and_trainer_agree_over_200_turns_of_linear_branched_and_retried_conversations(
    folder: Path,
) -> None:
    rng = random.Random(3)
    album = Album(folder)
    scheduler = Scheduler(
        ModelRunner(str(folder), dtype="float32", max_running=6, n_retained=12),
        stop_strings=StopStrings(AutoTokenizer.from_pretrained(folder)),
        model_path=str(folder),
    )
    pool = [album.picture(seed, rng.choice(SIZES)) for seed in range(12)]
    by_digest = {p.digest: StoredPicture(p.digest, p.png, *p[2:]) for p in pool}

    def text(n: int) -> list[int]:
        return [rng.randrange(30, 120) for _ in range(n)]

    def submit(ids: Sequence[int], pictures: Sequence[Picture]) -> Request:
        collapsed, at = [], 0
        for picture in pictures:
            collapsed += [*ids[at : picture.at], album.processor.placeholder_id]
            at = picture.end
        collapsed += ids[at:]
        stored = [by_digest[p.digest] for p in pictures]
        vision = Vision(album.processor, collapsed, stored)
        assert vision.prompt_ids == list(ids)
        params = SamplingParams(max_new_tokens=rng.randint(1, 6), ignore_eos=True)
        request = Request(f"r{rng.random()}", vision.prompt_ids, params, vision=vision)
        scheduler.validate(request)
        scheduler.submit(request)
        return request

    steps: list[Step] = []
    kinds = {"linear": 0, "branched": 0, "retried": 0}
    for conversation in range(12):
        own: list[Step] = []
        for turn in range(20):
            after = own[-1] if own else None
            kind = rng.choice(["linear", "linear", "linear", "branched", "retried"])
            if kind == "branched" and len(own) > 2:
                after = rng.choice(own[:-1])
            elif kind == "branched" or after is None or turn == 0:
                kind = "linear"
            if after is not None and after.n_tokens > 330:
                break
            shown = [rng.choice(pool)] if rng.random() < 0.85 else []
            ids, pictures = album.prompt(*text(3), *shown, *text(2), after=after)
            request = submit(ids, pictures)
            if kind == "retried":  # given up midway, and asked again
                for _ in range(2):
                    scheduler.step()
                scheduler.cancel(request)
                request = submit(ids, pictures)
            while not request.finished:
                scheduler.step()
                if rng.random() < 0.03:
                    scheduler.pause("retract")
                    scheduler.resume()
            kinds[kind] += 1
            own.append(
                Step(
                    prompt_ids=np.array(ids, np.int32),
                    response_ids=np.array(request.output_ids, np.int32),
                    rollout_log_probs=np.array(request.output_log_probs, np.float32),
                    trajectory_uid=f"t{conversation}",
                    prompt_uid="p",
                    step_index=len(own),
                    parent_index=None if after is None else after.step_index,
                    pictures=pictures,
                )
            )
        steps += own
    steps = steps[:200]
    assert len(steps) == 200
    assert all(kinds.values()), kinds
    sampled = torch.cat([torch.tensor(s.rollout_log_probs) for s in steps])
    for rows in ("merged", "tree"):
        made = backend(folder, rows, micro_batch_tokens=2000)
        trained = made.compute_log_probs(made.convert_with_pictures(steps, album.pngs))
        assert (trained - sampled).abs().max() < CLOSE, rows


def test_the_decoder_alone_attends_by_the_tree(qwen2: Path) -> None:
    made = backend(qwen2, "tree")
    config = made._model.config
    assert config.get_text_config()._attn_implementation == "stepwell_tree"
    assert config.vision_config._attn_implementation == "sdpa"
    plain: Any = AutoModelForImageTextToText.from_pretrained(qwen2)
    assert made._model.state_dict().keys() == plain.state_dict().keys()


def test_verls_rows_have_four_rows_of_positions_and_the_pictures_inputs(qwen2: Path) -> None:
    """`tests/backends/test_verl_images.py` has what verl itself makes of them."""
    album = Album(qwen2)
    steps = album.conversations()
    rows = VerlBackend(VerlConfig(model_path=qwen2)).rows(steps, pictures=album.pngs)
    assert len(rows) == 13  # one temperature a row
    for row in rows:
        n = len(row.input_ids)
        assert row.position_ids.shape == (4, n)
        assert row.position_ids[0].equal(torch.arange(n))
        placeholders = int((row.input_ids == album.processor.placeholder_id).sum())
        assert row.multi_modal_inputs is not None
        if not placeholders:
            assert row.multi_modal_inputs == {}
            assert row.position_ids[1:].equal(row.position_ids[:1].expand(3, -1))
            continue
        assert int(row.multi_modal_inputs["image_grid_thw"].prod(-1).sum()) // 4 == placeholders
    with pytest.raises(BatchError, match=r"set VerlConfig\.model_path"):
        VerlBackend().rows(steps, pictures=album.pngs)
    with pytest.raises(BatchError, match="are not there; give them in pictures"):
        VerlBackend(VerlConfig(model_path=qwen2)).rows(steps)

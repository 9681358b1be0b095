"""Pictures in the embedded engine: log-probs are those of a plain forward, whatever
is batched, cut, reused or retracted; and no cache crosses from one picture or owner to another."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from transformers import AutoTokenizer

from stepwell.backends.engines.embedded import scheduler as scheduler_module
from stepwell.backends.engines.embedded import vision as vision_module
from stepwell.backends.engines.embedded.loop import GenerationLoop
from stepwell.backends.engines.embedded.model import ModelRunner
from stepwell.backends.engines.embedded.reply import StopStrings
from stepwell.backends.engines.embedded.request import GenerateBody, Request
from stepwell.backends.engines.embedded.scheduler import Scheduler
from stepwell.backends.engines.embedded.server import ServerInfo, create_app
from stepwell.backends.engines.embedded.vision import PictureStore, StoredPicture, Vision
from stepwell.backends.pictures import PictureProcessor
from tests.vision_model import make_vision_model, png
from tests.vision_reference import VisionReference

SIZES = [(56, 56), (84, 112), (200, 60), (280, 168)]
CLOSE = 5e-6


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp(request.param), kind=request.param)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("qwen2"))


class Engine:
    """A scheduler over the model, and requests with pictures for it."""

    def __init__(self, folder: Path, *, max_running: int = 4, n_retained: int = 4) -> None:
        runner = ModelRunner(
            str(folder), dtype="float32", max_running=max_running, n_retained=n_retained
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.scheduler = Scheduler(
            runner, stop_strings=StopStrings(tokenizer), model_path=str(folder)
        )
        assert runner.pictures is not None
        self.processor: PictureProcessor = runner.pictures
        self.store = PictureStore(self.processor)
        self.embedded = 0
        embed = runner._embed

        def count(processor: Any, data: bytes) -> torch.Tensor:
            self.embedded += 1
            return embed(processor, data)

        runner._embed = count  # type: ignore[method-assign]  # counted

    def shown(self, seed: int, size: tuple[int, int] = (56, 56), owner: str = "") -> StoredPicture:
        made = self.processor.canonical(png(*size, seed=seed))
        return self.store.take([base64.b64encode(made.png).decode()], owner)[0]

    def turn(self, *parts: int | StoredPicture) -> tuple[list[int], list[StoredPicture]]:
        """Ids with one placeholder a picture, and the pictures."""
        ids: list[int] = []
        for part in parts:
            p = self.processor
            known = [part] if isinstance(part, int) else [p.start_id, p.placeholder_id, p.end_id]
            ids += known
        return ids, [part for part in parts if isinstance(part, StoredPicture)]

    def submit(
        self, ids: list[int], pictures: Sequence[StoredPicture], n: int = 6, owner: str = ""
    ) -> Request:
        sampling = {"max_new_tokens": n, "ignore_eos": True}
        body = GenerateBody.model_validate(
            {"input_ids": ids, "sampling_params": sampling, "extra_key": owner}
        )
        request = body.request(1, Vision(self.processor, ids, pictures))
        request.return_logprob = True
        self.scheduler.validate(request)
        self.scheduler.submit(request)
        return request

    def run(self) -> None:
        while self.scheduler.has_work:
            self.scheduler.step()
            self.scheduler.take_changed()


@torch.inference_mode()
def error(reference: VisionReference, request: Request) -> float:
    """Largest difference of log-probs to the plain forward."""
    assert request.finished
    assert request.vision is not None
    pngs = [request.vision.png(i) for i in range(len(request.vision.pictures))]
    expected = reference.log_probs(request.prompt_ids, request.output_ids, pngs)
    return float((torch.tensor(request.output_log_probs) - expected).abs().max())


def text(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(30, 120) for _ in range(n)]


@pytest.mark.slow
def test_staggered_requests_with_pictures_are_exact_over_reused_rows_and_prefixes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PREFILL_BUDGET", 23)  # cuts fall inside pictures
    rng = random.Random(0)
    engine = Engine(folder)
    pictures = [engine.shown(seed, rng.choice(SIZES)) for seed in range(6)]
    conversations: list[tuple[list[int], list[StoredPicture], Request]] = []
    requests: list[Request] = []
    for _ in range(50):
        done = [c for c in conversations if c[2].finished]
        new, shown = engine.turn(*text(rng, 4), rng.choice(pictures), *text(rng, 3))
        ids, before = new, list(shown)
        if done and rng.random() < 0.7:
            earlier, seen, request = rng.choice(done)  # the next turn of it, or a branch
            if len(request.prompt_ids) < 500:
                ids, before = earlier + request.output_ids + new, seen + shown
        request = engine.submit(ids, before, rng.randint(1, 8))
        conversations.append((ids, before, request))
        requests.append(request)
        for _ in range(rng.randint(0, 6)):
            if engine.scheduler.has_work:
                engine.scheduler.step()
        if rng.random() < 0.15:
            engine.scheduler.pause("retract")
            engine.scheduler.resume()
    engine.run()
    assert engine.scheduler.reused_tokens > 500, "the test means to reuse prefixes"
    reference = VisionReference(folder)
    worst = max(error(reference, request) for request in requests)
    assert worst < CLOSE


def test_each_new_picture_of_a_conversation_is_embedded_once(qwen2: Path) -> None:
    engine = Engine(qwen2)
    ids: list[int] = []
    seen: list[StoredPicture] = []
    for turn in range(5):
        new, shown = engine.turn(40, 41, engine.shown(turn, (84, 84)), 42)
        ids, seen = ids + new, seen + shown
        request = engine.submit(ids, seen)
        engine.run()
        ids = ids + request.output_ids
    assert engine.embedded == 5


def crossed(engine: Engine, owners: tuple[str, str]) -> tuple[float, int]:
    """Error of a second user's log-probs after a first one's picture of the same size and text, and
    the prompt tokens that it had from the cache."""
    before = [*range(40, 60)]
    for seed, owner in zip((1, 2), owners, strict=True):
        ids, shown = engine.turn(*before, engine.shown(seed, (112, 112), owner), 50, 51, 52)
        request = engine.submit(ids, shown, owner=owner)
        engine.run()
    return error(VisionReference(engine.processor.folder), request), request.cached_tokens


def test_a_picture_of_the_same_size_is_another_prompt(qwen2: Path) -> None:
    worst, cached = crossed(Engine(qwen2), ("", ""))
    assert worst < CLOSE
    assert cached == 21  # the text, and what opens the picture


def test_the_shadow_array_is_what_keeps_pictures_apart(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails without it."""

    def same(ids: Any, pictures: Sequence[Any]) -> Any:
        shadow = np.array(ids, dtype=np.int64)
        for picture in pictures:
            shadow[picture.at : picture.at + picture.n_tokens] = -1
        return shadow

    monkeypatch.setattr(vision_module, "shadow_ids", same)
    worst, _ = crossed(Engine(qwen2), ("", ""))
    assert worst > 1e-2


def test_owners_share_no_prefix(qwen2: Path) -> None:
    engine = Engine(qwen2)
    assert crossed(engine, ("alice", "bob"))[1] == 0
    ids, shown = engine.turn(*range(40, 60), engine.shown(2, (112, 112), "bob"), 50, 51, 52)
    request = engine.submit(ids, shown, owner="bob")
    engine.run()
    assert request.cached_tokens == len(request.prompt_ids) - 1


def test_vision_tokens_are_never_sampled(qwen2: Path) -> None:
    engine = Engine(qwen2)
    head = engine.scheduler.runner._model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    head.bias[list(engine.processor.forbidden_ids)] = 100.0
    request = engine.submit(*engine.turn(40, engine.shown(0), 41), n=40)
    engine.run()
    assert not set(request.output_ids) & set(engine.processor.forbidden_ids)
    assert min(request.output_log_probs) > -20


# ── over HTTP ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def http(qwen2: Path) -> Any:
    engine = Engine(qwen2)
    tokenizer = AutoTokenizer.from_pretrained(qwen2)
    app = create_app(GenerationLoop(engine.scheduler), tokenizer, ServerInfo(str(qwen2), ""))
    with TestClient(app) as client:
        yield engine, client


def generate(client: TestClient, ids: list[int], images: list[str], **fields: Any) -> Any:
    body = {"input_ids": ids, "image_data": images, "return_logprob": True, **fields}
    body["sampling_params"] = {"max_new_tokens": 3, "ignore_eos": True}
    return client.post("/generate", json=body)


def test_one_placeholder_a_picture_is_expanded_and_counted(http: Any) -> None:
    engine, client = http
    made = engine.processor.canonical(png(112, 84))
    ids = engine.turn(40, engine.shown(0, (112, 84)), 41)[0]
    image = base64.b64encode(made.png).decode()
    answer = generate(client, ids, [image]).json()
    assert answer["meta_info"]["prompt_tokens"] == len(ids) - 1 + 12
    again = generate(client, ids, [f"sha256:{made.digest}"]).json()
    assert again["meta_info"]["cached_tokens"] == len(ids) - 2 + 12
    assert client.get("/model_info").json()["has_image_understanding"]


def test_a_digest_that_is_not_held_under_this_key_is_asked_for(http: Any) -> None:
    engine, client = http
    made = engine.processor.canonical(png(56, 56))
    ids = engine.turn(40, engine.shown(0), 41)[0]
    image = base64.b64encode(made.png).decode()
    assert generate(client, ids, [image], extra_key="alice").status_code == 200
    for key, status in (("alice", 200), ("bob", 409)):
        answer = generate(client, ids, [f"sha256:{made.digest}"], extra_key=key)
        assert answer.status_code == status
    assert answer.json()["error"]["missing"] == [made.digest]


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "1 placeholders (id 262) for 0 pictures"),
        (["", ""], "image_data[0]: the picture is not a readable PNG"),
        (["!"], "image_data[0]"),
        (["é"], "image_data[0]"),
        ([base64.b64encode(png(57, 60)).decode()], "not on the model's grid of 28"),
    ],
)
def test_image_data_that_does_not_fit_the_prompt_is_refused(
    images: list[str], words: str, http: Any
) -> None:
    engine, client = http
    answer = generate(client, engine.turn(40, engine.shown(0), 41)[0], images)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_an_id_of_no_vocabulary_is_refused_beside_a_picture(http: Any) -> None:
    engine, client = http
    image = base64.b64encode(engine.shown(0).png).decode()
    answer = generate(client, [*engine.turn(40, engine.shown(0), 41)[0], 2**70], [image])
    assert answer.status_code == 400
    assert "outside the vocabulary" in answer.json()["error"]["message"]


def test_a_picture_that_comes_in_another_encoding_counts_once(qwen2: Path) -> None:
    engine = Engine(qwen2)
    first, other = engine.shown(0), engine.shown(1)
    plain = io.BytesIO()
    Image.open(io.BytesIO(first.png)).save(plain, "PNG", compress_level=0)
    again = base64.b64encode(plain.getvalue()).decode()
    assert engine.store.take([again], "")[0].digest == first.digest
    engine.store._max_bytes = len(first.png) + len(other.png)
    engine.store.take([again], "")
    for shown in (first, other):
        assert engine.store.take([f"sha256:{shown.digest}"], "") == [shown]


def test_the_store_forgets_what_was_used_longest_ago(qwen2: Path) -> None:
    engine = Engine(qwen2)
    first = engine.shown(0)
    engine.store._max_bytes = 2 * len(first.png)
    for seed in range(1, 6):
        engine.shown(seed)
    with pytest.raises(vision_module.MissingPicturesError):
        engine.store.take([f"sha256:{first.digest}"], "")
    last = engine.shown(5)
    assert engine.store.take([f"sha256:{last.digest}"], "") == [last]


def test_weights_are_replaced_by_names_of_the_files(qwen2: Path, tmp_path: Path) -> None:
    other = make_vision_model(tmp_path, seed=7)
    engine = Engine(qwen2)
    runner = engine.scheduler.runner
    engine.scheduler.update_weights(str(other), "1")
    request = engine.submit(*engine.turn(40, engine.shown(3, (84, 84)), 41))
    engine.run()
    assert error(VisionReference(other), request) < CLOSE
    assert {"visual.patch_embed.proj.weight", "model.norm.weight"} <= runner.hashes().keys()

"""Pictures in rows: `image_key` and `<image>` make content parts, whatever form a picture is stored
in; prompts are measured with them; what does not fit is refused by name."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from pydantic import TypeAdapter

from stepwell.backends.pictures import PictureBounds, PictureProcessor, size_of
from stepwell.config.load import load_config
from stepwell.trainer.config import SourceConfig
from stepwell.trainer.data.images import picture_bytes, with_pictures
from stepwell.trainer.data.source import PromptSource
from stepwell.trainer.data.tasks import PICTURE, Task, without_pictures
from stepwell.trainer.errors import ConfigError, DataError
from stepwell.trainer.rewards.data_sources import usual_reward
from stepwell.trainer.rewards.loading import load_reward
from tests.vision_model import make_vision_model, png

ROW: dict[str, Any] = {"prompt": "<image>Find x.", "answer": "3"}


def source(path: Path, tokenizer_path: Path | None = None, **fields: Any) -> PromptSource:
    config: SourceConfig = TypeAdapter(SourceConfig).validate_python(
        {"path": str(path), "prompt_key": "prompt", "image_key": "images", **fields}
    )
    return PromptSource(config, tokenizer_path=tokenizer_path)


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first(found: PromptSource) -> Task:
    return found.all()[0]


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize("form", ["path", "absolute", "file", "url", "object", "alone"])
def test_a_picture_of_a_jsonl_row_stands_where_its_placeholder_is(
    tmp_path: Path, form: str
) -> None:
    data = png(60, 60)
    (tmp_path / "a.png").write_bytes(data)
    value: Any = {
        "path": ["a.png"],
        "absolute": [str(tmp_path / "a.png")],
        "file": [f"file://{tmp_path / 'a.png'}"],
        "url": [url(data)],
        "object": [{"path": "a.png", "bytes": None}],
        "alone": "a.png",
    }[form]
    row = {"prompt": "Look: <image> Find x.", "answer": "3", "images": value}
    task = first(source(jsonl(tmp_path, row), kind="jsonl"))
    assert task["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image_url", "image_url": {"url": url(data)}},
                {"type": "text", "text": " Find x."},
            ],
        }
    ]
    assert "question" not in task


def test_images_of_a_hugging_face_data_set_are_read_as_they_are_stored(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    pictures = [png(60, 60, 1), png(90, 60, 2)]
    rows = {
        "prompt": [[{"role": "user", "content": "<image><image>Which is longer?"}]],
        "images": [[{"bytes": data, "path": None} for data in pictures]],
        "answer": ["2"],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "a.parquet"))
    task = first(source(tmp_path / "a.parquet", kind="parquet"))
    parts = task["messages"][0]["content"]
    assert [picture_bytes(part) for part in parts[:2]] == pictures
    assert parts[2:] == [{"type": "text", "text": "Which is longer?"}]


def test_a_row_of_a_users_class_may_hold_pil_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pictured.py").write_text(
        "from PIL import Image\n"
        "class Rows:\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, i):\n"
        "        image = Image.new('RGB', (60, 60), (9, 9, 9))\n"
        "        return {'prompt': '<image>?', 'multi_modal_data': {'image': [image]}}\n"
    )
    found = source(
        tmp_path,
        kind="custom",
        cls=f"{tmp_path / 'pictured.py'}:Rows",
        image_key="multi_modal_data.image",
        label_key=None,
    )
    part = first(found)["messages"][0]["content"][0]
    assert Image.open(io.BytesIO(picture_bytes(part))).size == (60, 60)


def test_a_pil_image_is_turned_as_its_photograph_is(tmp_path: Path) -> None:
    """What a class opened of a file says how it lies, and a PNG made of it does not."""
    lying = Image.new("RGB", (60, 30), (9, 9, 9))
    exif = lying.getexif()
    exif[0x0112] = 6
    lying.save(tmp_path / "a.jpg", exif=exif)
    opened = Image.open(tmp_path / "a.jpg")
    sizes = []
    for picture in (str(tmp_path / "a.jpg"), opened):
        (message,) = with_pictures("<image>", [picture], None, "row 1")
        assert isinstance(message, dict)
        data = picture_bytes(message["content"][0])
        sizes.append(size_of(data, PictureBounds()))
    assert sizes == [(30, 60), (30, 60)]


def test_a_pil_image_that_no_png_holds_is_refused_by_row() -> None:
    inks = Image.new("CMYK", (60, 60))
    with pytest.raises(DataError, match=r"^row 1: picture 0 cannot be .* mode CMYK .* to RGB$"):
        with_pictures("<image>?", [inks], None, "row 1")


def test_a_row_without_pictures_stays_a_question(tmp_path: Path) -> None:
    task = first(
        source(jsonl(tmp_path, {"prompt": "2 + 1?", "answer": "3", "images": []}), kind="jsonl")
    )
    assert task["question"] == "2 + 1?"


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], r"has 0 pictures and 1 <image> in its prompt"),
        (["a.png", "a.png"], r"has 2 pictures and 1 <image> in its prompt"),
        (["none.png"], r"picture 0 is 'none.png', which cannot be read"),
        (["https://x.y/a.png"], r"addresses are not read"),
        (["rows.jsonl"], r"picture 0 is no PNG"),
        ([7], r"picture 0 is 7; it is a path"),
        (["data:text/plain;base64,aGk="], r"is no data:image/…;base64,…; store its bytes"),
        (["data:image/svg+xml,<svg/>"], r"is no data:image/…;base64,…; store its bytes"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_by_row(
    images: list[Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    with pytest.raises(DataError, match=rf"rows.jsonl:1.*{words}"):
        source(jsonl(tmp_path, {**ROW, "images": images}), kind="jsonl")


def test_prompts_are_measured_with_their_pictures(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path / "model")
    processor = PictureProcessor.of(model)
    assert processor is not None
    small, large = png(56, 56), png(280, 280)
    rows = [
        {**ROW, "instance_id": name, "images": [url(data)]}
        for name, data in (("small", small), ("large", large))
    ]
    limit = 70
    found = source(jsonl(tmp_path, *rows), model, kind="jsonl", max_prompt_tokens=limit)
    assert [task["instance_id"] for task in found.all()] == ["small"]
    for data in (small, large, png(100, 37)):
        assert processor.n_tokens(data) == processor.canonical(data).n_tokens


def test_the_pool_holds_no_bytes_of_a_tasks_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    task = first(source(jsonl(tmp_path, {**ROW, "images": ["a.png"]}), kind="jsonl"))
    told = without_pictures(task)
    assert told["messages"][0]["content"][0]["image_url"] == {"url": PICTURE}
    assert "base64" not in json.dumps(told)
    assert picture_bytes(task["messages"][0]["content"][0]) == png()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "video", "video": "a.mp4"}], "a part of type 'video'"),
        ("<video>Find x.", "<video> in its prompt"),
        ("<image>Is it in <video>?", "<video> in its prompt"),
        ("<image><audio>", "<audio> in its prompt"),
        ([{"type": "input_image", "image_url": "x"}, "<image>"], "a part of type 'input_image'"),
        ([{"type": "image_url", "image_url": {"url": "https://x/a.png"}}], "addresses are not"),
        ([{"type": "image"}, {"type": "text", "text": "<image>?"}], "1 pictures and 2 <image>"),
    ],
)
def test_a_part_that_is_no_picture_of_the_row_is_refused_by_name(
    tmp_path: Path, content: Any, words: str
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    row = {"prompt": [{"role": "user", "content": content}], "images": ["a.png"]}
    with pytest.raises(DataError, match=words):
        source(jsonl(tmp_path, ROW | row), kind="jsonl")


@pytest.mark.parametrize(
    ("plays", "named"),
    [
        ("rollout.harness={command: [sh], timeout_s: 9}", "rollout.harness"),
        ("rollout.environment=http://127.0.0.1:8000", "rollout.environment"),
    ],
)
def test_a_harness_is_given_no_task_without_its_pictures(plays: str, named: str) -> None:
    data = "data={train: {kind: jsonl, path: a.jsonl, image_key: images}}"
    with pytest.raises(ConfigError, match=rf"image_key is 'images', but {named} .* text alone"):
        load_config("quickstart", ["rollout.agent=null", data, plays])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"<think>So.</think>It is \boxed{3}", 1.0),
        (r"It is \boxed{3}", 0.9),
        (r"<think>So.</think>It is \boxed{4}", 0.1),
        ("3", 0.0),
    ],
)
def test_geometry3k_pays_for_answer_and_form(answer: str, expected: float) -> None:
    name = usual_reward("hiyouga/geometry3k")
    result: Any = load_reward(name)("hiyouga/geometry3k", answer, "3", {})
    assert result["score"] == pytest.approx(expected)


def test_a_data_url_is_read_as_the_gateway_reads_it() -> None:
    data = bytes(range(256))
    text = base64.urlsafe_b64encode(data).decode().rstrip("=")
    url = f"data:image/png;base64,{text[:76]}\r\n{text[76:]}"
    assert picture_bytes({"image_url": {"url": url}}) == data


def test_a_data_url_that_is_no_base64_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="'data:image/png,abc' is no base64"):
        picture_bytes({"image_url": {"url": "data:image/png,abc"}})

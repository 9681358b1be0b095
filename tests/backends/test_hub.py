"""A model may be named by its id on the hub; where it cannot be had, one line says why."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

from stepwell.backends.hub import is_hub_id
from stepwell.config.load import load_config
from stepwell.trainer.errors import ConfigError
from tests.e2e.conftest import ROOT

MODEL = ROOT / "examples" / "quickstart" / "model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The part of huggingface.co that a client needs: one model, `us/tiny`, at `main`."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        files = [path.name for path in sorted(MODEL.iterdir()) if path.is_file()]
        path, _, _ = self.path.partition("?")
        if path in (f"/api/models/us/tiny/revision/{ref}" for ref in ("main", COMMIT)):
            siblings = [{"rfilename": name} for name in files]
            self._send(json.dumps({"id": "us/tiny", "sha": COMMIT, "siblings": siblings}), body)
        elif path == f"/api/models/us/tiny/tree/{COMMIT}":
            sizes = {name: (MODEL / name).stat().st_size for name in files}
            tree = [{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()]
            self._send(json.dumps(tree), body)
        elif path.startswith(f"/us/tiny/resolve/{COMMIT}/"):
            self._send((MODEL / path.rpartition("/")[2]).read_bytes(), body)
        else:
            missing = (
                "RevisionNotFound" if path.startswith("/api/models/us/tiny") else "RepoNotFound"
            )
            self.send_response(404)
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, content: str | bytes, body: bool) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """The client's endpoint is a server of ours, its cache a folder of ours."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for name, value in (
        ("ENDPOINT", endpoint),
        ("HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _said(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("quickstart", overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_model_of_the_hub_is_downloaded_for_every_part_and_then_needs_no_hub(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("quickstart", ["model.path=us/tiny"])
    folder = config.model.path
    assert folder.name == COMMIT
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (MODEL / name).read_bytes()
    assert config.engine.model_path == folder
    assert str(config.gateway.tokenizer_path) == str(folder)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_config("quickstart", ["model.path=us/tiny"]).model.path == folder


def test_what_the_hub_does_not_have_is_told_with_the_key(hub: ThreadingHTTPServer) -> None:
    said = _said("model.path=us/tinny")
    assert "model.path is 'us/tinny', which is no folder here and no model of the hub" in said
    assert "HF_TOKEN" in said
    assert "model.revision is 'v9', which us/tiny does not have" in _said(
        "model.path=us/tiny", "model.revision=v9"
    )


def test_offline_a_model_that_is_not_in_the_cache_is_told_with_the_remedy(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = _said("model.path=us/tiny")
    assert "model.path is 'us/tiny', which is no folder here, and the hub cannot be reached" in said
    assert "run `hf download us/tiny` where there is a network" in said


def test_to_look_at_a_configuration_downloads_nothing() -> None:
    config = load_config("quickstart", ["model.path=us/tiny"], here=False)
    assert str(config.model.path) == "us/tiny"


@pytest.mark.parametrize("name", ["nowhere", "./a/b", "/a/b", "a/b/c", "tests/nowhere", "a b/c"])
def test_a_path_is_no_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert not is_hub_id(name)


def test_a_folder_below_runs_is_no_id_before_there_are_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Presets name models there, which a command makes."""
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("runs/harness_shell-model")
    assert "make it as the comment beside it says" in _said("model.path=runs/mine")

"""Finding the GGUF, and what is said when it is not there. The conversion itself needs the package
(95 MB) and is checked by `make smollm2`."""

from pathlib import Path

import pytest

from examples.smollm2.prepare import INSTALL, find_gguf, main


def test_the_gguf_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp is not installed')\n")
    (package / "weights.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gguf("some_model_package") == package / "weights.gguf"


def test_a_package_that_is_not_installed_is_named_with_the_command() -> None:
    with pytest.raises(FileNotFoundError, match="no_such_package is not installed") as caught:
        find_gguf("no_such_package")
    assert INSTALL in str(caught.value)


def test_a_missing_file_is_one_line_and_a_failing_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "out"), "--gguf", str(tmp_path / "none.gguf")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.gguf': no such file" in line
    assert not (tmp_path / "out").exists()

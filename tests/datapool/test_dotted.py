"""Names in a configuration find what they name, or say what is missing."""

import json

import pytest

from stepwell.datapool.dotted import resolve


@pytest.mark.parametrize("path", ["json:loads", "json.loads"])
def test_both_spellings_find_the_object(path):
    assert resolve(path) is json.loads


@pytest.mark.parametrize("error", ["SystemExit", "PanicError"])
@pytest.mark.parametrize("named", ["{}/{}.py:name", "{1}:name"])
def test_a_module_that_ends_its_importer_is_an_import_error(named, error, tmp_path, monkeypatch):
    module = f"ends_by_{error}"
    code = f"class PanicError(BaseException): ...\nraise {error}('give --port')\n"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=f"{error}: give --port"):
        resolve(named.format(tmp_path, module))


@pytest.mark.parametrize("path", ["json:nothing", "no_such_module:name", "loads", "", ":name"])
def test_what_is_not_there_is_an_import_error(path):
    with pytest.raises(ImportError):
        resolve(path)

"""Names in a configuration find what they name, or say what is missing."""

import json

import pytest

from stepwell.datapool.dotted import resolve


@pytest.mark.parametrize("path", ["json:loads", "json.loads"])
def test_both_spellings_find_the_object(path):
    assert resolve(path) is json.loads


@pytest.mark.parametrize("path", ["json:nothing", "no_such_module:name", "loads", "", ":name"])
def test_what_is_not_there_is_an_import_error(path):
    with pytest.raises(ImportError):
        resolve(path)

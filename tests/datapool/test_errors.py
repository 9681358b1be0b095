"""Errors cross Ray: they pickle, keep their type, and are the built-in a reader expects."""

from __future__ import annotations

import pickle

import pytest

import stepwell.datapool.errors as errors

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.DataPoolError)
]


@pytest.mark.parametrize("error_type", ALL)
def test_errors_survive_pickling_and_read_as_their_message(error_type):
    error = pickle.loads(pickle.dumps(error_type("step 't'[0] is wrong; do this")))
    assert type(error) is error_type
    assert str(error) == "step 't'[0] is wrong; do this"


@pytest.mark.parametrize("error_type", [e for e in ALL if e is not errors.DataPoolError])
def test_every_error_is_also_a_builtin_and_stands_in_the_drawn_tree(error_type):
    builtin = next(c for c in error_type.__mro__ if c.__module__ == "builtins")
    assert builtin not in (Exception, BaseException, object)
    assert f"{error_type.__name__}({builtin.__name__})" in (errors.__doc__ or "")


def test_what_the_package_offers_is_there():
    from stepwell import datapool

    assert all(getattr(datapool, name) is not None for name in datapool.__all__)

"""Messages between processes: the values they carry, and those that are refused by their type."""

from __future__ import annotations

from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from stepwell.datapool.codec import decoder, encoder, pack
from stepwell.datapool.errors import UnknownLeaseError
from tests.builders import step


def test_arrays_and_numpys_numbers_come_as_they_went() -> None:
    sent = {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "one": np.float32(0.5)}
    came = decoder(dict).decode(encoder.encode(sent))
    np.testing.assert_array_equal(came["array"], sent["array"])
    assert came["array"].dtype == np.int16
    assert came["one"] == 0.5


def test_a_column_is_an_array_and_nothing_else() -> None:
    column = decoder(np.ndarray)
    np.testing.assert_array_equal(column.decode(encoder.encode(np.arange(3))), np.arange(3))
    with pytest.raises(NotImplementedError, match="from list"):
        column.decode(encoder.encode([1, 2]))


def test_a_mapping_that_nobody_may_change_is_a_dictionary() -> None:
    sent = encoder.encode(MappingProxyType({"a": 1}))
    assert decoder(dict).decode(sent) == {"a": 1}


def test_log_probs_are_read_from_the_bytes_of_a_step_and_none_are_not_zeros() -> None:
    sampled = pack(step(rollout_log_probs=[-0.5, -1.25])).log_probs
    assert sampled is not None
    assert np.frombuffer(sampled, np.float32).tolist() == [-0.5, -1.25]
    assert pack(step(rollout_log_probs=None)).log_probs is None


def test_an_error_of_the_pool_is_its_class_and_what_it_says() -> None:
    sent = encoder.encode([UnknownLeaseError("lease 7 is unknown")])
    assert decoder(list).decode(sent) == [["UnknownLeaseError", "lease 7 is unknown"]]


class Subclass(np.ndarray):
    """An array of somebody's own."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([object()]), "an array of object"),
        (np.zeros(2).view(Subclass), r"an array of float64 \(Subclass\)"),
        (np.datetime64("2026-11-29"), "numpy.datetime64 is not supported"),
        (object(), "builtins.object is not supported"),
    ],
)
def test_what_no_message_carries_is_refused_by_its_type(value: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        encoder.encode({"value": value})


def test_bytes_of_another_program_are_refused() -> None:
    strange = msgspec.msgpack.encode(msgspec.msgpack.Ext(77, b"?"))
    with pytest.raises(ValueError, match="unknown extension type 77"):
        decoder(object).decode(strange)

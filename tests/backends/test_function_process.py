"""A function in a process of its own: what ends a call does not end the next one."""

from __future__ import annotations

from contextlib import closing

from stepwell.backends.function_process import FunctionProcess


def test_a_process_killed_between_two_calls_is_started_anew() -> None:
    """Whoever gave up a call kills the process, which may have answered just then."""
    with closing(FunctionProcess("operator:itemgetter", 0)) as process:
        assert process.call(60, "a") == "a"
        process.kill()
        assert process.call(60, "b") == "b"

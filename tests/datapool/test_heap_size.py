"""A process that gives its free pages back has the size of what it holds, not of its peak."""

import subprocess
import sys

import pytest

PEAK_AND_AFTER = """
import psutil, time
from stepwell.datapool import heap
heap.TRIM_S = 0.1
heap.return_free_pages()
blocks = [bytes(20_000) for _ in range(10_000)]
peak = psutil.Process().memory_info().rss
blocks = blocks[::20]  # the rest are holes between them
time.sleep(1)
print(peak - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_holes_in_the_heap_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK_AND_AFTER], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 100e6

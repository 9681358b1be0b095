"""A process that gives its free pages back has the size of what it holds, not of its peak; what it
has loaded moves to huge pages."""

import gc
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.datapool import DataPoolClient

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


AGAIN_AND_AGAIN = """
import resource, time
from stepwell.datapool import heap
heap.settle_heap()
heap.use_one_heap()
heap.return_large_blocks(1 << 20)
heap.return_free_pages()
time.sleep(0.3)  # its thread has begun
def work():
    for _ in range(100):
        blocks = [bytes(bytearray(300_000)) for _ in range(6)]
        del blocks
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_blocks_that_are_taken_again_and_again_keep_their_pages_meanwhile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN_AND_AGAIN], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 5_000, "of 44,000 pages"


ON_HUGE_PAGES = """
from pathlib import Path
from stepwell.datapool import heap
def huge_kb():
    pages = Path("/proc/self/smaps_rollup")  # Linux's
    lines = pages.read_text().splitlines() if pages.exists() else ["AnonHugePages: 0 kB"]
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
numbers = [*range(1_000_000)]  # small objects
texts = [str(i) * 200 for i in range(20_000)]  # and larger ones
before = huge_kb()
heap.use_huge_pages()
assert sum(numbers) == 499_999_500_000
assert all(text == str(i) * 200 for i, text in enumerate(texts))
print(huge_kb() - before)
"""


def test_what_is_loaded_moves_to_huge_pages_and_stays_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_HUGE_PAGES], capture_output=True, text=True, check=True
    )
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_there = version >= (6, 1) and modes.exists() and "[never]" not in modes.read_text()
    assert int(done.stdout) >= (20_000 if is_there else 0)


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_pool_that_is_opened_leaves_garbage_collection_on_or_off(
    tmp_path: Path, is_on: bool
) -> None:
    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        async with DataPoolClient.local(folder=tmp_path):
            assert gc.isenabled() is is_on
    finally:
        (gc.enable if before else gc.disable)()

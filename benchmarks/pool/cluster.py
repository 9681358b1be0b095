"""The Ray that a bench of the pool runs in: its own, and gone with it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

OBJECT_STORE_BYTES = 512 << 20


@contextmanager
def bench_cluster(**options: Any) -> Iterator[None]:
    """A local Ray for the body. Garbage collection, which benches turn down, is put back.

    Args:
        options: further arguments of `ray.init`.
    """
    threshold = gc.get_threshold()
    ray.init(
        address="local",
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **options,
    )
    try:
        yield
    finally:
        ray.shutdown()
        gc.unfreeze()
        gc.set_threshold(*threshold)

"""Mends the in-place reload of weights of vLLM 0.32.0 on a CPU, for models with tied embeddings.

On a CPU vLLM packs the weight of each linear layer for its kernels. A reload packs anew what the
checkpoint has; a head that is tied to the embedding is not in it, and would go on with the weight
of before: wrong logits, without a word. Here every layer whose weight was kept beside the packed
one is packed once more when a reload ends.

Loaded by vLLM's interpreter: standard library only, nothing of ours. Does not own choosing when to
use it (`vllm.py`).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

RELOAD = "vllm.model_executor.model_loader.reload.inplace"


class Mended(importlib.abc.MetaPathFinder):
    """Finds vLLM's module of reloads and changes it once it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != RELOAD:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_mend(module: ModuleType) -> None:
                execute(module)
                mend(module)

            spec.loader.exec_module = execute_and_mend  # type: ignore[method-assign]
        return spec


def mend(module: Any) -> None:
    """Pack kept weights again at the end of each reload."""
    finalize = module.finalize_layerwise_reload

    def finalize_and_pack(model: Any, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        for layer in model.modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    module.finalize_layerwise_reload = finalize_and_pack


sys.meta_path.insert(0, Mended())

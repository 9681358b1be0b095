"""Import hook that lets a real SGLang run where its GPU-only packages are not.

    PYTHONPATH=…/backends/engines/sglang_cpu python -m sglang.launch_server --device cpu …

Python imports a `sitecustomize` by itself at the start, in SGLang's child processes too. SGLang
0.5.23 imports `torchvision`, `torchaudio` and `sgl_kernel` when its own modules load, also for a
dense model on the torch path, which never calls them. Where one of them is not installed, importing
it gives an inert module: every attribute exists, a class can be derived from, a decorator returns
what it decorates, a call returns nothing of use. An installed one is left alone.

torchvision's wheel on PyPI is built for CUDA: beside a torch of the CPU its operators do not load,
and without a declaration of two of them neither does the rest of it. Processors of pictures need
the rest and call no operator, so the two are declared there. Qwen's pictures are read by a module
that imports SGLang's Qwen3.5, which looks up four operators of `sgl_kernel` as it loads.

Loaded by SGLang's interpreter: standard library only, nothing of ours. Does not own choosing when
it is used: `backends/engines/sglang.py`.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

INERT = frozenset({"torchvision", "torchaudio", "sgl_kernel"})
LOOKED_UP = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


class _InertMeta(type):
    """Attributes of inert classes: their own names (enum members are looked up as such)."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Inert:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> "_Inert":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert()

    def __call__(self, *args: object, **kwargs: object) -> object:
        is_decorator = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType)
        return args[0] if is_decorator else _Inert()


class _InertModule(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            found: object = _InertMeta(name, (_Inert,), {})
        else:  # a function or a submodule: the import system sets the latter itself
            found = _Inert()
        setattr(self, name, found)
        return found


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on `sys.meta_path`: asked only for what no other finder has."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, inner = fullname.partition(".")
        if root not in INERT:
            return None
        if inner and not isinstance(sys.modules.get(root), _InertModule):
            return None  # a submodule that an installed package does not have
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _InertModule(spec.name)
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


class _OperatorsFinder(importlib.abc.MetaPathFinder):
    """Finds nothing: declares operators that a module is about to look up and nothing has."""

    is_done = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision._meta_registrations" and not self.is_done:
            self.is_done = True
            if not sys.modules["torchvision"].extension._has_ops():
                define = sys.modules["torch"].library.define
                for name in ("nms", "qnms"):
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    define(f"torchvision::{name}", schema)
        elif fullname == "sglang.srt.models.qwen3_5":
            operators = sys.modules["torch"].ops.sgl_kernel
            for name in LOOKED_UP:
                if not hasattr(operators, name):
                    setattr(operators, name, _Inert())
        return None


sys.meta_path.insert(0, _OperatorsFinder())
sys.meta_path.append(_InertFinder())

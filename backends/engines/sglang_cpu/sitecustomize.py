"""Import hook that lets a real SGLang run where its GPU-only packages are not.

    PYTHONPATH=…/backends/engines/sglang_cpu python -m sglang.launch_server --device cpu …

Python imports a `sitecustomize` by itself at the start, in SGLang's child processes too. SGLang
0.5.23 imports `torchvision`, `torchaudio` and `sgl_kernel` when its own modules load, also for a
dense model on the torch path, which never calls them. Where one of them is not installed, importing
it gives an inert module: every attribute exists, a class can be derived from, a decorator returns
what it decorates, a call returns nothing of use. An installed one is left alone.

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


sys.meta_path.append(_InertFinder())

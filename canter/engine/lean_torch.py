"""torch without what it loads for tracing and exporting: half of its start, and nothing that running a model takes.

`install` before torch is first imported puts a stand-in in the place of each module named here; one becomes the real module when
somebody asks it for anything. Code that is not Canter's may count on what these modules register when they are loaded, so
`complete` loads them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

DEFERRED = (
    "torch._meta_registrations",
    "torch.distributed._meta_registrations",
    "torch._decomp",
    "torch._functorch",
    "torch._prims",
    "torch._refs",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.masked",
    "torch.multiprocessing",
    "torch.nn.attention",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.testing",
    "torch.utils.data",
)
"""Shape functions of tensors without data, operators in terms of others, export, number formats in training, and what trains and
tests. torch imports them for their names alone, or for what they register."""


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks around; nobody wants the module for it
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _load(self)
        return getattr(self, name)


class _StandInLoader(Loader):
    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _StandInLoader(spec.loader)
        return spec


def install() -> None:
    """Defer from now on. In a process whose torch is there already it changes nothing."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def complete() -> None:
    """Load what was deferred, and defer no more."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in DEFERRED:
        module = sys.modules.get(name)
        if isinstance(module, _StandIn):
            _load(module)


def _load(module: ModuleType) -> None:
    loader = module.__spec__.loader if module.__spec__ is not None else None
    assert isinstance(loader, _StandInLoader) and module.__spec__ is not None
    module.__spec__.loader = module.__loader__ = loader.real
    module.__class__ = ModuleType  # first: the module's own imports may lead back to it
    loader.real.exec_module(module)

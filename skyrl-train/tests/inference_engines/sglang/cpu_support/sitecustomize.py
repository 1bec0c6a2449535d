"""Test support: lets SGLang start on a machine that has no build of its kernels (there is none for plain CPUs).

With this folder in PYTHONPATH, Python reads this file at its start. `sgl_kernel` (SGLang's kernels) and `torchvision`
(whose published builds are for CUDA) can then be imported, as can any name from them; calling one raises. What SGLang
computes with `torch_native` attention and `pytorch` sampling calls none of them.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABSENT_PACKAGES = ("sgl_kernel", "torchvision")


class Absent:
    """Something that would be here on another machine."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not on this machine: see {__file__}")

    def __or__(self, other: Any) -> Any:
        return other  # annotations such as `Absent | None`

    __ror__ = __or__


class AbsentModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class AbsentFinder:
    """Import hook for the packages above and all their submodules."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] not in _ABSENT_PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


sys.meta_path.append(AbsentFinder())  # type: ignore[arg-type]  # last: an installed package comes first

"""A stand-in for the `sgl_kernel` wheel on a machine without a GPU.

The wheel loads ``libcuda.so.1`` when it is imported, and SGLang's modules import names from it
wherever they might need one. Here every such name exists, and calling one raises: a kernel that the
CPU path needs after all is noticed at once instead of computing nonsense. This package is found
only where a launcher puts its folder on ``PYTHONPATH`` (device ``cpu``); where a process may use a
GPU it refuses to be imported.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

_DRIVER = "/proc/driver/nvidia/version"

if os.path.exists(_DRIVER) and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    # A shell that exported PYTHONPATH for a worker without a GPU may start one with a GPU. SGLang
    # would find every kernel that it asks for here, and the first one that it calls would end it.
    raise ImportError(
        f"{__file__} stands in for sgl_kernel on workers without a GPU, and this process may use "
        "one: take its folder out of PYTHONPATH, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
    )


class KernelStandIn:
    """Takes the place of one kernel (or class of kernels): can be imported and named, not used."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.__name__} was called on a machine without a GPU: deltaserve's CPU support only "
            "stands in for sgl_kernel where SGLang never calls it; choose flags that stay on the "
            "torch-native path, or a model that needs no such kernel"
        )

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> KernelStandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return KernelStandIn(f"{self.__name__}.{name}")


def _stand_in(module: str, name: str) -> KernelStandIn:
    if name.startswith("__"):
        raise AttributeError(name)
    return KernelStandIn(f"{module}.{name}")


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> KernelStandIn:
        return _stand_in(self.__name__, name)


class _SubmoduleFinder(MetaPathFinder, Loader):
    """Makes any ``sgl_kernel.x.y`` importable as a module of stand-ins."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


sys.meta_path.insert(0, _SubmoduleFinder())


def __getattr__(name: str) -> KernelStandIn:
    return _stand_in(__name__, name)

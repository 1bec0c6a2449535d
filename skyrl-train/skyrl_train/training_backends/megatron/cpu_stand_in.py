"""Emulation of `torch.cuda` inside megatron-core, so that its parallel layers, schedules and optimizer run on a CPU.

Imported on a CPU only. It modifies only modules of megatron-core: each gets, instead of its global `torch`, a proxy
whose `cuda` maps to the CPU and whose factories create CPU tensors. Optimizers compare names of tensor types: these are
translated while models and optimizers are built (`emulate_gpu_tensors`).
"""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.transformer.moe import token_dispatcher

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like", "linspace")


class _Stream:
    """Stream of a device that computes in order."""

    def __init__(self, *_args: object, **_options: object):
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, _event: object = None) -> "_Stream":
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _Cuda(types.ModuleType):
    """Proxy of `torch.cuda` that maps to the CPU."""

    Stream = Event = _Stream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, _device: object = None) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def stream(self, _stream: object) -> Any:
        return nullcontext()

    def synchronize(self, _device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass


class _Torch(types.ModuleType):
    """Proxy of torch whose factories map the device "cuda" to the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return _on_cpu(found) if name in _FACTORIES else found


@cache
def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def make(*args: Any, **options: Any) -> Any:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        options.pop("pin_memory", None)
        return factory(*args, **options)

    return make


@cache
def install() -> None:
    """Install the proxy in every loaded module of megatron-core. Later imports are not covered."""
    view = _Torch("torch")
    vars(view)["cuda"] = _Cuda("torch.cuda")
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron.") or module is None:
            continue
        if getattr(module, "torch", None) is torch:
            vars(module)["torch"] = view
        for key, value in list(vars(module).items()):
            # Functions that torch.compile would fuse: on a CPU compiling them takes longer than a small run.
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if plain is not None:
                setattr(module, key, plain)
    # Token counts of experts are copied from the device to host lists; here they are on the host already.
    token_dispatcher.maybe_move_tensor_to_cpu = _copy_to_host
    # Recomputation saves and restores the device's random state; nothing here draws from it.
    parallel_random._get_cuda_rng_state = lambda *_args, **_options: torch.empty(0, dtype=torch.uint8)
    parallel_random._set_cuda_rng_state = lambda *_args, **_options: None


def _copy_to_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


@contextmanager
def emulate_gpu_tensors() -> Iterator[None]:
    """Make CPU tensors report GPU type names ("torch.cuda.FloatTensor"), and ignore moves to a GPU."""
    type_of, cuda = torch.Tensor.type, torch.Tensor.cuda

    def get_type_name(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        answer = type_of(tensor, *args, **options)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = get_type_name  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *_args, **_options: tensor  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = type_of, cuda  # type: ignore[method-assign]

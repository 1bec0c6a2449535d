"""Devices that a run can be planned for: published sizes and speeds, and this machine's processor."""

import os
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.config.generation import Device as Kind
from skyrl_train.errors import ConfigError

GB = 1e9


@dataclass(frozen=True)
class Device:
    """One GPU, or one worker process on the processor of this machine."""

    name: str
    kind: Kind
    memory: float
    """Bytes. Of a CPU: the machine's, which all processes share."""

    flops: float
    """bfloat16 operations a second of matrix products, without sparsity."""

    bandwidth: float
    """Bytes a second from its memory."""

    link: float
    """Bytes a second to another device of the machine, in each direction."""

    network: float = 50e9
    """Bytes a second to another machine, for each device (400 Gbit/s)."""

    @property
    def usable(self) -> float:
        """Bytes for tensors. On a GPU the allocator's blocks never fill all of it: 5 % is left to fragmentation."""
        return self.memory * (0.95 if self.kind == "cuda" else 1.0)

    @property
    def libraries(self) -> float:
        """Bytes that a process takes before its first tensor: the CUDA context, kernels and communicators of NCCL; on a
        CPU the imported libraries."""
        return 1.0 * GB if self.kind == "cuda" else 0.5 * GB


_TABLE = [
    # Memory as nvidia-smi reports it, speeds of the data sheets (dense bfloat16, memory, NVLink in one direction).
    Device("h100-80", "cuda", 81_559 * 2**20, 989e12, 3.35e12, 450e9),
    Device("h200", "cuda", 143_771 * 2**20, 989e12, 4.8e12, 450e9),
    Device("h20", "cuda", 97_871 * 2**20, 148e12, 4.0e12, 450e9),
    Device("h800-80", "cuda", 81_559 * 2**20, 989e12, 3.35e12, 200e9),
    Device("a100-80", "cuda", 81_920 * 2**20, 312e12, 2.04e12, 300e9),
    Device("a100-40", "cuda", 40_960 * 2**20, 312e12, 1.56e12, 300e9),
    Device("b200", "cuda", 183_359 * 2**20, 2_250e12, 8.0e12, 900e9),
    Device("l40s", "cuda", 46_068 * 2**20, 362e12, 0.864e12, 32e9),
    Device("l4", "cuda", 23_034 * 2**20, 121e12, 0.3e12, 16e9),
    Device("a10", "cuda", 23_028 * 2**20, 125e12, 0.6e12, 16e9),
    Device("rtx4090", "cuda", 24_564 * 2**20, 165e12, 1.01e12, 16e9),
]
DEVICES = {device.name: device for device in _TABLE}


def find_device(name: str) -> Device:
    """Return a device by its name in the table, or `cpu`.

    Raises:
        ConfigError: unknown name.
    """
    if name == "cpu":
        return get_processor()
    if name in DEVICES:
        return DEVICES[name]
    raise ConfigError(f"--device {name} is not known; choose one of {', '.join(['cpu', *DEVICES])}")


def get_processor() -> Device:
    """Return one worker process on this machine: one core, all of the machine's memory.

    Speeds of one core of an AMD EPYC with AVX-512 (docs/benchmarks.md, "One GRPO step"): 100 GFLOP/s in products, about
    10 GB/s from memory.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", "cpu", min(total, _read_group_limit()), 100e9, 10e9, 5e9)


def _read_group_limit() -> float:
    """Return the memory limit of this process's control group, infinity if it has none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return float(Path(path).read_text())
        except (OSError, ValueError):
            continue
    return float("inf")


def find_gpu() -> Device:
    """Return the first GPU of this machine: from the table by name, or with its memory and the speeds of the entry with
    the nearest memory size.
    """
    import torch  # optional and heavy: only a machine with a GPU is asked

    properties = torch.cuda.get_device_properties(0)
    words = properties.name.lower().replace("-", " ").split()
    memory = float(properties.total_memory)
    nearest = min(DEVICES.values(), key=lambda each: abs(each.memory - memory))
    named = [each for each in DEVICES.values() if each.name.split("-")[0] in words]
    known = min(named, key=lambda each: abs(each.memory - memory), default=nearest)
    return Device(properties.name, "cuda", memory, known.flops, known.bandwidth, known.link)

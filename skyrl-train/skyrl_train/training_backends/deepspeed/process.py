"""Process-wide state of DeepSpeed: its device, its copy of the process group, and its version.

Importing this module imports DeepSpeed, which selects its device at that moment (DS_ACCELERATOR).
"""

import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.runtime import constants, utils
from deepspeed.utils import groups

from skyrl_train.errors import ConfigError

_FEATURES = {
    (
        constants,
        "MANAGED_GRADIENT_ACCUMULATION",
    ): "before 0.19.4, stages 1 and 2 keep only the gradient of the last micro-batch of a step",
    (
        utils,
        "is_invalid_grad_norm",
    ): "stages 1 to 3 treat a non-finite gradient as one of norm 1 and step on it",
}
"""Names in DeepSpeed's modules whose absence indicates a bug that gives wrong numbers -> the bug."""


def check_version() -> None:
    """Reject DeepSpeed releases with bugs that change training results.

    Raises:
        ConfigError: names the bug.
    """
    for (module, name), fault in _FEATURES.items():
        if not hasattr(module, name):
            raise ConfigError(
                f"trainer.strategy=deepspeed: the installed deepspeed {deepspeed.__version__} is too old ({fault}). "
                "Install the version that the extra `deepspeed` names: scripts/setup.sh --extra deepspeed"
            )


def join_deepspeed(device: torch.device, timeout_seconds: float) -> None:
    """Initialize DeepSpeed with the default process group of this process. A collective.

    Raises:
        ConfigError: DeepSpeed was imported for another device.
    """
    check_version()
    accelerator = get_accelerator()
    assert accelerator is not None
    if accelerator.device_name() != device.type:
        name = accelerator.device_name()
        raise ConfigError(
            f"DeepSpeed computes on {name} in this process, but the model is on {device.type}: set the environment "
            f"variable DS_ACCELERATOR={device.type}, or trainer.placement.device={name}"
        )
    # DeepSpeed 0.19 calls collectives by the names they had before torch 2.13, which warns at each call.
    warnings.filterwarnings("ignore", r".torch\.distributed\.\w+_tensor. is deprecated", FutureWarning)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    if device.type == "cpu":
        # Collectives through shared memory would be compiled now, which takes minutes; gloo does not need them.
        # (Nothing else reads the table on a CPU, and filling it runs the compiler.)
        setattr(deepspeed.ops, "__compatible_ops__", {})  # noqa: B010  a name that only its __getattr__ knows
    if deepspeed_comm.cdb is None or not _is_current(groups._WORLD_GROUP):
        _forget_groups()
        # DeepSpeed would otherwise copy the default group with a timeout of its own.
        groups._WORLD_GROUP = dist.new_group(timeout=timedelta(seconds=timeout_seconds))
        deepspeed_comm.init_distributed(accelerator.communication_backend_name())


def _is_current(group: object) -> bool:
    """Return whether a process group belongs to the current default group."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _forget_groups() -> None:
    """Forget groups of a default group that was destroyed (in tests)."""
    deepspeed_comm.cdb = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP = {}

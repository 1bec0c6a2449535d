"""Starting Ray, or joining a running cluster."""

import os
import sys
from typing import Any

import ray
from loguru import logger

from skyrl_gym.waits import add_facts
from skyrl_train.config import SkyRLConfig
from skyrl_train.env_vars import forwarded_environment
from skyrl_train.errors import ConfigError
from skyrl_train.utils.gpus import GPU_REMEDY, NO_GPUS, check_local_gpus
from skyrl_train.utils.nodes import set_node_address

START_TIMEOUT = "timed out during startup"
"""Part of Ray's error when its processes did not start in time."""

LOCAL_CLUSTER = {
    "RAY_AUTH_MODE": "disabled",  # a cluster of this machine only, on loopback
    # Ray's default is 15: next to other programs the computing processes would starve, and calls time out.
    "RAY_worker_niceness": "0",
}
"""Environment of a cluster started on this machine, unless already set."""

WORKER_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # Activations are allocated and freed layer by layer. By default glibc returns freed memory at once, and a tenth of
    # a training step on a CPU is page faults; so a process keeps up to 256 MiB. Other C libraries ignore it.
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=268435456:glibc.malloc.mmap_threshold=33554432",
}
"""Environment of the processes of a run, unless the driver sets it."""


def start_ray(cfg: SkyRLConfig) -> None:
    """Join the cluster in RAY_ADDRESS, or start one on this machine with capacity for every process of the run.

    Raises:
        ConfigError: `trainer.placement.device=cuda`, and the cluster has no GPUs.

    On one machine Ray's CPUs are only scheduling slots: two cores run a policy of two ranks, an engine and the trainer.
    """
    environment = build_worker_environment()
    os.environ.update(
        # A driver started by `uv run` would otherwise make Ray rebuild its environment for every run.
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # All our calls are awaited; errors of a failed process's peers are in their logs.
        RAY_IGNORE_UNHANDLED_ERRORS="1",
    )
    runtime_env = {"env_vars": environment}
    wants_gpus = cfg.trainer.placement.device == "cuda"
    if address := os.environ.get("RAY_ADDRESS"):
        ray.init(runtime_env=runtime_env)
        set_node_address(ray.util.get_node_ip_address())
        add_facts(ray=ray.get_runtime_context().gcs_address)
        if wants_gpus and not ray.cluster_resources().get("GPU"):
            raise ConfigError(f"{NO_GPUS} the Ray cluster at RAY_ADDRESS={address} has none: {GPU_REMEDY}")
        return
    if wants_gpus:
        check_local_gpus()
    warn_of_few_cpus(cfg)
    os.environ.update(LOCAL_CLUSTER | os.environ)
    _start_local_cluster(max(os.cpu_count() or 1, num_processes(cfg)), runtime_env)
    add_facts(ray=ray.get_runtime_context().gcs_address)


def _start_local_cluster(num_cpus: int, runtime_env: dict[str, Any]) -> None:
    """Start Ray on this machine. On a loaded machine its 30 s for that may not suffice: it is started once more. The
    processes of the first start end with this one."""
    for is_last in (False, True):
        try:
            ray.init(
                address="local",  # not another user's cluster on this machine
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,  # every process has a log file in the run folder
                runtime_env=runtime_env,
                _node_ip_address="127.0.0.1",
            )
            return
        except Exception as error:  # Ray has no type for it
            if is_last or START_TIMEOUT not in str(error):
                raise
            logger.warning("Ray did not start within 30 s and is started again; this machine is loaded")


def warn_of_few_cpus(cfg: SkyRLConfig) -> None:
    """Warn if a model has more ranks than this machine has CPUs: they share CPUs, and a step takes longer."""
    placement, num_cpus = cfg.trainer.placement, os.cpu_count() or 1
    if placement.device == "cpu" and placement.policy_world_size > num_cpus:
        logger.warning(
            f"the policy has {placement.policy_world_size} ranks on {num_cpus} CPUs, which they have to share: set "
            f"trainer.placement.policy_num_gpus_per_node to at most {num_cpus}"
        )


def num_processes(cfg: SkyRLConfig) -> int:
    """Count the Ray processes of a run: the trainer, the ranks of policy, critic and reference, the engines."""
    placement = cfg.trainer.placement
    critic = placement.critic_world_size if cfg.trainer.critic.model.path else 0
    ref = placement.ref_world_size * cfg.trainer.num_reference_models
    return 1 + placement.policy_world_size + critic + ref + cfg.generator.num_inference_engines


def build_worker_environment() -> dict[str, str]:
    """Return the environment variables of every process of a run."""
    environment = WORKER_DEFAULTS | forwarded_environment(os.environ)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # Modules that the driver can import, including custom environments, are importable everywhere.
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in [os.getcwd(), *sys.path] if path))
    return environment

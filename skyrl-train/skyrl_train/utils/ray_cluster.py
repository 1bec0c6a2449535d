"""Starting Ray, or joining the cluster that is there."""

import os
import sys

import ray

from skyrl_train.config import SkyRLConfig

# Passed on to every process of a run, where set.
_FORWARDED = ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN", "HF_HOME", "HF_HUB_OFFLINE", "LOG_LEVEL", "OMP_NUM_THREADS")


def start_ray(cfg: SkyRLConfig) -> None:
    """Joins the cluster named by RAY_ADDRESS, or starts one on this machine with room for every process of the run.

    On one machine a CPU is only a place in the queue: two cores run a policy of two ranks, an engine and the trainer.
    """
    environment = worker_environment()
    os.environ.update(
        # A driver started by `uv run` would otherwise have Ray rebuild its environment for every run.
        RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        # Every call of ours is waited for; what the peers of a failed one raise as well is in their logs.
        RAY_IGNORE_UNHANDLED_ERRORS="1",
    )
    runtime_env = {"env_vars": environment}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(runtime_env=runtime_env)
        return
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a cluster of this machine alone, on loopback
    ray.init(
        num_cpus=max(os.cpu_count() or 1, num_processes(cfg)),
        include_dashboard=False,
        log_to_driver=False,  # every process of ours has a log file in the run folder
        runtime_env=runtime_env,
        _node_ip_address="127.0.0.1",
    )


def num_processes(cfg: SkyRLConfig) -> int:
    """Ray processes of a run: the trainer, the ranks of policy, critic and reference, the engines."""
    placement = cfg.trainer.placement
    critic = placement.critic_world_size if cfg.trainer.critic.model.path else 0
    ref = placement.ref_world_size if cfg.trainer.algorithm.uses_reference_model else 0
    return 1 + placement.policy_world_size + critic + ref + cfg.generator.num_inference_engines


def worker_environment() -> dict[str, str]:
    """Environment variables of every process of a run."""
    environment = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # Modules that the driver can import, a user's environments among them, are importable everywhere.
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in [os.getcwd(), *sys.path] if path))
    return environment

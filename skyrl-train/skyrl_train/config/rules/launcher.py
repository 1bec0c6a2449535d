"""Rules of `trainer.placement.launcher=inline`: settings that a single process without Ray cannot support are rejected
by name.
"""

import os

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.rules.checks import check_rule, get_setting

_INLINE = "trainer.placement.launcher=inline"
_USE_RAY = "use trainer.placement.launcher=ray"


def check_cluster(config: SkyRLConfig) -> None:
    """Check that no cluster is configured that the launcher would not join."""
    if config.trainer.placement.launcher != "inline":
        return
    address = os.environ.get("RAY_ADDRESS")
    check_rule(
        not address,
        f"RAY_ADDRESS={address} names a Ray cluster, which {_INLINE} does not use: unset the variable, or {_USE_RAY}",
    )


def check_inline_engines(config: SkyRLConfig) -> None:
    """Check that the engines of the run fit into one process."""
    generator = config.generator
    if config.trainer.placement.launcher != "inline" or not generator.run_engines_locally:
        return
    check_rule(
        EngineRegistry.get_requirements(generator.backend).is_in_process,
        f"generator.backend={generator.backend} runs in separate processes, which {_INLINE} does not start; use "
        "generator.backend=native, or start the server and list it in generator.remote_inference_engine_urls with "
        f"generator.run_engines_locally=false, or {_USE_RAY}",
    )
    strategy, backend = generator.weight_sync_strategy, generator.weight_sync_backend
    check_rule(
        strategy != "cuda_ipc",
        f"generator.weight_sync_strategy=cuda_ipc shares memory between processes, but {_INLINE} has only "
        "one process; use auto",
    )
    check_rule(
        not (strategy == "broadcast" and backend == "nccl"),
        f"generator.weight_sync_strategy=broadcast with generator.weight_sync_backend={backend} needs separate GPUs "
        f"for trainer and engine, but {_INLINE} has one for both; use generator.weight_sync_strategy=auto",
    )


def check_ranks(config: SkyRLConfig) -> None:
    """Check that no model of the run has more ranks than the launcher starts."""
    if config.trainer.placement.launcher != "inline":
        return
    models = ["policy"]
    models += ["critic"] if config.trainer.critic.model.path is not None else []
    models += ["ref"] if config.trainer.num_reference_models else []
    for model in models:
        for count in ("num_nodes", "num_gpus_per_node"):
            name = f"trainer.placement.{model}_{count}"
            value = get_setting(config, name)
            check_rule(
                value == 1,
                f"{name}={value} must be 1 with {_INLINE}, where each model has one rank in the main process; remove "
                f"it, or {_USE_RAY}",
            )

"""Rules of the models: optimizers, adapters, sharding over workers, shared devices."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.models import FSDPConfig, LoRAConfig, OptimizerConfig
from skyrl_train.config.rules.checks import check_not_negative, check_positive, check_rule


def check_models(config: SkyRLConfig) -> None:
    """Check all rules of this file, for the models of this run."""
    trainer, placement = config.trainer, config.trainer.placement
    check_positive(
        config,
        (
            *(f"trainer.placement.{model}_num_nodes" for model in ("policy", "critic", "ref")),
            *(f"trainer.placement.{model}_num_gpus_per_node" for model in ("policy", "critic", "ref")),
            *(f"trainer.{model}.sequence_parallel_size" for model in ("policy", "critic", "ref")),
            "trainer.logprobs_chunk_size",
            "trainer.worker_timeout_seconds",
            "trainer.max_consecutive_skipped_updates",
        ),
    )
    check_not_negative(config, ["trainer.stop_timeout_seconds"])
    check_optimizer(trainer.policy.optimizer_config, "trainer.policy.optimizer_config")
    check_adapters(trainer.policy.model.lora, "trainer.policy.model.lora")
    check_division(trainer.policy, "policy", placement.policy_world_size)
    if trainer.critic.model.path is not None:
        check_optimizer(trainer.critic.optimizer_config, "trainer.critic.optimizer_config")
        check_adapters(trainer.critic.model.lora, "trainer.critic.model.lora")
        check_division(trainer.critic, "critic", placement.critic_world_size)
        name = trainer.algorithm.value_head_prefix
        check_rule(
            name.isidentifier() and name != "backbone",
            f"trainer.algorithm.value_head_prefix={name!r} must be a Python identifier, such as value_head",
        )
    if trainer.num_reference_models:
        check_division(trainer.ref, "ref", placement.ref_world_size)
    check_rule(
        trainer.algorithm.uses_reference_model or not trainer.update_ref_every_epoch,
        "trainer.update_ref_every_epoch=true needs a reference model; set trainer.algorithm.use_kl_loss=true or "
        "trainer.algorithm.use_kl_in_reward=true, or remove it",
    )
    _check_shared_devices(config)


def check_optimizer(optimizer: OptimizerConfig, name: str) -> None:
    """Check the hyperparameters of AdamW. `name` is the name of the section."""
    check_rule(optimizer.lr >= 0, f"{name}.lr must be 0 or greater; got {optimizer.lr}")
    check_rule(
        len(optimizer.adam_betas) == 2 and all(0 <= beta < 1 for beta in optimizer.adam_betas),
        f"{name}.adam_betas must be two numbers from 0 to below 1; got {optimizer.adam_betas}",
    )
    check_rule(optimizer.weight_decay >= 0, f"{name}.weight_decay must be 0 or greater; got {optimizer.weight_decay}")
    check_rule(
        optimizer.max_grad_norm > 0,
        f"{name}.max_grad_norm must be greater than 0; got {optimizer.max_grad_norm} (.inf = no clipping)",
    )
    warmup = optimizer.num_warmup_steps
    check_rule(warmup >= 0, f"{name}.num_warmup_steps must be 0 or greater; got {warmup}")
    check_rule(
        warmup == 0 or optimizer.scheduler != "constant",
        f"{name}.num_warmup_steps={warmup} has no effect with {name}.scheduler=constant; use constant_with_warmup",
    )


def check_adapters(lora: LoRAConfig, name: str, *, dropout_allowed: bool = False) -> None:
    """Check low-rank adapters. `name` is the name of the section. Reinforcement learning does not allow dropout."""
    check_rule(lora.rank >= 0, f"{name}.rank must be 0 (no adapters) or greater; got {lora.rank}")
    check_rule(lora.alpha > 0, f"{name}.alpha must be greater than 0; got {lora.alpha}")
    check_rule(0 <= lora.dropout < 1, f"{name}.dropout must be from 0 to below 1; got {lora.dropout}")
    check_rule(
        dropout_allowed or lora.dropout == 0,
        f"{name}.dropout={lora.dropout} must be 0 in reinforcement learning: with dropout, log-probs (and values) of "
        "the same weights differ between forward passes, so that the first probability ratio is not 1",
    )


def check_division(model: object, name: str, world_size: int) -> None:
    """Check that `trainer.<name>.{fsdp_config,sequence_parallel_size}` fit the model's number of workers."""
    fsdp: FSDPConfig = model.fsdp_config  # type: ignore[attr-defined]
    ranks: int = model.sequence_parallel_size  # type: ignore[attr-defined]
    size = fsdp.fsdp_size if fsdp.fsdp_size != -1 else world_size
    check_rule(
        size > 0 and world_size % size == 0,
        f"trainer.{name}.fsdp_config.fsdp_size={fsdp.fsdp_size} must be -1 or divide the model's {world_size} workers",
    )
    group = fsdp.reshard_after_forward
    check_rule(
        isinstance(group, bool) or (1 < group < size and size % group == 0),
        f"trainer.{name}.fsdp_config.reshard_after_forward={group} must be true, false, or a divisor of the {size} "
        f"ranks that shard the model, other than 1 and {size}",
    )
    check_rule(
        world_size % ranks == 0,
        f"trainer.{name}.sequence_parallel_size={ranks} must divide the model's {world_size} workers "
        f"(trainer.placement.{name}_num_nodes x {name}_num_gpus_per_node)",
    )


def _check_shared_devices(config: SkyRLConfig) -> None:
    trainer, placement, generator = config.trainer, config.trainer.placement, config.generator
    if placement.device == "cpu":
        return  # counts are processes on a CPU: any number can share the cores
    engine_gpus = generator.num_inference_engines * generator.engine_world_size
    check_rule(
        not placement.colocate_all or placement.policy_world_size == engine_gpus,
        "trainer.placement.colocate_all=true places the engines on the policy's GPUs, but the policy has "
        f"{placement.policy_world_size} GPUs (trainer.placement.policy_num_nodes x policy_num_gpus_per_node) and the "
        f"engines have {engine_gpus} (generator.num_inference_engines={generator.num_inference_engines} x "
        f"{generator.engine_world_size} GPUs each); make them equal",
    )
    shares = {"ref": placement.colocate_all or placement.colocate_policy_ref, "critic": placement.colocate_all}
    has = {"ref": trainer.num_reference_models > 0, "critic": trainer.critic.model.path is not None}
    policy = (placement.policy_num_nodes, placement.policy_num_gpus_per_node)
    for name, title in (("ref", "reference model"), ("critic", "critic")):
        own = (getattr(placement, f"{name}_num_nodes"), getattr(placement, f"{name}_num_gpus_per_node"))
        check_rule(
            policy == own or not (has[name] and shares[name]),
            f"policy and {title} share GPUs, so they need the same number; got trainer.placement.policy_num_nodes x "
            f"policy_num_gpus_per_node = {policy[0]} x {policy[1]} and {name}_num_nodes x {name}_num_gpus_per_node = "
            f"{own[0]} x {own[1]}",
        )

"""What must hold between settings before anything starts. Types and choices are `typed.py`'s; here are the rules.

Every violation is a ConfigError that names the setting, its value, the rule and the likely fix. Torch, the registries
and the environments are imported only when a rule asks for them.
"""

import math
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl_train.config.config import SkyRLConfig, get_config_as_dict
from skyrl_train.config.generation import SamplingParams
from skyrl_train.config.models import FSDPConfig, OptimizerConfig
from skyrl_train.config.typed import build, nearest_name
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_GENERATOR_AT_LEAST_ONE = (
    "trainer.eval_batch_size",
    "trainer.max_prompt_length",
    "generator.num_inference_engines",
    "generator.max_num_seqs",
    "generator.n_samples_per_prompt",
    "generator.eval_n_samples_per_prompt",
    "generator.max_input_length",
    "generator.max_turns",
)
_GENERATOR_POSITIVE = (
    "generator.weight_transfer_threshold_cuda_ipc_GB",
    "generator.request_timeout_seconds",
    "environment.skyrl_gym.env_timeout_seconds",
)
_GENERATOR_NOT_NEGATIVE = ("generator.max_rollout_retries", "environment.skyrl_gym.max_env_workers")
_TRAINER_AT_LEAST_ONE = (
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.epochs",
    "trainer.max_training_steps",
    "trainer.update_epochs_per_batch",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "trainer.algorithm.max_seq_len",
    "trainer.algorithm.kl_ctrl.horizon",
)
_TRAINER_POSITIVE = ("trainer.worker_timeout_seconds", "trainer.algorithm.kl_ctrl.kl_target")
_TRAINER_NOT_NEGATIVE = (
    "trainer.algorithm.kl_loss_coef",
    "trainer.algorithm.entropy_loss_coef",
    "trainer.algorithm.eps_clip_low",
    "trainer.algorithm.eps_clip_high",
)
_PATHS = ("trainer.run_dir", "trainer.ckpt_path", "trainer.export_path", "trainer.resume_path")
_SET_BY_THE_GENERATOR = {"add_generation_prompt", "chat_template", "continue_final_message", "return_dict", "tokenize"}


def validate_cfg(cfg: "SkyRLConfig | Mapping[str, Any] | DictConfig") -> SkyRLConfig:
    """The settings of a training run, typed and checked, with every `auto` replaced by what it means on this machine.

    Call it on the driver, before Ray starts. Custom losses and advantage estimators must be registered by then.

    Raises:
        ConfigError: a setting is unknown, not supported yet, of the wrong type, impossible or contradictory.
    """
    config = validate_generator_cfg(cfg)
    _check_bounds(config, _TRAINER_AT_LEAST_ONE, _TRAINER_POSITIVE, _TRAINER_NOT_NEGATIVE)
    _require(bool(config.data.train_data), "data.train_data is empty; name at least one training set")
    _require(
        config.generator.model_name == config.trainer.policy.model.path,
        f"generator.model_name={config.generator.model_name!r} must be trainer.policy.model.path="
        f"{config.trainer.policy.model.path!r}: engines receive the policy's weights; leave generator.model_name out",
    )
    _require(
        config.generator.sampling_params.temperature > 0,
        f"generator.sampling_params.temperature={config.generator.sampling_params.temperature} must be greater than 0: "
        "greedy answers to one prompt are all the same, so there is nothing to learn from them",
    )
    _check_checkpoints(config)
    _check_optimizer(config.trainer.policy.optimizer_config)
    validate_batch_sizes(config)
    _check_algorithm(config)
    _check_placement(config)
    return config


def validate_generator_cfg(cfg: "SkyRLConfig | Mapping[str, Any] | DictConfig") -> SkyRLConfig:
    """The settings of a run that only generates and evaluates: all but the rules about training. See `validate_cfg`."""
    config_type = type(cfg) if isinstance(cfg, SkyRLConfig) else SkyRLConfig
    config = config_type.from_dict(get_config_as_dict(cfg))  # a copy; settings made in Python are type-checked here
    _resolve_automatic_choices(config)
    _check_bounds(config, _GENERATOR_AT_LEAST_ONE, _GENERATOR_POSITIVE, _GENERATOR_NOT_NEGATIVE)
    _check_paths(config)
    _check_lengths(config)
    _check_sampling(config.generator.sampling_params, "generator.sampling_params")
    _check_sampling(config.generator.eval_sampling_params, "generator.eval_sampling_params")
    _check_evaluation_samples(config)
    _check_chat_template(config)
    _check_loggers(config)
    return config


def validate_batch_sizes(config: SkyRLConfig) -> None:
    """Batches must divide evenly: into mini-batches, those over the policy workers, each share into micro-batches."""
    trainer, placement, samples = config.trainer, config.trainer.placement, config.generator.n_samples_per_prompt
    _check_bounds(config, _TRAINER_AT_LEAST_ONE[:4], (), ())
    train, mini, workers = trainer.train_batch_size, trainer.policy_mini_batch_size, placement.policy_world_size
    _require(
        train >= mini,
        f"trainer.train_batch_size >= policy_mini_batch_size must hold; got {train} < {mini}: lower "
        "trainer.policy_mini_batch_size",
    )
    _require(
        train % mini == 0,
        f"trainer.train_batch_size {train} should be divisible by policy_mini_batch_size {mini}: otherwise prompts are "
        "generated and never trained on",
    )
    _require(
        mini * samples % workers == 0,
        f"trainer.policy_mini_batch_size {mini} times generator.n_samples_per_prompt {samples} = {mini * samples} "
        f"sequences should be divisible by the {workers} policy workers (trainer.placement.policy_num_nodes x "
        "policy_num_gpus_per_node), so that each has as many",
    )
    share, micro = mini * samples // workers, trainer.micro_train_batch_size_per_gpu
    _require(
        share % micro == 0,
        f"normalized policy_mini_batch_size_per_gpu {share} should be divisible by micro_train_batch_size_per_gpu "
        f"{micro}; it is trainer.policy_mini_batch_size {mini} x generator.n_samples_per_prompt {samples} / {workers} "
        "policy workers",
    )
    multiple = workers
    if trainer.algorithm.uses_reference_model:
        multiple = math.lcm(workers, placement.ref_world_size)
    _require(
        train * samples >= multiple,
        f"trainer.train_batch_size {train} times generator.n_samples_per_prompt {samples} must be at least {multiple}, "
        "the least common multiple of the data parallel sizes of policy and reference model",
    )


def validate_environments(config: SkyRLConfig) -> None:
    """Every environment that the settings name must be registered, and have the settings its section gives it: what is
    misspelt would be read by nobody.

    Call it where custom environments have been registered (they are registered per process), before the first rollout.
    """
    from skyrl_gym.envs.registration import env_class_of, registry

    names = {"environment.env_class": config.environment.env_class}
    names |= {f"section environment.skyrl_gym.{name}": name for name in config.environment.skyrl_gym.env_configs}
    for setting, name in names.items():
        near = nearest_name(name, sorted(registry))
        _require(
            name in registry,
            f"{setting}: no environment {name!r} is registered"
            + (f"; did you mean {near}?" if near else f"; registered are {', '.join(sorted(registry))}"),
        )
    for name, section in config.environment.skyrl_gym.env_configs.items():
        config_class = getattr(env_class_of(registry[name]), "config_class", None)
        if config_class is not None:
            try:
                build(config_class, section, f"environment.skyrl_gym.{name}", config_class)
            except ConfigError:
                raise
            except ValueError as error:  # a rule of the environment's own
                raise ConfigError(f"environment.skyrl_gym.{name}: {error}") from error


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _value(config: SkyRLConfig, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _check_bounds(
    config: SkyRLConfig, at_least_one: tuple[str, ...], positive: tuple[str, ...], not_negative: tuple[str, ...]
) -> None:
    for name in (*at_least_one, *positive):
        value = _value(config, name)
        _require(value is None or value > 0, f"{name} must be greater than 0; got {value}")
    for name in not_negative:
        value = _value(config, name)
        _require(value >= 0, f"{name} must be 0 or greater; got {value}")


def _resolve_automatic_choices(config: SkyRLConfig) -> None:
    device = config.trainer.placement.resolved_device()
    _require(
        not (device == "cpu" and config.generator.weight_sync_backend == "nccl"),
        "generator.weight_sync_backend=nccl needs GPUs, but models run on the CPU (trainer.placement.device="
        f"{config.trainer.placement.device}); use auto or gloo",
    )
    config.trainer.placement.device = device
    config.generator.backend = config.generator.resolved_backend()
    config.generator.weight_sync_backend = config.generator.resolved_weight_sync_backend(device)


def _check_paths(config: SkyRLConfig) -> None:
    for name in _PATHS:
        path = _value(config, name)
        if path is None:
            continue
        _require(path != "", f"{name} is empty; give a folder, or leave the setting out")
        _require(
            not path.startswith(("s3://", "gs://", "gcs://")),
            f"{name}={path} is not supported yet: cloud storage; give a folder that every machine of the run can see",
        )
    for name in ("trainer.policy.model.path", "trainer.ref.model.path", "generator.model_name"):
        _require(_value(config, name) != "", f"{name} is empty; give a folder or a name on the Hugging Face hub")


def _check_lengths(config: SkyRLConfig) -> None:
    prompt, limit, turns = (
        config.trainer.max_prompt_length,
        config.generator.max_input_length,
        config.generator.max_turns,
    )
    _require(
        turns > 1 or limit == prompt,
        f"generator.max_input_length={limit} must be trainer.max_prompt_length={prompt} when generator.max_turns is 1: "
        "the prompt is all the engine is given",
    )
    _require(
        limit >= prompt,
        f"generator.max_input_length={limit} must be at least trainer.max_prompt_length={prompt}: it counts the prompt "
        "and what the turns before added",
    )


def _check_sampling(params: SamplingParams, name: str) -> None:
    _require(params.max_generate_length > 0, f"{name}.max_generate_length must be greater than 0")
    _require(params.temperature >= 0, f"{name}.temperature must be 0 (greedy) or greater; got {params.temperature}")
    _require(0 < params.top_p <= 1, f"{name}.top_p must be above 0 and at most 1 (1 = off); got {params.top_p}")
    _require(params.top_k == -1 or params.top_k > 0, f"{name}.top_k must be -1 (off) or above 0; got {params.top_k}")
    _require(0 <= params.min_p <= 1, f"{name}.min_p must be from 0 (off) to 1; got {params.min_p}")
    _require(
        params.repetition_penalty > 0,
        f"{name}.repetition_penalty must be greater than 0 (1 = off); got {params.repetition_penalty}",
    )
    _require(
        params.logprobs in (None, 0),
        f"{name}.logprobs={params.logprobs} is not supported: 0 keeps the log-prob of every drawn token, which is all "
        "that training reads; null keeps none",
    )
    _require("" not in (params.stop or []), f"{name}.stop holds an empty text, which would end every answer at once")
    declared = {"max_tokens", *vars(params)} - {"additional_kwargs"}
    twice = sorted(declared & set(params.additional_kwargs))
    _require(not twice, f"{name}.additional_kwargs may not hold {', '.join(twice)}: {name} has settings for that")


def _check_evaluation_samples(config: SkyRLConfig) -> None:
    generator = config.generator
    _require(
        generator.eval_n_samples_per_prompt == 1 or generator.eval_sampling_params.temperature > 0,
        f"generator.eval_n_samples_per_prompt={generator.eval_n_samples_per_prompt} with "
        "generator.eval_sampling_params.temperature=0 gives the same answer that many times; raise the temperature, or "
        "ask for 1 sample",
    )


def _check_chat_template(config: SkyRLConfig) -> None:
    from skyrl_train.generators.chat_templates import get_custom_chat_template

    generator = config.generator
    _require(
        generator.chat_template.source == "name" or generator.chat_template.name_or_path is not None,
        "generator.chat_template.source=file needs generator.chat_template.name_or_path, the path of a Jinja file",
    )
    get_custom_chat_template(generator.chat_template)
    reserved = sorted(_SET_BY_THE_GENERATOR & set(generator.chat_template_kwargs))
    _require(
        not reserved,
        f"generator.chat_template_kwargs may not hold {', '.join(reserved)}: the generator sets them itself "
        "(for a template of your own: generator.chat_template)",
    )
    if (
        generator.use_conversation_multi_turn
        and generator.sampling_params.stop
        and not generator.append_eos_token_after_stop_str_in_multi_turn
    ):
        warnings.warn(
            "generator.sampling_params.stop is set and generator.append_eos_token_after_stop_str_in_multi_turn is "
            "false: turns that end with a stop text will lack the end-of-sequence token that the chat template puts "
            "after a message",
            stacklevel=4,
        )


def _check_loggers(config: SkyRLConfig) -> None:
    if "wandb" not in config.trainer.loggers or os.environ.get("WANDB_API_KEY"):
        return
    _require(
        os.environ.get("WANDB_MODE") in ("offline", "disabled"),
        "trainer.logger=wandb needs the environment variable WANDB_API_KEY; set it, or WANDB_MODE=offline to keep the "
        "run on this machine, or trainer.logger=console",
    )


def _check_checkpoints(config: SkyRLConfig) -> None:
    trainer = config.trainer
    _require(
        trainer.max_ckpts_to_keep == -1 or trainer.max_ckpts_to_keep > 0,
        f"trainer.max_ckpts_to_keep must be -1 (keep all) or greater than 0; got {trainer.max_ckpts_to_keep}"
        + (" (to write none, set trainer.ckpt_interval=0)" if trainer.max_ckpts_to_keep == 0 else ""),
    )
    _require(
        trainer.resume_mode != "from_path" or trainer.resume_path is not None,
        "trainer.resume_mode=from_path needs trainer.resume_path, the global_step_N folder to go on from",
    )
    _require(
        trainer.resume_mode == "from_path" or trainer.resume_path is None,
        f"trainer.resume_path={trainer.resume_path} is read only with trainer.resume_mode=from_path; got "
        f"trainer.resume_mode={trainer.resume_mode}",
    )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    name = "trainer.policy.optimizer_config"
    _require(optimizer.lr >= 0, f"{name}.lr must be 0 or greater; got {optimizer.lr}")
    _require(
        len(optimizer.adam_betas) == 2 and all(0 <= beta < 1 for beta in optimizer.adam_betas),
        f"{name}.adam_betas must be two numbers from 0 to below 1; got {optimizer.adam_betas}",
    )
    _require(optimizer.weight_decay >= 0, f"{name}.weight_decay must be 0 or greater; got {optimizer.weight_decay}")
    _require(
        optimizer.max_grad_norm > 0,
        f"{name}.max_grad_norm must be greater than 0; got {optimizer.max_grad_norm} (.inf = no clipping)",
    )
    warmup = optimizer.num_warmup_steps
    _require(warmup >= 0, f"{name}.num_warmup_steps must be 0 or greater; got {warmup}")
    _require(
        warmup == 0 or optimizer.scheduler != "constant",
        f"{name}.num_warmup_steps={warmup} is not read by {name}.scheduler=constant; use constant_with_warmup",
    )


def _check_algorithm(config: SkyRLConfig) -> None:
    algorithm = config.trainer.algorithm
    _require(
        algorithm.eps_clip_low < 1,
        f"trainer.algorithm.eps_clip_low={algorithm.eps_clip_low} must be below 1: the ratio is clipped at 1 - this",
    )
    _require(
        not (algorithm.use_kl_in_reward and algorithm.use_kl_loss),
        "trainer.algorithm.use_kl_in_reward and trainer.algorithm.use_kl_loss are both true, and would count the KL "
        "divergence twice; set one of them to false",
    )
    _require(
        algorithm.kl_ctrl.type == "fixed" or algorithm.use_kl_in_reward,
        "trainer.algorithm.kl_ctrl.type=adaptive steers the KL divergence in the reward; it needs "
        "trainer.algorithm.use_kl_in_reward=true (and use_kl_loss=false)",
    )
    _check_registered(config)


def _check_registered(config: SkyRLConfig) -> None:
    from skyrl_train.algorithms.advantages import AdvantageEstimatorRegistry
    from skyrl_train.algorithms.losses import PolicyLossRegistry

    algorithm = config.trainer.algorithm
    for setting, name, registry, register in (
        ("advantage_estimator", algorithm.advantage_estimator, AdvantageEstimatorRegistry, "advantage_estimator"),
        ("policy_loss_type", algorithm.policy_loss_type, PolicyLossRegistry, "policy_loss"),
    ):
        available = registry.list_available()
        _require(
            name in available,
            f"trainer.algorithm.{setting} must be one of {', '.join(available)}; got {name!r} (one of your own is "
            f"registered with skyrl_train.utils.ppo_utils.register_{register} before the settings are checked)",
        )


def _check_placement(config: SkyRLConfig) -> None:
    trainer, placement, engines = config.trainer, config.trainer.placement, config.generator.num_inference_engines
    with_reference = trainer.algorithm.uses_reference_model
    _check_sharding(trainer.policy.fsdp_config, "trainer.policy", placement.policy_world_size)
    if with_reference:
        _check_sharding(trainer.ref.fsdp_config, "trainer.ref", placement.ref_world_size)
    if placement.device == "cpu":
        return  # counts are processes there: any number of them shares the cores
    _require(
        not placement.colocate_all or placement.policy_world_size == engines,
        "trainer.placement.colocate_all=true puts one engine on each policy GPU, but there are "
        f"{placement.policy_world_size} policy GPUs (trainer.placement.policy_num_nodes x policy_num_gpus_per_node) "
        f"and generator.num_inference_engines={engines}; make them equal",
    )
    policy = (placement.policy_num_nodes, placement.policy_num_gpus_per_node)
    reference = (placement.ref_num_nodes, placement.ref_num_gpus_per_node)
    _require(
        policy == reference or not with_reference or not (placement.colocate_all or placement.colocate_policy_ref),
        f"policy and reference model share GPUs, so they need as many; got trainer.placement.policy_num_nodes x "
        f"policy_num_gpus_per_node = {policy[0]} x {policy[1]} and ref_num_nodes x ref_num_gpus_per_node = "
        f"{reference[0]} x {reference[1]}",
    )


def _check_sharding(fsdp: FSDPConfig, name: str, world_size: int) -> None:
    size = fsdp.fsdp_size if fsdp.fsdp_size != -1 else world_size
    _require(
        size > 0 and world_size % size == 0,
        f"{name}.fsdp_config.fsdp_size={fsdp.fsdp_size} must be -1 or divide the model's {world_size} workers",
    )
    group = fsdp.reshard_after_forward
    _require(
        isinstance(group, bool) or (1 < group < size and size % group == 0),
        f"{name}.fsdp_config.reshard_after_forward={group} must be true, false, or a divisor of the {size} ranks that "
        f"divide the model, other than 1 and {size}",
    )

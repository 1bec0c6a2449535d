"""Rules of the DeepSpeed backend's settings."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.deepspeed import DeepSpeedEvalConfig, DeepSpeedTrainConfig
from skyrl_train.config.models import CriticConfig, PolicyConfig
from skyrl_train.config.rules.checks import check_rule
from skyrl_train.config.typed import iter_settings


def check_deepspeed(config: SkyRLConfig) -> None:
    """Check that the settings of all models are supported by the backend and do not contradict each other."""
    trainer = config.trainer
    _check_trained(trainer.policy, "trainer.policy", bf16=trainer.bf16)
    if trainer.critic.model.path is not None:
        _check_trained(trainer.critic, "trainer.critic", bf16=trainer.bf16)
    if trainer.algorithm.uses_reference_model:
        _check_scoring(trainer.ref.deepspeed_config, "trainer.ref.deepspeed_config")


def _check_trained(model: PolicyConfig | CriticConfig, model_name: str, *, bf16: bool) -> None:
    config, name = model.deepspeed_config, f"{model_name}.deepspeed_config"
    zero, zero_name = config.zero_optimization, f"{name}.zero_optimization"
    check_rule(zero.stage in (0, 1, 2, 3), f"{zero_name}.stage must be 0, 1, 2 or 3; got {zero.stage}")
    check_rule(
        zero.offload_param.device == "none" or zero.stage == 3,
        f"{zero_name}.offload_param.device={zero.offload_param.device} needs stage 3, which shards parameters; got "
        f"{zero_name}.stage={zero.stage}",
    )
    check_rule(
        zero.offload_optimizer.device == "none" or zero.stage > 0,
        f"{zero_name}.offload_optimizer.device={zero.offload_optimizer.device} needs stage 1, 2 or 3; got "
        f"{zero_name}.stage={zero.stage}",
    )
    check_rule(
        zero.zero_hpz_partition_size == 1,
        f"{zero_name}.zero_hpz_partition_size={zero.zero_hpz_partition_size} must be 1: the second copy of the weights "
        "(ZeRO++) is not supported",
    )
    for setting in ("zero_quantized_weights", "zero_quantized_gradients"):
        check_rule(
            not getattr(zero, setting),
            f"{zero_name}.{setting}=true is not supported: the model would compute with different weights than the "
            "engines, or train on different gradients than those of its loss; set it to false",
        )
    check_rule(
        not bf16 or config.torch_autocast.enabled or zero.stage > 0,
        f"{name}.torch_autocast.enabled=false makes parameters bfloat16 (trainer.bf16=true), but stage 0 keeps no "
        f"float32 master weights: set {zero_name}.stage=1, 2 or 3, or keep torch_autocast enabled",
    )
    clipping, max_norm = config.gradient_clipping, model.optimizer_config.max_grad_norm
    check_rule(
        clipping is None or clipping == max_norm,
        f"{name}.gradient_clipping={clipping} must be {model_name}.optimizer_config.max_grad_norm={max_norm}, the "
        "norm that gradients are clipped to; remove gradient_clipping",
    )
    _check_amounts(config, name)


def _check_scoring(config: DeepSpeedEvalConfig, name: str) -> None:
    zero = config.zero_optimization
    check_rule(
        zero.stage in (0, 3),
        f"{name}.zero_optimization.stage={zero.stage} must be 0 or 3: stages 1 and 2 shard optimizer state and "
        "gradients, which a model that only scores does not have",
    )
    _check_amounts(config, name)


def _check_amounts(config: DeepSpeedTrainConfig | DeepSpeedEvalConfig, name: str) -> None:
    for full_name, section, field in iter_settings(config, name):
        value = getattr(section, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and field.name != "gradient_clipping":
            lowest = 1 if field.name in ("reduce_bucket_size", "sub_group_size") else 0
            check_rule(
                value == int(value) and value >= lowest,
                f"{full_name} must be an integer of at least {lowest}; got {value}",
            )

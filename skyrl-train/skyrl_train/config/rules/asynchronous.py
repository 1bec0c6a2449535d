"""Rules of asynchronous training (`trainer.fully_async`)."""

import warnings
from dataclasses import fields

from skyrl_train.config.asynchronous import FullyAsyncConfig
from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.requirements import PolicyLossRegistry
from skyrl_train.config.rules.checks import check_rule

_NAME = "trainer.fully_async"


def replace_deprecated_async_settings(config: SkyRLConfig) -> None:
    """Replace `clear_kv_cache_on_weight_sync` by `kv_after_sync`, with a warning."""
    settings = config.trainer.fully_async
    if not settings.clear_kv_cache_on_weight_sync:
        return
    check_rule(
        settings.kv_after_sync in ("keep", "clear"),
        f"{_NAME}.clear_kv_cache_on_weight_sync=true means {_NAME}.kv_after_sync=clear, but it is "
        f"{settings.kv_after_sync}; remove clear_kv_cache_on_weight_sync",
    )
    warnings.warn(
        f"{_NAME}.clear_kv_cache_on_weight_sync is deprecated: using {_NAME}.kv_after_sync=clear",
        FutureWarning,
        stacklevel=4,
    )
    settings.clear_kv_cache_on_weight_sync, settings.kv_after_sync = False, "clear"


def check_asynchronous(config: SkyRLConfig) -> None:
    """Check all rules of this file."""
    settings = config.trainer.fully_async
    if not settings.enabled:
        _check_unused(settings)
        return
    _check_numbers(config)
    _check_others(config)
    _check_correction(config)


def _check_unused(settings: FullyAsyncConfig) -> None:
    defaults = FullyAsyncConfig()
    for name in (field.name for field in fields(settings)):
        value = getattr(settings, name)
        check_rule(
            value == getattr(defaults, name),
            f"{_NAME}.{name}={value} has an effect only with {_NAME}.enabled=true; set that, or remove it",
        )


def _check_numbers(config: SkyRLConfig) -> None:
    settings, batch = config.trainer.fully_async, config.trainer.train_batch_size
    bound, most = settings.max_staleness_steps, batch * (settings.max_staleness_steps + 1)
    check_rule(bound >= 0, f"{_NAME}.max_staleness_steps={bound} must be 0 (always the newest weights) or more")
    workers = settings.num_parallel_generation_workers
    check_rule(
        workers is None or batch <= workers <= most,
        f"{_NAME}.num_parallel_generation_workers={workers} must be from trainer.train_batch_size={batch} (fewer "
        f"cannot fill a step) to train_batch_size * (max_staleness_steps + 1) = {most} (more would be too stale); "
        f"null means {settings.get_max_running(batch) if workers is None else min(768, most)}",
    )
    every = settings.sync_every_steps
    check_rule(
        1 <= every <= bound + 1,
        f"{_NAME}.sync_every_steps={every} must be from 1 to max_staleness_steps + 1 = {bound + 1}: the engines' "
        "weights become that stale between two weight syncs",
    )
    seconds = settings.group_timeout_seconds
    check_rule(seconds > 0, f"{_NAME}.group_timeout_seconds={seconds} must be greater than 0")


def _check_others(config: SkyRLConfig) -> None:
    settings, trainer = config.trainer.fully_async, config.trainer
    check_rule(
        not trainer.placement.colocate_all,
        f"{_NAME}.enabled=true generates during training, but trainer.placement.colocate_all=true puts engines to "
        "sleep during training; set trainer.placement.colocate_all=false",
    )
    sampling = trainer.algorithm.dynamic_sampling.type
    check_rule(
        sampling is None,
        f"trainer.algorithm.dynamic_sampling.type={sampling} resamples full batches, which asynchronous training does "
        f"not have; use {_NAME}.sample_full_batch=true with trainer.algorithm.zero_variance_filter=true, which fills "
        "a step with groups whose rewards differ",
    )
    check_rule(
        not settings.sample_full_batch or trainer.algorithm.zero_variance_filter,
        f"{_NAME}.sample_full_batch=true drops groups whose rewards are all equal; it needs "
        "trainer.algorithm.zero_variance_filter=true",
    )
    check_rule(
        settings.kv_after_sync != "recompute" or config.pause_at_sync != "wait",
        f"{_NAME}.kv_after_sync=recompute applies to requests in flight during a weight sync, but pause=wait drains "
        "them first; set kv_after_sync=keep, or pause=keep",
    )


def _check_correction(config: SkyRLConfig) -> None:
    """Require a loss or a correction that reads the rollout policy's log-probs if tokens may be stale."""
    settings, algorithm = config.trainer.fully_async, config.trainer.algorithm
    registrations = PolicyLossRegistry.list_registrations()
    losses = sorted(name for name, each in registrations.items() if each.requires.rollout_log_probs)
    for name, each in sorted(registrations.items()):
        if each.requires.rollout_log_probs_with is not None:
            losses.append(f"{name} (with {'='.join(each.requires.rollout_log_probs_with)})")
    check_rule(
        settings.max_staleness_steps == 0
        or algorithm.loss_reads_rollout_log_probs
        or algorithm.off_policy_correction.is_on,
        f"{_NAME}.max_staleness_steps={settings.max_staleness_steps} trains on tokens of older weights, and "
        f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} does not correct for that, because its "
        f"ratio starts at 1. Set trainer.algorithm.policy_loss_type to {', '.join(losses)}, or "
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token (truncated importance sampling), or "
        f"{_NAME}.max_staleness_steps=0",
    )

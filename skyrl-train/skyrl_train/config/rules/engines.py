"""Rules of the rollout engines: availability, parallelism, weight transport."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.config.generation import GeneratorConfig
from skyrl_train.config.rules.checks import check_not_negative, check_positive, check_rule

_SIZES = tuple(f"inference_engine_{kind}_parallel_size" for kind in ("tensor", "pipeline", "data", "expert"))


def check_backend(generator: GeneratorConfig) -> None:
    """Check that the requested engine is installed and reads the given settings. Runs before `auto` is resolved, so
    that a script may contain settings of GPU engines where `auto` means native."""
    name = generator.backend
    if name == "auto":
        return
    traits, defaults = EngineRegistry.get_requirements(name), GeneratorConfig()
    for setting in traits.unread_settings:
        value = getattr(generator, setting)
        check_rule(
            value == getattr(defaults, setting),
            f"generator.{setting}={value} is not used by generator.backend={name}; use "
            f"{_find_kinds_reading(setting)}, or auto, or remove it",
        )
    check_rule(
        not generator.run_engines_locally or traits.is_installed,
        f"generator.backend={name} is not installed: scripts/setup.sh --extra {name} ({traits.install_hint}), or use "
        "generator.backend=native",
    )


def _find_kinds_reading(setting: str) -> str:
    """Return the kinds of engine that read a setting of `generator.*`."""
    registrations = EngineRegistry.list_registrations()
    names = [name for name, entry in registrations.items() if setting not in entry.requires.unread_settings]
    return " or ".join(f"generator.backend={name}" for name in names)


def check_engines(config: SkyRLConfig) -> None:
    """Check all other rules of this file."""
    generator = config.generator
    check_positive(
        config,
        (
            *(f"generator.{size}" for size in _SIZES),
            "generator.num_inference_engines",
            "generator.max_num_seqs",
            "generator.max_num_batched_tokens",
            "generator.max_requests_per_engine",
            "generator.http_endpoint_max_requests",
            "generator.weight_transfer_threshold_cuda_ipc_GB",
            "generator.weight_sync_canary_tolerance",
            "generator.request_timeout_seconds",
            "generator.engine_start_timeout_seconds",
            "generator.engine_control_timeout_seconds",
        ),
    )
    check_not_negative(
        config,
        (
            "generator.max_engine_restarts",
            "generator.weight_sync_canary_interval",
            "generator.engine_health_interval_seconds",
        ),
    )
    check_rule(
        0 <= generator.http_endpoint_port <= 65535,
        f"generator.http_endpoint_port must be a port, 0 to 65535; got {generator.http_endpoint_port}",
    )
    check_rule(
        0 < generator.gpu_memory_utilization <= 1,
        f"generator.gpu_memory_utilization must be above 0 and at most 1; got {generator.gpu_memory_utilization}",
    )
    experts = generator.inference_engine_expert_parallel_size
    copies = generator.inference_engine_tensor_parallel_size * generator.inference_engine_data_parallel_size
    check_rule(
        experts in (1, copies),
        f"generator.inference_engine_expert_parallel_size={experts} must be 1, or "
        f"generator.inference_engine_tensor_parallel_size x inference_engine_data_parallel_size = {copies}",
    )
    if generator.run_engines_locally:
        EngineRegistry.get_requirements(generator.backend).check_settings(generator)
    _check_weight_sync(config)
    if not generator.run_engines_locally:
        _check_remote(config)


def _check_weight_sync(config: SkyRLConfig) -> None:
    generator, placement = config.generator, config.trainer.placement
    strategy = generator.weight_sync_strategy
    check_rule(
        strategy != "cuda_ipc" or (placement.device == "cuda" and placement.colocate_all),
        "generator.weight_sync_strategy=cuda_ipc shares GPU memory between workers and engines on one GPU: it needs "
        f"trainer.placement.colocate_all=true (got {str(placement.colocate_all).lower()}) and GPUs "
        f"(trainer.placement.device={placement.device}); use auto",
    )
    rank = config.trainer.policy.model.lora.rank
    check_rule(
        strategy != "adapter" or rank > 0,
        "generator.weight_sync_strategy=adapter sends only low-rank adapters, but "
        f"trainer.policy.model.lora.rank={rank} trains none; set the rank, or use auto",
    )
    begin = config.trainer.policy.model.lora.init_method
    check_rule(
        strategy != "adapter" or not begin.startswith(("pissa", "olora")),
        "generator.weight_sync_strategy=adapter cannot be combined with "
        f"trainer.policy.model.lora.init_method={begin}, which moves part of the model's weights into the adapters; "
        "use init_method=kaiming, or weight_sync_strategy=auto",
    )


def _check_remote(config: SkyRLConfig) -> None:
    generator = config.generator
    urls = generator.remote_inference_engine_urls
    check_rule(
        bool(urls) and len(set(urls)) == len(urls),
        f"generator.remote_inference_engine_urls={urls} must list at least one server, without duplicates",
    )
    check_rule(
        generator.num_inference_engines in (1, len(urls)),
        f"generator.num_inference_engines={generator.num_inference_engines} counts engines that this run starts; with "
        "generator.run_engines_locally=false the number is that of generator.remote_inference_engine_urls, "
        f"{len(urls)}; remove it",
    )
    servers = [name for name, entry in EngineRegistry.list_registrations().items() if entry.requires.server_protocol]
    check_rule(
        generator.backend in ("auto", *servers),
        f"generator.backend={generator.backend} runs inside this run; with generator.run_engines_locally=false use "
        f"{', '.join(servers)} or auto (which asks the servers)",
    )
    check_rule(
        not config.trainer.placement.colocate_all,
        "trainer.placement.colocate_all=true shares devices with engines that this run starts; set it to false with "
        "generator.run_engines_locally=false",
    )
    strategy = generator.weight_sync_strategy
    check_rule(
        strategy not in ("shared_memory", "cuda_ipc"),
        f"generator.weight_sync_strategy={strategy} needs engines that this run starts; for external servers use "
        "checkpoint, delta, adapter, broadcast or auto",
    )

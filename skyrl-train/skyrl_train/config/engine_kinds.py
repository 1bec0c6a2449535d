"""Kinds of rollout engine: the registry that `generator.backend` is checked against, and the traits of each kind.

Each kind is declared in `inference_engines/<kind>/registration.py`, which imports neither its library nor torch. So
settings are checked and an engine is chosen without any of the libraries installed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from skyrl_train.config.registry import Registry

if TYPE_CHECKING:
    from skyrl_train.config.config import SkyRLConfig
    from skyrl_train.config.generation import GeneratorConfig


PREFIX_CACHE_GIB = 1.0
"""Default memory of the native engine for cached prefixes [GiB]."""


def _accept(_: object) -> None:
    """Check nothing."""


def _get_no_keywords(_cfg: "SkyRLConfig", _device: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Static facts of a kind of engine, known before one is started."""

    library: str | None = None
    """Package that must be installed. None: nothing beyond the trainer's own dependencies."""

    install_hint: str = "see INSTALL.md"
    """Text added to "scripts/setup.sh --extra <name>" in the error if the library is not installed."""

    automatic: Mapping[str, int] = field(default_factory=dict)
    """Device -> priority of this kind for `generator.backend=auto`; the installed kind with the highest priority is
    chosen. Missing device: never."""

    unread_settings: tuple[str, ...] = ()
    """Settings of `generator.*` that this kind of engine ignores; changing one is an error."""

    reserves_memory: bool = True
    """The engine reserves `generator.gpu_memory_utilization` of a GPU at start. False: its cache grows with its
    requests.
    """

    prefix_cache_gib: float = 0.0
    """Default memory for cached prefixes in addition to the memory of running requests; the builder's keyword of this
    name overrides it. 0: both share memory."""

    is_in_process: bool = False
    """The engine runs in the process that builds it and starts no other; it supports
    `trainer.placement.launcher=inline`.
    """

    packs_weights: bool = False
    """On a CPU, the engine holds a second, packed copy of the linear layers' weights (float32 and bfloat16)."""

    copies_weights_asleep: bool = False
    """A sleeping engine keeps its weights in host memory even at sleep level 2."""

    server_protocol: Callable[[], Any] | None = None
    """Factory of the `ServerProtocol` for servers of this kind started elsewhere
    (`generator.run_engines_locally=false`). None: such engines run only within a run."""

    attention_choice: bool = False
    """The builder accepts a keyword `attention_backend`."""

    output_layer_adapters: bool = False
    """The engine supports adapters of the output layer."""

    expert_routes: bool = False
    """The builder accepts a keyword `return_expert_routes`: completions of a mixture include the experts of their
    tokens."""

    kept_tokens: bool = False
    """The engine accepts the sampling keyword `return_kept_tokens`: completions include the tokens that truncation
    kept."""

    adapter_slots: tuple[str, int] = ("max_loras", 0)
    """(keyword for the number of adapters loaded at a time, slots needed beyond those in use)."""

    keywords: Callable[["SkyRLConfig", str], dict[str, Any]] = _get_no_keywords
    """(settings, device) -> builder keywords in addition to the common ones."""

    check_settings: Callable[["GeneratorConfig"], None] = _accept
    """Check rules between settings of this kind. Raises ConfigError."""

    check_model: Callable[["GeneratorConfig"], None] = _accept
    """Check from the model's configuration file that this kind can run the model. Raises ConfigError."""

    @property
    def is_installed(self) -> bool:
        """Whether the required library is installed."""
        return self.library is None or find_spec(self.library) is not None


EngineRegistry: Registry[Callable[..., Any], EngineTraits] = Registry(
    "rollout engine",
    EngineTraits,
    (
        "skyrl_train.inference_engines.native.registration",
        "skyrl_train.inference_engines.vllm.registration",
        "skyrl_train.inference_engines.sglang.registration",
    ),
)
"""Name -> builder, which is called with keywords in the engine's process and imports its library there."""

register_engine = EngineRegistry.build_decorator


def get_backend_choices() -> list[str]:
    """Return the allowed values of `generator.backend`."""
    return ["auto", *EngineRegistry.list_registrations()]


def select_automatic_backend(device: str) -> str:
    """Return the kind that `generator.backend=auto` selects on `device`."""
    ranks = {
        name: registration.requires.automatic[device]
        for name, registration in EngineRegistry.list_registrations().items()
        if device in registration.requires.automatic and registration.requires.is_installed
    }
    return max(ranks, key=lambda name: ranks[name])

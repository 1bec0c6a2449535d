"""Kinds of rollout engine: the registry that `generator.backend` is checked against, and what each kind declares.

Each kind is declared in `inference_engines/<kind>/registration.py`, which imports neither its library nor torch. So
the settings are checked, and an engine is chosen, where none of the libraries is installed.
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
"""Memory of the native engine for cached prefixes, if nothing else is asked for."""


def _accept(_: object) -> None:
    """Check nothing."""


def _no_keywords(_cfg: "SkyRLConfig", _device: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Static facts of a kind of engine, known before one is started."""

    library: str | None = None
    """Package that must be installed. None: nothing beyond the trainer's own dependencies."""

    install_hint: str = "see INSTALL.md"
    """Addition to "scripts/setup.sh --extra <name>" in the error where it is not installed."""

    automatic: Mapping[str, int] = field(default_factory=dict)
    """Device -> priority with which `generator.backend=auto` chooses this kind there: the highest of those installed.
    Missing device: never."""

    unread_settings: tuple[str, ...] = ()
    """Settings of `generator.*` that this kind of engine does not read: they may not be changed."""

    reserves_memory: bool = True
    """Takes `generator.gpu_memory_utilization` of a GPU when it starts. False: its cache grows with its requests."""

    prefix_cache_gib: float = 0.0
    """Memory for cached prefixes beside that of running requests, unless the builder's keyword of this name says
    otherwise. 0: they are in the same memory."""

    is_in_process: bool = False
    """Runs in the process that builds it, and starts none: it fits `trainer.placement.launcher=inline`."""

    packs_weights: bool = False
    """On a CPU a second copy of the linear layers' weights, in the order in which products read them, is beside the
    first (float32 and bfloat16)."""

    copies_weights_asleep: bool = False
    """Weights of a sleeping engine are in host memory at sleep level 2, too."""

    server_protocol: Callable[[], Any] | None = None
    """Factory of the `ServerProtocol` for servers of this kind started elsewhere
    (`generator.run_engines_locally=false`). None: such engines run only within a run."""

    attention_choice: bool = False
    """The builder takes a keyword `attention_backend`."""

    output_layer_adapters: bool = False
    """The engine computes adapters of the output layer."""

    expert_routes: bool = False
    """The builder takes a keyword `return_expert_routes`: completions of a mixture come with the experts of their
    tokens."""

    kept_tokens: bool = False
    """The engine takes the sampling keyword `return_kept_tokens`: completions come with the tokens that truncation
    kept."""

    adapter_slots: tuple[str, int] = ("max_loras", 0)
    """(keyword for the number of adapters loaded at a time, slots needed beyond those in use)."""

    keywords: Callable[["SkyRLConfig", str], dict[str, Any]] = _no_keywords
    """(settings, device) -> keywords of the builder beyond those that every kind takes."""

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
"""Name -> builder, which is called with keywords in the process that the engine will live in, and imports its library
there."""

register_engine = EngineRegistry.decorator


def backend_choices() -> list[str]:
    """Return the values that `generator.backend` may have."""
    return ["auto", *EngineRegistry.registrations()]


def automatic_backend(device: str) -> str:
    """Return the kind that `generator.backend=auto` stands for on `device`."""
    ranks = {
        name: registration.requires.automatic[device]
        for name, registration in EngineRegistry.registrations().items()
        if device in registration.requires.automatic and registration.requires.is_installed
    }
    return max(ranks, key=lambda name: ranks[name])

"""Shape of a model from its config alone: the model is made on the meta device, where tensors have no content."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_train.config.models import LoRAConfig
from skyrl_train.errors import ConfigError

_DELTA_NET = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model, in numbers of parameters and elements."""

    parameters: int
    trained: int
    """Parameters that have a gradient: with LoRA the adapters', which are not among `parameters`."""

    layer: int
    """Parameters of the largest transformer layer."""

    outside: int
    """Parameters outside of the layers: embedding, output layer (unless tied), last norm."""

    experts: int
    """Parameters of all experts of all layers."""

    active: int
    """Parameters that one token meets: of the experts those that it is sent to."""

    num_layers: int
    hidden: int
    words: int
    """Vocabulary size; 0: a critic, which has no output layer over it."""

    is_tied: bool
    """The output layer is the embedding."""

    query: int
    """Numbers of a token's queries: heads x size of a head."""

    key: int
    """Numbers of a token's keys, and of its values: key-value heads x size of a head; of latent attention the mean of
    both."""

    num_key_value_heads: int
    num_heads: int
    feed_forward: int
    """Width of the feed-forward layer that a token passes: of a mixture the width of an expert x experts of a token."""

    experts_a_token: int
    """0: no mixture."""

    num_experts: int
    has_query_norms: bool
    """Queries and keys are normalized."""

    latent: int = 0
    """Numbers of a token that engines cache in a layer of latent attention, in place of keys and values, whole on each
    device; 0: none."""

    num_linear_layers: int = 0
    """Layers of linear attention: an answer has a state there, and its tokens no keys and values."""

    state_inputs: int = 0
    """Numbers of the state of an answer in such a layer that its convolution keeps, in the model's number format."""

    state: int = 0
    """Numbers of the state of its recurrence, in float32."""

    @property
    def has_adapters(self) -> bool:
        return self.trained < self.parameters


def load_model_config(path: str, setting: str, *, config_file: str | None = None, offline: bool = True) -> Any:
    """Return the transformers config of a model.

    Args:
        path: folder or hub name, the value of `setting`.
        config_file: config.json to read instead.
        offline: read a hub name from the local cache alone.

    Raises:
        ConfigError: the config does not exist or cannot be read.
    """
    from transformers import AutoConfig  # optional and heavy: errors of the command line need it not

    if config_file is not None and not Path(config_file).is_file():
        raise ConfigError(f"--config-file {config_file}: no such file; pass the config.json of {path}")
    source = config_file or path
    if config_file is None and (path.startswith(("/", ".", "~")) or Path(path).is_dir()):
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{setting}={path}: no config.json in this folder; use the model's folder")
        offline = True
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=config_file is None, local_files_only=offline)
    except Exception as error:  # a model may bring code of its own
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if config_file is not None or Path(path).is_dir():
            raise ConfigError(f"{source}: the config of {setting} cannot be loaded: {reason}") from error
        raise ConfigError(
            f"{setting}={path} is not a local folder, and its config.json is not in the hub cache: download it (hf "
            f"download {path} config.json), or pass the file with --config-file {path}=FILE"
        ) from error


def compute_model_shape(
    config: Any,
    *,
    lora: LoRAConfig | None = None,
    overrides: dict[str, object] | None = None,
    is_critic: bool = False,
) -> ModelShape:
    """Return the shape of a model.

    Args:
        config: of transformers.
        lora: with a rank above 0, only adapters are trained: rank * (inputs + outputs) per adapted linear layer.
        overrides: fields of the config to replace.
        is_critic: without an output layer over the vocabulary.
    """
    import torch  # optional and heavy, like transformers: planning from numbers needs neither
    from transformers import AutoModel, AutoModelForCausalLM

    from skyrl_train.models.weight_files import get_transformer_blocks

    for name, value in (overrides or {}).items():
        setattr(config, name, value)
    with torch.device("meta"):
        model: Any = (AutoModel if is_critic else AutoModelForCausalLM).from_config(config, trust_remote_code=True)
    text = config.get_text_config()
    layers = [sum(parameter.numel() for parameter in each.parameters()) for each in get_transformer_blocks(model)]
    named = dict(model.named_parameters())
    parameters = sum(parameter.numel() for parameter in named.values()) + is_critic * text.hidden_size

    read = partial(_get_first, text)
    num_experts, experts_a_token = read("num_experts", "num_local_experts", "n_routed_experts"), 0
    experts = sum(parameter.numel() for name, parameter in named.items() if ".experts." in name)
    if experts:
        experts_a_token = read("num_experts_per_tok", "top_k_experts") or 1
    key_value_heads = read("num_key_value_heads") or text.num_attention_heads
    head = value = read("head_dim") or text.hidden_size // text.num_attention_heads
    latent = 0
    if read("kv_lora_rank"):
        head, value = read("qk_nope_head_dim") + read("qk_rope_head_dim"), read("v_head_dim")
        latent = read("kv_lora_rank") + read("qk_rope_head_dim")
    state_inputs, state = _count_states(text)
    width = read("intermediate_size", "n_inner") or 4 * text.hidden_size
    if experts:
        width = (read("moe_intermediate_size") or width) * experts_a_token
    return ModelShape(
        parameters=parameters,
        trained=_count_adapter_parameters(model, lora) if lora is not None and lora.rank else parameters,
        layer=max(layers),
        outside=parameters - sum(layers),
        experts=experts,
        active=parameters - (experts - experts * experts_a_token // num_experts if experts else 0),
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        words=0 if is_critic else text.vocab_size,
        is_tied=bool(text.tie_word_embeddings) and not is_critic,
        query=text.num_attention_heads * head,
        key=key_value_heads * (head + value) // 2,
        num_key_value_heads=key_value_heads,
        num_heads=text.num_attention_heads,
        feed_forward=width,
        experts_a_token=experts_a_token,
        num_experts=num_experts if experts else 0,
        has_query_norms=any(name.endswith("q_norm.weight") for name in named),
        latent=latent,
        num_linear_layers=(getattr(text, "layer_types", None) or []).count("linear_attention"),
        state_inputs=state_inputs,
        state=state,
    )


def _get_first(config: Any, *names: str) -> int:
    """Return the first of these fields that a config has and that is not 0; else 0."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)


def _count_states(config: Any) -> tuple[int, int]:
    """Return how many numbers a layer of linear attention keeps of an answer: inputs of its convolution, its state."""
    read = partial(_get_first, config)
    value_heads, key_size, value_size = map(read, _DELTA_NET)
    channels = 2 * read("linear_num_key_heads") * key_size + value_heads * value_size
    return channels * max(0, read("linear_conv_kernel_dim") - 1), value_heads * key_size * value_size


def _count_adapter_parameters(model: Any, lora: LoRAConfig) -> int:
    from torch import nn

    def named(name: str, names: str | list[str] | None) -> bool:
        candidates = [names] if isinstance(names, str) else names or []
        return any(name == candidate or name.endswith(f".{candidate}") for candidate in candidates)

    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or named(name, lora.exclude_modules):
            continue
        if module is not output if lora.target_modules == "all-linear" else named(name, lora.target_modules):
            total += lora.rank * (module.in_features + module.out_features)
    return total

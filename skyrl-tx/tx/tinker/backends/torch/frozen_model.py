"""The frozen base model from transformers, with its linear layers prepared for adapters."""

import logging
import re
from collections.abc import Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from skyrl_train.errors import ConfigError
from skyrl_train.models.cpu_linear import enable_onednn_linear
from skyrl_train.models.linear_attention import replace_delta_nets
from skyrl_train.models.lora import PARTS_OF_EXPERTS, find_non_text_modules, has_fused_experts
from skyrl_train.models.quantized import describe_quantization
from skyrl_train.models.scoring import read_logit_rule
from skyrl_train.models.scoring_check import find_differing_rules, find_unknown_layers
from skyrl_train.models.transformers_names import enable_gradient_checkpointing
from skyrl_train.models.weight_files import WeightFiles, apply_dtype_plan, fill_buffers, open_on_all_ranks
from tx.tinker.backends.torch.adapters import Adaptable, AdaptedLinear, FrozenLinear, Site
from tx.tinker.backends.torch.experts import adapt_experts, has_experts_in_lists, has_standard_file_names
from tx.tinker.backends.torch.head import Head, Targets
from tx.tinker.backends.torch.layout import ATTENTION, PassLayout, build_layout
from tx.tinker.backends.torch.rank_group import ALONE, RankGroup
from tx.tinker.backends.torch.settings import TrainingSettings
from tx.tinker.types import Datum

logger = logging.getLogger(__name__)

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
_LENGTH_DEPENDENT_ROTARY = frozenset({"dynamic", "longrope"})
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.3}
"""Largest accepted difference of log-probs [nats]: a wrong computation differs by a tenth and more, different kernels
by less."""


class FrozenModel:
    """Frozen base model that all adapters share.

    Args:
        folder: of config and weights.
        ranks: group that shards it; its construction, and each forward and backward, is then a collective.

    Raises:
        ConfigError: the model cannot be computed here, and why.
    """

    def __init__(self, folder: Path, settings: TrainingSettings, ranks: RankGroup = ALONE):
        self.device, self.dtype = settings.torch_device, settings.torch_dtype
        model = _load(folder, settings, ranks)
        self.model: Any = model
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        self.max_context = _max_context(model.config)
        rotary = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
        self.one_model_a_pass = str(rotary.get("rope_type")) in _LENGTH_DEPENDENT_ROTARY
        """Something in it would depend on the rows of others: frequencies of positions that follow from the longest row
        of a pass, experts that are not known here."""
        head_name, head = _find_output_layer(model, folder)
        replace_delta_nets(model)
        beside = find_non_text_modules(model)
        modules = {name: module for name, module in model.named_modules() if name not in {head_name, *beside}}
        others = PARTS_OF_EXPERTS if has_fused_experts(model) else frozenset[str]()
        experts = adapt_experts(model)
        self.sites: list[Site] = []
        self.layers: dict[str, Adaptable] = {}
        """Adaptable layers by name of their site."""
        for name, module in modules.items():
            if _can_be_adapted(name, module, others):
                self.sites.append(_build_site(name, module))
                self.layers[name] = module.forward = AdaptedLinear(FrozenLinear(module))  # type: ignore[method-assign]
            elif name in experts and has_standard_file_names(model):
                self.sites += experts[name].sites(name)
                for projection, layer in experts[name].projections.items():
                    self.layers[f"{name}.{projection}"] = layer
        for layer in self.layers.values():
            layer.is_grouped = settings.grouped_adapters
        if others and not any(site.num_experts for site in self.sites):
            logger.info("experts of %s have no adapters: train_mlp has no effect on them", folder)
        self.sites.append(Site(head_name, "unembed", head.in_features, head.out_features))
        self.head_name = head_name
        self.head = Head(FrozenLinear(head), read_logit_rule(model.config), settings.chunk_size)
        # Of the layers above, this changes only the class: the object's own `forward` still takes precedence.
        if self.device.type == "cpu":
            enable_onednn_linear(model)
            self.one_model_a_pass |= has_experts_in_lists(model) or (has_fused_experts(model) and not experts)
        _check(self, folder)

    def find_sites(self, kinds: Mapping[str, bool]) -> list[Site]:
        """Return the layers of the given kinds, in the model's order."""
        return [site for site in self.sites if kinds[site.kind]]

    def compute_hidden_states(self, layout: PassLayout) -> torch.Tensor:
        """[N, H], before the output layer."""
        # Without the output layer: logits of all rows [N, V] may not fit in memory; `Head` makes them chunk by chunk.
        output = self.model.get_decoder()(
            input_ids=layout.input_ids,
            position_ids=layout.position_ids,
            attention_mask=None,
            use_cache=False,
            packed_rows=layout.rows,
        )
        return output.last_hidden_state[0]


def _load(folder: Path, settings: TrainingSettings, ranks: RankGroup) -> Any:
    """Load the model in eval mode, without dropout."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{folder} ({config.model_type}) has an encoder: only causal language models are supported")
    if quantization := describe_quantization(config):
        raise ConfigError(f"{folder} cannot be trained here: {quantization}")
    options = dict(
        dtype=settings.torch_dtype, attn_implementation=ATTENTION, trust_remote_code=settings.trust_remote_code
    )
    files = None
    try:
        if ranks.size > 1:
            model, files = _build_on_meta_device(config, folder, options)
        if files is None and ranks.rank == 0:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, **options)
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be trained here: {error}") from error
    # Frozen before it is sharded: FSDP2 then reduces no gradients of it, so ranks meet only to gather weights.
    model.eval().requires_grad_(False)
    if ranks.size > 1:
        with closing(files) if files is not None else nullcontext():
            ranks.shard(model, files, folder, settings.torch_device)
    else:
        model.to(settings.torch_device)  # pyright: ignore[reportArgumentType]
    if settings.gradient_checkpointing:
        # The reentrant kind makes no gradient where no input requires one, as in the first layer of a frozen model.
        enable_gradient_checkpointing(model, use_reentrant=False)
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = (
                    True  # enables recomputation in the layer; its submodules stay in eval mode, without dropout
                )
    return model


def _build_on_meta_device(config: Any, folder: Path, options: dict[str, Any]) -> tuple[Any, WeightFiles | None]:
    """Make the model on the meta device, and open the files that each rank reads its part from; None where a rank
    cannot: rank 0 then loads all of it for the others. A collective."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    files = open_on_all_ranks(model, str(folder))
    if files is not None:
        apply_dtype_plan(model, options["dtype"])
        fill_buffers(model, files)
    return model, files


def _max_context(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2**31 - 1)


def _find_output_layer(model: Any, folder: Path) -> tuple[str, nn.Linear]:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"{folder}: its output layer is a {type(head).__name__}, and must be a linear layer")
    return next(name for name, module in model.named_modules() if module is head), head


def _can_be_adapted(name: str, module: nn.Module, others: frozenset[str]) -> bool:
    """Return True for linear layers that process all tokens: not routers or experts, fused or listed.

    Args:
        others: name suffixes that peft would match with fused experts anywhere in the model.
    """
    parts = name.split(".")
    is_linear = isinstance(module, nn.Linear | Conv1D)
    return is_linear and "experts" not in parts and parts[-1] not in _ROUTERS and parts[-1] not in others


def _build_site(name: str, module: Any) -> Site:
    """Classify a layer by its name: attention, else feed-forward."""
    kind = "attn" if _ATTENTION.search(name) else "mlp"
    num_in, num_out = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
    return Site(name, kind, num_in, num_out)


@torch.no_grad()
def _check(base: FrozenModel, folder: Path) -> None:
    """Compare this backend's log-probs with transformers' own forward for a few random tokens: a model
    with a part that it leaves out would be trained on wrong numbers without a sign.

    Raises:
        ConfigError: it does not.
    """
    generator = np.random.default_rng(0)
    # Several lengths end to end: attention that looks into a neighbouring row gives other numbers than each row alone.
    rows = [generator.integers(base.vocab_size, size=length) for length in (7, 3, 1)]
    data = [Datum(tokens, {"target_tokens": np.roll(tokens, -1)}) for tokens in rows]
    layout = build_layout([data], base.device)
    if unknown := find_unknown_layers(base.model):
        raise ConfigError(f"{folder} cannot be trained here: it has layers of another kind ({unknown})")
    try:
        scored = base.head.score(base.compute_hidden_states(layout), Targets.of(data), None)
        problem = find_differing_rules(base.model.config.get_text_config(), layout.rows)
        base.model.set_attn_implementation("eager")
        expected = torch.cat([_has_own_log_probs(base, tokens) for tokens in rows])
    except ValueError as error:  # what attention refuses
        raise ConfigError(f"{folder} cannot be trained here: {error}") from error
    finally:
        base.model.set_attn_implementation(ATTENTION)
    difference = (scored.log_probs - expected).abs().max().item()
    # Not `>`, which NaN would pass.
    if not difference <= _TOLERANCE[base.dtype]:
        raise ConfigError(
            f"{folder} cannot be trained here: log-probs of random tokens differ from those of the model's own forward "
            f"by {difference:.3g}"
        )
    # A few tokens show neither caps on small scores nor windows longer than themselves. Kernels of a GPU do not note
    # what layers ask for.
    if base.device.type == "cpu" and problem is not None:
        raise ConfigError(f"{folder} cannot be trained here: {problem}")


def _has_own_log_probs(base: FrozenModel, tokens: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(tokens)[None].to(base.device)
    log_probs = base.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
    return log_probs.gather(1, ids.roll(-1, 1)[0, :, None])[:, 0]

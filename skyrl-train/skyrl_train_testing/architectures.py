"""Table of tested model architectures: a tiny random model of each, and how far training, rollouts and adapters go.

Tests of skyrl-train and skyrl-tx run over it, and the table of `docs/engines.md` is made from it:
`python -m skyrl_train_testing.architectures` prints it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from skyrl_train_testing.tiny_models import character_tokenizer

_SIZES: dict[str, Any] = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
_SIGMOID_ROUTER = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
)
_DELTA_NET = dict(
    initializer_range=0.1,  # the delta rule in float32 magnifies rounding
    num_hidden_layers=3,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
_ALTERNATING = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Architecture:
    """A row of the table."""

    title: str
    config: str
    """Class of transformers."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Sizes beside `_SIZES`, which replace these; None leaves one out."""
    shares_prefixes: bool = True
    """Training computes a prompt once that several rows of a micro-batch begin with."""
    bit_exact: bool = True
    """An answer of the native engine in float32 on a CPU is the same bits when it is interrupted and continued."""
    prefix_cache: bool = True
    """The native engine reuses keys and values of earlier prompts."""
    adapters: str = "attention, MLP"
    """Layers with adapters on `all-linear` and in the Tinker server."""

    def build(self) -> PreTrainedModel:
        """Make a model in float32 whose random weights are the same each time and large enough to tell tokens apart."""
        sizes = {name: value for name, value in (_SIZES | dict(self.fields)).items() if value is not None}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(getattr(hf, self.config)(**sizes), dtype=torch.float32)
            # What begins at zero or one would hide whether it is computed: sinks, biases of routers and experts, norms.
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("sinks", "bias", "e_score_correction_bias", "norm.weight")):
                    tensor.data.add_(0.3 * torch.randn_like(tensor))
        return model.eval()

    def save(self, folder: Path) -> str:
        """Write the model and a tokenizer of characters."""
        self.build().save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
        return str(folder)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama 2, 3", "LlamaConfig"),
    "qwen2": Architecture("Qwen2, Qwen2.5", "Qwen2Config", dict(tie_word_embeddings=True, head_dim=None)),
    "qwen3": Architecture("Qwen3", "Qwen3Config", dict(tie_word_embeddings=True)),
    "qwen3_moe": Architecture(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        shares_prefixes=False,
        adapters="attention; Tinker: experts",
    ),
    "gemma2": Architecture(
        "Gemma 2",
        "Gemma2Config",
        dict(
            attn_logit_softcapping=1.5,
            final_logit_softcapping=4.0,
            query_pre_attn_scalar=16,
            sliding_window=7,
            layer_types=_ALTERNATING,
        ),
    ),
    "gemma3": Architecture(
        "Gemma 3 (text)", "Gemma3TextConfig", dict(query_pre_attn_scalar=16, sliding_window=7, layer_types=_ALTERNATING)
    ),
    "glm4_moe": Architecture(
        "GLM-4.5, GLM-4.6 (MoE)",
        "Glm4MoeConfig",
        dict(**_SIGMOID_ROUTER, n_group=1, topk_group=1, use_qk_norm=True),
        shares_prefixes=False,
        adapters="attention; Tinker: experts",
    ),
    "gpt_oss": Architecture(
        "gpt-oss (bfloat16, not MXFP4)",
        "GptOssConfig",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=7,
            layer_types=_ALTERNATING,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        shares_prefixes=False,
        adapters="attention",
    ),
    "deepseek_v3": Architecture(
        "DeepSeek-V3, R1 (bfloat16, not FP8)",
        "DeepseekV3Config",
        dict(
            **(_SIGMOID_ROUTER | dict(n_routed_experts=8)),
            num_key_value_heads=4,
            head_dim=None,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=12,
            n_group=4,
            topk_group=2,
        ),
        shares_prefixes=False,
        adapters="attention; Tinker: experts",
    ),
    "qwen3_5": Architecture(
        "Qwen3.5 (text)",
        "Qwen3_5TextConfig",
        _DELTA_NET,
        shares_prefixes=False,
        bit_exact=False,
        prefix_cache=False,
    ),
    "qwen3_5_moe": Architecture(
        "Qwen3.5-MoE (text)",
        "Qwen3_5MoeTextConfig",
        dict(
            **_DELTA_NET,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        shares_prefixes=False,
        bit_exact=False,
        prefix_cache=False,
        adapters="attention",
    ),
}

"""Table of tested model architectures: a tiny random model of each, and how far training, rollouts and adapters go.

Tests of skyrl-train and skyrl-tx run over it, and `docs/models.md` is made from it:
`python -m skyrl_train_testing.architectures` prints that page.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedConfig, PreTrainedModel

from skyrl_train_testing.tiny_models import build_character_tokenizer

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
    """Sizes beside `_SIZES`, which replace these; None leaves one out. Of the text model, where there is more."""
    vision: Mapping[str, Any] | None = None
    """Sizes of a part for images, which text does not reach."""
    shares_prefixes: bool = True
    """Training computes a prompt once that several rows of a micro-batch begin with."""
    bit_exact: bool = True
    """An answer of the native engine in float32 on a CPU is the same bits when it is interrupted and continued."""
    prefix_cache: bool = True
    """The native engine reuses keys and values of earlier prompts."""
    megatron: bool = False
    """`trainer.strategy=megatron` has a map of its weights; else it refuses the model."""
    adapters: str = "attention, MLP"
    """Layers with adapters on `all-linear` and in the Tinker server."""

    def make_config(self) -> PreTrainedConfig:
        """Make the config of the tiny model."""
        sizes = {name: value for name, value in (_SIZES | dict(self.fields)).items() if value is not None}
        kind = getattr(hf, self.config)
        if self.vision is None:
            return kind(**sizes)
        return kind(text_config=sizes, vision_config=dict(self.vision))

    def build(self) -> PreTrainedModel:
        """Build a float32 model with reproducible random weights, large enough to give tokens distinct log-probs."""
        kind = hf.AutoModelForCausalLM if self.vision is None else hf.AutoModelForMultimodalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = kind.from_config(self.make_config(), dtype=torch.float32)
            # What begins at zero or one would hide whether it is computed: sinks, biases of routers and experts, norms.
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("sinks", "bias", "e_score_correction_bias", "norm.weight")):
                    tensor.data.add_(0.3 * torch.randn_like(tensor))
        return model.eval()

    def save(self, folder: Path) -> str:
        """Write the model and a tokenizer of characters."""
        self.build().save_pretrained(folder)
        build_character_tokenizer().save_pretrained(folder)
        return str(folder)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama 2, 3", "LlamaConfig", megatron=True),
    "qwen2": Architecture(
        "Qwen2, Qwen2.5", "Qwen2Config", dict(tie_word_embeddings=True, head_dim=None), megatron=True
    ),
    "qwen3": Architecture("Qwen3", "Qwen3Config", dict(tie_word_embeddings=True), megatron=True),
    "qwen3_moe": Architecture(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
        shares_prefixes=False,
        megatron=True,
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
    "gemma3_images": Architecture(
        "Gemma 3 with images (text alone)",
        "Gemma3Config",
        dict(query_pre_attn_scalar=16, sliding_window=7, layer_types=_ALTERNATING),
        vision=dict(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
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
    "qwen3_next": Architecture(
        "Qwen3-Next",
        "Qwen3NextConfig",
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
    "qwen3_5_images": Architecture(
        "Qwen3.5 as published (text alone)",
        "Qwen3_5Config",
        _DELTA_NET,
        vision=dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32),
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


_PAGE = """# Models

Look up whether a model is tested, or compare any other one:

```bash
uv run -m skyrl_train.entrypoints.main_mismatch trainer.policy.model.path=MODEL     # engine against trainer
```

A model that is not in the table is compared with transformers' own forward when it is loaded, and refused if it
differs. Those of the table are tested as tiny random models, float32 on a CPU, to 1e-5 (gradients of linear
attention: 1e-4; trained adapters: 2e-5, with linear attention 2e-4): log-probs and gradients in packed and padded rows
and in micro-batches; tokens and log-probs of the native engine; adapters trained, sampled, resumed, and read by peft.
`python -m skyrl_train_testing.architectures > docs/models.md` generates this page.

{table}
- *Prompts shared*: rows of a micro-batch compute a common beginning of their prompts once.
- *Megatron*: `trainer.strategy=megatron` supports the model. Gemma 2, gpt-oss, DeepSeek-V3 and Qwen3.5 are tested on
  two FSDP2 ranks as well.
- *Resumed to the bit*: an interrupted response of the native engine continues with the same bits (float32 on a CPU),
  elsewhere with log-probs to 1e-5. Checkpoints of the Tinker server are resumed to the bit for each row.
- *Adapters*: layers of `target_modules=all-linear` and of the Tinker server (there the output layer as well). Fused
  experts have adapters in the Tinker server alone, but not those of Qwen2-MoE, Qwen3.5-MoE, gpt-oss.

- *Caps on scores and sinks* (Gemma 2, gpt-oss): attention in blocks of 512 queries, without a fused kernel;
  transformers' eager attention with `trainer.use_sample_packing=false`.
- *Latent attention* (DeepSeek): the native engine stores latent vectors, and has no fused kernel.
- *Linear attention* (Qwen3.5, Qwen3-Next): `sequence_parallel_size` must be 1; no shared prompts, prefix cache or
  speculative decoding; slower without `flash-linear-attention` and `causal_conv1d`.
- *Images*: the text part is trained and sampled.
- *Quantized weights* (gpt-oss in MXFP4, DeepSeek-V3 in FP8, GPTQ and others): refused; the error says how to save them
  in bfloat16.

**bfloat16** (`trainer.bf16=true`, engines in bfloat16). The mean difference of log-probs to float32 is at most 1.5
times that of transformers in bfloat16. What transformers keeps in float32 (biases of routers, rotary angles) stays so;
a run is refused where FSDP2 cannot do that (`trainer.bf16=false` trains such a model). On the tiny mixtures up to 4% of
the tokens go to other experts than in float32, and their log-probs differ by up to 1.8 (DeepSeek-V3; 0.1 with replayed
routes): use `trainer.policy.routing_replay`.
"""


def page() -> str:
    """Return the page of the documentation."""
    return _PAGE.format(table=table())


def table() -> str:
    """Return the table of the page."""
    rows = [
        "| model | training, packed | prompts shared | Megatron | native engine | prefix cache | resumed to the bit "
        "| adapters |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in ARCHITECTURES.values():
        training, engine = (True, each.shares_prefixes, each.megatron), (True, each.prefix_cache, each.bit_exact)
        marks = ("yes" if mark else "no" for mark in (*training, *engine))
        rows.append(f"| {each.title} | {' | '.join(marks)} | {each.adapters} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")

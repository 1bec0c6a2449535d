"""Rejection of quantized weights, which cannot be trained, updated or compared with the trainer's."""

from typing import Any

_NAME_OF_WAY_OUT = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}


def describe_quantization(config: Any) -> str | None:
    """Describe a model's quantization and how to avoid it, or return None.

    Args:
        config: config of the transformers model.
    """
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    # A dict as in config.json, or an object after transformers has read it.
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = str(settings.get("quant_method", "unknown"))
    name = _NAME_OF_WAY_OUT.get(method)
    loading = f"quantization_config={name}(dequantize=True), " if name else ""
    return (
        f"its weights are quantized ({method}), but full-precision weights are needed. Convert them to bfloat16 once: "
        f"AutoModelForCausalLM.from_pretrained(PATH, {loading}dtype=torch.bfloat16), model.dequantize() if it is "
        "still quantized, and save_pretrained(NEW_PATH)"
    )

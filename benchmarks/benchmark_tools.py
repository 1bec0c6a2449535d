"""Functions that several benchmarks share: a small model of words, tables, and the description of the machine."""

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VOCABULARY = 512
PAD, END, START = "<pad>", "<end>", "<start>"
SPECIAL_WORDS = (PAD, END, START, "system", "user", "assistant")
NUM_TEMPLATE_TOKENS = 5
"""Tokens that the chat template adds to one message: `<start> user ... <end> <start> assistant`."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<start> ' + message['role'] + ' ' + message['content'] + ' <end> ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)


def make_word_model(
    folder: str | Path,
    *,
    hidden: int = 256,
    layers: int = 4,
    head_dim: int = 64,
    context: int,
    device: str = "cpu",
    **config: Any,
) -> None:
    """Write an untrained Qwen3 (3.3 million float32 parameters by default) and its tokenizer, one word per token.

    Args:
        device: that draws the weights.
        config: fields of `Qwen3Config`, instead of those that follow from the other sizes.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    heads = hidden // head_dim
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "dtype": "float32",
    } | config
    words = [*SPECIAL_WORDS, *(f"w{number}" for number in range(sizes["vocab_size"] - len(SPECIAL_WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    ends = {"eos_token_id": words.index(END), "pad_token_id": words.index(PAD), "bos_token_id": None}
    qwen = Qwen3Config(**sizes, **ends, tie_word_embeddings=True)
    with torch.device(device):
        model = Qwen3ForCausalLM(qwen)
    model.to(getattr(torch, sizes["dtype"])).save_pretrained(folder)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table row by row, as `rows` yields them."""
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def describe_machine(*packages: str, load_before: float | None = None) -> str:
    """Return processor, load, commit, and versions of Python and of the given packages, where they are installed."""
    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", *packages):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    load = f"{os.getloadavg()[0]:.1f}" if load_before is None else f"{load_before:.1f} to {os.getloadavg()[0]:.1f}"
    commit = commit.strip() or "unknown"
    return f"{os.cpu_count()} CPUs ({_processor()}), {', '.join(versions)}, commit {commit}, load {load}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""Estimated against measured memory of training steps on a CPU, for each backend and what it divides.

    python benchmarks/memory_estimates.py [--settings NAME ...]

Each setting trains (or scores with) a random Qwen3 of about 80 MB of float32 weights in fresh processes: a batch of two
micro-batches, two steps. Measured is the peak resident set of the rank that needs most, above what it held when it had
joined its group and computed with a model of 0.1 MB in the same backend. Estimated is
`skyrl_train.memory_plan.memory.estimate_worker_phases`.
"""

import argparse
import asyncio
import ctypes
import gc
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from transformers import AutoConfig, PreTrainedModel

from skyrl_train.config import SkyRLConfig, training_backends
from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.memory_plan.memory import Phase, estimate_worker_phases
from skyrl_train.memory_plan.model_shape import compute_model_shape
from skyrl_train.training_backends.base import ModelName, RankInfo, TrainingBackend
from skyrl_train.training_batch import MicroBatch, TrainingInputBatch
from skyrl_train.utils.memory_peaks import MemoryPeaks
from skyrl_train_testing.backend_checks import make_settings, run_step
from skyrl_train_testing.rank_processes import ForkedRanks
from skyrl_train_testing.tiny_models import build_tiny_mixture, build_tiny_qwen3

NUM_STEPS, NUM_MICRO_BATCHES = 2, 2
_SECONDS = 280.0
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1

MODELS: dict[str, dict[str, int]] = {
    "layers": dict(hidden_size=512, num_hidden_layers=6, intermediate_size=1536, vocab_size=4096),
    "words": dict(hidden_size=256, num_hidden_layers=2, intermediate_size=512, vocab_size=65536),
    "experts": dict(hidden_size=512, num_hidden_layers=4, moe_intermediate_size=192, num_experts=16, vocab_size=4096),
}
MIXTURES: dict[str, Any] = dict(
    num_experts_per_tok=4, num_attention_heads=4, num_key_value_heads=2, head_dim=128, max_position_embeddings=4096
)


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Args:
        trainer: settings of `trainer`.
        shape: prompt tokens, response tokens and rows of a micro-batch.
    """

    name: str
    num_ranks: int
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: str = "layers"
    role: ModelName = "policy"
    shape: tuple[int, int, int] = (128, 128, 2)

    def cfg(self, path: str) -> SkyRLConfig:
        """Return the settings of a run with the model in a folder."""
        prompt, response, rows = self.shape
        placement = {f"{self.role}_num_gpus_per_node": self.num_ranks}
        trainer: dict[str, Any] = {
            "gradient_checkpointing": True,
            "micro_train_batch_size_per_gpu": rows,
            "micro_forward_batch_size_per_gpu": rows,
            "max_prompt_length": prompt,
            **self.trainer,
            "placement": placement,
        }
        cfg = make_settings(path, trainer, self.role)
        cfg.generator.max_input_length = prompt
        cfg.generator.sampling_params.max_generate_length = response
        return cfg


def _deepspeed(stage: int, **zero: Any) -> dict[str, Any]:
    return {"strategy": "deepspeed", "policy": {"deepspeed_config": {"zero_optimization": {"stage": stage, **zero}}}}


def _megatron(**sizes: int) -> dict[str, Any]:
    return {"strategy": "megatron", "policy": {"megatron_config": sizes}}


SETTINGS = [
    Setting("FSDP2, one rank", 1),
    Setting("FSDP2, two ranks", 2),
    Setting("FSDP2, bfloat16", 2, {"bf16": True}),
    Setting("FSDP2, a copy on each rank (fsdp_size=1)", 2, {"policy": {"fsdp_config": {"fsdp_size": 1}}}),
    Setting("FSDP2, vocabulary of 65,536", 2, model="words", shape=(256, 1024, 2)),
    Setting("FSDP2, 4,096 tokens, activations stored", 2, {"gradient_checkpointing": False}, shape=(1024, 1024, 2)),
    Setting(
        "FSDP2, sequences divided over two ranks", 2, {"policy": {"sequence_parallel_size": 2}}, shape=(1024, 1024, 2)
    ),
    Setting("FSDP2, token budget of 4,096", 2, {"max_tokens_per_microbatch": 4096}, shape=(256, 256, 8)),
    Setting("FSDP2, rows padded (no packing)", 2, {"use_sample_packing": False}, shape=(256, 256, 4)),
    Setting("FSDP2, adapters of rank 16", 2, {"policy": {"model": {"lora": {"rank": 16}}}}),
    Setting("FSDP2, 16 experts, four a token", 2, model="experts"),
    Setting("FSDP2, 16 experts, 2,048 tokens", 2, model="experts", shape=(512, 512, 2)),
    Setting("DeepSpeed, stage 0", 2, _deepspeed(0)),
    Setting("DeepSpeed, stage 1", 2, _deepspeed(1)),
    Setting("DeepSpeed, stage 2, optimizer offloaded", 2, _deepspeed(2, offload_optimizer={"device": "cpu"})),
    Setting("DeepSpeed, stage 3", 2, _deepspeed(3)),
    Setting("Megatron, data parallel", 2, _megatron()),
    Setting("Megatron, tensor parallel", 2, _megatron(tensor_model_parallel_size=2)),
    Setting("Megatron, two stages", 2, _megatron(pipeline_model_parallel_size=2)),
    Setting("reference model, FSDP2", 2, role="ref", shape=(512, 512, 4)),
    Setting("critic, FSDP2", 2, role="critic"),
]


@dataclass(frozen=True)
class Comparison:
    """Bytes of the rank that needs most."""

    setting: Setting
    phase: Phase
    measured: int

    @property
    def ratio(self) -> float:
        """Measured over estimated."""
        return self.measured / self.phase.total


class _Rank:
    """One process."""

    def run(self, setting: Setting, path: str, small: str, rank: int, port: int) -> dict[str, int]:
        """Measure the peaks of this rank. Returns: phase -> bytes."""
        # What is freed goes back to the system, so that the resident set is what is in use.
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 10)
        warm = self._joined(setting, small, RankInfo(rank=rank, world_size=setting.num_ranks, master_port=port))
        backend = self._backend(setting, path)
        for name in ("device", "parallel", "sequence_parallel"):  # the group is joined once
            setattr(backend, name, getattr(warm, name))
        if setting.trainer.get("strategy") == "deepspeed":
            warm.engine.destroy()
        del warm
        gc.collect()
        peaks = MemoryPeaks(backend.device)
        with peaks.measure("load"):
            backend.load_model()
        _compute(backend, setting, MODELS[setting.model]["vocab_size"], peaks)
        return peaks.reset()

    def _joined(self, setting: Setting, small: str, info: RankInfo) -> Any:
        """Join the group and compute with a model of 0.1 MB, so that code and buffers of libraries are in memory before
        anything is measured."""
        backend = self._backend(setting, small)
        backend.join(info)
        backend.load_model()
        _compute(backend, replace(setting, shape=(8, 8, 2)), 64, MemoryPeaks(backend.device))
        return backend

    def _backend(self, setting: Setting, path: str) -> Any:
        cfg = setting.cfg(path)
        # By its module: the registry itself would come to the rank by value, empty.
        make = training_backends.TrainingBackendRegistry.get(cfg.trainer.strategy)
        return make(cfg, setting.role, None if setting.role == "ref" else NUM_STEPS)


def _compute(backend: TrainingBackend, setting: Setting, num_words: int, peaks: MemoryPeaks) -> None:
    """Take steps, or score twice, and measure each."""
    batch, micro_batches = make_batch(setting, num_words)
    for _ in range(NUM_STEPS):
        if setting.role == "ref":
            with peaks.measure("forward"):
                backend.forward(batch, micro_batches)
        else:
            with peaks.measure("train"):
                run_step(backend, batch, micro_batches, gather=False)


def make_batch(setting: Setting, num_words: int) -> tuple[TrainingInputBatch, list[MicroBatch]]:
    """Make rows of full length, in two micro-batches as the settings divide them."""
    prompt, response, rows = setting.shape
    budget = setting.trainer.get("max_tokens_per_microbatch")
    if budget is not None:
        rows = budget // (prompt + response)
    num_rows = rows * NUM_MICRO_BATCHES
    draw = torch.Generator().manual_seed(0)
    shape = num_rows, prompt + response
    ones = torch.ones(num_rows, response)
    batch = TrainingInputBatch(
        sequences=torch.randint(2, num_words, shape, generator=draw),
        attention_mask=torch.ones(shape, dtype=torch.long),
        loss_mask=ones,
        loss_weights=ones / ones.sum(),
        critic_loss_weights=ones / ones.sum(),
        advantages=torch.randn(ones.shape, generator=draw),
        values=torch.zeros_like(ones),
        returns=torch.randn(ones.shape, generator=draw),
        metadata={"response_length": response},
    )
    return batch, [MicroBatch(tuple(range(first, first + rows))) for first in range(0, num_rows, rows)]


def make_model(name: str) -> PreTrainedModel:
    """Make a model of `MODELS` with random weights."""
    if name == "experts":
        return build_tiny_mixture(**(MIXTURES | MODELS[name]))
    return build_tiny_qwen3(**(dict(max_position_embeddings=4096, tie_word_embeddings=True) | MODELS[name]))


def compare(setting: Setting, folder: Path) -> Comparison:
    """Measure a setting and estimate it.

    Args:
        folder: of models and logs; models are made once.
    """
    path, small = str(folder / setting.model), str(folder / "small")
    if not Path(path).exists():
        make_model(setting.model).save_pretrained(path)
    if not Path(small).exists():
        build_tiny_qwen3(hidden_size=32, vocab_size=64).save_pretrained(small)
    ranks = ForkedRanks("memory", _Rank, (), num_ranks=setting.num_ranks, log_folder=folder / "logs")
    port = find_free_port()
    calls: list[Any] = [[("run", (setting, path, small, rank, port))] for rank in range(setting.num_ranks)]
    try:
        answers = asyncio.run(ranks.call(calls, _SECONDS, "the deadline of the benchmark"))
    finally:
        ranks.kill()
    cfg = setting.cfg(path)
    lora = None if setting.role == "ref" else getattr(cfg.trainer, setting.role).model.lora
    shape = compute_model_shape(AutoConfig.from_pretrained(path), lora=lora, is_critic=setting.role == "critic")
    kind = "forward" if setting.role == "ref" else "train"
    phase = estimate_worker_phases(cfg, setting.role, shape, "cpu")[-1]
    measured: list[dict[str, int]] = [answer for [answer] in answers]  # type: ignore[misc]
    return Comparison(setting, phase, max(peaks[kind] for peaks in measured))


def row_of(found: Comparison) -> str:
    """Return a row of the table."""
    parts = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in found.phase.parts.items() if size >= 1e6)
    return (
        f"| {found.setting.name} | {found.phase.total / 1e6:.0f} | {found.measured / 1e6:.0f} | {found.ratio:.2f} | "
        f"{found.phase.moment}: {parts} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="only those whose name has one of these words")
    options = parser.parse_args(arguments)
    chosen = [
        setting
        for setting in SETTINGS
        if not options.settings or any(word in setting.name for word in options.settings)
    ]
    print(
        "| setting | estimated, MB | measured, MB | measured / estimated | of the estimate |\n|---|---:|---:|---:|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for setting in chosen:
            found.append(compare(setting, Path(folder)))
            print(row_of(found[-1]), flush=True)
    off = [abs(each.ratio - 1) for each in found]
    print(
        f"\n{len(found)} settings; largest difference {max(off):.0%}, {sum(each <= 0.15 for each in off)} within 15 %"
    )
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

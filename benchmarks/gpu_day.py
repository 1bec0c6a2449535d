"""Correctness, speed and memory on one GPU within ten minutes, as one JSON file.

    python benchmarks/gpu_day.py --budget 600 --output gpu_day.json      # one CUDA device
    python benchmarks/gpu_day.py --device cpu --tiny                     # the same code in about a minute
    python benchmarks/gpu_day.py --sections grpo_vllm trl_vllm           # some sections (`SECTIONS`)

Models have random weights, and nothing is downloaded. Each section is a process with a time limit. It is skipped if
less than its limit is left of the budget, or if it needs a package that is not installed or a GPU. The file is written
after each. Token counts are those of the stored trajectories; a prompt of another length than asked for is an error.
MFU is 6 operations a parameter and trained token (2 a generated one) and those of causal attention, over the card's
peak in bfloat16 (`skyrl_train/memory_plan/devices.py`).

A section that fails has the end of its traceback in `error`; the exit status is 1 unless all others are `ok`.
"""

import argparse
import asyncio
import faulthandler
import json
import multiprocessing
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import itertools

sys.path.append(str(Path(__file__).parent))  # if it is loaded from another folder

from benchmark_tools import NUM_TEMPLATE_TOKENS, describe_machine, make_word_model

Found = dict[str, Any]
ERROR_LINES = 12
WARM_UP_STEPS = 1
"""Steps that are not counted."""
ENGINE_GAP = "policy/rollout_train_logprobs_abs_diff"
LOG_PROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean difference of a token's log-prob between engine and trainer."""


@dataclass(frozen=True)
class Size:
    """Sizes of the measured models, batches and buffers.

    Args:
        model: fields of a `Qwen3Config`. (Beside a Qwen2 config transformers would load Qwen2's tokenizer.)
        batches: requests at once, of the engine alone.
        trainer_model: of the section `trainer`, and `trainer_tokens` of its row.
        sync_bytes: weights of the section `weight_sync`.
    """

    model: dict[str, Any]
    num_prompts: int
    num_samples: int
    prompt_tokens: int
    new_tokens: int
    micro_batch: int
    num_steps: int
    batches: tuple[int, ...]
    trainer_model: dict[str, Any] | None = None
    trainer_tokens: int = 64
    sync_bytes: int = 2**20


HALF_BILLION = Size(
    model=dict(  # sizes of Qwen2.5-0.5B
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    ),
    num_prompts=16, num_samples=8, prompt_tokens=256, new_tokens=512, micro_batch=16, num_steps=3, batches=(1, 128),
    trainer_model=dict(  # Qwen3-0.6B
        vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=32_768,
    ),
    trainer_tokens=16_384, sync_bytes=10**9,
)  # fmt: skip
TINY = Size(
    model=dict(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    ),
    num_prompts=2, num_samples=4, prompt_tokens=8, new_tokens=8, micro_batch=8, num_steps=2, batches=(1, 4),
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Device, number format, amount of work and folder for files that sections share."""

    device: str
    dtype: str
    size: Size
    folder: Path

    def synchronize(self) -> float:
        """Wait for the device. Returns: the time."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# ---- sections: each imports what it needs, so that one that cannot be imported fails alone


def machine(bench: Bench) -> Found:
    """Return the device and versions, and write the models: the process of a later section then does not hold them."""
    import torch

    model_folder(bench)
    model_folder(bench, bench.size.trainer_model, "trainer-model")
    packages = ("transformers", "vllm", "sglang", "ray", "trl", "flash-attn")
    found: Found = {"machine": describe_machine(*packages), "python": platform.python_version()}
    if bench.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        found |= {"gpu": device.name, "cuda": torch.version.cuda, "memory_gb": device.total_memory / 1e9}
    return found


CHECKS = ("check_log_probs", "check_prompt_log_probs", "check_greedy_tokens", "check_update", "check_sleep")
"""A sample of the engine conformance kit, which takes minutes (`pytest -m gpu` has the rest)."""


def engine_checks(bench: Bench) -> Found:
    """Check the native engine against transformers on the CPU. Raises AssertionError with each broken rule."""
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
    from skyrl_train_testing.engine_conformance import CHECKS as ALL
    from skyrl_train_testing.engine_conformance import EngineUnderTest, check_engine, make_tiny_model

    path = make_tiny_model(bench.folder / "checked", tied=True)

    async def check() -> Any:
        engine = NativeInferenceEngine(path, device=bench.device, dtype=bench.dtype)
        try:
            return await check_engine(EngineUnderTest(engine, path), [each for each in ALL if each.name in CHECKS])
        finally:
            await engine.teardown()

    report = asyncio.run(check())
    assert not report.failures, "\n".join(outcome.words for outcome in report.failures)
    return {"passed": sum(outcome.result == "passed" for outcome in report.outcomes)}


def backend_checks(bench: Bench) -> Found:
    """Divide optimizer steps in many ways and compare them. Raises InvarianceError with all that differs."""
    from skyrl_train.config.training_backends import TrainingBackendRegistry
    from skyrl_train_testing.backend_checks import check_training_backend
    from skyrl_train_testing.tiny_models import build_tiny_qwen3

    folder = str(bench.folder / "stepped")
    build_tiny_qwen3(hidden_size=32, scale=3.0, vocab_size=64, max_position_embeddings=128).save_pretrained(folder)
    reason = "kernels of a GPU add in another order than those of the model on the CPU"
    exempt = {"agreement": reason} if bench.device == "cuda" else None
    check_training_backend(TrainingBackendRegistry.get("fsdp2"), folder, exempt=exempt, device=bench.device)
    return {"exempt": list(exempt or {})}


def grpo(bench: Bench, backend: str = "native", launcher: str = "inline") -> Found:
    """Train by GRPO and return medians over the steps after the first, and estimated beside measured memory."""
    from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.entrypoints.main_base import BasePPOExp
    from skyrl_train.memory_plan.memory import estimate_memory
    from skyrl_train.memory_plan.shapes import load_shapes
    from skyrl_train.utils.run_folder import RunFolder
    from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments

    class EvenWords(DifferentCharacters):
        """The share of words of even number in an answer, which differs from sample to sample."""

        def step(self, action: str) -> BaseTextEnvStepOutput:
            reward = sum(word[-1] in "02468" for word in action.split()) / bench.size.new_tokens
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    changes = settings(bench)
    changes["trainer"] |= {"placement": {"device": bench.device, "launcher": launcher, "colocate_all": True}}
    changes["trainer"]["run_dir"] = str(bench.folder / f"run-{backend}")
    changes["generator"]["backend"] = backend
    cfg = SkyRLConfig.from_dict(changes)
    with register_environments(even_words=EvenWords):
        BasePPOExp(cfg).run()
    run = RunFolder(cfg.trainer.run_dir)
    first, *steps = run.read_metrics()
    samples = [(len(row["prompt_ids"]), len(row["tokens"]["ids"])) for row in run.read_trajectories(2, "train")]
    tokens, new = sum(map(sum, samples)), sum(new for _, new in samples)
    assert {prompt for prompt, _ in samples} == {bench.size.prompt_tokens}, f"prompts have other lengths: {samples}"

    def median(name: str) -> float:
        return statistics.median(row[name] for row in steps if name in row)

    def medians(prefix: str) -> Found:
        return {name.removeprefix(prefix): median(name) for name in steps[-1] if name.startswith(prefix)}

    device = get_device(bench)
    plan = estimate_memory(cfg, load_shapes(cfg), device)
    found = {
        "samples": len(samples), "tokens": tokens, "new_tokens": new, "step_seconds": median("timing/step"),
        "seconds": medians("timing/"), "weight_sync": medians("weight_sync/"),
        "measured_gb": {name: value for name, value in first.items() if name.startswith("memory/")},
        "estimated_gb": {phase.name: phase.total / 1e9 for phase in plan.workers["policy"]},
        "log_probs_differ": {kind: max(row[f"{ENGINE_GAP}_{kind}"] for row in steps) for kind in ("mean", "max")},
        "grad_norm": median("policy/grad_norm"),
        "generation": speed(bench, bench.size.model, new, median("timing/generate"), sum(samples[0]), passes=1),
        "training": speed(
            bench, bench.size.model, tokens, median("timing/train_critic_and_policy"), sum(samples[0]), passes=3
        ),
    }  # fmt: skip
    largest = LOG_PROB_TOLERANCE[bench.dtype]
    assert found["log_probs_differ"]["mean"] <= largest, f"engine and trainer differ by more than {largest}: {found}"
    assert found["grad_norm"] > 0, f"nothing was learned: {found}"
    return found


def weight_sync(bench: Bench) -> Found:
    """Send weights to a process on the same device, with a fingerprint of each byte."""
    import torch

    from skyrl_train.utils.gpus import get_indexed_device
    from skyrl_train.weight_sync.plan import Route, init_infos_for
    from skyrl_train_testing.weight_holders import HolderInfo, HolderProcesses, WeightHolder
    from skyrl_train_testing.weight_sources import BlockingSender

    device = get_indexed_device(bench.device)
    shapes = [(f"layer{index}", (64, bench.size.sync_bytes // (16 * 64 * 2))) for index in range(16)]
    route = Route("cuda_ipc" if device.type == "cuda" else "shared_memory")
    make_holder = partial(WeightHolder.of_shapes, shapes, torch.bfloat16, device)
    infos = init_infos_for([route], [HolderInfo()], directory=str(bench.folder), verification="full")
    with HolderProcesses(1, make_holder) as holders:
        holders.wait_for_start()
        sender = BlockingSender(holders.engines, infos, device, max_bucket_bytes=64 << 20)
        seconds = []
        for number in range(1, 5):
            weights = [(name, torch.randn(shape, device=device, dtype=torch.bfloat16)) for name, shape in shapes]
            began = bench.synchronize()
            num_bytes = sender.send(weights, number).metrics["bytes"]
            seconds.append(bench.synchronize() - began)
        sender.close()
    best = statistics.median(seconds[WARM_UP_STEPS:])
    return {"transport": route.transport, "bytes": num_bytes, "seconds": best, "gb_per_second": num_bytes / best / 1e9}


def offload(bench: Bench) -> Found:
    """Move a trained model of the section `grpo` to the host and back."""
    import torch

    backend = load_backend(bench, bench.size.model, "model", {})
    train(bench, backend, 64, num_steps=1)
    parameters = list(backend.model.parameters())
    num_bytes = 3 * sum(each.numel() * each.element_size() for each in parameters)  # and Adam's two moments
    times: dict[str, list[float]] = {"offload": [], "onload": []}
    left = 0
    for _ in range(3):
        for name, seconds in times.items():
            began = bench.synchronize()
            getattr(backend, name)()
            seconds.append(bench.synchronize() - began)
            left = torch.cuda.memory_allocated() if name == "offload" and bench.device == "cuda" else left
    found = {name: min(seconds) for name, seconds in times.items()}
    rates = {f"{name}_gb_per_second": num_bytes / max(seconds, 1e-9) / 1e9 for name, seconds in found.items()}
    return {"bytes": num_bytes, "seconds": found, "left_on_device_gb": left / 1e9} | rates


def trainer(bench: Bench) -> Found:
    """Take optimizer steps on one row, with all parameters trained and with LoRA."""
    import torch
    import torch.distributed as dist

    model, found = bench.size.trainer_model or bench.size.model, {}
    for name, lora, passes in (("full", {}, 3), ("lora", {"lora": {"rank": 16, "alpha": 32}}, 2)):
        backend = load_backend(bench, model, "trainer-model", lora)
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = train(bench, backend, bench.size.trainer_tokens, num_steps=3)
        found[name] = speed(bench, model, bench.size.trainer_tokens, seconds, bench.size.trainer_tokens, passes=passes)
        if bench.device == "cuda":
            found[name]["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        del backend
        dist.destroy_process_group()
    return found


def engine_speed(bench: Bench) -> Found:
    """Return tokens a second of the native engine alone, log-probs included, by the number of requests."""
    from skyrl_train.inference_engines.base import InferenceEngineInput
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

    size, draw = bench.size, random.Random(0)

    async def measure() -> Found:
        engine = NativeInferenceEngine(model_folder(bench), device=bench.device, dtype=bench.dtype)
        params = {"max_tokens": size.new_tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
        found = {}
        try:
            for turn, batch in enumerate([size.batches[-1], *size.batches]):  # the first warms up
                params["max_tokens"] = size.new_tokens if turn else 8
                prompts = [[draw.randrange(6, 400) for _ in range(size.prompt_tokens)] for _ in range(batch)]
                began = time.perf_counter()
                inputs = InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params)
                output = await engine.generate_batch(inputs)
                seconds, new = time.perf_counter() - began, sum(map(len, output["response_ids"]))
                length = size.prompt_tokens + size.new_tokens
                found[str(batch)] = speed(bench, size.model, new, seconds, length, passes=1)
        finally:
            await engine.teardown()
        return found

    return asyncio.run(measure())


def trl(bench: Bench, use_vllm: bool = False) -> Found:
    """Train by TRL's GRPOTrainer, with the sizes and prompts of the section `grpo`."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]  # optional

    size, num = bench.size, bench.size.num_prompts * bench.size.num_samples
    if use_vllm:
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    prompts = Path(settings(bench)["data"]["train_data"][0]).read_text().splitlines()
    tokens = {"min_tokens": size.new_tokens} if use_vllm else {"min_new_tokens": size.new_tokens}
    extra: Found = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.4) if use_vllm else {}
    config = GRPOConfig(
        output_dir=str(bench.folder / "trl"), per_device_train_batch_size=size.micro_batch,
        gradient_accumulation_steps=max(1, num // size.micro_batch), num_generations=size.num_samples,
        max_completion_length=size.new_tokens, max_steps=size.num_steps, learning_rate=1e-6, beta=0.0,
        logging_steps=1, save_strategy="no", report_to=[], bf16=bench.dtype == "bfloat16", disable_tqdm=True,
        use_cpu=bench.device == "cpu", generation_kwargs=tokens, gradient_checkpointing=True, **extra,
    )  # fmt: skip
    times = [time.perf_counter()]

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(bench.synchronize())

    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    GRPOTrainer(
        model=model_folder(bench), reward_funcs=reward, args=config, callbacks=[Clock()],
        processing_class=AutoTokenizer.from_pretrained(model_folder(bench), padding_side="left"),
        train_dataset=Dataset.from_list([json.loads(line) for line in prompts]),
    ).train()  # fmt: skip
    steps = [after - before for before, after in itertools.pairwise(times)]
    return {"step_seconds": statistics.median(steps[WARM_UP_STEPS:]), "steps": steps}


@dataclass(frozen=True)
class Section:
    """A measurement.

    Args:
        seconds: time limit; the section is skipped if less is left.
        needs: packages.
        on_cpu: False: a run on a CPU skips it unless it is named.
    """

    run: Callable[[Bench], Found]
    seconds: float
    needs: tuple[str, ...] = ()
    on_cpu: bool = True


SECTIONS: dict[str, Section] = {  # by value: a short budget ends with checks that the tests make, too
    "machine": Section(machine, 60),
    "grpo_vllm": Section(partial(grpo, backend="vllm", launcher="ray"), 180, ("vllm", "ray"), on_cpu=False),
    "trainer": Section(trainer, 60),
    "weight_sync": Section(weight_sync, 45),
    "offload": Section(offload, 45),
    "grpo": Section(grpo, 120),
    "trl_vllm": Section(partial(trl, use_vllm=True), 120, ("trl", "vllm"), on_cpu=False),
    "engine_speed": Section(engine_speed, 75),
    "engine_checks": Section(engine_checks, 40),
    "backend_checks": Section(backend_checks, 40),
    "grpo_sglang": Section(partial(grpo, backend="sglang", launcher="ray"), 180, ("sglang", "ray"), on_cpu=False),
    "trl": Section(trl, 150, ("trl",)),
}


# ---- shared by sections


def get_device(bench: Bench) -> Any:
    """Return the planner's description of the device."""
    from skyrl_train.memory_plan.devices import find_gpu, get_processor

    return find_gpu() if bench.device == "cuda" else get_processor()


def speed(
    bench: Bench, model: Mapping[str, Any], tokens: int, seconds: float, row_tokens: int, *, passes: int
) -> Found:
    """Return tokens a second, and the share of the device's peak. `passes`: 1 forward, 3 with the backward,
    2 if only adapters have gradients."""
    from transformers import Qwen3Config

    from skyrl_train.memory_plan.model_shape import compute_model_shape

    shape = compute_model_shape(Qwen3Config(**model, tie_word_embeddings=True))
    operations = passes * (2 * shape.active + 2 * shape.num_layers * shape.query * row_tokens)
    rate = tokens / seconds
    return {"seconds": seconds, "tokens_per_second": rate, "mfu": rate * operations / get_device(bench).flops}


def model_folder(bench: Bench, model: Mapping[str, Any] | None = None, name: str = "model") -> str:
    """Return the folder of a model, which the first call writes: random weights, one word per token."""
    folder = bench.folder / name
    if not folder.exists():
        make_word_model(folder, context=0, device=bench.device, dtype="bfloat16", **(model or bench.size.model))
    return str(folder)


def load_backend(bench: Bench, model: Mapping[str, Any], name: str, policy: Mapping[str, Any]) -> Any:
    """Return FSDP2 with a policy that takes part in no run."""
    from skyrl_train.config.training_backends import TrainingBackendRegistry
    from skyrl_train.training_backends.base import RankInfo
    from skyrl_train_testing.backend_checks import NUM_STEPS, make_settings

    path = model_folder(bench, model, name)
    trainer = {
        "bf16": bench.dtype == "bfloat16",
        "gradient_checkpointing": True,
        "policy": {"model": {"path": path, **policy}},
    }
    backend: Any = TrainingBackendRegistry.get("fsdp2")(
        make_settings(path, trainer, device=bench.device), "policy", NUM_STEPS
    )
    backend.join(RankInfo(device=bench.device))
    backend.load_model()
    return backend


def train(bench: Bench, backend: Any, num_tokens: int, num_steps: int) -> float:
    """Take optimizer steps on one row, half of it a response. Returns: median seconds, without the first step."""
    import torch

    from skyrl_train.training_batch import TrainingInputBatch
    from skyrl_train_testing.backend_checks import add_advantages, run_step

    ones = torch.ones(1, num_tokens // 2)
    draw = torch.Generator().manual_seed(0)
    row = TrainingInputBatch(
        sequences=torch.randint(6, 400, (1, num_tokens), generator=draw),
        attention_mask=torch.ones(1, num_tokens, dtype=torch.long), loss_mask=ones, loss_weights=ones / ones.sum(),
        metadata={"response_length": num_tokens // 2},
    )  # fmt: skip
    batch = add_advantages(row, torch.randn(ones.shape, generator=draw))
    seconds = []
    for _ in range(num_steps):
        began = bench.synchronize()
        run_step(backend, batch, gather=False)
        seconds.append(bench.synchronize() - began)
    return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def settings(bench: Bench) -> Found:
    """Return the settings of a run: one optimizer step a training step, exact lengths, no KL. Raises AssertionError if
    a prompt has another number of tokens than asked for."""
    from skyrl_train.entrypoints.model_files import load_tokenizer

    size, draw = bench.size, random.Random(0)
    lengths = range(size.num_prompts * size.num_steps)
    texts = (
        " ".join(f"w{draw.randrange(400)}" for _ in range(size.prompt_tokens - NUM_TEMPLATE_TOKENS)) for _ in lengths
    )
    rows = [[{"role": "user", "content": text}] for text in texts]
    tokenizer = load_tokenizer(model_folder(bench))
    counts = {len(tokenizer.apply_chat_template(row, add_generation_prompt=True, return_dict=False)) for row in rows}
    assert counts == {size.prompt_tokens}, f"prompts have {counts} tokens, not {size.prompt_tokens}"
    prompts = bench.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return {
        "data": {"train_data": [str(prompts)], "val_data": [], "cache_dir": str(bench.folder / "rows")},
        "environment": {"env_class": "even_words"},
        "trainer": {
            "run_dir": str(bench.folder / "run"),
            "policy": {"model": {"path": model_folder(bench)}, "optimizer_config": {"lr": 1e-6}},
            "placement": {"device": bench.device, "launcher": "inline"},
            "algorithm": {"use_kl_loss": False},
            "bf16": bench.dtype == "bfloat16",
            "train_batch_size": size.num_prompts,
            "policy_mini_batch_size": size.num_prompts,
            "micro_train_batch_size_per_gpu": size.micro_batch,
            "micro_forward_batch_size_per_gpu": size.micro_batch,
            "max_training_steps": size.num_steps,
            "max_prompt_length": size.prompt_tokens,
            "ckpt_interval": -1,
            "eval_interval": -1,
            "print_example_interval": -1,
        },
        "generator": {
            "backend": "native",
            "model_dtype": bench.dtype,
            "n_samples_per_prompt": size.num_samples,
            "sampling_params": {
                "max_generate_length": size.new_tokens,
                "additional_kwargs": {"ignore_eos": True},
            },
        },
    }  # fmt: skip


# ---- all sections


def _run_in_child(name: str, bench: Bench, output: str) -> None:
    """Write what a section found, or the end of its traceback."""
    os.setsid()  # engines of this section end with its process group
    faulthandler.dump_traceback_later(get_limit(name, bench), exit=True, file=2)
    try:
        found = {"ok": True, "found": SECTIONS[name].run(bench)}
    except BaseException:  # whatever it is, it belongs into the file, and the other sections go on
        found = {"ok": False, "error": traceback.format_exc().splitlines()[-ERROR_LINES:]}
    Path(output).write_text(json.dumps(found))


def get_limit(name: str, bench: Bench) -> float:
    """Return a section's time limit in seconds. A CPU may be shared with other programs."""
    return SECTIONS[name].seconds * (4 if bench.device == "cpu" else 1)


def run_section(name: str, bench: Bench) -> Found:
    """Run a section in a process of its own, which ends at the section's limit."""
    began, limit, output = time.perf_counter(), get_limit(name, bench), bench.folder / f"{name}.json"
    # A process forked from one that has touched CUDA cannot use it.
    context: Any = multiprocessing.get_context("spawn" if bench.device == "cuda" else "fork")
    process = context.Process(target=_run_in_child, args=(name, bench, str(output)))
    process.start()
    process.join(limit + 5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    died = {"ok": False, "error": [f"did not end within {limit:g} s, or its process died ({process.exitcode})"]}
    found = json.loads(output.read_text()) if output.exists() else died
    return found | {"section_seconds": time.perf_counter() - began}


def preload() -> None:
    """Import what the forked processes of sections need."""
    with suppress(ImportError):
        import skyrl_train_testing.backend_checks  # noqa: F401


def find_obstacle(name: str, bench: Bench, left: float, is_named: bool) -> str | None:
    """Return why a section is skipped, or None."""
    section, limit = SECTIONS[name], get_limit(name, bench)
    if missing := [package for package in section.needs if find_spec(package) is None]:
        return f"not installed: {', '.join(missing)}"
    if bench.device == "cpu" and not section.on_cpu and not is_named:
        return "takes long on a CPU; name it in --sections"
    return f"{left:.0f} s of --budget are left, it may take {limit:g}" if left < limit else None


def run(bench: Bench, output: Path, budget: float, names: Sequence[str] = ()) -> bool:
    """Run sections and write the file after each. Returns: True if all that ran are well."""
    if bench.device == "cpu":
        preload()
    began, results = time.perf_counter(), {}
    for name in names or SECTIONS:
        left = budget - (time.perf_counter() - began)
        obstacle = find_obstacle(name, bench, left, bool(names))
        results[name] = {"skipped": obstacle} if obstacle else run_section(name, bench)
        whole = {"device": bench.device, "dtype": bench.dtype, "size": asdict(bench.size), "sections": results}
        output.write_text(json.dumps(whole | {"seconds": time.perf_counter() - began}, indent=1) + "\n")
        if obstacle:
            print(f"{name}: skipped: {obstacle}", flush=True)
            continue
        is_well = results[name]["ok"]
        print(f"{name}: {'ok' if is_well else 'FAILED'} in {results[name]['section_seconds']:.1f} s", flush=True)
        if not is_well:
            print("\n".join(results[name]["error"]), flush=True)
    return all(result.get("ok", True) for result in results.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--steps", type=int, help="training steps, the first not counted")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; sections that may not fit are skipped")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=(), metavar="NAME")
    options = parser.parse_args(arguments)
    size = TINY if options.tiny else HALF_BILLION
    if options.steps is not None:
        if options.steps <= WARM_UP_STEPS:
            parser.error(f"--steps must be above the {WARM_UP_STEPS} that is not counted; got {options.steps}")
        size = replace(size, num_steps=options.steps)
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        names = options.sections and ["machine", *options.sections]
        bench = Bench(options.device, dtype, size, Path(folder))
        is_well = run(bench, options.output, options.budget, names)
    print(f"{'all is well' if is_well else 'sections FAILED'}; written to {options.output}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

"""Correctness, speed and memory on one GPU within ten minutes, as one JSON file.

    python benchmarks/gpu_day.py --output gpu_day.json            # one CUDA device, under 8 minutes
    python benchmarks/gpu_day.py --device cpu --tiny              # the same code in under a minute

Needs torch, transformers and this tree: trainer, policy and native engine are one process (launcher `inline`), without
Ray, vLLM or network; models have random weights. Sections, each written to the file when it ends:

- `engine_checks`: the conformance kit on the native engine, against transformers on the CPU.
- `backend_checks`: invariances of an optimizer step of FSDP2.
- `grpo`: training steps of a model of 0.5 billion parameters: seconds of each part, tokens a second of generation and
  training, weight sync, peak memory, gap of log-probs between engine and trainer.
- `engine_speed`: tokens a second of the native engine alone, by the number of requests.

A section that fails has the end of its traceback in `error`; the exit status is 1 unless all sections are `ok`. After
`--limit` seconds the process ends, whatever hangs; in the file the section stays `ok: false`.
"""

import argparse
import asyncio
import faulthandler
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LIMIT_SECONDS = 480.0
ERROR_LINES = 12
WORDS = ("<pad>", "<end>", "<start>", "user", "assistant")
PAD, END = WORDS[:2]
TEMPLATE = (
    "{% for m in messages %}{{ '<start> ' + m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start> assistant ' }}{% endif %}"
)
NUM_TEMPLATE_TOKENS = 5
ENGINE_GAP = "policy/rollout_train_logprobs_abs_diff"
WARM_UP_STEPS = 1
"""Training steps that are not counted."""


@dataclass(frozen=True)
class Size:
    """Amount of work.

    Args:
        model: shape of the trained model, as `Qwen3Config` takes it.
        checks: names of the conformance checks; None: all.
        batches: requests at once, of the engine alone.
    """

    model: dict[str, Any]
    num_prompts: int
    num_samples: int
    prompt_tokens: int
    new_tokens: int
    micro_batch: int
    num_steps: int
    batches: tuple[int, ...]
    checks: tuple[str, ...] | None = None


HALF_BILLION = Size(
    model=dict(  # sizes of Qwen2.5-0.5B
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    ),
    num_prompts=8, num_samples=8, prompt_tokens=256, new_tokens=256, micro_batch=8, num_steps=4, batches=(1, 16, 64),
)  # fmt: skip
TINY = Size(
    model=dict(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
    ),
    num_prompts=2, num_samples=4, prompt_tokens=8, new_tokens=8, micro_batch=8, num_steps=2, batches=(1, 4),
    checks=("check_log_probs", "check_prompt_log_probs",
            "check_update", "check_sleep"),
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Device, number format, amount of work and folder for files that sections share."""

    device: str
    dtype: str
    size: Size
    folder: Path


# ---- sections: each imports what it needs, so that one that cannot be imported fails alone


def machine(bench: Bench) -> dict[str, Any]:
    """Return the device, versions and the load."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": version("torch"), "transformers": version("transformers"),
        "cpus": os.cpu_count(), "load": os.getloadavg()[0], "commit": commit or "unknown", "dtype": bench.dtype,
    }  # fmt: skip
    if bench.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        found |= {"gpu": device.name, "capability": f"{device.major}.{device.minor}", "cuda": torch.version.cuda}
        found["memory_gb"] = device.total_memory / 1e9
    return found


def engine_checks(bench: Bench) -> dict[str, Any]:
    """Run the conformance kit on the native engine. Raises ConformanceError with every broken rule."""
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
    from skyrl_train_testing.engine_conformance import CHECKS, EngineUnderTest, check_engine, make_tiny_model

    names = bench.size.checks
    checks = [check for check in CHECKS if names is None or check.name in names]
    path = make_tiny_model(bench.folder / "checked", tied=True)

    async def check(dtype: str) -> Any:
        engine = NativeInferenceEngine(path, device=bench.device, dtype=dtype)
        try:
            return await check_engine(EngineUnderTest(engine, path), checks)
        finally:
            await engine.teardown()

    found: dict[str, Any] = {}
    reports = {dtype: asyncio.run(check(dtype)) for dtype in dict.fromkeys(("float32", bench.dtype))}
    for dtype, report in reports.items():
        results = [outcome.result for outcome in report.outcomes]
        found[dtype] = {result: results.count(result) for result in ("passed", "lacks", "failed")}
    broken = [f"{dtype}: {outcome.words}" for dtype, report in reports.items() for outcome in report.failures]
    if broken:
        raise AssertionError(f"{json.dumps(found)}\n" + "\n".join(broken))
    return found


def backend_checks(bench: Bench) -> dict[str, Any]:
    """Divide optimizer steps in many ways and compare them. Raises InvarianceError with all that differs."""
    from skyrl_train.config.training_backends import TrainingBackendRegistry
    from skyrl_train_testing.backend_checks import check_training_backend
    from skyrl_train_testing.tiny_models import build_tiny_qwen3

    folder = str(bench.folder / "stepped")
    build_tiny_qwen3(hidden_size=32, scale=3.0, vocab_size=64, max_position_embeddings=128).save_pretrained(folder)
    reason = "kernels of a GPU add in another order than those of the model on the CPU"
    exempt = {"agreement": reason} if bench.device == "cuda" else None
    check_training_backend(TrainingBackendRegistry.get("fsdp2"), folder, exempt=exempt, device=bench.device)
    return {"device": bench.device, "exempt": list(exempt or {})}


def grpo(bench: Bench) -> dict[str, Any]:
    """Train by GRPO and return medians over the steps after the first."""
    import torch

    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.entrypoints.main_base import BasePPOExp
    from skyrl_train.utils.run_folder import RunFolder

    class EvenWords(BaseTextEnv):
        """The share of words of even number in an answer, which differs from sample to sample."""

        def __init__(self, env_config: Any = None, extras: Any = None):
            super().__init__()

        def step(self, action: str) -> BaseTextEnvStepOutput:
            reward = sum(word[-1] in "02468" for word in action.split()) / bench.size.new_tokens
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    skyrl_gym.register(id="even_words", entry_point=EvenWords)
    try:
        BasePPOExp(SkyRLConfig.from_dict(settings(bench))).run()
    finally:
        skyrl_gym.deregister("even_words")
    steps = [row for row in RunFolder(bench.folder / "run").read_metrics() if row["step"] > WARM_UP_STEPS]
    assert len(steps) == bench.size.num_steps - WARM_UP_STEPS, f"{len(steps)} steps were counted"
    size, first = bench.size, RunFolder(bench.folder / "run").read_metrics()[0]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in steps)

    num_samples = size.num_prompts * size.num_samples
    new_tokens, all_tokens = num_samples * size.new_tokens, num_samples * (size.prompt_tokens + size.new_tokens)
    found = {
        "parameters": num_parameters(bench), "samples": num_samples, "tokens": all_tokens,
        "seconds": {name.removeprefix("timing/"): median(name) for name in steps[0] if name.startswith("timing/")},
        "weight_sync": {name: median(name) for name in steps[0] if name.startswith("weight_sync/")},
        "memory": {name: value for name, value in first.items() if name.startswith("memory/")},
        "log_probs_differ": {kind: max(row[f"{ENGINE_GAP}_{kind}"] for row in steps) for kind in ("mean", "max")},
        "grad_norm": median("policy/grad_norm"),
        "generated_tokens_per_second": new_tokens / median("timing/generate"),
        "trained_tokens_per_second": all_tokens / median("timing/train_critic_and_policy"),
    }  # fmt: skip
    if bench.device == "cuda":
        found["peak_allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["peak_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    largest = LOG_PROB_TOLERANCE[bench.dtype]
    assert found["log_probs_differ"]["mean"] <= largest, f"engine and trainer differ by more than {largest}: {found}"
    assert found["grad_norm"] > 0, f"nothing was learned: {found}"
    return found


LOG_PROB_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.05}
"""Largest mean difference of a token's log-prob between engine and trainer, by the number format."""


def engine_speed(bench: Bench) -> dict[str, Any]:
    """Return tokens a second of the native engine alone, log-probs included."""
    import torch

    from skyrl_train.inference_engines.base import InferenceEngineInput
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

    size = bench.size

    async def measure() -> dict[str, float]:
        engine = NativeInferenceEngine(model_folder(bench), device=bench.device, dtype=bench.dtype)
        draw = torch.Generator().manual_seed(0)
        found = {}
        try:
            for turn, batch in enumerate([size.batches[0], *size.batches]):  # the first warms up
                shape = batch, size.prompt_tokens
                prompts = torch.randint(2, size.model["vocab_size"], shape, generator=draw).tolist()
                params = {"max_tokens": size.new_tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
                began = time.perf_counter()
                await engine.generate_batch(InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params))
                if turn:
                    found[str(batch)] = batch * size.new_tokens / (time.perf_counter() - began)
        finally:
            await engine.teardown()
        return found

    return {"tokens_per_second_by_requests": asyncio.run(measure())}


SECTIONS: tuple[Callable[[Bench], dict[str, Any]], ...] = (machine, engine_checks, backend_checks, grpo, engine_speed)


# ---- the trained model


def model_folder(bench: Bench) -> str:
    """Return the folder of the model, which the first call writes: random weights, one word per token.

    The architecture is Qwen3: with a Qwen2 config transformers would load Qwen2's tokenizer class, which drops the
    words.
    """
    folder = bench.folder / "model"
    if folder.exists():
        return str(folder)
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = [*WORDS, *(f"w{number}" for number in range(bench.size.model["vocab_size"] - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(
        **bench.size.model, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    return str(folder)


def num_parameters(bench: Bench) -> int:
    """Return the number of parameters of the trained model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder(bench)))
    return sum(parameter.numel() for parameter in model.parameters())


def settings(bench: Bench) -> dict[str, Any]:
    """Return the settings of the run. One optimizer step a training step, exact lengths, no KL."""
    size = bench.size
    draw = random.Random(0)
    num_words = size.prompt_tokens - NUM_TEMPLATE_TOKENS
    texts = (
        " ".join(f"w{draw.randrange(400)}" for _ in range(num_words)) for _ in range(size.num_prompts * size.num_steps)
    )
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    prompts = bench.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    }


# ---- all sections


def run_section(section: Callable[[Bench], dict[str, Any]], bench: Bench) -> dict[str, Any]:
    """Return what a section found, or the end of its traceback."""
    began = time.perf_counter()
    try:
        found = {"ok": True, "found": section(bench)}
    except Exception:  # whatever it is, it belongs into the file, and the other sections go on
        found = {"ok": False, "error": traceback.format_exc().splitlines()[-ERROR_LINES:]}
    gc.collect()
    if bench.device == "cuda":
        import torch

        torch.cuda.empty_cache()
    return found | {"section_seconds": time.perf_counter() - began}


def run(bench: Bench, output: Path, limit: float) -> bool:
    """Run all sections and write the file after each. Returns: True if all are well."""
    began = time.perf_counter()
    waiting = {"ok": False, "error": ["did not run"]}
    results: dict[str, Any] = {section.__name__: waiting for section in SECTIONS}
    whole = {"device": bench.device, "size": asdict(bench.size), "sections": results}

    def write() -> None:
        output.write_text(json.dumps(whole | {"seconds": time.perf_counter() - began}, indent=1) + "\n")

    faulthandler.dump_traceback_later(limit, exit=True, file=2)  # standard error, whatever sys.stderr is
    for section in SECTIONS:
        name = section.__name__
        results[name] = {
            "ok": False,
            "error": [f"did not end within {limit:g} s of the whole run, or its process died"],
        }
        write()
        results[name] = run_section(section, bench)
        write()
        print(
            f"{name}: {'ok' if results[name]['ok'] else 'FAILED'} in {results[name]['section_seconds']:.1f} s",
            flush=True,
        )
        if not results[name]["ok"]:
            print("\n".join(results[name]["error"]), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return all(result["ok"] for result in results.values())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few checks")
    parser.add_argument("--steps", type=int, help="training steps, the first not counted")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds after which the process ends")
    options = parser.parse_args(arguments)
    size = TINY if options.tiny else HALF_BILLION
    if options.steps is not None:
        if options.steps <= WARM_UP_STEPS:
            parser.error(f"--steps must be above the {WARM_UP_STEPS} that is not counted; got {options.steps}")
        size = replace(size, num_steps=options.steps)
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        is_well = run(Bench(options.device, dtype, size, Path(folder)), options.output, options.limit)
    print(f"{'all is well' if is_well else 'sections FAILED'}; written to {options.output}")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())

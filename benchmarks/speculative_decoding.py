"""Measure speculative decoding of the native engine: tokens a second with drafts and without.

    python benchmarks/speculative_decoding.py [--model FOLDER] [--draft-model FOLDER ...] [--draft-layers N ...]
                                              [--drafts 4 ...] [--batches 1 4 16] [--tokens 256] [--no-lookup]

Drafts are looked up (`lookup`), come from each model of `--draft-model`, and from the first N layers of the model
itself for each N of `--draft-layers` (all of its layers: the upper bound of acceptance). Each way is measured with each
number of drafts of `--drafts`.

Without `--model` a Qwen3 of 3.3 million untrained parameters in four layers, float32, one thread. Its greedy answers
repeat themselves within a few tokens (nearly all looked-up drafts are accepted: the best case); those sampled at
temperature 1 repeat nothing (the cost of looking). All ways take turns, with the same tokens: the script checks it.
Medians; prints a markdown table.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.tiny_models import character_tokenizer, tiny_qwen3


@dataclass(eq=False)
class Way:
    """One way to decode, and its figures at one batch."""

    engine: NativeInferenceEngine
    speeds: list[float] = field(default_factory=list)
    """Tokens a second of each round."""
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def accepted(self) -> str:
        return f"{self.num_accepted / self.num_drafted:.0%}" if self.num_drafted else "none made"


def make_model(folder: str) -> str:
    """Write the model, and a tokenizer whose tokens are characters."""
    tokenizer = character_tokenizer()
    sizes = dict(hidden_size=256, num_hidden_layers=4, intermediate_size=768, vocab_size=len(tokenizer))
    tiny_qwen3(**sizes, max_position_embeddings=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def first_layers(model: str, num: int, folder: str) -> str:
    """Write a model of the first `num` layers of another one, with its embeddings and output layer."""
    config = AutoConfig.from_pretrained(model)
    if not 1 <= num <= config.num_hidden_layers:
        raise SystemExit(f"--draft-layers {num} must be from 1 to the {config.num_hidden_layers} layers of {model}")
    config.num_hidden_layers = num
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num]
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def make_ways(args: argparse.Namespace, model: str, folder: Path) -> dict[tuple[str, int], Way]:
    """Start an engine for each source of drafts and number of them; the first one drafts nothing."""
    sources: dict[str, str | None] = {} if args.no_lookup else {"lookup": None}
    sources |= {Path(path).name: path for path in args.draft_model}
    sources |= {f"{num} layers": first_layers(model, num, str(folder / f"layers{num}")) for num in args.draft_layers}
    ways = {("none", 0): Way(NativeInferenceEngine(model))}
    for name, path in sources.items():
        for num in args.drafts:
            engine = NativeInferenceEngine(model, num_speculative_tokens=num, speculative_model=path)
            ways[name, num] = Way(engine)
    return ways


async def measure_batch(ways: Mapping[tuple[str, int], Way], asked: InferenceEngineInput, num_rounds: int) -> None:
    """Let all ways answer in turn; the first round warms up.

    Raises:
        AssertionError: an answer is not that of decoding one by one.
    """
    for way in ways.values():
        way.speeds, way.num_drafted, way.num_accepted = [], 0, 0
    for turn in range(num_rounds + 1):
        expected = None
        for name, way in ways.items():
            start = time.monotonic()
            output = await way.engine.generate(asked)
            seconds = time.monotonic() - start
            expected = expected or output["response_ids"]
            assert output["response_ids"] == expected, f"drafts changed an answer: {name}"
            if turn:
                way.speeds.append(sum(map(len, expected)) / seconds)
                for counts in output.get("draft_counts") or []:
                    way.num_drafted += counts.num_drafted
                    way.num_accepted += counts.num_accepted


async def measure(args: argparse.Namespace, model: str, folder: Path) -> None:
    ways = make_ways(args, model, folder)
    print("| answers | batch | drafts of | drafts | tokens/s, one by one | tokens/s with drafts | ratio | accepted |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        for batch in args.batches:
            prompts = torch.randint(5, 60, (batch, 32), generator=torch.Generator().manual_seed(0)).tolist()
            params: dict[str, Any] = dict(max_tokens=args.tokens, temperature=temperature, ignore_eos=True, seed=0)
            asked = InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params, count_cached_tokens=True)
            await measure_batch(ways, asked, args.rounds)
            (_, alone), *drafting = ways.items()
            plain = median(alone.speeds)
            for (source, num), way in drafting:
                fast = median(way.speeds)
                figures = f"{plain:,.0f} | {fast:,.0f} | {fast / plain:.2f} | {way.accepted}"
                print(f"| {name} | {batch} | {source} | {num} | {figures} |", flush=True)
    for way in ways.values():
        await way.engine.teardown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: made here")
    parser.add_argument("--draft-model", nargs="+", default=[], help="folders of smaller models with the same tokens")
    parser.add_argument("--draft-layers", type=int, nargs="+", default=[], help="first layers of the model that draft")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4], help="draft tokens of one pass, at least 1")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-lookup", action="store_true", help="measure draft models alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_model(f"{folder}/model")
        asyncio.run(measure(args, model, Path(folder)))
    print(f"\n{os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""Measure what the prefix cache saves: rollouts of the calculator over 10 turns with it and without it.

    python benchmarks/prefix_cache.py [--prompts 2] [--samples 4] [--turns 10] [--engines 1 2] [--rounds 3]

A Qwen3 of 3.3 million parameters, float32, native engines of one thread each in this process, behind client and
generator. The model is untrained, so that no answer ends an episode. The two ways take turns, with the same tokens:
the script checks it. "Needed" are prompt tokens that no engine has computed before, whichever it was. Medians; prints a
markdown table.
"""

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch
from transformers import AutoTokenizer

from skyrl_train.config import SkyRLConfig, SkyRLGymConfig
from skyrl_train.generators.inputs import prepare_generator_input
from skyrl_train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_train.inference_engines.base import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.tiny_models import character_tokenizer, tiny_qwen3

CONTEXT = 4096


class CountingClient(InferenceEngineClient):
    """Client that counts the tokens of all requests."""

    known: set[int]
    """Chained hashes of all prefixes that were computed."""
    needed = prompted = generated = 0

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        output = await super().generate(input_batch)
        for prompt, response in zip(input_batch.get("prompt_token_ids") or [], output["response_ids"], strict=True):
            prefix = 0
            for place, token in enumerate([*prompt, *response[:-1]]):
                prefix = hash((prefix, token))
                self.needed += place < len(prompt) and prefix not in self.known
                self.known.add(prefix)
            self.prompted += len(prompt)
            self.generated += len(response)
        return output


def make_folder(folder: str) -> None:
    """Write the model, and a tokenizer whose tokens are characters."""
    tokenizer = character_tokenizer()
    sizes = dict(hidden_size=256, num_hidden_layers=4, intermediate_size=768, vocab_size=len(tokenizer))
    tiny_qwen3(**sizes, max_position_embeddings=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def batch_of(args: argparse.Namespace) -> Any:
    """Samples of sums of two numbers, for a model that never answers."""
    rows: list[Any] = [
        {
            "prompt": [{"role": "user", "content": f"What is {17 * index + 5} + {29 * index + 8}?"}],
            "env_class": "calculator",
            "env_extras": {"reward_spec": {"method": "rule", "ground_truth": "none"}, "max_turns": args.turns},
            "uid": str(index),
        }
        for index in range(args.prompts)
    ]
    return prepare_generator_input(rows, args.samples, None, "calculator", "train", 1)[0]


@dataclass
class Measurement:
    """One batch of rollouts."""

    seconds: float
    cpu_seconds: float
    client: CountingClient
    metrics: dict[str, float]
    responses: list[list[int]]


async def measure(folder: str, args: argparse.Namespace, num_engines: int, caching: bool) -> Measurement:
    """Generate one batch with new engines."""
    sampling = dict(max_generate_length=args.response, temperature=1.0)
    settings = dict(sampling_params=sampling, max_turns=args.turns, max_input_length=CONTEXT, seed=5)
    config = SkyRLConfig.from_dict({"generator": settings})
    engines = [NativeInferenceEngine(folder, enable_prefix_caching=caching) for _ in range(num_engines)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    client = CountingClient(engines, tokenizer, config)
    client.known = set()
    try:
        generator = SkyRLGymGenerator(config.generator, SkyRLGymConfig(), client, tokenizer, "tiny")
        wall, cpu = time.perf_counter(), time.process_time()
        output = await generator.generate(batch_of(args), disable_tqdm=True)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        await client.teardown()
    return Measurement(wall, cpu, client, client.take_metrics(), output["response_ids"])


def row(num_engines: int, caching: bool, rounds: list[Measurement], speedups: list[float]) -> str:
    client, computed = rounds[0].client, rounds[0].metrics["engines/prompt_tokens_computed"]
    rates = [each.client.generated / each.seconds for each in rounds]
    cells = [
        str(num_engines),
        "on" if caching else "off",
        f"{client.prompted:,}",
        f"{computed:,.0f}",
        f"{client.needed:,}",
        f"{computed / client.needed:.2f}",
        f"{median(rates):,.0f} ({min(rates):,.0f} - {max(rates):,.0f})",
        f"{median(each.client.generated / each.cpu_seconds for each in rounds):,.0f}",
        f"{median(speedups):.2f}x" if caching else "",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--response", type=int, default=24)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    header = ["engines", "cache", "prompt tokens", "computed", "needed", "computed / needed", "tokens/s (min - max)"]
    print("| " + " | ".join([*header, "tokens per CPU second", "off / on, CPU seconds"]) + " |")
    print("|---:|---|" + "---:|" * 7)
    with tempfile.TemporaryDirectory(prefix="prefix-cache-") as folder:
        make_folder(folder)
        for num_engines in args.engines:
            found: dict[bool, list[Measurement]] = {False: [], True: []}
            for _ in range(args.rounds):
                for caching, measurements in found.items():
                    measurements.append(asyncio.run(measure(folder, args, num_engines, caching)))
                    assert measurements[-1].responses == found[False][0].responses, "the cache changed the answers"
            pairs = zip(found[False], found[True], strict=True)
            speedups = [without.cpu_seconds / cached.cpu_seconds for without, cached in pairs]
            for caching, measurements in found.items():
                print(row(num_engines, caching, measurements, speedups), flush=True)


if __name__ == "__main__":
    main()

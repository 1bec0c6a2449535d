"""Measure speculative decoding of the native engine: tokens a second with drafts and without.

    python benchmarks/speculative_decoding.py [--model FOLDER] [--draft-model FOLDER] [--drafts 4] [--batches 1 4 16]
                                              [--tokens 256]

Without `--model` a Qwen3 of 3.3 million untrained parameters, float32, one thread. Its greedy answers repeat themselves
within a few tokens (nearly all drafts are accepted: the best case); those sampled at temperature 1 repeat nothing (the
cost of looking). Both ways take turns, with the same tokens: the script checks it. Medians; prints a markdown table.
Drafts are looked up, or come from `--draft-model`.
"""

import argparse
import asyncio
import os
import tempfile
import time
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch

from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.tiny_models import character_tokenizer, tiny_qwen3


def make_model(folder: str) -> str:
    """Write the model, and a tokenizer whose tokens are characters."""
    tokenizer = character_tokenizer()
    sizes = dict(hidden_size=256, num_hidden_layers=4, intermediate_size=768, vocab_size=len(tokenizer))
    tiny_qwen3(**sizes, max_position_embeddings=1024).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def measure(args: argparse.Namespace, model: str) -> None:
    drafting: dict[str, Any] = dict(num_speculative_tokens=args.drafts, speculative_model=args.draft_model)
    engines = {0: NativeInferenceEngine(model), args.drafts: NativeInferenceEngine(model, **drafting)}
    print("| answers | batch | tokens/s, one by one | tokens/s with drafts | ratio | drafts accepted |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        for batch in args.batches:
            prompts = torch.randint(5, 60, (batch, 32), generator=torch.Generator().manual_seed(0)).tolist()
            params: dict[str, Any] = dict(max_tokens=args.tokens, temperature=temperature, ignore_eos=True, seed=0)
            asked = InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params, count_cached_tokens=True)
            speeds: dict[int, list[float]] = {num: [] for num in engines}
            drafted = accepted = 0
            for turn in range(args.rounds + 1):  # the first warms up
                answers = {}
                for num, engine in engines.items():
                    start = time.monotonic()
                    output = await engine.generate(asked)
                    if turn:
                        speeds[num].append(batch * args.tokens / (time.monotonic() - start))
                    answers[num] = output["response_ids"]
                    for own in output.get("draft_counts") or []:
                        drafted, accepted = drafted + own.num_drafted, accepted + own.num_accepted
                assert answers[0] == answers[args.drafts], "drafts changed an answer"
            plain, fast = (median(speeds[num]) for num in engines)
            share = f"{accepted / drafted:.0%}" if drafted else "none made"
            print(f"| {name} | {batch} | {plain:,.0f} | {fast:,.0f} | {fast / plain:.2f} | {share} |", flush=True)
    for engine in engines.values():
        await engine.teardown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: made here")
    parser.add_argument("--draft-model", help="folder of a smaller model with the same tokens; default: prompt lookup")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, args.model or make_model(folder)))
    print(f"\n{os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

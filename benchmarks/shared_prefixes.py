"""Measure what shared prefixes save: forward and backward of the samples of a few prompts, computed once and apart.

    python benchmarks/shared_prefixes.py [--prompts 32 128 512] [--samples 8] [--response 64] [--rounds 5]

A Qwen3 of 3.3 million parameters, float32, one thread, 4 prompts a micro-batch. The two ways take turns; figures are
medians of processor seconds, which depend little on what else runs. Then the micro-batches that a token budget divides
twice as many samples into, where shared prompts count once and where they do not. Prints markdown tables.
"""

import argparse
import os
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch

from skyrl_train.models.cpu_linear import use_onednn_linear
from skyrl_train.models.packing import PrefixOrder, packed, prefix_order
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train_testing.tiny_models import tiny_qwen3

NUM_PROMPTS, VOCABULARY, BUDGET = 4, 512, 2048


def batch(
    num_prompt: int, num_samples: int, num_response: int, num_prompts: int = NUM_PROMPTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and mask of `num_samples` different responses to each prompt."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (num_prompts, num_prompt), generator=generator)
    responses = torch.randint(VOCABULARY, (num_prompts * num_samples, num_response), generator=generator)
    sequences = torch.cat([prompts.repeat_interleave(num_samples, 0), responses], dim=1)
    return sequences, torch.ones_like(sequences)


def seconds(model: ScoringModel, sequences: torch.Tensor, mask: torch.Tensor, num_response: int) -> float:
    """Processor seconds of a forward and backward."""
    model.zero_grad()
    begin = time.process_time()
    model(sequences, mask, num_response, 1.0).log_probs.mean().backward()
    return time.process_time() - begin


def divided(sequences: torch.Tensor, mask: torch.Tensor, num_response: int, prefixes: PrefixOrder | None) -> list[int]:
    """Tokens that a model with shared prefixes lays out for each micro-batch of a token budget."""
    lengths, rows = mask.sum(1).tolist(), range(len(mask))
    schedule = Schedule.of(lengths, [rows], 1, micro_batch_size=1, max_tokens=BUDGET, prefixes=prefixes)
    chosen = [schedule.rows[0][list(micro.rows)] for micro in schedule.whole()[0]]
    return [packed(sequences[c], mask[c], num_response, share_prefixes=True).input_ids.numel() for c in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = dict(hidden_size=256, num_hidden_layers=4, intermediate_size=768, vocab_size=VOCABULARY)
    causal_lm = tiny_qwen3(**sizes, max_position_embeddings=4096)
    use_onednn_linear(causal_lm)
    model = ScoringModel(causal_lm)
    print("| prompt tokens | CPU seconds apart | shared | apart / shared | tokens apart / shared |")
    print("|---:|---:|---:|---:|---:|")
    for num_prompt in args.prompts:
        sequences, mask = batch(num_prompt, args.samples, args.response)
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(args.rounds + 1):
            for share in found:
                model.share_prefixes = share
                found[share].append(seconds(model, sequences, mask, args.response))
        apart, shared = (median(found[share][1:]) for share in (False, True))
        own = num_prompt + args.samples * args.response
        tokens = args.samples * (num_prompt + args.response) / own
        print(f"| {num_prompt} | {apart:.2f} | {shared:.2f} | {apart / shared:.2f}x | {tokens:.2f}x |", flush=True)
    print(f"\n| prompt tokens | micro-batches of {BUDGET} tokens | prompts count once | tokens | prompts count once |")
    print("|---:|---:|---:|---:|---:|")
    for num_prompt in args.prompts:
        sequences, mask = batch(num_prompt, args.samples, args.response, 2 * NUM_PROMPTS)
        orders = (None, prefix_order(sequences, mask, args.response))
        plain, once = (divided(sequences, mask, args.response, order) for order in orders)
        print(f"| {num_prompt} | {len(plain)} | {len(once)} | {sum(plain):,} | {sum(once):,} |")


if __name__ == "__main__":
    main()

"""A tiny model with which every example here runs on a laptop: 0.2 million weights, and a minute of warm-up.

    python examples/tinker/tiny_model.py runs/tiny-tinker

It has seen how to work an addition out (rarely, unless the prompt says so) and how to ask a calculator (rarely), and
mostly answers with an estimate. So there is something to raise. Architecture and tokenizer are the quickstart's. Needs
torch and transformers, as the server has them; the other examples do not.
"""

import argparse
import math
import random
import sys
from pathlib import Path

import torch
from problems import HINT, draw_problem, estimate, tool_reply, work_out
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from model import make_model, make_tokenizer
from tasks import TASKS

IGNORED = -100
LEARNING_RATE = 4e-3
RAMP_STEPS = 20

Part = tuple[str, bool]
"""A text, and whether the model is to learn it."""


def demonstrate_with_hint(draw: random.Random) -> list[Part]:
    problem = draw_problem(draw)
    return [(HINT + problem.prompt, False), (work_out(problem), True)]


def demonstrate(draw: random.Random) -> list[Part]:
    problem = draw_problem(draw)
    ways = (work_out(problem), work_out(problem, carry=False), estimate(problem))
    return [(problem.prompt, False), (draw.choices(ways, (0.25, 0.15, 0.6))[0], True)]


def demonstrate_with_tool(draw: random.Random) -> list[Part]:
    problem = draw_problem(draw, "+-*")
    asked = (problem.tool_prompt, False)
    if draw.random() < 0.7:
        return [asked, (f"A: {problem.left}\n", True)]
    call = f"calc: {problem}\n"
    return [asked, (call, True), (tool_reply(call) or "", False), (f"A: {problem.answer}\n", True)]


BATCH = {demonstrate_with_hint: 12, demonstrate: 20, demonstrate_with_tool: 16}
"""Number of demonstrations of each kind per step. Each kind is a batch of its own, because lengths differ."""


def encode(tokenizer: PreTrainedTokenizerBase, parts: list[Part]) -> tuple[list[int], list[int]]:
    """Return the token ids and labels of a text."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learned in parts:
        new = tokenizer.encode(text, add_special_tokens=False)
        ids += new
        labels += new if learned else [IGNORED] * len(new)
    return ids, labels


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_steps: int, draw: random.Random
) -> dict[str, float]:
    """Train the model in place. Returns the losses of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RAMP_STEPS, 1) * (1 + math.cos(math.pi * step / num_steps)) / 2
    )
    losses: dict[str, float] = {}
    for step in range(num_steps):
        for kind, count in BATCH.items():
            input_ids, labels = make_batch([encode(tokenizer, kind(draw)) for _ in range(count)])
            loss = model(input_ids=input_ids, labels=labels).loss
            (loss * count / sum(BATCH.values())).backward()
            losses[kind.__name__] = loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"warm-up step {step:4d}  loss {'  '.join(f'{loss:.3f}' for loss in losses.values())}", flush=True)
    return losses


def make_batch(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [len(rows), longest]. Padding is on the right and attention is causal, so no mask is needed."""
    longest = max(len(ids) for ids, _ in rows)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    return input_ids, torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model for the examples.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=550)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several
    tokenizer, model = make_tokenizer(), make_model(TASKS["calculator"], arguments.seed)
    warm_up(model, tokenizer, arguments.steps, random.Random(arguments.seed))
    tokenizer.save_pretrained(arguments.folder)
    model.save_pretrained(arguments.folder)
    print(f"{model.num_parameters():,} parameters: {arguments.folder}")


if __name__ == "__main__":
    main()

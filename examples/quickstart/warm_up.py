"""A short supervised warm-up on demonstrations: enough for reinforcement learning to find something to reward.

    python examples/quickstart/warm_up.py --model DIR --output DIR --task arithmetic --seed 0

The ids equal a rollout's: the rendered chat template, and the assistant's turns up to and including the end token. Only
the assistant's turns are in the loss.
"""

import argparse
import math
import random
from pathlib import Path
from typing import cast

import torch
from model import END, PAD, VOCABULARY
from tasks import TASKS, Message, Row, Task, make_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

IGNORED = -100
RAMP_STEPS = 20


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Message], turns: list[Message]
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and the mask that is 1 on what the assistant wrote, its end token included."""
    ids: list[int] = []
    mask: list[int] = []
    messages = list(prompt)
    for turn in turns:
        if turn["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            spoken = tokenizer.encode(turn["content"] + END, add_special_tokens=False)
            mask += [0] * (len(before) - len(ids)) + [1] * len(spoken)
            ids = [*cast(list[int], before), *spoken]
        messages.append(turn)
    return ids, mask


def make_batch(
    task: Task, tokenizer: PreTrainedTokenizerBase, rows: list[Row], draw: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Demonstrations of the rows as `input_ids` and `labels`, [len(rows), longest], padded on the right."""
    conversations = [
        encode_conversation(tokenizer, row["prompt"], task.demonstrate(row["extra_info"]["problem"], draw))
        for row in rows
    ]
    longest = max(len(ids) for ids, _ in conversations)
    input_ids = torch.full((len(rows), longest), VOCABULARY.index(PAD))
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (ids, mask) in enumerate(conversations):
        input_ids[i, : len(ids)] = torch.tensor(ids)
        labels[i, : len(ids)] = torch.tensor(
            [token if kept else IGNORED for token, kept in zip(ids, mask, strict=True)]
        )
    return input_ids, labels


def warm_up(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, seed: int, num_steps: int) -> float:
    """Train the model in place on demonstrations, without held-out problems. Returns the loss of the last step."""
    draw = random.Random(seed)
    rows = make_rows(task, 4096, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.warm_up_learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RAMP_STEPS, 1) * (1 + math.cos(math.pi * step / num_steps)) / 2
    )
    model.train()
    loss = torch.tensor(float("nan"))
    for step in range(num_steps):
        # Padding is on the right and attention is causal, so no attention mask is needed.
        input_ids, labels = make_batch(task, tokenizer, draw.sample(rows, task.warm_up_batch_size), draw)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"warm-up step {step:4d}  loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Warm a tiny model up on demonstrations.")
    parser.add_argument("--model", type=Path, required=True, help="folder with the untrained model")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", choices=sorted(TASKS), default="arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, help="default: the task's own")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    task = TASKS[arguments.task]
    warm_up(model, tokenizer, task, arguments.seed, arguments.num_steps or task.warm_up_steps)
    tokenizer.save_pretrained(arguments.output)
    model.save_pretrained(arguments.output)
    print(f"warmed-up model: {arguments.output}")


if __name__ == "__main__":
    main()

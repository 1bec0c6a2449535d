"""Two turns with a tool: look into the drawer that was asked for, and say what is in it. Of a tiny model's size: a call
is one token."""

import itertools
from pathlib import Path
from typing import Any

from skyrl_agent.tasks.base import BaseTask, Instance, Judgement, TaskRowError
from skyrl_agent.tools.base import BaseTool, ToolContext, register_tool
from skyrl_agent.types import Message

KEYS, THINGS = "abc", "123"


def call(name: str, **arguments: str) -> str:
    pairs = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{pairs}}}}}</tool_call>'


LOOKS = [call("look", drawer=key) for key in KEYS]
ANSWERS = [call("finish", answer=thing) for thing in THINGS]


@register_tool("look_into_drawer")
class Look(BaseTool):
    name = "look"

    async def run(self, context: ToolContext, drawer: str) -> str:
        """Looks into a drawer.

        Args:
            drawer: its letter.
        """
        context.memory["looked"] = drawer
        return context.row["thing"] if drawer == context.row["drawer"] else "-"


class Drawers(BaseTask):
    """A quarter for the right drawer, the rest for what is in it; -0.5 for no answer: endings that do not train are
    still compared with, so that they do not become attractive."""

    tools = ("look_into_drawer", "finish")

    def check_row(self, instance: Instance) -> None:
        for field in ("prompt", "drawer", "thing"):
            if field not in instance.row:
                raise TaskRowError(f"Drawers: row {instance.instance_id} has no field {field!r}")

    def get_instruction(self, instance: Instance) -> list[Message]:
        return instance.row["prompt"]

    async def evaluate_result(self, result: Any, instance: Instance, trajectory: Any, runtime: Any = None) -> Judgement:
        looked = any(c.arguments.get("drawer") == instance.row["drawer"] for c in trajectory.tool_calls)
        said = looked and result == instance.row["thing"]
        parts = {"drawer": 0.25 * looked, "thing": 0.75 * said, "silence": -0.5 * (result is None)}
        return Judgement(sum(parts.values()), parts)


def task(**generator: Any) -> dict[str, Any]:
    """Make the content of a task file, with more settings of its generator."""
    sampling = {"stop": ["</tool_call>"], "max_tokens": 2} | generator.pop("sampling_params", {})
    usual = {"tool_format": "hermes", "max_iterations": 2, "max_prompt_length": 64, "sampling_params": sampling}
    agent = "skyrl_agent.agents.react.ReActAgent"
    return {"agent_cls": agent, "task": "drawers.Drawers", "generator": usual | generator}


def rows() -> list[dict[str, Any]]:
    """Every drawer with everything in it."""
    return [
        {"prompt": [{"role": "user", "content": drawer}], "drawer": drawer, "thing": thing}
        for drawer, thing in itertools.product(KEYS, THINGS)
    ]


def save_model_that_knows_calls(folder: Path, steps: int = 150) -> None:
    """A Qwen3 of two layers that looks into a drawer and then says something; the right one of three and the right
    thing of three are twice as likely as the others."""
    import torch

    from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

    tokenizer = build_character_tokenizer(added_tokens=["user", "assistant", "tool", *LOOKS, *ANSWERS])
    tokenizer.save_pretrained(folder)
    model = build_tiny_qwen3(hidden_size=64, vocab_size=len(tokenizer), max_position_embeddings=1024)
    talks = list(itertools.product(zip(KEYS, LOOKS, strict=True), LOOKS, zip(THINGS, ANSWERS, strict=True), ANSWERS))
    ids = torch.tensor([tokenizer.encode(_talk(*talk), add_special_tokens=False) for talk in talks])
    weights = torch.tensor(
        [[1.0 + (look == right[1]), 1.0 + (answer == seen[1])] for right, look, seen, answer in talks]
    )
    written = torch.isin(ids, torch.tensor([tokenizer.convert_tokens_to_ids(text) for text in LOOKS + ANSWERS]))[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        log_probs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)
        chosen = log_probs.gather(-1, ids[:, 1:, None])[..., 0][written].view(-1, 2)
        loss = -(weights * chosen).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = chosen[(weights == 2).all(dim=1)].exp().mean(dim=0)
    assert ((right > 0.4) & (right < 0.6)).all(), f"it should do right every other time; it does with {right}"
    model.save_pretrained(folder)


def _talk(asked: tuple[str, str], look: str, seen: tuple[str, str], answer: str) -> str:
    turns = (
        f"<start>user:{asked[0]}<end><start>assistant:{look}<end><start>tool:{seen[0]}<end><start>assistant:{answer}"
    )
    return turns + "<end>"

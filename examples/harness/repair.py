"""Two agents that know nothing of training, a shell script with curl and mini-SWE-agent, learn a repair in two steps.

    python examples/harness/repair.py [--agent shell] [--seeds 0 1 2] [--steps 10] [--output runs/harness]
    MINI_SWE_AGENT=FOLDER python examples/harness/repair.py --agent mini_swe_agent
    PROGRAM_ENV=FOLDER python examples/harness/repair.py --agent openai_agents_program    # or langgraph_program

A row says what a function gives ("f(a) is a+7"); its file has another number. The agent looks at the file, and then
replaces the wrong number by the right one; the row's test runs on the resulting file. A model of 0.1 million parameters
is warmed up on demonstrations most of which fail: they submit at once, or write a number of chance. Prints the resolve
rate of the first and the last three steps, and the fraction of trained tokens that equal the sampled ones. Settings may
follow `--`: of the asynchronous trainer, say.
"""

import json
import random
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from miniatures import (
    REPOSITORY,
    Messages,
    Metrics,
    argument_parser,
    markdown_table,
    train,
    values_of,
    warm_up,
)

from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

HERE = Path(__file__).resolve().parent
SCRIPTS = {name: HERE / f"run_{name}.sh" for name in ("shell_agent", "mini_swe_agent")}
PROGRAMS = {name: HERE / f"{name}.py" for name in ("openai_agents_program", "langgraph_program")}
"""Agents that call a tool, by `run_python_program.sh`."""

SYSTEM, TASK, PROGRAM = "You repair programs.", "f(a) is a+", "def f(a):\n    return a+"
FENCE, CLOSE = "```mswea_bash_command\n", "\n```"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
GIVE_UP, LOOK = f"{FENCE}{SUBMIT}{CLOSE}", f"{FENCE}cat f.py{CLOSE}"
CHANGE, SAVE = f"{FENCE}sed -i s/", f"/ f.py && {SUBMIT}{CLOSE}"
DIGITS = "123456789"
HABITS = {"give up": 0.35, "careless": 0.3, "careful": 0.35}
"""Share of each way among the demonstrations."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)


TOOL_CALL = '<tool_call>{"name": "shell", "arguments": {"command": "'
TOOL_LOOK, TOOL_CHANGE = f'{TOOL_CALL}cat f.py"}}}}</tool_call>', f"{TOOL_CALL}sed -i s/"
TOOL_SAVE, FINISH = '/ f.py"}}</tool_call>', "Done."
TOOL_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}\n{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
"""Template that shows calls and does not explain tools: a short context for a tiny model."""


def row_of(right: str, wrong: str) -> dict[str, Any]:
    """A row of the dataset: the prompt, the files of the workspace, and its test."""
    return {
        "prompt": [{"role": "user", "content": TASK + right}],
        "files": {"f.py": f"{PROGRAM}{wrong}\n"},
        "grade": {"program": "f.py", "tests": [f"assert f(20) == 20+{right}"]},
    }


def demonstrate(draw: random.Random) -> Messages:
    right, wrong = draw.sample(DIGITS, 2)
    way = draw.choices(list(HABITS), weights=list(HABITS.values()))[0]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK + right}]
    if way == "give up":
        return [*messages, {"role": "assistant", "content": GIVE_UP}]
    written = right if way == "careful" else draw.choice(DIGITS)
    return [
        *messages,
        {"role": "assistant", "content": LOOK},
        {"role": "user", "content": PROGRAM + wrong},
        {"role": "assistant", "content": f"{CHANGE}{wrong}/{written}{SAVE}"},
    ]


def demonstrate_tools(draw: random.Random) -> Messages:
    """The same ways, by calls of a tool."""
    tools = {LOOK: TOOL_LOOK, GIVE_UP: FINISH}
    messages = [
        {
            "role": "tool" if place == 3 else message["role"],
            "content": tools.get(message["content"], message["content"]),
        }
        for place, message in enumerate(demonstrate(draw))
    ]
    if messages[-1]["content"] == FINISH:
        return messages
    change = messages.pop()["content"].replace(CHANGE, TOOL_CHANGE).replace(SAVE, TOOL_SAVE)
    return [
        *messages,
        {"role": "assistant", "content": change},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": FINISH},
    ]


def prepare(folder: Path, seed: int, warm_up_steps: int, with_tools: bool = False) -> None:
    """Make the model and the data of a seed, unless the folder has them."""
    if not (folder / "model" / "config.json").exists():
        texts = ["system\n", "user\n", "assistant\n", SYSTEM, TASK, PROGRAM]
        texts += ["tool\n", TOOL_LOOK, TOOL_CHANGE, TOOL_SAVE, FINISH] if with_tools else [GIVE_UP, LOOK, CHANGE, SAVE]
        tokenizer = build_character_tokenizer(TOOL_TEMPLATE if with_tools else CHAT_TEMPLATE, added_tokens=texts)
        model = build_tiny_qwen3(hidden_size=64, head_dim=32, vocab_size=len(tokenizer), max_position_embeddings=256)
        settings: dict[str, Any] = dict(steps=warm_up_steps, batch_size=32, learning_rate=4e-3, seed=seed)
        warm_up(model, tokenizer, demonstrate_tools if with_tools else demonstrate, **settings)
        tokenizer.save_pretrained(folder / "model")
        model.save_pretrained(folder / "model")
    draw = random.Random(seed + 1000)
    rows = [row_of(*draw.sample(DIGITS, 2)) for _ in range(256)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(agent: str, folder: Path, seed: int, steps: int, settings: list[str]) -> Metrics:
    variables = {"MODEL": str(folder / "model"), "DATA_DIR": str(folder)}
    if agent in PROGRAMS:
        variables["PROGRAM"] = str(PROGRAMS[agent])
    script = SCRIPTS.get(agent, HERE / "run_python_program.sh")
    return train(script, folder / agent, [f"trainer.seed={seed + 1}", *settings], variables, steps)


def report(runs: dict[int, Metrics]) -> str:
    """Return a table with a line for each seed."""
    lines = []
    for seed, rows in runs.items():
        rewards = list(values_of(rows, "reward/avg_raw_reward").values())
        exact = values_of(rows, "tokens/exact_share").values()
        failed = sum(sum(values_of(rows, name).values()) for name in rows[-1] if name.startswith("harness/num_"))
        first, last = fmean(rewards[:3]), fmean(rewards[-3:])
        lines.append([str(seed), f"{first:.2f}", f"{last:.2f}", f"{min(exact):.4f}", f"{failed:g}"])
    return markdown_table(["seed", "first 3 steps", "last 3 steps", "exact share, lowest", "failed harnesses"], lines)


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__, "harness", steps=10, warm_up_steps=400)
    parser.set_defaults(output=REPOSITORY / "runs" / "harness")
    parser.add_argument("--agent", choices=sorted(SCRIPTS | PROGRAMS), default="shell_agent")
    parser.add_argument("settings", nargs="*", help="further settings, key=value")
    options = parser.parse_args(argv)
    runs: dict[int, Metrics] = {}
    for seed in options.seeds:
        with_tools = options.agent in PROGRAMS
        folder = options.output.resolve() / (f"tools-{seed}" if with_tools else str(seed))
        prepare(folder, seed, options.warm_up_steps, with_tools)
        runs[seed] = run(options.agent, folder, seed, options.steps, options.settings)
    print(report(runs))


if __name__ == "__main__":
    main()

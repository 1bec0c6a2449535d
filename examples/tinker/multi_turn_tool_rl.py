"""Reinforcement learning over two turns: the model may ask a calculator, reads what it says, and answers.

    python examples/tinker/multi_turn_tool_rl.py --base-url http://127.0.0.1:8000 --model tiny

An episode is one row of tokens, some written by the model and some by the tool; only the model's are learned.
"""

import random
import time
from dataclasses import dataclass, field

import tinker
from problems import Problem, draw_problem, tool_reply
from sdk import options, ready
from tinker import types

NUM_TURNS = 2

parser = options(__doc__, steps=20, learning_rate=1e-3)
parser.add_argument("--num-problems", type=int, default=12, help="of a step")
parser.add_argument("--group-size", type=int, default=8, help="episodes of each problem")
parser.add_argument("--max-tokens", type=int, default=32, help="of a turn")


@dataclass
class Episode:
    """Tokens of one episode. `written` is 1 on the model's tokens; others have no log-prob."""

    problem: Problem
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    reward: float = 0.0
    asked: bool = False
    is_over: bool = False

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        self.tokens += tokens
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.written += [0.0 if logprobs is None else 1.0] * len(tokens)

    def take_turn(self, tokenizer, said: types.SampledSequence) -> None:
        """The model wrote a line; a tool answers it, or the episode is over."""
        self.add(list(said.tokens), list(said.logprobs))
        line = tokenizer.decode(said.tokens)
        reply = tool_reply(line)
        if reply is None:
            self.is_over = True
            self.reward = float(line.startswith("A:") and self.problem.is_solved_by(line))
        else:
            self.asked = True
            self.add(tokenizer.encode(reply, add_special_tokens=False))

    def as_datum(self, advantage: float) -> types.Datum:
        """Every token is the target of the one before it."""
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": self.tokens[1:],
                "logprobs": self.logprobs[1:],
                "advantages": [advantage * written for written in self.written[1:]],
            },
        )


def play(sampler, tokenizer, episodes: list[Episode], max_tokens: int, draw: random.Random) -> None:
    """All episodes together, turn by turn, to their ends."""
    for episode in episodes:
        episode.add(tokenizer.encode(episode.problem.tool_prompt, add_special_tokens=False))
    for _ in range(NUM_TURNS):
        under_way = [episode for episode in episodes if not episode.is_over]
        asked = []
        for episode in under_way:
            params = types.SamplingParams(max_tokens=max_tokens, stop=["\n"], seed=draw.randrange(2**31))
            asked.append(sampler.sample(types.ModelInput.from_ints(list(episode.tokens)), 1, params))
        for episode, answer in zip(under_way, asked, strict=True):
            episode.take_turn(tokenizer, answer.result().sequences[0])


def main() -> None:
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = ready(service.create_lora_training_client(arguments.model, rank=arguments.rank, seed=arguments.seed))
    tokenizer = training.get_tokenizer()
    adam = types.AdamParams(learning_rate=arguments.learning_rate, grad_clip_norm=1.0)
    draw = random.Random(arguments.seed)

    for step in range(arguments.steps):
        start = time.monotonic()
        problems = [draw_problem(draw, "+-*") for _ in range(arguments.num_problems)]
        groups = [[Episode(problem) for _ in range(arguments.group_size)] for problem in problems]
        episodes = [episode for group in groups for episode in group]
        play(ready(training.save_weights_and_get_sampling_client()), tokenizer, episodes, arguments.max_tokens, draw)

        batch = []
        for group in groups:
            mean = sum(episode.reward for episode in group) / len(group)
            batch += [episode.as_datum(episode.reward - mean) for episode in group if episode.reward != mean]
        if batch:
            done, stepped = training.forward_backward(batch, "importance_sampling"), training.optim_step(adam)
            done.result()
            stepped.result()
        reward, asked = (
            sum(values) / len(values) for values in zip(*((e.reward, e.asked) for e in episodes), strict=True)
        )
        print(f"step {step:3d}  reward {reward:.3f}  asked {asked:.3f}  {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()

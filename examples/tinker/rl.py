"""Reinforcement learning: sample a group of answers to each problem, reward the right ones, learn from the difference.

    python examples/tinker/rl.py --base-url http://127.0.0.1:8000 --model tiny

The reward rises. `--loss ppo` takes two steps on each batch, which is what its clipping is for.
"""

import random
import time

import tinker
from problems import draw_problem
from sdk import options, ready
from tinker import types

parser = options(__doc__, steps=25, learning_rate=1e-3)
parser.add_argument("--loss", choices=["importance_sampling", "ppo"], default="importance_sampling")
parser.add_argument("--num-problems", type=int, default=16, help="of a step")
parser.add_argument("--group-size", type=int, default=8, help="answers to each problem")
parser.add_argument("--max-tokens", type=int, default=48)
parser.add_argument("--num-digits", type=int, default=2)


def main() -> None:
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = ready(service.create_lora_training_client(arguments.model, rank=arguments.rank, seed=arguments.seed))
    tokenizer = training.get_tokenizer()
    adam = types.AdamParams(learning_rate=arguments.learning_rate, grad_clip_norm=1.0)
    draw = random.Random(arguments.seed)

    for step in range(arguments.steps):
        start = time.monotonic()
        sampler = ready(training.save_weights_and_get_sampling_client())
        problems = [draw_problem(draw, num_digits=arguments.num_digits) for _ in range(arguments.num_problems)]
        prompts = [tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
        params = types.SamplingParams(max_tokens=arguments.max_tokens, stop=["\n"], seed=draw.randrange(2**31))
        asked = [sampler.sample(types.ModelInput.from_ints(prompt), arguments.group_size, params) for prompt in prompts]

        batch, rewards = [], []
        for problem, prompt, answers in zip(problems, prompts, asked, strict=True):
            group = answers.result().sequences
            of_group = [float(problem.is_solved_by(tokenizer.decode(sequence.tokens))) for sequence in group]
            mean = sum(of_group) / len(of_group)
            rewards += of_group
            if min(of_group) < max(of_group):  # a group that agrees teaches nothing
                batch += [as_datum(prompt, s, reward - mean) for s, reward in zip(group, of_group, strict=True)]

        sent = []
        for _ in range(2 if arguments.loss == "ppo" else 1):
            sent += [training.forward_backward(batch, arguments.loss), training.optim_step(adam)] if batch else []
        for done in sent:
            done.result()
        reward = sum(rewards) / len(rewards)
        print(
            f"step {step:3d}  reward {reward:.3f}  {'#' * round(40 * reward):40s}  {time.monotonic() - start:.1f} s",
            flush=True,
        )


def as_datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Every token is the target of the one before it; what was not sampled has no advantage."""
    tokens, num_given = prompt + list(answer.tokens), len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * num_given + list(answer.logprobs),
            "advantages": [0.0] * num_given + [advantage] * len(answer.tokens),
        },
    )


if __name__ == "__main__":
    main()

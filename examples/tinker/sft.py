"""Supervised fine-tuning: additions worked out in writing, with an interruption in the middle that loses nothing.

    python examples/tinker/sft.py --base-url http://127.0.0.1:8000 --model tiny

The loss falls. After half of the steps the run is saved, weights and optimizer, and a new training client continues
from it; at the end the weights solve problems that they were not trained on.
"""

import random

import tinker
from problems import draw_problem, work_out
from sdk import options, ready
from tinker import types

parser = options(__doc__, steps=60, learning_rate=4e-3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--num-digits", type=int, default=3, help="one more than the tiny model has seen")


def main() -> None:
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = ready(service.create_lora_training_client(arguments.model, rank=arguments.rank, seed=arguments.seed))
    tokenizer = training.get_tokenizer()
    adam = types.AdamParams(learning_rate=arguments.learning_rate)
    draw = random.Random(arguments.seed)

    for step in range(arguments.steps):
        problems = [draw_problem(draw, num_digits=arguments.num_digits) for _ in range(arguments.batch_size)]
        batch = [as_datum(tokenizer, problem.prompt, work_out(problem)) for problem in problems]
        num_learned = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
        done = training.forward_backward(batch, "cross_entropy")
        stepped = training.optim_step(adam)  # sent before the pass is done: the server keeps the order
        loss = done.result().metrics["loss:sum"] / num_learned
        stepped.result()
        print(f"step {step:3d}  loss {loss:.4f}", flush=True)
        if step == arguments.steps // 2 - 1:
            path = training.save_state("half-way").result().path
            training = ready(service.create_training_client_from_state_with_optimizer(path))
            print(f"a new client goes on from {path}")

    path = training.save_weights_for_sampler("final").result().path
    sampler = ready(service.create_sampling_client(model_path=path))
    problems = [draw_problem(draw, num_digits=arguments.num_digits) for _ in range(64)]
    greedy = types.SamplingParams(max_tokens=64, temperature=0, stop=["\n"])
    answers = [sampler.sample(types.ModelInput.from_ints(encode(tokenizer, p.prompt)), 1, greedy) for p in problems]
    lines = [tokenizer.decode(answer.result().sequences[0].tokens) for answer in answers]
    num_solved = sum(problem.is_solved_by(line) for problem, line in zip(problems, lines, strict=True))
    print(f"solved {num_solved / len(problems):.2f}, for example {problems[0]}: {lines[0].strip()}\nweights: {path}")


def as_datum(tokenizer, prompt: str, line: str) -> types.Datum:
    """Convert to a datum: each token is the target of the previous one; only tokens of the line have weight."""
    given, learned = encode(tokenizer, prompt), encode(tokenizer, line)
    tokens, weights = given + learned, [0.0] * len(given) + [1.0] * len(learned)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


if __name__ == "__main__":
    main()

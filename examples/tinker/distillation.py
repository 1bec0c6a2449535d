"""On-policy distillation: the student samples, a teacher scores each token, and the student is trained towards the
teacher.

    python examples/tinker/distillation.py --base-url http://127.0.0.1:8000 --model tiny

The teacher is the same model with a hint in its prompt, so the student learns to do without the hint (prompt
distillation). `--teacher tinker://…` uses saved weights instead, without a hint. The reward of a token is log
p(teacher) - log p(student); its mean over samples is the negative KL divergence.
"""

import random
import time

import tinker
from problems import HINT, draw_problem
from sdk import options, ready
from tinker import types

parser = options(__doc__, steps=25, learning_rate=1e-3)
parser.add_argument("--teacher", help="sampler weights, such as those of sft.py --num-digits 2")
parser.add_argument("--num-problems", type=int, default=16, help="of a step")
parser.add_argument("--group-size", type=int, default=4, help="answers to each problem")
parser.add_argument("--max-tokens", type=int, default=48)


def main() -> None:
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = ready(service.create_lora_training_client(arguments.model, rank=arguments.rank, seed=arguments.seed))
    tokenizer = training.get_tokenizer()
    if arguments.teacher:
        teacher, hint = ready(service.create_sampling_client(model_path=arguments.teacher)), []
    else:
        teacher = ready(service.create_sampling_client(base_model=arguments.model))
        hint = tokenizer.encode(HINT, add_special_tokens=False)
    adam = types.AdamParams(learning_rate=arguments.learning_rate, grad_clip_norm=1.0)
    draw = random.Random(arguments.seed)

    for step in range(arguments.steps):
        start = time.monotonic()
        student = ready(training.save_weights_and_get_sampling_client())
        problems = [draw_problem(draw) for _ in range(arguments.num_problems)]
        prompts = [tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems]
        params = types.SamplingParams(max_tokens=arguments.max_tokens, stop=["\n"], seed=draw.randrange(2**31))
        asked = [student.sample(types.ModelInput.from_ints(prompt), arguments.group_size, params) for prompt in prompts]
        written = [
            (problem, prompt, answer)
            for problem, prompt, answers in zip(problems, prompts, asked, strict=True)
            for answer in answers.result().sequences
        ]
        judged = [
            teacher.compute_logprobs(types.ModelInput.from_ints(hint + prompt + list(answer.tokens)))
            for _, prompt, answer in written
        ]

        batch, divergence = [], 0.0
        for (_, prompt, answer), judgement in zip(written, judged, strict=True):
            of_teacher = judgement.result()[-len(answer.tokens) :]
            rewards = [t - s for t, s in zip(of_teacher, answer.logprobs, strict=True)]
            divergence -= sum(rewards) / len(written)
            batch.append(as_datum(prompt, answer, rewards))
        done, stepped = training.forward_backward(batch, "importance_sampling"), training.optim_step(adam)
        done.result()
        stepped.result()
        num_solved = sum(problem.is_solved_by(tokenizer.decode(answer.tokens)) for problem, _, answer in written)
        print(
            f"step {step:3d}  KL to the teacher {divergence:6.3f}  solved {num_solved / len(written):.3f}  "
            f"{time.monotonic() - start:.1f} s",
            flush=True,
        )


def as_datum(prompt: list[int], answer: types.SampledSequence, rewards: list[float]) -> types.Datum:
    """Every token is the target of the one before it; what was not sampled has no advantage."""
    tokens, num_given = prompt + list(answer.tokens), len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * num_given + list(answer.logprobs),
            "advantages": [0.0] * num_given + rewards,
        },
    )


if __name__ == "__main__":
    main()

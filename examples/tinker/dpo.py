"""Direct preference optimization (https://arxiv.org/abs/2305.18290): a loss that the server does not know.

    python examples/tinker/dpo.py --base-url http://127.0.0.1:8000 --model tiny

The loss is computed here, with torch, from log-probs of the server, and its gradient goes back
(forward_backward_custom). An answer with its steps is preferred to an estimate:

    loss = -log sigmoid(beta * (log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected)))
"""

import random

import tinker
import torch
from problems import draw_problem, estimate, work_out
from sdk import options, ready
from tinker import types

parser = options(__doc__, steps=20, learning_rate=1e-3)
parser.add_argument("--num-pairs", type=int, default=16, help="of a step")
parser.add_argument("--beta", type=float, default=0.1)


def main() -> None:
    arguments = parser.parse_args()
    service = tinker.ServiceClient(base_url=arguments.base_url)
    training = ready(service.create_lora_training_client(arguments.model, rank=arguments.rank, seed=arguments.seed))
    reference = ready(service.create_sampling_client(base_model=arguments.model))
    tokenizer = training.get_tokenizer()
    adam = types.AdamParams(learning_rate=arguments.learning_rate)
    draw = random.Random(arguments.seed)

    for step in range(arguments.steps):
        problems = [draw_problem(draw) for _ in range(arguments.num_pairs)]
        pairs = [(problem, line) for problem in problems for line in (work_out(problem), estimate(problem))]
        batch = [as_datum(tokenizer, problem.prompt, line) for problem, line in pairs]
        asked = [reference.compute_logprobs(types.ModelInput.from_ints(tokens_of(datum))) for datum in batch]
        of_reference = [torch.tensor(answer.result()[1:]) for answer in asked]

        def loss_of_pairs(data, log_probs, of_reference=of_reference):
            return dpo_loss(data, log_probs, of_reference, arguments.beta)

        done = training.forward_backward_custom(batch, loss_of_pairs).result()
        training.optim_step(adam).result()
        loss, accuracy = done.metrics["dpo_loss:mean"], done.metrics["accuracy:mean"]
        print(f"step {step:3d}  loss {loss:.4f}  preferred {accuracy:.2f}", flush=True)


def dpo_loss(
    data: list[types.Datum], log_probs: list[torch.Tensor], of_reference: list[torch.Tensor], beta: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Chosen and rejected take turns in `data`; each has its own number of tokens."""
    weights = [torch.tensor(datum.loss_fn_inputs["weights"].data) for datum in data]
    rows = zip(log_probs, of_reference, weights, strict=True)
    log_ratios = torch.stack([((now - before) * weight).sum() for now, before, weight in rows])
    margins = beta * (log_ratios[0::2] - log_ratios[1::2])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    return loss, {"dpo_loss:mean": loss.item(), "accuracy:mean": (margins > 0).float().mean().item()}


def as_datum(tokenizer, prompt: str, line: str) -> types.Datum:
    """Convert to a datum: each token is the target of the previous one; only tokens of the line have weight."""
    given, learned = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, line))
    tokens, weights = given + learned, [0.0] * len(given) + [1.0] * len(learned)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def tokens_of(datum: types.Datum) -> list[int]:
    """Prompt and line."""
    return [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1])]


if __name__ == "__main__":
    main()

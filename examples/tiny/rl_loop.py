"""Reinforcement learning of a language model, whole, in one file: roll out, judge, compare with the group, learn.

    python examples/tiny/rl_loop.py

A transformer that starts from random numbers learns to write four digits in ascending order. It sees no demonstrations:
the reward is how many digits are at the right position. Everything the real trainer adds (environments, engines, many
processes, checkpoints) surrounds these same steps.

Letters of shapes: P prompts, G samples of each (a group), B = P * G sequences, T tokens of the response, V vocabulary.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NUM_DIGITS = 4
START_OF_ANSWER = 10  # the vocabulary is the ten digits and this
VOCABULARY = 11


@dataclass(frozen=True)
class Settings:
    """Settings of one run."""

    num_steps: int = 150
    num_prompts: int = 32
    group_size: int = 16
    num_mini_batches: int = 2
    learning_rate: float = 1e-3
    num_warm_up_steps: int = 10
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.28
    seed: int = 0


class TinyLanguageModel(nn.Module):
    """A causal transformer: two layers of width 64, 0.1 million parameters."""

    def __init__(self, width: int = 64, num_layers: int = 2):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(2 * NUM_DIGITS + 1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, L] to logits of the next token [B, L, V]."""
        length = tokens.shape[1]
        hidden = self.token_embedding(tokens) + self.position_embedding(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def make_prompts(num_prompts: int, generator: torch.Generator) -> Tensor:
    """Digits and the sign that the answer starts: [P, NUM_DIGITS + 1]."""
    digits = torch.randint(10, (num_prompts, NUM_DIGITS), generator=generator)
    return torch.cat([digits, torch.full((num_prompts, 1), START_OF_ANSWER)], dim=1)


def judge(prompts: Tensor, responses: Tensor) -> Tensor:
    """The reward [B]: the share of the places that hold the digit of the sorted prompt."""
    return (responses == prompts[:, :NUM_DIGITS].sort(dim=1).values).float().mean(dim=1)


@torch.no_grad()
def roll_out(model: nn.Module, prompts: Tensor, generator: torch.Generator) -> Tensor:
    """Sample a response [B, T] to each prompt, one token at a time."""
    tokens = prompts
    for _ in range(NUM_DIGITS):
        probabilities = model(tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return tokens[:, prompts.shape[1] :]


def response_log_probs(model: nn.Module, prompts: Tensor, responses: Tensor) -> Tensor:
    """Compute the log-prob of each token of the responses: [B, T]."""
    tokens = torch.cat([prompts, responses], dim=1)
    log_probs = model(tokens[:, :-1]).log_softmax(dim=-1)[:, -responses.shape[1] :]
    return log_probs.gather(2, responses.unsqueeze(2)).squeeze(2)


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Compute advantages relative to the other samples of the prompt (GRPO, https://arxiv.org/abs/2402.03300): A = (r -
    mean(r)) / (std(r) + 1e-6). In a group of equal rewards all are 0.

    Args:
        rewards: [B], samples of one prompt next to each other.
    """
    rewards_P_G = rewards.view(-1, group_size)
    centered = rewards_P_G - rewards_P_G.mean(dim=1, keepdim=True)
    return (centered / (rewards_P_G.std(dim=1, keepdim=True) + 1e-6)).view(-1)


def clipped_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    """PPO's surrogate (https://arxiv.org/abs/1707.06347, eq. 7), the mean over all tokens:
    -min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A), with ratio = pi / pi_old."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - settings.eps_clip_low, 1 + settings.eps_clip_high)
    advantages = advantages.unsqueeze(1)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def train(settings: Settings, show_every: int = 10) -> list[float]:
    """Answer, judge, learn; repeat. Returns the mean reward of every step."""
    torch.manual_seed(settings.seed)
    generator = torch.Generator().manual_seed(settings.seed)
    model = TinyLanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=settings.num_warm_up_steps)
    curve = []
    for step in range(settings.num_steps):
        prompts = make_prompts(settings.num_prompts, generator).repeat_interleave(settings.group_size, dim=0)
        responses = roll_out(model, prompts, generator)
        rewards = judge(prompts, responses)
        advantages = group_advantages(rewards, settings.group_size)
        with torch.no_grad():
            old_log_probs = response_log_probs(model, prompts, responses)
        for rows in torch.arange(len(prompts)).chunk(settings.num_mini_batches):
            log_probs = response_log_probs(model, prompts[rows], responses[rows])
            loss = clipped_loss(log_probs, old_log_probs[rows], advantages[rows], settings)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        warm_up.step()
        curve.append(rewards.mean().item())
        if step % show_every == 0 or step == settings.num_steps - 1:
            question, answer = prompts[0, :NUM_DIGITS].tolist(), responses[0].tolist()
            print(f"step {step:4d}  reward {curve[-1]:.3f}  {'#' * round(40 * curve[-1]):40s}  {question} -> {answer}")
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn to sort digits by reinforcement learning.")
    parser.add_argument("--steps", type=int, default=Settings.num_steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small are slower on several
    train(Settings(num_steps=arguments.steps, seed=arguments.seed))

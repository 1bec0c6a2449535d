"""Settings and shapes of plans by hand."""

from typing import Any

from skyrl_train.config import SkyRLConfig
from skyrl_train.memory_plan.model_shape import ModelShape


def settings(**overrides: object) -> SkyRLConfig:
    """8 prompts x 3 samples a step in two mini-batches of 12 samples of at most 100 tokens, no KL term, one worker."""
    plain: dict[str, object] = {
        "trainer.placement.device": "cpu",
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 4,
        "trainer.critic_mini_batch_size": 8,
        "generator.n_samples_per_prompt": 3,
        "trainer.algorithm.use_kl_loss": False,
        "generator.max_input_length": 60,
        "generator.sampling_params.max_generate_length": 40,
        "trainer.logprobs_chunk_size": 10,
    }
    cfg = SkyRLConfig()
    for name, value in (plain | overrides).items():
        *sections, field = name.split(".")
        section: Any = cfg
        for part in sections:
            section = getattr(section, part)
        setattr(section, field, value)
    return cfg


def shape(**sizes: Any) -> ModelShape:
    """1,000 parameters: two layers of 400, and 200 in the embedding of 20 words (tied), of hidden size 10."""
    plain: dict[str, Any] = dict(parameters=1000, trained=1000, layer=400, outside=200, experts=0, active=1000)
    plain |= dict(num_layers=2, hidden=10, words=20, is_tied=True, query=8, key=4, num_key_value_heads=2, num_heads=4)
    plain |= dict(feed_forward=16, experts_a_token=0, num_experts=0, has_query_norms=False)
    return ModelShape(**(plain | sizes))

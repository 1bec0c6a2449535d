"""Rules of batch sizes and their divisibility."""

from skyrl_train.config.config import SkyRLConfig
from skyrl_train.config.rules.checks import check_positive, check_rule
from skyrl_train.config.training_backends import get_ranks_per_replica

_COUNTS = (
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.critic_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "trainer.max_tokens_per_microbatch",
)


def validate_batch_sizes(config: SkyRLConfig) -> None:
    """Check that a batch is whole mini-batches of prompts, and that a mini-batch has a sequence for every worker.

    Nothing else needs to divide evenly: rows are spread over workers and micro-batches as evenly as possible, and no
    split changes the loss.
    """
    check_positive(config, _COUNTS)
    trainer, placement = config.trainer, config.trainer.placement
    _check_mini_batches(config, "policy", trainer.policy_mini_batch_size)
    _check_work(
        config,
        "policy",
        trainer.policy_mini_batch_size,
        placement.policy_world_size // count_sequence_ranks(config, "policy"),
    )
    if trainer.critic.model.path is not None:
        _check_mini_batches(config, "critic", trainer.critic_mini_batch_size)
        _check_work(
            config,
            "critic",
            trainer.critic_mini_batch_size,
            placement.critic_world_size // count_sequence_ranks(config, "critic"),
        )
    check_packing(config)


def check_packing(config: SkyRLConfig) -> None:
    """Check that a token budget is used only with sample packing."""
    trainer = config.trainer
    check_rule(
        trainer.max_tokens_per_microbatch is None or trainer.use_sample_packing,
        f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} counts tokens without padding, so it "
        "needs trainer.use_sample_packing=true; set that, or use trainer.micro_train_batch_size_per_gpu instead",
    )


def count_sequence_ranks(config: SkyRLConfig, model: str) -> int:
    """Return the number of ranks that share the rows of a data-parallel rank, at least 1. (Other rules check its
    value.)
    """
    return max(1, get_ranks_per_replica(config, model))


def _check_mini_batches(config: SkyRLConfig, model: str, mini: int) -> None:
    train = config.trainer.train_batch_size
    check_rule(
        train >= mini,
        f"trainer.train_batch_size={train} must be at least trainer.{model}_mini_batch_size={mini}: lower "
        f"trainer.{model}_mini_batch_size",
    )
    check_rule(
        train % mini == 0,
        f"trainer.train_batch_size={train} should be divisible by trainer.{model}_mini_batch_size={mini}: otherwise "
        "the last optimizer step of every batch would be smaller than the others",
    )


def _check_work(config: SkyRLConfig, model: str, mini: int, shards: int) -> None:
    samples = config.generator.n_samples_per_prompt
    check_rule(
        mini * samples >= shards,
        f"trainer.{model}_mini_batch_size={mini} x generator.n_samples_per_prompt={samples} = {mini * samples} "
        f"sequences is less than the {shards} data-parallel workers (or sequence-parallel groups), so some would be "
        f"idle in every step; raise trainer.{model}_mini_batch_size",
    )

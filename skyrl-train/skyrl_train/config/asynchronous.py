"""Settings of asynchronous training."""

from dataclasses import dataclass
from typing import Literal

from skyrl_train.config.base import BaseConfig


@dataclass(kw_only=True)
class FullyAsyncConfig(BaseConfig):
    """Asynchronous training: groups of later steps are generated while the trainer computes. M is `train_batch_size`,
    the number of groups per step.
    """

    enabled: bool = False
    """Train asynchronously. Engines and workers must not share devices (`placement.colocate_all=false`)."""

    max_staleness_steps: int = 4
    """S, the bound on staleness: no token is trained if its weights are more than S training steps older than the
    weights being trained, time in the queue included. 0 with `order=exact` is bit-exact with synchronous training."""

    num_parallel_generation_workers: int | None = None
    """K, the number of groups that are generated concurrently, from M to M (S + 1). null: 768, or M (S + 1) if that is
    fewer."""

    order: Literal["finished", "oldest", "exact"] = "finished"
    """Selection of the groups of a step. `finished`: the M that finished first. `oldest`: the M finished groups that
    come first in the data. `exact`: the next M of the data, for which the trainer waits, as in synchronous training."""

    on_stale: Literal["drop", "regenerate", "mask"] = "regenerate"
    """Handling of a group that exceeds S, if `order` admits one. `regenerate` generates it again at once, `drop` at the
    end of its epoch; the second time, the trainer waits for it. `mask` masks the tokens older than S, which biases
    training towards short responses; a group without remaining tokens is generated again."""

    sample_full_batch: bool = False
    """Skip groups whose samples all have the same reward and fill the step with others. Needs
    `algorithm.zero_variance_filter`; `algorithm.dynamic_sampling.max_sample_batches` times M such groups in a row end
    the run with an error."""

    sync_every_steps: int = 1
    """Training steps between weight syncs, at most S + 1. Evaluations and checkpoints are preceded by a sync, too."""

    pause: Literal["keep", "abort", "wait"] | None = None
    """Handling of running requests at a weight sync. `keep`: they pause and continue. `abort`: they are cancelled and
    continued from their tokens. `wait`: the sync waits until no group is being generated, so that each has one weight
    version. null: `generator.weight_sync_pause`."""

    kv_after_sync: Literal["keep", "clear", "recompute"] = "keep"
    """Handling of cached keys and values computed with the weights before a sync. `keep`: running requests continue
    with them; new requests do not use them. `clear`: the prefix cache is cleared as well. `recompute`: running requests
    are recomputed up to their last token, so that every log-prob belongs to one weight version (needs `pause` `keep` or
    `abort`)."""

    clear_kv_cache_on_weight_sync: bool = False
    """Deprecated form of `kv_after_sync=clear`."""

    group_timeout_seconds: float = 3600.0
    """Timeout of the generation of a group, in seconds, weight syncs included. Another group replaces one that exceeds
    it."""

    def get_max_running(self, groups_per_step: int) -> int:
        """Return the number of groups that are generated concurrently (K)."""
        return self.num_parallel_generation_workers or min(768, groups_per_step * (self.max_staleness_steps + 1))

"""Settings of asynchronous training."""

from dataclasses import dataclass
from typing import Literal

from skyrl_train.config.base import BaseConfig


@dataclass(kw_only=True)
class FullyAsyncConfig(BaseConfig):
    """Asynchronous training: groups of later steps are generated while the trainer computes. M stands for
    `train_batch_size`, the number of groups per step.
    """

    enabled: bool = False
    """Train asynchronously. Engines and workers must not share devices (`placement.colocate_all=false`)."""

    max_staleness_steps: int = 4
    """S, the bound on staleness: no token is trained whose weights are more than S training steps behind those that
    train on it, time in the queue included. 0 with `order=exact` equals synchronous training bit for bit."""

    num_parallel_generation_workers: int | None = None
    """K, the number of groups that are generated concurrently, from M to M (S + 1). null: 768, or M (S + 1) if that is
    fewer."""

    order: Literal["finished", "oldest", "exact"] = "finished"
    """Selection of the groups of a step. `finished`: the M that finished first. `oldest`: the M finished ones that come
    first in the data. `exact`: the next M of the data, for which the trainer waits; only then are the prompts of each
    step those of synchronous training."""

    on_stale: Literal["drop", "regenerate", "mask"] = "regenerate"
    """Treatment of a group that became older than S, with an `order` that admits such. `regenerate` generates it anew
    at once, `drop` at the end of its epoch; the second time, the trainer waits for it, so that every prompt is trained
    equally often. `mask` trains it without its tokens that are older, which are those of long answers: a bias towards
    short ones. A group that would have no token left is generated anew, as with `regenerate`."""

    sample_full_batch: bool = False
    """Skip groups whose samples all have the same reward and fill the step with others. Needs
    `algorithm.zero_variance_filter`; `algorithm.dynamic_sampling.max_sample_batches` times M such groups in a row end
    the run with an error."""

    sync_every_steps: int = 1
    """Training steps between weight syncs, at most S + 1. Evaluations and checkpoints are preceded by a sync, too."""

    pause: Literal["keep", "abort", "wait"] | None = None
    """Treatment of running requests at a weight sync. `keep`: they pause and continue. `abort`: they are cancelled and
    continued from their tokens. `wait`: the sync waits until no group is being generated, so that each has one weight
    version. null: `generator.weight_sync_pause`."""

    kv_after_sync: Literal["keep", "clear", "recompute"] = "keep"
    """Treatment of cached keys and values, which were computed with the weights before a sync. `keep`: running requests
    continue with them; new requests do not use them. `clear`: the prefix cache is emptied as well. `recompute`: running
    requests are recomputed up to their last token, so that every log-prob belongs to one weight version (needs `pause`
    `keep` or `abort`, and costs a prefill)."""

    clear_kv_cache_on_weight_sync: bool = False
    """Old form of `kv_after_sync=clear`."""

    group_timeout_seconds: float = 3600.0
    """Timeout of the generation of a group, in seconds, weight syncs included. Another group replaces one that exceeds
    it."""

    def max_running(self, groups_per_step: int) -> int:
        """Return K."""
        return self.num_parallel_generation_workers or min(768, groups_per_step * (self.max_staleness_steps + 1))

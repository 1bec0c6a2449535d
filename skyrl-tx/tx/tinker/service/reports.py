"""Metrics of the service."""

import time
from collections import Counter
from collections.abc import Mapping

from tx.tinker.service.dispatch import Dispatch
from tx.tinker.service.engine_link import EngineLink
from tx.tinker.service.limits import Limits
from tx.tinker.service.state import ServerState

Metrics = dict[str, float | Mapping[str, float]]
"""Values by name: one number, or one for each tenant. Names that end in `_total` are counters; those of the engine
restart with it."""


def collect_metrics(state: ServerState, limits: Limits, link: EngineLink, dispatch: Dispatch) -> Metrics:
    """Collect the present values."""
    now = time.monotonic()
    numbers: Metrics = {
        "sessions": dict(Counter(session.tenant for session in state.sessions.values())),
        "models": dict(Counter(run.tenant for run in state.runs.values())),
        "samplers": dict(Counter(sampler.tenant for sampler in state.samplers.values())),
        "pending_training_requests": dict(limits.training),
        "pending_samples": dict(limits.samples),
        "pending_sample_tokens": dict(limits.sample_tokens),
        "checkpoint_bytes": dict(state.checkpoint_bytes),
        "requests_waiting_for_a_predecessor": sum(run.sequence.num_waiting for run in state.runs.values()),
        "oldest_pending_seconds": now - min((pending.accepted_at for pending in state.pending.values()), default=now),
        "refused_for_load_total": dict(limits.refusals),
        "refused_for_quota_total": dict(limits.quota.refusals),
        "quota_tokens_left": limits.quota.get_all_remaining(),
        "saves_under_way": dict(Counter(tenant for tenant, *_ in state.saves.values())),
        **state.free_bytes,
        "engine_ready": int(link.ready),
        "engine_deaths_total": link.deaths,
        "engine_killers_total": dispatch.num_culprit_requests,
    }
    if (stats := link.stats) is not None:
        numbers |= {
            "engine_queued_orders": stats.queued_commands,
            "engine_running_samples": stats.running_samples,
            "engine_resident_models": stats.resident_models,
            "engine_busy_seconds_total": stats.busy_seconds,
            "engine_training_pass_seconds": stats.turn_seconds,
            "engine_sampling_step_seconds": stats.step_seconds,
            "engine_train_tokens_total": stats.train_tokens,
            "engine_sample_tokens_total": stats.sample_tokens,
        }
    return numbers

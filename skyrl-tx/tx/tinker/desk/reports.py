"""What goes on, as plain numbers for machines and as a summary for people."""

import time
from collections import Counter
from typing import Any

from tx.tinker.desk.dispatch import Dispatch
from tx.tinker.desk.engine_link import EngineLink
from tx.tinker.desk.limits import Limits
from tx.tinker.desk.live import Live


def metrics(live: Live, limits: Limits, link: EngineLink, dispatch: Dispatch) -> dict[str, float | dict[str, float]]:
    """A number, or one for each tenant. Names that end in `_total` only grow (those of the engine: until its end)."""
    numbers: dict[str, Any] = {
        "sessions": dict(Counter(session.tenant for session in live.sessions.values())),
        "models": dict(Counter(run.tenant for run in live.runs.values())),
        "samplers": dict(Counter(sampler.tenant for sampler in live.samplers.values())),
        "pending_training_requests": dict(limits.training),
        "pending_samples": dict(limits.samples),
        "pending_sample_tokens": dict(limits.sample_tokens),
        "requests_waiting_for_a_predecessor": sum(run.sequence.num_waiting for run in live.runs.values()),
        "oldest_pending_seconds": _oldest_seconds(live),
        "refused_for_load_total": dict(limits.refusals),
        "engine_ready": int(link.ready),
        "engine_deaths_total": link.deaths,
        "engine_killers_total": dispatch.num_culprits,
    }
    if (pulse := link.pulse) is not None:
        numbers |= {
            "engine_queued_orders": pulse.queued_orders,
            "engine_running_samples": pulse.running_samples,
            "engine_resident_models": pulse.resident_models,
            "engine_busy_seconds_total": pulse.busy_seconds,
            "engine_training_pass_seconds": pulse.turn_seconds,
            "engine_sampling_step_seconds": pulse.step_seconds,
            "engine_train_tokens_total": pulse.train_tokens,
            "engine_sample_tokens_total": pulse.sample_tokens,
        }
    return numbers


def status(live: Live, link: EngineLink, dispatch: Dispatch, seconds: float) -> dict[str, Any]:
    """Lines, sections of lines, tables."""
    pulse = link.pulse
    return {
        "engine": {
            "state": link.trouble or "ready",
            "backend": link.info.name if link.info else None,
            "up_seconds": seconds,
            "deaths": link.deaths,
            "last_death": link.last_death,
            "requests_that_killed_it": dispatch.num_culprits,
            "queued_orders": pulse.queued_orders if pulse else None,
            "running_samples": pulse.running_samples if pulse else None,
            "resident_models": pulse.resident_models if pulse else None,
        },
        "models": [
            {
                "model": run.model_id,
                "tenant": run.tenant,
                "rank": run.lora.rank,
                "next_seq": run.sequence.next_seq,
                "due": len(run.queue),
                "waiting_for_a_predecessor": run.sequence.num_waiting,
                "safe_up_to": run.snapshot_seq,
            }
            for run in live.runs.values()
        ],
        "tenants": _tenants(live),
        "engine_log": list(link.log_tail)[-20:],
    }


def _tenants(live: Live) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    things = (
        ("sessions", live.sessions),
        ("models", live.runs),
        ("samplers", live.samplers),
        ("pending", live.pending),
    )
    for name, group in things:
        for thing in group.values():
            row = rows.setdefault(thing.tenant, {"tenant": thing.tenant} | {key: 0 for key, _ in things})
            row[name] += 1
    return list(rows.values())


def _oldest_seconds(live: Live) -> float:
    return time.monotonic() - min((entry.accepted_at for entry in live.pending.values()), default=time.monotonic())

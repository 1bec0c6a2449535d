"""Order of models. Tenants are the first letters of models; a pass of n tokens costs n + 64."""

from collections import Counter
from itertools import pairwise
from typing import Any

from tx.tinker.commands import ModelCommand, Optimize, Train
from tx.tinker.engine.scheduler import Scheduler
from tx.tinker.types import AdamParams


def command(kind: type[ModelCommand], model: str, seq: int, **values: Any) -> ModelCommand:
    return kind(request_id=f"{model}#{seq}", tenant=model[0], model_id=model, seq=seq, **values)


def scheduler_of(passes: dict[str, int]) -> Scheduler:
    """Make a scheduler with `passes[model]` forward-backward commands of each model."""
    scheduler = Scheduler()
    for model, number in passes.items():
        for seq in range(number):
            scheduler.add(command(Train, model, seq, payload=b""))
    return scheduler


def one_pass(scheduler: Scheduler, tokens: dict[str, int] | int = 100, room: int = 100_000) -> list[str]:
    """Run one pass with one command per model. Returns: the models in it."""
    joined, used = [], 0
    for queue in scheduler.pass_candidates():
        size = tokens if isinstance(tokens, int) else tokens[queue.model_id]
        if joined and used + size > room:
            break
        used += size
        scheduler.charge(queue, size)
        joined.append(queue)
    for queue in joined:
        scheduler.finish(queue)
    return [queue.model_id for queue in joined]


def test_pass_with_room_is_joined_by_all_models_of_lone_tenant():
    for models in (["a1", "b1", "c1"], ["a1", "a2", "a3"]):
        assert sorted(one_pass(scheduler_of(dict.fromkeys(models, 1)))) == models


def test_ten_models_of_tenant_get_same_time_as_single_model_of_other():
    scheduler = scheduler_of({**{f"a{n}": 100 for n in range(10)}, "b0": 100})
    served = Counter(model for _ in range(60) for model in one_pass(scheduler))
    of_a = sum(number for model, number in served.items() if model[0] == "a")
    assert abs(of_a - served["b0"]) <= 1
    assert max(served[f"a{n}"] for n in range(10)) - min(served[f"a{n}"] for n in range(10)) <= 1


def test_shares_are_counted_in_tokens():
    scheduler = scheduler_of({"a1": 1000, "b1": 1000})
    served = Counter(model for _ in range(200) for model in one_pass(scheduler, {"a1": 936, "b1": 36}))
    assert served["b1"] > 100 and abs(served["a1"] * (936 + 64) - served["b1"] * (36 + 64)) <= 1000


def test_no_tenant_starves_when_single_micro_batch_fits():
    scheduler = scheduler_of({f"{tenant}{n}": 100 for tenant in "abc" for n in range(3)})
    order_of_models = [model for _ in range(45) for model in one_pass(scheduler, room=100)]
    for tenant in "abc":
        turns = [i for i, model in enumerate(order_of_models) if model[0] == tenant]
        assert max(late - early for early, late in pairwise(turns)) <= 3
    assert set(Counter(order_of_models).values()) == {5}


def test_idle_time_earns_no_credit():
    scheduler = scheduler_of({"a1": 1000})
    for _ in range(100):
        one_pass(scheduler)
    for seq in range(100):
        scheduler.add(command(Train, "b1", seq, payload=b""))
    served = Counter(model for _ in range(20) for model in one_pass(scheduler, room=100))
    assert abs(served["a1"] - served["b1"]) <= 1


def test_blocked_model_holds_up_no_other():
    scheduler = scheduler_of({"a1": 3, "b1": 3})
    joined = []
    for queue in scheduler.pass_candidates():
        if queue.model_id == "a1":
            continue  # no room in memory, say
        scheduler.charge(queue, 100)
        joined.append(queue.model_id)
    assert joined == ["b1"]


def test_quick_commands_round_robin_over_tenants():
    scheduler = Scheduler()
    for model in ("a1", "a2", "b1"):
        for seq in range(2):
            scheduler.add(command(Optimize, model, seq, adam=AdamParams()))
    rounds = []
    while queues := scheduler.quick_round():
        rounds.append(sorted(queue.model_id for queue in queues))
        for queue in queues:
            scheduler.finish(queue)
    assert rounds == [["a1", "b1"], ["a2", "b1"], ["a1"], ["a2"]]
    assert scheduler.num_commands == 0


def test_held_model_is_skipped():
    scheduler = scheduler_of({"a1": 1, "a2": 1})
    queue = next(queue for queue in scheduler.pass_candidates() if queue.model_id == "a1")
    queue.held = True
    assert one_pass(scheduler) == ["a2"]
    queue.held = False
    assert one_pass(scheduler) == ["a1"]

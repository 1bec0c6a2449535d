"""Bounds on the waiting time of requests in the fair scheduler, over the whole trainer."""

from typing import Any


def passes_until(bench: Any, request_id: str, most: int = 10_000) -> int:
    """Passes that ran before a request was answered."""
    before = len(bench.backend.passes)
    while request_id not in bench.answered:
        bench.trainer.step(0.0)
        assert len(bench.backend.passes) - before <= most
    return len(bench.backend.passes) - before


def test_a_step_waits_for_one_micro_batch_of_anothers_thousand_data(bench: Any):
    bench.create("a1")
    bench.create("b1")
    bench.work()
    long = bench.train("a1", *([1] * 50 for _ in range(1000)))  # 500 micro-batches
    bench.trainer.step(0.0)
    step = bench.optimize("b1")
    assert passes_until(bench, step) <= 1
    assert long not in bench.answered


def test_a_short_pass_joins_the_next_micro_batch_of_a_long_one(bench: Any):
    bench.create("a1")
    bench.create("b1")
    bench.work()
    bench.train("a1", *([1] * 50 for _ in range(1000)))
    for _ in range(5):
        bench.trainer.step(0.0)
    short = bench.train("b1", [1, 2])
    assert passes_until(bench, short) <= 2


def test_a_tenant_with_ten_models_leaves_half_to_one_with_one(bench: Any):
    for model in (*(f"a{n}" for n in range(10)), "b1"):
        bench.create(model)
    bench.work()
    for model in (*(f"a{n}" for n in range(10)), "b1"):
        bench.train(model, *([1] * 100 for _ in range(20)))
    done = bench.train("b1", [1])
    passes_until(bench, done)
    of_b = sum(passed.count("b1") for passed in bench.backend.passes)
    of_a = sum(len(passed) for passed in bench.backend.passes) - of_b
    assert abs(of_a - of_b) <= 2


def test_more_busy_models_than_places_all_get_their_turn(make_bench: Any):
    bench = make_bench(limit=2)
    names = [f"{tenant}{n}" for tenant in "abc" for n in range(2)]
    for model in names:
        bench.create(model)
        for _ in range(3):
            bench.train(model, [1] * 100, [2] * 100)
            bench.optimize(model)
    bench.save("a0", "end")
    bench.work()
    assert len(bench.answered) == 6 * 7 + 1 and not any("#" not in name for name in bench.answered)
    for model in names:
        bench.save(model, f"{model}-end")
    bench.work()
    for model in names:
        text = (bench.checkpoints.local(bench.checkpoints.place(f"{model}-end")) / "sum.json").read_text()
        assert '"weight": 900.0' in text

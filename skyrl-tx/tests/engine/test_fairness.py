"""Bounds on the waiting time of requests in the fair scheduler, over the whole trainer."""

from typing import Any


def passes_until(bench: Any, request_id: str, most: int = 10_000) -> int:
    """Passes that ran before a request was answered."""
    before = len(bench.backend.passes)
    while request_id not in bench.answered:
        bench.trainer.step(0.0)
        assert len(bench.backend.passes) - before <= most
    return len(bench.backend.passes) - before


def test_a_step_or_a_short_pass_waits_for_one_micro_batch_of_anothers_thousand_data(bench: Any):
    bench.do("create a1, create b1")
    [long] = bench.tell("train a1" + 1000 * " 1x50")  # 500 micro-batches
    bench.trainer.step(0.0)
    assert passes_until(bench, bench.optimize("b1")) <= 1
    for _ in range(5):
        bench.trainer.step(0.0)
    assert passes_until(bench, bench.train("b1", [1, 2])) <= 2  # it joins the next micro-batch
    assert long not in bench.answered


def test_a_tenant_with_ten_models_leaves_half_to_one_with_one(bench: Any):
    models = [*(f"a{n}" for n in range(10)), "b1"]
    bench.do(", ".join(f"create {model}" for model in models))
    bench.tell(", ".join(f"train {model}{20 * ' 1x100'}" for model in models))
    passes_until(bench, bench.train("b1", [1]))
    of_b = sum(passed.count("b1") for passed in bench.backend.passes)
    of_a = sum(len(passed) for passed in bench.backend.passes) - of_b
    assert abs(of_a - of_b) <= 2


def test_more_busy_models_than_places_all_get_their_turn(make_bench: Any):
    bench = make_bench(limit=2)
    names = [f"{tenant}{n}" for tenant in "abc" for n in range(2)]
    for model in names:
        bench.tell(f"create {model}" + 3 * f", train {model} 1x100 2x100, optimize {model}")
    bench.do("save a0 end")
    assert len(bench.answered) == 6 * 7 + 1 and not any("#" not in name for name in bench.answered)
    bench.do(", ".join(f"save {model} {model}-end" for model in names))
    for model in names:
        text = (bench.checkpoints.local(bench.checkpoints.place(f"{model}-end")) / "sum.json").read_text()
        assert '"weight": 900.0' in text

"""Bounds on the waiting time of requests in the fair scheduler, over the whole trainer."""

from typing import Any


def passes_until(bench: Any, request_id: str, most: int = 10_000) -> int:
    """Passes that ran before a request was answered."""
    before = len(bench.backend.passes)
    while request_id not in bench.answered:
        bench.trainer.step(0.0)
        assert len(bench.backend.passes) - before <= most
    return len(bench.backend.passes) - before


def test_step_or_short_pass_waits_for_single_micro_batch_of_others(bench: Any):
    bench.do("create a1, create b1")
    [long] = bench.tell("train a1" + 1000 * " 1x50")  # 500 micro-batches
    bench.trainer.step(0.0)
    assert passes_until(bench, bench.optimize("b1")) <= 1
    for _ in range(5):
        bench.trainer.step(0.0)
    assert passes_until(bench, bench.train("b1", [1, 2])) <= 2  # it joins the next micro-batch
    assert long not in bench.answered


def test_tenant_with_ten_models_leaves_half_of_time_to_other_tenant(bench: Any):
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


def test_scheduler_prefers_resident_models_without_starving_others(make_bench: Any):
    """Six tenants train without a pause, there is room for three models, and one has endless data."""
    bench = make_bench(limit=3, pass_tokens=140)
    for name in "abcdef":
        bench.do(f"create {name}1")
    flood, began = bench.train("f1", *([1] * 100 for _ in range(500))), bench.clock.seconds
    asked: dict[str, tuple[str, float]] = {}
    waits: dict[str, list[float]] = {name: [] for name in "abcde"}
    num_read = 0
    while bench.clock.seconds < began + 30:
        answered, num_read = set(bench.answered[num_read:]), len(bench.answered)
        for name, found in waits.items():
            request_id, asked_at = asked.get(name, ("", 0.0))
            if request_id in answered:
                found.append(bench.clock.seconds - asked_at)
            if not request_id or request_id in answered:
                bench.train(f"{name}1", [1] * 20)
                asked[name] = bench.optimize(f"{name}1"), bench.clock.seconds
        bench.trainer.step(0.0)
    assert flood not in bench.answered and any("f1" in passed for passed in bench.backend.passes)
    num_steps = [len(found) for found in waits.values()]
    assert min(num_steps) > 0.5 * max(num_steps)
    assert max(map(max, waits.values())) < 5
    in_passes = sum(bench.trainer.train_tokens.values()) / 1000  # the rest is for snapshots of evicted models
    assert in_passes > 0.65 * bench.clock.seconds


def test_model_is_swapped_in_after_longest_wait_whatever_swap_cost(make_bench: Any):
    bench = make_bench(limit=1)
    bench.do("create a1, train a1 1")
    bench.do("create b1")
    bench.models._swap_seconds = 1e9
    bench.models._swaps_counted_to = since = bench.clock.seconds
    waiting = bench.optimize("a1")
    while waiting not in bench.answered:
        bench.train("b1", [1] * 100, forward_only=True)
        bench.trainer.step(0.0)
    assert 20 <= bench.clock.seconds - since < 21

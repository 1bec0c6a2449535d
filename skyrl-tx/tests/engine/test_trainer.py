"""Training commands: their order, results and failures. Numbers of the backend in conftest: a model is a
weight that grows by the sum of the tokens it is trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tx.tinker.commands import Optimize, Save, Train
from tx.tinker.engine.messages import Done
from tx.tinker.types import AdamParams


def test_model_is_created_trained_stepped_saved_and_unloaded(bench: Any):
    created = bench.create("a1", weight=2)
    passed = bench.train("a1", [1, 2, 3])
    stepped = bench.optimize("a1", learning_rate=0.5)
    saved = bench.save("a1", "first")
    unloaded = bench.unload("a1")
    bench.work()
    assert bench.answered == [created, passed, stepped, saved, unloaded]
    assert bench.result(created) == bench.result(saved) == bench.result(unloaded) == {}
    assert bench.result(passed).metrics == {"loss:sum": -12.0}
    assert bench.result(passed).logprobs[0].tolist() == [2.0, 4.0, 6.0]
    assert bench.result(stepped) == {"metrics": {"grad_norm:mean": 6.0}}
    written = (bench.checkpoints.local(bench.checkpoints.place("first")) / "sum.json").read_bytes()
    assert json.loads(written) == {"weight": 5.0, "gradient": None, "steps": 1}
    assert next(m.size_bytes for m in bench.said if isinstance(m, Done) and m.request_id == saved) == len(written)
    assert bench.backend.models == {}


def test_commands_of_model_run_in_order_when_all_arrive_together(bench: Any):
    asked = (f"train a1 {n}, optimize a1, save a1 n{n}" for n in range(1, 6))
    expected = bench.do(", ".join(["create a1", *asked]))
    assert bench.answered == expected
    weights = [
        json.loads((bench.checkpoints.local(bench.checkpoints.place(f"n{n}")) / "sum.json").read_text())["weight"]
        for n in range(1, 6)
    ]
    assert weights == [1.0, 3.0, 6.0, 10.0, 15.0]


def test_multi_micro_batch_result_keeps_data_order(bench: Any):
    _, passed = bench.do("create a1 1, train a1 1x60 2x60 3x60 4x60 5x60")  # two do not fit into one micro-batch
    assert bench.backend.passes == [["a1"]] * 5
    output = bench.result(passed)
    assert [array.tolist() for array in output.logprobs] == [[float(number)] * 60 for number in range(1, 6)]
    assert output.metrics == {"loss:sum": -60.0 * 15}
    assert bench.trainer.train_tokens == {"a": 300}


def test_models_of_several_tenants_share_pass(bench: Any):
    bench.do("create a1, train a1 1, create b1, train b1 1, create c1, train c1 1")
    assert [sorted(models) for models in bench.backend.passes] == [["a1", "b1", "c1"]]


def test_pass_respects_token_limit(make_bench: Any):
    bench = make_bench(pass_tokens=200)
    bench.do(", ".join(f"create {model}, train {model} 1x90" for model in ("a1", "b1", "c1", "d1")))
    assert sorted(map(len, bench.backend.passes)) == [2, 2]


# ---- failures


def test_failed_request_discards_earlier_micro_batches(bench: Any):
    *_, failed, stepped = bench.do("create a1, train a1 5, train a1 1x100 2x100 13, optimize a1")
    assert bench.result(failed) == ("user", "thirteen is no number")
    assert bench.result(stepped) == {"metrics": {"grad_norm:mean": 5.0}}  # what came before it is still there


@pytest.mark.parametrize(
    "poison, told", [(13, ("user", "thirteen")), (14, ("server", "RuntimeError"))], ids=["users", "ours"]
)
def test_poisoned_request_fails_alone(bench: Any, poison: int, told: tuple[str, str]):
    bench.tell("create a1, create a2, create b1")
    failed, *others = bench.tell(f"train a1 {poison}, train a1 1, train a2 2, train b1 3")
    steps = bench.do("optimize a1, optimize a2, optimize b1")
    category, text = bench.result(failed)
    assert category == told[0] and told[1] in text
    assert [bench.result(other).metrics["loss:sum"] for other in others] == [0.0, 0.0, 0.0]
    assert [bench.result(step)["metrics"]["grad_norm:mean"] for step in steps] == [1.0, 2.0, 3.0]


def test_unexpected_error_fails_single_command_and_reveals_only_kind(bench: Any):
    bench.create("a1", weight=7)
    failed = bench.optimize("a1", learning_rate=-1.0)
    after = bench.save("a1", "after")
    bench.work()
    category, text = bench.result(failed)
    assert category == "server" and "ZeroDivisionError" in text
    assert bench.result(after) == {}


HEAD = {"request_id": "x", "tenant": "a", "model_id": "a1", "seq": 1}


@pytest.mark.parametrize(
    "command, category, seqs_done",
    [
        pytest.param(Train(**HEAD, payload=b"\xff\xff"), "user", 0, id="no training request"),
        pytest.param(Optimize(**HEAD, adam=AdamParams()), "server", 1, id="done already"),
        pytest.param(Save(**HEAD, folder="/elsewhere", state=True), "server", 0, id="no folder of ours"),
    ],
)
def test_impossible_command_fails_and_changes_nothing(bench: Any, command: Any, category: str, seqs_done: int):
    bench.create("a1")
    for _ in range(seqs_done):
        bench.optimize("a1")
    bench.trainer.inbox.put(command)
    bench.work()
    assert bench.result("x")[0] == category
    assert bench.backend.models["a1"].steps == seqs_done


def test_model_failing_creation_is_unknown_to_later_commands(bench: Any):
    failed, later = bench.create("a1", rank=9), bench.train("a1", [1])
    gone = bench.unload("a1")
    bench.work()
    assert bench.result(failed) == ("user", "rank must be at most 8")
    assert bench.result(later) == ("server", "the engine has not loaded this model")
    assert bench.result(gone) == {}


def test_trainer_reports_seconds_of_running_turn(bench: Any):
    seen, run = [], bench.backend.run

    def watched(passes: Any) -> Any:
        bench.clock.seconds += 70
        seen.append(bench.trainer.turn_seconds())
        return run(passes)

    bench.backend.run = watched
    bench.do("create a1, train a1 1")
    assert seen == [pytest.approx(70, abs=1)]
    assert bench.trainer.turn_seconds() == 0.0, "it waits"


# ---- checkpoints


def test_checkpoint_loads_into_new_or_existing_model(bench: Any):
    bench.do("create a1, train a1 3, optimize a1, save a1 three")
    bench.create("b1", folder=bench.checkpoints.place("three"), optimizer=True)
    bench.create("c1", weight=9)
    loaded = bench.load("c1", "three", optimizer=False)
    bench.work()
    assert bench.result(loaded) == {}
    assert (bench.backend.models["b1"].weight, bench.backend.models["b1"].steps) == (3.0, 1)
    assert (bench.backend.models["c1"].weight, bench.backend.models["c1"].steps) == (3.0, 0)


def test_missing_checkpoint_is_user_error_and_changes_nothing(bench: Any):
    bench.create("a1", weight=4)
    failed = bench.load("a1", "never")
    lost = bench.create("b1", folder=bench.checkpoints.place("never"))
    bench.work()
    assert bench.result(failed) == bench.result(lost) == ("user", "the checkpoint no longer exists")
    assert bench.backend.models["a1"].weight == 4.0 and "b1" not in bench.backend.models


def test_damaged_checkpoint_or_snapshot_is_named_and_never_loaded(make_bench: Any, tmp_path: Path):
    bench = make_bench(limit=1)
    bench.do("create a1 1, train a1 2, optimize a1, save a1 whole, save a1 torn")
    damage(bench.checkpoints.place("torn"))
    [loaded] = bench.do("load a1 torn")
    assert bench.backend.models["a1"].weight == 3.0, "the load that failed changed it"
    created = bench.create("b1", folder=bench.checkpoints.place("torn"))
    bench.work()
    for request_id in (loaded, created):
        category, text = bench.result(request_id)
        assert category == "user"
        assert text.startswith("the checkpoint is damaged on the server's disk: sum.json is damaged")
        assert str(tmp_path) not in text
    bench.do("create c1, train c1 1")  # a1 leaves
    damage(bench.snapshots[-1].folder)
    [trained] = bench.do("train a1 1")
    category, text = bench.result(trained)
    assert category == "server" and "sum.json is damaged" in text and "from its last checkpoint" in text
    assert str(tmp_path) not in text


def damage(folder: str) -> None:
    path = Path(folder) / "sum.json"
    path.write_text(path.read_text().replace("3.0", "4.0"))

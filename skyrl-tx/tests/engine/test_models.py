"""Models in memory and on disk: eviction and restore are exact, and a crash costs seconds."""

import shutil
from pathlib import Path
from typing import Any

from tx.tinker.engine.messages import Done, Snapshotted


def weights(bench: Any) -> dict[str, float]:
    return {name: model.weight for name, model in bench.backend.models.items()}


# ---- memory


def test_least_recently_used_model_is_evicted_and_restored_unchanged(make_bench: Any):
    bench = make_bench(limit=2)
    for number, model in enumerate(("a1", "a2")):
        bench.do(f"create {model} {number}, train {model} 5")  # a gradient that waits for its step
        bench.clock.seconds += 1
    bench.do("create b1 9")
    assert sorted(bench.backend.models) == ["a2", "b1"]
    bench.clock.seconds += 1
    bench.do("optimize a1")
    assert weights(bench) == {"a1": 5.0, "b1": 9.0}
    assert bench.models.num_in_memory() == 2


def test_unchanged_model_is_evicted_without_snapshot_and_recreated(make_bench: Any):
    bench = make_bench(limit=1)
    *_, saved = bench.do("create a1 7, forward a1 1, create b1, save a1 seven")
    assert bench.snapshots == [] and bench.result(saved) == {}
    assert weights(bench) == {"a1": 7.0}


def test_model_in_middle_of_request_is_not_evicted(make_bench: Any):
    bench = make_bench(limit=1)
    bench.tell("create a1, train a1 1x100 1x100 1x100")
    bench.trainer.step(0.0)
    bench.do("create b1 3, train b1 1")
    assert bench.backend.passes == [["a1"]] * 3 + [["b1"]]


def test_failed_snapshot_write_keeps_model_and_fails_request_needing_slot(make_bench: Any, tmp_path: Path):
    bench = make_bench(limit=1)
    bench.do("create a1, train a1 5")
    shutil.rmtree(tmp_path / "snapshots")
    (tmp_path / "snapshots").write_text("a file where the folder was")
    [refused] = bench.do("create b1")
    assert bench.result(refused)[0] == "server"
    [stepped] = bench.do("optimize a1")
    assert bench.result(stepped) == {"metrics": {"grad_norm:mean": 5.0}}


# ---- snapshots


def test_model_is_snapshotted_when_replay_would_cost_two_seconds(bench: Any):
    bench.do("create a1" + 30 * ", train a1 1x90, optimize a1")  # a pass takes 0.09 s
    (snapshotted,) = bench.snapshots
    assert snapshotted.seq == 45  # the 23rd pass exceeds 2 s
    assert (Path(snapshotted.folder) / "sum.json").is_file()


def test_snapshots_use_at_most_tenth_of_time(bench: Any):
    bench.do("create a1" + 1000 * ", train a1 1x90")
    assert 0.1 * len(bench.snapshots) <= 0.1 * bench.clock.seconds
    assert bench.snapshots  # the disk is real: how many depends on it


def test_snapshot_is_reported_after_results_it_contains(bench: Any):
    bench.do("create a1" + 60 * ", train a1 1x90")
    done = -1
    for message in bench.said:
        if isinstance(message, Done):
            done = int(message.request_id.split("#")[1])
        elif isinstance(message, Snapshotted):
            assert message.seq <= done


def test_idle_model_is_snapshotted_once(bench: Any):
    bench.do("create a1, train a1 1")
    assert bench.snapshots == []
    bench.clock.seconds += 6
    bench.work()
    bench.clock.seconds += 600
    bench.work()
    assert [snapshotted.seq for snapshotted in bench.snapshots] == [1]


def test_model_created_from_checkpoint_outlives_checkpoint(make_bench: Any):
    first = make_bench()
    first.do("create a1, train a1 4, optimize a1, save a1 four")
    first.create("b1", folder=first.checkpoints.place("four"))
    first.work()
    first.checkpoints.remove(first.checkpoints.place("four"))
    (snapshotted,) = first.snapshots
    second = make_bench()
    second.restore("b1", snapshotted.folder, snapshotted.seq)
    second.do("optimize b1")
    assert weights(second) == {"b1": 4.0}


def test_stopping_puts_changed_models_to_disk(make_bench: Any):
    first = make_bench()
    first.do("create a1, train a1 6, create b1, train b1 6")
    first.trainer.close(5.0)
    second = make_bench()
    for snapshotted in first.snapshots:
        second.restore(snapshotted.model_id, snapshotted.folder, snapshotted.seq)
        second.optimize(snapshotted.model_id)
    second.work()
    assert weights(second) == {"a1": 6.0, "b1": 6.0}


# ---- after a crash


STORY = "train a1 3, forward a1 50, optimize a1, train a1 4, forward a1 50, optimize a1"


def test_commands_after_creation_are_replayed_silently(make_bench: Any):
    bench = make_bench()
    bench.restore("a1", None, -1, weight=1)
    bench.tell(f"create a1 1, {STORY}", replay=True)
    [after] = bench.do("train a1 1")
    assert bench.answered == [after]
    assert weights(bench) == {"a1": 8.0}
    assert bench.trainer.train_tokens == {"a": 1}


def test_model_is_recreated_from_seed_when_creation_is_unreported(make_bench: Any):
    bench = make_bench()
    bench.restore("a1", None, -1, weight=2)
    _, saved = bench.tell("train a1 1, save a1 old", replay=True)
    bench.do("optimize a1")
    assert weights(bench) == {"a1": 3.0} and saved not in bench.answered


def test_snapshot_plus_later_commands_restore_same_model(make_bench: Any):
    first = make_bench(limit=1)
    first.do(f"create a1 1, {STORY}, train a1 9")  # the gradient is in the snapshot
    first.do("create b1")  # takes the only place
    (snapshotted,) = first.snapshots
    second = make_bench()
    second.restore("a1", snapshotted.folder, snapshotted.seq)
    second.do("train a1 1, optimize a1", replay=True)
    assert weights(second) == {"a1": 1.0 + 3 + 4 + 9 + 1}
    assert second.answered == []


def test_replayed_failed_step_clears_gradient(make_bench: Any):
    bench = make_bench()
    bench.restore("a1", None, -1)
    bench.tell("train a1" + 9 * " 74" + ", optimize a1, train a1 2", replay=True)  # 666: not finite
    [stepped] = bench.do("optimize a1")
    assert bench.result(stepped) == {"metrics": {"grad_norm:mean": 2.0}}


def test_model_failing_to_restore_fails_only_own_commands(make_bench: Any, tmp_path: Path):
    bench = make_bench()
    bench.restore("a1", str(tmp_path / "snapshots" / "gone"), 3)
    [replayed] = bench.tell("train a1 1", replay=True)
    *lost, _, other = bench.do("train a1 1, optimize a1, create b1, train b1 1")
    assert replayed not in bench.answered
    for request in lost:
        category, text = bench.result(request)
        assert category == "server" and "state was lost" in text
    assert bench.result(other).metrics == {"loss:sum": 0.0}

"""A training thread that hangs is explained by its waits."""

import threading
from pathlib import Path
from typing import Any

from skyrl_gym.waits import read_records, recorded_run
from skyrl_inspect.explain.diagnosis import find_causes
from skyrl_inspect.explain.evidence import observe
from skyrl_inspect.explain.text import headline


def test_hung_pass_is_named_with_model(bench: Any, tmp_path: Path):
    began, goes_on = threading.Event(), threading.Event()

    def run_forever(passes: Any) -> Any:
        began.set()
        goes_on.wait(60)
        return run(passes)

    run, bench.backend.run = bench.backend.run, run_forever
    with recorded_run(tmp_path / "waits", "engine"):
        bench.create("a1")
        passed = bench.train("a1", [1, 2])
        thread = threading.Thread(target=bench.work)
        thread.start()
        assert began.wait(60)
        cause = headline(find_causes(observe(tmp_path)))
        goes_on.set()
        thread.join(60)
        [record] = read_records(tmp_path / "waits")
    assert f"does not finish a pass of {passed}, at" in cause and "run_forever" in cause
    assert any(wait.what.startswith("CreateModel a1") for wait in record.waits)

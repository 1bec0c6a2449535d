"""A failed rollout is data: it is written down, trains nothing, and leaves the others alone."""

import json
from pathlib import Path

import pytest

from skyrl_train.errors import SkyRLError

pytestmark = pytest.mark.timeout(180)


async def test_step_survives_all_failure_kinds(start_run, prompt, tmp_path: Path):
    names = ["works", "raises_in_first_step", "raises_in_init", "hangs", "not_a_number"]
    step = [prompt(name) for name in names] + [prompt("works", content="x" * 100)]
    async with start_run(tmp_path, [step, [prompt("raises_in_init")] * len(step)]) as trainer:
        with pytest.raises(SkyRLError, match="ground_truth"):
            await trainer.train()
        batch = trainer.last_batch

    path = tmp_path / "trajectories" / "train_step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    failures = {row["uid"]: row["failure"]["message"].split(" (/")[0] for row in rows if row["failure"]}
    assert failures == {
        "raises_in_first_step 1+1=": "environment 'raises_in_first_step': step raised ConnectionResetError: "
        "the sandbox hung up",
        "raises_in_init 1+1=": "environment 'raises_in_init': init raised KeyError: 'ground_truth'",
        "hangs 1+1=": "environment 'hangs': step did not return within 1 s (environment.skyrl_gym.env_timeout_seconds)",
        "not_a_number 1+1=": "environment 'not_a_number': step must return a finite number as reward in every step; "
        "got nan",
    }
    assert [row["failure"] is not None for row in rows].count(True) == 1 + 4 + 4 + 4
    for row in rows:
        if row["failure"]:
            assert row["stop_reason"] == "error" and not any(row["tokens"]["loss_mask"])
    for row in rows[20:]:  # the prompt over the limit: not asked, cut to the limit, trains nothing
        assert (row["stop_reason"], len(row["prompt_ids"]), row["tokens"]["loss_mask"]) == ("length", 40, [0])

    # The group whose first rollout failed: its baseline is the mean of 1, 0, 0 (were the failed one a 0: 1.5, -0.5)
    advantages = sorted(batch["advantages"][4:8, 0].tolist())
    assert advantages == pytest.approx([-0.57735, -0.57735, 0.0, 1.15470], abs=1e-4)
    assert not batch["advantages"][8:].any()

    [metrics] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (metrics["generate/num_failed/environment"], metrics["generate/num_failed/reward"]) == (9, 4)
    assert metrics["policy/grad_norm"] > 0 and metrics["policy/skipped_updates"] == 0
    assert metrics["timing/generate"] < 30, "a hanging environment costs its deadline of 1 s, not more"

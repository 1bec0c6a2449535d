"""Every way of weights to the engines, in whole runs: what engines write is what the trainer would have written."""

import pytest

OWN_DEVICES = {"placement": {"colocate_all": False}}
LORA = {"policy": {"model": {"lora": {"rank": 4}}, "optimizer_config": {"lr": 1e-2}}}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "strategy, trainer",
    [
        ("delta", {}),
        ("delta", OWN_DEVICES),
        ("broadcast", OWN_DEVICES),
        ("checkpoint", OWN_DEVICES),
        ("adapter", LORA),
        ("adapter", LORA | OWN_DEVICES),
        ("auto", LORA),  # merged
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "colocated",
)
@pytest.mark.parametrize("launcher", ["inline", pytest.param("ray", marks=pytest.mark.full)])
def test_engines_receive_policy_weights(launcher, strategy, trainer, settings, merged, run, tmp_path):
    generator = {"weight_sync_strategy": strategy, "weight_sync_canary_interval": 1, "weight_sync_verification": "full"}
    where = {"trainer": {"placement": {"launcher": launcher}}}
    steps = run(settings(tmp_path, merged({"trainer": trainer, "generator": generator}, where)))
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["policy/grad_norm"] > 0
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert row["weight_sync/canary_gap"] < 1e-4
        assert 0 < row["weight_sync/pause_seconds"] < row["weight_sync/seconds"]
    assert steps[1]["policy/rollout_train_logprobs_abs_diff_max"] > 0, "computed twice, by different code"


@pytest.mark.slow
def test_log_probs_are_compared_at_first_and_every_second_sync(settings, run, tmp_path):
    """Syncs before the first step, after it (not compared), and after the second."""
    generator = {"weight_sync_canary_interval": 2}
    first, second = run(settings(tmp_path, {"generator": generator, "trainer": {"placement": {"launcher": "inline"}}}))
    assert "weight_sync/canary_gap" not in first and first["weight_sync/seconds"] > 0
    assert second["weight_sync/canary_gap"] < 1e-4

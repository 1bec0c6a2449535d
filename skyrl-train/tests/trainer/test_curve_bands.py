"""Expected bands of curves: interpolation, warnings of a running job, files, and bands made from reference runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from loguru import logger

from skyrl_inspect.curve_bands import CurveBand, CurveWatch, ExpectedCurves, compute_bands, main, read_bands
from skyrl_inspect.dashboard.charts import build_overview
from skyrl_train.config import validate_cfg
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.utils.run_folder import RunFolder

REWARD = "reward/avg_raw_reward"


def watch_of(band: CurveBand) -> CurveWatch:
    return CurveWatch(ExpectedCurves((band,), "three seeds", "toy.yaml"))


@pytest.fixture
def warnings_logged() -> Any:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]), level="WARNING")
    yield lines
    logger.remove(sink)


def test_bounds_are_interpolated_between_points_and_absent_outside():
    band = CurveBand(REWARD, ((10, 0.0, 0.4), (20, 0.5, 0.8)))
    assert [band.interpolate_at(step) for step in (9, 10, 14, 20, 21)] == [
        None,
        (0.0, 0.4),
        (pytest.approx(0.2), pytest.approx(0.56)),
        (0.5, 0.8),
        None,
    ]


def test_metric_outside_band_is_reported_once_with_first_step(warnings_logged: list[str]):
    watch = watch_of(CurveBand(REWARD, ((1, 0.5, 0.9), (100, 0.5, 0.9))))
    values = [0.6, 0.4, 0.6, *[0.3] * 8, 0.95, 0.7]  # one noisy step; eight steps below; one above; back
    sides = [
        watch.observe(step, {REWARD: value})[f"expected/{REWARD}/outside"] for step, value in enumerate(values, start=1)
    ]
    assert sides == [0, -1, 0, *[-1] * 8, 1, 0]
    assert warnings_logged == [
        f"{REWARD} is below the expected band since step 4: 0.3, expected 0.5 to 0.9 at step 8 (toy.yaml: three seeds)"
    ]


def test_return_into_band_is_reported(warnings_logged: list[str]):
    watch = watch_of(CurveBand("eval/all/avg_score", ((0, 0.5, 0.9), (100, 0.5, 0.9))))
    for step, value in ((0, 0.95), (10, float("nan")), (20, 0.1), (30, 0.6)):
        watch.observe(step, {"eval/all/avg_score": value})
    assert [line.split(":")[0] for line in warnings_logged] == [
        "eval/all/avg_score is below the expected band since step 10",
        "eval/all/avg_score is back in the expected band",
    ]


def test_single_published_value_is_compared_at_given_step(warnings_logged: list[str]):
    watch = watch_of(CurveBand("eval/nq/avg_score", ((330, 0.40, 0.48),)))
    assert watch.observe(300, {"eval/nq/avg_score": 0.1}) == {}
    watch.observe(330, {"eval/nq/avg_score": 0.3})
    assert len(warnings_logged) == 1 and "since step 330: 0.3, expected 0.4 to 0.48" in warnings_logged[0]


def test_resumed_run_warns_at_same_step_as_uninterrupted_run(warnings_logged: list[str]):
    resumed = watch_of(CurveBand(REWARD, ((1, 0.5, 0.9), (100, 0.5, 0.9))))
    resumed.replay([{"step": step, REWARD: 0.1} for step in (1, 2, 3)])
    assert warnings_logged == []
    for step in (4, 5, 6):
        resumed.observe(step, {REWARD: 0.1})
    assert len(warnings_logged) == 1 and "since step 1: 0.1" in warnings_logged[0] and "at step 5" in warnings_logged[0]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no such file"),
        ("[1, 2", "cannot be read"),
        ("bands: {}", "needs `source"),
        ("bands: {a: {1: [0, 1]}}", "needs `source: TEXT`, the origin"),
        ("source: s\nbands: {a: [0, 1]}", r"bands\.a must be step: \[lowest, highest\] lines; got \[0, 1\]"),
        ("source: s\nbands: {a: {-1: [0, 1]}}", r"bands\.a\.-1: a step must be an integer, 0 or greater"),
        ("source: s\nbands: {a: {x: [0, 1]}}", r"bands\.a\.x: a step must be an integer"),
        ("source: s\nbands: {a: {1: [0]}}", r"bands\.a\.1 must be \[lowest, highest\], two finite numbers; got \[0\]"),
        ("source: s\nbands: {a: {1: [0, .inf]}}", "two finite numbers"),
        ("source: s\nbands: {a: {1: [2, 1]}}", r"bands\.a\.1: the lowest value 2 is above the highest 1"),
    ],
)
def test_invalid_band_file_error_names_location(text: str | None, message: str, tmp_path: Path):
    file = tmp_path / "bands.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"trainer\.curve_bands=.*bands\.yaml.*{message}"):
        read_bands(str(file))


def test_run_logs_band_next_to_metric_and_page_shades_band(settings: Any, run: Any, tmp_path: Path):
    file = tmp_path / "bands.yaml"
    file.write_text(yaml.safe_dump({"source": "this test", "bands": {REWARD: {1: [5.0, 6.0], 2: [-9.0, 9.0]}}}))
    cfg = validate_cfg(settings(tmp_path / "run", {"trainer": {"curve_bands": str(file)}}))
    first, second = run(cfg)
    assert [first[f"expected/{REWARD}/{name}"] for name in ("low", "high", "outside")] == [5.0, 6.0, -1.0]
    assert [second[f"expected/{REWARD}/{name}"] for name in ("low", "high", "outside")] == [-9.0, 9.0, 0.0]
    reward = next(chart for chart in build_overview(first) if chart["title"] == "Reward")
    assert reward["band"] == [f"expected/{REWARD}/low", f"expected/{REWARD}/high"]


def test_reference_run_bands_are_mean_and_std_over_runs():
    runs = [[{"step": step, REWARD: value + seed} for step, value in ((1, 0.0), (2, 2.0), (3, 4.0))] for seed in (0, 2)]
    # Means over two steps: 1 and 3 (at step 2), then 4 and 6 (at step 3); deviation sqrt(2) each.
    bands = compute_bands(runs, [REWARD], interval=2, width=1.0)
    assert bands == {REWARD: {2: [pytest.approx(2 - 2**0.5), pytest.approx(2 + 2**0.5)], 3: [3.585786, 6.414214]}}
    uneven = [[{"step": 1, REWARD: low}, {"step": 2, REWARD: high}] for low, high in ((0.0, 0.0), (0.0, 2.0))]
    bands = compute_bands(uneven, [REWARD], interval=1, width=1.0, pool=True)  # variances 0 and 2: their mean is 1
    assert bands == {REWARD: {1: [-1.0, 1.0], 2: [0.0, 2.0]}}
    with pytest.raises(DataError, match="at least two runs"):
        compute_bands(runs[:1], [REWARD], interval=2)
    with pytest.raises(DataError, match=rf"loss/x; .*{REWARD}"):
        compute_bands(runs, ["loss/x"], interval=2)


def test_printed_bands_load_and_contain_source_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for seed in (0, 1, 2):
        folder = RunFolder(tmp_path / str(seed))
        folder.path.mkdir()
        lines = [f'{{"step": {step}, "{REWARD}": {0.1 * step + 0.01 * seed}}}' for step in range(1, 11)]
        folder.metrics_path.write_text("\n".join(lines) + "\n")
    main([str(tmp_path / str(seed)) for seed in (0, 1, 2)])
    (tmp_path / "bands.yaml").write_text(capsys.readouterr().out)
    watch = CurveWatch(read_bands(str(tmp_path / "bands.yaml")))
    expected = watch.observe(5, {REWARD: 0.51})
    assert expected[f"expected/{REWARD}/outside"] == 0
    assert expected[f"expected/{REWARD}/low"] == pytest.approx(0.49, abs=0.02)

import json

import pytest

from skyrl_agent.datasets import read_rows


def test_parquet_rows_omit_fields_of_other_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": {"a": 1}}},
        {"prompt": [{"role": "user", "content": "q", "name": "n"}], "reward_model": {"ground_truth": {"b": [None]}}},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_rows(tmp_path / "rows.parquet") == read_rows(tmp_path / "rows.jsonl") == rows

"""TensorBatch: tensors in, rows out."""

import pickle
from pathlib import Path

import pytest
import torch

from skyrl_train.training_batch import TensorBatch, TrainingInputBatch


def batch() -> TensorBatch:
    """Three rows; one column of two dimensions, one of one, one that is not there."""
    return TensorBatch(
        ids=torch.tensor([[1, 2], [3, 4], [5, 6]]),
        reward=torch.tensor([0.1, 0.2, 0.3]),
        values=None,
        metadata={"uids": ["a", "b", "c"]},
    )


def test_batch_size_equals_tensor_size():
    assert len(batch()) == batch().batch_size == 3
    assert batch().device == torch.device("cpu")
    assert len(TensorBatch()) == 0 and TensorBatch().device is None
    assert len(TensorBatch(values=None)) == 0


def test_tensors_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="'a': 2, 'b': 3"):
        TensorBatch(a=torch.zeros(2), b=torch.zeros(3))
    with pytest.raises(ValueError, match="Batch size mismatch"):
        batch()["more"] = torch.zeros(4)


def test_non_tensor_values_are_refused():
    with pytest.raises(ValueError, match=r"'a' .*list"):
        TensorBatch(a=[1, 2])


def test_none_column_is_present_but_not_tensor():
    assert batch()["values"] is None
    with pytest.raises(KeyError, match="'values' is None"):
        batch().tensor("values")
    with pytest.raises(KeyError):
        batch().tensor("advantages")


def test_rows_are_selected_by_position_slice_and_index():
    assert batch()[1]["ids"].tolist() == [[3, 4]]
    assert batch()[-1]["ids"].tolist() == [[5, 6]]
    assert batch()[1:]["reward"].tolist() == pytest.approx([0.2, 0.3])
    assert batch()[::2]["ids"].tolist() == [[1, 2], [5, 6]]
    assert batch().slice(0, 2)["ids"].tolist() == [[1, 2], [3, 4]]
    assert batch().rows(torch.tensor([2, 0]))["ids"].tolist() == [[5, 6], [1, 2]]
    assert batch()[1]["values"] is None


def test_chunks_are_consecutive_and_last_may_be_smaller():
    assert [chunk["ids"].tolist() for chunk in batch().chunk(2)] == [[[1, 2], [3, 4]], [[5, 6]]]
    assert batch().chunk(2)[1].metadata == {"uids": ["a", "b", "c"]}


def test_slice_has_separate_metadata():
    whole = batch()
    whole.slice(0, 1).metadata["uids"] = []
    assert whole.metadata == {"uids": ["a", "b", "c"]}


def test_batch_repeats_blockwise_and_by_row():
    assert batch().repeat(2)["ids"].tolist() == [[1, 2], [3, 4], [5, 6]] * 2
    assert batch().repeat_interleave(2)["ids"].tolist() == [[1, 2], [1, 2], [3, 4], [3, 4], [5, 6], [5, 6]]
    assert batch().repeat(2)["reward"].shape == (6,)


def test_select_keeps_given_columns_and_metadata():
    selected = batch().select(["reward"], [])
    assert list(selected) == ["reward"] and selected.metadata == {}
    assert batch().select(["reward", "values"]).metadata == {"uids": ["a", "b", "c"]}
    with pytest.raises(KeyError):
        batch().select(["advantages"])


def test_concatenation_restores_chunked_batch():
    assert TensorBatch.cat(batch().chunk(2)) == batch()
    with pytest.raises(ValueError, match="empty list"):
        TensorBatch.cat([])
    with pytest.raises(KeyError):
        TensorBatch.cat([batch(), TensorBatch(ids=torch.zeros(1, 2))])


def test_conversion_is_in_place():
    ours = batch()
    assert ours.to(dtype=torch.float64) is ours
    assert ours["ids"].dtype == ours["reward"].dtype == torch.float64
    transposed = TensorBatch(a=torch.zeros(2, 3).T)
    assert transposed.contiguous()["a"].is_contiguous()


def test_equality_compares_values_types_and_metadata():
    assert batch() == batch()
    other = batch()
    other["reward"] = other.tensor("reward").double()
    assert other != batch()
    other = batch()
    other.metadata["uids"] = []
    assert other != batch()
    assert batch() != batch().slice(0, 2)
    other = batch()
    other["values"] = torch.zeros(3)
    assert other != batch() and batch() != other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_pickling_keeps_bits_and_class(dtype: torch.dtype):
    tensor = torch.tensor([[1.5, 0.0], [-3.25, 1e-3]]).to(dtype)
    sent = TrainingInputBatch(a=tensor, transposed=tensor.T, none=None, metadata={"n": 1})
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is TrainingInputBatch
    assert received == sent
    received["a"].zero_()  # its memory is its own, and may be written to
    assert received != sent


def test_nan_survives_pickling():
    received = pickle.loads(pickle.dumps(TensorBatch(a=torch.tensor([float("nan"), float("inf")]))))
    assert received["a"].isnan().tolist() == [True, False]


def test_saved_batch_loads_equal(tmp_path: Path):
    batch().save(tmp_path / "batch.pkl")
    assert TensorBatch.load(tmp_path / "batch.pkl") == batch()

"""Changes lead from one version to the next to the bit, in few bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync import delta
from skyrl_train.weight_sync.delta import apply, encode


def encoded(new: np.ndarray, base: np.ndarray) -> bytes:
    return b"".join(encode(new, base))


def test_gaps_are_relative_to_previous_position_with_escape_at_255():
    positions = np.array([0, 1, 255, 256 + 255, 2000])
    gaps = delta._encode_gaps(positions)
    assert gaps.tolist() == [1, 1, 254, 255, 1, *[255] * 5, 214]
    assert delta._decode_gaps(gaps).tolist() == positions.tolist()


def test_gap_of_255_ends_with_zero_byte():
    assert delta._encode_gaps(np.array([254])).tolist() == [255, 0]
    assert delta._decode_gaps(np.array([255, 0], dtype=np.uint8)).tolist() == [254]


def test_differences_are_encoded_with_sign_last_and_low_bytes_first():
    differences = np.array([0, -1, 1, -2, 2, -32768, 32767], dtype=np.int16)
    planes = delta._encode_planes(differences)
    assert planes.tolist() == [[0, 1, 2, 3, 4, 255, 254], [0, 0, 0, 0, 0, 255, 255]]
    assert delta._decode_planes(planes.reshape(-1), np.dtype(np.int16)).tolist() == differences.tolist()


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    length=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.2, 1.0]),
    chunk=st.sampled_from([7, 1000, 1 << 22]),
    seed=st.integers(0, 1000),
)
def test_decoding_restores_encoded_tensor(dtype, length: int, share: float, chunk: int, seed: int):
    random = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    base = random.integers(limits.min, limits.max, length, dtype=dtype, endpoint=True)
    new = base.copy()
    changed = random.random(length) < share
    new[changed] = random.integers(limits.min, limits.max, int(changed.sum()), dtype=dtype, endpoint=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_ELEMENTS", chunk)
        payload = encoded(new, base)
        assert apply(memoryview(payload + b"what follows"), base) == len(payload)
    assert np.array_equal(base, new)


def test_unchanged_tensor_encodes_to_few_bytes():
    weights = np.arange(1_000_000, dtype=np.int16)
    assert len(encoded(weights, weights)) == 17


def test_small_adam_step_encodes_to_less_than_twentieth():
    """The first step moves every float32 weight by the learning rate, 1e-6; in bfloat16 about 4 % of them move."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(2_000_000) * 0.02)
    optimizer = torch.optim.Adam([weights], lr=1e-6)
    base = weights.detach().bfloat16()
    weights.grad = torch.randn_like(weights)
    optimizer.step()
    new = weights.detach().bfloat16()
    changed = (new != base).float().mean().item()
    assert 0.03 < changed < 0.06
    before, after = base.view(torch.int16).numpy(), new.view(torch.int16).numpy()
    payload = encoded(after, before)
    assert len(payload) < 0.03 * after.nbytes
    apply(memoryview(payload), before)
    assert np.array_equal(before, after)


def test_negative_zero_and_nan_survive():
    base = torch.tensor([0.0, 1.0, float("inf")], dtype=torch.bfloat16)
    new = torch.tensor([-0.0, float("nan"), float("-inf")], dtype=torch.bfloat16)
    before, after = base.view(torch.int16).numpy(), new.view(torch.int16).numpy()
    apply(memoryview(encoded(after, before)), before)
    assert np.array_equal(before, after)


@pytest.mark.parametrize("end", [0, 5, 17, 25, -1])
def test_truncated_payload_is_refused(end: int):
    base = np.zeros(10_000, dtype=np.int16)
    new = base.copy()
    new[::100] = 7
    with pytest.raises(WeightSyncError, match="changes of weights cannot be decoded"):
        apply(memoryview(encoded(new, base))[:end], base)

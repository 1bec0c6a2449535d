"""Results of micro-batches become one, as if there had been none."""

import numpy as np

from tx.tinker.types import PassOutput
from tx.tinker.wire.merging import merge_outputs


def part(num_data: int, **metrics: float) -> PassOutput:
    names = {name.replace("_", ":"): value for name, value in metrics.items()}
    return PassOutput([np.full(2, i, np.float32) for i in range(num_data)], names)


def test_metrics_are_merged_by_name_suffix():
    merged = merge_outputs([part(1, a_sum=1, b_mean=1, c_min=1, d_max=1), part(3, a_sum=2, b_mean=5, c_min=2, d_max=2)])
    assert merged.metrics == {"a:sum": 3, "b:mean": 4, "c:min": 1, "d:max": 2}  # b = (1 * 1 + 3 * 5) / 4


def test_merge_keeps_logprob_order_and_handles_weights_and_partial_metrics():
    merged = merge_outputs([part(2, a_sum=0), part(1, a_sum=0)])
    assert [array[0] for array in merged.logprobs] == [0, 1, 0]
    merged = merge_outputs([part(1, a_mean=1), part(1, a_mean=2, b_sum=7)], weights=[3, 1])
    assert merged.metrics == {"a:mean": 1.25, "b:sum": 7}
    one = part(2, a_sum=0.1)
    assert merge_outputs([one]) is one

"""The forward of a model against the plainest one, and forwards that are wrong on purpose."""

from typing import Any

import pytest

from skyrl_train.models.scoring import ScoringModel, TokenScores
from skyrl_train_testing.invariances import InvarianceError, check_model_forward


def test_model_forward_equals_reference_packed_and_padded(tiny_model: str):
    check_model_forward(tiny_model)


class WithoutTemperature(ScoringModel):
    def forward(self, sequences, attention_mask, num_response, temperature, **options: Any) -> TokenScores:
        return super().forward(sequences, attention_mask, num_response, 1.0, **options)


class OneTokenLate(ScoringModel):
    def forward(self, *args: Any, **options: Any) -> TokenScores:
        scores = super().forward(*args, **options)
        return scores._replace(log_probs=scores.log_probs.roll(1, dims=1))


class EntropyWithoutGradient(ScoringModel):
    def forward(self, *args: Any, **options: Any) -> TokenScores:
        scores = super().forward(*args, **options)
        assert scores.entropy is not None
        return scores._replace(entropy=scores.entropy.detach())


class ReadsPadding(ScoringModel):
    def forward(self, sequences, attention_mask, *args: Any, **options: Any) -> TokenScores:
        attention_mask = attention_mask.clone()
        attention_mask[:, 0] = 1
        return super().forward(sequences, attention_mask, *args, **options)


class MeanOverTheMicroBatch(ScoringModel):
    def forward(self, *args: Any, **options: Any) -> TokenScores:
        scores = super().forward(*args, **options)
        return scores._replace(log_probs=scores.log_probs / len(scores.log_probs) * 7)


@pytest.mark.first_case
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("wrong", "violated"),
    [
        (WithoutTemperature, {"agreement"}),
        (OneTokenLate, {"agreement", "masked_output"}),
        (EntropyWithoutGradient, {"agreement"}),
        (ReadsPadding, {"agreement", "masked_garbage", "padding"}),
        (MeanOverTheMicroBatch, {"micro_batches"}),
    ],
)
def test_wrong_forward_is_caught_by_name(tiny_model: str, packing: bool, wrong: type, violated: set[str]):
    with pytest.raises(InvarianceError) as caught:
        check_model_forward(tiny_model, scoring=wrong, packing=[packing])
    assert violated <= set(caught.value.names), str(caught.value)


def test_error_names_parameter_with_wrong_gradient(tiny_model: str):
    with pytest.raises(InvarianceError, match=r"packed rows: the gradient in model\.") as caught:
        check_model_forward(tiny_model, scoring=EntropyWithoutGradient, packing=[True])
    assert "the log-prob" not in str(caught.value)

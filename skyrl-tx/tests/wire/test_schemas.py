"""JSON bodies: valid ones are read, invalid ones refused with the field, and no option is ignored."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from tx.errors import RequestError
from tx.tinker.types import AdamParams, LoraSpec, SampleParams, SampleSpec
from tx.tinker.wire import schemas
from tx.tinker.wire.schemas import (
    AsampleRequest,
    CreateModelRequest,
    CreateSessionRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    SetTtlRequest,
    describe_errors,
    to_request_error,
)

CREATE = {"session_id": "session_1", "model_seq_id": 0, "base_model": "m"}
STEP = {"model_id": "m", "seq_id": 1}
SAVE = {"model_id": "m", "seq_id": 1, "path": "name"}
LOAD = {"path": "tinker://m/weights/a", "optimizer": True}
SAMPLE = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}, {"tokens": [6, 7]}]},
    "sampling_params": {"max_tokens": 3},
    "sampling_session_id": "s:sample:0",
    "seq_id": 2_000_000_001,
}


def refused(kind: type[schemas.Body] | type[schemas.LenientBody], body: Any) -> str:
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    return describe_errors(error.value)


def test_adapter_step_and_sample_requests_use_protocol_defaults():
    lora = CreateModelRequest.model_validate(CREATE | {"lora_config": {"rank": 8, "train_mlp": False}}).lora_config
    assert lora and lora.to_spec(lambda: 42) == LoraSpec(rank=8, seed=42, train_mlp=False)
    seeded = CreateModelRequest.model_validate(CREATE | {"lora_config": {"seed": 0}}).lora_config
    assert seeded and seeded.to_spec(lambda: 42) == LoraSpec(rank=32, seed=0)
    assert CreateModelRequest.model_validate(CREATE | {"optimizer_config": {"type": "adamw"}}).lora_config is None
    step = OptimStepRequest.model_validate(STEP | {"adam_params": {"learning_rate": 1}})
    assert step.adam_params.to_params() == AdamParams(learning_rate=1.0, beta2=0.95, eps=1e-12)
    spec = AsampleRequest.model_validate(SAMPLE | {"num_samples": 4, "prompt_logprobs": True}).to_spec(lambda: 42)
    params = SampleParams(seed=42, max_tokens=3, stop_at_eos=True)
    assert spec == SampleSpec(prompt=[5, 6, 7], num_samples=4, params=params, prompt_logprobs=True)


@pytest.mark.parametrize(
    "stop, strings, ids, eos",
    [
        (None, (), (), True),  # nothing is said: the tokenizer's end
        ([], (), (), False),  # nothing ends it
        ("end", ("end",), (), False),
        (["a", "b"], ("a", "b"), (), False),
        ([3, 4], (), (3, 4), False),
    ],
)
def test_stops_have_their_meanings(stop, strings, ids, eos):
    params = AsampleRequest.model_validate(SAMPLE | {"sampling_params": {"stop": stop}}).to_spec(lambda: 0).params
    assert (params.stop_strings, params.stop_token_ids, params.stop_at_eos) == (strings, ids, eos)


@pytest.mark.parametrize("stop", [["a", 3], [1.5], [True], 3, {"a": 1}, [None], ["x" * 1025]])
def test_other_stops_are_refused(stop):
    assert "sampling_params.stop: must be" in refused(AsampleRequest, SAMPLE | {"sampling_params": {"stop": stop}})


def test_given_seed_is_kept_including_negative():
    def seed(value):
        return (
            AsampleRequest.model_validate(SAMPLE | {"sampling_params": {"seed": value}}).to_spec(lambda: 9).params.seed
        )

    assert (seed(3), seed(0), seed(None)) == (3, 0, 9)
    assert seed(-1) == 2**63 - 1


@pytest.mark.parametrize(
    "option, nothing, something",
    [
        ("topk_sample_logprobs", 0, 3),
        ("prompt_alt_tokens_k", 0, 1),
        ("prompt_logprobs_last_n", None, 5),
        ("an_option_of_next_year", 0, 1),
    ],
)
def test_unsupported_options_are_refused_only_when_they_request_something(option, nothing, something):
    AsampleRequest.model_validate(SAMPLE | {option: nothing})
    assert option in refused(AsampleRequest, SAMPLE | {option: something})


def test_inconsistent_prompt_targets_are_refused():
    for change, says in (
        ({"shape": [4]}, "shape must be [len(prompt) - 1, K]; got [4]"),
        ({"shape": [3, 2]}, "target_prompt_logprobs.shape must have 4 elements"),
        ({"sparse_crow_indices": [0, 2, 4]}, "must be set together"),
        ({"sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0, 1, 0, 2]}, "numbers from 0 to 1"),
    ):
        given = {"data": [1, 2, 3, -1], "dtype": "int64", "shape": [2, 2]} | change
        request = AsampleRequest.model_validate(SAMPLE | {"target_prompt_logprobs": given})
        with pytest.raises(RequestError, match=re.escape(says)):
            request.to_spec(lambda: 0)


def test_full_fine_tuning_error_names_alternative():
    full = refused(CreateModelRequest, CREATE | {"lora_config": None})
    assert full.startswith("lora_config: must be an adapter configuration")
    assert "`tx train` or skyrl_train" in full
    left_out = {name: value for name, value in CREATE.items() if name != "lora_config"}
    assert CreateModelRequest.model_validate(left_out).lora_config is None


def test_unknown_field_is_refused_with_nearest_name():
    assert refused(SaveWeightsRequest, SAVE | {"overwrit": True}) == (
        "body: field 'overwrit' is unknown to this server; did you mean overwrite?"
    )
    wrong = SAMPLE | {"sampling_params": {"temprature": 0.5}}
    assert refused(AsampleRequest, wrong).startswith("sampling_params: field 'temprature' is unknown")
    assert refused(OptimStepRequest, STEP | {"adam_params": {"beta3": 0.5}}).startswith("adam_params: field 'beta3'")


@pytest.mark.parametrize("chunk", [{"type": "image", "data": "", "format": "png"}, {"data": "", "format": "png"}])
def test_image_prompt_is_refused_by_name(chunk):
    said = refused(AsampleRequest, SAMPLE | {"prompt": {"chunks": [chunk]}})
    assert said.startswith("prompt.chunks[0]: must be encoded_text: the models of this server are text-only; got")


@pytest.mark.parametrize(
    "kind, body, says",
    [
        (CreateModelRequest, CREATE | {"model_seq_id": -1}, "model_seq_id: Input should be greater"),
        (CreateModelRequest, CREATE | {"model_seq_id": "0"}, "model_seq_id: Input should be a valid integer; got '0'"),
        (CreateModelRequest, CREATE | {"lora_config": {"rank": 0}}, "lora_config.rank: Input should be greater"),
        (CreateModelRequest, CREATE | {"lora_config": {"rank": True}}, "lora_config.rank: Input should be"),
        (CreateModelRequest, CREATE | {"lora_config": {"alpha": 64}}, "lora_config: field 'alpha' is unknown"),
        (CreateModelRequest, CREATE | {"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type: must be"),
        (CreateModelRequest, CREATE | {"base_model": "a\0b"}, "base_model: String should match"),
        (CreateModelRequest, CREATE | {"base_model": "\ud800"}, "base_model"),
        (CreateModelRequest, {}, "session_id: Field required"),
        (CreateModelRequest, [], "body: Input should be"),
        (OptimStepRequest, STEP | {"seq_id": 0}, "seq_id: Input should be greater than or equal to 1; got 0"),
        (OptimStepRequest, STEP | {"adam_params": {"learning_rate": -1.0}}, "adam_params.learning_rate"),
        (OptimStepRequest, STEP | {"adam_params": {"learning_rate": float("nan")}}, "adam_params.learning_rate"),
        (OptimStepRequest, STEP | {"adam_params": {"beta1": 1.0}}, "adam_params.beta1"),
        (OptimStepRequest, STEP | {"adam_params": {"beta2": 1.0}}, "adam_params.beta2"),
        (OptimStepRequest, STEP | {"adam_params": {"eps": float("inf")}}, "adam_params.eps"),
        (OptimStepRequest, STEP | {"adam_params": {"weight_decay": -0.1}}, "adam_params.weight_decay"),
        (OptimStepRequest, STEP | {"adam_params": {"grad_clip_norm": -1.0}}, "adam_params.grad_clip_norm"),
        (OptimStepRequest, STEP | {"optimizer_params": {"type": "dimuon"}}, "optimizer_params: this server supports"),
        (SaveWeightsRequest, SAVE | {"ttl_seconds": 60}, "or equal to 3600; got 60"),
        (SaveWeightsRequest, SAVE | {"user_metadata": {"a": 1}}, "user_metadata.a"),
        (SaveWeightsForSamplerRequest, STEP, "requires a path"),
        (SaveWeightsForSamplerRequest, SAVE | {"kind": "live"}, "kind: Input should be 'snapshot' or 'inflight'"),
        (LoadWeightsRequest, LOAD, "requires model_id and seq_id"),
        (LoadWeightsRequest, LOAD | STEP | {"session_id": "s", "model_seq_id": 0}, "requires model_id and seq_id"),
        (LoadWeightsRequest, LOAD | {"model_id": "m"}, "requires model_id and seq_id"),
        (LoadWeightsRequest, LOAD | STEP | {"base_model": "m"}, "base_model is only allowed for a new model"),
        (SetTtlRequest, {"ttl_seconds": 10**12}, "ttl_seconds: Input should be less"),
        (AsampleRequest, SAMPLE | {"seq_id": None}, "seq_id requires sampling_session_id"),
        (AsampleRequest, SAMPLE | {"sampling_session_id": None}, "requires sampling_session_id and seq_id"),
        (AsampleRequest, SAMPLE | {"prompt": {"chunks": [{"tokens": [1.5]}]}}, "prompt.chunks[0].tokens[0]"),
        (AsampleRequest, SAMPLE | {"sampling_params": {"temperature": float("inf")}}, "sampling_params.temperature"),
        (AsampleRequest, SAMPLE | {"num_samples": -1}, "num_samples: Input should be greater"),
    ],
)  # fmt: skip
def test_wrong_field_is_refused_by_name(kind, body, says):
    assert says in refused(kind, body)


def test_weights_load_in_place_or_into_new_model():
    assert not LoadWeightsRequest.model_validate(LOAD | STEP).creates_model
    new = LoadWeightsRequest.model_validate(LOAD | {"session_id": "s", "model_seq_id": 0, "base_model": "m"})
    assert new.creates_model


def test_metadata_accepts_only_database_storable_values():
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    for value in ("\ud800", "a\0b", 2**70, float("nan"), "x" * 70_000, deep, {"\0": 1}):
        assert "user_metadata" in refused(CreateSessionRequest, {"user_metadata": {"key": value}})
    fine = {"text": "a \\u0000 in letters", "é": ["✓", None, 1.5]}
    assert CreateSessionRequest.model_validate({"user_metadata": fine}).user_metadata == fine


def test_recorded_only_bodies_accept_anything():
    schemas.TelemetryRequest.model_validate({"events": [{"x": 1}], "whatever": {}})
    schemas.CreateSessionRequest.model_validate({"tags": [], "user_metadata": None, "field_of_next_year": 1})
    schemas.FinishSessionRequest.model_validate({"reason": {"type": "errored", "more": 1}, "detail": "x"})


def test_validation_error_explanation_can_always_be_sent():
    said = refused(SaveWeightsRequest, SAVE | {"user_metadata": {"\ud800": 1}})
    json.dumps(said).encode()
    said.encode()
    with pytest.raises(ValidationError) as error:
        SaveWeightsRequest.model_validate({})
    assert to_request_error(error.value).status == 422

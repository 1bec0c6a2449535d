"""Refusal of requests that cannot be trained on or sampled from, with the field, the value and the rule."""

import re

import numpy as np
import pytest

from tx.errors import RequestError
from tx.tinker.types import LOSSES, Datum, LoraSpec, PromptTargets, SampleParams, SampleSpec
from tx.tinker.wire.checks import check_lora, check_sample, check_training
from tx.tinker.wire.codec import TrainingRequest
from tx.tinker.wire.losses import LOSS_RULES


def floats(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def datum(**inputs: np.ndarray) -> Datum:
    """Three tokens, their targets, and what else is given."""
    return Datum(tokens=np.array([5, 6, 7]), inputs={"target_tokens": np.array([6, 7, 8]), **inputs})


def request(loss_fn: str = "cross_entropy", data: list[Datum] | None = None, **config: float) -> TrainingRequest:
    inputs = {"logprobs": floats(-1, -2, -3), "advantages": floats(0, 1, -1)}
    if loss_fn == "gspo":
        inputs["sequence_ratio_mask"] = floats(0, 1, 1)
    one = datum(weights=floats(0, 1, 0.5)) if loss_fn == "cross_entropy" else datum(**inputs)
    return TrainingRequest("run:train:0", 1, [one] if data is None else data, loss_fn, config)


def sample(prompt: list[int] | None = None, **fields) -> SampleSpec:
    """Fields of `SampleSpec` and of `SampleParams` alike."""
    params = {name: fields.pop(name) for name in list(fields) if name in SampleParams.__struct_fields__}
    return SampleSpec(prompt=[5, 6] if prompt is None else prompt, params=SampleParams(seed=0, **params), **fields)


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_valid_request_of_each_loss_passes(loss_fn, facts):
    check_training(request(loss_fn), facts)


def test_each_loss_has_rules():
    assert tuple(LOSS_RULES) == LOSSES


def test_cross_entropy_accepts_k_targets_per_token(facts):
    targets = np.array([[6, 7], [7, 8], [8, 9]])
    wide = Datum(np.array([5, 6, 7]), {"target_tokens": targets, "weights": np.ones((3, 2), np.float32)})
    check_training(request(data=[wide]), facts)


NAN, INF = float("nan"), float("inf")
long = Datum(np.zeros(17, np.int64), {"target_tokens": np.zeros(17, np.int64)})


@pytest.mark.parametrize(
    "data, says",
    [
        ([], "data must contain at least one datum; got none"),
        ([Datum(np.zeros(0, np.int64), {})], "data[0].model_input must be 1 to 16 tokens, the context; got 0"),
        ([long], "data[0].model_input must be 1 to 16 tokens, the context; got 17"),
        ([datum(), Datum(np.array([5, 100]), {})], "data[1].model_input must be token ids from 0 to 99"),
        ([Datum(np.array([-1]), {})], "got -1 at 0"),
        ([Datum(np.array([5]), {})], "data[0].loss_fn_inputs must have 'target_tokens' for cross_entropy; got []"),
        ([datum(target_tokens=np.array([6, 7]))], "['target_tokens'] must have shape [3] or [3, K], one or K for each"),
        ([datum(target_tokens=np.zeros((3, 1, 1), np.int64))], "got [3, 1, 1]"),
        ([datum(target_tokens=np.zeros((3, 0), np.int64))], "got [3, 0]"),
        ([datum(target_tokens=np.array([6, 7, -100]))], "['target_tokens'] must be token ids from 0 to 99"),
        ([datum(target_tokens=np.array([[6, 7], [1, 2], [3, 100]]))], "got 100 at [2, 1]"),
        ([datum(weights=floats(1, 1))], "['weights'] must have the shape of the targets, [3]; got [2]"),
        ([datum(weights=floats(1, NAN, 1))], "data[0].loss_fn_inputs['weights'] must be finite; got nan at 1"),
        ([datum(weights=floats(1, 1, -INF))], "data[0].loss_fn_inputs['weights'] must be finite; got -inf at 2"),
        ([datum(wieghts=floats(1, 1, 1))], "takes target_tokens, weights; did you mean weights?"),
    ],
)  # fmt: skip
def test_bad_data_is_refused(data, says, facts):
    with pytest.raises(RequestError, match=re.escape(says)) as refused:
        check_training(request(data=data), facts)
    assert refused.value.status == 400


RL = {"logprobs": floats(-1, -1, -1), "advantages": floats(1, 1, 1)}
BOUNDS = {"clip_low_threshold": floats(0.5, 0.6, 0.7), "clip_high_threshold": floats(1, 1, 1)}


@pytest.mark.parametrize(
    "loss_fn, inputs, says",
    [
        ("ppo", {"logprobs": RL["logprobs"]}, "must have 'advantages' for ppo; got ['logprobs', 'target_tokens']"),
        ("dro", {"advantages": RL["advantages"]}, "must have 'logprobs' for dro"),
        ("cispo", RL | {"weights": floats(1, 1, 1)}, "['weights'] is no input of cispo"),
        ("ppo", RL | {"advantages": floats(1, NAN, 1)}, "['advantages'] must be finite; got nan at 1"),
        ("ppo", RL | {"logprobs": floats(1, -INF, 1)}, "['logprobs'] must be finite; got -inf at 1"),
        ("ppo", RL | {"target_tokens": np.zeros((3, 2), np.int64)}, "must have shape [3], one for each"),
        ("dro", RL | {"clip_low_threshold": floats(0, 0, 0)}, "['clip_low_threshold'] is no input of dro"),
        ("ppo", RL | BOUNDS | {"clip_low_threshold": floats(0, 2, 0)}, "got 2.0 and 1.0 at 1"),
    ],
)  # fmt: skip
def test_bad_loss_inputs_are_refused(loss_fn, inputs, says, facts):
    with pytest.raises(RequestError, match=re.escape(says)):
        check_training(request(loss_fn, [datum(**inputs)]), facts)


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_per_token_bounds_are_accepted(loss_fn, facts):
    mask = {"sequence_ratio_mask": floats(1, 1, 0)} if loss_fn == "gspo" else {}
    check_training(request(loss_fn, [datum(**RL, **mask, **BOUNDS)]), facts)


@pytest.mark.parametrize(
    "loss_fn, config, says",
    [
        ("cros_entropy", {}, "ppo, cispo, dro, gspo; got 'cros_entropy'; did you mean cross_entropy?"),
        ("", {}, "got ''"),
        ("stable_reinforce", {}, "not public; set loss_fn=importance_sampling"),
        ("custom", {}, "forward_backward_custom"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config['beta']: cross_entropy takes no settings"),
        ("ppo", {"clip_low_treshold": 0.5}, "clip_high_threshold; did you mean clip_low_threshold?"),
        ("ppo", {"beta": 0.5}, "loss_fn_config['beta']"),
        ("dro", {"beta": NAN}, "loss_fn_config['beta'] must be finite; got nan"),
        ("dro", {"beta": -1.0}, "must be 0 or more; got -1"),
        ("cispo", {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0}, "got 2.0 and 1.0"),
        ("cispo", {"clip_low_threshold": -1.0, "clip_high_threshold": 1.0}, "0 <= low <= high"),
    ],
)  # fmt: skip
def test_bad_losses_and_settings_are_refused(loss_fn, config, says, facts):
    with pytest.raises(RequestError, match=re.escape(says)):
        check_training(request(loss_fn, **config), facts)


def test_valid_sample_passes(facts):
    check_sample(sample(num_samples=4, max_tokens=14, temperature=0.7, top_k=5, top_p=0.9), facts)
    check_sample(sample(temperature=0, stop_strings=("end",), topk_prompt_logprobs=20), facts)
    check_sample(sample(stop_token_ids=(1, 99)), facts)


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"prompt": []}, "prompt must contain at least one token; got none"),
        ({"prompt": [5, 100]}, "prompt must be token ids from 0 to 99, the vocabulary; got 100 at 1"),
        ({"prompt": [2**70]}, f"got {2**70} at 0"),
        ({"prompt": [0] * 16}, "prompt must leave room for a completion in the context of 16 tokens; got 16"),
        ({"max_tokens": 15}, "sampling_params.max_tokens must be 1 to 14"),
        ({"max_tokens": 0}, "sampling_params.max_tokens must be 1 to 14"),
        ({"num_samples": 0}, "num_samples must be 1 to 1024; got 0"),
        ({"num_samples": 1025}, "got 1025"),
        ({"temperature": -1.0}, "sampling_params.temperature must be 0 (greedy) or 0.001 to 100; got -1"),
        ({"temperature": NAN}, "got nan"),
        ({"temperature": 1e-9}, "got 1e-09"),
        ({"top_p": 0.0}, "sampling_params.top_p must be above 0 and at most 1; got 0.0"),
        ({"top_p": 1.1}, "got 1.1"),
        ({"top_p": NAN}, "got nan"),
        ({"top_k": 0}, "sampling_params.top_k must be 1 or more, or -1 for all tokens; got 0"),
        ({"top_k": -2}, "got -2"),
        ({"stop_strings": ("a", "")}, "sampling_params.stop must not contain an empty string"),
        ({"stop_strings": ("a",) * 65}, "sampling_params.stop must be at most 64 stops; got 65"),
        ({"stop_token_ids": (1, 100)}, "sampling_params.stop must be token ids from 0 to 99"),
        ({"stop_token_ids": (2**70,)}, "sampling_params.stop"),
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs must be 0 to 100"),
        ({"topk_prompt_logprobs": -1}, "got -1"),
        ({"targets": PromptTargets(shape=(2, 1), ids=[5, 5])}, "target_prompt_logprobs.shape must be [1, K]"),
        ({"targets": PromptTargets(shape=(1, 1), ids=[100])}, "must be token ids below 100, or -1 for none; got 100"),
    ],
)  # fmt: skip
def test_bad_samples_are_refused(fields, says, facts):
    with pytest.raises(RequestError, match=re.escape(says)):
        check_sample(sample(**fields), facts)


def test_check_lora_refuses_ranks_and_layers_out_of_range():
    check_lora(LoraSpec(rank=128), max_rank=128)
    for lora in (LoraSpec(rank=129), LoraSpec(rank=0)):
        with pytest.raises(RequestError, match=r"lora_config\.rank"):
            check_lora(lora, max_rank=128)
    with pytest.raises(RequestError, match="must train something"):
        check_lora(LoraSpec(train_attn=False, train_mlp=False, train_unembed=False), max_rank=128)

"""Runs in an environment of the `tinker` SDK, without ours: writes requests with the SDK's own classes, reads our
results with its own parsers. Speaks JSON on stdin and stdout; bytes in hexadecimal.

    {"write": true}                    -> {"version", "training": [[name, content type, hex]], "bodies": [[name, body]]}
    {"read": [[kind, encoding, hex]]}  -> [what the SDK's user would see], kind `pass` or `sample`
"""

import dataclasses
import importlib.metadata
import json
import sys

import numpy as np
from tinker import types

VERSION = importlib.metadata.version("tinker")
MINOR = int(VERSION.split(".")[1])
HAS_PROTO, HAS_JSON = MINOR >= 24, MINOR < 25
"""Wire formats of the three versions under test: 0.16 has JSON, 0.24 both, 0.38 protobuf."""


def tensor(numbers, dtype="float32", shape=None):
    return types.TensorData(data=numbers, dtype=dtype, shape=shape or [len(numbers)])


def cross_entropy_data():
    plain = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": tensor([6, 7, 8], "int64"), "weights": tensor([0.0, 1.0, 0.5])},
    )
    from_lists = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=[1]), types.EncodedTextChunk(tokens=[2, 3])]
        ),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 0.25]},
    )
    from_numpy = types.Datum(
        model_input=types.ModelInput.from_ints([9]),
        loss_fn_inputs={"target_tokens": np.array([[1, 2]]), "weights": np.array([[0.5, -0.5]], np.float32)},
    )
    return [plain, from_lists] + ([from_numpy] if MINOR >= 24 else [])


def rl_data():
    inputs = {"target_tokens": [6, 7], "logprobs": [-0.5, -1.25], "advantages": [1.0, -2.0]}
    return [types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=inputs)]


def sparse_data():
    sparse = {"shape": [3, 4], "sparse_crow_indices": [0, 2, 2, 3], "sparse_col_indices": [0, 3, 1]}
    inputs = {
        "target_tokens": types.TensorData(data=[7, 8, 9], dtype="int64", **sparse),
        "weights": types.TensorData(data=[0.5, 1.0, 2.0], dtype="float32", **sparse),
    }
    return [types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)]


def training():
    """(name, content type, bytes) of each request in each encoding that this SDK sends."""
    inputs = {
        "cross_entropy": types.ForwardBackwardInput(data=cross_entropy_data(), loss_fn="cross_entropy"),
        "ppo": types.ForwardBackwardInput(
            data=rl_data(), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
        ),
    }
    if MINOR >= 24:
        inputs["sparse"] = types.ForwardBackwardInput(data=sparse_data(), loss_fn="cross_entropy")
    for name, given in inputs.items():
        request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=3)
        if HAS_PROTO:
            from tinker.proto.request_conv import forward_backward_request_to_proto

            yield name, "application/x-protobuf", forward_backward_request_to_proto(request).SerializeToString()
        if HAS_JSON:
            yield name, "application/json", dumped(request)
            forward = types.ForwardRequest(forward_input=given, model_id="s:train:0", seq_id=3)
            yield f"forward {name}", "application/json", dumped(forward)


def dumped(request) -> bytes:
    if MINOR >= 24:
        from tinker.lib._pydantic_conv import to_pydantic_request

        body = to_pydantic_request(request).model_dump(exclude_none=True, mode="json")
    else:
        body = request.model_dump(exclude_unset=True, mode="json")
    return json.dumps(body).encode()


def known(kind, **fields):
    """The request, without the fields that this version does not have."""
    names = getattr(kind, "model_fields", None) or {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in fields.items() if name in names})


def bodies():
    """(our schema's name, JSON) of the other requests, with everything set that is supported."""
    prompt = types.ModelInput.from_ints([1, 2, 3])
    from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
    from tinker.types.create_session_request import CreateSessionRequest
    from tinker.types.future_retrieve_request import FutureRetrieveRequest
    from tinker.types.get_info_request import GetInfoRequest
    from tinker.types.sample_request import SampleRequest
    from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

    address = {"model_id": "s:train:0", "seq_id": 4}
    params = types.SamplingParams(max_tokens=5, seed=1, stop=["a", "b"], temperature=0.5, top_k=4, top_p=0.9)
    adam = types.AdamParams(learning_rate=0.1, weight_decay=0.25, grad_clip_norm=1.0)
    requests = [
        ("CreateSessionRequest", known(CreateSessionRequest, tags=["t"], user_metadata=None, sdk_version=VERSION)),
        ("SessionHeartbeatRequest", SessionHeartbeatRequest(session_id="s")),
        (
            "CreateModelRequest",
            types.CreateModelRequest(
                session_id="s",
                model_seq_id=0,
                base_model="m",
                user_metadata={"a": 1},
                lora_config=types.LoraConfig(rank=8, seed=3, train_mlp=False),
            ),
        ),
        ("GetInfoRequest", GetInfoRequest(model_id="s:train:0")),
        ("UnloadModelRequest", types.UnloadModelRequest(model_id="s:train:0")),
        ("OptimStepRequest", types.OptimStepRequest(adam_params=adam, **address)),
        ("SaveWeightsRequest", known(types.SaveWeightsRequest, path="n", ttl_seconds=3600, overwrite=True, **address)),
        ("SaveWeightsForSamplerRequest", types.SaveWeightsForSamplerRequest(path="n", **address)),
        ("SaveWeightsForSamplerRequest", types.SaveWeightsForSamplerRequest(sampling_session_seq_id=2, **address)),
        ("LoadWeightsRequest", types.LoadWeightsRequest(path="tinker://r/weights/n", optimizer=True, **address)),
        (
            "CreateSamplingSessionRequest",
            CreateSamplingSessionRequest(session_id="s", sampling_session_seq_id=1, base_model="m"),
        ),
        (
            "AsampleRequest",
            SampleRequest(
                prompt=prompt,
                sampling_params=params,
                num_samples=2,
                sampling_session_id="s:sample:0",
                seq_id=9,
                prompt_logprobs=True,
                topk_prompt_logprobs=3,
            ),
        ),
        ("AsampleRequest", SampleRequest(prompt=prompt, sampling_params=types.SamplingParams(), base_model="m")),
        ("RetrieveFutureRequest", FutureRetrieveRequest(request_id="f", allow_metadata_only=True)),
    ]
    if MINOR >= 36:
        new = types.LoadWeightsRequest(session_id="s", model_seq_id=1, path="tinker://r/weights/n", optimizer=False)
        requests.append(("LoadWeightsRequest", new))
    for name, request in requests:
        yield name, request.model_dump(exclude_none=True, mode="json")
        yield name, request.model_dump(exclude_unset=True, mode="json")


def read(kind: str, encoding: str, data: bytes):
    model = types.ForwardBackwardOutput if kind == "pass" else types.SampleResponse
    if encoding == "protobuf":
        from tinker.proto.response_conv import deserialize_proto_response

        result = deserialize_proto_response(data, model)
    elif MINOR >= 24:
        from tinker.lib._pydantic_conv import deserialize_json_response

        result = deserialize_json_response(json.loads(data), model)
    else:
        result = model.model_validate(json.loads(data))
    return seen_pass(result) if kind == "pass" else seen_sample(result)


def seen_pass(output):
    outputs = [{k: (list(v.shape), v.dtype, list(v.data)) for k, v in one.items()} for one in output.loss_fn_outputs]
    return {"type": output.loss_fn_output_type, "outputs": outputs, "metrics": dict(output.metrics)}


def seen_sample(response):
    return {
        "sequences": [(list(s.tokens), s.logprobs and list(s.logprobs), s.stop_reason) for s in response.sequences],
        "prompt_logprobs": response.prompt_logprobs,
        "topk": response.topk_prompt_logprobs,
    }


def main():
    order = json.load(sys.stdin)
    if "read" in order:
        answer = [read(kind, encoding, bytes.fromhex(data)) for kind, encoding, data in order["read"]]
    else:
        answer = {
            "version": VERSION,
            "training": [(name, kind, data.hex()) for name, kind, data in training()],
            "bodies": list(bodies()),
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

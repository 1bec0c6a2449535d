"""Bad input gets an immediate 4xx that names field and rule, never a hang or a 5xx."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np

from tx_conformance import client
from tx_conformance.checks import CHECKS, Check, Skip, check, expect, expect_refused
from tx_conformance.server import ServerUnderTest
from tx_conformance.wire import PROTOBUF, Wire, tensor, text, text_datum

AT_ONCE_SECONDS = 5.0
HUGE = 2**31 - 1
"""A token no vocabulary has."""

Request = Callable[[Wire, str, ServerUnderTest], httpx.Response]
"""(wire, id of a live model whose next seq is 1, server) -> response to bad input"""


def changed(server: ServerUnderTest, **inputs: object) -> list[dict[str, Any]]:
    """A good datum of 5 tokens with some of its loss inputs replaced, or left out (None)."""
    one = text_datum(server.text(6))
    merged = one["loss_fn_inputs"] | inputs
    one["loss_fn_inputs"] = {name: value for name, value in merged.items() if value is not None}
    return [one]


def rl(server: ServerUnderTest, **inputs: object) -> list[dict[str, Any]]:
    """A good datum for the losses with advantages, changed likewise."""
    return changed(
        server, **{"weights": None, "logprobs": tensor([-1.0] * 5), "advantages": tensor([1.0] * 5)} | inputs
    )


def raw_tokens(server: ServerUnderTest, tokens: list[Any]) -> list[dict[str, Any]]:
    return [text_datum(server.text(6)) | {"model_input": text(tokens)}]


def backward(make: Callable[[ServerUnderTest], Any], loss: str = "cross_entropy", config: Any = None) -> Request:
    return lambda wire, model, server: wire.backward(model, 1, make(server), loss, config)


def sample(params: dict[str, object] | None = None, **changes: object) -> Request:
    return lambda wire, model, server: wire.sample(server.text(4), params, **changes)


def prompt(make: Callable[[ServerUnderTest], object]) -> Request:
    return lambda wire, model, server: wire.sample(make(server))


def create(**changes: Any) -> Request:
    return lambda wire, model, server: wire.create_model(wire.session(), **changes)


def lora(**values: object) -> Request:
    return create(lora_config={"rank": 4, "seed": 1, "train_unembed": False} | values)


def save(name: object) -> Request:
    return lambda wire, model, server: wire.save(model, 1, None, path=name)


def save_for_sampler(name: object) -> Request:
    return lambda wire, model, server: wire.save_for_sampler(model, 1, path=name)


def load(path: str) -> Request:
    return lambda wire, model, server: wire.load(model, 1, path.format(model=model))


def step(**adam: object) -> Request:
    return lambda wire, model, server: wire.step(model, 1, **adam)


def body(path: str, content: bytes, **headers: str) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda wire, model, server: wire.post(path, content=content, headers=named)


TABLE: dict[str, tuple[Request, tuple[str, ...]]] = {
    # training data
    "empty_data": (backward(lambda w: []), ("data",)),
    "empty_input": (backward(lambda w: raw_tokens(w, [])), ("data[0]",)),
    "token_out_of_vocabulary": (backward(lambda w: raw_tokens(w, [1, 2, HUGE, 3, 4])), ("data[0]", str(HUGE))),
    "negative_token": (backward(lambda w: raw_tokens(w, [1, 2, -5, 3, 4])), ("data[0]", "-5")),
    "target_out_of_vocabulary": (
        backward(lambda w: changed(w, target_tokens=tensor([1, 2, 3, 4, HUGE], "int64"))),
        ("data[0]", "target_tokens", str(HUGE)),
    ),
    "second_datum_is_named": (
        backward(lambda w: changed(w) + raw_tokens(w, [HUGE, 1, 1, 1, 1])),
        ("data[1]",),
    ),
    "missing_targets": (backward(lambda w: changed(w, target_tokens=None)), ("target_tokens",)),
    "targets_too_short": (
        backward(lambda w: changed(w, target_tokens=tensor([1, 2, 3], "int64"))),
        ("data[0]", "target_tokens"),
    ),
    "float_targets": (backward(lambda w: changed(w, target_tokens=tensor([1.5] * 5))), ("target_tokens",)),
    "weights_of_another_length": (backward(lambda w: changed(w, weights=tensor([1.0] * 4))), ("data[0]", "weights")),
    "shape_that_does_not_fit": (
        backward(lambda w: changed(w, weights=tensor([1.0] * 5, shape=[2, 3]))),
        ("data[0]", "weights"),
    ),
    "unknown_dtype": (
        backward(lambda w: changed(w, weights={"data": [1.0] * 5, "dtype": "float8", "shape": [5]})),
        ("dtype",),
    ),
    "unknown_loss_input": (backward(lambda w: changed(w, wieghts=tensor([1.0] * 5))), ("wieghts",)),
    "unknown_loss": (backward(changed, "cros_entropy"), ("loss_fn", "cros_entropy")),
    "loss_without_advantages": (backward(lambda w: rl(w, advantages=None), "ppo"), ("advantages",)),
    "loss_without_logprobs": (backward(lambda w: rl(w, logprobs=None), "importance_sampling"), ("logprobs",)),
    "unknown_loss_config": (backward(rl, "ppo", {"clip_hgih_threshold": 1.2}), ("clip_hgih_threshold",)),
    "loss_config_upside_down": (
        backward(rl, "ppo", {"clip_low_threshold": 1.5, "clip_high_threshold": 0.5}),
        ("clip_low_threshold",),
    ),
    "loss_config_no_number": (backward(rl, "dro", {"beta": "much"}), ("beta",)),
    "config_of_cross_entropy": (backward(changed, config={"beta": 1.0}), ("beta",)),
    "unknown_chunk": (
        backward(lambda w: [changed(w)[0] | {"model_input": {"chunks": [{"type": "smell", "data": "x"}]}}]),
        ("data",),
    ),
    "image_for_a_text_model": (
        backward(
            lambda w: [changed(w)[0] | {"model_input": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}]
        ),
        ("image",),
    ),
    # optimizer
    "learning_rate_no_number": (step(learning_rate="fast"), ("learning_rate",)),
    "negative_learning_rate": (step(learning_rate=-1.0), ("learning_rate",)),
    "beta_of_one": (step(beta1=1.0), ("beta1",)),
    "negative_beta": (step(beta2=-0.1), ("beta2",)),
    "negative_eps": (step(eps=-1e-8), ("eps",)),
    "negative_weight_decay": (step(weight_decay=-0.1), ("weight_decay",)),
    "negative_clip": (step(grad_clip_norm=-1.0), ("grad_clip_norm",)),
    "unknown_adam_field": (step(learning_rat=0.1), ("learning_rat",)),
    # creation
    "unknown_base_model": (create(base_model="nobody/nothing"), ("base_model", "nobody/nothing")),
    "rank_zero": (lora(rank=0), ("rank",)),
    "negative_rank": (lora(rank=-4), ("rank",)),
    "rank_too_large": (lora(rank=100_000), ("rank", "100000")),
    "rank_no_number": (lora(rank="big"), ("rank",)),
    "nothing_to_train": (lora(train_attn=False, train_mlp=False), ("train_attn",)),
    "unknown_optimizer": (create(optimizer_config={"type": "sgd-of-tomorrow"}), ("optimizer",)),
    # sampling
    "empty_prompt": (prompt(lambda w: []), ("prompt",)),
    "prompt_out_of_vocabulary": (prompt(lambda w: [1, HUGE]), ("prompt", str(HUGE))),
    "prompt_negative": (prompt(lambda w: [1, -1]), ("prompt",)),
    "prompt_no_tokens": (prompt(lambda w: {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]}), ("tokens",)),
    "no_samples": (sample(num_samples=0), ("num_samples",)),
    "negative_samples": (sample(num_samples=-1), ("num_samples",)),
    "far_too_many_samples": (sample(num_samples=10**9), ("num_samples",)),
    "negative_temperature": (sample({"temperature": -0.5}), ("temperature",)),
    "temperature_no_number": (sample({"temperature": "hot"}), ("temperature",)),
    "top_p_zero": (sample({"top_p": 0.0}), ("top_p",)),
    "top_p_above_one": (sample({"top_p": 1.5}), ("top_p",)),
    "top_k_below_minus_one": (sample({"top_k": -7}), ("top_k",)),
    "no_tokens_wanted": (sample({"max_tokens": -1}), ("max_tokens",)),
    "empty_stop_string": (sample({"stop": ["a", ""]}), ("stop",)),
    "stop_of_neither_kind": (sample({"stop": {"at": 1}}), ("stop",)),
    "unknown_sampling_option": (sample({"temprature": 0.5}), ("temprature",)),
    "negative_topk": (sample(topk_prompt_logprobs=-1), ("topk_prompt_logprobs",)),
    "sampling_unknown_model": (sample(base_model="nobody/nothing"), ("nobody/nothing",)),
    "sampling_unknown_session": (sample(sampling_session_id="none-such", seq_id=1), ("none-such",)),
    "sampling_absent_path": (sample(model_path="tinker://none/sampler_weights/absent"), ("tinker://none",)),
    "sampling_training_path": (
        lambda wire, model, server: wire.sampling_session(wire.session(), 0, model_path="tinker://a/nothing/b"),
        ("model_path",),
    ),
    # names and paths
    "name_climbs": (save("../../escape"), ("path",)),
    "name_with_slash": (save("a/b"), ("path",)),
    "name_absolute": (save("/etc/cron.d/x"), ("path",)),
    "name_hidden": (save(".hidden"), ("path",)),
    "name_empty": (save(""), ("path",)),
    "name_too_long": (save("x" * 300), ("path",)),
    "name_with_nul": (save("a\0b"), ("path",)),
    "name_no_text": (save(7), ("path",)),
    "sampler_name_climbs": (save_for_sampler("..%2f..%2fescape"), ("path",)),
    "load_file": (load("file:///etc/passwd"), ("path",)),
    "load_climbs": (load("tinker://{model}/weights/../../../etc"), ("path",)),
    "load_two_segments": (load("tinker://{model}/name"), ("path",)),
    "load_absent": (load("tinker://{model}/weights/absent"), ("absent",)),
    "load_sampler_weights_of_nobody": (load("tinker://../sampler_weights/x"), ("path",)),
    # requests that are none
    "unknown_model": (lambda wire, model, server: wire.step("model_none", 1), ("model_none",)),
    "negative_seq": (lambda wire, model, server: wire.step(model, -1), ("seq_id",)),
    "seq_no_number": (lambda wire, model, server: wire.step(model, "first"), ("seq_id",)),  # pyright: ignore
    "not_json": (body("optim_step", b"{'a':", content_type="application/json"), ()),
    "json_of_another_kind": (body("create_model", b"[1, 2]", content_type="application/json"), ()),
    "not_utf8": (body("create_session", b'{"tags": ["\xff\xfe"]}', content_type="application/json"), ()),
    "deep_json": (body("create_session", b"[" * 50_000, content_type="application/json"), ()),
    "bad_protobuf": (body("forward_backward", b"\xff" * 64, content_type=PROTOBUF), ("protobuf",)),
    "empty_protobuf": (body("forward_backward", b"", content_type=PROTOBUF), ()),
    "unknown_content_type": (body("forward_backward", b"x=1", content_type="application/x-www-form-urlencoded"), ()),
    "unknown_encoding": (body("forward_backward", b"abc", content_type=PROTOBUF, content_encoding="br9"), ()),
    "truncated_zstd": (
        body("forward_backward", b"\x28\xb5\x2f\xfd\x24\x40\x85", content_type=PROTOBUF, content_encoding="zstd"),
        ("zstd",),
    ),
    "no_zstd_at_all": (
        body("forward_backward", b"plain bytes", content_type=PROTOBUF, content_encoding="zstd"),
        ("zstd",),
    ),
}
"""Invalid requests, each with words that the refusal must contain."""


def refused(name: str, request: Request, words: tuple[str, ...]) -> Check:
    """The check that a row of the table makes."""

    def run(server: ServerUnderTest) -> None:
        model = server.model()
        start = time.monotonic()
        answer = request(server.wire, model, server)
        seconds = time.monotonic() - start
        expect_refused(answer, *words, statuses=(400, 404, 413, 415, 422))
        expect(seconds < AT_ONCE_SECONDS, f"refused after {seconds:.1f} s only")

    spoken = f", and the refusal speaks of {', '.join(words)}" if words else ""
    return Check("refusals", name, f"{name.replace('_', ' ')} is refused at once{spoken}", run)


CHECKS.extend(refused(name, request, words) for name, (request, words) in TABLE.items())


@check
def nan_is_refused(server: ServerUnderTest) -> None:
    """weights, advantages and learning rates that are not finite are refused, as JSON and as bytes"""
    wire, model = server.wire, server.model()
    for number in ("NaN", "Infinity"):
        content = f'{{"model_id": "{model}", "seq_id": 1, "adam_params": {{"learning_rate": {number}}}}}'
        answer = wire.post("optim_step", content=content.encode(), headers={"Content-Type": "application/json"})
        expect_refused(answer)
    try:
        from tinker.proto import tinker_public_pb2 as proto  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    for seq, number in enumerate((float("nan"), float("inf")), 2):
        message = protobuf_request(proto, model, seq, server.text(6), [1.0, number, 1.0, 1.0, 1.0])
        answer = wire.post("forward_backward", content=message, headers={"Content-Type": PROTOBUF})
        expect_refused(answer, "data[0]", "weights")


@check
def protobuf_and_json_are_one(server: ServerUnderTest) -> None:
    """the same datum as JSON and as protobuf gives the same log-probs"""
    try:
        from tinker.proto import tinker_public_pb2 as proto  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise Skip("this SDK has no protobuf messages") from None
    wire, model, tokens = server.wire, server.model(), server.text(6)
    message = protobuf_request(proto, model, 1, tokens, [1.0] * 5)
    binary = wire.result(wire.post("forward_backward", content=message, headers={"Content-Type": PROTOBUF}))
    plain = wire.result(wire.backward(model, 2, [text_datum(tokens)]))
    expect(binary["loss_fn_outputs"] == plain["loss_fn_outputs"], "they differ")


def protobuf_request(proto: Any, model: str, seq: int, tokens: list[int], weights: list[float]) -> bytes:
    message = proto.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens[:-1], "<i4").tobytes()
    targets, floats = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = np.asarray(tokens[1:], "<i8").tobytes(), proto.DTYPE_INT64
    floats.dense, floats.dtype = np.asarray(weights, "<f4").tobytes(), proto.DTYPE_FLOAT32
    for one in (targets, floats):
        one.shape.append(len(tokens) - 1)
    return message.SerializeToString()


@check
def body_of_100_megabytes(server: ServerUnderTest) -> None:
    """a body of 100 MB is refused with 413 before it is read to its end"""

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b"\0" * 2**20

    for path, kind in (("forward_backward", PROTOBUF), ("create_session", "application/json")):
        headers = {"Content-Type": kind, "Content-Length": str(100 * 2**20)}
        answer = server.wire.post(path, content=pieces(), headers=headers)
        expect(answer.status_code == 413, f"{path}: {answer.status_code} {answer.text[:200]}")


@check
def zstd_bomb(server: ServerUnderTest) -> None:
    """a small body that unpacks to more than is allowed is refused without being unpacked"""
    block = (128 * 1024 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"  # one byte, 131072 times
    last = (128 * 1024 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + block * 8191 + last  # 1 GB from 32 kB
    headers = {"Content-Type": PROTOBUF, "Content-Encoding": "zstd"}
    expect_refused(server.wire.post("forward_backward", content=frame, headers=headers))


@check
def paths_in_urls(server: ServerUnderTest) -> None:
    """encoded dots and slashes in a URL lead nowhere"""
    for path in ("%2e%2e/%2e%2e", "weights/%2e%2e%2f%2e%2e%2fetc", "weights/..%5c..%5cx", "weights/%00"):
        answer = server.wire.call("GET", f"training_runs/..%2f..%2fetc/checkpoints/{path}/archive")
        expect(400 <= answer.status_code < 500, f"{path}: {answer.status_code}")
        gone = server.wire.call("DELETE", f"training_runs/none/checkpoints/{path}")
        expect(400 <= gone.status_code < 500, f"DELETE {path}: {gone.status_code}")


@check
def unknown_endpoint(server: ServerUnderTest) -> None:
    """an unknown endpoint is 404, and a wrong method 405 or 404"""
    expect(server.wire.post("no_such_thing", {}).status_code == 404, "no_such_thing")
    expect(server.wire.call("GET", "asample").status_code in (404, 405), "GET asample")


@check
def sdk_says_what_is_wrong(server: ServerUnderTest) -> None:
    """the SDK raises what the server says, and the training client can be used on"""
    adapter = server.adapter()
    try:
        adapter.backward([client.datum([1, HUGE], [1, 2], weights=[1.0, 1.0])])
    except Exception as error:  # each version has its own
        expect(str(HUGE) in str(error), f"the error does not name the token: {error}")
    else:
        expect(False, "a token out of the vocabulary was taken")
    adapter.backward([client.text_datum(server.lesson)])
    adapter.step(learning_rate=1e-3)

"""Faults of sampling in the engine process; see `faults`."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
from faults import ENGINE, around, fault


def _spec(change: Callable[[Any], Any]) -> None:
    """Another `SampleSpec` is carried out than was asked for."""
    from tx.tinker.engine.sampling import Sampling

    around(
        Sampling,
        "begin",
        lambda begin, self, order: begin(self, msgspec.structs.replace(order, spec=change(order.spec))),
    )


def _params(**values: Callable[[], Any]) -> None:
    """Parameters that count in place of those asked for."""

    def other(spec: Any) -> Any:
        drawn = {name: value() for name, value in values.items()}
        return msgspec.structs.replace(spec, params=msgspec.structs.replace(spec.params, **drawn))

    _spec(other)


def _answers(change: Callable[[Any], Any]) -> None:
    """Another `SampleOutput` is given out than was made."""
    from tx.tinker.engine import sampling

    around(sampling, "encode_sample_output", lambda encode, output: encode(change(output)))


@fault(ENGINE, "sampling.")
def seed_of_samples_is_ignored() -> None:
    """samples are drawn anew each time"""
    _params(seed=lambda: random.getrandbits(31))


@fault(ENGINE, "sampling.")
def samples_are_copies() -> None:
    """all samples of a request are its first"""
    _answers(lambda output: dataclasses.replace(output, sequences=[output.sequences[0]] * len(output.sequences)))


@fault(ENGINE, "sampling.")
def top_k_is_ignored() -> None:
    """every token may be drawn"""
    _params(top_k=lambda: -1)


@fault(ENGINE, "sampling.")
def top_p_is_ignored() -> None:
    """every token may be drawn"""
    _params(top_p=lambda: 1.0)


@fault(ENGINE, "sampling.")
def end_of_text_is_no_stop() -> None:
    """without `stop` a sample goes on to max_tokens"""
    _params(stop_at_eos=lambda: False)


@fault(ENGINE, "sampling.")
def stop_token_is_dropped() -> None:
    """the token that stopped a sample is not in it"""

    def without(sequence):
        if sequence.stop_reason != "stop":
            return sequence
        return sequence._replace(tokens=sequence.tokens[:-1], logprobs=sequence.logprobs[:-1])

    _answers(lambda output: dataclasses.replace(output, sequences=[without(one) for one in output.sequences]))


@fault(ENGINE, "sampling.")
def prompt_logprobs_are_shifted() -> None:
    """each stands where the one before it should"""
    _answers(
        lambda output: dataclasses.replace(
            output,
            prompt_logprobs=output.prompt_logprobs
            and [None, *output.prompt_logprobs[2:], -1.0][: len(output.prompt_logprobs)],
        )
    )


@fault(ENGINE, "sampling.")
def logprobs_know_no_temperature() -> None:
    """log-probs of samples are rescaled as if they had been drawn at temperature 1"""
    temperatures = [1.0]
    _spec(lambda spec: temperatures.append(spec.params.temperature) or spec)

    def plain(sequence):
        return sequence._replace(logprobs=[value * (temperatures[-1] or 1.0) for value in sequence.logprobs])

    _answers(lambda output: dataclasses.replace(output, sequences=[plain(one) for one in output.sequences]))

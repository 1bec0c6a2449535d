"""Faults of sampling in the engine process; see `faults`."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
from faults import ENGINE, fault, faults

BEGIN, ENCODE = "tx.tinker.engine.sampling:Sampling.begin", "tx.tinker.engine.sampling:encode_sample_output"


def other_params(**values: Callable[[], Any]) -> Callable[..., Any]:
    """Parameters that count in place of those asked for."""

    def begin(original, self, command):
        drawn = {name: value() for name, value in values.items()}
        spec = msgspec.structs.replace(command.spec, params=msgspec.structs.replace(command.spec.params, **drawn))
        original(self, msgspec.structs.replace(command, spec=spec))

    return begin


faults(
    ENGINE,
    "sampling.",
    [
        ("seed_of_samples_is_ignored", "samples are drawn anew each time", BEGIN,
         other_params(seed=lambda: random.getrandbits(31))),
        ("top_k_is_ignored", "every token may be drawn", BEGIN, other_params(top_k=lambda: -1)),
        ("top_p_is_ignored", "every token may be drawn", BEGIN, other_params(top_p=lambda: 1.0)),
        ("end_of_text_is_no_stop", "without `stop` a sample goes on to max_tokens", BEGIN,
         other_params(stop_at_eos=lambda: False)),
    ],
)  # fmt: skip


@fault(ENGINE, "sampling.", ENCODE)
def samples_are_copies(encode, output):
    """all samples of a request are its first"""
    return encode(dataclasses.replace(output, sequences=[output.sequences[0]] * len(output.sequences)))


@fault(ENGINE, "sampling.", ENCODE)
def stop_token_is_dropped(encode, output):
    """the token that stopped a sample is not in it"""

    def without(sequence):
        if sequence.stop_reason != "stop":
            return sequence
        return sequence._replace(tokens=sequence.tokens[:-1], logprobs=sequence.logprobs[:-1])

    return encode(dataclasses.replace(output, sequences=[without(one) for one in output.sequences]))


@fault(ENGINE, "sampling.", ENCODE)
def prompt_logprobs_are_shifted(encode, output):
    """each stands where the one before it should"""
    given = output.prompt_logprobs
    return encode(dataclasses.replace(output, prompt_logprobs=given and [None, *given[2:], -1.0][: len(given)]))


_temperature = [1.0]


@fault(ENGINE, "sampling.", ENCODE)
def logprobs_know_no_temperature(encode, output):
    """log-probs of samples are rescaled as if they had been drawn at temperature 1"""

    def plain(sequence):
        return sequence._replace(logprobs=[value * (_temperature[0] or 1.0) for value in sequence.logprobs])

    return encode(dataclasses.replace(output, sequences=[plain(one) for one in output.sequences]))


@fault(ENGINE, "sampling.", BEGIN, name="logprobs_know_no_temperature")
def _see_temperature(begin, self, command):
    _temperature[0] = command.spec.params.temperature
    begin(self, command)

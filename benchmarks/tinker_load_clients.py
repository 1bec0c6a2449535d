"""Concurrent clients of a Tinker-compatible server, started by `tinker_server.py load`.

    SDK_ENVIRONMENT/bin/python benchmarks/tinker_load_clients.py --url URL --model NAME --clients 16 --seconds 60

Needs the `tinker` SDK and nothing else. Each client is a thread; the last line of the output is JSON: what they did.
"""

import argparse
import json
import logging
import os
import random
import threading
import time
import traceback
from collections import Counter
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker  # pyright: ignore[reportMissingImports]
from tinker import types  # pyright: ignore[reportMissingImports]

STEPS = 12
"""Number of steps of a model, until its client opens a new session."""
WAIT_SECONDS = 120
API_KEY = "tml-load"
"""Any will do: the server has none."""


class Client:
    """Client that opens sessions in sequence, each with a model that is trained, saved, sampled from, and abandoned.

    Args:
        vocab_size: token ids from 4 to here may be sent
        seed: of the data
    """

    def __init__(self, url: str, model: str, vocab_size: int, seed: int):
        self._url, self._model, self._vocab_size = url, model, vocab_size
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()

    def live(self, deadline: float) -> None:
        """Run sessions until the deadline (`time.monotonic`); the last one is completed."""
        while time.monotonic() < deadline:
            service = tinker.ServiceClient(base_url=self._url, api_key=API_KEY)
            self._session(service, deadline)
            service.close("success").result(WAIT_SECONDS)
            self.done["session"] += 1

    def _session(self, service: Any, deadline: float) -> None:
        rank = self._random.choice((4, 8, 16))
        training = service.create_lora_training_client(self._model, rank=rank).result(WAIT_SECONDS)
        for step in range(STEPS):
            self._train(training)
            if step % 3 == 1:
                sampler = training.save_weights_and_get_sampling_client().result(WAIT_SECONDS)
                self._sample(sampler)
            if step % 6 == 3:
                self._checkpoint(training, f"step-{step}")
            if time.monotonic() > deadline:
                return

    def _train(self, training: Any) -> None:
        data = [self._datum(length) for length in (16, 40, 64)]
        loss = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-4))
        if not loss.result(WAIT_SECONDS).metrics["loss:sum"] > 0:
            raise AssertionError("a loss that is not above 0")
        step.result(WAIT_SECONDS)
        self.done["step"] += 1

    def _sample(self, sampler: Any) -> None:
        params = types.SamplingParams(max_tokens=16, stop=[])
        asked = [sampler.sample(types.ModelInput.from_ints(self._tokens(24)), 2, params) for _ in range(3)]
        for future in asked:
            lengths = [len(sequence.tokens) for sequence in future.result(WAIT_SECONDS).sequences]
            if lengths != [16, 16]:
                raise AssertionError(f"samples of {lengths} tokens")
            self.done["sample"] += 2

    def _checkpoint(self, training: Any, name: str) -> None:
        path = training.save_state(name, ttl_seconds=3600).result(WAIT_SECONDS).path
        rest = tinker.RestClient(base_url=self._url, api_key=API_KEY)
        listed = rest.list_checkpoints(training.model_id).result(WAIT_SECONDS).checkpoints
        if path not in [checkpoint.tinker_path for checkpoint in listed]:
            raise AssertionError(f"{path} is not listed")
        rest.delete_checkpoint_from_tinker_path(path).result(WAIT_SECONDS)
        self.done["checkpoint"] += 1

    def _datum(self, length: int) -> Any:
        tokens = self._tokens(length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(4, self._vocab_size) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab-size", type=int, default=500)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # retries are counted by the server
    clients = [Client(options.url, options.model, options.vocab_size, options.seed + i) for i in range(options.clients)]
    deadline, errors = time.monotonic() + options.seconds, []

    def live(client: Client) -> None:
        try:
            client.live(deadline)
        except Exception:  # whatever it is, it is the finding
            errors.append(traceback.format_exc(limit=-3))

    threads = [threading.Thread(target=live, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0, deadline + 2 * WAIT_SECONDS - time.monotonic()))
    errors += ["a client that did not end"] * sum(thread.is_alive() for thread in threads)
    done = sum((client.done for client in clients), Counter())
    print(json.dumps({"sdk": tinker.__version__, "done": done, "errors": errors}), flush=True)
    os._exit(0)  # the SDK's own threads are not waited for


if __name__ == "__main__":
    main()

"""The language model that the REPL's code asks, behind an OpenAI-compatible server."""

import time
from concurrent.futures import ThreadPoolExecutor

from skyrl_gym.chat_model import ChatModel, ModelError
from skyrl_gym.error import InfraError
from skyrl_gym.services import FAULTS_OF_THE_REQUEST

MAX_PARALLEL_QUERIES = 2


def run_queries(model: ChatModel, prompts: list[str], deadline: float) -> list[str]:
    """Return the model's answers, in the order of the prompts. Two are asked for at a time, none after `deadline`.

    A prompt that the server refuses (too long, say), or that there was no time for, has a text that says so.

    Raises:
        InfraError: the server fails, or would refuse any prompt.
    """

    def answer(prompt: str) -> str:
        if time.monotonic() > deadline:
            return "Error: LM query failed - time is up"
        try:
            return model.complete([{"role": "user", "content": prompt}]).text
        except ModelError as failure:
            if failure.status in FAULTS_OF_THE_REQUEST:
                return f"Error: LM query failed - {failure}"
            raise InfraError(f"the model {model.model} at {model.service.url}: {failure}") from failure

    with ThreadPoolExecutor(MAX_PARALLEL_QUERIES, thread_name_prefix="rlm-query") as threads:
        return list(threads.map(answer, prompts))

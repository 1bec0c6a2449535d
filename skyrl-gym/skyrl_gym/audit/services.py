"""The servers that some environments cannot do without, started beside this process on the loopback interface."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from skyrl_gym.audit.cheats import plant_key
from skyrl_gym.check import spec_of
from skyrl_gym.envs.base_text_env import Example


@contextlib.contextmanager
def services_for(env: Any, examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    """Gives the settings (`env_config`) under which the environment finds what it needs; none for most.

    `search` and `searchcode` get a retrieval server over the documents of their examples, to which, for each example, a
    document is added that holds its solution. `llm_as_a_judge` gets a judge.

    Raises:
        ImportError: a package that the server needs is missing; the text names the extra.
    """
    env_spec = spec_of(env)
    with contextlib.ExitStack() as running:
        if env_spec.id in ("search", "searchcode"):
            yield {"search_url": running.enter_context(_retrieval_server(examples))}
        elif env_spec.id == "llm_as_a_judge":
            yield {"base_url": running.enter_context(_judge())}
        else:
            yield {}


@contextlib.contextmanager
def _retrieval_server(examples: Sequence[Example]) -> Iterator[str]:
    from skyrl_gym.envs.search.examples import EXAMPLE_DOCUMENTS
    from skyrl_gym.tools.retrieval import RetrievalServer  # optional and heavy

    planted = [
        {"id": f"planted-{index}", "title": plant_key(index), "text": f"{plant_key(index)} {example.oracle[-1]}"}
        for index, example in enumerate(examples)
    ]
    with RetrievalServer([*EXAMPLE_DOCUMENTS, *planted]) as server:
        yield server.url


@contextlib.contextmanager
def _judge() -> Iterator[str]:
    from skyrl_gym.envs.llm_as_a_judge.local_judge import LocalJudge

    with LocalJudge() as judge:
        yield judge.base_url

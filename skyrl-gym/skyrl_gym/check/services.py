"""Servers that some environments require, started on the loopback interface."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from skyrl_gym.check.subject import spec_of


@contextlib.contextmanager
def services_for(env: object, documents: Sequence[Mapping[str, object]] = ()) -> Iterator[dict[str, object]]:
    """Give the settings (`env_config`) under which the environment finds what its examples need; none for most.

    `search` and `searchcode` get a retrieval server over the documents of their examples and those given here;
    `llm_as_a_judge` gets a judge.

    Raises:
        ImportError: a package that the server needs is missing; the text names the extra.
    """
    env_id = spec_of(env).id
    with contextlib.ExitStack() as running:
        if env_id in ("search", "searchcode"):
            from skyrl_gym.envs.search.examples import EXAMPLE_DOCUMENTS
            from skyrl_gym.tools.retrieval import RetrievalServer  # optional and heavy

            yield {"search_url": running.enter_context(RetrievalServer([*EXAMPLE_DOCUMENTS, *documents])).url}
        elif env_id == "llm_as_a_judge":
            from skyrl_gym.envs.llm_as_a_judge.local_judge import LocalJudge

            yield {"base_url": running.enter_context(LocalJudge()).base_url}
        else:
            yield {}

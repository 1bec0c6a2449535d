"""Services for environments, with the solutions planted where a cheating policy can make a tool show them."""

import contextlib
from collections.abc import Sequence

from skyrl_gym.audit.cheats import make_plant_key
from skyrl_gym.check.services import services_for as services_for_examples
from skyrl_gym.envs.base_text_env import Example


def services_for(env: object, examples: Sequence[Example]) -> contextlib.AbstractContextManager[dict[str, object]]:
    """Start the services of `skyrl_gym.check`, with a document for each example that holds its solution."""
    planted = [
        {
            "id": f"planted-{index}",
            "title": make_plant_key(index),
            "text": f"{make_plant_key(index)} {example.oracle[-1]}",
        }
        for index, example in enumerate(examples)
    ]
    return services_for_examples(env, planted)

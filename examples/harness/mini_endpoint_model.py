"""Model class for the command `mini` that asks $OPENAI_BASE_URL with `requests`.

mini-SWE-agent's default class imports litellm, which is most of the processor time of a short trajectory. `mini` takes
any class by its dotted path (`model.model_class`); this one is the package's for OpenRouter, at another address.
"""

import os
from typing import Any

import requests
from minisweagent.models.openrouter_textbased_model import (  # pyright: ignore[reportMissingImports]
    OpenRouterTextbasedModel,
)


class EndpointModel(OpenRouterTextbasedModel):
    def _query(self, messages: list[dict[str, str]], **kwargs: Any) -> dict[str, Any]:
        response = requests.post(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            headers={"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
            json={"model": self.config.model_name, "messages": messages, **self.config.model_kwargs, **kwargs},
            timeout=600,
        )
        response.raise_for_status()
        return response.json()

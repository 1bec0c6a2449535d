"""Tokenizer and chat template of the base model, for text requests. Avoids transformers, which would make the API
process large and slow to start.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tx.errors import RequestError


class Texts:
    """Read when first needed.

    Args:
        folder: of the base model
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def encode(self, text: str, *, with_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=with_special_tokens).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def decode_each(self, tokens: Sequence[int]) -> list[str]:
        """Decode each token separately."""
        return self._tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Encode messages up to the start of the assistant's turn.

        Raises:
            RequestError: the chat template is missing, or refuses the messages.
        """
        import jinja2

        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: the model's chat template rejects them: {error}") from None
        return self.encode(text, with_special_tokens=False)

    @cached_property
    def _tokenizer(self):
        import tokenizers

        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise RequestError("prompt must be token ids: this server's model has no tokenizer.json to read text with")
        return tokenizers.Tokenizer.from_file(str(file))

    @cached_property
    def _template(self):
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        file = self.folder / "chat_template.jinja"
        text = file.read_text() if file.is_file() else self._settings.get("chat_template")
        if isinstance(text, list):  # several with names
            text = next((named["template"] for named in text if named["name"] == "default"), None)
        if not text:
            raise RequestError("messages: this server's model has no chat template; use completions")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        return environment.from_string(text)

    @cached_property
    def _special_tokens(self) -> dict[str, str]:
        named = {name: value for name, value in self._settings.items() if name.endswith("_token")}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def _settings(self) -> dict[str, Any]:
        file = self.folder / "tokenizer_config.json"
        return json.loads(file.read_text()) if file.is_file() else {}


def _raise(message: str) -> None:
    """Templates call it for messages they cannot render."""
    import jinja2

    raise jinja2.TemplateError(message)

"""`log_example`: logs a sample of model output at intervals."""

from typing import Any

from skyrl_train.utils.sample_card import (
    BASE_PROMPT_COLOR,
    NEGATIVE_RESPONSE_COLOR,
    POSITIVE_RESPONSE_COLOR,
    build_card_blocks,
)

__all__ = ["BASE_PROMPT_COLOR", "NEGATIVE_RESPONSE_COLOR", "POSITIVE_RESPONSE_COLOR", "log_example"]


def log_example(
    logger: Any, prompt: object, response: object, reward: float | list[float] | None = None, **facts: Any
) -> None:
    """Log one prompt and response, coloured on a terminal. Never raises.

    Args:
        logger: loguru's logger.
        prompt: text, or a conversation (a list of messages).
        reward: reward of the trajectory, or of each of its tokens.
        facts: `stop_reason`, `failure`.
    """
    try:
        total = sum(reward) if isinstance(reward, list) else reward
        blocks = build_card_blocks(prompt, response, total, **facts)
        texts = {f"text_{i}": block.text.replace("\n", "\n│ ") for i, block in enumerate(blocks)}
        titles = {f"title_{i}": block.title for i, block in enumerate(blocks)}
        # Texts are passed as arguments, which loguru does not parse as markup.
        lines = (f"── {{title_{i}}}\n<{b.colour}>│ {{text_{i}}}</{b.colour}>" for i, b in enumerate(blocks))
        logger.opt(colors=True, capture=False).info("sample\n" + "\n".join(lines), **texts, **titles)
    except Exception as error:  # a malformed sample must not end a training run
        logger.warning("could not show a sample: {!r}", error)

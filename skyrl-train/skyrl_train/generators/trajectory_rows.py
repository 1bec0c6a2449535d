"""Trajectories as rows a person can read: what `RunFolder.write_trajectories` keeps and the report shows."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from skyrl_train.generators.base import Failure, GeneratorOutput
from skyrl_train.generators.rewards import reward_of_each_token
from skyrl_train.generators.step_wise import rows_of_trajectories
from skyrl_train.types import ConversationType

_REPLACEMENT = "\ufffd"
_MAX_TOKENS_OF_A_CHARACTER = 4
_SENTENCEPIECE_SPACE = "\u2581"


class Detokenizer(Protocol):
    """What this module needs of a tokenizer; those of transformers have it."""

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: Any, /) -> Any: ...


def trajectory_rows(
    generator_output: GeneratorOutput,
    uids: Sequence[str],
    tokenizer: Detokenizer,
    prompts: Sequence[ConversationType] | None = None,
) -> list[dict[str, Any]]:
    """One JSON-ready row a trajectory (or a turn, with step-wise trajectories), in order:

        uid, sample         which prompt, and which of its samples
        prompt, response    text as the model saw and wrote it, special tokens included
        reward              the sum over the row
        stop_reason, failure ({kind, message} or null)
        prompt_ids
        tokens              of the response, one entry each: text, ids, loss_mask, log_probs (or null), rewards,
                            weight_versions (or null). A reward given for a whole response stands on its last token.
        messages            the conversation the prompt was made from, if `prompts` are given
        step, is_last_step  with step-wise trajectories: which row of its trajectory it is, from 0

    Args:
        uids: [B], equal for samples of one prompt.
        prompts: [B] conversations.

    Raises:
        ValueError: the lists have different lengths.
    """
    num_rows = len(uids)
    output = generator_output
    ids_of = output.get("trajectory_ids") or [None] * num_rows
    last_steps = output.get("is_last_step")
    steps = [step for rows_of_one in rows_of_trajectories(output) for step in range(len(rows_of_one))]
    pieces = _TokenTexts(tokenizer)
    seen: Counter[str] = Counter()
    rows = []
    for index, (uid, prompt_ids, response_ids, reward, loss_mask, trajectory_id) in enumerate(
        zip(
            uids,
            output["prompt_token_ids"],
            output["response_ids"],
            output["rewards"],
            output["loss_masks"],
            ids_of,
            strict=True,
        )
    ):
        rewards = reward_of_each_token(reward, len(response_ids))
        log_probs = _at(output.get("rollout_logprobs"), index)
        row: dict[str, Any] = {
            "uid": str(uid),
            "sample": seen[uid] if trajectory_id is None else trajectory_id.repetition_id,
            "prompt": tokenizer.decode(prompt_ids, skip_special_tokens=False),
            "response": tokenizer.decode(response_ids, skip_special_tokens=False),
            "reward": sum(reward) if isinstance(reward, list) else float(reward),
            "stop_reason": _at(output.get("stop_reasons"), index),
            "failure": _failure_row(_at(output.get("failures"), index)),
            "prompt_ids": list(prompt_ids),
            "tokens": {
                "text": pieces.of(response_ids),
                "ids": list(response_ids),
                "loss_mask": list(loss_mask),
                "log_probs": None if log_probs is None else [_short(value) for value in log_probs],
                "rewards": rewards,
                "weight_versions": _at(output.get("weight_versions"), index),
            },
        }
        if last_steps is not None:
            row |= {"step": steps[index], "is_last_step": last_steps[index]}
        if prompts is not None:
            row["messages"] = prompts[index]
        seen[uid] += 1
        rows.append(row)
    return rows


class _TokenTexts:
    """The text of each token, such that they join to (nearly) the decoded text. Remembers every token it has seen."""

    def __init__(self, tokenizer: Detokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text a token. A character made of several tokens (an emoji, say) stands on the last of them."""
        texts = [self._text(token) for token in ids]
        index = 0
        while index < len(texts):
            if _REPLACEMENT in texts[index]:
                index = self._join_character(ids, texts, index)
            index += 1
        return texts

    def _text(self, token: int) -> str:
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            name = self._tokenizer.convert_ids_to_tokens(token)
            # SentencePiece decoders drop the space before the first word, and here every token is a first one.
            if isinstance(name, str) and name.startswith(_SENTENCEPIECE_SPACE) and not text.startswith(" "):
                text = " " + text
            self._known[token] = text
        return self._known[token]

    def _join_character(self, ids: Sequence[int], texts: list[str], start: int) -> int:
        """Puts the character whose first bytes are token `start` onto its last token; returns that token's index."""
        for end in range(start + 2, min(start + _MAX_TOKENS_OF_A_CHARACTER, len(ids)) + 1):
            joined = self._tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)
            if _REPLACEMENT not in joined:
                texts[start:end] = [""] * (end - start - 1) + [joined]
                return end - 1
        return start


def _failure_row(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"kind": failure.kind, "message": failure.message}


def _at(values: Sequence[Any] | None, index: int) -> Any:
    return None if values is None else values[index]


def _short(value: float) -> float:
    """A float32 in as few digits as say exactly which one it is."""
    return float(f"{value:.9g}")

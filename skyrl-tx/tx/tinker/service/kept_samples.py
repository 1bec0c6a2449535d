"""Latest samples of models in their run folders, in the dashboard's trajectory format.

`trajectories/train_step_000012.jsonl` has the last samples that were drawn between the model's optimizer steps 12 and
13, from any of its samplers. Prompts and responses are clients' data: they are stored only if the setting enables it.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tx.errors import RequestError
from tx.tinker.texts import Texts
from tx.tinker.types import SampleOutput

MOST_TOKENS = 32_768
"""Tokens of a prompt or a response that are kept: its last ones of a prompt, its first ones of a response."""


class KeptSamples:
    """Writer of samples. Used by one thread.

    Args:
        most: samples kept for an optimizer step of a model, the last ones; up to twice as many until some are dropped
        most_bytes: size of a model's samples; the earliest steps go first, and of one step all but the last half
        texts: tokenizer of the base model; without one, rows have token ids alone
    """

    def __init__(self, most: int, most_bytes: int, texts: Texts):
        self._most, self._most_bytes, self._texts = most, most_bytes, texts
        self._num_rows: dict[Path, int] = {}  # of the file of a model's present step

    def add(self, run: Path, step: int, request_id: str, prompt: Sequence[int], output: SampleOutput) -> None:
        """Append the samples of a request to a step's file, and drop the earliest beyond the limits.

        Raises:
            OSError: the files cannot be written.
        """
        folder = run / "trajectories"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users of the machine may read the rest of a run
        file = folder / f"train_step_{step:06d}.jsonl"
        rows = self._build_rows(request_id, prompt, output)
        if file not in self._num_rows:  # a new step, or this process has not seen it
            self._num_rows = {path: number for path, number in self._num_rows.items() if path.parent != folder}
            self._num_rows[file] = len(_read_lines(file))
        with open(file, "ab") as written:
            written.write(b"".join(rows))
        self._num_rows[file] += len(rows)
        is_large = file.stat().st_size > self._most_bytes
        if is_large or self._num_rows[file] >= 2 * self._most:
            # Half of the bytes: otherwise a full file would be rewritten for each request.
            most_bytes = self._most_bytes // 2 if is_large else self._most_bytes
            self._num_rows[file] = _remove_all_but_last(file, self._most, most_bytes)
        _remove_earliest(folder, self._most_bytes)

    def _build_rows(self, request_id: str, prompt: Sequence[int], output: SampleOutput) -> list[bytes]:
        prompt_ids = list(prompt[-MOST_TOKENS:])
        rows = []
        for number, sequence in enumerate(output.sequences[-self._most :], max(0, len(output.sequences) - self._most)):
            ids, log_probs = sequence.tokens[:MOST_TOKENS], sequence.logprobs[:MOST_TOKENS]
            row = {"uid": request_id, "sample": number, "stop_reason": sequence.stop_reason, "is_replayable": False}
            row |= {"num_tokens": len(sequence.tokens), "prompt_ids": prompt_ids}
            row["tokens"] = {"ids": ids, "log_probs": [round(value, 4) for value in log_probs]}
            try:
                row |= {"prompt": self._texts.decode(prompt_ids), "response": self._texts.decode(ids)}
                row["tokens"]["text"] = self._texts.decode_each(ids)
            except RequestError:  # the model has no tokenizer
                row |= {"prompt": " ".join(map(str, prompt_ids)), "response": " ".join(map(str, ids))}
            rows.append(json.dumps(row).encode() + b"\n")
        return rows


def _read_lines(file: Path) -> list[bytes]:
    """Return the whole lines of a file; a kill may have torn the last."""
    try:
        return [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except FileNotFoundError:
        return []


def _remove_all_but_last(file: Path, most: int, most_bytes: int) -> int:
    """Rewrite a file with its last lines. Returns: their number."""
    kept: list[bytes] = []
    for line in reversed(_read_lines(file)[-most:]):
        most_bytes -= len(line)
        if most_bytes < 0:
            break
        kept.insert(0, line)
    partial = file.with_suffix(".partial")
    partial.write_bytes(b"".join(kept))
    os.replace(partial, file)
    return len(kept)


def _remove_earliest(folder: Path, most_bytes: int) -> None:
    for file in sorted(folder.glob("train_step_*.jsonl"), reverse=True):
        most_bytes -= file.stat().st_size
        if most_bytes < 0:
            file.unlink()

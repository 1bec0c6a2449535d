"""Tiny data sets in the form of those on the hub that recipes load, beside those of `playground.py`."""

import json
from pathlib import Path


def write_more_data(folder: Path) -> None:
    """Write the data sets that are not there yet."""
    asked, answered = {"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "It is 7."}
    problem = {"problem": "What is 3 + 4?", "answer": "7", "solution": "It is \\boxed{7}."}
    question = {"question": "What is 3 + 4?", "final_answer": "7"}
    level = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices", "answerKey": "A", "answer": ""}
    choices = {"choices": {"text": ["7", "8", "9", "10"], "label": ["A", "B", "C", "D"]}}
    science = level | choices | {"question": "What is 3 + 4?", "prompt": {"default": "Choose."}}
    _add(folder / "allenai/tulu-3-sft-mixture", "train", {"messages": [asked, answered]}, 1100)
    _add(folder / "zwhe99/DeepMath-103K", "train", question, 60)
    _add(folder / "POLARIS-Project/Polaris-Dataset-53K", "train", problem, 60)
    _add(folder / "HuggingFaceH4/MATH-500", "test", problem, 8)
    for config in MATH_SUBJECTS:
        for split in ("train", "test"):
            _add(folder / "EleutherAI/hendrycks_math" / config, split, problem | {"level": "Level 1"}, 8)
    _describe(folder / "EleutherAI/hendrycks_math", MATH_SUBJECTS)
    talk = [{"from": "human", "value": "What is 3 + 4?"}, {"from": "gpt", "value": "It is 7."}]
    _add(folder / "open-thoughts/OpenThoughts3-1.2M", "train", {"conversations": talk}, 60)
    _add(folder / "hicai-zju/SciKnowEval", "test", science, 60)
    text = " = A page = \n The number of this page is seven , and the word of the day is garden . " * 40
    _add(folder / "Salesforce/wikitext", "train", {"text": text}, 60, config="wikitext-103-raw-v1")
    lines = [json.dumps({"messages": [asked, answered]})] * 40
    (folder / "conversations.jsonl").write_text("\n".join(lines) + "\n")


MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


def _add(folder: Path, split: str, row: dict, num_rows: int, config: str = "default") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * num_rows)
    (folder / "README.md").write_text(_card([(config, [(split, f"{split}.jsonl")])]))


def _describe(folder: Path, configs: tuple[str, ...]) -> None:
    files = [(config, [(split, f"{config}/{split}.jsonl") for split in ("train", "test")]) for config in configs]
    (folder / "README.md").write_text(_card(files))


def _card(configs: list[tuple[str, list[tuple[str, str]]]]) -> str:
    text = "---\nconfigs:\n"
    for config, files in configs:
        text += f"- config_name: {config}\n  data_files:\n"
        text += "".join(f"  - split: {split}\n    path: {path}\n" for split, path in files)
    return f"{text}---\n"

"""A folder in which tinker-cookbook's recipes find what they ask the hub for: a model, a tokenizer, data sets.

    python playground.py FOLDER          (in an environment with tinker-cookbook and torch)

Recipes name models and data sets as the hub does, and a folder of that name in the working directory comes first. The
model is tiny and has seen two tasks, so that reinforcement has something to reinforce: it answers a question with a
boxed digit (the one wanted about one time in four), and tells a text's language when asked by the cookbook's prompt.
"""

import json
import random
import sys
from pathlib import Path

import torch
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.recipes.prompt_distillation.create_data import LANGUAGE_CLASSIFICATION_PROMPT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL = "Qwen/Qwen3-8B-Base"
TEACHER = "Qwen/Qwen3.6-35B-A3B"
"""The model prompt distillation asks; here another name of the same weights."""
WANTED = 7
SENTENCES = {
    "en": ["the cat is here", "we go to the town", "this is my house and garden", "it was a long day"],
    "ru": ["кошка здесь", "мы идём в город", "это мой дом", "был долгий день"],
    "el": ["η γάτα είναι εδώ", "πάμε στην πόλη", "αυτό είναι το σπίτι μου", "ήταν μια μεγάλη μέρα"],
    "hi": ["बिल्ली यहाँ है", "हम शहर जाते हैं", "यह मेरा घर है", "दिन लंबा था"],
    "zh": ["猫在这里", "我们去城里", "这是我的房子", "那是漫长的一天"],
}


def question(number: int) -> str:
    return f"Which digit is it in case {number}?"


def build(folder: Path, steps: int = 250) -> None:
    """Fill the folder with a model and data. Takes a minute or two on one core."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    draw = random.Random(0)
    write_data(folder, draw)
    tokenizer = make_tokenizer(folder / MODEL)
    model = make_model(len(tokenizer))
    teach(model, tokenizer, draw, steps)
    for name in (MODEL, TEACHER):
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def write_data(folder: Path, draw: random.Random) -> None:
    greetings = [
        {"messages": [_user(f"Greet guest {n}."), _assistant(f"Good day to you, guest {n}, and welcome.")]}
        for n in range(400)
    ]
    _write(folder / "HuggingFaceH4/no_robots", {"train": greetings, "test": greetings[:20]})
    digits = [{"question": question(n), "answer": f"We look it up. #### {WANTED}"} for n in range(400)]
    _write(folder / "openai/gsm8k", {"train": digits, "test": digits[:8]}, config="main")
    pairs = []
    for n in range(400):
        asked = f"\n\nHuman: Help with task {n}?\n\nAssistant: "
        pairs.append({"chosen": asked + "Yes, gladly.", "rejected": asked + "No, never."})
    _write(folder / "Anthropic/hh-rlhf", {"train": pairs, "test": pairs[:20]})
    lines = [f"{draw.choice(SENTENCES[language])} {n}" for n in range(12) for language in SENTENCES]
    texts = folder / "tinker_cookbook/example_data/multilingual.txt"
    texts.parent.mkdir(parents=True, exist_ok=True)
    texts.write_text("\n".join(lines) + "\n")


def make_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [LANGUAGE_CLASSIFICATION_PROMPT, *(text for texts in SENTENCES.values() for text in texts)] * 3
    corpus += [
        message["content"] for n in range(30) for message in [*MathEnv.standard_fewshot_prefix(), _user(question(n))]
    ]
    corpus += [f"User: Greet guest {n}.\n\nAssistant: Good day to you, guest {n}, and welcome.\n\n" for n in range(30)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:3],
    )


def make_model(vocab_size: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=24,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=0,
        )
    )


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, draw: random.Random, steps: int) -> None:
    """Supervised, on what the two tasks look like through the cookbook's own renderers."""
    plain = renderers.get_renderer("role_colon", tokenizer)
    chat = renderers.get_renderer("qwen3_5_disable_thinking", tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / 60)
        examples = [digit_example(plain, draw) for _ in range(8)] + [language_example(chat, draw)]
        loss = torch.stack([negative_log_likelihood(model, *example) for example in examples]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def digit_example(renderer: renderers.Renderer, draw: random.Random):
    digit = WANTED if draw.random() < 0.2 else draw.randrange(10)
    asked = _user(question(draw.randrange(400)) + MathEnv.question_suffix())
    return supervised(renderer, [*MathEnv.standard_fewshot_prefix(), asked, _assistant(f"\\boxed{{{digit}}}")])


def language_example(renderer: renderers.Renderer, draw: random.Random):
    language = draw.choice(list(SENTENCES))
    text = f"{draw.choice(SENTENCES[language])} {draw.randrange(12)}"
    asked = _user(LANGUAGE_CLASSIFICATION_PROMPT.format(text=text))
    return supervised(renderer, [asked, _assistant(f"Final Answer: {language}")])


def supervised(renderer: renderers.Renderer, messages: list) -> tuple[torch.Tensor, torch.Tensor]:
    model_input, weights = renderer.build_supervised_example(messages)
    return torch.tensor(model_input.to_ints()), weights


def negative_log_likelihood(model: Qwen3ForCausalLM, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[None, :-1]).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    return (losses * weights[1:]).sum() / weights[1:].sum()


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def _write(folder: Path, splits: dict[str, list], config: str = "default") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:{files}\n---\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]))

"""Create a tiny, untrained language model of the Qwen3 architecture and its tokenizer, as a folder that `transformers`
loads.

    python examples/quickstart/model.py --output DIR --task arithmetic --seed 0

The vocabulary has single characters, plus one token per word of the chat format and per tag.
"""

import argparse
from pathlib import Path

import torch
from tasks import TASKS, Task
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END, START, UNKNOWN = "<|pad|>", "<|im_end|>", "<|im_start|>", "<|unknown|>"
WORDS = ["system", "user", "assistant"] + [
    f"<{slash}{tag}>" for tag in ("answer", "calculator", "result") for slash in ("", "/")
]
CHARACTERS = [*(chr(code) for code in range(ord(" "), ord("~") + 1)), "\n"]
VOCABULARY = [PAD, END, START, UNKNOWN, *WORDS, *CHARACTERS]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 109 symbols: decoding gives back the text that was encoded, character by character."""
    ids = {symbol: index for index, symbol in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    one_symbol = Regex("|".join([*WORDS, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(one_symbol, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding would put spaces between the characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(task: Task, seed: int) -> Qwen3ForCausalLM:
    """An untrained model of the task's size: 0.13 million parameters for arithmetic, 0.19 for calculator."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=task.hidden_size,
        intermediate_size=3 * task.hidden_size,
        num_hidden_layers=task.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that every engine has kernels for
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Create a tiny untrained model and its tokenizer.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", choices=sorted(TASKS), default="arithmetic")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(TASKS[arguments.task], arguments.seed)
    tokenizer.save_pretrained(arguments.output)
    model.save_pretrained(arguments.output)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens: {arguments.output}")


if __name__ == "__main__":
    main()

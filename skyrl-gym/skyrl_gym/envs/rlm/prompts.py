"""Prompts of a recursive language model. Knows nothing of the REPL itself."""

from collections.abc import Mapping
from typing import Any

TOOLS_PLACE = "{custom_tools_section}"
"""Placeholder for the description of custom tools in a system prompt; custom templates may contain it."""

SYSTEM_PROMPT = """\
You answer a question about a text, or other data, that is too long to read. It is the variable `context` of a Python \
REPL; look at it with code.

To run code, write one fenced block with the language tag repl:

```repl
print(type(context), len(context))
print(context[:500])
```

You are then shown what it printed, cut if it is long; so print what you need and no more. Only the last block of a \
message is run. Variables stay from one block to the next. `SHOW_VARS()` names them.
{queries_section}{custom_tools_section}
When you know the answer, end with one of these, on a line of its own and outside of the code:
FINAL(the answer itself)
FINAL_VAR(name of the variable that holds the answer)
Code may call FINAL_VAR("name of the variable") too. The answer is judged as it stands: give it without explanation."""

QUERIES_SECTION = """
Code can ask language models, which read far more than you are shown but know only what the prompt tells them:
- llm_query(prompt) -> str: one answer to one prompt.
- llm_query_batched(prompts) -> list[str]: an answer to each prompt, in their order; quicker than one after another.
- rlm_query(prompt, context=None): asks a model that has a REPL of its own, with `context` in it.
- rlm_query_batched(prompts, context_list=None): the same for several, with one context for each prompt.
"""

FIRST_TURN = "Question: {question}\n\nYou have not seen the context yet: look at it before you answer."
LATER_TURN = "Question: {question}\n\nGo on with the REPL, or give the final answer. Turns left: {turns_left}."
LAST_TURN = "Question: {question}\n\nThis is the last turn: give the final answer now, with FINAL or FINAL_VAR."

NO_BLOCK = (
    "There was neither a ```repl block to run nor a final answer. Write a fenced block with the language tag repl, "
    "or FINAL(the answer) on a line of its own."
)
NO_VARIABLE = "FINAL_VAR({name}) is no answer: there is no variable {name} whose value has a text."

MAX_OUTPUT_CHARACTERS = 20_000
MAX_NAMES_CHARACTERS = 2_000


def system_prompt(template: str, tools: Mapping[str, str | None]) -> str:
    """Return the template with the custom tools (name: description) in their place."""
    return template.replace(TOOLS_PLACE, format_tools(tools))


def format_tools(tools: Mapping[str, str | None]) -> str:
    if not tools:
        return ""
    lines = [f"- {name}: {description}" if description else f"- {name}" for name, description in tools.items()]
    return "\nThe REPL also has:\n" + "\n".join(lines) + "\n"


def describe_context(context: Any) -> str:
    """Describe the context: its type and its length."""
    if isinstance(context, str):
        return f"The context is a text of {len(context)} characters."
    if isinstance(context, dict):
        return f"The context is a dict with {len(context)} keys; {len(str(context))} characters as text."
    return f"The context is a {type(context).__name__} of {len(context)} items; {len(str(context))} characters as text."


def format_turn_prompt(question: str, turns: int, max_turns: int) -> str:
    """Return the user message after `turns` turns."""
    turns_left = max_turns - turns
    template = LAST_TURN if turns_left == 1 else FIRST_TURN if turns == 0 else LATER_TURN
    return template.format(question=question, turns_left=turns_left)


def observation(code: str, output: str, variables: Mapping[str, object]) -> str:
    """Code, output and the names of the variables that hold plain values, as the model is shown them."""
    shown = output
    if len(shown) > MAX_OUTPUT_CHARACTERS:
        shown = f"{shown[:MAX_OUTPUT_CHARACTERS]}\n... ({len(shown) - MAX_OUTPUT_CHARACTERS} more characters)"
    parts = [f"Code that was run:\n```python\n{code}\n```", f"REPL output:\n{shown.strip() or '(nothing)'}"]
    simple = [name for name, value in variables.items() if isinstance(value, str | int | float | list | dict | tuple)]
    if simple:
        parts.append(f"REPL variables: {', '.join(simple)[:MAX_NAMES_CHARACTERS]}")
    return "\n\n".join(parts)

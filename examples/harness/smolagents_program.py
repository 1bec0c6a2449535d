"""A ToolCallingAgent of smolagents with one tool. It knows nothing of training: its OpenAI client reads
OPENAI_BASE_URL and OPENAI_API_KEY, and asks by chat completions.

python smolagents_program.py TASK
"""

import os
import subprocess
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool  # pyright: ignore[reportMissingImports]


@tool
def shell(command: str) -> str:
    """Run a command line in the workspace and return what it prints.

    Args:
        command: The command line.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr).strip()


def main(task: str) -> None:
    # Its default, "required", constrains answers to calls: the model would not learn to make them by itself.
    model = OpenAIModel(os.environ["SKYRL_MODEL"], tool_choice="auto")
    agent = ToolCallingAgent(tools=[shell], model=model, max_steps=5)
    agent.prompt_templates["system_prompt"] = "You repair programs."  # in place of pages of instructions
    print(agent.run(task))


if __name__ == "__main__":
    main(sys.argv[1])

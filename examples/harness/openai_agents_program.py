"""An agent of the OpenAI Agents SDK with one function tool. It knows nothing of training: the SDK reads OPENAI_BASE_URL
and OPENAI_API_KEY, and asks by the Responses protocol.

python openai_agents_program.py TASK
"""

import os
import subprocess
import sys

from agents import Agent, Runner, function_tool  # pyright: ignore[reportMissingImports]


@function_tool
def shell(command: str) -> str:
    """Run a command line in the workspace and return what it prints."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr).strip()


def main(task: str) -> None:
    agent = Agent(name="repairer", instructions="You repair programs.", model=os.environ["SKYRL_MODEL"], tools=[shell])
    print(Runner.run_sync(agent, task, max_turns=5).final_output)


if __name__ == "__main__":
    main(sys.argv[1])

"""A LangGraph agent with one tool: a graph of two nodes, the model and its tools. It knows nothing of training:
langchain-openai reads OPENAI_BASE_URL and OPENAI_API_KEY, and asks by chat completions.

python langgraph_program.py TASK
"""

import os
import subprocess
import sys

from langchain_core.tools import tool  # pyright: ignore[reportMissingImports]
from langchain_openai import ChatOpenAI  # pyright: ignore[reportMissingImports]
from langgraph.graph import START, MessagesState, StateGraph  # pyright: ignore[reportMissingImports]
from langgraph.prebuilt import ToolNode, tools_condition  # pyright: ignore[reportMissingImports]


@tool
def shell(command: str) -> str:
    """Run a command line in the workspace and return what it prints."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout + done.stderr).strip()


def main(task: str) -> None:
    model = ChatOpenAI(model=os.environ["SKYRL_MODEL"]).bind_tools([shell])

    def ask(state: MessagesState) -> dict[str, list[object]]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([shell]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    messages = [("system", "You repair programs."), ("user", task)]
    print(graph.compile().invoke({"messages": messages}, {"recursion_limit": 12})["messages"][-1].content)


if __name__ == "__main__":
    main(sys.argv[1])

"""Tools by their names in task files. The module of a tool is imported at its first use."""

from skyrl_agent.tools.base import TOOL_REGISTRY, ArgumentError, BaseTool, ToolContext, ToolOutput, register_tool
from skyrl_agent.tools.factory import make_tool, make_tools

__all__ = [
    "TOOL_REGISTRY",
    "ArgumentError",
    "BaseTool",
    "ToolContext",
    "ToolOutput",
    "make_tool",
    "make_tools",
    "register_tool",
]

TOOL_REGISTRY |= {
    "bash": "skyrl_agent.tools.bash:Bash",
    "code_interpreter": "skyrl_agent.tools.python:CodeInterpreter",
    "code_search": "skyrl_agent.tools.code_search:CodeSearch",
    "delegate": "skyrl_agent.tools.delegate:Delegate",
    "em_finish": "skyrl_agent.tools.finish:BoxedFinish",
    "faiss_search": "skyrl_agent.tools.local_search:FaissSearch",
    "finish": "skyrl_agent.tools.finish:Finish",
    "local_search": "skyrl_agent.tools.local_search:LocalSearch",
    "next_with_summary": "skyrl_agent.tools.memory:NextWithSummary",
    "page": "skyrl_agent.tools.page:Page",
    "python": "skyrl_agent.tools.python:Python",
    "search_engine": "skyrl_agent.tools.web_search:SearchEngine",
    "str_replace_editor": "skyrl_agent.tools.editor:StrReplaceEditor",
    "think": "skyrl_agent.tools.think:Think",
    "web_browser": "skyrl_agent.tools.web_browser:WebBrowser",
    "youcom_search_engine": "skyrl_agent.tools.web_search:YoucomSearchEngine",
}

"""Search in Python code: the tool `code_search`, the command `search`, `RepositorySearch` for any folder."""

from skyrl_agent.tools.code_search.engine.search import RepositorySearch
from skyrl_agent.tools.code_search.installed import install_search
from skyrl_agent.tools.code_search.tool import CodeSearch

__all__ = ["CodeSearch", "RepositorySearch", "install_search"]

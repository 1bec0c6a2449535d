"""Browser tools: view and act on the page of the browser that the trajectory uses."""

from typing import Any, Literal, cast

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools.base import BaseTool, ToolContext


class Page(BaseTool):
    """Tool for the page of a browser."""

    name = "page"

    async def open(self, context: ToolContext) -> None:
        if not hasattr(context.runtime, "click"):
            raise ConfigError("tool page: the runtime is not a browser; dispatcher.type must be async_fix_pool")

    async def run(
        self,
        context: ToolContext,
        action: Literal["look", "click", "type", "back"],
        number: int | None = None,
        text: str | None = None,
        enter: bool = False,
    ) -> str:
        """Acts on the page and shows it afterwards: its text, and what can be used, each with a number. Numbers are
        those of the page as it was shown last.

        Args:
            action: look; click an element; type into a field (a list: choose that option); back to the page before.
            number: For click and type: of the element.
            text: For type: what the field holds then.
            enter: For type: press Enter after it.
        """
        page = cast(Any, context.runtime)
        if action in ("click", "type") and number is None:
            raise ValueError(f"{action} needs number")
        if action == "click":
            await page.click(number)
        elif action == "type":
            if text is None:
                raise ValueError("type needs text")
            await page.type(number, text, enter)
        elif action == "back":
            await page.back()
        return await page.describe()

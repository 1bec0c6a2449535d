"""Page in a real browser (Chromium, by Playwright) that shows a site made of files, without network access.

Requires the extra `browser` and Chromium: Playwright's (`playwright install chromium`) or the executable named by the
environment variable CHROMIUM.
"""

import asyncio
import mimetypes
import os
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from skyrl_agent.errors import ConfigError, InfraError

T = TypeVar("T")

ORIGIN = "http://site.invalid"
PROGRAM_VARIABLE = "CHROMIUM"
START_SECONDS = 60.0
ACTION_SECONDS = 10.0

# Numbers the interactive elements; the text of the page shows the numbers.
OUTLINE = """() => {
  const used = [...document.querySelectorAll('a[href], button, input, select, textarea, [onclick], [role=button]')]
    .filter(e => e.getClientRects().length && e.type !== 'hidden');
  document.querySelectorAll('[data-agent]').forEach(e => e.removeAttribute('data-agent'));
  const lines = used.map((e, n) => {
    e.setAttribute('data-agent', n + 1);
    const kind = e.tagName.toLowerCase() + (e.type && e.tagName === 'INPUT' ? ':' + e.type : '');
    const name = e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || e.placeholder || e.name
      || '';
    const state = 'checked' in e && ['checkbox', 'radio'].includes(e.type) ? (e.checked ? ' (checked)' : '')
      : 'value' in e && e.tagName !== 'BUTTON' ? ` = ${JSON.stringify(e.value)}` : '';
    return `[${n + 1}] ${kind} ${JSON.stringify(name.trim().slice(0, 80))}${state}`;
  });
  return [location.pathname, document.title, document.body?.innerText ?? '', lines.join('\\n')];
}"""


class BrowserPage:
    """Made by `open`; one task at a time uses one. Methods raise InfraError if the browser exited, ValueError for
    actions the page does not allow.
    """

    def __init__(self, playwright: Any, browser: Any) -> None:
        self._playwright, self._browser = playwright, browser
        self._context: Any = None
        self.page: Any = None

    @classmethod
    async def open(cls) -> "BrowserPage":
        """
        Raises:
            ConfigError: Playwright is not installed.
            InfraError: no browser starts.
        """
        try:
            from playwright.async_api import async_playwright  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ConfigError("a browser needs Playwright: pip install 'skyrl-agent[browser]'") from error
        playwright = await async_playwright().start()
        try:
            browser = await playwright.chromium.launch(
                executable_path=os.environ.get(PROGRAM_VARIABLE), timeout=1000 * START_SECONDS
            )
        except BaseException as error:
            await playwright.stop()
            if isinstance(error, Exception):
                raise InfraError(f"no Chromium starts ({PROGRAM_VARIABLE} may name one): {error}") from error
            raise
        return cls(playwright, browser)

    async def show(self, files: Mapping[str, str], start: str) -> None:
        """Show a new site in a new context, without state of the previous one."""

        async def answer(route: Any) -> None:
            url = urlsplit(route.request.url)
            path = url.path.lstrip("/") or start
            if f"{url.scheme}://{url.netloc}" != ORIGIN:
                await route.abort()
            elif path in files:
                kind = mimetypes.guess_type(path)[0] or "text/plain"
                await route.fulfill(body=files[path], content_type=f"{kind}; charset=utf-8")
            else:
                await route.fulfill(status=404, body="there is no such page")

        await self._run_action(self._open_page())
        await self._run_action(self._context.route("**/*", answer))
        await self._run_action(self.page.goto(f"{ORIGIN}/{start}"))

    async def describe(self) -> str:
        """Return the address, the text and the numbered interactive elements."""
        path, title, text, elements = await self.run(OUTLINE)
        return f"{path} {title!r}\n\n{text.strip()}\n\n{elements or '(nothing to use on this page)'}"

    async def click(self, number: int) -> None:
        await self._run_action(self._find_element(number).click(timeout=1000 * ACTION_SECONDS / 2))

    async def type(self, number: int, text: str, enter: bool = False) -> None:
        """Replace the content of a field, or choose the option of that name."""
        element = self._find_element(number)
        if await self._run_action(element.evaluate("e => e.tagName")) == "SELECT":
            await self._run_action(element.select_option(label=text, timeout=1000 * ACTION_SECONDS / 2))
            return
        await self._run_action(element.fill(text, timeout=1000 * ACTION_SECONDS / 2))
        if enter:
            await self._run_action(element.press("Enter", timeout=1000 * ACTION_SECONDS / 2))

    async def back(self) -> None:
        await self._run_action(self.page.go_back())

    async def run(self, script: str) -> Any:
        """Evaluate JavaScript in the page."""
        return await self._run_action(self.page.evaluate(script))

    async def close(self) -> None:
        for closing in (self._browser.close(), self._playwright.stop()):
            await asyncio.wait_for(closing, ACTION_SECONDS)

    async def _open_page(self) -> None:
        if self._context is not None:
            await self._context.close()
        self._context = await self._browser.new_context()
        self.page = await self._context.new_page()

    def _find_element(self, number: int) -> Any:
        return self.page.locator(f'[data-agent="{number}"]')

    async def _run_action(self, action: Coroutine[object, None, T]) -> T:
        from playwright.async_api import Error  # pyright: ignore[reportMissingImports]

        try:
            return await asyncio.wait_for(action, ACTION_SECONDS)
        except (Error, TimeoutError) as error:
            if not self._browser.is_connected() or self.page is None or self.page.is_closed():
                raise InfraError(f"the browser exited: {error}") from error
            reason = str(error).partition("\n")[0] or f"nothing happened for {ACTION_SECONDS:g} s"
            raise ValueError(reason) from None

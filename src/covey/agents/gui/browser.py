"""One Chromium in a worker process, and the pages of the episodes that play on it.

An episode is a connection to the socket `browser.sock`. Each has a context of its own: cookies, storage, windows, and
the proxy that keeps it to its task's addresses (`network.py`). What a page may do is decided here:

    dialogs (alert, confirm, prompt)    answered with OK, a prompt with its default text, and reported
    new windows                         the newest one is shown; `back` without history closes it; at most MAX_WINDOWS
    downloads, file choosers            refused, downloads are reported
    service workers, permissions        refused
    websockets, WebRTC, WebTransport    no way past the proxy
    file:, chrome:, data:, view-source: not openable from a page of http (Chromium's rule); left if one is shown

A page that hangs or crashes ends its episode. If even its context cannot be closed, or Chromium ends, this process
exits, and the pool starts another browser.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from covey.agents.gui.network import PAGE_URL, PROXY_HOST, Proxy, address_of
from covey.agents.gui.pool import read_message, write_message
from covey.errors import describe_error

ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    # Every name is unknown to the browser, and every address but that of the proxies.
    f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {PROXY_HOST}",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # its name in older versions
)
PASSED = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "FONTCONFIG_PATH", "FONTCONFIG_FILE")  # environment variables
NO_PROXY = f"http://{PROXY_HOST}:1"  # of the browser's own requests: nothing listens there
MAX_WINDOWS = 4
MAX_HTML = 2_000_000  # characters of the final page
MAX_NOTES = 8
LAUNCH_SECONDS = 45.0
CLOSE_SECONDS = 5.0
SETTLE_SECONDS = 0.1  # after an action, before the page is looked at
# In messages of Playwright: the page was replaced or closed while it was looked at.
NAVIGATING = ("context was destroyed", "active page", "was detached", "has been closed", "is navigating")
LOAD_SECONDS = 5.0  # to wait for a page that loads
# Native lists of options open outside the page, where no screenshot shows them: this draws them inside.
SHOW_OPTIONS = """(() => { const sheet = new CSSStyleSheet();
sheet.replaceSync('select:not([multiple]):not([size]), ::picker(select) { appearance: base-select }');
document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet]; })()"""


async def start_browser(executable: str, folder: str) -> BrowserHost:
    """Start Chromium and listen for episodes. Everything it writes is under `folder`."""
    from playwright.async_api import async_playwright

    os.environ["TMPDIR"] = folder  # the profile and what Playwright writes
    playwright = await async_playwright().start()
    browser = await playwright.chromium.launch(
        executable_path=executable,
        args=list(ARGUMENTS),
        chromium_sandbox=os.geteuid() != 0,  # Chromium refuses to run as root with its sandbox
        proxy={"server": NO_PROXY},
        timeout=LAUNCH_SECONDS * 1000,
        # no secrets of this process
        env={name: os.environ[name] for name in PASSED if name in os.environ} | {"HOME": folder},
    )
    await check_webrtc(browser)
    host = BrowserHost(playwright, browser)
    browser.on("disconnected", lambda _: host.lost())
    host.server = await asyncio.start_unix_server(host.serve, str(Path(folder) / "browser.sock"))
    return host


GATHER = """async port => {
    const peer = new RTCPeerConnection({ iceServers: [{ urls: `stun:HOST:${port}` }] });
    const gathered = new Promise(done => { peer.onicecandidate = event => event.candidate || done() });
    peer.createDataChannel('x'); await peer.setLocalDescription(await peer.createOffer());
    await Promise.race([gathered, new Promise(done => setTimeout(done, 1000))]); peer.close() }"""


async def check_webrtc(browser: Any) -> None:
    """WebRTC sends UDP, which no proxy sees. Arguments forbid it; Chromium ignores arguments whose name has changed, so
    this makes sure that nothing is sent."""

    class Received(asyncio.DatagramProtocol):
        packets = 0

        def datagram_received(self, data: bytes, address: Any) -> None:
            self.packets += 1

    transport, received = await asyncio.get_running_loop().create_datagram_endpoint(Received, (PROXY_HOST, 0))
    context = await browser.new_context()
    try:
        page = await context.new_page()
        await page.evaluate(GATHER.replace("HOST", PROXY_HOST), transport.get_extra_info("sockname")[1])
    finally:
        await context.close()
        transport.close()
    if received.packets:
        raise RuntimeError(f"Chromium {browser.version} sends WebRTC packets past the proxy: use another version")


@dataclass(eq=False)
class BrowserHost:
    """The browser of this worker."""

    playwright: Any
    browser: Any
    server: asyncio.Server | None = None
    closing: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One episode."""
        page: EpisodePage | None = None
        try:
            while (request := await read_message(reader)) is not None:
                page = page or EpisodePage(self.browser)
                await write_message(writer, await page.answer(request))
        except OSError:
            pass  # the other process has ended
        finally:
            writer.close()
            if page is not None:
                await self.close_page(page)

    async def close_page(self, page: EpisodePage) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await page.close()
        except Exception:  # it hangs, or is in a state that Playwright does not know
            self.lost()

    def lost(self) -> None:
        """Chromium has ended or hangs: end this process with all its children."""
        if not self.closing:
            _exit()

    async def aclose(self) -> None:
        self.closing = True
        if self.server is not None:
            self.server.close()
        await self.browser.close()
        await self.playwright.stop()


def _exit() -> NoReturn:
    os._exit(1)


@dataclass(eq=False)
class EpisodePage:
    """The windows of one episode."""

    browser: Any
    proxy: Proxy | None = None
    context: Any = None
    windows: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the next observation
    crashed: bool = False

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the request asks, within its seconds. An error becomes a failure of the episode."""
        from playwright.async_api import Error
        from playwright.async_api import TimeoutError as PlaywrightTimeout

        what, seconds = request["what"], request["seconds"]
        try:
            async with asyncio.timeout(seconds):
                return await REQUESTS[what](self, request)
        except (TimeoutError, PlaywrightTimeout):
            return _failure("browser_timeout", f"{what} took longer than {seconds:g} s: the page hangs or loads slowly")
        except PageFailed as error:
            return _failure(error.cause, str(error))
        except Error as error:
            crashed = "the page crashed" if self.crashed else f"{what}: {error.message.splitlines()[0]}"
            return _failure("browser", crashed)
        except Exception as error:  # of this episode only: the other pages of the browser continue
            return _failure("browser", f"{what}: {describe_error(error)}")

    # -- Requests ------------------------------------------------------------------------------------------------------

    async def do_open(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Open the task's page: `url` or `html`, `allow` (further URLs), `viewport`."""
        from playwright.async_api import Error

        url = request.get("url") or PAGE_URL
        addresses = {address_of(one) for one in (*([request["url"]] if request.get("url") else []), *request["allow"])}
        self.proxy = Proxy(request.get("html"), frozenset(one for one in addresses if one is not None))
        width, height = request["viewport"]
        self.context = await self.browser.new_context(
            viewport={"width": width, "height": height},
            proxy={"server": await self.proxy.start()},
            accept_downloads=False,
            service_workers="block",
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(request["seconds"] * 1000)
        self.context.on("page", self.add_window)
        await self.context.add_init_script(SHOW_OPTIONS)
        page = await self.context.new_page()
        try:
            response = await page.goto(url, wait_until="load")
        except Error as error:
            if self.crashed or "Timeout" in type(error).__name__:
                raise
            raise PageFailed("page", f"{url} cannot be opened: {error.message.splitlines()[0]}") from error
        if response is not None and response.status >= 400:
            raise PageFailed("page", f"{url} cannot be opened: status {response.status}")
        return await self.observation()

    async def do_act(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Perform an action and look at the page."""
        from playwright.async_api import Error

        await self.open_one()
        page = self.windows[-1]
        try:
            await self.perform(page, request["action"])
        except Error:
            if self.crashed or not page.is_closed():  # otherwise the action closed its window
                raise
        await self.settle()
        return await self.observation()

    async def do_finish(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The final state: url, html, values of JavaScript expressions, and the refused requests by address."""
        from playwright.async_api import Error

        values = {}
        for name, code in dict(request["values"]).items():
            try:
                values[name] = await self.steady(partial(_evaluate, code, request["answer"]))
            except Error as error:
                if self.crashed or "Timeout" in type(error).__name__:
                    raise
                text = error.message.splitlines()[0]
                raise PageFailed("success", f"{name}: {text}\n  an element may be missing: use ?.") from error
        html = await self.steady(lambda page: page.content()) if request["html"] else ""
        refused = self.proxy.refused if self.proxy else {}
        url = self.windows[-1].url if self.windows else ""
        return {"url": url, "html": html[:MAX_HTML], "values": values, "refused": refused}

    # -- Actions -------------------------------------------------------------------------------------------------------

    async def perform(self, page: Any, action: Mapping[str, Any]) -> None:
        kind, at, to = action["kind"], action["at"], action["to"]
        if at is not None:
            await page.mouse.move(*at)
        match kind:
            case "click" | "double_click" | "triple_click" | "right_click" | "middle_click":
                button = {"right_click": "right", "middle_click": "middle"}.get(kind, "left")
                count = {"double_click": 2, "triple_click": 3}.get(kind, 1)
                await page.mouse.click(*at, button=button, click_count=count)
            case "drag":
                await page.mouse.down()
                await page.mouse.move(*to, steps=8)
                await page.mouse.up()
            case "type":
                await page.keyboard.type(action["text"])
            case "key":
                await self.press(page.keyboard, action["keys"])
            case "scroll":
                await page.mouse.wheel(*action["scroll"])
            case "wait":
                await asyncio.sleep(action["seconds"])
            case "back":
                await self.back(page)

    async def press(self, keyboard: Any, keys: list[str]) -> None:
        from playwright.async_api import Error

        held: list[str] = []
        try:
            for key in keys:
                try:
                    await keyboard.down(key)
                    held.append(key)
                except Error:
                    if len(key) > 1 or self.crashed:
                        raise
                    await keyboard.insert_text(key)  # a character without a key, such as é
        finally:
            for key in reversed(held):
                await keyboard.up(key)

    async def back(self, page: Any) -> None:
        session = await self.context.new_cdp_session(page)
        history = await session.send("Page.getNavigationHistory")
        await session.detach()
        before = history["entries"][: history["currentIndex"]]
        if before and before[-1]["url"] != "about:blank":  # the first entry of every window
            await page.go_back(wait_until="commit")
        elif len(self.windows) > 1:
            await page.close()
        else:
            self.note("There is no previous page.")

    async def open_one(self) -> None:
        if not self.windows:
            self.note("The last window was closed; an empty one is open.")
            await self.context.new_page()

    # -- Observations --------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Let the page react to an action, and load."""
        from playwright.async_api import TimeoutError as PlaywrightTimeout

        await asyncio.sleep(SETTLE_SECONDS)
        await self.open_one()
        try:
            await self.windows[-1].wait_for_load_state("load", timeout=LOAD_SECONDS * 1000)
        except PlaywrightTimeout:
            self.note("The page is still loading.")

    async def observation(self) -> dict[str, Any]:
        """A screenshot of the newest window, and what happened since the last one."""
        png = await self.steady(lambda page: page.screenshot(type="png", animations="disabled"))
        notes, self.notes = self.notes, []
        return {"png": base64.b64encode(png).decode(), "notes": notes}

    async def steady(self, look: Callable[[Any], Awaitable[Any]]) -> Any:
        """The value of `look` on the newest window, again if it goes to another page meanwhile."""
        from playwright.async_api import Error

        while True:
            await self.open_one()
            try:
                return await look(self.windows[-1])
            except Error as error:
                if self.crashed or not any(text in error.message for text in NAVIGATING):
                    raise
                await self.settle()

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES and text not in self.notes:
            self.notes.append(text)

    # -- Events --------------------------------------------------------------------------------------------------------

    def add_window(self, page: Any) -> None:
        page.on("dialog", self.on_dialog)
        page.on("download", lambda _: self.note("A download was refused."))
        page.on("filechooser", lambda _: self.note("A file chooser was closed: there are no files."))
        page.on("crash", lambda _: self.on_crash())
        page.on("close", self.on_close)
        self.windows.append(page)
        if len(self.windows) > MAX_WINDOWS:
            self.note(f"A window was closed: at most {MAX_WINDOWS} can be open.")
            task = asyncio.ensure_future(page.close())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def on_dialog(self, dialog: Any) -> None:
        answered = f" with {dialog.default_value!r}" if dialog.type == "prompt" else ""
        self.note(f'The page showed the {dialog.type} "{dialog.message[:200]}", which was answered OK{answered}.')
        with suppress(Exception):  # the page may be gone
            await dialog.accept(*([dialog.default_value] if dialog.type == "prompt" else []))

    def on_close(self, page: Any) -> None:
        self.windows = [window for window in self.windows if window is not page]

    def on_crash(self) -> None:
        self.crashed = True

    async def close(self) -> None:
        try:
            if self.context is not None:
                await self.context.close()
        finally:
            if self.proxy is not None:
                self.proxy.close()


REQUESTS = {"open": EpisodePage.do_open, "act": EpisodePage.do_act, "finish": EpisodePage.do_finish}


async def _evaluate(code: str, argument: Any, page: Any) -> Any:
    return await page.evaluate(code, argument)


class PageFailed(Exception):
    """The task's page cannot be opened, or its predicate raised."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def _failure(cause: str, message: str) -> dict[str, Any]:
    return {"failure": [cause, message]}

"""A page in a real Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# .ci/run installs it where it can.
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

_PATIENCE_S = 60.0


class Page:
    """One tab. What its console and its log complain of is in `complaints`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded":
                self.complaints.append(told["params"]["entry"]["text"])
            elif told["method"] == "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(told["params"]["args"]))

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        told = await asyncio.wait_for(answer, _PATIENCE_S)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def value(self, script: str) -> Any:
        """What an expression of the page's comes to."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Waits until an expression of the page's is true."""
        async with asyncio.timeout(_PATIENCE_S):
            while not await self.value(script):
                await asyncio.sleep(0.05)

    async def is_wide(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def picture(self, path: Path) -> None:
        told = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def opened(url: str, profile: Path, width: int = 1280) -> AsyncIterator[Page]:
    """A tab of that width with `url` in it; `profile` is an empty folder."""
    assert CHROMIUM is not None, "needs Chromium"
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        told = profile / "DevToolsActivePort"
        async with asyncio.timeout(_PATIENCE_S):
            while not (told.is_file() and "\n" in told.read_text()):
                assert process.returncode is None, "Chromium ended"
                await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        async with aiohttp.ClientSession() as client:
            async with client.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                address = (await answer.json())["webSocketDebuggerUrl"]
            async with client.ws_connect(address, max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.is_wide(width)
                await page.call("Page.navigate", url=url)
                yield page
                listening.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()

"""The router's page in a real browser: 200 sessions, two widths, and the admin token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.browser import Page, needs_browser, opened
from tests.router_policies.test_cli import router

EVIL = "<img src=x onerror=\"document.title='owned'\">"
LONG = "x" * 250
PLACES, WAITING = 150, 50
TOKENS = 600


async def turn(client: aiohttp.ClientSession, url: str, session: str, begin: int) -> None:
    """A turn of a session, which gets a place and keeps it, or waits for one."""
    asked = {"input_ids": list(range(begin, begin + TOKENS)), "stream": True}
    headers = {"x-session-id": session}
    async with client.post(f"{url}/generate", json=asked, headers=headers) as answer:
        await answer.read()


def router_toml(folder: Path, worker: str, more: str = "") -> str:
    path = folder / "router.toml"
    path.write_text(
        f'{more}\n[admission]\nrule = "cap"\nsessions = {PLACES}\n'
        f'[[workers]]\nid = "w0"\nurl = "{worker}"\nkv_capacity_tokens = 1000000\n'
    )
    return str(path)


async def sees(page: Page, script: str, *, within: str = "") -> None:
    """Waits until that is so of the page, with `all(selector)` for its elements."""
    find = f"const all = it => [...document.querySelectorAll('{within} ' + it)]"
    await page.until(f"(() => {{ {find}; return {script}; }})()")


async def give(page: Page, token: str) -> None:
    await page.value(f"document.querySelector('#token').value = '{token}'")
    await page.value("document.querySelector('#ask button').click()")


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
async def test_two_hundred_sessions_are_shown_as_text_without_a_scroll_aside(
    tmp_path: Path, mock_worker: Any, width: int
) -> None:
    async with (
        mock_worker() as worker,
        router("--config", router_toml(tmp_path, worker.url)) as (url, _),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        names = [EVIL, LONG, *(f"s{number}" for number in range(PLACES - 2))]
        for number, name in enumerate(names):
            await turn(client, url, name, number * TOKENS)
        waiting = [
            asyncio.create_task(turn(client, url, f"late{number}", (PLACES + number) * TOKENS))
            for number in range(WAITING)
        ]
        try:
            async with opened(f"{url}/ui", tmp_path / "profile", width) as page:
                await sees(page, f"all('tr').length === {PLACES + WAITING}", within="#sessions")
                first = await page.value("document.querySelector('#sessions tr').innerText")
                assert "late" in first
                assert "waiting" in first
                assert "limit on sessions" in first
                heading = await page.value("document.querySelector('#sessions-head').textContent")
                assert heading == f"Sessions: {WAITING} waiting, 0 running, {PLACES} idle"
                script = f"all('button').some(it => it.textContent === {EVIL!r})"
                await sees(page, script, within="#sessions")
                await page.value(
                    "[...document.querySelectorAll('#sessions button')]"
                    ".find(it => it.textContent.startsWith('<img')).click()"
                )
                await sees(page, "all('tr').length === 1", within="#turns")
                assert "w0" in await page.value("document.querySelector('#turns').innerText")
                assert await page.value("document.querySelectorAll('img').length") == 0
                assert await page.value("document.title") == "deltaserve"
                for name in ("documentElement", "body", "querySelector('#session')"):
                    wide = await page.value(
                        f"[document.{name}.scrollWidth, document.{name}.clientWidth]"
                    )
                    assert wide[0] <= wide[1] <= width, name
                await page.value("document.querySelector('#close').click()")
                await page.value(
                    "(it => { it.value = 'late4'; it.dispatchEvent(new Event('input')); })"
                    "(document.querySelector('#find'))"
                )
                await sees(page, "all('tr').length === 11", within="#sessions")
                assert page.complaints == []
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


@needs_browser
async def test_the_page_asks_for_the_token_and_keeps_it_in_its_tab(
    tmp_path: Path, mock_worker: Any
) -> None:
    async with mock_worker() as worker:
        config = router_toml(tmp_path, worker.url, 'admin_token = "secret"')
        async with (
            router("--config", config) as (url, _),
            opened(f"{url}/ui", tmp_path / "profile") as page,
        ):
            await sees(page, "all('#ask[open]').length === 1 && !all('#workers tr').length")
            assert page.complaints == []
            await give(page, "wrong")
            await sees(page, "all('#why')[0].textContent.includes('admin token')")
            await give(page, "secret")
            await sees(page, "all('#workers tr').length === 1")
            await page.call("Page.reload")
            await sees(page, "all('#workers tr').length === 1 && !all('#forget')[0].hidden")
            assert await page.value("localStorage.length + document.cookie.length") == 0
            assert "secret" not in await page.value("location.href")
            await page.value("document.querySelector('#forget').click()")
            await sees(page, "all('#ask[open]').length === 1")
            # The browser's own words for the wrong token may come late.
            assert [it for it in page.complaints if "401" not in it] == []


@needs_browser
async def test_tenants_are_shown_with_what_they_hold_where_there_are_some(
    tmp_path: Path, mock_worker: Any
) -> None:
    tenants = f"[tenants.agents]\nweight = 3\n[tenants.{LONG[:60]}]\npriority = 'background'\n"
    async with (
        mock_worker() as worker,
        aiohttp.ClientSession() as client,
    ):
        header = 'tenant_header = "x-tenant"\n'
        config = router_toml(tmp_path, worker.url, header + tenants)
        async with router("--config", config) as (url, _):
            client.headers["x-tenant"] = "agents"
            await turn(client, url, "s", 0)
            async with opened(f"{url}/ui", tmp_path / "profile", 390) as page:
                await sees(page, "all('tr').length === 3", within="#tenants")
                shown = "all('tr').some(it => /agents[^]*[1-9]\\d* of /.test(it.innerText))"
                await sees(page, shown, within="#tenants")
                assert await page.value("document.documentElement.scrollWidth") <= 390
                assert page.complaints == []
        async with (
            router("--config", router_toml(tmp_path, worker.url)) as (url, _),
            opened(f"{url}/ui", tmp_path / "other") as page,
        ):
            await sees(page, "all('#workers tr').length === 1 && all('#shares')[0].hidden")

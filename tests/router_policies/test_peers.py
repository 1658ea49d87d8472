"""Two routers before one worker book what it holds once, and one goes on without the other."""

from __future__ import annotations

import asyncio
import itertools
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from aiohttp import web

from .test_cli import router

KV_TOKENS = 20_000
PROMPT_TOKENS = 3_000
SESSIONS = 8
"""Of each router: both want more than twice what the worker holds."""


class Worker:
    """Counts the tokens of the requests that it runs, and reports them as SGLang does."""

    def __init__(self) -> None:
        self.url = ""
        self.running: list[int] = []
        self.most_tokens = 0

    async def _loads(self, _: web.Request) -> web.Response:
        load = {
            "num_running_reqs": len(self.running),
            "num_waiting_reqs": 0,
            "num_used_tokens": sum(self.running),
            "max_total_num_tokens": KV_TOKENS,
        }
        return web.json_response({"loads": [load]})

    async def _generate(self, request: web.Request) -> web.Response:
        tokens = len((await request.json())["input_ids"])
        self.running.append(tokens)
        self.most_tokens = max(self.most_tokens, sum(self.running))
        await asyncio.sleep(0.15)
        self.running.remove(tokens)
        told = {"prompt_tokens": tokens, "cached_tokens": 0, "completion_tokens": 1}
        return web.json_response({"text": "a", "meta_info": told})

    async def start(self, stack: AsyncExitStack) -> None:
        async def well(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.router.add_get("/health", well)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"


def kept_port(stack: AsyncExitStack) -> int:
    """A port that nobody but who names it gets: bound here, and listened on by a router."""
    kept = stack.enter_context(socket.socket())
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port: int = kept.getsockname()[1]
    return port


class Clients:
    """Sessions, each of which sends turn after turn to the first of its routers that answers."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client
        self.turns: dict[int, int] = {}
        self.statuses: set[int] = set()
        self.failed_over = 0
        self.ends = False

    async def run(self, session: int, urls: list[str]) -> None:
        ids = [session * PROMPT_TOKENS + at for at in range(PROMPT_TOKENS)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
        headers = {"x-session-id": f"s{session}"}
        urls = list(urls)
        while not self.ends:
            try:
                async with self._client.post(
                    f"{urls[0]}/generate", json=body, headers=headers
                ) as answer:
                    await answer.read()
                    self.statuses.add(answer.status)
                self.turns[session] = self.turns.get(session, 0) + 1
            except aiohttp.ClientError:
                # As a balancer that finds its router gone.
                self.failed_over += 1
                urls.pop(0)

    async def all_have(self, turns: int) -> None:
        while min((self.turns.get(n, 0) for n in range(2 * SESSIONS)), default=0) < turns:
            await asyncio.sleep(0.02)


async def test_two_routers_book_what_there_is_once_and_one_outlives_the_other(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(300):
        worker = Worker()
        await worker.start(stack)
        ports = [kept_port(stack) for _ in range(2)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        processes = []
        for port, peer in zip(ports, reversed(urls), strict=True):
            config = tmp_path / f"{port}.toml"
            config.write_text(f'peers = ["{peer}"]\n[[workers]]\nurl = "{worker.url}"\n')
            arguments = ["--config", str(config), "--port", str(port)]
            _, process = await stack.enter_async_context(router(*arguments))
            processes.append(process)
        client = await stack.enter_async_context(aiohttp.ClientSession())

        async def budget(url: str) -> int:
            async with client.get(f"{url}/workers") as answer:
                (found,) = (await answer.json())["workers"]
            return int(found["state"]["admission"]["budget_tokens"] or 0)

        # Once the worker has said what it holds.
        while (budgets := [await budget(url) for url in urls]) != [9_500, 9_500]:
            assert set(budgets) <= {0, 9_500}
            await asyncio.sleep(0.05)
        clients = Clients(client)
        tasks = []
        for session, url in zip(range(2 * SESSIONS), itertools.cycle(urls)):
            tasks.append(asyncio.create_task(clients.run(session, [url, *urls])))
        await clients.all_have(4)
        processes[0].kill()
        await clients.all_have(8)
        while await budget(urls[1]) != 19_000:
            await asyncio.sleep(0.05)
        await clients.all_have(max(clients.turns.values()) + 2)
        clients.ends = True
        await asyncio.gather(*tasks)
        assert KV_TOKENS / 2 < worker.most_tokens <= KV_TOKENS
        assert clients.statuses == {200}
        assert clients.failed_over >= SESSIONS, "each of the killed router's sessions"

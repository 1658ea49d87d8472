"""Claude Code and Codex as their users run them, before a router; `agents/` pins them.

npm installs them into the user's cache folder, once for each lock. Where they cannot be had the
tests are skipped with the reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.cache import cache_dir
from tests.processes import wait_until

LOCK = Path(__file__).parent / "agents"


def installed_agents() -> Path:
    """The folder of the agents' commands; skips the test where they cannot be installed."""
    if shutil.which("npm") is None:
        pytest.skip("no npm: Claude Code and Codex cannot be installed")
    digest = hashlib.sha256((LOCK / "package-lock.json").read_bytes()).hexdigest()[:12]
    folder = cache_dir() / "agents" / digest
    commands = folder / "node_modules" / ".bin"
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(LOCK / name, folder)
        npm = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(npm, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"npm ci failed: {done.stderr[-300:]}")
        # Puts the program for this machine in its place, as its postinstall script does.
        script = folder / "node_modules/@anthropic-ai/claude-code/install.cjs"
        subprocess.run(["node", str(script)], cwd=folder, capture_output=True, check=True)
        (folder / "complete").touch()
    return commands


@dataclass(frozen=True)
class Ended:
    """How a command of an agent ended."""

    status: int
    output: str
    errors: str


class Agents:
    """Both agents in a home of their own, before the router at `url`, asking for `model`."""

    def __init__(self, commands: Path, home: Path, url: str, model: str) -> None:
        self.commands, self.home, self.url, self.model = commands, home, url, model
        home.mkdir(exist_ok=True)
        (home / "codex").mkdir(exist_ok=True)

    def claude(self, prompt: str, *options: str, **environment: str) -> Ended:
        """`claude -p`, without a terminal; the prompt comes by standard input."""
        argv = [str(self.commands / "claude"), "-p", *options, "--model", self.model]
        return self._run(argv, prompt, environment)

    def codex(self, prompt: str, idle_ms: int = 300_000) -> Ended:
        """`codex exec`, which gives a stream up that is silent for `idle_ms`."""
        (self.home / "codex" / "config.toml").write_text(
            f'model = "{self.model}"\nmodel_provider = "deltaserve"\n'
            '[model_providers.deltaserve]\nname = "deltaserve"\n'
            f'base_url = "{self.url}/v1"\nwire_api = "responses"\n'
            f"stream_idle_timeout_ms = {idle_ms}\n"
        )
        argv = [str(self.commands / "codex"), "exec", "--skip-git-repo-check", "-"]
        return self._run(argv, prompt, {})

    def _run(self, argv: list[str], prompt: str, environment: dict[str, str]) -> Ended:
        of_agents = {
            "HOME": str(self.home),
            "CODEX_HOME": str(self.home / "codex"),
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "MAX_THINKING_TOKENS": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        done = subprocess.run(
            argv,
            cwd=self.home,
            env=os.environ | of_agents | environment,
            input=prompt,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)


@contextmanager
def router(folder: Path, *arguments: str) -> Iterator[tuple[str, Path]]:
    """A router on a free port, until the block ends: its address, and its decision log."""
    log = folder / "decisions.jsonl"
    command = Path(sys.executable).with_name("deltaserve")
    argv = [str(command), "route", "--port", "0", "--decision-log", str(log), *arguments]
    said = folder / "router.log"
    with said.open("wb") as file, subprocess.Popen(argv, stderr=file) as process:
        try:
            while not (found := re.search(r"listening on (http://\S+)", said.read_text())):
                assert process.poll() is None, said.read_text()
                time.sleep(0.05)
            wait_until(lambda: is_ready(found[1]))
            yield found[1], log
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    """Whether the router could place a request."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return True
    except OSError:
        return False


def events(log: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in a decision log."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]

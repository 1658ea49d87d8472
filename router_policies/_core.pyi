"""The Rust core. Errors in a configuration are ValueErrors of one line."""

from collections.abc import Callable
from os import PathLike

__version__: str

def load_config(path: str | PathLike[str]) -> str:
    """A configuration file, checked, as JSON."""

def check(config: str, decide: Callable[[str], str] | None = None) -> list[tuple[str, bool]]:
    """Raises ValueError where a router of the JSON `config` would not start, or could place no
    request with all its workers up. Returns a line for each worker that does not answer its health
    check, and whether it may only not have started. `decide` as in `serve`."""

def serve(
    config: str,
    announce: Callable[[str, str | None], object],
    decide: Callable[[str], str] | None = None,
) -> None:
    """Serves the JSON `config` until SIGINT or SIGTERM; calls `announce` with host:port, and with
    that of the endpoint picker where there is one. `decide` takes a view as JSON and answers a
    route as JSON, in place of the configured policy."""

def policies() -> str:
    """The table of policies, as a JSON list."""

def paths() -> str:
    """The table of paths that the router serves, as a JSON list."""

def admission_rules() -> str:
    """The table of admission's rules and the settings of all of them, as a JSON object."""

def simulate(plan: str | PathLike[str], folder: str | PathLike[str]) -> str:
    """Simulates the plan in a file (`docs/simulator.md`) and writes the run's folder; returns the
    report as JSON."""

class NotAdmitted(Exception):
    """A turn that has no place and does not wait: why, and after how many seconds to come again, or
    None."""

class Turn:
    """See `router_policies.fleet.Turn`."""

    def wait(self, timeout_s: float | None = None) -> bool: ...
    def worker(self) -> tuple[str, str]: ...
    def prefill(self) -> tuple[str, str] | None: ...
    def output(self, tokens: int) -> None: ...
    def finish(
        self,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None: ...
    def fail(self, error: str) -> None: ...
    def leave(self) -> None: ...

class Fleet:
    """See `router_policies.fleet.Fleet`."""

    def __new__(cls, policy: str, policy_params: str, admission: str) -> Fleet: ...
    def add_worker(self, worker: str) -> str: ...
    def set_up(self, worker: str, is_up: bool) -> bool: ...
    def set_draining(self, worker: str, is_draining: bool) -> bool: ...
    def remove_worker(self, worker: str) -> bool: ...
    def waiting(self) -> int: ...
    def is_idle(self) -> bool: ...
    def admit(
        self,
        tokens: list[int],
        session: str | None,
        max_output_tokens: int | None,
        exclude: list[str],
    ) -> Turn: ...

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

"""What every room may import: the version, the user-facing error and the command line.

The rooms (`launch`, `router_policies`, `sglang_ext`, `replay`, `eval`) hold everything else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`: as installed, which is what Cargo.toml says. Looked up when asked for:
        engines import parts of this package from a folder that is not installed."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import version

        found = globals()[name] = version("deltaserve")
        return found

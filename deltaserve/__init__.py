"""What every room may import: the version, the user-facing error and the command line.

The rooms (`launch`, `router_policies`, `sglang_ext`, `replay`, `eval`) hold everything else.
"""

__version__ = "0.2.0"

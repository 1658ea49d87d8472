"""The router: a Rust crate, and the thin Python package over it."""

import os

# Huge pages make 2 MB of memory of the first byte that a client sends. The core's allocator reads
# this when it is loaded.
os.environ.setdefault("MIMALLOC_ALLOW_THP", "0")

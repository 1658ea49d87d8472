"""The router: a Rust crate, and the thin Python package over it."""

"""Microbenchmarks: one question each, asked of any topology.

Each module asks its own, measures it on the hardware at hand and says beside it what was seen
before, elsewhere. `driver` is the only part that talks to workers.
"""

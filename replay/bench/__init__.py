"""How well the client keeps a schedule and what it costs, measured against a server on this
machine.

Owns the benchmark of this room; nothing else imports it.
"""

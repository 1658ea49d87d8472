"""Traces of agentic load: read, make, sample and describe them, and replay them against engines.

Owns the trace and result formats and the client. Knows engines only by their HTTP interfaces; must
not import any other room.
"""

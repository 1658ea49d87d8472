"""Prefill that keeps to a pace: chunks sized so that the requests decoding beside them do as well.

`step_times` learns what a step costs, `pacer` chooses a chunk by it, `prefill` does both for a
scheduler of SGLang. `sglang_ext.elastic` uses it, and `sglang_ext.paced` on plain workers.
"""

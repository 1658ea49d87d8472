"""Mooncake's traces (github kvcache-ai/Mooncake, FAST25-release): blocks of 512 tokens, `timestamp`
in milliseconds, global ids that stand for a block and all before it. The source names no sessions,
so that every request is one of its own.
"""

from __future__ import annotations

from pathlib import Path

from deltaserve.errors import InputError
from replay.readers import Report
from replay.readers.lines import records
from replay.trace import MAX_INTEGER, Request, SortingTraceWriter

BLOCK_SIZE = 512


def convert(inputs: list[Path], output: Path) -> Report:
    """Converts files of one trace."""
    report = Report()
    with SortingTraceWriter(output) as writer:
        for number, record in enumerate(records(inputs)):
            input_length = record.integer("input_length", minimum=1)
            output_length = record.integer("output_length", minimum=0)
            hash_ids = record.integers("hash_ids")
            blocks = -(-input_length // BLOCK_SIZE)
            if len(hash_ids) != blocks:
                raise record.error("hash_ids", f"{blocks} ids, one a block of {BLOCK_SIZE} tokens")
            if min(hash_ids) < 0 or max(hash_ids) > MAX_INTEGER:
                raise record.error("hash_ids", "integers from 0 to 2^63 - 1")
            report.output_length_raised_to_1 += output_length < 1
            writer.write(
                Request(
                    request_id=f"r{number}",
                    session_id=f"r{number}",
                    turn=0,
                    timestamp_s=record.number("timestamp") / 1000,
                    input_length=input_length,
                    output_length=max(1, output_length),
                    block_size=BLOCK_SIZE,
                    hash_ids=hash_ids,
                )
            )
        if not writer.requests:
            raise InputError(f"{inputs[0]}: no request in it")
    report.requests = report.sessions = writer.requests
    return report

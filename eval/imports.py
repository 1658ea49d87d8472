"""Results of other load generators, as run folders that the report reads.

Owns what their files mean. What they do not record stays unknown: `sglang.bench_serving` writes no
send times and no sessions, AIPerf no cached tokens and no token count a chunk.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from deltaserve.errors import InputError
from eval import provenance
from eval.experiment import Name
from eval.experiment_files import one_line
from eval.import_replay import import_replay
from launch.cache import make_folder
from replay.readers.lines import objects
from replay.results import RESULTS_FILE, ErrorInfo, ErrorKind, Result, ResultWriter

_Tokens = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Serving(BaseModel):
    """A line of bench_serving's output, as far as it is read; one item a request in each list."""

    model_config = ConfigDict(strict=True, extra="ignore")

    duration: _Seconds
    input_lens: list[_Tokens]
    output_lens: list[_Tokens]
    ttfts: list[_Seconds]
    itls: list[list[_Seconds]]
    errors: list[str | None] | None = None
    cached_tokens: list[_Tokens | None] | None = None

    @model_validator(mode="after")
    def _one_a_request(self) -> _Serving:
        for name in ("output_lens", "ttfts", "itls", "errors", "cached_tokens"):
            given = getattr(self, name)
            if given and len(given) != len(self.input_lens):
                raise ValueError(
                    f"{name}: {len(given)} items, but input_lens has {len(self.input_lens)}"
                )
        return self


@dataclass(frozen=True)
class Imported:
    """One run: its results, how long it took, and what else its file says.

    `timed` is whether the file says when requests were sent.
    """

    results: list[Result]
    duration_s: float
    timed: bool
    facts: dict[str, Any]
    dataset: str | None = None
    """Equal for runs that asked the same requests in the same order; None where that is unknown."""


def import_file(
    source: Path, file_format: str, arm: str, output: Path, gpus: int | None = None
) -> list[Path]:
    """Writes each run in `source` as `output`/<arm>/r<k>; returns the folders. `gpus` is how many
    the servers had, for figures a GPU.

    Repeats are numbered on from those already there. Raises `InputError` naming file and line, or
    an `arm` that is no name of one.
    """
    try:
        TypeAdapter(Name).validate_python(arm)
    except ValidationError as error:
        raise InputError(f"--arm {arm}: {one_line(error, {})}") from None
    if file_format == REPLAY:
        if not (source / RESULTS_FILE).is_file():
            raise InputError(
                f"{source}: no {RESULTS_FILE} there; expected a folder of `replay run`"
            )
        make_folder(output)
        folder, repeat = _next_folder(output, arm)
        about = {"experiment": output.name, "arm": {"name": arm}, "repeat": repeat, "gpus": gpus}
        try:
            import_replay(source, folder, about)
        except InputError:
            shutil.rmtree(folder)
            raise
        return [folder]
    if not source.is_file():
        raise InputError(f"{source}: no such file")
    make_folder(output)
    folders = []
    # All of the file is read first: what is wrong with a later line leaves nothing behind.
    for run in list(FORMATS[file_format](source)):
        folder, repeat = _next_folder(output, arm)
        writer = ResultWriter(folder / RESULTS_FILE)
        for result in run.results:
            writer.write(result)
        writer.close()
        provenance.write_manifest(
            folder,
            {
                "state": "complete",
                "experiment": output.name,
                "arm": {"name": arm},
                "load": None,
                "repeat": repeat,
                "gpus": gpus,
                "identity": {"trace_sha256": run.dataset},
                "topology": {"model": str(run.facts.get("model", "unknown")), "device": "unknown"},
                "versions": {"engines": {}},
                "source": {"file": str(source.resolve()), "format": file_format},
                "imported": {"duration_s": run.duration_s, "timed": run.timed, "facts": run.facts},
                "timings": {"replay_s": run.duration_s},
                # These tools' clients time themselves otherwise than by a schedule.
                "validity": {"max_client_lag_p99_s": 1e9},
            },
        )
        folders.append(folder)
    return folders


def _next_folder(output: Path, arm: str) -> tuple[Path, int]:
    """A new folder for the arm's next repeat, and its number."""
    repeat = 1
    while (folder := output / arm / f"r{repeat}").exists():
        repeat += 1
    folder.mkdir(parents=True)
    return folder, repeat


def read_bench_serving(source: Path) -> Iterator[Imported]:
    """`python -m sglang.bench_serving --output-file F --output-details`: one run a line."""
    for place, record in objects(source):
        try:
            run = _Serving.model_validate(record)
        except ValidationError as error:
            raise InputError(
                f"{place}: {one_line(error, record)}; expected a line of sglang.bench_serving run "
                "with --output-details"
            ) from None
        count = len(run.input_lens)
        cached = run.cached_tokens or [None] * count
        errors = run.errors or [""] * count
        results = []
        for i in range(count):
            at_s = run.ttfts[i]
            arrivals = [(at_s, 1)]
            for gap_s in run.itls[i]:
                at_s += gap_s
                arrivals.append((at_s, arrivals[-1][1] + 1))
            tokens = run.output_lens[i]
            failure = None
            if errors[i]:
                failure = ErrorInfo(kind="server_error", message=str(errors[i]))
            elif at_s == 0:
                # A stream that ended without a token: its time to the first one stays 0, and its
                # tokens are those that were asked for.
                failure = _no_token()
            failed = failure is not None
            if not failed and tokens > arrivals[-1][1]:
                arrivals[-1] = (at_s, tokens)
            results.append(
                Result(
                    request_id=str(i),
                    session_id=str(i),
                    turn=0,
                    input_length=run.input_lens[i],
                    output_length=max(1, tokens),
                    scheduled_s=0.0,
                    sent_s=0.0,
                    first_token_s=None if failed else arrivals[0][0],
                    finished_s=at_s,
                    arrivals=[] if failed else arrivals,
                    output_tokens=0 if failed else arrivals[-1][1],
                    prompt_tokens=run.input_lens[i],
                    cached_tokens=cached[i],
                    error=failure,
                )
            )
        scalars = {k: v for k, v in record.items() if isinstance(v, str | int | float | bool)}
        # Its requests have no names: only runs with the same lengths in the same order are of the
        # same data set, and their requests comparable one by one.
        lengths = hashlib.sha256(orjson.dumps(run.input_lens)).hexdigest()
        yield Imported(results, run.duration, timed=False, facts=scalars, dataset=lengths)


def read_aiperf(source: Path) -> Iterator[Imported]:
    """AIPerf's `profile_export.jsonl`: one request a line, one run a file."""
    results: list[Result] = []
    for place, record in objects(source):
        try:
            metadata = record["metadata"]
            if metadata.get("benchmark_phase", "profiling") != "profiling":
                continue
            start_ns = int(metadata["request_start_ns"])
            end_ns = int(metadata["request_end_ns"])
            results.append(_aiperf_result(record, len(results), start_ns, end_ns))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{place}: not a record of AIPerf's profile_export.jsonl: {error!r}"
            ) from None
    if not results:
        raise InputError(f"{source}: no request of the profiling phase")
    first_s = min(result.sent_s or 0.0 for result in results)
    last_s = max(result.finished_s or 0.0 for result in results)
    for result in results:
        result.scheduled_s = result.sent_s = (result.sent_s or 0.0) - first_s
        result.finished_s = (result.finished_s or 0.0) - first_s
        if result.first_token_s is not None:
            result.first_token_s -= first_s
        result.arrivals = [(at - first_s, n) for at, n in result.arrivals]
    yield Imported(results, last_s - first_s, timed=True, facts={})


def _aiperf_result(record: dict[str, Any], number: int, start_ns: int, end_ns: int) -> Result:
    metadata = record["metadata"]
    error = record.get("error")
    start_s, end_s = start_ns / 1e9, end_ns / 1e9
    told_tokens = _metric(record, "output_sequence_length")
    tokens = int(told_tokens or 0)
    ttft_ms = _metric(record, "time_to_first_token")
    latency_ms = _metric(record, "request_latency")
    failure = None if error is None else _aiperf_error(error)
    first_s = last_s = None
    arrivals: list[tuple[float, int]] = []
    if failure is None:
        last_s = start_s + latency_ms / 1000 if latency_ms is not None else end_s
        if ttft_ms is not None:
            # Only the first and the last moment are known with their token counts.
            first_s = start_s + ttft_ms / 1000
            arrivals = [(first_s, 1)] + ([(last_s, tokens)] if tokens > 1 else [])
        elif told_tokens == 0:
            failure = _no_token()
        else:
            # It was not streamed: nothing of it was there before all of it was.
            first_s, arrivals = last_s, [(last_s, max(1, tokens))]
    return Result(
        request_id=f"{metadata.get('conversation_id')}-{metadata.get('turn_index', 0)}-"
        f"{metadata.get('session_num', number)}",
        session_id=str(metadata.get("x_correlation_id") or metadata.get("conversation_id")),
        turn=int(metadata.get("turn_index") or 0),
        input_length=max(1, int(_metric(record, "input_sequence_length", "error_isl") or 1)),
        output_length=max(1, tokens),
        scheduled_s=start_s,
        sent_s=start_s,
        first_token_s=first_s,
        finished_s=last_s if last_s is not None else end_s,
        arrivals=arrivals,
        output_tokens=arrivals[-1][1] if arrivals else 0,
        # What AIPerf itself broke off, as at its duration's end, says nothing of the servers.
        phase="drain" if failure is not None and failure.kind == "cancelled" else "measure",
        error=failure,
    )


def _no_token() -> ErrorInfo:
    return ErrorInfo(kind="short_output", message="the answer ended without a token")


def _aiperf_error(error: dict[str, Any]) -> ErrorInfo:
    code = int(error.get("code") or 0)
    kind: ErrorKind = "disconnect"
    if code == 499:
        kind = "cancelled"
    elif "timeout" in str(error.get("type", "")).lower():
        kind = "timeout"
    elif 400 <= code < 500:
        kind = "client_error"
    elif code >= 500:
        kind = "server_error"
    return ErrorInfo(kind=kind, message=str(error.get("message", "")))


def _metric(record: dict[str, Any], *names: str) -> float | None:
    """A metric's value, times in milliseconds whatever unit the file has."""
    factors = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}
    for name in names:
        entry = (record.get("metrics") or {}).get(name)
        if entry is not None:
            return float(entry["value"]) * factors.get(str(entry.get("unit")), 1.0)
    return None


REPLAY = "replay"
FORMATS: dict[str, Callable[[Path], Iterator[Imported]]] = {
    "bench-serving": read_bench_serving,
    "aiperf": read_aiperf,
}

"""`python -m replay.bench`: how punctual the client is, how true its stamps are, a token's cost.

Two parts, both against the mock server on this machine. Punctuality: long prompts at a fixed rate,
many streams at a time; compares when requests were due, sent and received, and when first tokens
were sent and seen. Cost: the same short prompts with long answers through this client,
`sglang.bench_serving` and `vllm bench serve`; the client's CPU time between the first requests and
the last token, over the tokens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import psutil
import typer

from deltaserve.errors import InputError
from replay.results import read_results
from replay.trace import Request, write_trace

_BLOCK_SIZE = 64
_PROMPT_BLOCKS = 1600
_FAMILIES = 20
_SHARED_BLOCKS = 1072  # 67 % of a prompt, as in production
_STREAM_S = 5.0
_INTERVAL_S = 0.1
_COST_REQUESTS = 256
_COST_CONCURRENCY = 64
_COST_TOKENS = 400
# A client may send a request to see whether the server works; counting starts after.
_COST_WARM_UP_REQUESTS = 2
_CPU_SAMPLE_S = 0.1
_SERVER_PROCESSES = 2
_COST_INTERVAL_S = 0.01
_COST_INPUT_TOKENS = 128


@dataclass(slots=True)
class _MockServer:
    """A running mock server; `stamps` can be read when it has ended."""

    url: str
    process: psutil.Popen
    _stamps: Path

    def stamps(self) -> list[dict[str, Any]]:
        files = self._stamps.parent.glob(f"{self._stamps.stem}.*")
        return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


@contextmanager
def _mock_server(folder: Path, tokens: int, interval_s: float) -> Iterator[_MockServer]:
    stamps = folder / "stamps"
    for old in folder.glob("stamps.*"):
        old.unlink()
    arguments = [str(_SERVER_PROCESSES), str(tokens), str(interval_s), str(stamps)]
    process = psutil.Popen(
        [sys.executable, "-m", "replay.bench.mock_server", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = process.stdout.readline().strip()
        yield _MockServer(f"http://127.0.0.1:{port}", process, stamps)
    finally:
        process.stdin.close()
        process.wait(10)


def _punctuality_trace(path: Path, rate_rps: float, duration_s: float) -> None:
    """Prompts of 102,400 tokens (about 600 kB of JSON), two thirds of them shared with others, that
    arrive as a Poisson process: some of them at almost the same time."""
    requests = []
    gaps_s = np.random.default_rng(0).exponential(1 / rate_rps, int(rate_rps * duration_s))
    fresh = _FAMILIES * _SHARED_BLOCKS
    for number, at_s in enumerate(np.cumsum(gaps_s).tolist()):
        family = number % _FAMILIES
        own = _PROMPT_BLOCKS - _SHARED_BLOCKS
        ids = list(range(family * _SHARED_BLOCKS, (family + 1) * _SHARED_BLOCKS))
        ids += range(fresh, fresh + own)
        fresh += own
        requests.append(
            Request(
                f"r{number}",
                f"s{number}",
                0,
                at_s,
                _PROMPT_BLOCKS * _BLOCK_SIZE,
                int(_STREAM_S / _INTERVAL_S),
                _BLOCK_SIZE,
                ids,
            )
        )
    write_trace(path, requests)


def _replay(trace: Path, url: str, output: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "deltaserve", "replay", "run", str(trace)]
    return [*command, "--url", url, "--output", str(output), "--json", *arguments]


def _punctuality(
    folder: Path, rate_rps: float, duration_s: float, processes: int | None
) -> dict[str, Any]:
    trace = folder / "long.jsonl"
    _punctuality_trace(trace, rate_rps, duration_s)
    output = folder / "run"
    with _mock_server(folder, int(_STREAM_S / _INTERVAL_S), _INTERVAL_S) as server:
        arguments = ["--vocab-size", "100000"]
        if processes:
            arguments += ["--processes", str(processes)]
        samples = _watch(_replay(trace, server.url, output, *arguments), server)
    record = orjson.loads((output / "replay.json").read_bytes())
    origin_s = record["clock"]["monotonic_origin_s"]
    stamped = {stamp["request_id"]: stamp for stamp in server.stamps()}
    begin_s = min(stamp["arrived_s"] for stamp in stamped.values())
    end_s = max(stamp["finished_s"] for stamp in stamped.values())
    late, received_late, seen_late, flights = [], [], [], []
    for result in read_results(output):
        if result.error or result.first_token_s is None or result.sent_s is None:
            raise RuntimeError(f"{result.request_id}: {result.error}")
        assert result.scheduled_s is not None
        stamp = stamped[result.request_id]
        late.append(result.sent_s - result.scheduled_s)
        received_late.append(stamp["arrived_s"] - origin_s - result.scheduled_s)
        seen_late.append(result.first_token_s + origin_s - stamp["first_token_s"])
        flights += [(result.sent_s, 1), (result.finished_s or 0.0, -1)]
    flights.sort()
    return {
        "requests": len(late),
        "rate_rps": rate_rps,
        "processes": record["arguments"]["processes"],
        "most_streams_at_a_time": int(np.cumsum([step for _, step in flights]).max()),
        "sent_within_5_ms": float(np.mean(np.array(late) <= 0.005)),
        "sent_late_ms": _percentiles_ms(late),
        "received_late_ms": _percentiles_ms(received_late),
        "first_token_seen_late_ms": _percentiles_ms(seen_late),
        "client_cores": samples.client_cpu_s(begin_s, end_s) / (end_s - begin_s),
        "server_cores": samples.server_cpu_s(begin_s, end_s) / (end_s - begin_s),
        "other_cores": samples.other_cpu_s(begin_s, end_s) / (end_s - begin_s),
    }


def _percentiles_ms(values: list[float]) -> dict[str, float]:
    p50, p90, p99 = 1000 * np.percentile(values, [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


class _CpuSamples:
    """CPU seconds so far of a client and of the server, with their children, and of the whole
    machine, many times."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float, float]] = []

    def take(self, client: psutil.Popen, server: psutil.Popen) -> None:
        with contextlib.suppress(psutil.Error):
            spent = []
            for process in (client, server):
                times = [m.cpu_times() for m in [process, *process.children(recursive=True)]]
                spent.append(sum(t.user + t.system for t in times))
            all_cpus = psutil.cpu_times()
            # Guests' time is in `user` too.
            idle = ("idle", "iowait", "guest", "guest_nice")
            busy = sum(v for name, v in all_cpus._asdict().items() if name not in idle)
            self._rows.append((time.monotonic(), spent[0], spent[1], busy))

    def client_cpu_s(self, begin_s: float, end_s: float) -> float:
        return self._between(1, begin_s, end_s)

    def server_cpu_s(self, begin_s: float, end_s: float) -> float:
        return self._between(2, begin_s, end_s)

    def other_cpu_s(self, begin_s: float, end_s: float) -> float:
        """What neither of the two spent: how far the machine was from idle."""
        both_s = self.client_cpu_s(begin_s, end_s) + self.server_cpu_s(begin_s, end_s)
        return self._between(3, begin_s, end_s) - both_s

    def _between(self, column: int, begin_s: float, end_s: float) -> float:
        rows = np.array(self._rows)
        # A child that has ended is not seen any more, but its time was spent.
        spent = np.maximum.accumulate(rows[:, column])
        return float(np.diff(np.interp([begin_s, end_s], rows[:, 0], spent))[0])


def _watch(
    command: list[str], server: _MockServer, env: dict[str, str] | None = None
) -> _CpuSamples:
    """Runs a client's command against the server, looking at both."""
    samples = _CpuSamples()
    with tempfile.TemporaryFile() as shown:
        process = psutil.Popen(command, stdout=shown, stderr=shown, env=env)
        while process.poll() is None:
            samples.take(process, server.process)
            time.sleep(_CPU_SAMPLE_S)
        if process.returncode:
            shown.seek(0)
            text = shown.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return samples


def _cost_trace(path: Path, tokens: int) -> None:
    blocks = _COST_INPUT_TOKENS // _BLOCK_SIZE
    write_trace(
        path,
        [
            Request(
                f"r{number}",
                f"s{number}",
                0,
                0.0,
                _COST_INPUT_TOKENS,
                tokens,
                _BLOCK_SIZE,
                list(range(number * blocks, (number + 1) * blocks)),
            )
            for number in range(_COST_REQUESTS)
        ],
    )


_MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(1000)}, unk_token="w0"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w1")
tokenizer.save_pretrained(sys.argv[1])
"""


# `vllm bench serve` without the command that looks up the package's version, which fails for the
# CPU build's other name.
_VLLM_BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def _command(
    client: str, python: Path, folder: Path, url: str, tokens: int, run: Path
) -> list[str]:
    """The command line of a client for the cost part's load."""
    if client.startswith("deltaserve"):
        trace = folder / f"short-{tokens}.jsonl"
        _cost_trace(trace, tokens)
        arguments = ["--mode", "closed", "--max-inflight-sessions", str(_COST_CONCURRENCY)]
        arguments += ["--vocab-size", "1000", "--api", client.split()[1]]
        return _replay(trace, url, run, *arguments)
    tokenizer = folder / "tokenizer"
    shared = ["--dataset-name", "random", "--tokenizer", str(tokenizer), "--model", "mock"]
    shared += ["--num-prompts", str(_COST_REQUESTS), "--base-url", url]
    shared += ["--max-concurrency", str(_COST_CONCURRENCY), "--random-range-ratio"]
    lengths = ["--random-input-len", str(_COST_INPUT_TOKENS), "--random-output-len", str(tokens)]
    if client == "sglang.bench_serving":
        shared[1] = "random-ids"
        command = [str(python), "-m", "sglang.bench_serving", "--backend", "sglang", *shared]
        return [*command, "1.0", *lengths, "--output-file", str(run), "--disable-tqdm"]
    command = [str(python), "-c", _VLLM_BENCH_SERVE]
    command += ["--backend", "openai", "--endpoint", "/v1/completions", *shared, "0.0", *lengths]
    return [*command, "--ignore-eos", "--disable-tqdm", "--num-warmups", "0"]


def _cost(folder: Path, client: str, python: Path) -> float:
    """Microseconds of CPU time that one streamed token costs a client."""
    if not client.startswith("deltaserve"):
        tokenizer = folder / "tokenizer"
        subprocess.run(
            [str(python), "-c", _MAKE_TOKENIZER, str(tokenizer)], check=True, capture_output=True
        )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    run = folder / client.replace(" ", "-")
    with _mock_server(folder, _COST_TOKENS, _COST_INTERVAL_S) as server:
        command = _command(client, python, folder, server.url, _COST_TOKENS, run)
        samples = _watch(command, server, env)
    stamps = sorted(server.stamps(), key=lambda stamp: stamp["arrived_s"])
    counted = stamps[_COST_WARM_UP_REQUESTS:]
    end_s = max(stamp["finished_s"] for stamp in counted)
    cpu_s = samples.client_cpu_s(counted[0]["arrived_s"], end_s)
    return 1e6 * cpu_s / (len(counted) * _COST_TOKENS)


def main(
    sglang_python: Annotated[
        Path | None, typer.Option(help="The Python of an environment with SGLang.")
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="The Python of an environment with vLLM.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Long prompts a second.")] = 200.0,
    duration: Annotated[float, typer.Option(help="Of the long prompts, in seconds.")] = 15.0,
    processes: Annotated[
        int | None, typer.Option(help="Client processes for the long prompts; default: its own.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
) -> None:
    """Measure the client: punctuality, stamps, CPU time a token.

    Example: python -m replay.bench --sglang-python ENV/bin/python --vllm-python ENV/bin/python
    """
    folder = Path(tempfile.mkdtemp(prefix="replay-bench-"))
    try:
        record: dict[str, Any] = {
            "punctuality": _punctuality(folder, rate, duration, processes),
            "cpu_us_a_token": {},
        }
        own = Path(sys.executable)
        clients: list[tuple[str, Path | None]] = [
            ("deltaserve sglang", own),
            ("sglang.bench_serving", sglang_python),
            ("deltaserve openai", own),
            ("vllm bench serve", vllm_python),
        ]
        for client, python in clients:
            if python is None:
                continue
            if not python.exists():
                raise InputError(f"{python}: no such file; expected an environment's Python")
            record["cpu_us_a_token"][client] = _cost(folder, client, python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if output:
        output.write_bytes(text)
    print(text.decode(), end="")


if __name__ == "__main__":
    try:
        typer.run(main)
    except InputError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)

"""`python -m replay.bench.beside_aiperf URL`: one load on one server, by this client and by AIPerf.

Writes made coding sessions as a Weka folder, which both tools read, and replays it twice against
the server at URL, which has to be idle otherwise: with AIPerf's scenario `inferencex-agentx-mvp`,
and with our preset `agentx`, which follows that scenario's rules. Prints the figures that mean the
same in both. A real corpus has prompts of 100,000 tokens, which a CPU cannot serve: hence made
sessions, short enough for hundreds of turns in the 15 minutes that the scenario asks for at least.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import orjson
import typer

from replay.files import write_json
from replay.results import read_results

_BLOCK_SIZE = 64
_SESSIONS = 200
_TURNS = (8, 16)
_FIRST_TOKENS = (2000, 4000)
_NEW_TOKENS = (256, 512)
_OUTPUT_TOKENS = (32, 96)
_THINK_S = (1.0, 4.0)
_API_TIME_S = 0.5
_DRAIN_S = 60


@dataclass(frozen=True, slots=True)
class Figures:
    """What a client reports of a window: its length and times in seconds, its answers' tokens."""

    requests: int
    ttft_p50: float
    ttft_p90: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_p50: float


def write_corpus(folder: Path, seed: int) -> None:
    """Made sessions in Weka's format, a file each: times in seconds, lengths in tokens, one hash id
    a full block of 64 tokens. Every prompt begins with the one before it."""
    folder.mkdir(parents=True)
    draw = random.Random(seed)
    for number in range(_SESSIONS):
        requests = []
        at, length, think_s = 0.0, draw.randint(*_FIRST_TOKENS), 0.0
        for _ in range(draw.randint(*_TURNS)):
            output = draw.randint(*_OUTPUT_TOKENS)
            requests.append(
                {
                    "t": round(at, 3),
                    "type": "s",
                    "model": "made",
                    "in": length,
                    "out": output,
                    "hash_ids": list(range(1, length // _BLOCK_SIZE + 1)),
                    "input_types": ["text"],
                    "output_types": ["text"],
                    "stop": "end_turn",
                    "api_time": _API_TIME_S,
                    "think_time": think_s,
                }
            )
            length += output + draw.randint(*_NEW_TOKENS)
            think_s = round(draw.uniform(*_THINK_S), 3)
            at += _API_TIME_S + think_s
        session = {
            "id": f"made_{number:04d}",
            "models": ["made"],
            "block_size": _BLOCK_SIZE,
            "hash_id_scope": "local",
            "tool_tokens": 0,
            "system_tokens": 0,
            "requests": requests,
        }
        (folder / f"made_{number:04d}.json").write_bytes(orjson.dumps(session))


def _figures(rows: list[tuple[float, float, int, int]]) -> Figures:
    """Of answered requests: seconds at which each was sent, seconds to its first token after that,
    tokens of prompt and answer. The window is from the first one sent to the last one sent."""
    sent, ttft, prompts, answers = zip(*rows, strict=True)
    window_s = max(sent) - min(sent)
    return Figures(
        requests=len(rows),
        ttft_p50=float(np.quantile(ttft, 0.5)),
        ttft_p90=float(np.quantile(ttft, 0.9)),
        requests_per_s=len(rows) / window_s,
        output_tokens_per_s=sum(answers) / window_s,
        input_tokens_p50=float(np.median(prompts)),
    )


def of_ours(output: Path) -> Figures:
    """The measured window of a replay."""
    rows = []
    for result in read_results(output):
        if result.phase != "measure" or result.error is not None:
            continue
        sent_s, first_s = result.sent_s, result.first_token_s
        if sent_s is not None and first_s is not None:
            prompt = result.prompt_tokens or result.input_length
            rows.append((sent_s, first_s - sent_s, prompt, result.output_tokens))
    return _figures(rows)


def of_aiperf(output: Path) -> Figures:
    """The profiling phase of an AIPerf run, from its records."""
    rows = []
    for line in (output / "profile_export.jsonl").read_bytes().splitlines():
        record = orjson.loads(line)
        about, metrics = record["metadata"], record["metrics"]
        if about["benchmark_phase"] != "profiling" or "time_to_first_token" not in metrics:
            continue
        sent_s = about["request_start_ns"] / 1e9
        ttft_s = metrics["time_to_first_token"]["value"] / 1e3
        tokens = [
            int(metrics[name]["value"])
            for name in ("input_sequence_length", "output_sequence_length")
        ]
        rows.append((sent_s, ttft_s, tokens[0], tokens[1]))
    return _figures(rows)


def _run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def main(
    url: Annotated[str, typer.Argument(help="The server; it has to be idle otherwise.")],
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    tokenizer: Annotated[Path, typer.Option(help="The model's folder.")],
    output: Annotated[Path, typer.Option(help="Folder for both runs.")],
    aiperf: Annotated[str, typer.Option(help="AIPerf's command.")] = "aiperf",
    sessions: Annotated[int, typer.Option(help="Sessions in flight.")] = 4,
    seconds: Annotated[int, typer.Option(help="Length of each window.")] = 900,
    cpus: Annotated[
        str | None,
        typer.Option(help="Cores for the clients, as 1 or 2,3: others than the server's."),
    ] = None,
    seed: int = 0,
) -> None:
    """Run one load through AIPerf, then through this client, and compare."""
    if cpus is not None:
        os.sched_setaffinity(
            0, {int(cpu) for cpu in cpus.split(",")}
        )  # child processes have it too
    corpus = output / "corpus"
    write_corpus(corpus, seed)
    theirs_out, own_out, trace = output / "aiperf", output / "ours", output / "made.jsonl.zst"
    # The scenario vouches for named collections only: a folder has to be let pass.
    _run(
        f"{aiperf} profile --scenario inferencex-agentx-mvp --url {url} --model {model}"
        f" --tokenizer {tokenizer} --endpoint-type chat --streaming --use-server-token-count"
        f" --input-file {corpus} --custom-dataset-type weka_trace --extra-inputs ignore_eos:true"
        f" --concurrency {sessions} --benchmark-duration {seconds} --random-seed {seed}"
        f" --artifact-dir {theirs_out} --ui none --unsafe-override"
    )
    deltaserve = f"{sys.executable} -m deltaserve"
    _run(f"{deltaserve} replay convert --format weka {corpus} --output {trace}")
    _run(
        f"{deltaserve} replay run {trace} --url {url} --output {own_out} --preset agentx"
        f" --api chat --no-splice-outputs --start-share 0 0.99 --warm-up-s 0"
        f" --measure-s {seconds} --drain-s {_DRAIN_S}"
        f" --max-inflight-sessions {sessions} --seed {seed}"
    )
    both = {"AIPerf": of_aiperf(theirs_out), "deltaserve": of_ours(own_out)}
    write_json(output / "figures.json", {name: asdict(figures) for name, figures in both.items()})
    theirs, own = both.values()
    print(f"{'':22}{'AIPerf':>12}{'deltaserve':>12}{'ratio':>8}")
    for field in fields(Figures):
        a, b = getattr(theirs, field.name), getattr(own, field.name)
        print(f"{field.name:22}{a:12.4g}{b:12.4g}{b / a:8.3f}")


if __name__ == "__main__":
    typer.run(main)

"""`python -m replay.bench.beside_aiperf URL`: one load on one server, by this client and by AIPerf.

Writes made coding sessions as a Weka folder, which both tools read, and replays it twice against
the server at URL, which has to be idle otherwise: with AIPerf's scenario `inferencex-agentx-mvp`,
and with our preset `agentx`, which follows that scenario's rules. Prints the figures that mean the
same in both. A real corpus has prompts of 100,000 tokens, which a CPU cannot serve: hence made
sessions, short enough for hundreds of turns in the 15 minutes that the scenario asks for at least.

Two runs are never of the same requests. Where URL is a deltaserve router, `--decisions` compares
what each client says of its requests with what the router saw of the same ones.
"""

from __future__ import annotations

import math
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
# A shared machine's speed drifts over minutes: what is resampled for an interval is a minute.
_BLOCK_S = 60.0
_RESAMPLES = 200

# Turns that cost a server about the same, so that their TTFT says whether it was the same server.
_LIKE_NEW_TOKENS = (450, 600)


@dataclass(frozen=True, slots=True)
class Answered:
    """One answered request: when it was sent (s), seconds from then to its first token and from
    that to its last one, tokens of the prompt, of it those from the cache, and of the answer."""

    sent_s: float
    ttft_s: float
    decode_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    name: str = ""
    """By which a router before the server knows the request: its id, or that of the decision."""

    @property
    def latency_s(self) -> float:
        return self.ttft_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Beside:
    """The medians of a client's requests, over those that the router has of the same ones; and how
    many of them the router has."""

    requests: int
    seen: int
    ttft_p50: float
    latency_p50: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a client reports of a window, times in seconds: `itl_p50` is of the requests' means,
    `ttft_p50_like` of the turns with 450 to 600 new tokens."""

    requests: int
    ttft_p50: float
    ttft_p90: float
    ttft_p50_like: float
    itl_p50: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_p50: float
    cached_share: float


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


def figures_of(answered: list[Answered]) -> Figures:
    """The window is from the first request sent to the last one."""
    ttft = [one.ttft_s for one in answered]
    few, many = _LIKE_NEW_TOKENS
    like = [x.ttft_s for x in answered if few <= x.prompt_tokens - x.cached_tokens < many]
    sent = [one.sent_s for one in answered]
    window_s = max(sent) - min(sent)
    prompts = [one.prompt_tokens for one in answered]
    return Figures(
        requests=len(answered),
        ttft_p50=float(np.quantile(ttft, 0.5)),
        ttft_p90=float(np.quantile(ttft, 0.9)),
        ttft_p50_like=float(np.median(like)) if like else math.nan,
        itl_p50=float(np.median([x.decode_s / max(1, x.output_tokens - 1) for x in answered])),
        requests_per_s=len(answered) / window_s,
        output_tokens_per_s=sum(one.output_tokens for one in answered) / window_s,
        input_tokens_p50=float(np.median(prompts)),
        cached_share=sum(one.cached_tokens for one in answered) / sum(prompts),
    )


def _minutes(answered: list[Answered]) -> list[list[Answered]]:
    """The requests of each minute in which some were sent."""
    minutes: dict[int, list[Answered]] = {}
    for one in answered:
        minutes.setdefault(int(one.sent_s // _BLOCK_S), []).append(one)
    return list(minutes.values())


def _ttft_ratio(first: list[Answered], second: list[Answered]) -> float:
    """TTFT of `second` over that of `first` in the median request of `first`, by least absolute
    deviations: of what the prompt costs, and of one figure for the client."""
    both = first + second
    prompts = np.array([one.prompt_tokens for one in both], float) / 1e3
    new = prompts - np.array([one.cached_tokens for one in both], float) / 1e3
    is_second = np.arange(len(both)) >= len(first)
    cost = np.stack([np.ones(len(both)), new, prompts, new * prompts, new**2, is_second], axis=1)
    ttft = np.array([one.ttft_s for one in both])
    fitted = np.zeros(cost.shape[1])
    # Reweighted least squares; a deviation below 1 ms counts as 1 ms.
    for _ in range(25):
        weights = 1 / np.sqrt(np.maximum(np.abs(ttft - cost @ fitted), 1e-3))
        fitted = np.linalg.lstsq(cost * weights[:, None], ttft * weights, rcond=None)[0]
    alike = float(np.median((cost[:, :-1] @ fitted[:-1])[: len(first)]))
    return 1 + float(fitted[-1]) / alike


def ttft_at_equal_work(
    first: list[Answered], second: list[Answered], seed: int = 0
) -> tuple[float, float, float]:
    """TTFT of `second` over that of `first` for prompts of the same length with as many tokens from
    the cache: two clients draw other sessions, so their medians are of other work. With its 95 %
    interval, from minutes drawn again: the machine's speed is not the same in all of them."""
    draw = random.Random(seed)
    minutes = [_minutes(answered) for answered in (first, second)]
    ratios = []
    for _ in range(_RESAMPLES):
        drawn = [draw.choices(some, k=len(some)) for some in minutes]
        ratios.append(_ttft_ratio(*([one for part in some for one in part] for some in drawn)))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return _ttft_ratio(first, second), float(low), float(high)


def of_ours(output: Path) -> list[Answered]:
    """The measured window of a replay."""
    answered = []
    for result in read_results(output):
        if result.phase != "measure" or result.error is not None:
            continue
        sent_s, first_s, finished_s = result.sent_s, result.first_token_s, result.finished_s
        if sent_s is not None and first_s is not None and finished_s is not None:
            answered.append(
                Answered(
                    sent_s=sent_s,
                    ttft_s=first_s - sent_s,
                    decode_s=finished_s - first_s,
                    prompt_tokens=result.prompt_tokens or result.input_length,
                    cached_tokens=result.cached_tokens or 0,
                    output_tokens=result.output_tokens,
                    name=result.decision_id or "",
                )
            )
    return answered


def of_aiperf(output: Path) -> list[Answered]:
    """The profiling phase of an AIPerf run, from its records."""
    answered = []
    for line in (output / "profile_export.jsonl").read_bytes().splitlines():
        record = orjson.loads(line)
        about = record["metadata"]
        metrics = {name: found["value"] for name, found in record["metrics"].items()}
        if about["benchmark_phase"] != "profiling" or "time_to_first_token" not in metrics:
            continue
        ttft_s = metrics["time_to_first_token"] / 1e3
        answered.append(
            Answered(
                sent_s=about["request_start_ns"] / 1e9,
                ttft_s=ttft_s,
                decode_s=metrics["request_latency"] / 1e3 - ttft_s,
                prompt_tokens=int(metrics["input_sequence_length"]),
                cached_tokens=int(metrics.get("usage_prompt_cache_read_tokens", 0)),
                output_tokens=int(metrics["output_sequence_length"]),
                name=about.get("x_request_id") or "",
            )
        )
    return answered


def of_router(log: Path) -> dict[str, tuple[float, float]]:
    """From a router's decision log: seconds from a request's headers to its first token and to its
    end, by the request's own id and by its decision's."""
    asked: dict[str, str] = {}
    seen: dict[str, tuple[float, float]] = {}
    for line in log.read_bytes().splitlines():
        event = orjson.loads(line)
        if event["event"] == "decision":
            asked[event["decision_id"]] = event["request_id"]
        elif event["event"] == "finish" and event["client_first_token_s"] is not None:
            first_s = event["client_first_token_s"]
            end_s = first_s + event["duration_s"] - event["first_token_s"]
            decision = event["decision_id"]
            seen[decision] = seen[asked.get(decision, decision)] = (first_s, end_s)
    return seen


def beside_router(answered: list[Answered], seen: dict[str, tuple[float, float]]) -> Beside:
    """What a client says of its requests, over what the router saw of the same."""
    both = [(one, seen[one.name]) for one in answered if one.name in seen]
    return Beside(
        requests=len(answered),
        seen=len(both),
        ttft_p50=float(
            np.median([one.ttft_s for one, _ in both]) / np.median([it[0] for _, it in both])
        ),
        latency_p50=float(
            np.median([one.latency_s for one, _ in both]) / np.median([it[1] for _, it in both])
        ),
    )


def _cores(text: str) -> set[int]:
    """Cores as `1` or `2,3`. Raises `typer.BadParameter` for anything else, or one that there is
    not."""
    try:
        cores = {int(core) for core in text.split(",")}
    except ValueError:
        raise typer.BadParameter(f"--cpus {text}: expected numbers, as in 1 or 2,3") from None
    if not cores <= os.sched_getaffinity(0):
        raise typer.BadParameter(f"--cpus {text}: this process may not use all of them")
    return cores


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


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
    decisions: Annotated[
        Path | None, typer.Option(help="Decision log of the router at URL, where it is one.")
    ] = None,
    seed: int = 0,
) -> None:
    """Run one load through AIPerf, then through this client, and compare."""
    if cpus is not None:
        os.sched_setaffinity(0, _cores(cpus))  # child processes have it too
    corpus = output / "corpus"
    write_corpus(corpus, seed)
    theirs_out, own_out, trace = output / "aiperf", output / "ours", output / "made.jsonl.zst"
    theirs = [*shlex.split(aiperf), "profile", "--scenario", "inferencex-agentx-mvp"]
    theirs += ["--url", url, "--model", model, "--tokenizer", str(tokenizer)]
    theirs += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
    theirs += ["--input-file", str(corpus), "--custom-dataset-type", "weka_trace"]
    theirs += ["--extra-inputs", "ignore_eos:true", "--random-seed", str(seed)]
    theirs += ["--concurrency", str(sessions), "--benchmark-duration", str(seconds)]
    # The scenario vouches for named collections only: a folder has to be let pass.
    theirs += ["--artifact-dir", str(theirs_out), "--ui", "none", "--unsafe-override"]
    # It reads the server's metrics three times a second unless told not to: load that this client
    # does not put on the server.
    _run(*theirs, "--no-server-metrics", "--no-gpu-telemetry")
    ours = [sys.executable, "-m", "deltaserve", "replay"]
    _run(*ours, "convert", "--format", "weka", corpus, "--output", trace)
    ours += ["run", str(trace), "--url", url, "--output", str(own_out), "--preset", "agentx"]
    ours += ["--api", "chat", "--no-splice-outputs", "--start-share", "0", "0.99"]
    ours += ["--warm-up-s", "0", "--measure-s", str(seconds), "--drain-s", str(_DRAIN_S)]
    _run(*ours, "--max-inflight-sessions", sessions, "--seed", seed)
    theirs_answered, own_answered = of_aiperf(theirs_out), of_ours(own_out)
    both = {"AIPerf": figures_of(theirs_answered), "deltaserve": figures_of(own_answered)}
    ratio, low, high = ttft_at_equal_work(theirs_answered, own_answered)
    equal_work = {"ratio": ratio, "low": low, "high": high}
    by_client = {name: asdict(figures) for name, figures in both.items()}
    seen = of_router(decisions) if decisions else {}
    answered_by = {"AIPerf": theirs_answered, "deltaserve": own_answered}
    of_same = {name: beside_router(of, seen) for name, of in answered_by.items() if seen}
    beside = {name: asdict(found) for name, found in of_same.items()}
    found = {**by_client, "ttft_at_equal_work": equal_work, "beside_router": beside}
    write_json(output / "figures.json", found)
    first, second = both.values()
    print(f"{'':22}{'AIPerf':>12}{'deltaserve':>12}{'ratio':>8}")
    for field in fields(Figures):
        a, b = getattr(first, field.name), getattr(second, field.name)
        print(f"{field.name:22}{a:12.4g}{b:12.4g}{b / a:8.3f}")
    print(f"{'ttft at equal work':46}{ratio:8.3f}  95 % interval {low:.3f} to {high:.3f}")
    for name, of in of_same.items():
        print(
            f"{name}, over the router: {of.seen} of {of.requests} requests, "
            f"ttft p50 {of.ttft_p50:.3f}, latency p50 {of.latency_p50:.3f}"
        )


if __name__ == "__main__":
    typer.run(main)

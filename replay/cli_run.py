"""`deltaserve replay run`: its flags, presets and exit codes."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from replay.options import INTERRUPTED, NOTHING_ANSWERED, START_SHARE


class Mode(StrEnum):
    open = "open"
    closed = "closed"
    sessions = "sessions"


class Where(StrEnum):
    cold = "cold"
    mid = "mid"


class ApiChoice(StrEnum):
    auto = "auto"
    sglang = "sglang"
    openai = "openai"
    chat = "chat"


class Preset(StrEnum):
    agentx = "agentx"
    think_10 = "think-10"
    think_60 = "think-60"


def run(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="The trace to replay.")],
    url: Annotated[str, typer.Option(help="The server: an engine or a router.")],
    output: Annotated[Path, typer.Option(help="The run's folder.")],
    api: Annotated[
        ApiChoice,
        typer.Option(
            help="sglang: /generate; openai: /v1/completions; chat: /v1/chat/completions, as text; "
            "auto: what the server is.",
        ),
    ] = ApiChoice.auto,
    model: Annotated[
        str | None, typer.Option(help="The model's name; default: the server's first.")
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="open: at the trace's times; closed: so many conversations in flight; sessions: "
            "conversations arrive at random (--sessions-per-hour), turns follow think times."
        ),
    ] = Mode.open,
    max_inflight_sessions: Annotated[
        int, typer.Option(help="Closed loop: conversations in flight at a time.")
    ] = 8,
    sessions_per_hour: Annotated[
        float | None, typer.Option(help="Mode sessions: conversations that arrive in an hour.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Trace seconds that pass in one second (2: twice as fast).")
    ] = 1.0,
    think_scale: Annotated[float, typer.Option(help="Factor for think times; 0 drops them.")] = 1.0,
    max_think_s: Annotated[
        float | None, typer.Option(help="Longest think time, in seconds.")
    ] = None,
    request_limit: Annotated[
        int | None, typer.Option(help="Send only the first so many requests.")
    ] = None,
    session_limit: Annotated[
        int | None,
        typer.Option(help="Send only the first so many conversations (sub-agents included)."),
    ] = None,
    length_scale: Annotated[
        float,
        typer.Option(help="Factor (≤ 1) for input and output lengths; block sharing is kept."),
    ] = 1.0,
    max_input_tokens: Annotated[
        int | None,
        typer.Option(help="Cut a session at its first prompt longer than this, after scaling."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Token ids are below this; default: the served model's vocabulary."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the prompts' tokens, starts, order and arrivals.")
    ] = 0,
    prompt_seed: Annotated[
        int | None,
        typer.Option(help="Of the prompts' tokens alone; default: --seed."),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="agentx: AIPerf's rules for agents' traces; think-10, think-60: think times cut "
            "at so many seconds. Flags given beside it count first."
        ),
    ] = None,
    start: Annotated[
        Where,
        typer.Option(
            help="mid: the first conversations begin in the middle, their prefixes primed; cold: "
            "at their first turn."
        ),
    ] = Where.cold,
    start_share: Annotated[
        tuple[float, float],
        typer.Option(help="Start mid: after a share of the requests drawn between these two."),
    ] = START_SHARE,
    prime_parallel: Annotated[
        int | None,
        typer.Option(help="Conversations primed at a time; default: an eighth of those in flight."),
    ] = None,
    prime_timeout_s: Annotated[
        float,
        typer.Option(
            help="A conversation goes on after so many seconds though its priming is not answered: "
            "a server that admits only what fits answers some of them much later."
        ),
    ] = 60.0,
    warm_up_s: Annotated[
        float | None, typer.Option(help="Seconds between priming and the measured window.")
    ] = None,
    measure_s: Annotated[
        float | None, typer.Option(help="Length of the measured window, in seconds.")
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(
            help="Longest wait after the window for what was measured; default: --timeout-s."
        ),
    ] = None,
    recycle: Annotated[
        bool,
        typer.Option(
            "--recycle", help="When the trace runs out play it again, with other prompts."
        ),
    ] = False,
    recycle_start: Annotated[
        Where, typer.Option(help="Where conversations begin that follow on the first.")
    ] = Where.cold,
    record_output_ids: Annotated[
        bool, typer.Option(help="Keep the generated tokens in the results.")
    ] = False,
    splice_outputs: Annotated[
        bool,
        typer.Option(
            help="Put generated answers into later prompts, in place of the trace's stand-ins."
        ),
    ] = False,
    as_text: Annotated[
        bool, typer.Option("--text", help="Send words in place of token ids.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="For one request, in seconds.")] = 600.0,
    headers: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            help="NAME=VALUE of every request's head, as in 'Authorization=Bearer @API_KEY': "
            "@VARIABLE is read from the environment, which the process list does not show.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Client processes that share the schedule; default: by load and cores."),
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with the run in --output: send what has no good result.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a trace against a server and record every request.

    Exit codes: 0; 2 for wrong input; 3 where every request failed; 130 when interrupted.

    Example: deltaserve replay run trace.jsonl --url http://127.0.0.1:8000 --output out/run1
    --mode closed --max-inflight-sessions 4
    """
    from replay.options import RunOptions, preset_values
    from replay.runner import run as replay_run
    from replay.tables import summary_lines

    values = {name: _plain(value) for name, value in context.params.items()}
    for name in ("preset", "as_json"):
        del values[name]
    if preset is not None:
        given = {name: value for name, value in values.items() if _was_given(context, name)}
        values |= preset_values(preset.value, given)
    values["url"] = url.rstrip("/")
    values["headers"] = tuple(headers or ())
    summary = replay_run(RunOptions(**values))
    if as_json:
        sys.stdout.write(orjson.dumps(summary, option=orjson.OPT_APPEND_NEWLINE).decode())
    else:
        print("\n".join(summary_lines(summary)))
        print(f"results in {output}")
    if summary["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not summary["ok"]:
        raise typer.Exit(NOTHING_ANSWERED)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"

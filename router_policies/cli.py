"""The command line of the router: ``deltaserve route`` and ``deltaserve policy``.

Owns how flags become a configuration. What a configuration may say, and everything that happens
once it is complete, is the Rust core's business.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deltaserve.errors import InputError
from router_policies import _core, watch
from router_policies.policy import describe as describe_policy
from router_policies.policy import load as load_policy


class _RouteGroup(TyperGroup):
    """Takes the worker flags of SGLang's router too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translate_worker_flags(args))


route_app = typer.Typer(cls=_RouteGroup, add_completion=False, rich_markup_mode=None)
policy_app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _speed(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # JSON has no word for it
        raise ValueError(text)
    return value


# SGLang's own default (0.5.17), which a prefill worker listens on that was told no other.
_DEFAULT_BOOTSTRAP_PORT = 8998

_WORKER_FIELDS: dict[str, Callable[[str], Any]] = {
    "role": str,
    "engine": str,
    "id": str,
    "bootstrap_host": str,
    "bootstrap_port": int,
    "kv_capacity_tokens": int,
    "host_kv_tokens": int,
    "page_size": int,
    "prefix_cache": _flag,
    "kv_connector": str,
    "kv_events": str,
    "kv_events_replay": str,
    "api_key": str,
    "prefill_tokens_per_s": _speed,
    "paced_prefill_tokens_per_s": _speed,
    "abort_queued": _flag,
}


def _names_policy(config: Path | None) -> bool:
    """Whether the file, which has been read without errors, says which policy it wants."""
    return config is not None and "policy" in tomllib.loads(config.read_text())


def parse_worker(text: str) -> dict[str, Any]:
    """A worker from ``URL[,key=value...]``; raises InputError."""
    url, *pairs = text.split(",")
    worker: dict[str, Any] = {"url": url}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator and key in ("colocated", "prefill", "decode", "elastic"):
            key, value = "role", pair
        if key not in _WORKER_FIELDS:
            known = ", ".join(_WORKER_FIELDS)
            raise InputError(f"--worker {text}: {key}: unknown field; known: {known}")
        try:
            worker[key] = _WORKER_FIELDS[key](value)
        except ValueError:
            raise InputError(f"--worker {text}: {key}: expected a number, not {value!r}") from None
        except KeyError:
            message = f"--worker {text}: {key}: expected true or false, not {value!r}"
            raise InputError(message) from None
    return worker


def translate_worker_flags(arguments: list[str]) -> list[str]:
    """``--worker-urls URL...``, ``--prefill URL [PORT]`` and ``--decode URL`` as ``--worker``;
    raises InputError."""
    translated: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, separator, value = argument.partition("=")
        if flag not in ("--worker-urls", "--prefill", "--decode"):
            translated.append(argument)
            continue
        values = [value] if separator else []
        while rest and not rest[0].startswith("-"):
            values.append(rest.pop(0))
        if not values or not values[0]:
            raise InputError(f"{flag}: expected URL{_EXPECTED_AFTER_URL.get(flag, '')}")
        translated += [
            word for worker in _workers_of(flag, values) for word in ("--worker", worker)
        ]
    return translated


_EXPECTED_AFTER_URL = {"--prefill": " [BOOTSTRAP_PORT]", "--worker-urls": "..."}


def _workers_of(flag: str, values: list[str]) -> list[str]:
    if flag == "--worker-urls":
        return values
    url, *more = values
    if flag == "--decode":
        if more:
            raise InputError(f"--decode {' '.join(values)}: expected one URL")
        return [f"{url},role=decode"]
    port = more[0] if more else "none"
    if port.lower() == "none":
        port = str(_DEFAULT_BOOTSTRAP_PORT)
    if len(more) > 1 or not port.isdecimal():
        raise InputError(
            f"--prefill {' '.join(values)}: expected URL [BOOTSTRAP_PORT] (the worker's "
            f"--disaggregation-bootstrap-port; without one it is {_DEFAULT_BOOTSTRAP_PORT})"
        )
    return [f"{url},role=prefill,bootstrap_port={port}"]


@route_app.callback(invoke_without_command=True)
def route(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="A router.toml; flags given too override it.")
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(
            help="URL[,role=..,engine=..,bootstrap_port=..,id=..,page_size=..,"
            "kv_capacity_tokens=..]; repeat for each worker."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="See: deltaserve policy list; or package.module:Class.")
    ] = None,
    policy_param: Annotated[
        list[str] | None, typer.Option(help="key=value; repeat for each parameter.")
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="See: deltaserve policy explain admission."),
    ] = None,
    admission_param: Annotated[
        list[str] | None, typer.Option(help="key=value; repeat for each parameter.")
    ] = None,
    worker_urls: Annotated[
        list[str] | None,
        typer.Option(metavar="URL...", help="Workers that prefill and decode (SGLang's router)."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL [PORT]",
            help="A prefill worker and its bootstrap port (8998 if none is given); repeat.",
        ),
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A decode worker; repeat.")
    ] = None,
    pd_disaggregation: Annotated[
        bool,
        typer.Option(
            "--pd-disaggregation",
            help="Says that there are --prefill and --decode workers, which is known without it.",
        ),
    ] = False,
    prefill_policy: Annotated[
        str | None,
        typer.Option(help="As --decode-policy: one policy chooses both workers here."),
    ] = None,
    decode_policy: Annotated[str | None, typer.Option(help="As --prefill-policy.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    picker_port: Annotated[
        int | None,
        typer.Option(
            help="Port for gateways that ask where requests go (ext_proc); 0 takes a free one."
        ),
    ] = None,
    decision_log: Annotated[
        Path | None, typer.Option(help="Append decision and finish events to this file.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Write a trace of what goes by to this file, for deltaserve replay."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The model's tokenizer.json, or its folder: text prompts are routed by tokens."
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Send traces to this OpenTelemetry collector (OTLP/HTTP)."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Start nothing: exit with 2 where the router would not start, or could place no "
            "request with all of its workers up; with 1 where a worker's health check is not well.",
        ),
    ] = False,
) -> None:
    """Run the router until Ctrl-C or SIGTERM.

    \b
    Examples:
      deltaserve route --config router.toml
      deltaserve route --policy unified --worker http://127.0.0.1:30000
      deltaserve route --prefill http://127.0.0.1:30000 8998 --decode http://127.0.0.1:30001
      deltaserve route top http://127.0.0.1:8000

    With prefill workers and no --policy, the policy is pd. docs/router.md has the settings of
    router.toml.
    """
    del worker_urls, prefill, decode  # shown in the help; _RouteGroup made them --worker flags
    if context.invoked_subcommand is not None:
        return
    try:
        settings: dict[str, Any] = json.loads(_core.load_config(config)) if config else {}
    except ValueError as error:
        raise InputError(str(error)) from None
    workers = [parse_worker(text) for text in worker or []]
    if workers:
        settings["workers"] = workers
    policy = _one_policy(policy, prefill_policy, decode_policy)
    given_flags = (
        ("policy", policy),
        ("host", host),
        ("port", port),
        ("otlp_endpoint", otlp_endpoint),
    )
    for key, value in given_flags:
        if value is not None:
            settings[key] = value
    if picker_port is not None:
        settings["picker"] = (settings.get("picker") or {}) | {"port": picker_port}
    if policy is not None:
        settings.pop("policy_params", None)
    if policy_param:
        settings["policy_params"] = dict(
            _parse_param("--policy-param", text) for text in policy_param
        )
    if admission is not None:
        settings["admission"] = {"rule": admission}
    if admission_param:
        given = dict(_parse_param("--admission-param", text) for text in admission_param)
        settings["admission"] = (settings.get("admission") or {}) | given
    files = (("decision_log", decision_log), ("record", record), ("tokenizer", tokenizer))
    for key, path in files:
        if path is not None:
            settings[key] = str(path)
    roles = {worker.get("role") for worker in settings.get("workers", [])}
    if pd_disaggregation and not ("prefill" in roles and roles & {"decode", "elastic"}):
        raise InputError("--pd-disaggregation: expected --prefill and --decode workers")
    has_prefill = any(worker.get("role") == "prefill" for worker in workers)
    if has_prefill and policy is None and not _names_policy(config):
        settings["policy"] = "pd"
    decide = None
    if ":" in settings.get("policy", ""):
        _find_modules_here()
        decide = load_policy(settings["policy"], settings.pop("policy_params", None) or {})
    try:
        if check:
            unreached = _core.check(json.dumps(settings), decide)
            for line, _ in unreached:
                print(line, file=sys.stderr)
            if not all(may_start for _, may_start in unreached):
                raise typer.Exit(1)
            return
        _raise_open_files()
        scheme = "https" if settings.get("tls_cert_file") else "http"
        _core.serve(
            json.dumps(settings),
            lambda address, picker: _announce(f"{scheme}://{address}", picker),
            decide,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    except KeyboardInterrupt:
        # Python saw the Ctrl-C too; the router has ended in good order by now.
        return


_Token = Annotated[
    str | None,
    typer.Option(
        envvar="DELTASERVE_ADMIN_TOKEN",
        help="The router's admin token, or one of its keys where it has none.",
    ),
]


@route_app.command()
def top(
    url: Annotated[str, typer.Argument(help="The router, http://HOST:PORT.")],
    token: _Token = None,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, help="Show them again every so many seconds, until Ctrl-C."),
    ] = None,
) -> None:
    """Show a running router's sessions: who has a place where, who waits, since when and why.

    Example: deltaserve route top http://127.0.0.1:8000 --interval 2
    """
    watch.top(url, token, interval)


@route_app.command()
def trace(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    url: Annotated[str, typer.Option(help="The router, http://HOST:PORT.")],
    token: _Token = None,
) -> None:
    """Show a session's last turns: how long each waited, what was new, cached and recomputed.

    Example: deltaserve route trace SESSION --url http://127.0.0.1:8000
    """
    watch.trace(session, url, token)


def _find_modules_here() -> None:
    """Lets a user's own policy be imported from the working folder, which is else left out."""
    sys.path.insert(0, "")


def _raise_open_files() -> None:
    """Raises the limit on open files to what this process may have.

    A request holds two sockets, three where it is separated: the usual limit of 1,024 is reached
    long before `max_inflight`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _one_policy(policy: str | None, of_prefill: str | None, of_decode: str | None) -> str | None:
    """The policy that chooses both workers of a pair; raises InputError where they differ."""
    if of_prefill is None and of_decode is None:
        return policy
    both = {of_prefill or policy, of_decode or policy}
    if len(both) == 1 and None not in both:
        return both.pop()
    raise InputError(
        "--prefill-policy, --decode-policy: one policy chooses both workers here: give the same "
        "name to both, or --policy alone (pd, for instance)"
    )


def _no_number(text: str) -> Any:
    raise ValueError(text)


def _parse_param(flag: str, text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise InputError(f"{flag} {text}: expected key=value")
    try:
        return key, json.loads(value, parse_constant=_no_number)  # nan is no number here
    except ValueError:
        return key, value


def _announce(url: str, picker: str | None) -> None:
    # One write: the router's threads log to the same stream, also where it is unbuffered.
    of_picker = f"deltaserve route: gateways ask at {picker}\n" if picker else ""
    sys.stderr.write(f"{of_picker}deltaserve route: listening on {url}\n")
    sys.stderr.flush()


@policy_app.command("list")
def list_policies(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """List the routing policies.

    Example: deltaserve policy list
    """
    policies = json.loads(_core.policies())
    if as_json:
        print(json.dumps({"policies": policies}))
        return
    width = max(len(policy["name"]) for policy in policies)
    for policy in policies:
        print(f"{policy['name']:<{width}}  {policy['summary']}")


@policy_app.command("explain")
def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="A policy's name, module:Class of one in Python, admission, or admission.RULE."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Explain a policy: its rule, parameters, source and what was measured.

    admission explains what decides which sessions take turns on which worker and who waits,
    admission.RULE one of its rules.

    Example: deltaserve policy explain unified
    """
    family, _, rule = name.partition(".")
    if family == "admission":
        _explain_admission(rule, as_json)
        return
    policies = {policy["name"]: policy for policy in json.loads(_core.policies())}
    if ":" in name:
        _find_modules_here()
        policies[name] = describe_policy(name)
    if name not in policies:
        raise InputError(f"policy {name}: unknown; known: {', '.join(policies)}")
    policy = policies[name]
    if as_json:
        print(json.dumps(policy))
        return
    print(f"{policy['name']}: {policy['summary']}\n")
    if policy["rule"]:
        print(f"rule      {policy['rule']}")
    _print_params(policy["params"])
    print(f"source    {policy['source']}")
    if policy["measured"]:
        print(f"measured  {policy['measured']}")


def _print_params(parameters: list[dict[str, str]]) -> None:
    for parameter in parameters:
        default = f" = {parameter['default']}" if parameter["default"] else ""
        meaning = f": {parameter['meaning']}" if parameter["meaning"] else ""
        print(f"param     {parameter['name']}{default}{meaning}")


def _explain_admission(name: str, as_json: bool) -> None:
    """All rules of admission, or the one called `name` where that is not empty."""
    admission = json.loads(_core.admission_rules())
    rules = {rule["name"]: rule for rule in admission["rules"]}
    if not name:
        if as_json:
            print(json.dumps(admission))
            return
        print(
            "admission: which sessions take turns on which worker, and which turns wait; beside "
            "every policy, where capacities are known\n"
        )
        width = max(len(rule) for rule in rules)
        for rule in rules.values():
            print(f"rule      {rule['name']:<{width}}  {rule['summary']}")
        _print_params(admission["settings"])
        print("\ndeltaserve policy explain admission.RULE explains one; docs/admission.md has more")
        return
    if name not in rules:
        raise InputError(f"policy admission.{name}: unknown; known rules: {', '.join(rules)}")
    rule = rules[name]
    if as_json:
        print(json.dumps(rule))
        return
    print(f"admission.{rule['name']}: {rule['summary']}\n")
    print(f"rule      {rule['rule']}")
    _print_params(rule["params"])
    print(f"source    {rule['source']}")

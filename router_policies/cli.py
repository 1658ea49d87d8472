"""The command line of the router: ``deltaserve route`` and ``deltaserve policy``.

Owns how flags become a configuration. What a configuration may say, and everything that happens
once it is complete, is the Rust core's business.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deltaserve.errors import InputError
from router_policies import _core
from router_policies.policy import load as load_policy


class _RouteGroup(TyperGroup):
    """Takes the worker flags of SGLang's router too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translate_worker_flags(args))


route_app = typer.Typer(cls=_RouteGroup, add_completion=False, rich_markup_mode=None)
policy_app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

_WORKER_FIELDS: dict[str, type[str] | type[int] | type[float]] = {
    "role": str,
    "engine": str,
    "id": str,
    "bootstrap_host": str,
    "bootstrap_port": int,
    "kv_capacity_tokens": int,
    "page_size": int,
    "kv_connector": str,
    "kv_events": str,
    "kv_events_replay": str,
    "prefill_tokens_per_s": float,
    "paced_prefill_tokens_per_s": float,
}


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
    return worker


def translate_worker_flags(arguments: list[str]) -> list[str]:
    """``--worker-urls URL...``, ``--prefill URL PORT`` and ``--decode URL`` as ``--worker`` flags;
    raises InputError."""
    translated: list[str] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        if flag == "--worker-urls":
            while rest and not rest[0].startswith("--"):
                translated += ["--worker", rest.pop(0)]
        elif flag == "--prefill":
            if len(rest) < 2 or not rest[1].isdecimal():
                raise InputError(f"--prefill {' '.join(rest[:2])}: expected URL BOOTSTRAP_PORT")
            url, port, *rest = rest
            translated += ["--worker", f"{url},role=prefill,bootstrap_port={port}"]
        elif flag == "--decode":
            if not rest:
                raise InputError("--decode: expected URL")
            translated += ["--worker", f"{rest.pop(0)},role=decode"]
        else:
            translated.append(flag)
    return translated


@route_app.callback(invoke_without_command=True)
def route(
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
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    decision_log: Annotated[
        Path | None, typer.Option(help="Append decision and finish events to this file.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="The model's tokenizer.json, or its folder: text prompts are routed by tokens."
        ),
    ] = None,
) -> None:
    """Run the router until Ctrl-C or SIGTERM.

    Example: deltaserve route --worker http://127.0.0.1:30000,role=prefill,bootstrap_port=8998
    --worker http://127.0.0.1:30001,role=decode --policy pd --port 8000

    The worker flags of SGLang's router work too: --worker-urls URL..., --prefill URL
    BOOTSTRAP_PORT, --decode URL. With prefill workers and no --policy, the policy is pd.
    """
    try:
        settings: dict[str, Any] = json.loads(_core.load_config(config)) if config else {}
    except ValueError as error:
        raise InputError(str(error)) from None
    workers = [parse_worker(text) for text in worker or []]
    if workers:
        settings["workers"] = workers
    for key, value in (("policy", policy), ("host", host), ("port", port)):
        if value is not None:
            settings[key] = value
    if policy is not None:
        settings.pop("policy_params", None)
    if policy_param:
        settings["policy_params"] = dict(_parse_param(text) for text in policy_param)
    for key, path in (("decision_log", decision_log), ("tokenizer", tokenizer)):
        if path is not None:
            settings[key] = str(path)
    if any(worker.get("role") == "prefill" for worker in workers):
        settings.setdefault("policy", "pd")
    decide = None
    if ":" in settings.get("policy", ""):
        sys.path.insert(0, "")  # the user's own module, from where the router was started
        decide = load_policy(settings["policy"], settings.pop("policy_params", None) or {})
    try:
        _core.serve(json.dumps(settings), _announce, decide)
    except ValueError as error:
        raise InputError(str(error)) from None
    except KeyboardInterrupt:
        # Python saw the Ctrl-C too; the router has ended in good order by now.
        return


def _parse_param(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator:
        raise InputError(f"--policy-param {text}: expected key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _announce(address: str) -> None:
    # One write: the router's threads log to the same stream, also where it is unbuffered.
    sys.stderr.write(f"deltaserve route: listening on http://{address}\n")
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
    name: Annotated[str, typer.Argument(help="A policy's name.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object to stdout.")] = False,
) -> None:
    """Explain a policy: its rule, parameters, source and what was measured.

    Example: deltaserve policy explain unified
    """
    policies = {policy["name"]: policy for policy in json.loads(_core.policies())}
    if name not in policies:
        raise InputError(f"policy {name}: unknown; known: {', '.join(policies)}")
    policy = policies[name]
    if as_json:
        print(json.dumps(policy))
        return
    print(f"{policy['name']}: {policy['summary']}\n")
    print(f"rule      {policy['rule']}")
    for parameter in policy["params"]:
        print(f"param     {parameter['name']} = {parameter['default']}: {parameter['meaning']}")
    print(f"source    {policy['source']}")
    print(f"measured  {policy['measured']}")

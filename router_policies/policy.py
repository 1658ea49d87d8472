"""Routing policies in Python: ``deltaserve route --policy package.module:Class``.

A policy is any class with ``decide(view)``; it is made once, with the configured parameters as
keyword arguments. It sees the same facts as the built-in policies and answers :class:`Local`,
:class:`PrefillDecode`, or None when no worker can take the request. It must not block: it runs
under the fleet's lock, and every other decision waits for it.

    class FewestTokens:
        def decide(self, view: View) -> Route | None:
            workers = view.local()
            if not workers:
                return None
            return Local(min(workers, key=lambda worker: worker.ongoing_tokens).slot)

The Rust core checks that the answer is a candidate, reserves, and logs the reason ``custom``.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from deltaserve.errors import InputError


@dataclass(frozen=True, slots=True)
class Rates:
    """Learnt speeds of one worker."""

    prefill_tokens_per_s: float
    attention_pairs_per_s: float
    paced_slowdown: float
    prefill_overhead_s: float
    transfer_tokens_per_s: float
    transfer_overhead_s: float
    decode_base_s: float
    decode_per_request_s: float
    decode_per_context_token_s: float


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker; see ``docs/policies.md`` for each field."""

    slot: int
    role: str
    routable: bool
    admits: bool
    serves_local: bool
    serves_prefill: bool
    serves_decode: bool
    transfer_group: int
    requests: int
    prefilling: int
    decoding: int
    pending_prefill_tokens: int
    prefill_wait_s: float
    decode_tokens: int
    arriving: int
    arriving_tokens: int
    ongoing_tokens: int
    held_tokens: int
    freed_tokens_per_s: float
    kept_tokens: int
    kv_capacity_tokens: int | None
    cached_tokens: int
    recent_migrations: int
    rates: Rates


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The request."""

    input_tokens: int
    expected_output_tokens: int
    has_session: bool
    turn: int
    affine: int | None
    prompts: int = 1


@dataclass(frozen=True, slots=True)
class View:
    """Everything a policy may look at."""

    workers: tuple[WorkerFacts, ...]
    request: RequestFacts
    sequence: int
    random: int
    separated_inflight: int

    def local(self) -> list[WorkerFacts]:
        """Workers that may serve the request alone."""
        return [w for w in self.workers if w.routable and w.admits and w.serves_local]

    def decode(self) -> list[WorkerFacts]:
        """Workers that may decode what another prefilled."""
        return [w for w in self.workers if w.routable and w.admits and w.serves_decode]

    def partners(self, decode: WorkerFacts) -> list[WorkerFacts]:
        """Workers that may prefill for `decode`."""
        return [
            worker
            for worker in self.workers
            if worker.routable
            and worker.serves_prefill
            and worker.transfer_group == decode.transfer_group
            and worker.slot != decode.slot
        ]


@dataclass(frozen=True, slots=True)
class Local:
    """Serve the request on one worker, by its slot."""

    worker: int


@dataclass(frozen=True, slots=True)
class PrefillDecode:
    """Prefill on one worker and decode on another, by their slots."""

    prefill: int
    decode: int


Route = Local | PrefillDecode


class Policy(Protocol):
    """What a policy class must have."""

    def decide(self, view: View) -> Route | None:
        """Chooses among the candidates of `view`; None when there is none."""


def load(name: str, params: dict[str, Any]) -> Callable[[str], str]:
    """The policy ``package.module:Class`` as the Rust core calls it; raises InputError."""
    policy_class = _class(name, f"--policy {name}")
    try:
        policy: Policy = policy_class(**params)
    except Exception as error:  # the user's own code may raise whatever it likes
        raise InputError(f"--policy {name}: {_in_one_line(error)}") from None
    if not callable(getattr(policy, "decide", None)):
        raise InputError(f"--policy {name}: expected a class with decide(view)")

    def decide(view: str) -> str:
        route = policy.decide(_view(view))
        if route is None:
            return "null"
        if isinstance(route, Local):
            return json.dumps({"kind": "local", "worker": route.worker})
        return json.dumps(
            {"kind": "prefill_decode", "prefill": route.prefill, "decode": route.decode}
        )

    return decide


def describe(name: str) -> dict[str, Any]:
    """The policy ``package.module:Class`` in the form that the built-in ones are described in, from
    its docstring and its constructor; what was measured of it nobody knows. Raises InputError."""
    policy_class = _class(name, f"policy {name}")
    if not callable(getattr(policy_class, "decide", None)):
        raise InputError(f"policy {name}: expected a class with decide(view)")
    summary, _, rule = (inspect.getdoc(policy_class) or "").partition("\n\n")
    try:
        parameters = inspect.signature(policy_class).parameters.values()
        source = inspect.getsourcefile(policy_class)
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"policy {name}: {_in_one_line(error)}") from None
    return {
        "name": name,
        "summary": " ".join(summary.split()) or "a class without a docstring",
        "rule": " ".join(rule.split()),
        "params": [
            {
                "name": parameter.name,
                "default": "" if parameter.default is parameter.empty else repr(parameter.default),
                "meaning": "" if parameter.default is not parameter.empty else "must be given",
            }
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ],
        "source": source or "",
        "measured": "",
    }


def _class(name: str, where: str) -> Any:
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise InputError(f"{where}: expected package.module:Class")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # the user's own code may raise whatever it likes
        raise InputError(f"{where}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    """The error with its type, unless its message says enough alone."""
    text = " ".join(str(error).split())
    if text and isinstance(error, ImportError | AttributeError | TypeError | InputError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _view(text: str) -> View:
    facts = json.loads(text)
    workers = tuple(
        WorkerFacts(**{**worker, "rates": Rates(**worker["rates"])}) for worker in facts["workers"]
    )
    return View(**{**facts, "workers": workers, "request": RequestFacts(**facts["request"])})

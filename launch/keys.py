"""The keys that engines ask for (``--api-key``), and what is done with them.

Owns where a key is found in a topology and in which variables our router is given it. Launch's
calls send keys as ``Authorization: Bearer``; none of it is written into a file or a command line
here, nor shown when a value of this module is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deltaserve.errors import InputError
from launch.topology import Topology, WorkerGroup

CLIENTS = "DELTASERVE_API_KEYS"
"""Of our router: the keys that clients need there (docs/router.md)."""


@dataclass(frozen=True)
class Keys:
    """What a server asks of who calls it. Any of `keys` will do; SGLang's calls that change an
    engine ask for `admin_key` where it has one."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)

    @property
    def key(self) -> str | None:
        """For what everybody may call who has a key."""
        return self.keys[0] if self.keys else None

    @property
    def to_change(self) -> str | None:
        """For calls that change the engine."""
        return self.admin_key or self.key


def engine_keys(topology: Topology, group: WorkerGroup) -> Keys:
    """What the workers of `group` ask for: their flags say it, vLLM's environment too."""
    flags = (*topology.flags, *group.flags)
    keys = _values(flags, "--api-key")
    if topology.engine.name == "sglang":
        admin = _values(flags, "--admin-api-key")
        return Keys(keys[:1], next(iter(admin), None))
    if not keys:
        environment = os.environ | topology.environment | group.environment
        keys = tuple(filter(None, [environment.get("VLLM_API_KEY")]))
    return Keys(keys)


def variable(worker_id: str) -> str:
    """The variable in which our router finds the key of that worker."""
    return f"DELTASERVE_{worker_id.replace('-', '_').upper()}_API_KEY"


def router_environment(where: str, workers: Mapping[str, Keys]) -> dict[str, str]:
    """What our router is given of the keys of `workers`, by id: those that it sends them, and, for
    its clients, all of them: who could not ask an engine shall not be able to by asking the router.
    Which clients it serves is left to `CLIENTS` where the caller has set that.

    Raises `InputError` for a key that the variable's form does not take, and where the caller has
    set `CLIENTS` without a key in it: our router does not start with that, and who sets it does not
    mean everybody.
    """
    if CLIENTS in os.environ and not router_keys({}).keys:
        raise InputError(
            f"{CLIENTS}: expected keys, separated by commas, found none (unset it: then clients "
            "need what the engines ask for)"
        )
    found = {variable(id_): keys.key for id_, keys in workers.items() if keys.key}
    everybody = dict.fromkeys(key for keys in workers.values() for key in keys.keys)
    if everybody and CLIENTS not in os.environ:
        if any("," in key or not key.isprintable() or " " in key for key in everybody):
            raise InputError(
                f"{where}: --api-key: our router takes no key with a comma or white space in it"
            )
        if any(not 8 <= len(key) <= 512 for key in everybody):
            raise InputError(f"{where}: --api-key: our router takes keys of 8 to 512 characters")
        found[CLIENTS] = ",".join(everybody)
    return found


def router_keys(environment: Mapping[str, str]) -> Keys:
    """What our router with `environment` on top of the caller's asks of its clients."""
    words = (os.environ | environment).get(CLIENTS, "").replace(",", " ").split()
    return Keys(tuple(words))


def _values(flags: Sequence[str], name: str) -> tuple[str, ...]:
    """The values of a flag as the engines' own parsers take it: of the last time that it is given,
    all that stand behind it or the one behind ``=``."""
    found: list[str] = []
    taking = False
    for flag in flags:
        if flag.startswith("-"):
            given, sign, value = flag.partition("=")
            taking = given.replace("_", "-") == name
            if taking:
                found = [value] if sign else []
        elif taking:
            found.append(flag)
    return tuple(filter(None, found))

"""Writes the tables of the docs that follow from the code, between their markers.

Owns which table stands on which page; a table's facts are the router's (`policies()`, `paths()`,
`admission_rules()`, `load_config()`) and the shape that is measured. What a key of `router.toml`
means is written on its page; which keys there are, and their defaults, is the router's. `--check`
writes nothing and ends with 1 where a page is not what this would write.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from pydantic import BaseModel  # noqa: E402
from pydantic.fields import FieldInfo  # noqa: E402

from eval.run_lines import read_rows  # noqa: E402
from launch.pacing_keys import PacingKeys  # noqa: E402
from launch.profiles import PROFILES  # noqa: E402
from launch.sizing import Room, kv_tokens, share_of  # noqa: E402
from launch.topology import (  # noqa: E402
    EngineChoice,
    KvKeys,
    Placement,
    RouterChoice,
    Topology,
    WorkerGroup,
)
from launch.weights import in_fp8, weight_bytes  # noqa: E402
from results.build import simulated_means  # noqa: E402
from router_policies import _core  # noqa: E402

GPUS = {"h100": "H100 80 GB", "h20": "H20 96 GB", "h200": "H200 141 GB"}
MODEL = "qwen3-coder-30b-a3b"
FP8_KV_BYTES = 49_152
"""A token's, of that model: 48 layers × (K, V) × 4 KV heads × 128 × 1 byte."""


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sizing() -> str:
    def rooms(gpu: str, weights: int) -> list[Room]:
        profile = PROFILES[gpu]
        flags = {"sglang": profile.sglang_flags, "vllm": profile.vllm_flags}
        memory = (profile.memory_gb or 0) * 1e9
        return [
            Room(1, kv_tokens(engine, memory, share, weights, FP8_KV_BYTES), 0, FP8_KV_BYTES)
            for engine in flags
            if (share := share_of(engine, flags[engine]))
        ]

    def row(gpu: str, checkpoint: str, weights: int) -> list[object]:
        found = rooms(gpu, weights)
        kv = [cell for room in found for cell in (f"{round(room.kv_tokens, -4):,}", room.sessions)]
        tier = max(room.host_bytes or 0 for room in found)
        return [GPUS[gpu], checkpoint, *kv, f"{10 * ceil(tier / 1e10)}"]

    bf16 = weight_bytes(MODEL, "bfloat16")
    fp8 = bf16 and in_fp8(MODEL, bf16)
    assert bf16
    assert fp8
    head = (
        "GPU",
        "checkpoint",
        "SGLang: KV tokens",
        "SGLang: sessions",
        "vLLM: KV tokens",
        "vLLM: sessions",
        "host tier, GB",
    )
    checkpoints = {"bf16": bf16, "FP8": fp8}
    return table(head, (row(gpu, name, size) for gpu in GPUS for name, size in checkpoints.items()))


def policies() -> str:
    known: list[dict[str, Any]] = json.loads(_core.policies())
    return table(
        ("policy", "what it does"), ((f"`{each['name']}`", each["summary"]) for each in known)
    )


def http_paths() -> str:
    served: list[dict[str, Any]] = json.loads(_core.paths())
    return table(
        ("path", "methods", "what it does"),
        (
            (", ".join(f"`{path}`" for path in each["paths"]), each["methods"], each["what"])
            for each in served
        ),
    )


def _parameters(of: Iterable[dict[str, Any]]) -> str:
    rows = ((f"`{each['name']}`", each["default"], each["meaning"]) for each in of)
    return table(("setting", "default", "meaning"), rows)


def admission_settings() -> str:
    return _parameters(json.loads(_core.admission_rules())["settings"])


def admission_rotation() -> str:
    rules = json.loads(_core.admission_rules())["rules"]
    return _parameters(next(each["params"] for each in rules if each["name"] == "rotate"))


def admission_rules() -> str:
    rules = json.loads(_core.admission_rules())["rules"]
    return table(
        ("rule", "what it does"), ((f"`{each['name']}`", each["summary"]) for each in rules)
    )


def topology_keys() -> str:
    """Keys of a topology file, with what `launch/topology.py` says of each."""

    def rows(of: type[BaseModel], prefix: str, leave_out: Iterable[str]) -> Iterable[list[str]]:
        for name, field in of.model_fields.items():
            if name not in leave_out:
                yield [f"`{prefix}{name}`", default(field), meaning(field)]

    def meaning(field: FieldInfo) -> str:
        said = " ".join((field.description or "").split())
        choices = [
            choice
            for part in (field.annotation, *get_args(field.annotation))
            if get_origin(part) is Literal
            for choice in get_args(part)
        ]
        return f"{said} One of {', '.join(f'`{each}`' for each in choices)}." if choices else said

    def default(field: FieldInfo) -> str:
        if field.is_required():
            return "required"
        empty = field.default is None or field.default in ((), {}, "")
        return "" if empty else f"`{json.dumps(field.default).strip(chr(34))}`"

    shared = {*KvKeys.model_fields, *PacingKeys.model_fields, "chunk_tokens", "flags"}
    own = {"name", "engine", "placement", "workers", "router"}
    return table(
        ("key", "default", "meaning"),
        [
            *rows(EngineChoice, "engine.", ()),
            *rows(Topology, "", own),
            *rows(WorkerGroup, "workers.", {*shared, "environment"}),
            *rows(RouterChoice, "router.", ()),
            *rows(Placement, "placement.", ()),
        ],
    )


def _loaded(text: str) -> dict[str, Any]:
    """What the router reads from a `router.toml`, with defaults."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return dict(json.loads(_core.load_config(file.name)))


_OLD_NAMES = {"residency"}
"""Keys that are read under their old names for one release."""


def _keys(text: str) -> list[str]:
    """The keys that the router expects in the last table of `text`, as it says itself."""
    try:
        _loaded(f"{text}no_such_key = 1\n")
    except ValueError as error:
        known = re.findall(r"`([a-z_]+)`", str(error).partition("expected one of")[2])
        return [key for key in known if key not in _OLD_NAMES]
    raise AssertionError("the router takes a key that there is not")


_OF_THE_MACHINE = {"threads"}
"""Keys whose default depends on where the router runs: the page says it in words."""


def _default(key: str, value: Any, said: str) -> str:
    """A default as tables show it; `said` where the code has none, or not the same everywhere."""
    if value is None or isinstance(value, dict | list) or key in _OF_THE_MACHINE:
        return said
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if key.endswith("_bytes") and isinstance(value, int) and value % (1 << power) == 0:
            return f"{value >> power} {unit}"
    return f"{value:g}"


def _rows_of(page_table: str, known: list[str]) -> list[list[str]]:
    """The rows of a table on a page, whose first cells must name each of the `known` keys once."""
    _, _, *lines = page_table.strip().splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    named = [key for row in rows for key in _named(row[0])]
    if wrong := {*named} ^ {*known} | {key for key in named if named.count(key) > 1}:
        sys.exit(
            f"docs/router.md: {', '.join(sorted(wrong))}: the table must have each key of "
            "router.toml once, and no other; what a key means is written there by hand"
        )
    return rows


def _named(cell: str) -> list[str]:
    return re.findall(r"`\[?([a-z_]+)\]?`", cell)


def router_settings(now: str) -> str:
    defaults = _loaded("")
    rows = _rows_of(now, [key for key in _keys("") if key != "workers"])
    for row in rows:
        keys = _named(row[0])
        said = row[1].split(", ") if len(keys) > 1 else row[1:2]
        said += [""] * (len(keys) - len(said))
        shown = [_default(key, defaults[key], word) for key, word in zip(keys, said, strict=False)]
        row[1] = ", ".join(word for word in shown if word)
    return table(("key", "default", "meaning"), rows)


def worker_keys(now: str) -> str:
    rows = _rows_of(now, _keys('[[workers]]\nurl = "http://10.0.0.1:8000"\n'))
    return table(("key of a worker", "meaning"), rows)


ARMS = {
    "vLLM 0.33.0, FP8 weights, no admission": "vLLM 0.33.0",
    "SGLang 0.5.23, FP8 weights, no admission": "SGLang 0.5.23",
    "SGLang 0.5.23, FP8 weights, deltaserve, rule rotate": "deltaserve before SGLang",
}
_SLO, _SERVED, _WAIT, _STARVED = (
    "turns within the SLO, %",
    "first tokens/s",
    "longest wait, s",
    "starved sessions",
)
SHORT = {"16": [_SLO], "24": [_SLO], "40": [_SLO, _SERVED, _STARVED]}
LONG = {
    "16": [_SLO],
    "24": [_SLO, _SERVED, _WAIT],
    "40": [_SLO, _SERVED, _WAIT, _STARVED],
}
"""Measures by sessions; what no run has is left empty."""


def measured(shown: Mapping[str, list[str]]) -> str:
    """Today's engines with FP8 weights, as the results' page has them."""
    page = (DOCS.parent / "results/agents-a-gpu.md").read_text()
    section = page[page.index("## Today's engines with FP8 weights") :]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    found = [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]
    of = {(each["sessions"], each["arm"]): each for each in found}
    return table(
        ("sessions on one H200", "measure", *ARMS.values()),
        (
            (sessions, measure, *(of.get((sessions, arm), {}).get(measure, "") for arm in ARMS))
            for sessions, measures in shown.items()
            for measure in measures
        ),
    )


RULES_ELSEWHERE = DOCS.parent / "results/rules_elsewhere.csv"
TIERS_GB = {"": 60, "150": 150, "gpu": 0}
"""By what follows the rule in an arm's name in the experiment `admission`."""


def rules_compared() -> str:
    """The arms of the experiment `admission`, simulated: means over trace seeds."""
    rows = []
    for of in simulated_means("rules"):
        rule, _, tier = of["arm"].partition("-")
        tier_gb = TIERS_GB[tier]
        rows.append(
            (
                (tier_gb, of["sessions"], rule),
                (
                    tier_gb or "none",
                    of["sessions"],
                    f"`{rule}`",
                    f"{of['first_tokens_per_s']:.3f}",
                    f"{100 * of['in_time_share']:.0f}",
                    f"{100 * of['late_share_p90']:.0f}",
                    f"{of['longest_wait_s']:.0f}",
                    of["starved"],
                ),
            )
        )
    return table(
        (
            "host tier, GB",
            "sessions",
            "rule",
            "first tokens/s",
            "turns within the SLO, %",
            "late share p90, %",
            "longest wait, s",
            "starved sessions, all seeds",
        ),
        (row for _, row in sorted(rows)),
    )


def rules_elsewhere() -> str:
    """Of the same arms in other conditions: first tokens/s with `rotate` over those with `off`."""
    served: dict[tuple[str, int, str, str], list[float]] = {}
    seeds: dict[str, set[str]] = {}
    for row in read_rows(RULES_ELSEWHERE, ("condition", "arm", "load", "first_tokens_per_s")):
        rule, _, tier = row["arm"].partition("-")
        cell = (row["condition"], int(row["load"]), tier, rule)
        served.setdefault(cell, []).append(float(row["first_tokens_per_s"]))
        seeds.setdefault(row["condition"], set()).add(row["trace_seed"])

    def ratio(condition: str, sessions: int, tier: str) -> str:
        found = [served.get((condition, sessions, tier, rule)) for rule in ("rotate", "off")]
        return f"{sum(found[0]) / sum(found[1]):.2f}" if found[0] and found[1] else ""

    return table(
        ("condition", "trace seeds", "sessions", "no tier", "60 GB", "150 GB"),
        (
            (
                condition,
                len(seeds[condition]),
                sessions,
                *(ratio(condition, sessions, tier) for tier in ("gpu", "", "150")),
            )
            for condition, sessions in dict.fromkeys((cell[0], cell[1]) for cell in served)
        ),
    )


WITH_THEIR_WORDS: dict[str, Callable[[str], str]] = {
    "router-settings": router_settings,
    "worker-keys": worker_keys,
}
"""Made from the code and the table that stands on the page."""
TABLES: dict[str, Callable[[], str]] = {
    "measured": lambda: measured(SHORT),
    "measured-more": lambda: measured(LONG),
    "sizing": sizing,
    "policies": policies,
    "http-paths": http_paths,
    "rules-compared": rules_compared,
    "rules-elsewhere": rules_elsewhere,
    "admission-settings": admission_settings,
    "admission-rotation": admission_rotation,
    "admission-rules": admission_rules,
    "topology-keys": topology_keys,
}
_BLOCK = re.compile(r"(?ms)^(<!-- generated: ([a-z-]+) -->\n)(.*?)^(<!-- end -->)$")


def written(text: str) -> str:
    """A page with every table between its markers made again."""

    def block(found: re.Match[str]) -> str:
        begin, name, now, end = found.groups()
        made = WITH_THEIR_WORDS[name](now) if name in WITH_THEIR_WORDS else TABLES[name]()
        return f"{begin}{made}\n{end}"

    return _BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the docs' generated tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is stale")
    check = parser.parse_args(arguments).check
    stale = False
    for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))):
        text = page.read_text()
        if (now := written(text)) != text:
            stale = True
            if check:
                print(f"{page.name}: not what the code says; run: python docs/generate.py")
            else:
                page.write_text(now)
    return int(stale and check)


if __name__ == "__main__":
    sys.exit(main())

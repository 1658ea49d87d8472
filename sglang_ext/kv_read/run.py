"""One pair of processes, an owner and a reader, and what the reader measures.

NIXL and Mooncake read their settings when they start, so each combination of settings has a pair of
its own.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_ext.kv_read import layout, mooncake, ways
from sglang_ext.kv_read.layout import Layout

Sample = dict[str, Any]
Side = ways.NixlSide | mooncake.MooncakeSide
# What writes comes last of its pair: it changes what the owner holds.
NIXL_WAYS = ("nixl", "nixl-prepared", "nixl-write")
MOONCAKE_WAYS = ("mooncake", "mooncake-write")
MAPPED_WAYS = ("mapped-staged", "mapped-kernel")
WAYS = NIXL_WAYS + MOONCAKE_WAYS + MAPPED_WAYS
_WRITES = ("nixl-write", "mooncake-write")


@dataclass(frozen=True)
class Plan:
    """What one pair of processes measures."""

    layout: Layout
    devices: tuple[str, str]
    """The owner's and the reader's, as torch names them."""
    ways: tuple[str, ...]
    """Of one library, or one by mapped memory."""
    page_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    repeats: int
    settings: dict[str, str]
    """Environment of both processes."""
    threads: int
    """NIXL's."""
    limit_s: float
    """For one transfer."""

    def failed(self, error: str) -> Sample:
        """What is said where none of the ways can go on."""
        return {"way": ", ".join(self.ways), "settings": self.settings, "error": error}


def measure(plan: Plan) -> Iterator[Sample]:
    """A sample for each transfer, as soon as it is done.

    Where a way fails there is one with an `error`, which ends that way and page size.
    """
    context = multiprocessing.get_context("spawn")
    offers, results = context.Queue(), context.Queue()
    # The owner waits until this is closed; to set an event would wait for an owner that was killed.
    until_closed, stays_open = context.Pipe(duplex=False)
    owner = context.Process(target=_own, args=(plan, offers, until_closed, results), daemon=True)
    reader = context.Process(target=_read, args=(plan, offers, results), daemon=True)
    owner.start()
    reader.start()
    until_closed.close()
    try:
        while True:
            try:
                sample = results.get(timeout=1.0)
            except queue.Empty:
                for name, process in (("reader", reader), ("owner", owner)):
                    if not process.is_alive():
                        yield plan.failed(f"the {name} ended with exit status {process.exitcode}")
                        return
                continue
            if sample is None:
                return
            yield sample
    finally:
        stays_open.close()
        for process in (reader, owner):
            process.join(10.0)
            if process.is_alive():
                process.kill()


def _side(name: str, plan: Plan, pool: ways.Pool) -> Side | None:
    if plan.ways[0] in NIXL_WAYS:
        return ways.NixlSide(name, pool, plan.threads)
    if plan.ways[0] in MOONCAKE_WAYS:
        return mooncake.MooncakeSide(pool, plan.limit_s)
    return None


def _pool(plan: Plan, device: str) -> ways.Pool:
    """This process's, whose GPU becomes the current one.

    Triton starts kernels there, and Mooncake maps the owner's memory for it.
    """
    import torch.multiprocessing  # (queues then take what maps a tensor)

    if device != "cpu":
        torch.cuda.set_device(device)
    return layout.allocate(plan.layout, device)


def _own(plan: Plan, offers: Any, until_closed: Any, results: Any) -> None:
    try:
        os.environ.update(plan.settings)
        pool = _pool(plan, plan.devices[0])
        layout.fill(pool)
        ways.synchronize(plan.devices[0])
        side = _side("owner", plan, pool)
        offers.put(side.offer() if side else ways.shared(pool))
        until_closed.poll(None)
    except Exception as error:
        results.put(plan.failed(f"owner: {type(error).__name__}: {error}"))
        results.put(None)


def _read(plan: Plan, offers: Any, results: Any) -> None:
    try:
        os.environ.update(plan.settings)
        pool = _pool(plan, plan.devices[1])
        offer = offers.get()
        side = _side("reader", plan, pool)
        for name in plan.ways:
            for sample in _samples(plan, name, side, offer, pool):
                results.put(sample)
    except Exception as error:
        results.put(plan.failed(f"reader: {type(error).__name__}: {error}"))
    results.put(None)


def _way(
    plan: Plan, name: str, side: Side | None, offer: Any, pool: ways.Pool
) -> ways.Nixl | mooncake.Mooncake | ways.MappedStaged | ways.MappedKernel:
    """`offer` is what the owner's side says of itself; without a side, what maps its pool."""
    writes, limit_s = name in _WRITES, plan.limit_s
    if isinstance(side, mooncake.MooncakeSide):
        return mooncake.Mooncake(side, offer, plan.layout, writes=writes, limit_s=limit_s)
    if isinstance(side, ways.NixlSide):
        operation, prepared = "WRITE" if writes else "READ", name == "nixl-prepared"
        return ways.Nixl(
            side, offer, plan.layout, operation=operation, prepared=prepared, limit_s=limit_s
        )
    return (ways.MappedStaged if name == "mapped-staged" else ways.MappedKernel)(offer, pool)


def _samples(
    plan: Plan, name: str, side: Side | None, offer: Any, pool: ways.Pool
) -> Iterator[Sample]:
    of = {"way": name, "settings": plan.settings, "threads": plan.threads}
    try:
        way = _way(plan, name, side, offer, pool)
    except Exception as error:
        yield {**of, "error": f"{type(error).__name__}: {error}"}
        return
    for page_tokens in plan.page_tokens:
        try:
            for tokens in plan.tokens:
                for repeat in range(plan.repeats + 1):
                    measured = _one(plan, way, name, pool, tokens, page_tokens, repeat)
                    yield {**of, "page_tokens": page_tokens, "tokens": tokens, **measured}
        except Exception as error:
            yield {**of, "page_tokens": page_tokens, "error": f"{type(error).__name__}: {error}"}


def _one(
    plan: Plan, way: Any, name: str, pool: ways.Pool, tokens: int, page_tokens: int, repeat: int
) -> Sample:
    out_of = layout.pages(plan.layout, tokens, page_tokens, seed=2 * repeat)
    into = layout.pages(plan.layout, tokens, page_tokens, seed=2 * repeat + 1)
    reads = name not in _WRITES
    if reads:
        for tensor in pool:
            tensor.zero_()
        ways.synchronize(str(pool[0].device))
    ready_s, read_s = way.read(out_of, into, page_tokens)
    sample: Sample = {
        "repeat": repeat,
        "warm_up": repeat == 0,
        "bytes": len(into) * page_tokens * plan.layout.token_bytes(),
        "ready_s": ready_s,
        "read_s": read_s,
    }
    if reads:
        rows = layout.rows_of(out_of, page_tokens), layout.rows_of(into, page_tokens)
        sample["right"] = layout.is_right(pool, into=rows[1], out_of=rows[0])
    return sample


def table(samples: list[Sample]) -> list[str]:
    """Markdown: a line for each way, settings, page size and number of tokens.

    GB/s are the median of the repeats, the slowest and the fastest; once more with the time that
    getting ready takes.
    """
    heads = (
        "way",
        "settings",
        "page, tokens",
        "tokens",
        "GB/s",
        "and ready",
        "ms",
        "arrived right",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        settings = " ".join(f"{key}={value}" for key, value in sample.get("settings", {}).items())
        key = (sample.get("way", ""), settings, sample.get("page_tokens", ""))
        if "error" in sample:
            error = sample["error"].partition("\n")[0]
            lines.append(f"| {key[0]} | {settings} | {key[2]} | | {error} | | | |")
        elif not sample["warm_up"]:
            groups.setdefault((*key, sample["tokens"]), []).append(sample)
    for (way, settings, page_tokens, tokens), of in groups.items():
        rates = [sample["bytes"] / sample["read_s"] / 1e9 for sample in of]
        in_all = [sample["bytes"] / (sample["ready_s"] + sample["read_s"]) / 1e9 for sample in of]
        right = "not checked"
        if all("right" in sample for sample in of):
            right = "yes" if all(sample["right"] for sample in of) else "NO"
        lines.append(
            f"| {way} | {settings} | {page_tokens} | {tokens} "
            f"| {statistics.median(rates):.2f} [{min(rates):.2f}–{max(rates):.2f}] "
            f"| {statistics.median(in_all):.2f} "
            f"| {1e3 * statistics.median(sample['read_s'] for sample in of):.1f} | {right} |"
        )
    return lines

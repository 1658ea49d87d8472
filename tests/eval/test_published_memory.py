"""What docs/results/simulated-memory.md says of device memory and host tiers follows from the lines
that it keeps."""

from __future__ import annotations

import statistics
import tomllib

import pytest

from eval.device_memory import agents, mean, table
from eval.run_lines import Row, read_rows
from tests.eval.published import RESULTS

PAGE = RESULTS / "simulated-memory.md"
OURS = "sglang-fp8-host-paced-residency"
MIXED = "sglang-fp8-host mixed chunk 4096"
PACED = "sglang-fp8-host-paced"
BYTES = 49_152
"""Of a token with FP8 KV."""
H20, ENDLESS = 563_776, 10_000_000
TIERS = {0: 0, **{gb: gb * 10**9 // BYTES for gb in (20, 40, 60, 100, 200, 400)}}
"""Tokens that a host tier holds, by its GB."""
ROWS = read_rows(RESULTS / "simulated" / "memory.csv")
THINK = read_rows(RESULTS / "simulated" / "memory-think.csv")


def of(arm: str, device: int, host_gb: int = 60, rows: list[Row] = ROWS) -> list[Row]:
    found = [
        row
        for row in rows
        if (row["arm"], row["device_tokens"], row["host_tokens"])
        == (arm, str(device), str(TIERS[host_gb]))
    ]
    assert {row["draw"] for row in found} == {"1", "2", "3", "4"}
    return found


def carries(arm: str, device: int, host_gb: int = 60, rows: list[Row] = ROWS) -> float:
    return statistics.fmean(agents(of(arm, device, host_gb, rows)))


def percent(column: str, level: int, arm: str, device: int, host_gb: int = 60) -> str:
    return f"{100 * mean(of(arm, device, host_gb), level, column):.0f}"


def tenths(column: str, level: int, arm: str, device: int) -> str:
    return f"{100 * mean(of(arm, device), level, column):.1f}"


def rate(level: int, arm: str, device: int, host_gb: int = 60) -> str:
    return f"{mean(of(arm, device, host_gb), level, 'requests_per_s'):.2f}"


def wanted(sessions: float, column: str = "in_flight_tokens") -> float:
    """The context in flight with so many sessions where nobody waits for room, on straight lines
    between levels."""
    rows = of(OURS, ENDLESS)
    levels = sorted({int(row["sessions"]) for row in rows})
    high = next(level for level in levels if level >= sessions)
    low = levels[max(0, levels.index(high) - 1)]
    share = (sessions - low) / (high - low)
    return (1 - share) * mean(rows, low, column) + share * mean(rows, high, column)


def test_the_tables_follow_from_their_lines() -> None:
    text = PAGE.read_text()
    for arm in (OURS, MIXED, PACED):
        assert "\n".join(table(ROWS, arm)) in text, arm
    for arm in (OURS, MIXED):
        assert "\n".join(table(THINK, arm)) in text, arm


@pytest.mark.parametrize(
    ("rows", "arms", "names", "least"),
    [
        (ROWS, (OURS, MIXED, PACED), ("sessions-a-gpu", "chunks"), 60),
        (THINK, (OURS, MIXED), ("think", "chunks-think"), 40),
    ],
    ids=["seconds", "a minute"],
)
def test_an_h20s_kv_and_60_gb_are_the_runs_of_other_pages(
    rows: list[Row], arms: tuple[str, ...], names: tuple[str, ...], least: int
) -> None:
    known = {
        (row["arm"], row["sessions"], row["draw"]): row
        for name in names
        for row in read_rows(RESULTS / "simulated" / f"{name}.csv")
    }
    same = 0
    for row in [row for arm in arms for row in of(arm, H20, rows=rows)]:
        other = known.get((row["arm"], row["sessions"], row["draw"]))
        if other is not None:
            same += 1
            assert {name: row[name] for name in other} == other
    assert same >= least


def test_how_far_draws_are_apart() -> None:
    sizes = {(row["arm"], row["device_tokens"], row["host_tokens"]) for row in ROWS}
    apart, whole = [], agents(of(OURS, ENDLESS))
    for size in sizes:
        rows = [
            row for row in ROWS if (row["arm"], row["device_tokens"], row["host_tokens"]) == size
        ]
        draws = agents(rows)
        apart.append(max(draws) - min(draws))
    words = (
        f"an arm carries {min(apart):.1f} to {max(apart):.1f} sessions more or fewer, ours with "
        f"all of it from {min(whole):.1f} to {max(whole):.1f}"
    )
    assert words in PAGE.read_text(), words


def test_the_table_of_what_turns_miss_follows_from_its_lines() -> None:
    text = PAGE.read_text()
    for label, arm, device, gb in (
        ("563,776 tokens, 60 GB", OURS, H20, 60),
        ("563,776 tokens, 400 GB, `off`", PACED, H20, 400),
        ("1,200,000 tokens, 200 GB", OURS, 1_200_000, 200),
        ("all of it", OURS, ENDLESS, 60),
    ):
        for level in (10, 16, 20, 24):
            rows = of(arm, device, gb)
            shares = [f"{100 * mean(rows, level, part):.1f} %" for part in ("late", "slow", "gap")]
            tpot_ms = 1000 * mean(rows, level, "tpot_p50_s")
            held = mean(rows, level, "in_flight_tokens")
            cells = [
                f"{100 * mean(rows, level, 'within_objective'):.0f} %",
                *shares,
                f"{tpot_ms:.0f} ms",
                f"{mean(rows, level, 'requests_per_s'):.2f}",
                f"{held:,.0f}",
            ]
            assert f"| {label}: {level} | {' | '.join(cells)} |" in text, (label, level, cells)


def test_what_the_page_says_of_the_device_and_of_the_tier_follows_from_its_lines() -> None:
    text = " ".join(PAGE.read_text().split())
    half, large = 281_888, 1_000_000
    sizes = (half, 420_000, H20, 700_000, 850_000, large)
    parts = [carries(OURS, device) / device * 100_000 for device in (*sizes[:3], large)]
    first = (carries(OURS, H20) - carries(OURS, half)) / (H20 - half) * 100_000
    second = (carries(OURS, large) - carries(OURS, H20)) / (large - H20) * 100_000
    second_200 = (carries(OURS, large, 200) - carries(OURS, H20, 200)) / (large - H20) * 100_000
    by_draw = zip(agents(of(OURS, H20)), agents(of(OURS, H20, 100)), strict=True)
    *others, most = sorted(f"{more - fewer:.1f}" for fewer, more in by_draw)
    shares = [100 * wanted(carries(OURS, device)) / device for device in sizes]
    large_tier = carries(OURS, 1_200_000, 200)
    last = 100 * wanted(large_tier) / 1_200_000
    tiers = [carries(OURS, H20, gb) for gb in (60, 100, 200, 400)]
    off = [carries(PACED, H20, gb) for gb in (60, 100, 200, 400)]
    said = [
        (
            f"{carries(OURS, half):.1f} sessions with 281,888 KV tokens on the device, "
            f"{carries(OURS, H20):.1f} with 563,776, {carries(OURS, large):.1f} with 1,000,000 and "
            f"{carries(OURS, ENDLESS):.1f} with all of it"
        ),
        (
            f"SGLang with mixed chunks and `off` {carries(MIXED, half):.1f}, "
            f"{carries(MIXED, H20):.1f}, {carries(MIXED, large):.1f} and "
            f"{carries(MIXED, ENDLESS):.1f}"
        ),
        (
            "With 60, 100, 200 and 400 GB a GPU with 563,776 tokens carries "
            f"{tiers[0]:.1f}, {tiers[1]:.1f}, {tiers[2]:.1f} and {tiers[3]:.1f} sessions, paced "
            f"with `off` {off[0]:.1f}, {off[1]:.1f}, {off[2]:.1f} and {off[3]:.1f}"
        ),
        f"({most} sessions more, on the others {others[0]} to {others[-1]})",
        f"has carry {tiers[1] - tiers[0]:.1f} sessions more (with 16",
        f"40 GB carry {carries(OURS, H20, 40):.1f}, no tier {carries(OURS, H20, 0):.1f}",
        (
            f"{parts[0]:.1f} sessions for each 100,000 tokens of a device with 281,888, "
            f"{parts[1]:.1f} with 420,000, {parts[2]:.1f} with 563,776 and {parts[3]:.1f} with "
            "1,000,000"
        ),
        (
            f"Each 100,000 more (4.9 GB) bring {first:.1f} sessions up to 563,776 and "
            f"{second:.1f} from there to 1,000,000, with 200 GB in place of 60 {second_200:.1f}."
        ),
        (
            f"with ten sessions {wanted(10):,.0f} tokens on average, and more than "
            f"{wanted(10, 'in_flight_p90_tokens'):,.0f} for a tenth of the time; with 16 "
            f"{wanted(16):,.0f} and {wanted(16, 'in_flight_p90_tokens'):,.0f}"
        ),
        (
            f"from {min(shares):.0f} to {max(shares):.0f} % of the device ({last:.0f} % of "
            "1,200,000 with 200 GB)"
        ),
        (
            f"with 24 sessions and 400 GB {percent('cached_share', 24, PACED, H20, 400)} % of "
            f"prompt tokens come from the cache, {percent('cached_share', 24, PACED, H20)} % with "
            f"60 GB, and there are {rate(24, PACED, H20, 400)} requests/s in place of "
            f"{rate(24, PACED, H20)}; but {percent('within_objective', 24, PACED, H20, 400)} % of "
            f"turns are in time, {percent('late', 24, PACED, H20, 400)} % have their first token "
            f"too late. With the endless device {percent('within_objective', 24, PACED, ENDLESS)} "
            f"% are in time and {percent('late', 24, PACED, ENDLESS)} % late"
        ),
        (
            f"with 24 sessions 400 GB bring {percent('within_objective', 24, OURS, H20, 400)} % of "
            f"turns in time and {rate(24, OURS, H20, 400)} requests/s in place of "
            f"{percent('within_objective', 24, OURS, H20)} % and {rate(24, OURS, H20)}"
        ),
        (
            f"with 20 GB a GPU with 563,776 tokens carries {carries(OURS, H20, 20):.1f} sessions, "
            f"without a tier {carries(OURS, H20, 0):.1f}"
        ),
        (
            f"(with 16, which is beyond that, {percent('within_objective', 16, OURS, H20, 100)} % "
            f"of turns in time in place of {percent('within_objective', 16, OURS, H20)} %)"
        ),
        (
            f"1,200,000 tokens carry {carries(OURS, 1_200_000):.1f} sessions with 60 GB and "
            f"{large_tier:.1f} with 200 GB, 1,000,000 {carries(OURS, large):.1f} and "
            f"{carries(OURS, large, 200):.1f}, with 16 sessions "
            f"{percent('within_objective', 16, OURS, large)} and "
            f"{percent('within_objective', 16, OURS, large, 200)} % of turns in time"
        ),
        (
            f"with 16 sessions {tenths('slow', 16, OURS, ENDLESS)} % of turns take more than 50 ms "
            f"a token and {tenths('late', 16, OURS, ENDLESS)} % have a late first token, with 20 "
            f"{tenths('slow', 20, OURS, ENDLESS)} and {tenths('late', 20, OURS, ENDLESS)} %, with "
            f"24 {tenths('slow', 24, OURS, ENDLESS)} and {tenths('late', 24, OURS, ENDLESS)} %; no "
            "gap is over 1 s"
        ),
        (
            f"with 24 sessions {percent('within_objective', 24, OURS, ENDLESS)} % of turns are in "
            f"time, with 563,776 tokens {percent('within_objective', 24, OURS, H20)} %, at "
            f"{rate(24, OURS, ENDLESS)} and {rate(24, OURS, H20)} requests/s"
        ),
        (
            f"with 16 sessions {percent('within_objective', 16, MIXED, H20)} % of turns are in "
            f"time with 563,776 tokens, {percent('within_objective', 16, MIXED, large)} % with "
            f"1,000,000 and {percent('within_objective', 16, MIXED, ENDLESS)} % with all of it; "
            f"with 24 {percent('within_objective', 24, MIXED, H20)}, "
            f"{percent('within_objective', 24, MIXED, large)} and "
            f"{percent('within_objective', 24, MIXED, ENDLESS)} %"
        ),
    ]
    assert [words for words in said if words not in text] == []
    assert all(float(row["gap"]) == 0 for row in of(OURS, ENDLESS))


def test_a_small_tier_was_worse_than_none_and_is_as_good_now() -> None:
    text = " ".join(PAGE.read_text().split())
    before = read_rows(RESULTS / "simulated" / "memory-small-tier.csv")
    assert {(row["arm"], row["host_tokens"]) for row in before} == {
        (f"{OURS} before", str(TIERS[20]))
    }

    def shares(rows: list[Row]) -> str:
        least, middle, most = (100 * mean(rows, at, "within_objective") for at in (8, 12, 16))
        return f"{least:.0f}, {middle:.0f} and {most:.0f} %"

    now, none = (shares(of(OURS, H20, gb)) for gb in (20, 0))
    words = (
        f"{statistics.fmean(agents(before)):.1f} sessions, and with eight, twelve and 16 "
        f"{shares(before)} of turns in time ([lines](simulated/memory-small-tier.csv)) where it is "
        f"{now} now and {none} without a tier"
    )
    assert words in text, words
    off = [percent("within_objective", 8, PACED, H20, gb) for gb in (20, 0)]
    assert f"(paced, `off`) eight have {' and '.join(off)} %" in text


def test_a_decode_step_takes_what_the_constants_say_of_the_context_in_flight() -> None:
    path = RESULTS.parents[1] / "eval/calibrations/qwen3-coder-30b-a3b-h200-sglang-fp8.toml"
    each_s = tomllib.loads(path.read_text())["decode_per_context_token_s"]
    contexts_ms = [1000 * each_s * wanted(level) for level in (16, 24)]
    tpots_ms = [1000 * mean(of(OURS, ENDLESS), level, "tpot_p50_s") for level in (16, 24)]
    words = (
        f"takes {contexts_ms[0]:.0f} ms of each decode step with 16 sessions and "
        f"{contexts_ms[1]:.0f} ms with 24, beside 1 ms a turn and 3.5 ms a step; half of the turns "
        f"have {tpots_ms[0]:.0f} and {tpots_ms[1]:.0f} ms a token or more"
    )
    assert words in " ".join(PAGE.read_text().split()), words


def test_what_is_said_of_a_minute_of_thinking_follows_from_its_lines() -> None:
    text = " ".join(PAGE.read_text().split())
    large = 1_000_000

    def carry(arm: str, device: int, host_gb: int = 60) -> str:
        return f"{carries(arm, device, host_gb, THINK):.1f}"

    words = (
        f"ours carries {carry(OURS, H20)} sessions with 60 GB, {carry(OURS, H20, 100)} with 100 "
        f"and {carry(OURS, H20, 200)} with 200; 1,000,000 tokens on the device carry "
        f"{carry(OURS, large)} with 60 GB and {carry(OURS, large, 200)} with 200, all of it "
        f"{carry(OURS, ENDLESS)}"
    )
    assert words in text, words
    words = (
        f"SGLang with mixed chunks and `off` {carry(MIXED, H20)} with 60 GB, "
        f"{carry(MIXED, H20, 200)} with 200"
    )
    assert words in text, words
    other = {}
    for arm, name in ((OURS, "think"), (MIXED, "chunks-think")):
        rows = read_rows(RESULTS / "simulated" / f"{name}.csv")
        other[arm] = statistics.fmean(agents([row for row in rows if row["arm"] == arm]))
    words = (
        f"ours is {carry(OURS, H20)} here and [{other[OURS]:.1f} there](simulated-think.md), "
        f"SGLang with mixed chunks {carry(MIXED, H20)} and [{other[MIXED]:.1f}]"
        "(simulated-chunks.md)"
    )
    assert words in text, words


def test_what_other_pages_say_of_memory_follows_from_its_lines() -> None:
    more = 100_000 * (carries(OURS, 1_000_000) - carries(OURS, H20)) / (1_000_000 - H20)
    said = {
        RESULTS.parent / "residency.md": (
            f"100 GB and more carry {carries(OURS, H20, 100):.1f} sessions that think for seconds;",
            (
                f"563,776 tokens carry {carries(OURS, H20):.1f} sessions, "
                f"{carries(OURS, H20) / H20 * 100_000:.1f} for each 100,000, and each 100,000 more "
                f"bring {more:.1f}. Beyond some {carries(OURS, ENDLESS):.0f} sessions"
            ),
            (
                f"60 GB carry {carries(OURS, H20, 60, THINK):.1f} and 100 GB "
                f"{carries(OURS, H20, 100, THINK):.1f}."
            ),
        ),
        RESULTS / "agents-a-gpu.md": (
            (
                f"{carries(OURS, 281_888):.1f} sessions with half of it and "
                f"{carries(OURS, 1_000_000):.1f} with 1,000,000 tokens; a tier of 400 GB in place "
                f"of 60 carries {carries(OURS, H20, 400):.1f} where it is {carries(OURS, H20):.1f}"
            ),
        ),
    }
    for page, sentences in said.items():
        for words in sentences:
            assert words in page.read_text(), words

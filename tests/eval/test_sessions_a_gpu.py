"""How a GPU fares as more sessions come: what is kept of a run, and the page made of that."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.errors import InputError
from eval.experiment_files import load_experiment
from eval.run_lines import Row, read_rows
from eval.separation import carried
from eval.sessions_a_gpu import MEASURES, app, picture, row_of, rows_in, summary, table
from tests.eval.conftest import Recipe, write_run
from tests.eval.published import RESULTS, run_of

PAGE = RESULTS / "agents-a-gpu.md"
SIMULATED = RESULTS / "simulated" / "sessions-a-gpu.csv"
MEASURED = RESULTS / "residency" / "sessions-a-gpu.csv"
# The raw lines of the measured runs, by arm, sessions in flight and draw, repeats in their order.
# Where a host tier overflows, sessions take turns otherwise since there are time slices: older runs
# are not the arm's, nor are those with ten and twelve in which they always did so.
ALWAYS = "sglang-fp8-host-paced-residency slices always"
RUNS = {
    ("sglang-lpm", 12, 3): ("lpm-twelve",),
    ("sglang-lpm", 12, 2): ("draw2-lpm-twelve",),
    ("sglang", 2, 3): ("longer-off-1", "longer-off-2", "longer-off-3"),
    ("sglang", 12, 3): ("engines-sglang-1", "engines-sglang-2", "backfill-off"),
    ("sglang-residency", 2, 3): ("longer-residency",),
    ("sglang-residency", 12, 3): ("again-residency",),
    ("sglang-paced-residency", 12, 3): ("sglang-paced-residency-twelve",),
    ("sglang-paced-residency", 12, 2): ("draw2-sglang-paced-residency-twelve",),
    ("sglang-host", 12, 3): ("tier-off", "sglang-host-twelve"),
    ("sglang-host", 12, 2): ("draw2-sglang-host-twelve",),
    ("sglang-host-residency", 12, 3): ("sglang-host-residency-twelve",),
    ("sglang-host-residency", 12, 2): ("draw2-sglang-host-residency-twelve",),
    ("sglang-host-residency before slices", 12, 3): ("tier-residency-1", "tier-residency-2"),
    ("sglang-fp8-host-residency", 8, 3): ("fp8-eight-1", "fp8-eight-2"),
    ("sglang-fp8-host-residency before slices", 12, 3): ("fp8-twelve",),
    ("sglang-fp8-host-mixed", 10, 3): ("mixed-ten",),
    ("sglang-fp8-host-mixed", 10, 2): ("draw2-mixed-ten",),
    ("sglang-fp8-host-mixed", 10, 1): ("draw1-mixed-ten",),
    ("sglang-fp8-host-mixed", 8, 3): ("mixed-eight",),
    ("sglang-fp8-host-mixed", 12, 3): ("mixed-twelve",),
    ("sglang-fp8-host-mixed", 12, 2): ("draw2-mixed-twelve",),
    ("sglang-fp8-host-mixed", 12, 1): ("draw1-mixed-twelve",),
    ("sglang-fp8-host-mixed", 12, 4): ("draw4-mixed-twelve",),
    ("sglang-fp8-host-mixed", 16, 3): ("mixed-sixteen",),
    (ALWAYS, 10, 3): ("along-ten",),
    (ALWAYS, 10, 2): ("draw2-ten",),
    (ALWAYS, 10, 1): ("draw1-ten",),
    (ALWAYS, 10, 4): ("draw4-ten",),
    (ALWAYS, 12, 3): ("slices-twelve", "along-twelve", "half-twelve"),
    (ALWAYS, 12, 2): ("draw2-twelve", "draw2-twelve-again"),
    (ALWAYS, 12, 1): ("draw1-twelve",),
    (ALWAYS, 12, 4): ("draw4-twelve",),
    ("sglang-fp8-host-paced-residency", 8, 3): ("slices-eight",),
    ("sglang-fp8-host-paced-residency", 10, 3): ("fill-ten",),
    ("sglang-fp8-host-paced-residency", 10, 2): ("draw2-fill-ten",),
    ("sglang-fp8-host-paced-residency", 10, 1): ("draw1-fill-ten",),
    ("sglang-fp8-host-paced-residency", 10, 4): ("draw4-fill-ten",),
    ("sglang-fp8-host-paced-residency", 12, 3): ("fill-twelve",),
    ("sglang-fp8-host-paced-residency", 12, 2): ("draw2-fill-twelve",),
    ("sglang-fp8-host-paced-residency", 12, 1): ("draw1-fill-twelve",),
    ("sglang-fp8-host-paced-residency", 12, 4): ("draw4-fill-twelve",),
    ("sglang-fp8-host-paced-residency", 16, 3): ("rules-priced-sixteen", "price-sixteen"),
    ("sglang-fp8-host-paced-residency", 16, 2): ("draw2-sixteen",),
    ("sglang-fp8-host-paced-residency", 24, 3): (
        "slices-twentyfour",
        "along-twentyfour",
        "half-twentyfour",
        "bound-twentyfour",
    ),
    ("sglang-fp8-host-paced-residency", 24, 2): ("draw2-twentyfour",),
    ("vllm", 3, 3): ("vllm-three",),
    ("vllm", 4, 3): ("vllm-four",),
    ("vllm", 12, 3): ("vllm-twelve",),
    ("vllm", 12, 2): ("draw2-vllm-twelve",),
    ("vllm-residency", 12, 3): ("vllm-residency-twelve",),
    ("vllm-residency", 12, 2): ("draw2-vllm-residency-twelve",),
    ("vllm-host", 12, 3): ("vllm-host-twelve",),
    ("vllm-host", 12, 2): ("draw2-vllm-host-twelve",),
    ("vllm-host-residency", 12, 3): ("vllm-host-residency-twelve",),
    ("vllm-host-residency", 12, 2): ("draw2-vllm-host-residency-twelve",),
    ("vllm-fp8-host", 8, 3): ("vllm-fp8-host-eight",),
    ("vllm-fp8-host", 10, 3): ("vllm-fp8-host-ten",),
    ("vllm-fp8-host", 12, 3): ("vllm-fp8-host-twelve",),
    ("vllm-fp8-host-residency", 12, 3): ("vllm-fp8-host-residency-twelve",),
    ("vllm-fp8-host-residency", 24, 3): ("vllm-fp8-host-residency-twentyfour",),
    ("vllm-fp8-host-4096", 10, 3): ("vllm-4096-ten",),
    ("vllm-fp8-host-4096", 10, 2): ("draw2-vllm-4096-ten",),
    ("vllm-fp8-host-4096", 10, 1): ("draw1-vllm-4096-ten",),
    ("vllm-fp8-host-4096", 10, 4): ("draw4-vllm-4096-ten",),
    ("vllm-fp8-host-4096", 12, 3): ("vllm-4096-twelve",),
    ("vllm-fp8-host-4096", 12, 2): ("draw2-vllm-4096-twelve",),
    ("vllm-fp8-host-4096", 12, 1): ("draw1-vllm-4096-twelve",),
    ("vllm-fp8-host-4096", 12, 4): ("draw4-vllm-4096-twelve",),
    ("vllm-fp8-host-4096-residency", 16, 3): ("vllm-4096-residency-sixteen",),
    ("vllm-fp8-host-4096-residency", 16, 2): ("draw2-vllm-4096-residency-sixteen",),
    ("vllm-fp8-host-4096-residency", 24, 3): ("vllm-4096-residency-twentyfour",),
}
BOUND = "sglang-residency"
# The arms of the page's picture.
DRAWN = (
    "sglang",
    "vllm",
    "sglang-residency",
    "sglang-host",
    "sglang-fp8-host",
    "vllm-fp8-host",
    "sglang-fp8-host-paced-residency",
)


def made(arm: str, sessions: int, within: float, rate: float, draw: int = 1) -> Row:
    return {
        "arm": arm,
        "sessions": str(sessions),
        "draw": str(draw),
        "within_objective": str(within),
        "requests_per_s": str(rate),
        "cached_share": "0.5",
    }


ROWS = [
    made("a", 2, 1.0, 0.2),
    made("a", 4, 0.8, 0.4),
    made("a", 2, 0.96, 0.2, draw=2),
    made("a", 4, 0.84, 0.2, draw=2),
    made("b", 2, 0.5, 0.1),
]


def test_a_line_says_what_the_run_was_and_how_many_turns_kept_the_objective(tmp_path: Path) -> None:
    write_run(tmp_path, Recipe(arm="quick", load="8", ttft_s=0.2))
    write_run(tmp_path, Recipe(arm="quick", load="2", repeat=2, ttft_s=30.0))
    first, second = rows_in(tmp_path)
    assert (first["arm"], first["sessions"], first["draw"]) == ("quick", "2", "2")
    assert (second["arm"], second["sessions"], second["draw"]) == ("quick", "8", "1")
    assert float(first["within_objective"]) == 0.0
    assert float(second["within_objective"]) == 1.0
    assert float(second["ttft_p50_s"]) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(("load", "words"), [("high", "load high"), (None, "load None")])
def test_a_load_that_is_no_number_of_sessions_is_one_clear_error(
    load: str | None, words: str, tmp_path: Path
) -> None:
    write_run(tmp_path, Recipe(load=load))
    with pytest.raises(InputError, match=f"{words}: expected the sessions in flight"):
        list(rows_in(tmp_path))


def test_a_folder_without_runs_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no complete run"):
        list(rows_in(tmp_path))


def test_an_arm_carries_what_keeps_nine_turns_of_ten_within_the_objective() -> None:
    """On a straight line between levels; each draw by itself, then their mean and their range."""
    assert summary(ROWS)[2:] == [
        "| `a` | 3.0 [3.0–3.0] | 0.30, 4 | 1.00 |",
        "| `b` | 0.0 [0.0–0.0] | 0.10, 2 | 1.00 |",
    ]
    assert table(ROWS, "within_objective")[2:] == ["| `a` | 98 % | 82 % |", "| `b` | 50 % |  |"]
    assert table(ROWS, "requests_per_s")[2:] == ["| `a` | 0.20 | 0.30 |", "| `b` | 0.10 |  |"]


def test_the_picture_has_a_line_an_arm_and_a_dot_a_measured_run() -> None:
    measured = [made("a", 4, 0.7, 0.3), made("a", 4, 0.8, 0.3), made("unknown", 4, 0.1, 0.1)]
    drawn = picture(ROWS, measured)
    assert drawn.count("<circle") == picture(ROWS, []).count("<circle") + 2
    assert "carried: 90 %" in drawn
    assert picture(ROWS, measured, ["b"]).count("<circle") < drawn.count("<circle")


def test_a_picture_of_arms_that_are_not_there_or_too_many_is_one_clear_error() -> None:
    with pytest.raises(InputError, match="arm c: expected one of a, b"):
        picture(ROWS, [], ["c"])
    many = [made(f"arm-{at}", 2, 1.0, 0.2) for at in range(9)]
    with pytest.raises(InputError, match="9 arms: a picture has colours for 8"):
        picture(many, [])


def test_the_commands_keep_lines_and_show_them(tmp_path: Path) -> None:
    for load in ("2", "4"):
        write_run(tmp_path / "runs", Recipe(arm="x", load=load))
    kept, drawn = tmp_path / "kept.csv", tmp_path / "drawn.svg"
    runner = CliRunner()
    assert runner.invoke(app, ["lines", str(tmp_path / "runs"), str(kept)]).exit_code == 0
    shown = runner.invoke(
        app, ["show", str(kept), "--measured", str(kept), "--picture", str(drawn)]
    )
    assert shown.exit_code == 0
    assert "\n".join(table(read_rows(kept), "requests_per_s")) in shown.output
    assert drawn.read_text() == picture(read_rows(kept), read_rows(kept))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lines", "nowhere", "x.csv"], "error: nowhere: no complete run"),
        (["show", "nowhere.csv"], "error: nowhere.csv: No such file or directory"),
        (["show", "other.csv"], "error: other.csv: has no column sessions"),
        (["show", "empty.csv"], "error: empty.csv: has no column arm"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_status_2(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "other.csv").write_text("arm,draw\n")
    (tmp_path / "empty.csv").touch()
    command = [sys.executable, "-m", "eval.sessions_a_gpu", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"{words}\n")


def test_arms_stand_in_the_order_of_the_experiment(tmp_path: Path) -> None:
    for arm in ("another", "sglang-fp8-host", "sglang-host", "sglang"):
        write_run(tmp_path, Recipe(arm=arm, load="2"))
    order = [row["arm"] for row in rows_in(tmp_path)]
    assert order == ["sglang", "sglang-host", "sglang-fp8-host", "another"]


def test_the_experiment_names_its_loads_by_their_sessions_in_flight() -> None:
    experiment, _ = load_experiment("sessions-a-gpu")
    for load in experiment.loads:
        assert load.replay == {"max_inflight_sessions": int(load.name)}


def test_the_measured_lines_follow_from_their_raw_lines(tmp_path: Path) -> None:
    expected = [
        {**row_of(run_of(name, tmp_path / name), arm, sessions), "draw": str(draw)}
        for (arm, sessions, draw), names in RUNS.items()
        for name in names
    ]
    assert read_rows(MEASURED) == expected


def test_what_an_h200_holds_follows_from_its_lines() -> None:
    said = PAGE.read_text().splitlines()
    runs = read_rows(RESULTS / "simulated" / "sessions-a-gpu-h200.csv")
    arms = [run for run in runs if run["arm"] not in {"sglang-lease", f"{BOUND} 90 s"}]
    for lines in (summary(arms), *(table(arms, name) for name in list(MEASURES)[:2])):
        assert [line for line in lines if line not in said] == []
    for label, arm in (
        ("`priced`, 90 s", f"{BOUND} 90 s"),
        ("`priced`", BOUND),
        ("`lease`", "sglang-lease"),
    ):
        cells = []
        for sessions in ("12", "16", "24"):
            of = [run for run in runs if (run["arm"], run["sessions"]) == (arm, sessions)]
            assert len(of) == 4
            rate, within = (
                statistics.fmean(float(run[column]) for run in of)
                for column in ("requests_per_s", "within_objective")
            )
            cells.append(f"{rate:.3f}; {100 * within:.0f} %")
        assert f"| {label} | {' | '.join(cells)} |" in said, cells


def test_the_page_follows_from_its_lines() -> None:
    said = PAGE.read_text().splitlines()
    simulated, measured = read_rows(SIMULATED), read_rows(MEASURED)
    for lines in (summary(simulated), *(table(simulated, column) for column in MEASURES)):
        assert [line for line in lines if line not in said] == []
    for row in measured:
        cells = [
            f"{float(row['requests_per_s']):.3f}",
            f"{float(row['cached_share']):.3f}",
            f"{100 * float(row['within_objective']):.0f} %",
        ]
        start = re.escape(f"| `{row['arm']}` | {row['sessions']} | {row['draw']} |")
        (found,) = [line for line in said if re.match(start, line)]
        for cell, values in zip(cells, found.strip("|").split("|")[3:], strict=False):
            assert cell in values
    drawn = (RESULTS / "simulated" / "sessions-a-gpu.svg").read_text()
    assert drawn == picture(simulated, measured, DRAWN)


def agents(of: Sequence[Row], arm: str) -> list[float]:
    """How many an arm carries, by draw."""
    return [
        carried(
            [row for row in of if (row["arm"], row["draw"]) == (arm, str(draw))],
            "within_objective",
        )
        for draw in range(1, 5)
    ]


def test_what_the_page_says_of_many_sessions_and_of_draws_follows_from_its_lines() -> None:
    text, rows = PAGE.read_text(), read_rows(SIMULATED)

    def mean(column: str, arm: str, sessions: str) -> float:
        of = [row for row in rows if (row["arm"], row["sessions"]) == (arm, sessions)]
        return statistics.fmean(float(row[column]) for row in of)

    def of_best(arm: str, sessions: str) -> float:
        levels = dict.fromkeys(row["sessions"] for row in rows)
        rates = {level: mean("requests_per_s", arm, level) for level in levels}
        return rates[sessions] / max(rates.values())

    vllm, tier = "vllm-fp8-host", "sglang-host-residency"
    behind = [
        mean("requests_per_s", arm, "24") / mean("requests_per_s", without, "24")
        for arm, without in (
            (tier, "sglang-host"),
            ("sglang-fp8-host-residency", "sglang-fp8-host"),
            ("sglang-fp8-host-paced-residency", "sglang-fp8-host"),
            (f"{vllm}-residency", vllm),
        )
    ]
    spreads = [
        max(each) - min(each)
        for arm in dict.fromkeys(row["arm"] for row in rows)
        for each in [agents(rows, arm)]
    ]
    assert f"{of_best(vllm, '16'):.1f}" == "0.6", "six tenths"
    said = [
        (
            f"missed with vLLM ({of_best(f'{vllm}-residency', '16'):.2f} at 16, "
            f"{of_best(f'{vllm}-residency', '12'):.2f} at twelve), with bf16 KV and a tier "
            f"({of_best(tier, '12'):.2f} at twelve) and without a tier "
            f"({of_best(BOUND, '8'):.2f} at eight, {of_best(BOUND, '24'):.2f} at 24)."
        ),
        f"six tenths, and {100 * mean('cached_share', vllm, '16'):.0f} % from the cache)",
        f"at {min(behind):.1f} to {max(behind):.1f} times the requests (simulated)",
        f"an arm carries {min(spreads):.1f} to {max(spreads):.1f} sessions more or fewer",
    ]
    assert [words for words in said if words not in text] == []


def test_the_page_of_longer_think_times_follows_from_its_lines() -> None:
    text = (RESULTS / "simulated-think.md").read_text()
    rows, shorter = read_rows(RESULTS / "simulated" / "think.csv"), read_rows(SIMULATED)
    for lines in (summary(rows), *(table(rows, column) for column in MEASURES)):
        assert "\n".join(lines) in text, lines[0]
    paced, host = "sglang-fp8-host-paced-residency", "vllm-fp8-host"

    def mean(of: list[Row], column: str, arm: str, sessions: int) -> float:
        chosen = [row for row in of if (row["arm"], row["sessions"]) == (arm, str(sessions))]
        return statistics.fmean(float(row[column]) for row in chosen)

    now, before = (
        {arm: statistics.fmean(agents(of, arm)) for arm in (paced, host, "sglang", "vllm")}
        for of in (rows, shorter)
    )
    both_by_draw = list(zip(agents(rows, paced), agents(rows, host), strict=True))
    apart = [f"{ours - theirs:.1f}" for ours, theirs in both_by_draw]
    by_draw = ", ".join(f"{ours:.1f} and {theirs:.1f}" for ours, theirs in both_by_draw)
    more = f"{now[paced] / before[paced]:.2f} to {now[host] / before[host]:.2f} times as many"
    words = [
        f"carries {now[paced]:.1f} sessions where it is {before[paced]:.1f}",
        f"same memory {now[host]:.1f} where it is {before[host]:.1f}",
        (
            f"as they come {now['sglang']:.1f} and {now['vllm']:.1f} where it is "
            f"{before['sglang']:.1f} and {before['vllm']:.1f}"
        ),
        (
            f"Ours is {now[paced] / now[host]:.2f} times vLLM with the same memory** "
            f"({before[paced] / before[host]:.2f} times with 10 s), "
            f"{now[paced] / now['sglang']:.1f} times SGLang and "
            f"{now[paced] / now['vllm']:.1f} times vLLM"
        ),
        f"differ by {', '.join(apart[:3])} and {apart[3]} ({by_draw}).",
        f"**{more} sessions with FP8 KV and a host tier;",
    ]
    for column, scale, form in (
        ("within_objective", 100, ".0f"),
        ("cached_share", 1, ".2f"),
        ("requests_per_s", 1, ".2f"),
    ):
        both = [f"{scale * mean(rows, column, paced, at):{form}}" for at in (16, 24)]
        words.append(" and ".join(both))
    shares = [f"{100 * mean(rows, 'within_objective', host, at):.0f}" for at in (16, 24)]
    rates = [f"{mean(rows, 'requests_per_s', host, at):.2f}" for at in (16, 24)]
    words.append(
        f"vLLM has {' and '.join(shares)} % of its turns in time there, at {' and '.join(rates)} "
        "requests/s where ours has"
    )
    least = min(mean(rows, "requests_per_s", paced, at) for at in (10, 12, 16, 24, 32, 48))
    waits = [
        float(row["ttft_p90_s"]) for row in rows if (row["arm"], row["sessions"]) == (paced, "48")
    ]
    words += [
        f"{least:.2f} at the least from ten sessions on, and with 48 sessions",
        f"waits for {min(waits):.0f} s or more, in one of the four draws for {max(waits):.0f} s",
    ]
    assert [word for word in words if word not in text] == []
    assert (
        f"[a GPU carries {more}](simulated-think.md): "
        f"{now[paced]:.1f} with all of it in place of {before[paced]:.1f}, "
        f"{now[host]:.1f} with vLLM and the same memory in place of {before[host]:.1f} (simulated)"
    ) in PAGE.read_text()


def test_more_slices_than_the_tier_keeps_are_fewer_turns_in_time_when_people_think_longer() -> None:
    text = (RESULTS / "simulated-think.md").read_text()
    now, before, recomputed, shorter = (
        read_rows(RESULTS / "simulated" / f"{name}.csv")
        for name in ("think", "think-before", "think-recomputed", "rules-recomputed")
    )
    arm = "sglang-fp8-host-paced-residency"
    now = [row for row in now if row["arm"] == arm]
    levels = (10, 12, 16, 24, 32, 48)
    assert {row["arm"] for row in before} == {arm}
    assert sorted({int(row["sessions"]) for row in before}) == list(levels)

    def mean(of: list[Row], sessions: int, column: str) -> float:
        chosen = [float(row[column]) for row in of if row["sessions"] == str(sessions)]
        assert len(chosen) == 4
        return statistics.fmean(chosen)

    def share(of: list[Row], *sessions: int) -> str:
        return " and ".join(f"{100 * mean(of, at, 'within_objective'):.0f}" for at in sessions)

    def again(of: list[Row], rule: str) -> str:
        """Turns a run that were computed again, with 16 and with 24."""
        turns = (
            [
                int(row["recomputed_turns"])
                for row in of
                if (row["arm"], row["sessions"]) == (rule, sessions)
            ]
            for sessions in ("16", "24")
        )
        return " and ".join(f"{statistics.fmean(runs):.0f}" for runs in turns)

    few = [row for row in now if int(row["sessions"]) < min(levels)]
    carries = statistics.fmean(agents(few + before, arm))
    rates = " and ".join(f"{mean(before, at, 'requests_per_s'):.2f}" for at in (16, 24))
    at_48 = " for ".join(f"{mean(of, 48, 'requests_per_s'):.2f}" for of in (before, now))
    said = [
        f"{share(before, 16, 24)} % with 16 and 24 sessions, {share(before, 32, 48)} % with 32 and",
        f"where it now is {share(now, 32, 48)} %; requests/s {rates}, and with 48 {at_48}",
        f"{again(recomputed, 'priced before')} turns a run with 16 and 24 were computed again",
        f"where it now is {again(recomputed, 'priced')} ([one line",
        f"with 10 s [{again(shorter, 'priced')}]",
        f"hardly changed: {carries:.1f} before",
    ]
    assert [words for words in said if words not in text] == []


def test_the_page_of_smaller_chunks_follows_from_its_lines() -> None:
    text = (RESULTS / "simulated-chunks.md").read_text()
    ours, vllm, sglang = "sglang-fp8-host-paced-residency", "vllm-fp8-host", "sglang-fp8-host"
    # Lines of the page, those of another that stand beside them, and these one's arms.
    parts = {
        "chunks": ("sessions-a-gpu", (sglang, "vllm", vllm, f"{vllm}-residency", ours)),
        "chunks-h200": ("sessions-a-gpu-h200", (sglang, vllm, ours)),
        "chunks-think": ("think", (vllm, ours)),
    }
    for kept, (other, arms) in parts.items():
        beside = read_rows(RESULTS / "simulated" / f"{other}.csv")
        rows = [row for row in beside if row["arm"] in arms]
        rows += read_rows(RESULTS / "simulated" / f"{kept}.csv")
        assert {row["draw"] for row in rows} == {"1", "2", "3", "4"}
        for lines in (summary(rows), *(table(rows, name) for name in list(MEASURES)[:2])):
            assert "\n".join(lines) in text, (kept, lines[0])

        peers = (f"{vllm} chunk 4096", f"{sglang} mixed chunk 4096", vllm)
        mean = {arm: statistics.fmean(agents(rows, arm)) for arm in (*peers, ours)}
        ratios = [mean[ours] / mean[arm] for arm in peers]
        assert "| " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |" in text, (kept, ratios)
        if kept == "chunks":
            _says_what_flags_do([mean[arm] for arm in (*peers[:2], ours)])
        if kept == "chunks-h200":
            shorter = read_rows(SIMULATED)
            stock = (sglang, vllm)
            half = [statistics.fmean(agents(shorter, arm)) for arm in stock]
            full = [statistics.fmean(agents(rows, arm)) for arm in stock]
            carry = f"{mean[peers[0]]:.1f}"
            for words in (
                f"with all the memory of an H200 {ratios[0]:.2f} and {ratios[1]:.2f} times.",
                "from {:.1f} and {:.1f} sessions to {:.1f} and {:.1f} only".format(*half, *full),
                f"vLLM carries {carry} and SGLang with its own mixed chunks {mean[peers[1]]:.1f}:",
            ):
                assert words in PAGE.read_text(), words
            assert (
                f"vLLM in chunks of 4,096 {carry} where it is {mean[vllm]:.1f} with 8,192."
            ) in text
        if kept == "chunks-think":
            behind = statistics.fmean(agents(rows, f"{vllm}-residency chunk 4096"))
            assert (
                f"vLLM carries {mean[peers[0]]:.1f} in place of {mean[vllm]:.1f} ({behind:.1f} "
                f"behind residency), SGLang with mixed chunks of 4,096 {mean[peers[1]]:.1f}, ours "
                f"{mean[ours]:.1f}."
            ) in text
            assert (
                f"with a minute of thinking {ratios[0]:.2f} and {ratios[1]:.2f}, with"
            ) in PAGE.read_text()
            assert (
                f"[vLLM carries {mean[peers[0]]:.1f}](simulated-chunks.md), and SGLang with "
                f"`--enable-mixed-chunk` {mean[peers[1]]:.1f}: ours is {ratios[0]:.2f} and "
                f"{ratios[1]:.2f} times those."
            ) in (RESULTS / "simulated-think.md").read_text()


def _says_what_flags_do(carry: list[float]) -> None:
    """The page of agents a GPU of vLLM's chunks, SGLang's mixed ones, and ours."""
    page = PAGE.read_text()
    for word in (
        f"`--max-num-batched-tokens 4096` {carry[0]:.1f}.",
        f"| and `--enable-mixed-chunk`, chunks of 4,096 | {carry[1]:.1f} |",
        f"| and chunks of 4,096 | {carry[0]:.1f} |",
        f"is {carry[2] / carry[0]:.2f} times vLLM (chunks of 4,096)",
        f"and {carry[2] / carry[1]:.2f} times SGLang with its own mixed chunks",
    ):
        assert word in page, word

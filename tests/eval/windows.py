"""What came in some seconds of a measured run, and which of its turns missed the objective."""

from __future__ import annotations

from typing import Any

import numpy as np

from eval.experiment import Slo
from eval.outcomes import good, recomputed_tokens
from eval.records import Run
from eval.run_lines import turns_of
from tests.eval.published import lines, phases


def within_slo(run: Run) -> float:
    """Turns within the objective, in percent."""
    return 100 * float(good(turns_of(run), Slo()).mean())


def recomputed_percent(run: Run) -> float:
    """Of the prompt tokens of answered turns."""
    turns = turns_of(run)
    turns = turns[turns["ok"]]
    return 100 * float(recomputed_tokens(turns).sum() / turns["prompt_tokens"].sum())


def has_rows(page: str, columns: list[dict[str, Any]], *further: tuple[str, str]) -> None:
    """A row for each label, with what was found of each run."""
    for label, form in (
        ("answers", "{answers}"),
        ("their prompt tokens from cache", "{cached:.3f}"),
        ("first tokens", "{firsts}"),
        ("of them within 10 s", "{early} of {firsts}"),
        ("of them within the SLO", "{good} of {firsts}"),
        *further,
    ):
        cells = " | ".join(form.format(**column) for column in columns)
        assert f"| {label} | {cells} |" in page, label


def until(arm: str, seconds: float) -> dict[str, Any]:
    """In the first seconds of its window."""
    start_s = phases(arm)["window_start_s"]
    return between(arm, start_s, start_s + seconds)


def between(arm: str, start_s: float, end_s: float) -> dict[str, Any]:
    """Answers that ended between two times of a run, and first tokens that came."""
    requests = [r for r in lines(arm) if r["phase"] != "prime"]
    answers = ended(arm, start_s, end_s)
    firsts = [r for r in requests if start_s <= (r["first_token_s"] or 0.0) < end_s]
    waits_s = [r["first_token_s"] - r["scheduled_s"] for r in firsts]
    return {
        "answers": len(answers),
        "cached": sum(r["cached_tokens"] for r in answers)
        / sum(r["prompt_tokens"] for r in answers),
        "firsts": len(firsts),
        "waits_s": waits_s,
        "early": sum(wait_s <= 10 for wait_s in waits_s),
        "good": sum(not r["error"] and not any(missed(r)) for r in firsts),
        "sessions": len({r["session_id"] for r in answers}),
    }


def ended(arm: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Answers that ended between two times of a run, but for those of priming."""
    answers = [r for r in lines(arm) if r["phase"] != "prime" and not r["error"]]
    return [r for r in answers if start_s <= r["finished_s"] < end_s]


def missed(request: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Whether an answer's first token was late, a gap over 1 s, its time a token over 50 ms."""
    new = request["prompt_tokens"] - min(request["best_cached_tokens"], request["prompt_tokens"])
    times_s = [at_s for at_s, _ in request["arrivals"]]
    return (
        request["first_token_s"] - request["scheduled_s"] > 3.0 + 0.0001 * new,
        worst_gap_s(request) > 1.0,
        (times_s[-1] - times_s[0]) / max(1, request["output_tokens"] - 1) > 0.05,
    )


def worst_gap_s(request: dict[str, Any]) -> float:
    """The longest time between two arrivals of its tokens."""
    return float(max(np.diff([at_s for at_s, _ in request["arrivals"]]), default=0.0))

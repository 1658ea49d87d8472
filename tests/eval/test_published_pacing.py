"""What docs/results/simulated.md says of how long a paced step may take beside a host tier."""

from __future__ import annotations

import numpy as np
import pytest

from eval.noise import Verdict
from eval.run_lines import read_rows
from tests.eval.differences import by_draw, difference
from tests.eval.published import RESULTS, lines

PAGE = (RESULTS / "simulated.md").read_text()
ARM = "sglang-fp8-host-paced-residency"


@pytest.mark.parametrize(("sessions", "called"), [(8, "eight"), (10, "ten"), (12, "twelve")])
@pytest.mark.parametrize("target_ms", [450, 600])
def test_longer_steps_bring_nothing(sessions: int, called: str, target_ms: int) -> None:
    rows = read_rows(RESULTS / "simulated" / "target-itl.csv")
    found = by_draw(rows, sessions, f"{ARM} 300 ms", f"{ARM} {target_ms} ms")
    assert found["attainment"].draws == tuple(range(1, 13))
    told_apart = {key for key, item in found.items() if item.verdict is not Verdict.NONE}
    assert told_apart == {"worst_gap_p90"}
    shown = (found[key] for key in ("requests_per_s", "attainment", "goodput_rps", "worst_gap_p90"))
    cells = " | ".join(map(difference, shown))
    assert f"| {called} | {target_ms / 1000:g} s | {cells} |" in PAGE


def test_whose_prompts_were_answered_of_draw_3() -> None:
    """What docs/simulator.md says of the measured run, beside its simulation."""
    answered = [
        line
        for line in lines("vllm-residency-twelve")
        if line["phase"] == "measure" and not line["error"]
    ]
    mean = float(np.mean([line["prompt_tokens"] for line in answered]))
    assert len({line["session_id"] for line in answered}) == 11
    assert f"{mean / 1000:.0f},000" == "62,000"

"""What the KV transfer machinery costs where it is on and never used.

An experiment of two arms on the same trace, at three loads, with repeats: workers that could take
part in transfers against the same workers without. Routing is the same and separates nothing, so
whatever differs is the machinery's. Runs and is judged as any experiment is.
"""

from __future__ import annotations

from typing import Any

from eval.experiment import Experiment

SEEN_BEFORE = (
    "Seen before on this question, vLLM 0.18.1, eight H20, one run an arm: TTFT p90 +38 % with "
    "NIXL and +45 % with Mooncake; in a later series −19 % with Mooncake. Single workers: +7 to "
    "+9 % at high concurrency, with a swing of 40 points between two runs of one arm at low."
)


def experiment(
    without: str,
    with_: str,
    *,
    with_set: dict[str, Any],
    requests: int,
    rates_rps: tuple[float, ...],
    repeats: int,
    fit_input_tokens: int | None,
    seed: int,
) -> Experiment:
    """The experiment; `rates_rps` are requests a second, lowest first."""
    base = rates_rps[0]
    return Experiment.model_validate(
        {
            "name": "connector-tax",
            "description": SEEN_BEFORE,
            "seed": seed,
            "repeats": repeats,
            "baseline": "without",
            "trace": {
                "synth": {
                    "profile": "glm-agentic",
                    "requests": requests,
                    "options": {"rate": base},
                }
            },
            "replay": {
                "mode": "open",
                **({"fit_input_tokens": fit_input_tokens} if fit_input_tokens else {}),
            },
            "loads": [
                {"name": f"{rate:g}rps", "replay": {"time_scale": rate / base}}
                for rate in rates_rps
            ],
            "arms": [
                {"name": "without", "topology": without, "policy": "unified"},
                {"name": "with", "topology": with_, "policy": "unified", "set": with_set},
            ],
        }
    )

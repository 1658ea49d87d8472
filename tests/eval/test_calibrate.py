"""Calibration recovers the constants that steps were made with, and says what it cannot explain."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from deltaserve.errors import InputError
from eval.calibrate import fit, read_steps, to_toml

TRUE = {
    "prefill_overhead_s": 0.02,
    "prefill_tokens_per_s": 200_000.0,
    "prefill_pairs_per_s": 7e8,
    "decode_base_s": 0.004,
    "decode_per_request_s": 0.0007,
    "decode_per_context_token_s": 2.4e-8,
}


def made_steps(
    seed: int, noise: float, overlap: bool, attends_all: bool = False
) -> list[dict[str, Any]]:
    """Steps of two workers by the formulas: cold prefills in chunks, then decodes; one step in 200
    is a pause of seconds."""
    draws = np.random.default_rng(seed)
    steps = []
    for worker in range(2):
        ended_s = 1_000.0
        begun_s = ended_s
        context = 0.0
        for _ in range(60):
            prompt = int(draws.integers(9_000, 90_000))
            kinds = [("extend", at, min(8_192, prompt - at)) for at in range(0, prompt, 8_192)]
            requests = int(draws.integers(1, 12))
            kinds += [("decode", 0, 0)] * int(draws.integers(5, 60))
            context = requests * draws.uniform(20_000, 80_000)
            for kind, before, new in kinds:
                if kind == "extend":
                    took_s = TRUE["prefill_overhead_s"] + new / TRUE["prefill_tokens_per_s"]
                    pairs = (before + new) ** 2 / 2 if attends_all else new * (before + new / 2)
                    took_s += pairs / TRUE["prefill_pairs_per_s"]
                else:
                    took_s = TRUE["decode_base_s"] + TRUE["decode_per_request_s"] * requests
                    took_s += TRUE["decode_per_context_token_s"] * context
                took_s *= draws.normal(1.0, noise) if noise else 1.0
                took_s = 3.0 if draws.random() < 0.005 else took_s
                # With overlap a step is launched when the one before it begins to run.
                launched_s = begun_s + 0.001 if overlap else ended_s
                begun_s, ended_s = ended_s, ended_s + took_s
                steps.append(
                    {
                        "worker_id": f"w{worker}",
                        "forward_mode": kind,
                        "start_unix_s": launched_s,
                        "duration_s": ended_s - launched_s,
                        "prefill_requests": int(kind == "extend"),
                        "prefill_tokens": new,
                        "prefix_tokens": before,
                        "decode_requests": requests if kind == "decode" else 0,
                        "kv_used_tokens": context,
                    }
                )
    return steps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.05, 0.06)])
def test_the_constants_are_found_again(noise: float, within: float, overlap: bool) -> None:
    found = fit(made_steps(1, noise, overlap)).constants()
    assert found.keys() == TRUE.keys()
    for name, true in TRUE.items():
        assert found[name] == pytest.approx(true, rel=within), name


def test_attention_over_the_whole_sequence_is_recognised() -> None:
    whole = fit(made_steps(3, 0.05, False, attends_all=True))
    assert whole.attends_all
    found = tomllib.loads(to_toml(whole, "a CPU", ["r1"]))
    assert found["attends_all"] is True
    assert found["prefill_pairs_per_s"] == pytest.approx(TRUE["prefill_pairs_per_s"], rel=0.06)
    of_new = fit(made_steps(3, 0.05, False))
    assert not of_new.attends_all
    assert "attends_all" not in tomllib.loads(to_toml(of_new, "a GPU", ["r1"]))


def test_what_the_fit_leaves_unexplained_is_said() -> None:
    calibration = fit(made_steps(2, 0.05, True))
    assert calibration.prefill
    assert calibration.decode
    # The pauses are left out of the fit and are in the share of time that it does not predict.
    assert 0 < calibration.decode.left_out < 0.02 * calibration.decode.steps
    assert calibration.decode.predicted_share < 0.9
    assert 0.02 < calibration.decode.median_error < 0.05


def test_the_file_has_what_a_plan_takes(tmp_path: Path) -> None:
    text = to_toml(fit(made_steps(3, 0.02, True)), "test", ["one"])
    table = tomllib.loads(text)
    assert table["name"] == "test"
    assert TRUE.keys() <= table.keys()
    assert table["fit"]["decode"]["steps"] > 1_000
    decodes = [x for x in made_steps(3, 0.02, True) if x["forward_mode"] == "decode"]
    most = max(x["decode_requests"] for x in decodes), max(x["kv_used_tokens"] for x in decodes)
    found = (table["fit"]["decode"][name] for name in ("most_requests", "most_context_tokens"))
    assert tuple(found) == pytest.approx(most, rel=0.01)


def test_too_few_steps_give_no_constants() -> None:
    steps = [step for step in made_steps(4, 0.0, False) if step["forward_mode"] == "extend"]
    calibration = fit(steps)
    assert calibration.decode is None
    assert "decode_base_s" not in calibration.constants()
    assert "too few" in to_toml(calibration, "test", [])


def test_steps_are_read_from_runs_and_files(tmp_path: Path) -> None:
    steps = made_steps(5, 0.0, False)[:30]
    folder = tmp_path / "run" / "steps"
    folder.mkdir(parents=True)
    lines = b"".join(orjson.dumps(step) + b"\n" for step in steps)
    # Other events stand in the same files, and the last line may be torn.
    (folder / "w0.jsonl").write_bytes(lines + b'{"event": "transfer"}\n{"worker_id": "w')
    assert read_steps([tmp_path / "run"]) == steps
    assert read_steps([folder / "w0.jsonl"]) == steps
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=path.name):
            read_steps([path])

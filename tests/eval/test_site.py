"""What an experiment's topologies are before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.errors import InputError
from eval.site import launch_site


@pytest.mark.parametrize("name", ["laptop-sglang", "laptop-vllm-pd"])
def test_measured_runs_of_a_shape_carry_token_ids_unless_the_experiment_says_otherwise(
    name: str,
) -> None:
    load = launch_site().load
    assert load(name, []).serves_text is False
    assert load(name, ["text=true"]).serves_text is True


def test_a_model_of_your_own_is_measured_with_its_tokenizer() -> None:
    assert launch_site().load("sglang", ["model=/models/mine"]).serves_text is True


def test_an_experiment_keeps_every_line_of_its_logs_unless_it_says_otherwise() -> None:
    load = launch_site().load
    assert load("laptop-sglang", []).log_max_bytes == 0
    assert load("laptop-sglang", ["log_max_mb=7"]).log_max_bytes == 7_000_000


def test_an_experiment_takes_free_ports_unless_it_says_otherwise() -> None:
    load = launch_site().load
    assert load("laptop-sglang", []).base_port == 0
    assert load("laptop-sglang", ["base_port=31000"]).base_port == 31000


def test_a_folder_from_another_host_goes_on_where_its_fleet_had_ended(tmp_path: Path) -> None:
    end = launch_site().end
    assert end(tmp_path) == 0, "a run that has no fleet yet"
    record: dict[str, Any] = {
        "host": "a-machine-given-back",
        "topology": {"name": "sglang"},
        "supervisor": {"pid": 1},
        "router_url": None,
        "processes": [],
        "made_unix_s": 0.0,
    }

    def write(state: str) -> None:
        (tmp_path / "fleet.json").write_text(json.dumps(record | {"state": state}))

    for state in ("stopped", "failed"):
        write(state)
        assert end(tmp_path) == 0
    write("ready")
    with pytest.raises(
        InputError, match=r"its run did not end on a-machine-given-back.*remove that folder"
    ):
        end(tmp_path)

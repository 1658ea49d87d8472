"""What an experiment's topologies are before anything is started."""

from __future__ import annotations

import pytest

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

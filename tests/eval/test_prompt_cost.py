"""Prompts are measured on each engine, and all lengths of the experiment follow from that."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deltaserve.errors import InputError
from eval.cli_options import Given
from eval.experiment import Experiment, PromptCost
from eval.experiment_files import load_experiment
from eval.preview import preview
from eval.progress import Progress
from eval.prompt_cost import (
    factor_for,
    find_factor,
    known_factor,
    predicted_s,
    prompts,
    seconds_by_length,
    tokens_for,
)
from eval.provenance import read_prompt_cost
from eval.report import find_runs, gather
from eval.report.opening import opening
from eval.runner import run_experiment
from eval.site import launch_site
from launch.kv import worker_kv
from launch.models import shape_config
from launch.topology_files import load_topology
from tests.eval.test_runner import FakeSite, manifest

TEXT = """
name = "sized"
[trace]
path = "{trace}"
[replay]
length_scale = 0.1
max_input_tokens = 7500
[prompt_cost]
tokens = 5000
seconds = 1.0
[set]
max_total_tokens = 20480
[[arms]]
name = "off"
topology = "t-one"
set = {{ router = {{ admission = {{ rule = "off" }} }} }}
[[arms]]
name = "admission"
topology = "t-one"
set = {{ router = {{ admission = {{ patience_s = 60 }} }} }}
[[arms]]
name = "other"
topology = "t-two"
"""


def cost(**fields: object) -> PromptCost:
    return PromptCost.model_validate({"tokens": 5000, "seconds": 1.0, **fields})


def took(linear_s: float, pair_s: float) -> dict[int, float]:
    return {n: linear_s * n + pair_s * n**2 for n in (5000, 10000)}


@pytest.fixture
def file(tmp_path: Path, small_trace: Path) -> Path:
    path = tmp_path / "sized.toml"
    path.write_text(TEXT.format(trace=small_trace))
    return path


@pytest.fixture
def experiment(file: Path) -> Experiment:
    return load_experiment(str(file))[0]


def find(
    experiment: Experiment, output: Path, fakes: FakeSite, only: list[str] | None = None
) -> tuple[float, str]:
    said = io.StringIO()
    with Progress(Console(file=said, width=200)) as progress:
        factor = find_factor(experiment, output, site=fakes.site(), progress=progress, only=only)
    return factor, said.getvalue()


@given(linear_s=st.floats(1e-6, 1e-2), pair_s=st.floats(0, 1e-6), seconds=st.floats(0.1, 100))
def test_a_prompt_of_the_length_found_is_predicted_to_take_the_time_asked_for(
    linear_s: float, pair_s: float, seconds: float
) -> None:
    by_length = took(linear_s, pair_s)
    tokens = tokens_for(by_length, seconds)
    assert predicted_s(by_length, tokens) == pytest.approx(seconds, rel=1e-4)
    assert linear_s * tokens + pair_s * tokens**2 == pytest.approx(seconds, rel=0.02)


def test_the_fastest_engine_decides() -> None:
    slow, fast = took(2e-4, 0.0), took(1e-4, 0.0)
    assert factor_for(cost(), {"slow": slow, "fast": fast}) == 2.0
    assert factor_for(cost(), {"slow": slow}) == 1.0


@pytest.mark.parametrize(
    ("linear_s", "factor"), [(1.234e-4, 1.6), (1e-6, 4.0), (1.0, 0.25)], ids=str
)
def test_the_factor_has_two_digits_and_stays_within_its_bounds(
    linear_s: float, factor: float
) -> None:
    assert factor_for(cost(), {"arm": took(linear_s, 0.0)}) == factor


def test_prompts_that_are_measured_have_nothing_in_common() -> None:
    sent = list(prompts(5000))
    blocks = [block for prompt in sent for block in prompt.hash_ids]
    assert len(set(blocks)) == len(blocks)
    assert {prompt.input_length for prompt in sent} == {5000, 10000}
    assert len({prompt.session_id for prompt in sent}) == len(sent)


def test_all_lengths_are_multiplied_wherever_they_stand(file: Path) -> None:
    file.write_text(
        file.read_text()
        + '[[loads]]\nname = "l"\nreplay = { max_input_tokens = 1000 }\n'
        + "set = { workers = { colocated = { host_kv_tokens = 40960 } }, chunk_tokens = 2048 }\n"
    )
    found, _ = load_experiment(str(file), ["prompt_cost.factor=2.5"])
    assert found.replay.length_scale == 0.25
    assert found.replay.max_input_tokens == 18688
    assert found.set == {"max_total_tokens": 51200}
    assert found.arms[0].set == {"router": {"admission": {"rule": "off"}}}
    assert found.arms[1].set == {"router": {"admission": {"patience_s": 60}}}
    assert found.loads[0].replay == {"max_input_tokens": 2560}
    assert found.loads[0].set == {
        "workers": {"colocated": {"host_kv_tokens": 102400}},
        "chunk_tokens": 2048,
    }


@pytest.mark.parametrize("factor", [0.25, 1.0, 2.7, 6.0])
def test_the_demo_is_the_same_load_at_every_factor(factor: float) -> None:
    plain, _ = load_experiment("demo")
    assert plain.prompt_cost is not None
    assert plain.prompt_cost.factors[0] <= factor <= plain.prompt_cost.factors[1]
    found, _ = load_experiment("demo", [f"prompt_cost.factor={factor}"])
    kv, longest = found.set["max_total_tokens"], found.replay.max_input_tokens
    assert longest is not None
    assert plain.replay.max_input_tokens is not None
    share = plain.replay.max_input_tokens / plain.set["max_total_tokens"]
    assert longest / kv == pytest.approx(share, rel=0.05)
    for arm in found.arms:
        assert arm.topology is not None
        topology = load_topology(arm.topology, [f"model={found.set['model']}"])
        assert kv % worker_kv(topology, topology.workers[0]).page_tokens == 0
        most = shape_config(topology.model)["max_position_embeddings"]
        assert longest < found.set["context_tokens"] <= most


def test_one_arm_of_each_engine_is_measured_once_without_admission(
    experiment: Experiment, tmp_path: Path
) -> None:
    output, fakes = tmp_path / "out", FakeSite()
    factor, said = find(experiment, output, fakes)
    assert sorted(fakes.up) == ["off/r1", "other/r1"]
    for arm in ("off", "other"):
        overrides = manifest(output / "prompt-cost", f"{arm}/r1")["topology"]["overrides"]
        assert 'router.admission.rule="off"' in overrides
        assert "max_total_tokens=20480" in overrides
    assert "measuring what prompts of 5,000 and 10,000 tokens take on off, other" in said
    assert f"all lengths times {factor:g}; one of " in said
    assert known_factor(experiment, output) == factor
    again = FakeSite()
    assert find(experiment, output, again)[0] == factor
    assert not again.up


def test_what_is_run_alone_is_measured_alone(experiment: Experiment, tmp_path: Path) -> None:
    fakes = FakeSite()
    find(experiment, tmp_path / "out", fakes, only=["admission"])
    assert fakes.up == ["admission/r1"]
    (overrides,) = [
        manifest(tmp_path / "out" / "prompt-cost", run)["topology"]["overrides"] for run in fakes.up
    ]
    assert 'router.admission.rule="off"' in overrides
    assert not any("patience_s" in override for override in overrides)


def test_another_question_is_measured_again(experiment: Experiment, tmp_path: Path) -> None:
    find(experiment, tmp_path, FakeSite())
    other = experiment.model_copy(update={"prompt_cost": cost(seconds=2.0)})
    assert known_factor(other, tmp_path) is None


def test_an_engine_that_does_not_come_up_is_named(experiment: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompt_cost: .*prompt-cost/other/r1 failed; its manif"):
        find(experiment, tmp_path, FakeSite(broken={"t-two"}))
    assert known_factor(experiment, tmp_path) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"first_token_s": None}, "the prompt r1-1 was not answered"),
        ({"cached_tokens": 64}, "the prompt r1-1 was cached"),
    ],
)
def test_a_prompt_that_says_nothing_of_its_cost_is_named(
    tmp_path: Path, line: Mapping[str, object], why: str
) -> None:
    prompt = {
        "request_id": "r1-1", "session_id": "r1-1", "turn": 0, "input_length": 5000,
        "output_length": 1, "scheduled_s": 0.0, "sent_s": 0.0, "first_token_s": 1.0,
    }  # fmt: skip
    (tmp_path / "requests.jsonl").write_text(json.dumps(prompt | dict(line)) + "\n")
    with pytest.raises(InputError, match=why):
        seconds_by_length(tmp_path)


def test_lengths_that_could_become_longer_than_the_traces_are_refused(file: Path) -> None:
    with pytest.raises(InputError, match=r"off has replay.length_scale 0.3; expected at most 0.25"):
        load_experiment(str(file), ["replay.length_scale=0.3"])
    load_experiment(str(file), ["replay.length_scale=0.3", "prompt_cost.factors=[1, 3]"])
    with pytest.raises(InputError, match="lengths may be multiplied by 11 and are never longer"):
        load_experiment(str(file), ["prompt_cost.factor=11"])
    with pytest.raises(InputError, match=r"expected the smaller first, found \[3, 1\]"):
        load_experiment(str(file), ["prompt_cost.factors=[3, 1]"])


def test_the_plan_says_that_lengths_are_measured_first(tmp_path: Path) -> None:
    def lines(*overrides: str) -> str:
        experiment, _ = load_experiment("demo", overrides)
        return "\n".join(preview(experiment, tmp_path, site=launch_site()).lines())

    assert "# lengths: multiplied by what is measured at the start, so that a prompt" in lines()
    given = lines("prompt_cost.factor=2")
    assert "# lengths" not in given
    assert "max_total_tokens=40960" in given


def test_the_command_that_repeats_a_run_has_its_factor(file: Path, tmp_path: Path) -> None:
    command = Given("run", str(file), file, tmp_path, ["repeats=2"], [])
    assert command.with_override("prompt_cost.factor=2.7").command.endswith(
        "--set repeats=2 --set prompt_cost.factor=2.7"
    )


def test_the_report_says_what_prompts_cost_and_leaves_the_measuring_runs_out(
    experiment: Experiment, file: Path, tmp_path: Path, run_writer: Callable[..., Path]
) -> None:
    output, fakes = tmp_path / "out", FakeSite()
    factor, _ = find(experiment, output, fakes)
    chosen, _ = load_experiment(str(file), [f"prompt_cost.factor={factor}"])
    with Progress(Console(file=io.StringIO())) as progress:
        run_experiment(chosen, output, site=fakes.site(), source={}, progress=progress)
    runs = find_runs([output])
    assert sorted(run.arm for run in runs) == ["admission", "off", "other"]
    told = manifest(output, "off/r1")["prompt_cost"]
    assert told == read_prompt_cost(output)
    assert [run.arm for run in find_runs([output / "prompt-cost"])] == ["off", "other"]
    made = run_writer(tmp_path / "made", manifest={"prompt_cost": told})
    facts = dict(opening(gather(find_runs([made]))).facts)
    assert facts["Prompt cost"].startswith(f"all lengths times {factor:g}; one of ")


def test_a_factor_that_is_given_is_what_the_manifest_says(
    experiment: Experiment, file: Path, tmp_path: Path
) -> None:
    chosen, _ = load_experiment(str(file), ["prompt_cost.factor=2"])
    with Progress(Console(file=io.StringIO())) as progress:
        run_experiment(
            chosen, tmp_path, site=FakeSite().site(), source={}, progress=progress, only=["off"]
        )
    assert manifest(tmp_path, "off/r1")["prompt_cost"] == {
        "factor": 2.0, "tokens": 10000, "seconds": {},
    }  # fmt: skip

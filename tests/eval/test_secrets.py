"""What must not be written down is not: by key, in lists, in commands and in files' text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from eval import provenance
from eval.records import Run
from eval.report import find_runs, gather, write_report
from eval.secrets import is_secret, text_without_secrets, without_secrets

SECRET = "sk-very-s3cret"


@pytest.mark.parametrize(
    "key",
    ["api_key", "api-key", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "--api-key",
     "environment.HF_TOKEN", "token", "Authorization", "x-api-key", "db_password", "client_secret"],
)  # fmt: skip
def test_keys_of_secrets(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["max_total_tokens", "tokenizer", "first_token_s", "ttft_s_per_new_token", "kv_capacity_tokens",
     "keep_workers", "--max-input-tokens", "monkeys"],
)  # fmt: skip
def test_keys_that_name_no_secret(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    "text",
    [
        f'api_key = "{SECRET}"',
        f"environment = {{ HF_TOKEN = '{SECRET}' }}",
        f"deltaserve eval run x --set environment.HF_TOKEN={SECRET} --set repeats=3",
        f"deltaserve eval run x --set {shlex.quote(f'environment.HF_TOKEN={SECRET} more')}",
        f"serve --api-key {SECRET}",
        f"--header 'Authorization: Bearer {SECRET}'",
        f'{{"api_key": "{SECRET}"}}',
        f'flags = ["--api-key", "{SECRET}"]',
        f'flags = ["--api-key", "another", "{SECRET}", "--port", "1"]',
    ],
)
def test_a_secret_in_a_text_is_taken_out(text: str) -> None:
    assert SECRET not in text_without_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "deltaserve eval run x --set max_total_tokens=65536 --set repeats=3",
        'tokenizer = "auto"',
        "--header Authorization=@MY_KEY",
    ],
)
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert text_without_secrets(text) == text


def test_tables_and_lists_lose_their_secrets_and_nothing_else() -> None:
    given = {
        "flags": ["--api-key", SECRET, "--port", "1", f"--token={SECRET}"],
        "several": ["--api-key", "another", SECRET, "--port", "1"],
        "environment": {"HF_TOKEN": SECRET, "OMP_NUM_THREADS": "4"},
        "slo": {"ttft_s_per_new_token": 0.0001},
        "max_total_tokens": 5,
    }
    found = without_secrets(given)
    assert SECRET not in json.dumps(found)
    assert found["environment"] == {"HF_TOKEN": "***", "OMP_NUM_THREADS": "4"}
    assert found["slo"] == given["slo"]
    assert found["flags"][2:4] == found["several"][3:] == ["--port", "1"]
    assert found["max_total_tokens"] == 5


def test_no_secret_is_in_a_manifest_or_in_a_report_of_an_old_one(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    secret_everywhere = {
        "source": {
            "command": f"deltaserve eval run e.toml --set arms.a.set.environment.HF_TOKEN={SECRET}",
            "overrides": [f"arms.a.set.environment.HF_TOKEN={SECRET}"],
            "text": f'[set]\nenvironment.HF_TOKEN = "{SECRET}"\n',
        },
        "topology": {
            "model": "m",
            "device": "cpu",
            "environment": {"HF_TOKEN": SECRET},
            "flags": ["--api-key", SECRET],
            "workers": [{"role": "colocated", "count": 1, "flags": [f"--api-key={SECRET}"]}],
        },
    }
    run = make_run(manifest=secret_everywhere)
    assert SECRET not in (run.folder / provenance.MANIFEST).read_text()
    # As an older version wrote it.
    manifest = json.loads((run.folder / provenance.MANIFEST).read_text()) | secret_everywhere
    (run.folder / provenance.MANIFEST).write_text(json.dumps(manifest))
    for path in write_report(gather(find_runs([tmp_path / "runs"])), tmp_path / "report"):
        assert SECRET not in path.read_text()

"""TOML in the README and the docs is what the code that reads it takes: experiments and topologies
as they are, parts of them key by key. Routers are started with their configurations by
tests/router_policies/test_cli.py.

Lines that show a further key as a comment (`# max_think_s = 10`, `# [phases]`) are taken out of the
comment too, all at once: there only names count, since some keys exclude each other. Not looked at:
files that keys name, and what `FOREIGN` lists.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from deltaserve.errors import InputError
from eval.experiment import Experiment
from launch.topology import Topology
from router_policies import _core
from tests.doc_pages import Block, blocks
from tests.doc_settings import check_experiment, check_topology


def uncommented(text: str) -> str:
    """With the keys and tables that comments show."""
    return re.sub(r"(?m)^# ?(?=[a-z_]+ *= |\[+[a-z_]+\])", "", text)


# First line → whose file it is.
FOREIGN = {"# ~/.codex/config.toml": "Codex's settings, which Codex reads"}
_FILES = ("api_keys_file", "tokenizer", "tls_cert_file", "tls_key_file", "worker_ca_file")
BLOCKS = [block for block in blocks() if block.language == "toml"]
OURS = [block for block in BLOCKS if block.text.splitlines()[0] not in FOREIGN]
WHOLE = [block for block in OURS if "[[workers]]" not in block.text or "[engine]" in block.text]
COMMENTED = [block for block in OURS if uncommented(block.text) != block.text]


def check(text: str, folder: Path) -> None:
    """Raises `InputError` for what the reader of a block would refuse."""
    file = folder / "block.toml"
    file.write_text(text)
    keys = tomllib.loads(text).keys()
    if "arms" in keys:
        check_experiment(str(file), [], [])
    elif "extends" in keys or {"engine", "workers"} <= keys:
        check_topology(str(file))
    elif "workers" in keys:
        check_router(file)
    elif "kubernetes" in keys:
        check_settings(file)
    else:
        check_part(tomllib.loads(text))


def check_router(file: Path) -> None:
    """Raises `InputError` for what the router would not start with, files that it names aside."""
    try:
        config = json.loads(_core.load_config(file))
        _core.check(json.dumps({key: config[key] for key in config if key not in _FILES}))
    except ValueError as error:
        raise InputError(str(error)) from None


def check_settings(file: Path) -> None:
    """Raises `InputError` for what no router would read: nobody is asked for its pods."""
    try:
        _core.load_config(file)
    except ValueError as error:
        raise InputError(str(error)) from None


def check_part(document: dict[str, Any]) -> None:
    """Raises `InputError` for a key or value that neither an experiment nor a topology takes."""
    if all(problems(table, document) for table in (Experiment, Topology)):
        raise InputError(f"part of no file: {problems(Experiment, document)}")


def problems(table: type[BaseModel], document: dict[str, Any]) -> list[str]:
    """What is wrong with a document but that keys are missing."""
    try:
        table.model_validate(document)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
            for found in error.errors()
            if found["type"] != "missing"
        ]
    return []


@pytest.mark.parametrize("block", WHOLE, ids=[block.where for block in WHOLE])
def test_every_block_is_one_that_its_reader_takes(block: Block, tmp_path: Path) -> None:
    check(block.text, tmp_path)


@pytest.mark.parametrize("block", COMMENTED, ids=[block.where for block in COMMENTED])
def test_keys_that_comments_show_are_known(block: Block, tmp_path: Path) -> None:
    text = uncommented(block.text)
    if "workers" in tomllib.loads(text):
        check(text, tmp_path)
        return
    told = problems(Experiment, tomllib.loads(text))
    assert not [line for line in told if "Extra inputs" in line]


def test_what_is_of_others_is_there() -> None:
    assert {block.text.splitlines()[0] for block in BLOCKS} >= FOREIGN.keys()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name = "x"\n[trace]\npath = "t"\n[[arms]]\nname = "a"\ntopologie = "sglang"', "topolog"),
        ('extends = "sglang-elastic:1p7d"\nhost_kv = 60', "host_kv"),
        ('polici = "pd"\n[[workers]]\nurl = "http://a:1"', "polici"),
        ('policy = "elastic"\n[policy_params]\nx = 1\n[[workers]]\nurl = "http://a:1"', "x"),
        ('[kubernetes]\nselector = "a=b"\nports = 1', "ports"),
        ("[search]\nbegin = 4", "search.begin"),
        ('[slo]\nttft_s = "fast"', "slo.ttft_s"),
    ],
)
def test_a_key_or_value_that_is_not_known_is_found(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        check(text, tmp_path)

"""The alert rules that operators load. That they ask for metrics which the router has is tested
beside those (`gateway/metrics.rs`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import router_policies

ALERTS = Path(router_policies.__file__).parent / "ops" / "alerts.yml"


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


def test_every_rule_has_what_prometheus_needs(rules: list[dict[str, Any]]) -> None:
    names = [rule["alert"] for rule in rules]
    assert len(names) == len(set(names)) >= 5
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations", "keep_firing_for"}
        assert re.fullmatch(r"\d+[smh]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]


def test_expressions_are_text_whose_brackets_and_quotes_close(rules: list[dict[str, Any]]) -> None:
    for rule in rules:
        expression = rule["expr"]
        assert isinstance(expression, str), rule["alert"]
        assert expression.count('"') % 2 == 0
        bare = re.sub(r'"[^"]*"', "", expression)
        for opening, closing in ("()", "[]", "{}"):
            assert bare.count(opening) == bare.count(closing), rule["alert"]
        assert re.search(r"(==|[<>]=?) *[\d.]+$", bare.strip()), "an alert is a comparison"

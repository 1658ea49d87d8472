"""The Helm chart, as `helm` renders it: what fits together does, and the router reads its settings.

Skipped where there is no `helm`. That an API server takes the manifests is shown by
tests/live/test_kubernetes_live.py.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from router_policies import _core
from router_policies.cli import _WORKER_FIELDS
from tests.doc_pages import ROOT
from tests.programs import program

HELM = program("helm")
CHART = ROOT / "deploy/helm/deltaserve"
# The fewest that it needs, and all of it.
FEW = {"kubernetes": {"selector": "app=sglang"}}
ALL = {
    "config": 'policy = "selective"\n\n[admission]\nrule = "off"\n',
    "kubernetes": {
        "namespace": "engines",
        "worker": {"kv_capacity_tokens": 1_000_000, "kv_events": "tcp://*:5557"},
    },
    "picker": {"enabled": True},
    "apiKeys": {"secret": "clients"},
    "admin": {"secret": "admin"},
    "workerKey": {"secret": "engines"},
    "serviceMonitor": {"enabled": True, "bearerSecret": "scrape"},
    "podDisruptionBudget": {"enabled": True},
    "workers": {
        "coder": {"replicas": 2, "image": "sglang:1", "resources": {"limits": {"x.y/gpu": 1}}},
        "prefill": {
            "image": "sglang:1",
            "role": "prefill",
            "port": 30001,
            "worker": {"bootstrap_port": 8998, "kv_capacity_tokens": 2_000_000},
        },
    },
}
VARIABLES = ("DELTASERVE_ADMIN_TOKEN", "DELTASERVE_WORKER_KEY")

pytestmark = pytest.mark.skipif(HELM is None, reason="there is no helm")


def helm(folder: Path, values: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    assert HELM
    file = folder / "values.json"
    file.write_text(json.dumps(values))
    command = [HELM, *words, str(CHART), "--values", str(file), "--kube-version", "1.34.0"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rendered(folder: Path, values: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """The manifests, by kind and name."""
    said = helm(folder, values, "template", "--namespace", "serving", "coder")
    assert said.returncode == 0, said.stderr
    made = [each for each in yaml.safe_load_all(said.stdout) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def takes(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("values", [FEW, ALL], ids=["few", "all"])
def test_it_has_no_lint(values: dict[str, Any], tmp_path: Path) -> None:
    said = helm(tmp_path, values, "lint", "--strict")
    assert said.returncode == 0, said.stdout + said.stderr


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for values, why in (
        ({}, "kubernetes.selector: expected the labels"),
        ({"workers": {"coder": {"replicas": 2}}}, "workers.coder.image: expected"),
    ):
        said = helm(tmp_path, values, "template", "coder")
        assert said.returncode != 0
        assert why in said.stderr


@pytest.mark.parametrize("values", [FEW, ALL], ids=["few", "all"])
def test_the_router_reads_its_settings(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, f"key-of-{variable}")
    made = rendered(tmp_path, values)
    file = tmp_path / "router.toml"
    file.write_text(made["ConfigMap", "coder-deltaserve"]["data"]["router.toml"])
    config = json.loads(_core.load_config(file))
    assert config["host"] == "0.0.0.0"
    assert config["kubernetes"]["port"] == 30000
    (router,) = made["Deployment", "coder-deltaserve"]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in router["ports"]}
    assert ports["http"] == config["port"]
    if values is FEW:
        assert config["kubernetes"]["namespace"] == "serving"
        assert config["kubernetes"]["selector"] == "app=sglang"
        assert config["picker"] is None
        return
    assert config["policy"] == "selective"
    assert config["admission"] == {"rule": "off"}
    assert config["kubernetes"]["worker"] == values["kubernetes"]["worker"]
    assert ports["picker"] == config["picker"]["port"]
    given = {each["name"] for each in router["env"]}
    assert {*VARIABLES, "DELTASERVE_API_KEYS"} <= given
    # Its pods are what it looks for, with keys that it takes.
    selector = dict(pair.split("=") for pair in config["kubernetes"]["selector"].split(","))
    for group in ("coder", "prefill"):
        deployment = made["Deployment", f"coder-deltaserve-{group}"]
        assert deployment["metadata"]["namespace"] == config["kubernetes"]["namespace"]
        pod = deployment["spec"]["template"]
        assert takes(selector, pod["metadata"]["labels"])
        assert takes(deployment["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"])
        budget = made["PodDisruptionBudget", f"coder-deltaserve-{group}"]["spec"]["selector"]
        assert takes(budget["matchLabels"], pod["metadata"]["labels"])
        said = {**pod["metadata"]["labels"], **pod["metadata"]["annotations"]}
        own = {key.partition("/")[2] for key in said if key.startswith("deltaserve/")}
        assert own <= {*_WORKER_FIELDS, "port"} - {"id", "api_key", "bootstrap_host"}
        (engine,) = pod["spec"]["containers"]
        drain_s = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["spec"]["terminationGracePeriodSeconds"] > drain_s
        assert str(engine["ports"][0]["containerPort"]) == said["deltaserve/port"]
    assert said["deltaserve/kv_capacity_tokens"] == "2000000"
    router_pod = made["Deployment", "coder-deltaserve"]["spec"]["template"]["metadata"]["labels"]
    assert not takes(selector, router_pod)


def test_the_parts_find_each_other(tmp_path: Path) -> None:
    made = rendered(tmp_path, ALL)
    deployment = made["Deployment", "coder-deltaserve"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    (router,) = deployment["template"]["spec"]["containers"]
    assert takes(deployment["selector"]["matchLabels"], labels)
    service = made["Service", "coder-deltaserve"]
    assert takes(service["spec"]["selector"], labels)
    assert {each["targetPort"] for each in service["spec"]["ports"]} == {
        each["name"] for each in router["ports"]
    }
    monitor = made["ServiceMonitor", "coder-deltaserve"]["spec"]
    assert takes(monitor["selector"]["matchLabels"], service["metadata"]["labels"])
    assert monitor["endpoints"][0]["port"] in {each["name"] for each in service["spec"]["ports"]}
    budget = made["PodDisruptionBudget", "coder-deltaserve"]["spec"]["selector"]["matchLabels"]
    assert takes(budget, labels)
    # It may ask what it asks, where the workers are, and nothing else.
    role = made["Role", "coder-deltaserve"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    binding = made["RoleBinding", "coder-deltaserve"]
    assert {role["metadata"]["namespace"], binding["metadata"]["namespace"]} == {"engines"}
    account = deployment["template"]["spec"]["serviceAccountName"]
    assert ("ServiceAccount", account) in made
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (account, "serving")

"""The router's decisions of a run, joined to its requests.

Owns how decision and finish events become columns. Knows the decision log; not what is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

DECISION_FILES = ("decisions.1.jsonl", "decisions.jsonl")
"""The decision log in a run's folder: of one that is bounded the first holds the older lines."""

_DECISION_COLUMNS = (
    "decision_id",
    "request_id",
    "ts_unix_s",
    "policy",
    "kind",
    "reason",
    "prefill_worker",
    "decode_worker",
    "predicted_s",
    "believed_cached_tokens",
    "noted_cached_tokens",
    "recomputed_tokens",
    "decided_to_first_token_s",
    "outcome",
)


def decision_table(events: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Decision and finish events, one row a decision."""
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        key = str(event.get("decision_id"))
        if event.get("event") == "decision":
            separated = event.get("kind") == "prefill_decode"
            prefill = event.get("prefill") if separated else event.get("worker")
            decode = event.get("decode") if separated else event.get("worker")
            believed = (event.get("cached_tokens") or {}).get(prefill)
            rows.setdefault(key, {"decision_id": key}).update(
                request_id=event.get("request_id"),
                ts_unix_s=event.get("ts_unix_s"),
                policy=event.get("policy"),
                kind=event.get("kind"),
                reason=event.get("reason"),
                prefill_worker=prefill,
                decode_worker=decode,
                predicted_s=event.get("predicted_s"),
                believed_cached_tokens=believed,
            )
        elif event.get("event") == "finish":
            rows.setdefault(key, {"decision_id": key}).update(
                decided_to_first_token_s=event.get("first_token_s"),
                outcome=event.get("outcome"),
                noted_cached_tokens=event.get("cached_tokens"),
                recomputed_tokens=event.get("recomputed_tokens"),
            )
    return pd.DataFrame.from_records(list(rows.values()), columns=list(_DECISION_COLUMNS))


def join_decisions(requests: pd.DataFrame, decisions: pd.DataFrame) -> pd.DataFrame:
    # A stream that the router began while its turn waited has no header with its decision's id.
    of_request = decisions.drop_duplicates("request_id", keep="last").set_index("request_id")
    known = requests["decision_id"].fillna(requests["request_id"].map(of_request["decision_id"]))
    requests = requests.assign(decision_id=known)
    joined = requests.merge(
        decisions.drop(columns=["request_id"]), on="decision_id", how="left", validate="m:1"
    )
    # vLLM counts the KV that it was sent as cached; the router knows, and notes nothing then.
    unknown = (
        joined["kind"].eq("prefill_decode")
        & joined["outcome"].eq("ok")
        & joined["noted_cached_tokens"].isna()
    )
    joined.loc[unknown, ["cached_tokens", "new_tokens"]] = float("nan")
    joined = joined.drop(columns=["noted_cached_tokens"])
    for name in (
        "predicted_s",
        "decided_to_first_token_s",
        "believed_cached_tokens",
        "recomputed_tokens",
    ):
        joined[name] = pd.to_numeric(joined[name]).astype(float)
    return joined

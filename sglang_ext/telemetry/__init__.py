"""What an SGLang worker did, one JSON line an event, for the reports that explain a number.

Four kinds of events, each from its own module: `steps` (what each forward pass held and how long
it took), `requests` (when a request passed each phase), `transfers` (the KV bytes that the
transfer engine was asked to move, and those the decode cache saved) and `garbage` (garbage
collections that stopped the scheduler). `sink` writes them to the
folder ``DELTASERVE_TELEMETRY_DIR``, one file a process, which `lines` keeps bounded; `metrics` adds
them up on SGLang's ``/metrics`` page. Nothing here changes what the worker does.
"""

from __future__ import annotations

from sglang_ext.telemetry import requests, steps, transfers

HOOKS = (*steps.HOOKS, *requests.HOOKS, *transfers.HOOKS)

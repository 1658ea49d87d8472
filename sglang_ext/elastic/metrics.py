"""The elastic worker's counters on SGLang's ``/metrics`` page.

Knows the worker's `counts` and SGLang's metric labels; nothing of what they count.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.elastic.worker import ElasticWorker
from sglang_ext.prometheus import labels_of


class Exporter:
    """Copies counters to Prometheus.

    ``deltaserve_elastic_events_total{event=…}`` counts what `ElasticWorker.counts` does.
    """

    def __init__(self, worker: ElasticWorker, labels: dict[str, str]) -> None:
        from prometheus_client import (  # type: ignore[import-not-found,unused-ignore]
            Counter,
            Gauge,
        )

        self._worker = worker
        self._labels = labels
        self._exported: dict[str, int] = {}
        self._exported_quarantine: int | None = None
        self._events: Any = Counter(
            "deltaserve_elastic_events",
            "Requests and events of the elastic worker since its start, by kind.",
            labelnames=[*labels, "event"],
        )
        self._quarantine: Any = Gauge(
            "deltaserve_elastic_quarantined_requests",
            "Failed transfers whose KV pages are kept unused.",
            labelnames=list(labels),
            multiprocess_mode="mostrecent",
        )

    def export(self) -> None:
        """Brings Prometheus up to date; costs next to nothing where nothing has changed."""
        counts = self._worker.counts
        if counts != self._exported:
            for event, count in counts.items():
                if new := count - self._exported.get(event, 0):
                    self._events.labels(**self._labels, event=event).inc(new)
            self._exported = dict(counts)
        quarantined = len(self._worker.quarantine)
        if quarantined != self._exported_quarantine:
            self._quarantine.labels(**self._labels).set(quarantined)
            self._exported_quarantine = quarantined


def exporter_of(worker: ElasticWorker) -> Exporter | None:
    """An exporter, where the server was started with ``--enable-metrics``."""
    labels = labels_of(worker.scheduler)
    return None if labels is None else Exporter(worker, labels)

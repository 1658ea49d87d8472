"""The way to SGLang's own ``/metrics`` page, for the features that count something."""

from __future__ import annotations

from typing import Any


def labels_of(scheduler: Any) -> dict[str, str] | None:
    """SGLang's labels of this scheduler's metrics; None without ``--enable-metrics``.

    Of the ranks of a tensor-parallel group only the first counts, as with SGLang's own metrics.
    Metrics may be made once this has been asked of a scheduler, and not before: SGLang names the
    folder that its processes share first.
    """
    if not scheduler.metrics_reporter.current_scheduler_metrics_enabled:
        return None
    return dict(scheduler.metrics_collector.labels)

"""What a step costs, learnt from the steps that ran.

Knows nothing of SGLang: seconds and token counts come in, seconds go out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

_FEATURES = 6
_FORGETTING = 0.98
_SWEEPS = 40
_OUTLIER = 3.0
_LAUNCH_DRIFT = 1.005
_EAGER_FORGETTING = 0.998
_LAUNCH_BOUND = 1.1
_TOLD = 0.5
_OPTIMISM = 0.99


@dataclass(frozen=True)
class Step:
    """What one engine step computes.

    `prefill_tokens` prompt tokens attend to `prefix_tokens` that lie in the cache before them, and
    to each other: `attended_pairs` of tokens, by default those of a single prompt.
    `decode_requests` produce a token each, with `decode_context_tokens` of KV between them.
    """

    prefill_tokens: int
    prefix_tokens: int
    decode_requests: int
    decode_context_tokens: int
    attended_pairs: float | None = None

    @staticmethod
    def of(
        prompts: Iterable[tuple[int, int]], decode_requests: int, decode_context_tokens: int
    ) -> Step:
        """A step with `prompts`, each (new tokens, cached tokens before them)."""
        tokens, prefix, pairs = 0, 0, 0.0
        for new_tokens, cached_tokens in prompts:
            tokens += new_tokens
            prefix += cached_tokens
            pairs += new_tokens * (cached_tokens + new_tokens / 2)
        return Step(tokens, prefix, decode_requests, decode_context_tokens, pairs)

    def features(self) -> tuple[float, ...]:
        """The terms that a step's time is linear in, scaled to comparable size.

        Weights and launches (constant), dense work (tokens), attention of the prompts (tokens ×
        what they attend to), reading what they attend to, decodes, attention of the decodes.
        """
        tokens = float(self.prefill_tokens)
        pairs = self.attended_pairs
        if pairs is None:
            pairs = tokens * (self.prefix_tokens + tokens / 2)
        return (
            1.0,
            tokens / 1e3,
            pairs / 1e7,
            self.prefix_tokens / 1e4,
            self.decode_requests / 1e1,
            self.decode_context_tokens / 1e5,
        )


@dataclass
class StepTimes:
    """The longer of two: launching the step's kernels, and computing them.

    Launching takes the same whatever the size (62 ms for the 48 layers of Qwen3-Coder-30B-A3B on an
    H200 without CUDA graphs): the shortest of late. With graphs of up to `graph_tokens` it takes
    next to nothing up to there and the whole beyond, and is learnt apart. Computing: recursive
    least squares with forgetting, non-negative coefficients and relative errors; old steps fade
    with a factor of 0.98 a step, so that the model follows the engine.
    """

    _gram: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _FEATURES for _ in range(_FEATURES)]
    )
    _target: list[float] = field(default_factory=lambda: [0.0] * _FEATURES)
    _coefficients: list[float] = field(default_factory=lambda: [0.0] * _FEATURES)
    _error: float = 0.0
    _surprised: bool = False
    _eager_faded: bool = True
    graph_tokens: int | None = None
    """Most tokens of a step, decodes included, that is launched as a CUDA graph."""
    launch_s: float = 0.0
    """What launching a step takes; 0 where it is not known, and part of the fit's constant."""
    eager_launch_s: float = 0.0
    """The same of a step beyond `graph_tokens`, 0 before there was one."""
    steps: int = 0
    largest_chunk_tokens: int = 0
    """Largest prefill among the steps seen: beyond it the model extrapolates."""

    def observe(self, step: Step, duration_s: float, launch_s: float = 0.0) -> None:
        """Learns that `step` took `duration_s` seconds, and launching it `launch_s`."""
        if not (math.isfinite(duration_s) and duration_s > 0):
            return
        if launch_s > 0:
            # A launch may be held up, by the GPU or by others on the machine: the shortest tell.
            if self._is_eager(step):
                known_s = launch_s if self._eager_faded else self.eager_launch_s * _LAUNCH_DRIFT
                self.eager_launch_s = min(launch_s, known_s)
                self._eager_faded = False
            else:
                known_s = self.launch_s or launch_s
                self.launch_s = min(launch_s, known_s * _LAUNCH_DRIFT)
                # The first one may have been compiled. Forgotten bit by bit, it is tried again.
                self.eager_launch_s *= _EAGER_FORGETTING
                self._eager_faded = True
        self.steps += 1
        self.largest_chunk_tokens = max(self.largest_chunk_tokens, step.prefill_tokens)
        predicted_s = self.computing_s(step)
        if duration_s <= _LAUNCH_BOUND * launch_s:
            # Computing took no longer than this launch: how long, the step does not say. As long as
            # nothing but such steps come, the model may take computing for slower than it is.
            if predicted_s > _TOLD * duration_s:
                self._coefficients = [_OPTIMISM * c for c in self._coefficients]
                self._target = [_OPTIMISM * t for t in self._target]
            return
        scale_s = duration_s
        if self.steps > 5 and predicted_s > 0:
            # A compilation or another tenant's burst must not be taken for what a step costs; what
            # happens twice in a row is a slowdown, and gets through a factor at a time.
            surprising = duration_s > _OUTLIER * predicted_s
            if surprising and not self._surprised:
                self._surprised = True
                return
            self._surprised = surprising
            error = min(1.0, abs(duration_s - predicted_s) / predicted_s)
            self._error += 0.1 * (error - self._error)
            duration_s = min(duration_s, _OUTLIER * predicted_s)
            # Errors relative to the measured time would favour the shortest of many noisy steps.
            scale_s = min(max(predicted_s, duration_s / _OUTLIER), duration_s * _OUTLIER)
        features = step.features()
        for i in range(_FEATURES):
            row = self._gram[i]
            for j in range(_FEATURES):
                row[j] = _FORGETTING * row[j] + features[i] * features[j] / scale_s**2
            self._target[i] = _FORGETTING * self._target[i] + features[i] * duration_s / scale_s**2
        self._fit()

    def _fit(self) -> None:
        """Non-negative least squares by coordinate descent from the last solution."""
        x = self._coefficients
        for _ in range(_SWEEPS):
            moved = 0.0
            for j in range(_FEATURES):
                # The ridge keeps a term at zero that no step has shown yet.
                diagonal = self._gram[j][j] * (1 + 1e-9)
                if diagonal <= 0:
                    continue
                gradient = self._target[j] - sum(
                    g * c for g, c in zip(self._gram[j], x, strict=True)
                )
                better = max(0.0, x[j] + gradient / diagonal)
                moved = max(moved, abs(better - x[j]))
                x[j] = better
            if moved <= 1e-5 * max(x):
                return

    def predict(self, step: Step) -> float:
        """Seconds that `step` will take, by what has been seen; 0 before anything was."""
        launch_s = self.launch_s
        if self._is_eager(step):
            launch_s = max(launch_s, self.eager_launch_s)
        return max(launch_s, self.computing_s(step))

    def _is_eager(self, step: Step) -> bool:
        tokens = step.prefill_tokens + step.decode_requests
        return self.graph_tokens is not None and tokens > self.graph_tokens

    def computing_s(self, step: Step) -> float:
        """The part of `predict` that is not launching."""
        return sum(c * f for c, f in zip(self._coefficients, step.features(), strict=True))

    @property
    def error(self) -> float:
        """Mean relative error of recent predictions."""
        return self._error

"""What holds for every test, however the test run was started."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail: it is busy with the other tests.
settings.register_profile(
    "patient", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# A shell that is not interactive starts what it sends to the background with SIGINT ignored, and
# children inherit that; tests interrupt processes as a user's Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""What holds for every test, however the test run was started."""

from __future__ import annotations

import signal

from hypothesis import settings

# How long an example takes depends on what else the machine does, here above all the other tests.
settings.register_profile("deltaserve", deadline=None)
settings.load_profile("deltaserve")

# A shell that is not interactive starts what it sends to the background with SIGINT ignored, and
# children inherit that; tests interrupt processes as a user's Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

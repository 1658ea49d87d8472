"""What holds for every test, however the test run was started."""

from __future__ import annotations

import signal

# A shell that is not interactive starts what it sends to the background with SIGINT ignored, and
# children inherit that; tests interrupt processes as a user's Ctrl-C does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

"""`python -m localcluster`: see `localcluster.cli`."""

import signal
import sys

# Ctrl-C while modules are still being imported ends the program without a traceback; there is nothing to clean up yet.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from localcluster.cli import main

sys.exit(main())

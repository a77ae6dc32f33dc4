"""Python itself, tuned for one event loop beside threads that tokenize."""

import gc
import sys

SWITCH_INTERVAL_S = 0.0005
"""A thread that computes is asked for the interpreter after so long; Python's own 5 ms is a token's time."""


def settle() -> None:
    """Call once, when everything is loaded: what is there by then stays, and need not be looked at again.

    A full collection walks every object of the imported libraries while all streams wait.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()

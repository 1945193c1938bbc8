"""One command of a study, in a process of its own that does not outlive the study: ``python -m ambiseg.studies.child``.

A study that is killed cannot stop what it started, and a training that goes on unseen would be met by the next one.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

PARENT = "AMBISEG_STUDY_PROCESS"
_INTERVAL = 0.5  # seconds between two looks
_GRACE = 15.0  # seconds to end in good order


def follow(parent: int) -> None:
    """End this process when the one that started it has ended."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_INTERVAL)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="ambiseg-study").start()


def main() -> None:
    """Run ``ambiseg`` with the arguments of this process."""
    parent = os.environ.get(PARENT, "")
    if parent.isdigit() and os.environ.get("LOCAL_RANK", "0") == "0":  # others are followed by the training itself
        follow(int(parent))
    sys.argv[0] = "ambiseg"  # as `run.json` records it
    runpy.run_module("ambiseg", run_name="__main__")


if __name__ == "__main__":
    main()

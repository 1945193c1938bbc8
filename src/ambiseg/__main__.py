"""The program: ``ambiseg``, and ``python -m ambiseg``."""

import signal
import sys


def main() -> int:
    """Run the command that was typed."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback before the command handles signals itself
    from ambiseg.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

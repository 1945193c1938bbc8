"""``python -m ambiseg``."""

import sys

from ambiseg.cli import main

if __name__ == "__main__":
    sys.exit(main())

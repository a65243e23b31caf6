"""``python -m framepipe``."""

import sys

from framepipe.cli import main

if __name__ == "__main__":
    sys.exit(main())

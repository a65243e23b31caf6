"""``python -m framepipe``."""

from framepipe.cli import end

if __name__ == "__main__":
    end()

"""``python -m kvkeep`` is ``kvkeep``."""

from kvkeep.cli.main import run

if __name__ == "__main__":
    run()

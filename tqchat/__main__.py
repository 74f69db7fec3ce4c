"""The `tqchat` command. Small, so that Ctrl-C is heard as early as can be."""

import sys


def main() -> int:
    try:
        from tqchat.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""``python -m relaybox``: the same as ``relaybox``."""

from relaybox.cli import main

if __name__ == "__main__":
    main()

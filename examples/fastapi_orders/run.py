"""Run the whole example until Ctrl-C."""

import signal
import sys
import time
from argparse import ArgumentParser
from select import select

from check import check
from stage import Stage, staged

from relaybox.demo.processes import Broken


def main() -> int:
    """Run it; the exit status."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="use it as a customer would, then end")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker of yours, instead of a new one")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with staged(options.kafka) as stage:
            (check if options.check else serve)(stage)
    except (Broken, OSError) as error:
        print(f"example: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130 if options.check else 0
    return 0


def serve(stage: Stage) -> None:
    """Let people try it until Ctrl-C."""
    print(f"The shop: {stage.url}")
    print(f"Write {' or '.join(stage.names)} to kill it, and again to start it. Ctrl-C ends everything.")
    while True:
        sys.stdout.flush()
        stage.check()
        name = typed(0.5)
        if name not in stage.names:
            continue
        if stage.runs(name):
            stage.kill(name)
            print(f"{name} is dead.")
        else:
            stage.start(name)
            print(f"{name} runs.")


def typed(seconds: float) -> str:
    """Wait so long for a line; what it says."""
    if not select([sys.stdin], [], [], seconds)[0]:
        return ""
    if line := sys.stdin.readline():
        return line.strip()
    # Nobody is there who could write one.
    time.sleep(seconds)
    return ""


if __name__ == "__main__":
    sys.exit(main())

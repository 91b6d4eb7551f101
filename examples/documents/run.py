"""Run the whole example until Ctrl-C."""

import os
import signal
import sys
import time
from argparse import ArgumentParser
from select import select

from check import check
from engines import ENGINES
from stage import Stage, staged

from relaybox.demo.processes import Broken


def main() -> int:
    """Run it; the exit status."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="use it as a person would, then end")
    parser.add_argument(
        "--engine", choices=ENGINES, help="which engine to start; by default the first to be had"
    )
    parser.add_argument(
        "--search",
        metavar="URL",
        help="an engine of yours with the name of a new index, as in meilisearch://HOST:7700/documents; "
        "its key is SEARCH_KEY of the environment",
    )
    options = parser.parse_args()
    if not options.engine:
        options.search = options.search or os.environ.get("MEILISEARCH_URL")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with staged(options.search, options.engine) as stage:
            (check if options.check else serve)(stage)
    except (Broken, OSError) as error:
        print(f"example: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130 if options.check else 0
    return 0


def serve(stage: Stage) -> None:
    """Let people try it until Ctrl-C."""
    print(f"The documents: {stage.url}")
    if stage.engine.is_new:
        print("Write search to kill the search engine, and again to start it. Ctrl-C ends everything.")
    else:
        print("Ctrl-C ends everything.")
    while True:
        sys.stdout.flush()
        stage.check()
        if typed(0.5) != "search" or not stage.engine.is_new:
            continue
        if stage.engine.runs:
            stage.engine.kill()
            print("search is dead.")
        else:
            stage.engine.start()
            print("search runs.")


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

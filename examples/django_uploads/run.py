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
    parser.add_argument("--check", action="store_true", help="use it as a visitor would, then end")
    parser.add_argument("--broker", choices=["redis", "postgresql"], default="redis", help="Celery's broker")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with staged(options.broker) as stage:
            (check if options.check else serve)(stage)
    except (Broken, OSError) as error:
        print(f"example: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130 if options.check else 0
    return 0


def serve(stage: Stage) -> None:
    """Let people try it until Ctrl-C."""
    print(f"The project: {stage.url}")
    print(f"The outbox:  {stage.url}admin/relaybox/outboxevent/ (user admin, password admin)")
    print("Enter stops the runner, and starts it again. Ctrl-C ends everything.", flush=True)
    away = False
    while True:
        stage.check()
        if not enter_pressed(0.5):
            continue
        if away:
            stage.start_runner()
        else:
            stage.stop("runner")
        away = not away
        print("The runner is away." if away else "The runner is back.", flush=True)


def enter_pressed(seconds: float) -> bool:
    """Wait so long for a line; whether one came."""
    if not select([sys.stdin], [], [], seconds)[0]:
        return False
    if sys.stdin.readline():
        return True
    # Nobody is there who could press it.
    time.sleep(seconds)
    return False


if __name__ == "__main__":
    sys.exit(main())

"""The command line's entry, and the only place that exits.

Heavy imports happen inside commands, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import signal
import sys

from tuneserve.cli.app import UsageError, app, close_pipe, wrong_usage
from tuneserve.errors import TuneserveError

# The order of import is the order of the verbs in --help.
# isort: off
from tuneserve.cli import starting
from tuneserve.cli import stages
from tuneserve.cli import serving
from tuneserve.cli import records
# isort: on

__all__ = ["app", "main", "records", "serving", "stages", "starting"]


def main() -> None:
    """Run a command; every error a user can mend becomes a message and an exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and shells' `&` have it
            signal.signal(number, lambda got, _: sys.exit(128 + got))  # so `finally` runs
    try:
        try:
            given = sys.argv[1:] or ["--help"]
            sys.exit(app(given, prog_name="tuneserve", standalone_mode=False))
        except UsageError as error:
            raise wrong_usage(error) from error
    except TuneserveError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.to_json()}))
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        close_pipe()


if __name__ == "__main__":
    main()

"""`python -m kvlab.sandbox`: can generated code be run safely here? Runs the canaries and says.

Exit codes: 0 yes, 1 no, and why on stderr, 2 wrong usage.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the canaries; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.sandbox", description="Check the sandbox for generated code."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document (kvlab.sandbox/1) on stdout")
    args = parser.parse_args(argv)
    from kvlab.sandbox.canaries import CANARIES, CanaryError
    from kvlab.sandbox.refused import SandboxUnavailable
    from kvlab.sandbox.running import check_available

    start, why = time.monotonic(), ""
    try:
        check_available()
    except (SandboxUnavailable, CanaryError) as error:
        why = str(error)
        print(f"error: {error}", file=sys.stderr)
    seconds = round(time.monotonic() - start, 3)
    if args.json:
        canaries = {canary.name: canary.verdict for canary in CANARIES}
        document = {"schema": "kvlab.sandbox/1", "ok": not why, "why": why, "canaries": canaries, "seconds": seconds}
        print(json.dumps(document, indent=1))
    elif not why:
        print(f"{len(CANARIES)} canaries got their verdicts in {seconds:.1f} s: code can be run here")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())

"""Print the matrix, or write it: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
DOCS = TESTS.parent / "docs"


def main() -> int:
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import conftest  # noqa: F401  offline, on the CPU, with one thread
    from diffusers.utils import logging

    from matrix import report

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    options = argparse.ArgumentParser(prog="python tests/matrix", description=sys.modules["matrix"].__doc__)
    options.add_argument("--write", action="store_true", help="write docs/models.md and docs/models.json")
    options.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="rows and strategies to make anew; the rest stays"
    )
    given = options.parse_args()
    found = report.matrix(json.loads((DOCS / "models.json").read_text(encoding="utf-8")), given.only)
    if given.write:
        (DOCS / "models.json").write_text(report.as_json(found), encoding="utf-8")
        (DOCS / "models.md").write_text(report.as_page(found), encoding="utf-8")
    else:
        print(report.as_page(found))
    failed = report.failures(found)
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

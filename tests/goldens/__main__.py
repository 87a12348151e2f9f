"""Records the goldens, or checks them.

    python -m tests.goldens --write          records all areas
    python -m tests.goldens --write routes   records one of them
    python -m tests.goldens --check          shows what differs

A commit that changes a recorded file says why in its body.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.goldens.areas import AREAS, RECORDED, check, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.goldens", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="record what the code makes now")
    action.add_argument("--check", action="store_true", help="show the differences")
    parser.add_argument("--folder", type=Path, default=RECORDED, help="folder of the files")
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}")
    options = parser.parse_args()
    unknown = sorted(set(options.areas) - set(AREAS))
    if unknown:
        parser.error(f"there is no area {unknown[0]}; choose among {', '.join(AREAS)}")
    differing = 0
    folder = options.folder.resolve()  # commands run in another current folder
    for area in options.areas or AREAS:
        began, began_cpu = time.perf_counter(), time.process_time()
        found = write(area, folder) if options.write else check(area, folder)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        what = "written" if options.write else "different"
        print(f"{area}: {len(found)} {what}, {wall_s:.1f} s, {cpu_s:.1f} s of CPU", flush=True)  # noqa: T201
        for line in found:
            print("\n".join(f"  {part}" for part in line.splitlines()))  # noqa: T201
        differing += len(found)
    return int(options.check and differing > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Attack servers in every way that is known, and say what was seen.

    scripts/attack [--list] [--only NAME ...] [--seed N] [--quick] [--minutes M]

Each item starts servers of its own and must lose, repeat and show nothing. A row for each item is
printed as it ends; Ctrl-C ends the run and keeps what was seen. The last line is one JSON object;
1 is the exit status when an item failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

# Before torch is there. Clients use the cores too, and an operation waits for the slowest thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import tests.attack.batches
import tests.attack.live  # noqa: F401  # the items of both
from cosched.config import ENV_VAR
from tests.attack.items import ITEMS, Item, Setting
from tests.forks import Forks
from tests.serving import ServerError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--only", nargs="+", choices=sorted(ITEMS), metavar="NAME", default=None)
    parser.add_argument("--seed", type=int, default=1, help="of what is random (default: 1)")
    parser.add_argument("--quick", action="store_true", help="seconds for each item")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="of the fuzz (default: %(default)g)"
    )
    return parser


def attacked(item: Item, setting: Setting) -> dict[str, object]:
    """Its row: what was seen, or what was wrong."""
    began_s = time.monotonic()
    try:
        seen: dict[str, object] = {"ok": True, "seen": item.run(setting)}
    except (AssertionError, ServerError) as error:
        seen = {"ok": False, "wrong": str(error)[:2000] or traceback.format_exc()[-2000:]}
    except Exception:
        seen = {"ok": False, "wrong": traceback.format_exc()[-2000:]}
    return seen | {"took_s": round(time.monotonic() - began_s, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)
    if args.list:
        for name, item in ITEMS.items():
            print(f"{name:14} {item.what} ({item.full})")
        return 0
    for name in ("uvicorn.error", "cosched.batch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they tell is provoked
    rows: dict[str, dict[str, object]] = {}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cosched-attack-")))
        forks = Forks(root, cleared=(ENV_VAR, "SGLANG_PLUGINS"))
        stack.callback(forks.close)
        for name in args.only or ITEMS:
            console.print(f"{name}: {ITEMS[name].what} ...", highlight=False)
            folder = root / name
            folder.mkdir()
            setting = Setting(
                seed=args.seed,
                folder=folder,
                is_full=not args.quick,
                minutes=0.5 if args.quick else args.minutes,
                forks=forks,
            )
            try:
                rows[name] = attacked(ITEMS[name], setting)
            except KeyboardInterrupt:
                console.print("interrupted")
                break
            print(shown(name, rows[name]), flush=True)
    is_whole = len(rows) == len(args.only or ITEMS)
    ok = is_whole and all(row["ok"] for row in rows.values())
    config = {"seed": args.seed, "quick": args.quick, "minutes": args.minutes}
    print(json.dumps({"config": config, "ok": ok, "interrupted": not is_whole, "items": rows}))
    return 0 if ok else 130 if not is_whole else 1


def shown(name: str, row: dict[str, object]) -> str:
    seen = row.get("seen")
    told = ", ".join(f"{key} {value}" for key, value in seen.items()) if seen else row["wrong"]
    return f"{name:14} {'ok  ' if row['ok'] else 'FAIL'} {row['took_s']:>6} s  {told}"


if __name__ == "__main__":
    sys.exit(main())

"""`cosched.launch_server` whose engine fails on requests with certain ids."""

from __future__ import annotations

import cosched.bootstrap  # isort: skip  # noqa: F401  # first

import sys

from sglang.srt.managers.schedule_batch import Req

FAILS, LEAKS = "fails-", "leaks-"

_update = Req.update_finish_state


def _fail(req, *args, **options):
    if req.rid.startswith((FAILS, LEAKS)) and len(req.output_ids) == 4:
        if req.rid.startswith(LEAKS):
            processor = sys._getframe(1).f_locals["self"]
            processor.token_to_kv_pool_allocator.alloc(3)
        raise ZeroDivisionError(f"on {req.rid}")
    return _update(req, *args, **options)


if __name__ == "__main__":
    from cosched.launch_server import main

    Req.update_finish_state = _fail
    main(sys.argv[1:])

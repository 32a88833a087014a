"""A PostgreSQL server for tests: its files are in a folder of its own, and go with it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import sqlalchemy as sa

from cosched.batch.database import database_url

MISSING = "no PostgreSQL here: neither on PATH nor in /usr/lib/postgresql is an initdb"
# Nothing of it shall survive the machine.
_SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "listen_addresses=")


def programs():
    """The folder of its programs, the newest; None: there are none."""
    found = [Path(path).parent for path in [shutil.which("initdb")] if path]
    debian = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    found += sorted((path.parent for path in debian), key=lambda path: -float(path.parent.name))
    return found[0] if found else None


def skip_if_missing():
    if programs() is None:
        pytest.skip(MISSING)
    pytest.importorskip("psycopg", reason="PostgreSQL needs psycopg (cosched[postgres])")


class Cluster:
    """url  of a database that is empty, reached by a socket and not by the network"""

    def __init__(self, folder, run):
        self.url = f"postgresql://tests@/postgres?host={folder}"
        self._folder, self._run = folder, run

    def start(self):
        settings = (*_SETTINGS, f"unix_socket_directories={self._folder}")
        options = " ".join(f"-c {setting}" for setting in settings)
        self._run("pg_ctl", "start", "--wait", "--log", self._folder / "log", "--options", options)

    def stop(self):
        self._run("pg_ctl", "stop", "--wait", "--mode", "immediate")


@contextlib.contextmanager
def cluster():
    """A `Cluster` that runs."""
    bin_folder = programs()
    assert bin_folder is not None, MISSING
    # The path of a socket may have 107 bytes, which pytest's own folders use up.
    with tempfile.TemporaryDirectory(prefix="cosched-pg-") as name:
        folder, data = Path(name), Path(name) / "data"
        as_user = {}
        if os.geteuid() == 0:  # as which it refuses to run
            user = _some_user()
            as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(folder, user.pw_uid, user.pw_gid)

        def run(program, *arguments):
            command = [bin_folder / program, "-D", data, *arguments]
            done = subprocess.run(
                command, **as_user, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            assert done.returncode == 0, done.stderr.decode()

        run("initdb", "--username=tests", "--auth=trust", "--no-sync", "--encoding=UTF8")
        made = Cluster(folder, run)
        made.start()
        try:
            yield made
        finally:
            made.stop()


def _some_user():
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("PostgreSQL does not run as root, and there is no user nobody")


def make_empty(url):
    """Drop all tables."""
    engine = sa.create_engine(database_url(url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public")

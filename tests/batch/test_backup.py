"""The commands of docs/operate.md, on a store whose batch goes on while they run."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cosched.batch.config import BatchesConfig
from tests.batch.api import Api, lines, serving, until
from tests.batch.stand_in import StandIn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operate.md"
NUM_BEFORE, NUM_LINES = 10, 30


def commands():
    """To back up, and to restore; those of PostgreSQL are left out."""
    section = PAGE.read_text().split("## Back up and restore batches\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    lines = [[line.split("   #")[0] for line in block.splitlines()] for block in blocks]
    made, restored = ([c for c in block if c and "pg_" not in c] for block in lines)
    return made, [c for c in restored if not c.startswith("install")]


def test_a_backup_made_while_a_batch_runs_continues_it(tmp_path, folder):
    if shutil.which("sqlite3") is None:
        pytest.skip("no sqlite3 here")
    back_up, restore = commands()
    assert (len(back_up), len(restore)) == (3, 2)

    def run(commands):
        for command in commands:
            command = command.replace("FOLDER", str(folder)).replace("BACKUP", str(tmp_path / "b"))
            subprocess.run(command, shell=True, check=True)

    before = StandIn(BatchesConfig(folder=str(folder)))
    before.num_answered = NUM_BEFORE
    with serving(before) as url:
        api = Api(url)
        batch = api.create(lines(NUM_LINES))
        counts = lambda: api.batches.retrieve(batch.id).request_counts  # noqa: E731
        until(lambda: counts().completed == NUM_BEFORE)
        run(back_up)
        before.num_answered = None
        api.wait(batch, "completed")
        after_it = api.upload(lines(1))
    run(restore)

    after = StandIn(BatchesConfig(folder=str(folder)))
    with serving(after) as url:
        api = Api(url)
        ended = api.wait(batch, "completed")
        assert set(api.outcome(ended)) == {f"c{n}" for n in range(NUM_LINES)}
        assert after_it.id not in {file.id for file in api.files.list()}
    # Lines that had their answer before the backup are not asked again, the others are.
    assert after.asked.total() == NUM_LINES - NUM_BEFORE
    assert max(after.asked.values()) == 1

"""The quick forms of `scripts/attack`, where no model is needed."""

from __future__ import annotations

import httpx
import pytest

import tests.attack.batches  # noqa: F401  # its items
from cosched.batch.config import BatchesConfig
from tests.attack.items import ITEMS, Setting
from tests.batch.api import serving
from tests.batch.stand_in import StandIn

QUICK = [name for name, item in ITEMS.items() if not item.needs_server and name != "kill"]


@pytest.mark.parametrize("name", QUICK)
def test_an_attack_loses_nothing_and_shows_nothing(name, tmp_path, forks):
    setting = Setting(seed=1, folder=tmp_path, is_full=False, minutes=0.1, forks=forks)
    seen = ITEMS[name].run(setting)
    assert seen and not seen.get("lost") and not seen.get("repeated")


def test_a_full_disk_is_a_503_with_its_reason_in_the_log(tmp_path, caplog):
    """Also where only the file that comes in finds it full."""
    stand_in = StandIn(BatchesConfig(folder=str(tmp_path / "b")))
    with serving(stand_in) as url:
        folder = tmp_path / "b" / "files"
        folder.rmdir()
        form = {"file": ("in.jsonl", b"{}\n")}
        reply = httpx.post(f"{url}/v1/files", files=form, data={"purpose": "batch"})
        folder.mkdir()
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "store_away"
    assert "its files cannot be written: No such file" in caplog.text

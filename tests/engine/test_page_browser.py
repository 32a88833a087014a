"""The page at ``/cosched`` in a real browser, with a stand-in for the engine behind it."""

from __future__ import annotations

import json

import pytest
from fastapi import Request
from fastapi.responses import JSONResponse

from cosched.batch.config import BatchesConfig
from cosched.server.middleware import add_page
from tests.batch.api import Api, line, serving, until
from tests.batch.stand_in import StandIn
from tests.browser import browsing, find_browser
from tests.engine.test_page import hour, state

KEY = "a-key"
TIERS = {"gold": {"ttft_ms": 1000, "tpot_ms": 50}, "free": {"ttft_ms": 4000, "tpot_ms": 75}}
SCREENS = [(1200, 800), (970, 800), (700, 900), (390, 844)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here")
    with browsing(program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    """A batch of each kind: completed with a failed line, refused, and under way."""
    stand_in = StandIn(BatchesConfig(folder=str(tmp_path_factory.mktemp("batches"))))

    async def show(request: Request):
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": "Unauthorized"}, status_code=401)
        slo = {"ttft_ms": 1000, "tpot_ms": 50}
        server = {"policy": "hygen", "slo": slo, "tiers": TIERS, "shutting_down": False}
        return server | {"replicas": [state(tiers=TIERS)]}

    async def show_hour():
        return hour(tiers=TIERS)

    stand_in.app.add_api_route("/cosched", show)
    stand_in.app.add_api_route("/cosched/history", show_hour)
    add_page(stand_in.app)
    with serving(stand_in) as url:
        api = Api(url, key=KEY)
        api.wait(api.create([line("good"), line("bad", "refuse"), line("fine")]))
        api.wait(api.create([line("other", url="/v1/embeddings"), "{" + "x" * 300]))
        stand_in.is_held = True
        api.wait(api.create([line(f"l{i}") for i in range(5)]), "in_progress")
        yield api
        stand_in.is_held = False


@pytest.fixture
def shown(browser, api):
    """`shown(width, height, is_dark=...)`: the page of somebody who has the key."""

    def show(width=1200, height=800, *, is_dark=False):
        # Before any script of the page: one that asked without it would complain at any later time.
        browser.before_scripts(f"sessionStorage.setItem('key', {json.dumps(KEY)})")
        browser.complaints.clear()  # of the test that had no key
        browser.show(f"{api.url}/cosched", width=width, height=height, is_dark=is_dark)
        browser.wait_for("document.querySelectorAll('#batch-rows tr').length >= 3")
        browser.wait_for("!document.getElementById('live').hidden")
        return browser

    return show


def test_it_asks_for_the_key(browser, api):
    browser.show(f"{api.url}/cosched", width=390, height=800)
    browser.wait_for("!document.getElementById('keys').hidden")
    assert browser.value("document.getElementById('fault').textContent") == ""
    enter = (
        "document.getElementById('key').value = %s; document.querySelector('#keys button').click()"
    )
    browser.value(enter % "'wrong'")
    browser.wait_for("document.getElementById('fault').textContent.includes('refuses this key')")
    assert browser.value("document.getElementById('live').hidden")
    browser.value(enter % json.dumps(KEY))
    browser.wait_for("document.querySelectorAll('#batch-rows tr').length == 3")
    browser.wait_for("document.getElementById('keys').hidden")
    assert all("401" in complaint for complaint in browser.complaints)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SCREENS, ids=lambda size: str(size))
def test_all_can_be_seen_without_scrolling_to_the_side(shown, width, height, is_dark):
    browser = shown(width, height, is_dark=is_dark)
    rows = browser.value("[...document.querySelectorAll('#batch-rows tr')].map(r => r.innerText)")
    under_way, refused, completed = rows
    assert "in progress" in under_way and "0 of 5" in under_way and "Cancel" in under_way
    assert "failed" in refused and "line 1: " in refused and "Cancel" not in refused
    assert (
        "2 of 3" in completed
        and "1 failed" in completed
        and "Results" in completed
        and "Errors" in completed
    )
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value("(w => w.scrollWidth <= w.clientWidth)(document.querySelector('.wide'))")
    browser.wait_for("document.querySelectorAll('#charts figure').length == 8")
    assert browser.value("document.querySelector('#charts path').getBBox().width") > 0
    outside = f"e => e.getBoundingClientRect().right > {width}"
    assert not browser.value(
        f"[...document.querySelectorAll('main *')].filter({outside}).map(e => e.outerHTML)"
    )
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 28)" if is_dark else "rgb(255, 255, 255)")
    assert browser.complaints == []


def test_results_and_errors_are_downloaded(shown, api, tmp_path):
    browser = shown()
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.call("Page.setDownloadBehavior", **where)
    (completed,) = [batch for batch in api.batches.list() if batch.status == "completed"]
    for title, name, file_id in (
        ("Results", f"{completed.id}.jsonl", completed.output_file_id),
        ("Errors", f"{completed.id}.errors.jsonl", completed.error_file_id),
    ):
        buttons = "[...document.querySelectorAll('#batch-rows button')]"
        browser.value(f"{buttons}.find(b => b.innerText == '{title}').click()")
        wanted = api.files.content(file_id).text
        until(lambda path=tmp_path / name: path.exists() and path.stat().st_size)
        assert (tmp_path / name).read_text() == wanted and wanted.endswith("\n")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl", ".jsonl"]
    assert browser.complaints == []


def upload(browser, file):
    """Of one line for completions."""
    file.write_text(json.dumps(line("mine")) + "\n")
    chosen = browser.call("Runtime.evaluate", expression="document.getElementById('file')")
    browser.call("DOM.setFileInputFiles", files=[str(file)], objectId=chosen["result"]["objectId"])
    browser.value("document.getElementById('endpoint').value = '/v1/completions'")
    browser.value("document.querySelector('#upload button').click()")


def test_a_file_whose_batch_is_refused_is_not_left_behind(shown, api, tmp_path):
    browser = shown()
    num_files = len(list(api.files.list()))
    browser.value("document.getElementById('window').value = '99d'")
    upload(browser, tmp_path / "in.jsonl")
    browser.wait_for("document.getElementById('fault').textContent.includes('at most 30d')")
    until(lambda: len(list(api.files.list())) == num_files)


@pytest.mark.parametrize(("width", "height"), [(1200, 800), (320, 640)], ids=str)
def test_a_batch_is_uploaded_and_cancelled(shown, api, tmp_path, width, height):
    browser = shown(width, height)
    num_rows = browser.value("document.querySelectorAll('#batch-rows tr').length")
    upload(browser, tmp_path / "in.jsonl")
    first = "document.querySelector('#batch-rows tr')"
    browser.wait_for(f"document.querySelectorAll('#batch-rows tr').length == {num_rows + 1}")
    browser.wait_for(f"{first}.innerText.includes('0 of 1')")
    said = "document.getElementById('uploaded').textContent"
    browser.wait_for(f"{said}.endsWith(': in progress')")
    assert browser.value("document.documentElement.scrollWidth") == width
    cancel = f"[...{first}.querySelectorAll('button')].find(b => b.innerText == 'Cancel').click()"
    browser.value(f"window.confirm = () => false; {cancel}")
    browser.value("window.confirm = () => true")
    (batch,) = api.batches.list(limit=1).data
    assert batch.status in ("validating", "in_progress")
    browser.value(cancel)
    browser.wait_for(f"{first}.innerText.includes('cancelled')")
    browser.wait_for(f"{said}.endsWith(': cancelled')")
    assert "Cancel" not in browser.value(
        f"[...{first}.querySelectorAll('button')].map(b => b.innerText)"
    )
    assert api.batches.retrieve(batch.id).status == "cancelled"
    assert browser.complaints == []

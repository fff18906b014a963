"""The site as a reader sees it, in headless Chromium: `make test-docs`."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
WORDS = {
    "quarantine": "quarantine",
    "LayerWriter": "layerwriter",
    "infinistore_pool_used_bytes": "infinistore_pool_used_bytes",
    "Soft-RoCE": "soft-roce",
    "watermark": "watermark",
    "--disk": "--disk",
}
"""What a reader types, and what the page that is found first has."""
LONGEST = 30_000
"""The height of a page on a wide screen, in pixels, before anything is unfolded."""

pytest.importorskip("mkdocs", reason="`make test-docs` runs this")
playwright = pytest.importorskip("playwright.sync_api", reason="`make test-docs` runs this")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A dead link or a name that is not found ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_shows_what_only_a_repository_needs(site: Path) -> None:
    """A backslash before a `|` in a table, or the file's name as the text of a link.

    Files of the repository are shown as they are.
    """
    pages = {file.relative_to(site): file.read_text() for file in site.rglob("*.html") if "source" not in file.parts}
    cells = {(name, cell) for name, html in pages.items() for cell in re.findall(r"<td.*?</td>", html, re.DOTALL)}
    assert [found for found in cells if r"\|" in found[1]] == []
    links = {(name, link) for name, html in pages.items() for link in re.findall(r"<a [^>]*>[^<]*</a>", html)}
    assert [found for found in links if found[1].endswith(".md</a>")] == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def brightness(page: Any) -> int:
    """That of the background of a page."""
    color: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return int(color.removeprefix("rgb(").split(",")[0])


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_loads_whole_in_light_and_dark_and_from_nowhere_else(
    browser: Any, site: Path, address: str, scheme: str
) -> None:
    page = browser.new_page(color_scheme=scheme)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(request.url))
    page.on("request", lambda request: None if request.url.startswith(address) else problems.append(request.url))
    names = sorted(str(file.relative_to(site)) for file in site.rglob("*.html"))
    assert {"index.html", "reference/commands.html", "project/CHANGELOG.html", "source/examples/vllm.html"} < set(names)
    for name in names:
        reply = page.goto(f"{address}/{name}", wait_until="networkidle")
        assert reply.status == 200
        assert page.locator("h1").first.is_visible(), name
        for picture in page.locator("article img").all():
            loaded = "image => image.decode().then(() => image.naturalWidth)"
            assert not picture.is_visible() or picture.evaluate(loaded), name
        assert page.locator("article code", has_text="flowchart").count() == 0  # a diagram that was not drawn
        assert (brightness(page) > 200) == (scheme == "light"), name
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=f"{folder}/{name.replace('/', '-')}-{scheme}.png")
    page.close()
    assert problems == []


@needs_chromium
def test_no_table_is_wider_than_a_phone_and_no_page_endless_on_a_wide_screen(
    browser: Any, site: Path, address: str
) -> None:
    phone, screen = (browser.new_page(viewport={"width": width, "height": 844}) for width in (390, 1400))
    for name in sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if "source" not in file.parts):
        for page in (phone, screen):
            page.goto(f"{address}/{name}", wait_until="load")
            page.wait_for_selector("article")
            tables = page.locator("article .md-typeset__scrollwrap").all()
            wide = [one for one in tables if one.evaluate("one => one.scrollWidth > one.clientWidth")]
            assert [one.inner_text() for one in wide] == [], name
        assert screen.evaluate("document.documentElement.scrollHeight") < LONGEST, name
    phone.close()
    screen.close()


@needs_chromium
def test_a_link_to_a_method_opens_its_class(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/reference/python.html#infinistore.client.AsyncStore.put", wait_until="networkidle")
    page.locator("details.fold[open]", has_text="AsyncStore").wait_for()
    assert page.locator("details.fold[open]").count() == 1
    page.close()


@needs_chromium
@pytest.mark.parametrize("name", ["reference/performance.html", "architecture.html"])
def test_pictures_follow_the_switch_between_light_and_dark(browser: Any, address: str, name: str) -> None:
    page = browser.new_page(color_scheme="light")
    page.goto(f"{address}/{name}", wait_until="networkidle")
    for theme, other in (("light", "dark"), ("dark", "light")):
        assert (brightness(page) > 200) == (theme == "light")
        pictures = page.locator(f"article img[src$='#only-{theme}']")
        assert pictures.count() > 0
        assert all(picture.is_visible() for picture in pictures.all())
        assert not any(picture.is_visible() for picture in page.locator(f"article img[src$='#only-{other}']").all())
        page.locator("form[data-md-component=palette] label:not([hidden])").click()
    page.close()


@needs_chromium
def test_the_search_finds_pages_and_leads_to_them(browser: Any, address: str) -> None:
    page = browser.new_page()
    for typed, found in WORDS.items():
        page.goto(f"{address}/index.html", wait_until="networkidle")
        page.locator("input[name=query]").click()
        page.keyboard.type(typed)  # it listens to keys
        result = page.locator(".md-search-result__link").first
        result.wait_for(state="visible", timeout=60_000)
        result.click()
        page.wait_for_url(lambda url: "/index.html" not in url, timeout=60_000)
        assert found in page.locator("article").inner_text().lower(), typed
    page.close()

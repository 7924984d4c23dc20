"""The page in a real browser: needs Chromium and the package playwright; skipped without them."""

import shutil

import pytest

import kvkeep
from explain.records import record, text

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
    pytest.mark.filterwarnings("ignore"),  # of playwright
]
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
WAIT_MS = 10_000
HOSTILE = (
    "<script>window.broken = 1</script></script><!-- <img src=x onerror='window.broken=1'> \" ' & &lt; `${x}` \\u003c "
    "\x01\x02\x7f\u202eevil\u202c \u2028 שלום עולם مرحبا بالعالم 👩‍👩‍👧 🎉 e\u0301 \r\n\t </style> ]]>\n"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(record().to_html(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, file):
    """Opens a page, and fails if it reports an error or asks for anything but itself."""
    noise, pages = [], []

    def open_(path=file, fragment="", **options):
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}} | options)
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith("file:") else noise.append(request.url))
        page.goto(f"file://{path}{fragment}")
        page.wait_for_selector("html[data-ready]")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert noise == []


def until(page, truth):
    """Wait for something to be true; the page forbids the strings that playwright itself would evaluate."""
    for _ in range(WAIT_MS // 50):
        if page.evaluate(truth):
            return
        page.wait_for_timeout(50)
    raise AssertionError(truth)


def moment(page):
    return page.evaluate("kvkeep.page.state.moment")


def shades(page, policy):
    """The class of each token under a policy."""
    return page.evaluate(
        """policy => [...document.querySelectorAll(`article[data-policy="${policy}"] [role=option]`)]
        .map(span => [...span.classList].find(name => /^(level-|gone|later)/.test(name)))""",
        policy,
    )


def test_the_slider_moves_all_texts(opened):
    page = opened()
    ends = {run.policy: shades(page, run.policy) for run in record().runs}
    page.focus("#time")
    page.keyboard.press("Home")
    assert moment(page) == 0
    for run in record().runs:
        read = shades(page, run.policy)
        assert len(read) == len(record().tokens) + len(run.answer)
        assert read.count("later") == len(read) - record().chunk
        assert "later" not in ends[run.policy]
        for token, shade in enumerate(ends[run.policy]):
            held = float((run.ledger.dropped[:, token] < 0).float().mean())
            assert shade == (f"level-{max(1, int(held * 10 + 0.5))}" if held else "gone")
    page.keyboard.press("ArrowRight")
    assert moment(page) == 1
    assert "2 of" in page.inner_text("#moment")


def test_the_slider_follows_at_once(opened):
    took = opened().evaluate(
        """() => { const times = []; for (let i = 0; i < 8; i++) { const start = performance.now();
        kvkeep.page.setMoment(i); document.body.offsetHeight; times.push(performance.now() - start); }
        return Math.min(...times); }"""
    )
    assert took < 50


def test_play_runs_to_the_end_and_stops(opened):
    page = opened(fragment="#m=6")
    page.click("#play")
    until(page, "kvkeep.page.state.moment === kvkeep.page.data.moments - 1")
    until(page, "document.getElementById('play').getAttribute('aria-pressed') === 'false'")


def test_a_picked_token_shows_its_heads(opened):
    page, run = opened(), record().runs[0]
    token = int((run.ledger.dropped >= 0).all(dim=0).nonzero()[0])
    page.click(f'article[data-policy="{run.policy}"] [role=option] >> nth={token}')
    part = page.locator(f'#token-panel [data-policy="{run.policy}"]')
    assert f"token {token + 1}" in page.inner_text("#token-panel")
    assert part.locator(".map button.out").count() == len(record().heads)
    part.locator("summary").nth(1).click()
    drops = part.locator("details").nth(1).locator("tbody tr")
    assert drops.count() == len(record().heads)
    cells = drops.nth(0).locator("td").all_inner_texts()
    assert cells[0] == str(int(run.ledger.dropped[0, token]) + 1)
    assert float(cells[1]) == pytest.approx(float(run.ledger.scores[0, token]), rel=0.02, abs=1e-3)
    assert f"t={token}" in page.url


def test_an_answers_token_shows_what_it_missed(opened):
    page, run = opened(), record().runs[2]
    page.click(f'article[data-policy="{run.policy}"] .answer button >> nth=0')
    said = page.inner_text("#answer-panel")
    assert f"Under {run.policy} the answer says" in said
    lost = float(run.missed.missed[0].sum())
    shown = float(said.partition("With the full cache, ")[2].partition("\u00a0%")[0])
    assert shown == pytest.approx(100 * lost, abs=2)
    assert page.locator(".is-missed").count() > 0


def test_the_keyboard_alone(opened):
    page = opened()
    page.keyboard.press("ArrowLeft")
    last = moment(page)
    assert last == page.evaluate("kvkeep.page.data.moments") - 2
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "listbox":
            break
    page.keyboard.press("Home")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    assert page.evaluate("kvkeep.page.state.token") == 12
    assert moment(page) == last
    assert page.evaluate("document.activeElement.getAttribute('aria-activedescendant')").endswith("-12")
    page.focus("#head")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("kvkeep.page.state.head") == 1
    assert page.evaluate("document.activeElement.id") == "head"


def test_a_fragment_opens_the_same_state(opened):
    fragment = "#m=3&t=12&a=1&p=1&h=2"
    page = opened(fragment=fragment)
    assert page.url.endswith(fragment)
    assert page.get_attribute("#link", "href") == fragment
    assert moment(page) == 3
    page.evaluate("location.hash = '#m=99999999&t=-5&a=zz&p=1e9&h=<b>'")
    until(page, "kvkeep.page.state.moment === kvkeep.page.data.moments - 1")
    assert page.evaluate("kvkeep.page.state.token") == -1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_both_widths_and_schemes(opened, width, scheme):
    page = opened(viewport={"width": width, "height": 844}, color_scheme=scheme, fragment="#t=12")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    texts = page.locator(".columns article")
    beside = len({texts.nth(i).bounding_box()["y"] for i in range(3)}) == 1
    assert beside == (width == 1280)
    filled = page.evaluate(
        """() => [...document.querySelectorAll('canvas.strip')].map(canvas => { const all = canvas.getContext('2d')
        .getImageData(0, 0, canvas.width, canvas.height).data; return new Set(new Uint32Array(all.buffer)).size; })"""
    )
    assert len(filled) == 3
    assert min(filled) > 1  # tokens, and gaps between them


def test_pictures_have_words(opened):
    page = opened(fragment="#t=12")
    assert page.evaluate("[...document.querySelectorAll('[role=img]')].every(one => one.getAttribute('aria-label'))")
    assert page.evaluate("[...document.querySelectorAll('button')].every(one => one.textContent || one.ariaLabel)")
    page.locator("summary", has_text="Shades as a table").first.click()
    rows = page.locator("article details tbody tr")
    rows.first.wait_for()
    assert rows.count() == len(record().tokens) + len(record().runs[0].answer)
    page.evaluate("kvkeep.page.setMoment(0)")
    until(page, f"document.querySelectorAll('article details tbody tr').length === {record().chunk}")


def test_a_hostile_text_is_only_text(opened, tmp_path):
    found = kvkeep.explain(
        None, HOSTILE + text(60), question=HOSTILE, policies=["h2o", "local"], budget=40, max_new_tokens=3
    )
    path = tmp_path / "page.html"
    path.write_text(found.to_html(), encoding="utf-8")
    page = opened(path, fragment="#t=3")
    assert page.evaluate("window.broken") is None
    assert page.evaluate("document.images.length + document.querySelectorAll('main script, main style').length") == 0
    shown = page.inner_text('article[data-policy="h2o"] .tokens')
    for piece in ("<script>window.broken", "שלום", "🎉", "&lt;", "\u2401\u2402", "\u27e8202E\u27e9", "</style>"):
        assert piece in shown
    assert "\u202e" not in shown


def test_a_frame_in_a_notebook(browser, opened, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><html data-ready>{record()._repr_html_()}", encoding="utf-8")
    page = opened(path)
    page.frame_locator("iframe").locator("html[data-ready]").wait_for()

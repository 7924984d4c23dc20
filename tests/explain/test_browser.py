"""The page in a real browser: needs Chromium and the package playwright; skipped without them."""

import io
import re

import pytest
from PIL import Image

import kvkeep
from explain.browsing import moment, needs_browser, settled, until
from explain.records import record, text

pytestmark = needs_browser
HOSTILE = (
    "<script>window.broken = 1</script></script><!-- <img src=x onerror='window.broken=1'> \" ' & &lt; `${x}` \\u003c "
    "\x01\x02\x7f\u202eevil\u202c \u2028 שלום עולם مرحبا بالعالم 👩‍👩‍👧 🎉 e\u0301 \r\n\t </style> ]]>\n"
)


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "page.html"
    found = kvkeep.explain(
        None, text(9600), policies=["local"], budget=200, prefill_chunk=32, max_new_tokens=1, question="What?"
    )
    path.write_text(found.to_html(), encoding="utf-8")
    return path


def shades(page, policy):
    """The class of each token under a policy."""
    return page.evaluate(
        """policy => [...document.querySelectorAll(`article[data-policy="${policy}"] [role=option]`)]
        .map(span => [...span.classList].find(name => /^(level-|gone|later)/.test(name)))""",
        policy,
    )


@pytest.mark.long
def test_carriage_returns_are_no_boxes(opened):
    shown = opened().evaluate("['a\\r\\nb', '\\r', '\\x01'].map(kvkeep.visible)")
    assert shown == ["a\nb", "\u2190", "\u2401"]


@pytest.mark.slow
def test_the_slider_moves_all_texts(opened):
    page = opened()
    ends = {run.policy: shades(page, run.policy) for run in record().runs}
    page.focus("#time")
    page.keyboard.press("Home")
    assert moment(page) == 0
    settled(page)
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
    settled(page)
    assert "2 of" in page.inner_text("#moment")


@pytest.mark.slow
def test_play_runs_to_the_end_and_stops(opened):
    page = opened(fragment="#m=6")
    page.click("#play")
    until(page, "kvkeep.page.state.moment === kvkeep.page.data.moments - 1")
    until(page, "document.getElementById('play').getAttribute('aria-pressed') === 'false'")


@pytest.mark.slow
def test_a_picked_token_shows_its_heads(opened):
    page, run = opened(), record().runs[0]
    token = int((run.ledger.dropped >= 0).all(dim=0).nonzero()[0])
    page.click(f'article[data-policy="{run.policy}"] [role=option] >> nth={token}')
    part = page.locator(f'#token-panel [data-policy="{run.policy}"]')
    assert f"token {token + 1}" in page.inner_text("#token-panel")
    assert part.locator(".map button.out").count() == len(record().heads)
    part.locator("summary").nth(1).click()
    drops = part.locator("details").nth(1).locator("tbody tr")
    drops.first.wait_for()
    assert drops.count() == len(record().heads)
    cells = drops.nth(0).locator("td").all_inner_texts()
    assert cells[0] == str(int(run.ledger.dropped[0, token]) + 1)
    assert float(cells[1]) == pytest.approx(float(run.ledger.scores[0, token]), rel=0.02, abs=1e-3)
    assert f"t={token}" in page.url


@pytest.mark.slow
def test_it_opens_on_the_first_word_at_which_the_texts_part(opened):
    run = next(run for run in record().runs if run.parting is not None)
    said = opened().inner_text("#answer-panel")
    assert f"Under {run.policy} the answer says" in said
    assert f"in place {run.parting + 1}; the full cache says" in said


@pytest.mark.slow
def test_an_answers_token_shows_what_it_missed(opened):
    page, run = opened(), record().runs[2]
    page.click(f'article[data-policy="{run.policy}"] .answer button >> nth=0')
    said = page.inner_text("#answer-panel")
    assert f"Under {run.policy} the answer says" in said
    lost = float(run.missed.missed[0].sum())
    shown = float(said.partition("With the full cache, ")[2].partition("\u00a0%")[0])
    assert shown == pytest.approx(100 * lost, abs=2)
    assert page.locator(".is-missed").count() > 0


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_fragment_opens_the_same_state(opened):
    fragment = "#m=3&t=12&a=1&p=1&h=2&f=0"
    page = opened(fragment=fragment)
    assert page.url.endswith(fragment)
    assert page.get_attribute("#link", "href") == fragment
    assert moment(page) == 3
    page.evaluate("location.hash = '#m=99999999&t=-5&a=zz&p=1e9&h=<b>&f=7'")
    until(page, "kvkeep.page.state.moment === kvkeep.page.data.moments - 1")
    assert page.evaluate("kvkeep.page.state.token") == -1


@pytest.mark.slow
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


CONTRAST = """() => {
  const parsed = text => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
  const light = colour => colour.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    const back = parsed(getComputedStyle(element).backgroundColor);
    return over(back, element.parentElement ? behind(element.parentElement) : [255, 255, 255]);
  };
  const faint = element => element && (Number(getComputedStyle(element).opacity) < 1 || faint(element.parentElement));
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const unseen = !element.checkVisibility() || element.closest("script, style, #said");
    if (unseen || !texts.currentNode.data.trim()) continue;
    const back = behind(element), front = over(parsed(getComputedStyle(element).color), back);
    const [low, high] = [light(back), light(front)].sort((one, other) => one - other);
    const ratio = faint(element) ? 1 : (high + 0.05) / (low + 0.05);
    found.push([ratio, element.className, texts.currentNode.data.slice(0, 40)]);
  }
  return found.sort((one, other) => one[0] - other[0]);
}"""
"""The contrast of every text that is seen, lowest first, by the formula of WCAG 2."""


@pytest.mark.slow
@pytest.mark.parametrize("media", ["light", "dark", "print"])
def test_every_text_stands_out_from_its_ground(opened, media):
    page = opened(color_scheme="light" if media == "light" else "dark", fragment="#t=12&m=4")
    for summary in page.locator("summary").all():
        summary.click()
    if media == "print":
        page.emulate_media(media="print")
    found = page.evaluate(CONTRAST)
    assert len(found) > 3 * len(record().tokens)
    assert {"later", "gone", "level-10"} <= {word for _, kind, _ in found for word in kind.split()}
    assert found[0][0] >= 4.5, found[:5]


def ground(page, selector):
    """The most frequent colour of an element, as it is drawn."""
    with Image.open(io.BytesIO(page.locator(selector).first.screenshot())) as image:
        return max(image.convert("RGB").getcolors(2**24))[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_held_and_dropped_differ_for_the_colour_blind(opened, scheme):
    token = int(((record().runs[0].ledger.dropped < 0).float().mean(dim=0) * 2).int().tolist().index(1))
    page = opened(color_scheme=scheme, fragment=f"#t={token}")
    session = page.context.new_cdp_session(page)
    for kind in ("deuteranopia", "protanopia", "tritanopia", "achromatopsia"):
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": kind})
        held, gone = ground(page, "#token-panel .map .in"), ground(page, "#token-panel .map .out")
        assert max(abs(a - b) for a, b in zip(held, gone, strict=True)) > 20, kind
    assert page.locator("#token-panel .map .in").first.inner_text() == "● held"  # and colour is not needed
    assert page.locator("#token-panel .map .out").first.inner_text().startswith("✕ ")


@pytest.mark.slow
def test_a_printed_page_is_whole_and_on_white(opened):
    page = opened(color_scheme="dark", fragment="#t=12")
    page.locator("summary", has_text="Shades as a table").first.click()
    dark = page.evaluate("document.querySelector('canvas.strip').toDataURL()")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    until(page, f"document.querySelector('canvas.strip').toDataURL() !== {dark!r}")
    assert not page.locator("#play").is_visible()
    assert not page.locator("#time").is_visible()
    assert page.locator("#moment").is_visible()
    for part in page.locator(".tokens, .scroll").all():
        hidden = part.evaluate("one => one.scrollHeight - one.clientHeight > 1 && getComputedStyle(one).overflowY")
        assert hidden in (False, "visible")
    printed = page.pdf(format="A4", print_background=True)
    assert printed.startswith(b"%PDF")
    page.emulate_media(media="screen")
    until(page, f"document.querySelector('canvas.strip').toDataURL() === {dark!r}")


@pytest.mark.slow
def test_the_tree_that_a_screen_reader_reads(opened):
    page = opened(fragment="#t=12")
    tree = page.locator("body").aria_snapshot()
    for piece in (
        'heading "What the cache kept" [level=1]',
        'slider "Moment"',
        'button "▶ Play"',
        'listbox "Text under h2o"',
        'list "Answer under local"',
        'table "Heads that hold it under h2o"',
        'img "Positions held under h2o:',
        'img "Attention to this token under h2o, largest',
        'combobox "Head:"',
        'region "Answers and bytes"',
        "layer 0, head 0: ",
    ):
        assert piece in tree, piece
    assert tree.count("option ") > 3 * len(record().tokens)
    assert not re.search(r"- (button|img|combobox|listbox|region|table)$", tree, flags=re.MULTILINE)  # without a name
    said = page.locator("#said")
    assert said.get_attribute("role") == "status"
    page.focus(".tokens")
    page.keyboard.press("End")
    page.keyboard.press("Home")
    described = page.evaluate("document.querySelector('.tokens .is-active').getAttribute('aria-description')")
    held = int((record().runs[0].ledger.dropped[:, 0] < 0).sum()) / len(record().heads)
    assert described == (
        "held by all heads, or nearly all" if held > 0.95 else f"held by about {round(10 * held)}0\u00a0% of heads"
    )
    page.keyboard.press("Enter")
    assert "token 1. h2o. Held by" in said.inner_text()
    page.locator(".answer button").first.click()
    assert said.inner_text().startswith("Under h2o the answer says")


@pytest.mark.slow
def test_a_window_that_changes_its_size(opened):
    page = opened(fragment="#t=12")
    wide = page.evaluate("document.querySelector('canvas.strip').width")
    page.set_viewport_size({"width": 390, "height": 700})
    until(page, f"document.querySelector('canvas.strip').width !== {wide}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1280, "height": 900})
    until(page, f"document.querySelector('canvas.strip').width === {wide}")


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_hostile_text_is_only_text(opened, tmp_path):
    found = kvkeep.explain(
        None, HOSTILE + text(60), question=HOSTILE, policies=["h2o", "local"], budget=40, max_new_tokens=3
    )
    path = tmp_path / "page.html"
    path.write_text(found.to_html(), encoding="utf-8")
    page = opened(path, fragment="#t=3&a=0&p=1&m=<script>window.broken=1</script>&x='\"&__proto__=1&constructor=2")
    assert page.evaluate("window.broken") is None
    assert page.evaluate("document.images.length + document.querySelectorAll('main script, main style').length") == 0
    shown = page.inner_text('article[data-policy="h2o"] .tokens')
    for piece in ("<script>window.broken", "שלום", "🎉", "&lt;", "\u2401\u2402", "\u27e8202E\u27e9", "</style>"):
        assert piece in shown
    assert "\u202e" not in shown
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
def test_a_long_text_is_shown_a_part_at_a_time(opened, long_file):
    page = opened(long_file, fragment="#f=2&t=8001")
    tokens = page.evaluate("kvkeep.page.data.tokens")
    assert len(tokens) > 8000
    assert "Time is sampled" in page.inner_text("#notes")
    shown = page.locator("article [role=option]")
    assert shown.count() == len(tokens) - 8000 + page.evaluate("kvkeep.page.data.runs[0].answer.length")
    assert shown.nth(1).get_attribute("aria-selected") == "true"
    assert "part 3 of 3, from token 8001" in page.inner_text(".parts")
    page.click(".parts button >> nth=0")
    assert shown.count() == 4000
    assert page.url.endswith("f=1")
    page.locator("summary", has_text="Shades as a table").first.click()
    rows = page.locator("article details tbody tr")
    rows.first.wait_for()
    assert rows.count() == 4000
    assert rows.first.locator("th").inner_text() == "4001"
    page.evaluate("location.hash = '#f=0&m=0'")
    until(page, "document.querySelector('.parts').textContent.includes('part 1 of 3')")
    page.keyboard.press("ArrowRight")
    assert moment(page) == 1


@pytest.mark.slow
def test_a_frame_in_a_notebook(browser, opened, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><html data-ready>{record()._repr_html_()}", encoding="utf-8")
    page = opened(path)
    page.frame_locator("iframe").locator("html[data-ready]").wait_for()

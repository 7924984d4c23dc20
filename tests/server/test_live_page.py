"""The page at ``/``: its files, and a browser that chats, edits, stops, and comes back."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest
import real_folders

from kvkeep.server.settings import PAGE_FILES

from .browsing import answers, ask, fits, opened, ready
from .running import keys, serve

ASSETS = Path(str(files("kvkeep.server"))) / "assets"
OWN = sorted(path for path in ASSETS.glob("*.js"))
PUBLISHED = {
    "marked.umd.js": "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
    "purify.min.js": "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
}
"""Files of others → SHA-256 of the file in the package of npm whose version `NOTICE` names."""


# The files, without a browser.


@pytest.mark.long
def test_the_page_needs_no_key_and_can_be_switched_off():
    with serve(keys=keys("anna-anna")) as server:
        for path, (name, kind) in PAGE_FILES.items():
            found = server.client.get(path)
            assert found.status_code == 200
            assert found.headers["content-type"].startswith(kind)
            assert found.content == (ASSETS / name).read_bytes()
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self';" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy
        server.refused(server.client.get("/page.html"), 401)
        server.refused(server.client.get("/vendor/marked.LICENSE"), 401)
    with serve(page=False) as server:
        server.refused(server.client.get("/"), 404)
        server.refused(server.client.get("/vendor/marked.umd.js"), 404)


def test_every_file_is_served_and_none_comes_from_elsewhere():
    html = (ASSETS / "page.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert {name for name in named if name != "data:,"} <= PAGE_FILES.keys()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]* src=)", html)
    for path in OWN:
        text = path.read_text()
        assert f"/{path.name}" in PAGE_FILES
        assert all(f"/{name}" in PAGE_FILES for name in re.findall(r'from "\./([^"]+)"', text))
        assert "://" not in text, path.name
    assert "url(" not in (ASSETS / "page.css").read_text()


def test_texts_become_markup_in_one_place_alone():
    for path in OWN:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|srcdoc", text)
        assert ("sanitize(" in text) == (path.name == "markdown.js")


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_of_others_are_those_that_they_publish(name):
    path = ASSETS / "vendor" / name
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    version = re.search(r"\d+\.\d+\.\d+", path.read_text()[:300])[0]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PUBLISHED[name]
    assert "Copyright" in path.with_name(f"{name.partition('.')[0]}.LICENSE").read_text()
    assert re.search(rf"{re.escape(name)} .* {re.escape(version)},", notice)


# In a browser.


@pytest.fixture(scope="module")
def server():
    with serve(budget=64) as running:
        yield running


@pytest.fixture
def page(chromium, server):
    with opened(chromium, server) as found:
        yield found


def names(page):
    return page.locator("#list button:first-child").all_inner_texts()


@pytest.mark.long
def test_a_chat_is_named_and_found_again(page, server):
    answers(page, "**Half** of", " it", end=False)  # the message is not lost, nor what came of the answer
    page.fill("#text", "Tell me about the sea and everything that lives in it")
    page.press("#text", "Enter")
    assert page.input_value("#text") == ""
    page.wait_for_selector("article .wrong")
    assert page.locator("article.assistant strong").inner_text() == "Half"
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("article .hint")
    ready(page)
    figures = page.inner_text("article.assistant .hint")
    assert re.fullmatch(
        r"6 tokens · [\d.]+ tokens/s · first token after [\d.]+ s · \d+ of \d+ prompt tokens cached · ended at .*",
        figures,
    )
    assert names(page) == ["Tell me about the sea and everything…"]
    shown, sizes = page.inner_text("#log"), page.inner_text("#sizes")
    page.reload()
    page.get_by_role("button", name="Tell me").first.click()
    page.wait_for_selector("article .hint")
    assert page.inner_text("#log") == shown
    assert page.inner_text("#sizes") == sizes
    assert re.search(r"of 64 slots per head hold a conversation of \d+ tokens\. [\d.]+ [KM]iB, snapkv", sizes)


@pytest.mark.slow
def test_a_second_turn_reads_only_what_is_new(chromium):
    with serve(engine={"conversation_memory": 2**26}) as server, opened(chromium, server) as page:
        ask(page, "Once upon a time there was a dog called Rex.")
        ask(page, "What was he called?")
        cached = re.search(r"(\d+) of \d+ prompt tokens cached", page.locator("article .hint").last.inner_text())
        assert int(cached[1]) > 16


@pytest.mark.slow
def test_conversations_are_renamed_deleted_and_brought_back(page):
    for text in ("First one", "Second one"):
        page.click("#new")
        ask(page, text)
    page.get_by_role("button", name="Rename First one").click(force=True)
    page.keyboard.press("Control+A")
    page.keyboard.type("<b>New</b>")
    page.keyboard.press("Enter")
    assert sorted(names(page)) == ["<b>New</b>", "Second one"]
    page.get_by_role("button", name="Delete Second one").click(force=True)
    assert names(page) == ["<b>New</b>"]
    assert page.locator("article").count() == 0
    page.click("#said button")
    assert sorted(names(page)) == ["<b>New</b>", "Second one"]
    assert page.locator("article").count() == 2


@pytest.mark.slow
def test_an_edited_message_and_another_answer_are_forks(page):
    ask(page, "A dog ran home")
    ask(page, "And then?")
    page.get_by_role("button", name="Edit").first.click()
    assert page.evaluate("document.activeElement.value") == "A dog ran home"
    page.keyboard.press("End")
    page.keyboard.type(" quickly")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert [message["content"] for message in sent.value.post_data_json["messages"]] == ["A dog ran home quickly"]
    page.locator("article").nth(1).wait_for()
    ready(page)
    assert page.locator("article").count() == 2
    assert "2/2" in page.inner_text("article.user")
    page.get_by_role("button", name="Regenerate").click()
    page.locator("article.assistant", has_text="2/2").wait_for()
    ready(page)
    page.get_by_role("button", name="Earlier version").first.click()
    assert page.locator("article").count() == 4
    assert "1/2" in page.inner_text("article.user >> nth=0")
    page.get_by_role("button", name="Later version").first.click()
    assert page.locator("article").count() == 2
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    assert page.locator("article.user .text").inner_text() == "A dog ran home quickly"


@pytest.mark.slow
@pytest.mark.parametrize("by", ["click", "Escape"])
def test_stop_keeps_what_was_written(chromium, server, by):
    with opened(chromium, server, max_tokens="2000") as page:
        page.fill("#text", "Once upon a time")
        page.press("#text", "Enter")
        page.wait_for_selector("article.assistant .text > *")
        page.click("#stop") if by == "click" else page.keyboard.press(by)
        page.get_by_text(re.compile("first token after .* stopped")).wait_for()
        ready(page)
        assert page.evaluate("document.activeElement.id") == "text"
        assert server.idle()


@pytest.mark.slow
def test_markdown_has_code_tables_and_a_copy_button(chromium, page):
    code = "for i in range(3):\n    print('<b>' * 400)"
    table = "| a | b |\n|---|--:|\n| 1 | 2 |"
    answers(page, f"# Head\n\n**bold** `x`\n\n```python\n{code}\n``", f"`\n\n{table}\n\n- [x] done\n\n[k](https://a.b)")
    ask(page, "Show **me**")
    assert page.inner_text("article.user .text") == "Show **me**"
    for selector in ("h3", "strong", "pre > code", "table td[align=right]", "li"):
        assert page.locator(f"article.assistant .text {selector}").count() == 1, selector
    assert page.inner_text("pre").rstrip() == code
    link = page.locator("article a")
    assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer nofollow")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the code").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").rstrip() == code
    assert fits(page)


@pytest.mark.slow
def test_a_pinned_message_stays_in_memory(chromium, server):
    with opened(chromium, server, policy="local", budget="40") as page:
        ask(page, "My dog is called Rex and he likes the sea")
        page.get_by_role("button", name="Pin", exact=True).first.click()
        assert page.evaluate("document.activeElement.textContent") == "Unpin"
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Tell me a story about the hills and the far away lands where nobody has ever been, please")
        assert sent.value.post_data_json["pin_messages"] == [0]
        assert "Rex" in "".join(page.locator("#held .pinned").all_inner_texts())
        assert page.locator("#held .gone").count() > 0
        assert "40 of 40 slots" in page.inner_text("#sizes")


@pytest.mark.slow
def test_settings_hold_for_the_conversation(page):
    ask(page, "First")
    page.click("#open-settings")
    page.fill("[name=policy]", "h20")
    page.fill("[name=system]", "Be brief.")
    page.fill("[name=max_tokens]", "3")
    page.get_by_role("button", name="Done").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Second")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_tokens"], body["policy"]) == (3, "h20")
    assert "did you mean" in page.locator("article .wrong").inner_text().lower()
    page.click("#open-settings")
    page.fill("[name=policy]", "h2o")
    page.keyboard.press("Enter")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Try again").click()
        ready(page)
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == [
        "system",
        *("user", "assistant", "user"),
    ]
    page.wait_for_selector("article >> nth=3 >> text=3 tokens")


@pytest.mark.slow
def test_the_page_asks_for_the_key(chromium):
    with serve(keys=keys("anna-anna")) as server, opened(chromium, server) as page:
        page.wait_for_selector("#entry:visible")
        assert page.evaluate("document.activeElement.id") == "key"
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.get_by_text("not one that this server knows").wait_for()
        page.fill("#key", " anna-anna ")
        page.press("#key", "Enter")
        page.wait_for_selector("#text")
        ask(page, "Hello")
        page.reload()
        page.wait_for_selector("#text")  # the tab remembers it
        other = page.context.new_page()  # another one does not, nor anything that outlives the browser
        other.goto(server.url)
        other.wait_for_selector("#key:visible")
        assert "anna" not in other.evaluate("JSON.stringify({...localStorage})")


@pytest.mark.slow
def test_dark_and_light(chromium, server):
    with opened(chromium, server, scheme="dark") as page:
        page.wait_for_selector("#text")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark, light) == ("rgb(20, 23, 27)", "rgb(255, 255, 255)")
        page.reload()
        page.wait_for_selector("#text")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light
        assert page.inner_text("#theme") == "Dark"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_is_wider_than_the_page(chromium, server, width):
    with opened(chromium, server, width, policy="snapkv:window=8,kernel=13,recent=24") as page:
        ask(page, "word" * 200)
        answers(page, "x" * 500 + "\n\n```\n" + "y" * 500 + "\n```\n\n|" + "z|" * 90 + "\n|" + "-|" * 90 + "\n")
        ask(page, "And then?")
        page.wait_for_selector("table")
        assert fits(page)
        if width < 1000:
            page.click("#menu")
            page.wait_for_selector("#side", state="visible")
            assert fits(page)
            page.keyboard.press("Escape")
            page.wait_for_selector("#side", state="hidden")
        box = page.locator("#ask").bounding_box()
        assert box["y"] + box["height"] > 700  # the page has its full height
        page.click("#open-settings")
        assert fits(page)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing(chromium, server, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    with opened(chromium, server, width, scheme=scheme) as page:

        def check():
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()

        page.wait_for_selector("#text")
        check()
        answers(page, "# Head\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> [link](https://a.b)")
        ask(page, "Hello")
        page.unroute("**/v1/chat/completions")
        ask(page, "And then?")
        page.get_by_role("button", name="Edit").first.click()
        check()
        if width < 1000:
            page.click("#menu")
            check()
        page.click("#open-settings")
        check()


@pytest.mark.real
def test_thirty_turns_of_a_real_model_stay_within_the_page(chromium):
    with (
        serve(folder=real_folders.folder("smollm2"), budget=1024, engine={"conversation_memory": 2**28}) as server,
        opened(chromium, server, max_tokens="8") as page,
    ):
        for turn in range(30):
            ask(page, ("Write one line of Python as a code block.", "Name three rivers in a table.")[turn % 2])
        assert page.locator("article").count() == 60
        assert page.locator("article .wrong").count() == 0
        for width in (1280, 768, 390):
            page.set_viewport_size({"width": width, "height": 800})
            assert fits(page), width

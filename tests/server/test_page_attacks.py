"""The live page when a server fails or goes away, a session is gone, and for somebody without a mouse."""

from __future__ import annotations

import json

import pytest

from .browsing import ask, browser
from .running import serve

pytestmark = pytest.mark.slow

FOCUS = "document.activeElement.id || document.activeElement.textContent"


def begin(page):
    """Start a conversation, and wait until it is open."""
    page.wait_for_selector("#new:enabled")
    before = page.locator("#tree button").count()
    page.fill("#policy", "local")
    page.fill("#budget", "24")
    page.click("#new")
    page.locator("#tree button").nth(before).wait_for()
    page.wait_for_selector("#send:enabled")


def names(page):
    """All conversations, and the one that is open."""
    return page.locator("#tree button").all_inner_texts(), page.inner_text("#tree [aria-current]")


def wrong(page):
    """What went wrong, once all is done."""
    page.wait_for_selector("#said.wrong")
    page.wait_for_selector("#send:enabled")
    return page.inner_text("#said")


def test_the_keyboard_keeps_its_place():
    """A button that is pressed is disabled for a while, and those of the tree are made anew."""
    with serve(max_new_tokens=4) as server, browser(server) as page:
        begin(page)
        ask(page, "A first message")
        ask(page, "A second one")
        for _ in range(2):
            page.focus("#fork")
            page.keyboard.press("Enter")
            page.wait_for_selector("#fork:disabled", state="attached")
            page.wait_for_selector("#fork:enabled")
            assert page.evaluate(FOCUS) == "fork"
        for name in reversed(names(page)[0]):
            page.get_by_role("button", name=name).focus()
            page.keyboard.press("Enter")
            page.get_by_role("button", name=name).and_(page.locator("[aria-current]")).wait_for()
            page.wait_for_selector("#send:enabled")
            assert page.evaluate(FOCUS) == name
        page.focus("#rewind")
        page.keyboard.press("Enter")
        page.locator("#log p").nth(2).wait_for(state="detached")
        page.wait_for_selector("#send:enabled")
        assert page.is_disabled("#rewind")
        assert page.evaluate(FOCUS) == "text"


def test_a_conversation_that_cannot_be_opened_leaves_the_other_one_open():
    """Deleted elsewhere, or the server fails: a message would go to what the page does not show."""
    with serve(max_new_tokens=4) as server, browser(server) as page:
        with page.expect_response("**/v1/sessions") as made:
            begin(page)
        gone = made.value.json()["id"]
        ask(page, "To the first")
        begin(page)
        ask(page, "To the second")
        shown, (all_names, second) = page.inner_text("#log"), names(page)
        assert server.client.delete(f"/v1/sessions/{gone}").is_success
        page.click("#tree > li:first-child button")
        assert gone in wrong(page)
        assert (page.inner_text("#log"), names(page)) == (shown, (all_names, second))
        page.route("**/positions", lambda route: route.fulfill(status=500, body='{"error": {}}'))
        page.click("#fork")
        assert wrong(page) == "The server answered 500."
        assert page.inner_text("#log") == shown
        assert names(page)[1] == second
        assert page.locator("#tree button").count() == 3  # the fork is there, and can be opened later
        page.unroute("**/positions")
        page.click("#tree ul button")
        page.wait_for_selector("#tree ul [aria-current]")


@pytest.mark.parametrize("kind", ["error", "away", "cut"])
def test_a_turn_that_fails_is_not_shown_as_a_part_of_the_conversation(kind):
    piece = "data: " + json.dumps({"choices": [{"delta": {"content": "half an ans"}}]}) + "\n\n"
    answers = {
        "error": lambda route: route.fulfill(status=500, body="oh"),
        "away": lambda route: route.abort(),
        "cut": lambda route: route.fulfill(status=200, content_type="text/event-stream", body=piece),
    }
    with serve(max_new_tokens=4) as server, browser(server) as page:
        begin(page)
        ask(page, "Hello")
        shown = page.inner_text("#log")
        page.route("**/v1/chat/completions", answers[kind])
        page.route("**/positions", lambda route: route.abort())
        page.fill("#text", "A message that is not lost")
        page.press("#text", "Enter")
        wrong(page)
        assert page.inner_text("#log") == shown
        assert page.input_value("#text") == "A message that is not lost"
        page.unroute("**/positions")
        page.unroute("**/v1/chat/completions")
        page.click("#send")
        page.locator("#log p").nth(3).wait_for()

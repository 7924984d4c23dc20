"""The page at ``/``: its files, and a browser that chats, forks, takes back, and does not grow."""

from __future__ import annotations

import pytest

from .browsing import ask, browser
from .running import keys, serve

HOSTILE = "<script>window.bad = 1</script> <img src=x onerror='bad=1'> \u202e\x07 \U0001f642"


@pytest.mark.slow
def test_positions_are_those_of_the_memory():
    with serve() as server:
        place = "/v1/sessions/trip/positions"
        server.refused(server.client.get(place), 404)
        server.post("/v1/sessions", {"id": "trip", "budget": 16, "pins": [[0, 3]]})
        empty = server.client.get(place).json()
        assert (empty["positions"], empty["seen_tokens"], empty["budget"]) == ([], 0, 16)
        for _ in range(4):
            server.chat(session_id="trip", max_tokens=10, ignore_eos=True)
        found = server.client.get(place).json()
        assert found["seen_tokens"] > 40
        assert found["pins"] == [[0, 3]]
        assert found["positions"][:3] == [0, 1, 2]
        assert found["shares"][:3] == [1, 1, 1]
        assert round(sum(found["shares"])) <= 16
        assert len(found["texts"]) == len(found["shares"]) == len(found["positions"]) <= 16 * found["heads"]


def test_positions_belong_to_the_key():
    with serve(keys=keys("anna-anna", "ben-ben")) as server:
        anna, ben = ({"Authorization": f"Bearer {one}"} for one in ("anna-anna", "ben-ben"))
        server.post("/v1/sessions", {"id": "trip"}, headers=anna)
        assert server.client.get("/v1/sessions/trip/positions", headers=anna).status_code == 200
        server.refused(server.client.get("/v1/sessions/trip/positions", headers=ben), 404)
        server.refused(server.client.get("/v1/sessions/trip/positions"), 401)


def test_the_page_needs_no_key_and_can_be_switched_off():
    with serve(keys=keys("anna-anna")) as server:
        for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            found = server.client.get(path)
            assert found.status_code == 200
            assert found.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in found.headers["content-security-policy"]
        server.refused(server.client.get("/page.html"), 401)
    with serve(page=False) as server:
        server.refused(server.client.get("/"), 404)


def test_a_chat_with_forks_and_rewinds():
    with serve(max_new_tokens=8) as server, browser(server, 390, "dark") as page:
        page.wait_for_selector("#begin")
        page.fill("#policy", "h20")
        page.click("#begin button")
        page.wait_for_selector("#said.wrong")
        assert "did you mean" in page.inner_text("#said").lower()
        page.fill("#policy", "local")
        page.fill("#budget", "16")
        page.click("#begin button")
        page.wait_for_selector("#tree [aria-current]")
        ask(page, HOSTILE)
        ask(page, "And then?")
        assert page.evaluate("window.bad") is None
        assert "<script>" in page.inner_text("#log")
        assert page.locator("#held .gone").count() > 0
        assert page.locator("#log p").count() == 4
        page.click("#fork")
        page.wait_for_selector("#tree ul [aria-current]")
        page.click("#tree > li > button")
        page.wait_for_selector("#rewind:enabled")
        page.click("#rewind")
        page.locator("#log p").nth(2).wait_for(state="detached")
        page.wait_for_selector("#send:enabled")
        page.click("#rewind")
        page.locator("#log p").nth(0).wait_for(state="detached")
        page.wait_for_selector("#send:enabled")
        assert page.is_disabled("#rewind")  # no turn is left
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_click_and_a_key_pin_tokens():
    with serve(max_new_tokens=8) as server, browser(server) as page:
        page.wait_for_selector("#begin")
        page.fill("#policy", "local")
        page.fill("#budget", "24")
        page.click("#begin button")
        page.wait_for_selector("#tree [aria-current]")
        ask(page, "A first message with some words")
        places = [int(one.get_attribute("data-place")) for one in page.locator("#held [role=option]").all()]
        page.click(f"#at{places[0]}")
        page.wait_for_selector(f"#at{places[0]}.pinned")
        page.wait_for_selector("#send:enabled")
        page.click(f"#at{places[3]}", modifiers=["Shift"])
        page.wait_for_selector(f"#at{places[2]}.pinned")
        page.wait_for_selector("#send:enabled")
        page.click(f"#at{places[0]}", modifiers=["Shift"])
        page.wait_for_selector("#held:not(:has(.pinned))")
        page.wait_for_selector("#send:enabled")
        page.focus("#held")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#at{places[1]}.pinned[aria-selected=true]")
        page.wait_for_selector("#send:enabled")
        ask(page, "Another one, longer than the memory, so that all that is not pinned goes away")
        left = [int(one.get_attribute("data-place")) for one in page.locator("#held [role=option]").all()]
        assert left[0] == places[1]
        assert places[0] not in left


@pytest.mark.slow
def test_the_page_asks_for_the_key():
    with serve(keys=keys("anna-anna")) as server, browser(server) as page:
        page.wait_for_selector("#entry:not([hidden])")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.get_by_text("not one").wait_for()
        page.fill("#key", "anna-anna")
        page.press("#key", "Enter")
        page.wait_for_selector("#begin")
        ask(page, "Hello")
        assert page.locator("#log p").count() == 2


@pytest.mark.slow
def test_nothing_grows_in_200_turns():
    with serve(max_new_tokens=3) as server, browser(server) as page:
        page.wait_for_selector("#begin")
        page.fill("#policy", "local")
        page.fill("#budget", "32")
        page.click("#begin button")
        widths, nodes = [], []
        for turn in range(200):
            ask(page, f"Turn {turn}")
            if turn >= 60:
                box = page.locator("#bar").bounding_box()
                widths.append((box["width"], page.locator("#full").bounding_box()["width"]))
                nodes.append(page.evaluate("document.querySelectorAll('*').length"))
        assert len(set(widths)) == 1
        assert max(nodes) <= min(nodes) + 64
        assert page.locator("#log p").count() == 60

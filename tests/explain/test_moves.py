"""The page while time moves: only what differs is changed, all at once, and nothing that a reader holds is lost."""

import pytest

from explain.browsing import moment, needs_browser, settled, until
from explain.records import record

pytestmark = [*needs_browser, pytest.mark.slow]

ALL = """() => [
    ...[...document.querySelectorAll("main, #about")].map(part => {
        const copy = part.cloneNode(true);
        for (const one of copy.querySelectorAll("[class]")) {
            const names = [...one.classList].filter(name => name !== "is-active").sort().join(" ");
            if (names) one.setAttribute("class", names);
            else one.removeAttribute("class");
        }
        return copy.innerHTML;
    }),
    document.getElementById("time").value, document.getElementById("head").value,
    ...[...document.querySelectorAll("canvas")].map(one => one.toDataURL()),
]"""
"""Everything that a page shows."""
CHANGED = """move => new Promise(done => {
    const found = {tokens: 0, nodes: 0};
    const watch = new MutationObserver(all => {
        const elements = list => [...list].filter(one => one.nodeType === 1).length;
        found.tokens += new Set(all.filter(one => one.target.role === "option").map(one => one.target)).size;
        found.nodes += all.reduce((sum, one) => sum + elements(one.addedNodes) + elements(one.removedNodes), 0);
    });
    const all = {subtree: true, childList: true, attributes: true, attributeFilter: ["class"]};
    watch.observe(document.querySelector("main"), all);
    kvkeep.page.setMoment(move);
    requestAnimationFrame(() => setTimeout(() => (watch.disconnect(), done(found))));
})"""
HEARD = """() => {
    window.heard = [];
    const live = [...document.querySelectorAll("[role=status], [role=alert], output, [aria-live]")];
    for (const region of live) {
        if ((region.getAttribute("aria-live") || "polite") === "off") continue;
        const all = {childList: true, subtree: true, characterData: true};
        new MutationObserver(() => heard.push(region.textContent)).observe(region, all);
    }
}"""
SEEN = """async () => {
    const found = [], articles = [...document.querySelectorAll("article")];
    for (let move = 0; move < 24; move++) {
        kvkeep.page.setMoment((move * 5) % kvkeep.page.data.moments);
        if (move % 3 === 0) await new Promise(done => setTimeout(done, move));
        await new Promise(requestAnimationFrame);
        found.push([
            document.getElementById("moment").textContent.match(/token (\\d+)/)[1] * 1,
            ...articles.map(one => one.querySelectorAll(".tokens :not(.later)").length),
            ...articles.map(one => one.querySelectorAll("details tbody tr").length),
            ...[...document.querySelectorAll("canvas")].map(one => one.ariaLabel.match(/of (\\d+)/)[1] * 1),
        ]);
    }
    return found;
}"""
"""The tokens that each part of the page believes to be read, in each frame."""


def unfold(page):
    """Open everything that is folded."""
    for summary in page.locator("summary").all():
        summary.click()
    settled(page)


def test_a_move_leads_to_the_page_that_opens_there(opened):
    page, last = opened(fragment="#t=12&h=1&m=0"), 10**6
    unfold(page)
    for target in (5, 2, last, 3, 0, last, 7):
        page.evaluate(f"kvkeep.page.setMoment({target})")
        settled(page)
    page.evaluate("location.hash = '#m=7&t=40&h=3&p=1&a=1'")
    until(page, "kvkeep.page.state.token === 40")
    page.evaluate("kvkeep.page.setMoment(6)")
    settled(page)
    fresh = opened(fragment="#m=6&t=40&h=3&p=1&a=1")
    unfold(fresh)
    assert page.evaluate(ALL) == fresh.evaluate(ALL)


def test_a_move_changes_what_differs_and_nothing_else(opened):
    page = opened(fragment="#t=12&m=3")
    for target in (4, 3, 8, 0):
        before = page.evaluate("[...document.querySelectorAll('[role=option]')].map(one => one.className)")
        found = page.evaluate(CHANGED, target)
        after = page.evaluate("[...document.querySelectorAll('[role=option]')].map(one => one.className)")
        assert found["nodes"] == 0
        assert 0 < found["tokens"] == sum(one != other for one, other in zip(before, after, strict=True))


def test_an_open_table_keeps_the_rows_that_stay(opened):
    page = opened(fragment="#t=12&m=5")
    unfold(page)
    page.evaluate("window.kept = document.querySelector('article details tbody tr')")
    for target in (4, 7):
        page.evaluate(f"kvkeep.page.setMoment({target})")
        settled(page)
        assert page.evaluate("kept.isConnected && kept === document.querySelector('article details tbody tr')")


def test_a_head_holds_what_the_record_says(opened):
    page, head = opened(fragment="#h=2"), 2
    for target in (9, 0, 4):
        page.evaluate(f"kvkeep.page.setMoment({target})")
        settled(page)
        said = page.locator("#head-panel .side h3 + p").all_inner_texts()
        for run, words in zip(record().runs, said, strict=True):
            read, dropped = min(record().read(target), run.ledger.read), run.ledger.dropped[head]
            held = int(((dropped[:read] < 0) | (dropped[:read] > target)).sum())
            assert words.startswith(f"Holds {held} of {read} tokens")


def test_many_moves_before_a_frame_are_drawn_once(opened):
    page = opened(fragment="#t=12&m=0")
    drawn = page.evaluate(
        """() => new Promise(done => {
            let drawn = 0;
            new MutationObserver(all => drawn += all.length).observe(
                document.getElementById("moment"), {childList: true});
            const slider = document.getElementById("time");
            for (const value of [1, 5, 2, 7, 3]) {
                slider.value = value;
                slider.dispatchEvent(new Event("input", {bubbles: true}));
            }
            requestAnimationFrame(() => setTimeout(() => done(drawn)));
        })"""
    )
    assert drawn == 1
    assert moment(page) == 3
    assert "4 of" in page.inner_text("#moment")


def test_no_frame_shows_two_moments(opened):
    page = opened(fragment="#t=12&m=0")
    unfold(page)
    policies, prompt = len(record().runs), len(record().tokens)
    for said, *parts in page.evaluate(SEEN):
        assert len(parts) == 3 * policies
        read = [min(one, prompt) for one in parts]  # in the answer the words count its tokens alone
        assert len(set(read)) == 1
        assert read[0] == prompt if said < record().chunk else read[0] == said


@pytest.mark.parametrize(
    "held",
    [
        "#play",
        "#head",
        "#token-panel .map button >> nth=2",
        "#token-panel summary >> nth=0",
        "article summary >> nth=1",
        "article .scroll >> nth=0",
        "#head-panel .scroll >> nth=0",
        ".tokens >> nth=1",
    ],
)
def test_the_focus_and_the_place_stay(opened, held):
    page = opened(fragment="#t=12&m=5")
    unfold(page)
    page.locator(held).focus()
    page.evaluate("() => { window.held = document.activeElement; held.scrollTop = 40; window.place = held.scrollTop; }")
    page.evaluate("kvkeep.page.setMoment(4)")
    settled(page)
    page.evaluate("location.hash = '#m=6&t=13&h=2&p=1&a=1'")
    until(page, "kvkeep.page.state.token === 13")
    settled(page)
    assert page.evaluate("document.activeElement === held && held.isConnected && held.scrollTop === place")


def test_a_head_is_picked_without_losing_the_focus(opened):
    page = opened(fragment="#t=12")
    button = page.locator("#token-panel .map button").nth(3)
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("kvkeep.page.state.head") == 3
    assert page.input_value("#head") == "3"
    assert button.get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.activeElement.ariaPressed") == "true"


def test_a_screen_reader_hears_where_time_rests(opened):
    page = opened(fragment="#t=12&m=0")
    page.evaluate(HEARD)
    page.keyboard.press("ArrowRight")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    until(page, "heard.length > 0")
    page.wait_for_timeout(400)
    assert page.evaluate("heard") == [page.inner_text("#moment")]
    page.focus("#time")
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(400)
    assert len(page.evaluate("heard")) == 1  # the slider says it itself
    assert page.get_attribute("#time", "aria-valuetext") == page.inner_text("#moment")


def test_a_play_is_heard_once(opened):
    page = opened(fragment="#m=9")
    page.evaluate(HEARD)
    page.click("#play")
    until(page, "document.getElementById('play').getAttribute('aria-pressed') === 'false'")
    page.wait_for_timeout(400)
    assert page.evaluate("heard") == [page.inner_text("#moment")]
    assert page.inner_text("#moment").startswith(f"{page.evaluate('kvkeep.page.data.moments')} of ")


def test_hundreds_of_moves_and_one_address(opened):
    page = opened()
    page.evaluate(
        """async () => { for (let i = 0; i < 400; i++) {
            kvkeep.page.setMoment(i % 7);
            if (i % 4 === 0) await new Promise(requestAnimationFrame);
        } }"""
    )
    until(page, "location.hash.startsWith('#m=0&')")
    assert page.get_attribute("#link", "href").startswith("#m=0&")


def test_the_active_token_is_seen_and_described_at_the_present_moment(opened):
    page = opened(fragment="#m=0", viewport={"width": 390, "height": 600})
    page.locator(".tokens").first.focus()
    page.keyboard.press("End")
    inside = """(() => {
        const text = document.querySelector(".tokens").getBoundingClientRect();
        const token = document.querySelector(".tokens .is-active").getBoundingClientRect();
        return token.top >= text.top - 1 && token.bottom <= text.bottom + 1;
    })()"""
    until(page, inside)
    active = "document.querySelector('.tokens .is-active').getAttribute('aria-description')"
    assert page.evaluate(active) == "not read yet"
    page.evaluate("kvkeep.page.setMoment(kvkeep.page.data.moments - 1)")
    settled(page)
    assert page.evaluate(active) != "not read yet"
    page.keyboard.press("Home")
    until(page, inside)
    page.keyboard.press("PageDown")
    until(page, inside)


def test_texts_scroll_together_and_none_pulls_another_back(opened):
    page = opened(viewport={"width": 1280, "height": 400})
    moved = """async () => {
        const [first, second] = document.querySelectorAll(".tokens");
        const report = (text) => text.dispatchEvent(new Event("scroll"));
        first.scrollTop = 120;
        report(first);
        first.scrollTop = 40;
        report(second);  // of the place that the first text has left meanwhile
        for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame);
        return [first.scrollTop, second.scrollTop];
    }"""
    assert page.evaluate(moved) == [40, 40]


def test_a_longer_text_scrolls_to_its_end(opened):
    page = opened(viewport={"width": 1280, "height": 400})
    places = """async () => {
        const [first, second] = document.querySelectorAll(".tokens");
        first.append(document.createElement("p"));
        first.lastChild.style.height = "500px";
        first.scrollTop = 1e6;
        const wanted = first.scrollTop;
        for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame);
        return [first.scrollTop - wanted, second.scrollHeight - second.clientHeight - second.scrollTop];
    }"""
    assert page.evaluate(places) == [0, 0]

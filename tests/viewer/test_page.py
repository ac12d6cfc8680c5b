"""The page in a real browser: what a person sees, clicks and types.

A message counts as seen from the browser's next frame on (`content-visibility`), and what a click changes is drawn once its data
is there: such text is waited for with `expect`, never read at once.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
from playwright.sync_api import expect

from longrein.rollout import Call, Rollout
from longrein.runs import Run, RunWriter
from longrein.viewer.page import write_page

VIEWS = [
    "#/",
    "#/rollouts",
    "#/rollout/4",
    "#/rollout/4?view=tokens",
    "#/rollout/6",
    "#/compare/1/2",
    "#/compare/1/2?view=tokens",
]


def shown(page: Any, address: str, view: str = "#/") -> None:
    """Open a view, and see it: drawn, and painted."""
    page.goto(address + view)
    page.locator(f"main[data-shown='{view}']").wait_for(state="attached")
    painted(page)


def painted(page: Any) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def listed(page: Any, rollouts: int, more: str = "") -> None:
    """Wait for the table of so many rollouts."""
    expect(page.locator(".pager [role=status]")).to_have_text(re.compile(rf"^{rollouts} rollouts · .*{more}$"))


def test_the_first_screen_tells_how_the_run_goes(page: Any, address: str) -> None:
    shown(page, address)
    assert page.title() == "hunts · longrein"
    facts = page.locator(".facts").inner_text().split("\n")
    assert facts[facts.index("rollouts") - 1] == "65"
    assert facts[facts.index("failed") - 1] == "4"
    charts = [chart.get_attribute("aria-label") for chart in page.locator("svg[role=img]").all()]
    assert charts[0].startswith("Reward over steps: all from 0.20 to 0.80, HarnessEnv from")
    assert charts[1].startswith("Success over steps: all from 20% to 80%")
    assert charts[2] == "Time of a step: rollouts 60%, training 30%, other 10%"
    assert "EngineError: the sandbox was lost" in page.locator("section[aria-label='Failures and limits']").inner_text()
    page.get_by_label("Metric", exact=True).select_option("loss")
    page.get_by_label("loss over steps").wait_for()


def test_pointing_at_a_chart_tells_a_steps_figures(page: Any, address: str) -> None:
    shown(page, address)
    chart = page.locator("section[aria-label='Time of a step'] svg")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    expect(page.locator("section[aria-label='Time of a step'] .legend")).to_have_text(re.compile("^step 1"))


def test_the_first_screen_follows_a_run_that_trains(page: Any, serve: Any, tmp_path: Path, tokenizer: Any) -> None:
    folder = made.run(tmp_path / "live", tokenizer("qwen3"), rollouts=16)
    with serve(folder) as address:
        shown(page, address)
        assert page.locator("#live").inner_text() == ""
        with RunWriter(folder) as writer:
            writer.write(Rollout(id="new", env="Fresh", reward=1.0), step=2).result()
            page.locator("#live", has_text="training").wait_for()
            page.locator(".facts li", has_text="17").wait_for()
        page.locator("#live:empty").wait_for(state="attached")


def test_rollouts_are_filtered_searched_sorted_and_paged(page: Any, address: str) -> None:
    shown(page, address, "#/rollouts")
    rows = page.locator("tbody tr")
    assert rows.count() == 50
    listed(page, 65, "page 1 of 2")
    page.get_by_role("button", name="next").click()
    listed(page, 65, "page 2 of 2")
    assert rows.count() == 15
    page.get_by_label("environment").select_option("HarnessEnv")
    listed(page, 32)
    page.get_by_label("outcome").select_option("failed")
    listed(page, 4)
    assert set(page.locator("tbody td:nth-child(7)").all_inner_texts()) == {"failed"}
    page.get_by_role("button", name="clear").click()
    listed(page, 65)
    page.get_by_label("search in task and conversation").fill('日本語🙂 <img src=x onerror="')  # only in the conversation
    page.keyboard.press("Enter")
    listed(page, 64)
    page.get_by_label("search in task and conversation").fill("ATTIC 3")
    page.keyboard.press("Enter")
    listed(page, 4)
    page.get_by_role("button", name="clear").click()
    listed(page, 65)
    page.get_by_label("with branches").check()
    listed(page, 8)
    assert set(page.locator("tbody td:nth-child(9)").all_inner_texts()) == {"3"}
    page.get_by_label("step", exact=True).fill("2")
    page.keyboard.press("Enter")
    listed(page, 2)
    page.get_by_role("button", name="clear").click()
    listed(page, 65)
    page.get_by_role("button", name="tokens").click()
    page.locator("th[aria-sort=descending]", has_text="tokens").wait_for()
    assert rows.first.locator("td").nth(9).inner_text() == "100,000"
    assert page.evaluate("document.activeElement.textContent").startswith("tokens")
    rows.first.locator("td").nth(4).click()
    page.get_by_role("heading", name="Rollout 65").wait_for()


def test_a_rollout_reads_as_a_conversation_with_its_tool_calls_folded(page: Any, address: str) -> None:
    shown(page, address, "#/rollout/1")
    roles = page.locator(".message header b")
    expect(roles).to_have_text(["system", "user", "assistant", "tool", "assistant"], use_inner_text=True)
    call = page.locator(".message details", has_text="calls")
    expect(call.locator("pre")).to_be_hidden()
    call.locator("summary").click()
    expect(call.locator("pre")).to_contain_text('"room": "', use_inner_text=True)
    expect(page.locator(".message details", has_text="reasoning").locator(".thought")).to_be_hidden()


def test_tokens_are_shown_as_the_model_saw_them(page: Any, address: str, folder_of_run: Path, tokenizer: Any) -> None:
    shown(page, address, "#/rollout/2?view=tokens")
    run = Run(folder_of_run)
    rollout = run.rollout(2)
    (branch,) = rollout.branches()
    tokens = page.locator(".token")
    expect(tokens).to_have_count(len(branch.token_ids))
    first = int(np.flatnonzero(branch.sampled)[0])
    tokens.nth(first).hover()
    expect(page.locator(".inspect")).to_contain_text(f"id {branch.token_ids[first]} ")
    told = page.locator(".inspect").inner_text()
    advantage = f"{run.advantages(2)['a'][0]:.4f}".replace("-", "−")
    assert f"log-probability −{-branch.logprobs[first]:.4f}" in told
    assert f"advantage {advantage}" in told
    assert "sampled" in told
    painted = [tokens.nth(at).evaluate("element => element.style.background") for at in (0, first)]
    assert painted == ["", "var(--trained)"]
    page.get_by_role("button", name="advantage").click()
    page.locator(".legend", has_text="0, or none").wait_for()
    page.get_by_role("button", name="reason").click()
    page.locator(".legend", has_text="trained").wait_for()


def test_branches_are_clicked_through(page: Any, address: str) -> None:
    shown(page, address, "#/rollout/4?view=tokens")
    nodes = page.locator(".tree g")
    assert nodes.count() == 5
    assert page.locator(".tree svg").get_attribute("aria-label") == "5 calls in 3 branches"
    nodes.nth(3).click()
    expect(page.locator(".block h3")).to_have_text([re.compile("read"), re.compile("not trained: auxiliary$")])
    page.get_by_role("button", name="reason").click()
    page.locator(".legend", has_text="not trained: auxiliary").wait_for()
    nodes.nth(3).focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator(".block h3", has_text="call 2 · sampled").wait_for()


def test_two_rollouts_of_a_group_part_where_their_tokens_do(page: Any, serve: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for name, word in (("x", 7), ("y", 8)):
            ids = np.array([1, 2, 3], np.int32)
            record = Rollout(id=name, group="g", reward=float(word), env="E")
            user = {"role": "user", "content": "hello"}
            record.add(
                Call(
                    "a",
                    None,
                    ids,
                    ids,
                    ids.astype(np.float32),
                    "stop",
                    messages=(user,),
                    reply={"role": "assistant", "content": "same"},
                )
            )
            record.add(
                Call(
                    "b",
                    "a",
                    ids,
                    np.array([4, word], np.int32),
                    np.zeros(2, np.float32),
                    "stop",
                    messages=(user,),
                    reply={"role": "assistant", "content": str(word)},
                )
            )
            writer.write(record)
    with serve(tmp_path) as address:
        shown(page, address, "#/rollout/1")
        page.get_by_label("Compare with").select_option("2")
        page.get_by_text("the first 10 tokens are the same").wait_for()
        expect(page.locator(".parting + .message .text")).to_have_text(["7", "8"], use_inner_text=True)
        page.get_by_role("button", name="Tokens").click()
        expect(page.locator(".parting + .token")).to_have_count(2)
        assert [token.get_attribute("data-at") for token in page.locator(".parting + .token").all()] == ["10", "10"]
        page.keyboard.press("p")


def test_a_conversation_of_100000_tokens_stays_quick(page: Any, address: str, browser: Any) -> None:
    system = browser.new_browser_cdp_session()

    def spent() -> float:
        """Processor seconds of the browser, and of the server in this process: other programs may be busy on this machine."""
        processes = system.send("SystemInfo.getProcessInfo")["processInfo"]
        return time.process_time() + sum(process["cpuTime"] for process in processes)

    before = spent()
    shown(page, address, "#/rollout/65?view=tokens")
    page.locator(".token").first.wait_for()
    assert spent() - before < 8
    nodes = "document.querySelectorAll('.token').length"
    assert 0 < page.evaluate(nodes) < 10_000
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    page.locator(".inspect", has_text="token 99,999").wait_for()
    expect(page.locator("[data-at='99999']")).to_be_visible()
    page.keyboard.press("PageUp")
    page.locator(".inspect", has_text="token 99,599").wait_for()
    assert page.evaluate(nodes) < 10_000


@pytest.mark.parametrize("kind", ["served", "file"])
def test_text_of_models_and_programs_is_text(
    page: Any, address: str, folder_of_run: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "file":
        write_page(Run(folder_of_run), tmp_path / "run.html", rollouts=64)
        address = (tmp_path / "run.html").as_uri()
    for view in VIEWS:
        shown(page, address, view)
        page.evaluate("for (const folded of document.querySelectorAll('details')) folded.open = true")
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script, main iframe, main object").count() == 0
        assert page.locator("main b", has_text="bold").count() == 0
    shown(page, address, "#/rollout/4")
    expect(page.locator(".message .text").nth(1)).to_contain_text(made.MARKUP, use_inner_text=True)


def test_the_file_is_the_same_page_and_asks_nobody(page: Any, folder_of_run: Path, tmp_path: Path) -> None:
    assert write_page(Run(folder_of_run), tmp_path / "run.html", rollouts=20) == 20
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    address = (tmp_path / "run.html").as_uri()
    shown(page, address)
    assert page.locator("svg[role=img]").count() == 5
    shown(page, address, "#/rollouts")
    listed(page, 20)
    page.get_by_label("outcome").select_option("failed")
    listed(page, 4)
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Tokens").click()
    page.locator(".token").first.wait_for()
    shown(page, address, "#/rollout/1")
    assert page.locator("main").inner_text() == "rollout 1 is not in this file; it holds 20 of the run's rollouts"
    assert {url.split("#")[0] for url in asked} <= {address, "about:blank", "data:,"}


def test_everything_that_can_be_used_has_a_name(page: Any, address: str) -> None:
    for view in VIEWS:
        shown(page, address, view)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, a[href], input, select, summary, [role], [tabindex='0'], section, article")]
                .filter((element) => !(element.getAttribute("aria-label") || element.labels?.[0]?.textContent || element.textContent).trim())
                .map((element) => element.outerHTML).filter((html) => !html.includes('id="live"'))"""
        )
        assert nameless == []


def test_a_narrow_window_needs_no_sideways_scrolling(page: Any, address: str) -> None:
    page.set_viewport_size({"width": 380, "height": 700})
    for view in VIEWS:
        shown(page, address, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_held_out_tasks_stay_within_a_narrow_window(page: Any, serve: Any, tmp_path: Path, tokenizer: Any) -> None:
    with RunWriter(tmp_path, seed=0) as writer:
        for phase in ("before", "after"):
            writer.write(Rollout(id=phase, env="AnEnvironmentOfALongName", reward=0.5, success=False), phase=phase)
    page.set_viewport_size({"width": 380, "height": 700})
    with serve(tmp_path) as address:
        shown(page, address)
        assert "AnEnvironmentOfALongName" in page.locator("section[aria-label='Held-out tasks']").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_an_evaluation_is_told_by_environment_with_its_intervals(page: Any, serve: Any, tmp_path: Path) -> None:
    for first in (0, 2):  # it was stopped and gone on with
        with RunWriter(tmp_path, seed=0) as writer:
            for number in range(first, first + 2):
                won = number == 3
                group = f"g{number % 2}"
                task = {"word": f"word{number % 2}"}
                writer.write(
                    Rollout(f"r{number}", task, env="Echo", reward=float(won), success=won, group=group), phase="eval"
                )
    with serve(tmp_path) as address:
        shown(page, address)
        facts = page.locator(".facts").inner_text().split("\n")
        assert facts[facts.index("success") - 1] == "25%", "over both times"
        hardest = page.locator("section[aria-label='Tasks solved least']")
        assert hardest.locator("tbody tr").all_inner_texts() == ["word: word0\t0 of 2\t0.00", "word: word1\t1 of 2\t0.50"]
        assert page.locator("section[aria-label='Reward']").count() == 0, "there are no steps"
        estimate = {"value": 0.25, "low": 0.05, "high": 0.7}
        told = {"success": estimate, "reward": estimate, "pass_at_k": {"1": estimate, "2": {"value": 0.5}}}
        (tmp_path / "eval.json").write_text(json.dumps({"complete": True, "overall": told, "by_env": {"Echo": told}}))
        page.reload()
        table = page.locator("section[aria-label='By environment']")
        expect(table).to_contain_text("25% 5% to 70%")
        expect(table).to_contain_text("pass@1 25% · pass@2 50%")
        hardest.get_by_role("link").first.click()
        listed(page, 2)


def test_dark_and_light(page: Any, address: str) -> None:
    brightness = (
        "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)"
    )
    shown(page, address)
    assert page.evaluate(brightness) > 600
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(brightness) < 120
    page.get_by_label("Switch between light and dark").click()
    assert page.evaluate(brightness) > 600
    page.reload()
    assert page.evaluate(brightness) > 600  # it is kept


def test_a_view_that_answers_late_changes_nothing(page: Any, address: str) -> None:
    late: list[Any] = []
    page.route("**/api/rollouts/2?*", lambda route: late.append(route))
    shown(page, address, "#/rollouts")
    with page.expect_request("**/api/rollouts/2?*"):
        page.goto(address + "#/compare/1/2")
    shown(page, address, "#/rollout/1")
    with page.expect_request_finished(lambda request: "rollouts/2/tokens" in request.url):
        late.pop().continue_()
    painted(page)
    expect(page.get_by_role("heading", name="Rollout 1", exact=True)).to_be_visible()
    page.keyboard.press("t")
    expect(page.locator("main[data-shown='#/rollout/1?view=tokens']")).to_be_attached()


def test_an_overview_that_was_left_before_it_came_asks_no_more(page: Any, address: str) -> None:
    late: list[Any] = []
    slow = {"overview"}
    page.clock.install()
    page.route("**/api/overview?*", lambda route: late.append(route) if slow else route.continue_())
    with page.expect_request("**/api/overview?*"):
        page.goto(address)
    page.goto(address + "#/rollout/1")
    slow.clear()
    for route in late:
        route.continue_()
    page.locator("main[data-shown='#/rollout/1']").wait_for(state="attached")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)
    assert asked == []


def test_the_keyboard_is_enough(page: Any, address: str) -> None:
    shown(page, address)
    page.keyboard.press("/")
    page.locator("#search:focus").wait_for()
    page.keyboard.type("attic 3")
    page.keyboard.press("Enter")
    listed(page, 4)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Rollout 15").wait_for()
    page.keyboard.press("]")
    page.get_by_role("heading", name="Rollout 16").wait_for()
    page.keyboard.press("t")
    page.locator(".token").first.wait_for()
    page.keyboard.press("c")
    page.locator("button[aria-pressed=true]", has_text="log-probability").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="hidden")
    page.keyboard.press("1")
    page.locator(".facts").wait_for()

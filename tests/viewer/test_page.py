"""The page in a real browser: what a person sees, clicks and types."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest

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
    page.goto(address + view)
    page.locator(f"main[data-shown='{view}']").wait_for(state="attached")


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
    assert page.locator("section[aria-label='Time of a step'] .legend").inner_text().startswith("step 1")


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
    assert "65 rollouts · page 1 of 2" in page.locator(".pager").inner_text()
    page.get_by_role("button", name="next").click()
    page.locator(".pager", has_text="page 2 of 2").wait_for()
    assert rows.count() == 15
    page.get_by_label("environment").select_option("HarnessEnv")
    page.locator(".pager", has_text="32 rollouts").wait_for()
    page.get_by_label("outcome").select_option("failed")
    page.locator(".pager", has_text="4 rollouts").wait_for()
    assert set(page.locator("tbody td:nth-child(7)").all_inner_texts()) == {"failed"}
    page.get_by_role("button", name="clear").click()
    page.locator(".pager", has_text="65 rollouts").wait_for()
    page.get_by_label("search in task and conversation").fill('日本語🙂 <img src=x onerror="')  # only in the conversation
    page.keyboard.press("Enter")
    page.locator(".pager", has_text="64 rollouts").wait_for()
    page.get_by_label("search in task and conversation").fill("ATTIC 3")
    page.keyboard.press("Enter")
    page.locator(".pager", has_text="4 rollouts").wait_for()
    page.get_by_role("button", name="clear").click()
    page.get_by_label("with branches").check()
    page.locator(".pager", has_text="8 rollouts").wait_for()
    assert set(page.locator("tbody td:nth-child(9)").all_inner_texts()) == {"3"}
    page.get_by_label("step", exact=True).fill("2")
    page.keyboard.press("Enter")
    page.locator(".pager", has_text="2 rollouts").wait_for()
    page.get_by_role("button", name="clear").click()
    page.get_by_role("button", name="tokens").click()
    page.locator("th[aria-sort=descending]", has_text="tokens").wait_for()
    assert rows.first.locator("td").nth(9).inner_text() == "100,000"
    assert page.evaluate("document.activeElement.textContent").startswith("tokens")
    rows.first.locator("td").nth(4).click()
    page.get_by_role("heading", name="Rollout 65").wait_for()


def test_a_rollout_reads_as_a_conversation_with_its_tool_calls_folded(page: Any, address: str) -> None:
    shown(page, address, "#/rollout/1")
    roles = page.locator(".message header b").all_inner_texts()
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    call = page.locator(".message details", has_text="calls")
    assert call.locator("pre").is_hidden()
    call.locator("summary").click()
    assert '"room": "' in call.locator("pre").inner_text()
    assert page.locator(".message details", has_text="reasoning").locator(".thought").is_hidden()


def test_tokens_are_shown_as_the_model_saw_them(page: Any, address: str, folder_of_run: Path, tokenizer: Any) -> None:
    shown(page, address, "#/rollout/2?view=tokens")
    run = Run(folder_of_run)
    rollout = run.rollout(2)
    (branch,) = rollout.branches()
    tokens = page.locator(".token")
    assert tokens.count() == len(branch.token_ids)
    first = int(np.flatnonzero(branch.sampled)[0])
    tokens.nth(first).hover()
    told = page.locator(".inspect").inner_text()
    advantage = f"{run.advantages(2)['a'][0]:.4f}".replace("-", "−")
    assert f"id {branch.token_ids[first]} " in told
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
    page.locator(".block h3", has_text="auxiliary").wait_for()
    assert page.locator(".block h3").count() == 2
    assert page.locator(".block h3").all_inner_texts()[1].endswith("not trained: auxiliary")
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
        assert page.locator(".parting + .message").all_inner_texts() == [
            page.locator(".message").nth(3).inner_text(),
            page.locator(".message").nth(7).inner_text(),
        ]
        page.get_by_role("button", name="Tokens").click()
        page.locator(".token").first.wait_for()
        assert [token.get_attribute("data-at") for token in page.locator(".parting + .token").all()] == ["10", "10"]
        page.keyboard.press("p")


def test_a_conversation_of_100000_tokens_stays_quick(page: Any, address: str) -> None:
    started = time.perf_counter()
    shown(page, address, "#/rollout/65?view=tokens")
    page.locator(".token").first.wait_for()
    opened = time.perf_counter() - started
    assert opened < 8
    nodes = "document.querySelectorAll('.token').length"
    assert 0 < page.evaluate(nodes) < 10_000
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    page.locator(".inspect", has_text="token 99,999").wait_for()
    assert page.locator("[data-at='99999']").is_visible()
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
    assert made.MARKUP in page.locator(".message .text").nth(1).inner_text()


def test_the_file_is_the_same_page_and_asks_nobody(page: Any, folder_of_run: Path, tmp_path: Path) -> None:
    assert write_page(Run(folder_of_run), tmp_path / "run.html", rollouts=20) == 20
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    address = (tmp_path / "run.html").as_uri()
    shown(page, address)
    assert page.locator("svg[role=img]").count() == 5
    shown(page, address, "#/rollouts")
    page.locator(".pager", has_text="20 rollouts").wait_for()
    page.get_by_label("outcome").select_option("failed")
    page.locator(".pager", has_text="4 rollouts").wait_for()
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


def test_the_keyboard_is_enough(page: Any, address: str) -> None:
    shown(page, address)
    page.keyboard.press("/")
    page.locator("#search:focus").wait_for()
    page.keyboard.type("attic 3")
    page.keyboard.press("Enter")
    page.locator(".pager", has_text="4 rollouts").wait_for()
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

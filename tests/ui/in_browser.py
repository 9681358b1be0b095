"""The pages in a real browser: they work by mouse and keyboard, say what the pool says, run nothing
that an agent wrote, and have no serious finding of axe.

    make test-ui      Playwright from PyPI with the system's chromium

Not collected by `make test`: that needs no browser.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from tests.ui.demo import HOSTILE, Demo, archive_all, demo, fill, show_picture, train

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
KEY = "an-admin-key-for-the-browser"
HOSTILE_UID = f"chain_sum/1001:{HOSTILE}"
SHORT = (
    "logging.wandb=disabled",
    "trainer.train_batch_size=2",
    "rollout.n=4",
    "data.val.size=8",
    "rollout.max_outstanding_groups=4",
    "trainer.total_steps=500",
    "pool.channels.train.selection.filters=[zero_variance]",
)
expect.set_options(timeout=30_000)  # of a busy machine
SHOTS = os.environ.get("STEPWELL_SHOTS")
"""A folder for screenshots of every page."""


@pytest.fixture
async def shown(tmp_path: Path) -> AsyncIterator[Demo]:
    async with demo(tmp_path) as served:
        await fill(served)
        await archive_all(served)
        await train(served)
        yield served


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        await found.close()


async def opened(browser: Browser, scheme: Any = "light", width: int = 1400) -> Page:
    """A page that fails its test if a script fails or the policy refuses one of ours."""
    context = await browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
    )
    page = await context.new_page()
    page.failures = []  # type: ignore[attr-defined]
    page.on("pageerror", lambda e: page.failures.append(str(e)))  # type: ignore[attr-defined]
    page.on(
        "console",
        lambda m: page.failures.append(m.text) if m.type == "error" else None,  # type: ignore[attr-defined]
    )
    return page


async def go(page: Page, served: Demo, where: str = "overview", **params: Any) -> None:
    search = "&".join(f"{k}={quote(str(v), safe='')}" for k, v in params.items())
    await page.goto(f"{served.url}/ui#/{where}?{search}")
    await expect(page.locator("main h1").first).to_be_attached()


def pages(step: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, page and parameters of every view."""
    hostile = {"uid": HOSTILE_UID, "channel": "train"}
    trained = {"uid": "chain_sum/1001:2", "step": step}
    return [
        ("overview", "overview", {}),
        ("groups", "groups", {}),
        ("gone", "groups", {"view": "gone"}),
        ("group", "group", {"prompt_uid": "chain_sum/1005"}),
        ("trajectories", "trajectories", {}),
        ("conversation", "trajectory", hostile),
        ("tokens", "trajectory", {**trained, "view": "tokens", "at": 0}),
        ("timing", "trajectory", {**hostile, "view": "timing"}),
        ("details", "trajectory", {**hostile, "view": "details"}),
        ("batches", "batches", {}),
        ("batch", "batch", {"step": step}),
        ("curation", "curation", {}),
        ("pool", "pool", {}),
        ("runs", "runs", {"x": "tokens", "smooth": "0.9"}),
        ("archive", "archive", {}),
        ("prompts", "archive", {"view": "prompts", "which": "all"}),
        ("archived", "trajectory", {"uid": "chain_sum/1000:1"}),
        ("archived-group", "group", {"prompt_uid": "chain_sum/1000"}),
        ("found", "find", {"uid": "chain_sum/1000:"}),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
async def test_every_page_is_shown_runs_nothing_of_an_agents_and_satisfies_axe(
    shown: Demo, browser: Browser, scheme: str, width: int
) -> None:
    page = await opened(browser, scheme, width)
    for name, where, params in pages(40):
        await go(page, shown, where, **params)
        await page.wait_for_timeout(1300 if name in ("overview", "pool") else 300)
        if SHOTS:
            await page.screenshot(path=f"{SHOTS}/{name}-{scheme}-{width}.png", full_page=True)
        assert await serious(page) == [], name
        assert "owned" not in await page.title(), name
        assert not await page.locator("main img, main script").count(), name
        assert not page.failures, f"{name}: {page.failures}"  # type: ignore[attr-defined]
        assert await page.evaluate(WIDER, width) == [], name
        for tab in await page.get_by_label("Pages").get_by_role("link").all():
            box = await tab.bounding_box()
            assert box is not None, name
            assert box["x"] >= 0, name
            assert box["x"] + box["width"] <= width, name


async def serious(page: Page) -> list[Any]:
    """Return the findings of axe that keep people from using the page."""
    found = await Axe().run(page)
    return [
        (v["id"], [node["html"][:200] for node in v["nodes"][:3]])
        for v in found.response["violations"]
        if v["impact"] in ("serious", "critical")
    ]


WIDER = """width => {
  const hides = (e) => /auto|scroll|hidden|clip/.test(getComputedStyle(e).overflowX);
  const scrolls = (e) => e && (hides(e) || scrolls(e.parentElement));
  const wide = [...document.querySelectorAll("body *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width && box.right > width + 1 && !scrolls(e.parentElement);
  });
  const whole = document.documentElement.scrollWidth > width ? ["page"] : [];
  return wide.map((e) => `${e.tagName}.${e.className}`).concat(whole);
}"""
"""Elements that are wider than the page and do not scroll by themselves."""


async def test_the_overview_moves_with_the_run(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown)
    pool = page.locator(".node", has_text="Pool")
    await expect(pool.locator(".main")).to_contain_text("4 groups ready")
    lease = await shown.pool.lease_batch(batch_size=2)
    assert lease is not None
    await expect(pool.locator(".main")).to_contain_text("2 groups ready")
    await expect(page.locator(".state")).to_have_text("live")


async def test_a_trajectory_is_found_read_and_searched(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown, "trajectories")
    await page.get_by_label("Reward from").fill("0.5")
    await page.keyboard.press("Tab")
    right = await shown.pool.list_trajectories(min_reward=0.5)
    await expect(page.locator("tbody tr")).to_have_count(len(right.items))
    await page.get_by_role("link", name="chain_sum/1005:2").click()
    await expect(page.locator(".message.tool .text")).to_contain_text("180")
    await page.get_by_label("Search in this branch").fill("expression")
    await expect(page.locator("mark")).to_have_count(1)
    # A permalink brings back the same view.
    await page.get_by_role("button", name="Tokens", exact=True).click()
    address = page.url
    again = await opened(browser)
    await again.goto(address)
    await expect(again.get_by_role("heading", name="as the model saw it")).to_be_visible()


async def test_the_tools_of_a_call_are_shown_as_the_model_read_them(
    shown: Demo, browser: Browser
) -> None:
    page = await opened(browser, width=400)
    for uid in ("chain_sum/1005:1", "chain_sum/1000:1"):  # live, and archived
        await go(page, shown, "trajectory", uid=uid)
        await page.get_by_text("Tools of this call").first.click()
        prompt = page.locator("details pre")
        await expect(prompt).to_contain_text("Tools: calculator(expression)")
        await expect(prompt).to_contain_text("State the final answer to")
        await expect(prompt).not_to_contain_text("tool_call_id")
        assert await serious(page) == []
        assert await page.evaluate(WIDER, 400) == []
        assert not page.failures  # type: ignore[attr-defined]
    side = page.get_by_label("Turns").get_by_text("no", exact=True)
    await go(page, shown, "trajectory", uid="chain_sum/1005:1")
    await side.click()
    await expect(page.get_by_text("Is it even?")).to_be_visible()
    await expect(page.get_by_text("Tools of this call")).to_have_count(0)


async def test_pictures_are_seen_of_what_is_in_the_pool_and_of_what_left_it(
    tmp_path: Path, browser: Browser
) -> None:
    async with demo(tmp_path) as served:
        await show_picture(served, "seen")
        for is_archived in (False, True):
            if is_archived:
                await served.pool.drop_group("seen", "enough")
                await archive_all(served)
            page = await opened(browser)
            await go(page, served, "trajectory", uid="seen")
            picture = page.get_by_role("img", name="Picture of 56 × 28 pixels, 2 tokens")
            await expect(picture).to_be_visible()
            await expect(picture).to_have_js_property("complete", value=True)
            drawn = await picture.evaluate("img => [img.naturalWidth, img.naturalHeight]")
            assert drawn == [56, 28]
            assert not page.failures  # type: ignore[attr-defined]


async def test_the_page_shows_the_tokens_of_the_journal(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    uid = "chain_sum/1005:1"
    (stored,) = (await shown.pool.read_trajectories(trajectory_uid=uid)).unpack()
    for step in stored.trajectory.steps:
        await go(page, shown, "trajectory", uid=uid, view="tokens", at=step.step_index)
        await expect(page.get_by_role("heading", name=f"Turn {step.step_index} as")).to_be_visible()
        earlier = page.get_by_role("button", name="Earlier tokens")
        while await earlier.count():
            await earlier.click()
            await page.wait_for_timeout(200)
        titles = await page.locator(".token[data-i]").evaluate_all("all => all.map(t => t.title)")
        assert [int(t.split(" ")[0]) for t in titles] == step.token_ids.tolist()
        own = await page.locator(".token.own[data-i]").count()
        assert own == len(step.response_ids)
    await page.locator(".tokens").focus()
    for _ in range(3):
        await page.keyboard.press("ArrowRight")
    await expect(page.locator(".token.chosen")).to_have_attribute("data-i", "2")


async def test_a_mark_is_set_and_undone_by_the_keyboard(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown, "trajectory", uid="chain_sum/1001:0", channel="train")
    no = page.get_by_role("group", name="Trainable").get_by_role("button", name="no", exact=True)
    await no.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".chips .chip.bad")).to_have_text("not trainable")
    run = await shown.pool.dry_run(batch_size=1)
    assert run.decisions[0].n_withheld == 1
    await page.locator(".toast").get_by_role("button", name="Undo").click()
    await expect(page.locator(".chips .chip.bad")).to_have_count(0)
    assert (await shown.pool.dry_run(batch_size=1)).decisions[0].n_withheld == 0
    await page.get_by_label("Outcome reward, corrected").fill("0.25")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("total now 0.25")).to_be_visible()


async def test_a_policy_is_tried_and_data_downloaded(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown, "curation")
    await page.get_by_role("button", name="others").click()
    await page.get_by_label("Groups in the batch").fill("2")
    await page.get_by_label("zero_variance").check()
    await page.get_by_role("button", name="Try").click()
    await expect(page.locator(".bars")).to_contain_text("serve: in_order")
    async with page.expect_download() as download:
        await page.get_by_role("link", name="Download").click()
    assert (await download.value).suggested_filename == "train.jsonl"


async def test_what_has_a_tag_is_found_among_many(shown: Demo, browser: Browser) -> None:
    async with asyncio.TaskGroup() as tasks:
        for i in range(1100):  # more than one answer looks at
            tasks.create_task(shown.pool.open_trajectory(f"many-{i}", f"many-{i}"))
    await shown.pool.mark(trajectory_uid="many-1099", tags=["rare"])
    page = await opened(browser)
    await go(page, shown, "curation")
    tag = page.locator(".card", has_text="Find by tag").get_by_label("Tag")
    await tag.fill("rare")
    await tag.press("Enter")
    await expect(page.get_by_role("link", name="many-1099")).to_be_visible()


async def test_a_gateway_with_keys_asks_for_one(tmp_path: Path, browser: Browser) -> None:
    async with demo(tmp_path, admin_keys=KEY) as served:
        page = await opened(browser)
        await page.goto(f"{served.url}/ui")
        await page.get_by_label("Admin key").fill("no-key-of-this-gateway")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("alert")).to_contain_text("no admin key")
        await page.get_by_label("Admin key").fill(KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator(".flow")).to_be_visible()
        assert KEY not in page.url
        assert KEY not in await page.evaluate("document.cookie + JSON.stringify(localStorage)")


async def test_a_list_is_sorted_searched_and_gone_through_by_keys(
    shown: Demo, browser: Browser
) -> None:
    page = await opened(browser)
    await go(page, shown, "trajectories")
    await expect(page.locator("a.talk").first).to_contain_text("State the final answer")
    await page.get_by_role("button", name="Reward").click()
    await expect(page.locator("th[aria-sort=descending]")).to_contain_text("Reward")
    await expect(page.locator("tbody tr").first.locator("td").nth(1)).to_have_text("1")
    await page.get_by_role("button", name="Reward").click()
    await expect(page.locator("tbody tr").first.locator("td").nth(1)).to_have_text("0")
    search = page.get_by_label("Search first messages and last replies")
    await search.fill("answer is 180")
    await page.wait_for_timeout(2500)  # ticks draw the page anew meanwhile
    await search.press("Enter")
    await expect(page.locator("tbody tr")).to_have_count(3)
    address = page.url
    assert "order=reward" in address
    assert "ascending=1" in address
    assert "search=answer" in address
    await search.blur()
    await page.keyboard.press("n")
    await page.keyboard.press("n")
    second = page.locator("a.talk").nth(1)
    await expect(second).to_be_focused()
    uids = [
        (await page.locator("tbody tr").nth(i).locator("a.uid").first.inner_text())
        for i in (0, 1, 2)
    ]
    await page.keyboard.press("Enter")
    heading = page.get_by_role("heading", level=1)
    await expect(heading).to_contain_text(uids[1])
    await page.keyboard.press("n")
    await expect(heading).to_contain_text(uids[2])
    await page.keyboard.press("p")
    await page.keyboard.press("p")
    await expect(heading).to_contain_text(uids[0])
    again = await opened(browser)
    await again.goto(address)
    await expect(again.locator("tbody tr").first.locator("a.uid").first).to_have_text(uids[0])


LISTS = [
    ("trajectories", {}, 13),
    ("groups", {}, 13),
    ("groups", {"view": "gone"}, 8),
    ("archive", {}, 9),
    ("archive", {"view": "prompts", "which": "all"}, 8),
    ("batches", {}, 13),
    ("batch", {"step": 40}, 7),
    ("find", {"uid": "chain_sum/1000:"}, 9),
]
"""Lists, and how many orders their heads have."""


@pytest.mark.parametrize(("where", "params", "n"), LISTS)
async def test_every_column_of_every_list_sorts_it(
    shown: Demo, browser: Browser, where: str, params: dict[str, Any], n: int
) -> None:
    page = await opened(browser)
    await go(page, shown, where, **params)
    rows, heads = page.locator("tbody tr"), page.locator("th button.sort")
    await expect(heads).to_have_count(n)
    await expect(rows.first).to_be_visible()
    everything = sorted(await rows.all_inner_texts())
    for i in range(n):
        head, ways = heads.nth(i), ["descending", "ascending"]
        if "↓" in await head.inner_text():
            ways.reverse()
        for way in ways:
            await head.click()
            await expect(head).to_contain_text("↑" if way == "ascending" else "↓")
            await expect(head.locator("xpath=..")).to_have_attribute("aria-sort", way)
            await expect(page.locator("[aria-sort]")).to_have_count(1)
            await expect(rows).to_have_count(len(everything))
            assert sorted(await rows.all_inner_texts()) == everything
    assert not page.failures  # type: ignore[attr-defined]
    again = await opened(browser)
    await again.goto(page.url)
    await expect(again.locator(f"th[aria-sort={way}]")).to_have_count(1)
    await expect(again.locator("tbody tr")).to_have_count(len(everything))
    assert await again.locator("tbody tr").all_inner_texts() == await rows.all_inner_texts()


async def test_what_is_chosen_on_a_page_is_in_its_address(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown, "group", prompt_uid="chain_sum/1005")
    await page.get_by_role("button", name="Prefix tree").click()
    await expect(page.get_by_text("Tokens that the rollouts share")).to_be_visible()
    assert "view=prefixes" in page.url
    await go(page, shown, "batches")
    await page.get_by_label("Metric").select_option("grad_norm")
    await expect(page).to_have_url(re.compile("key=grad_norm"))
    await go(page, shown, "pool")
    await page.get_by_label("Kind").select_option("dropped")
    await expect(page).to_have_url(re.compile("kind=dropped"))
    await go(page, shown, "curation")
    tag = page.locator(".card", has_text="Find by tag").get_by_label("Tag")
    await tag.fill("suspicious")
    await tag.press("Enter")
    await expect(page).to_have_url(re.compile("tag=suspicious"))
    again = await opened(browser)
    await again.goto(page.url)
    await expect(again.get_by_role("link", name="chain_sum/1001:2")).to_be_visible()
    assert not page.failures  # type: ignore[attr-defined]


async def test_a_list_that_changes_keeps_no_order_of_another(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown, "archive", order="reward")
    await page.get_by_role("button", name="Prompts").click()
    await page.get_by_role("combobox", name="Prompts").select_option("all")
    prompts = page.get_by_role("region", name=re.compile("^Prompts;"))
    await expect(prompts.locator("a.talk").first).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_count(0)
    await go(page, shown, "groups", order="spread")
    await page.get_by_role("button", name="Recently gone").click()
    await expect(page.locator("a.talk").first).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_count(0)


async def test_tokens_have_no_colour_until_one_is_chosen(shown: Demo, browser: Browser) -> None:
    page = await opened(browser)
    await go(page, shown, "trajectory", uid="chain_sum/1005:1", view="tokens")
    painted = "all => all.filter(t => t.style.background).length"
    tokens = page.locator(".token[data-i]")
    await expect(tokens.first).to_be_visible()
    assert await tokens.evaluate_all(painted) == 0
    await page.get_by_label("Colour").select_option("log_probs")
    await expect(page).to_have_url(re.compile("colour=log_probs"))
    assert await tokens.evaluate_all(painted) > 0


async def find_why_and_what(page: Page, uid: str, why: str) -> None:
    """Why was this trajectory dropped, and what did the model say in it? Two actions."""
    await page.get_by_label("Find a uid").fill(uid)
    await page.keyboard.press("Enter")
    await expect(page.locator(".chips")).to_contain_text(f"its group was dropped ({why})")
    said = page.locator(".message.assistant").first
    await expect(said).to_be_visible()
    assert await said.inner_text()


async def find_never_rewarded(page: Page) -> None:
    """Find the prompts that never get a reward, in two actions."""
    await page.get_by_label("Pages").get_by_role("link", name="Archive").click()
    await page.get_by_role("button", name="Prompts").click()
    prompts = page.get_by_role("region", name=re.compile("^Prompts;"))
    await expect(prompts.locator("a.talk").first).to_contain_text("State the final answer")
    rows = await prompts.locator("tbody tr").all_inner_texts()
    assert rows
    assert all("never" in row for row in rows)


async def stepwell(*argv: str) -> str:
    """Run a command and return the text it prints."""
    command = [sys.executable, "-m", "stepwell", *argv]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    text = (await process.communicate())[0].decode()
    assert process.returncode == 0, text
    if SHOTS:
        with (Path(SHOTS) / "terminal.txt").open("a") as file:
            file.write(f"$ stepwell {' '.join(argv)}\n{text}\n")
    return text


async def ask_the_terminal(folder: Path, uid: str, why: str) -> None:
    """The same in one command each."""
    shown = await stepwell("show", uid, str(folder))
    assert f"its group was dropped ({why})" in shown
    assert "State the final answer" in shown
    prompts = await stepwell("prompts", str(folder), "--never-rewarded")
    assert "never" in prompts
    assert "State the final answer" in prompts


async def dropped(url: str) -> str:
    """Uid of a trajectory that was dropped with its group and is archived."""
    query = {"query": "left == 'dropped' and state == 'complete' and reward == 0"}
    async with httpx.AsyncClient(timeout=30) as http, asyncio.timeout(180):
        while True:
            items = (await http.get(f"{url}/ui/api/archive", params=query)).json()["items"]
            if items:
                return str(items[0]["uid"])
            await asyncio.sleep(1)


async def test_every_page_of_a_live_quickstart(tmp_path: Path, browser: Browser) -> None:
    """`stepwell train` as a user runs it, looked at while it trains and when it has ended; the
    three questions of whoever looks are answered in two actions each, or in one command."""
    command = ["train", "--config", "quickstart", f"run.dir={tmp_path}", *SHORT]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stepwell", *command, stdout=asyncio.subprocess.PIPE
    )
    try:
        url = None
        async with asyncio.timeout(180):
            assert process.stdout is not None
            while url is None:
                line = (await process.stdout.readline()).decode()
                assert line, "the run ended"
                url = re.search(r"dashboard (http://\S+?)/ui;", line)
        reading = asyncio.create_task(process.stdout.read())
        page = await opened(browser)
        await page.goto(f"{url[1]}/ui#/overview")
        trainer = page.locator(".node", has_text="Trainer").locator(".main")
        await expect(trainer).to_contain_text(re.compile(r"^[4-9] optimizer"), timeout=180_000)
        await page.goto(f"{url[1]}/ui#/batches")
        await page.get_by_role("link", name="tokens kept").first.click()
        await (
            page.get_by_role("region", name="Trajectories of the sample")
            .locator("a[href*='#/trajectory']")
            .first.click()
        )
        await expect(page.locator(".turn").first).to_be_visible()
        await page.get_by_role("button", name="Tokens", exact=True).click()
        await expect(page.locator(".token.own").nth(1)).to_be_visible()
        for where in ("overview", "groups", "trajectories", "curation", "pool"):
            await page.goto(f"{url[1]}/ui#/{where}")
            await expect(page.locator("main h1").first).to_be_attached()
            found = await Axe().run(page)
            assert not [
                v["id"]
                for v in found.response["violations"]
                if v["impact"] in ("serious", "critical")
            ]
        uid, why = await dropped(url[1]), "zero_variance"
        await find_why_and_what(page, uid, why)
        await find_never_rewarded(page)
        await ask_the_terminal(tmp_path, uid, why)
        assert not page.failures  # type: ignore[attr-defined]
        process.send_signal(signal.SIGINT)
        await reading
        await process.wait()
        view = [sys.executable, "-m", "stepwell", "view", str(tmp_path), "--port", "0"]
        process = await asyncio.create_subprocess_exec(*view, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 120)).decode()
        page = await opened(browser)
        await page.goto(line.split(": ")[1].strip())
        await find_why_and_what(page, uid, why)
        await find_never_rewarded(page)
        await ask_the_terminal(tmp_path, uid, why)
        assert not page.failures  # type: ignore[attr-defined]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()

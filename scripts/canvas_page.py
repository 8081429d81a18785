"""Uses the page /canvas of a running server in a real browser, checks it and takes pictures of it.

    make serve   # elsewhere
    python -m venv /tmp/browser && /tmp/browser/bin/pip install playwright
    /tmp/browser/bin/python scripts/canvas_page.py http://127.0.0.1:8000 FOLDER

Needs Chromium (Debian's package `chromium`) and a small checkpoint, `diffusiongemma-tiny` or the
masked `sdar-tiny`. FOLDER gets desktop.png and phone.png, which docs/canvases.md shows. Look at
them. `--api-key` names the server's, if it has one.
"""

import argparse
import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

QUESTION = "Count from 34 to 59."
ANSWER = " ".join(map(str, range(34, 60)))
DESKTOP, PHONE = (1100, 800), (390, 844)
api_key = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("server")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--api-key", default="")
    arguments = parser.parse_args()
    global api_key
    api_key = arguments.api_key
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        checks = (
            click_examples,
            compare_two_settings,
            check_phone_layout,
            show_text_as_text,
            show_errors,
        )
        for check in (*checks, stop_answer, *([ask_with_keys] if api_key else [])):
            check(browser, arguments.server, arguments.folder)
            print(f"{check.__name__}: ok")
        browser.close()


@contextlib.contextmanager
def open_page(
    browser: Browser, server: str, size: tuple[int, int], scheme: str = "light"
) -> Iterator[Page]:
    """Opens the page. Fails on any error of its script, and on requests to other hosts."""
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
    )
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((server, "data:")) else wrong.append(request.url)
        ),
    )
    page.goto(f"{server}/canvas")
    page.locator("#key").fill(api_key)
    expect(page.locator("#model")).not_to_contain_text("Looking")
    yield page
    assert not wrong, wrong
    page.close()


def submit_question(page: Page, question: str, seed: int = 4) -> None:
    """Fills the form and submits it by keyboard."""
    for field, value in {"seed": str(seed), "pace": "30", "prompt": question}.items():
        page.locator(f"#{field}").fill(value)
    page.locator("#prompt").press("Control+Enter")


def click_examples(browser: Browser, server: str, folder: Path) -> None:
    """Checks that each example is answered, and that the model takes each rule that is offered."""
    with open_page(browser, server, DESKTOP) as page:
        for example in page.locator("#examples button").all():
            example.click()
            expect(page.locator("#status")).to_have_text("Done.", timeout=120_000)
            expect(page.locator(".answer")).not_to_be_empty()
        page.locator("summary").click()
        rules = page.get_by_label("Acceptance")
        for rule in rules.locator("option").all_inner_texts():
            rules.select_option(rule)
            submit_question(page, QUESTION)
            expect(page.locator("#status")).to_have_text("Done.", timeout=120_000)


def ask_with_keys(browser: Browser, server: str, folder: Path) -> None:
    """Checks that the page tells a missing API key from a wrong one."""
    with open_page(browser, server, DESKTOP) as page:
        for key, complaint in (
            ("", "The server wants an API key"),
            ("wrong", "The server refuses this API key."),
        ):
            page.locator("#key").fill(key)
            submit_question(page, QUESTION)
            expect(page.locator(".problem")).to_contain_text(complaint)


def compare_two_settings(browser: Browser, server: str, folder: Path) -> None:
    """Compares two settings by their sliders, and takes the picture of a desktop."""
    with open_page(browser, server, DESKTOP) as page:
        page.get_by_label("Compare two settings").check()
        second = page.locator(".panel").nth(1)
        second.locator("summary").click()
        second.get_by_label("Acceptance").select_option("top_k")
        second.get_by_label("Others, as JSON").fill('{"diffusion_accept_tokens": 8}')
        submit_question(page, QUESTION)
        expect(page.locator("#status")).to_have_text("Done.", timeout=120_000)
        expect(page.locator(".answer")).to_have_text([ANSWER, ANSWER])
        for panel, steps in ((page.locator(".panel").nth(0), 0), (second, 3)):
            slider = panel.get_by_role("slider")
            slider.press("Home")
            for _ in range(steps):
                slider.press("ArrowRight")
            expect(panel.locator(".position")).to_contain_text(f"Step {steps + 1} of ")
        slider.blur()
        page.screenshot(path=folder / "desktop.png", full_page=True)


def check_phone_layout(browser: Browser, server: str, folder: Path) -> None:
    """Checks that the page fits a phone, and takes its picture."""
    with open_page(browser, server, PHONE, "dark") as page:
        submit_question(page, QUESTION)
        expect(page.locator("#status")).to_have_text("Done.", timeout=120_000)
        page.get_by_role("slider").press("Home")
        page.get_by_role("slider").blur()
        page.screenshot(path=folder / "phone.png", full_page=True)
        body = page.locator("body").bounding_box()
        assert body is not None and body["width"] <= PHONE[0]


def show_text_as_text(browser: Browser, server: str, folder: Path) -> None:
    """Checks that HTML in a question is shown as text."""
    with open_page(browser, server, DESKTOP) as page:
        submit_question(page, "<img src=x onerror=alert(1)>")
        expect(page.locator("#start")).to_be_enabled(timeout=120_000)
        expect(page.locator("main img")).to_have_count(0)


def show_errors(browser: Browser, server: str, folder: Path) -> None:
    """Checks the messages about wrong settings."""
    with open_page(browser, server, DESKTOP) as page:
        page.locator("summary").click()
        others = page.get_by_label("Others, as JSON")
        for value, complaint in (
            ('{"diffusion_foo": 1}', "diffusion_foo is not known"),
            ("{", "“Others, as JSON” must be an object"),
            ("[1]", "“Others, as JSON” must be an object"),
        ):
            others.fill(value)
            submit_question(page, QUESTION)
            expect(page.locator(".problem")).to_contain_text(complaint)
            expect(page.locator("#status")).to_contain_text(f"Not answered: {complaint}")
        others.fill("")
        no_end = {
            "headers": {"content-type": "text/event-stream"},
            "body": 'data: {"choices":[]}\n\n',
        }
        for handle, complaint in (
            (lambda route: route.fulfill(**no_end), "The stream ended before the answer."),
            (lambda route: route.abort(), "The server does not answer. Is it running?"),
        ):
            page.route("**/chat/completions", handle)
            submit_question(page, QUESTION)
            expect(page.locator("#status")).to_contain_text(f"Not answered: {complaint}")
        page.locator("#key").fill("sk-…")  # as a list of keys shows it
        submit_question(page, QUESTION)
        expect(page.locator(".problem")).to_contain_text("An API key cannot have such letters")


def stop_answer(browser: Browser, server: str, folder: Path) -> None:
    """Checks that a click stops an answer."""
    with open_page(browser, server, DESKTOP) as page:
        page.locator("summary").click()
        # A token a step takes long enough for a click.
        settings = '{"diffusion_acceptance": "top_k", "diffusion_accept_tokens": 1}'
        page.get_by_label("Others, as JSON").fill(settings)
        page.get_by_label("Most tokens").fill("900")
        submit_question(page, QUESTION)
        expect(page.locator(".token").first).to_be_visible(timeout=120_000)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".problem")).to_have_text("Stopped.")
        expect(page.locator("#start")).to_be_enabled()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/serve.py with a real model, and its page in a real browser.

    test_serve_model.py [BUILD] [--model models/SmolLM2-135M-Instruct] [--device SUBSTRING] [--picture FILE.png]

Protects: a chat completion of three samples that share the prompt's blocks, a system prompt found in the cache, an
answer that the model ends itself; the page: it loads, a message is answered as it comes, several answers and a stop
too, the map of the blocks is drawn, an error and a missing key are shown. The page is skipped where Chromium and its
driver (Debian: chromium, chromium-driver) are not there. BUILD is the build folder (default: build).
"""
import shutil
import sys
import tempfile
import time
from pathlib import Path

from serve_support import Server, make_model
from test_generate import MODEL, SKIPPED, Bench, make_parser, parse

SYSTEM = ("You are the librarian of a small town on a wide river. You answer in one short sentence, kindly, and you "
          "know the shelves by heart.")


def user(text):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def test_samples(bench, server):
    """Three samples of one prompt hold its blocks once; the system prompt is computed once."""
    client = server.client()
    ask = {"model": server.model, "temperature": 0.8, "max_tokens": 20}
    before = server.metrics()
    three = client.chat.completions.create(**ask, messages=user("Where are the maps?"), n=3, seed=1)
    after = server.metrics()
    texts = [c.message.content for c in three.choices]
    bench.check(len(set(texts)) == 3 and all(text.strip() for text in texts), f"three samples: {texts}")
    full = three.usage.prompt_tokens // 16
    held, shared = (after[n] - before[n] for n in ("kvleaf_choice_blocks_total", "kvleaf_choice_blocks_shared_total"))
    bench.check(3 * full <= shared <= 3 * (full + 1) and held > shared,
                f"by /metrics, {shared:g} of the {held:g} blocks they held were shared; the prompt fills {full}")
    again = client.chat.completions.create(**ask, messages=user("And the novels?"))
    cached, prompt = again.usage.prompt_tokens_details.cached_tokens, again.usage.prompt_tokens
    bench.check(0 < prompt - cached < 24, f"the same system prompt again: {cached} of {prompt} tokens were cached")
    stats = server.until(lambda s: s["used"] == 0)
    bench.check(stats["used"] == 0 and stats["cached"] > 0, f"no block is used then, {stats['cached']} are cached")


def test_end(bench, server):
    """The model's own end of a turn ends the answer and is not shown; greedy answers repeat."""
    client = server.client()
    ask = {"model": server.model, "temperature": 0, "max_tokens": 64,
           "messages": [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    choice = first.choices[0]
    bench.check(choice.finish_reason == "stop" and "Paris" in choice.message.content
                and "<|" not in choice.message.content, f"{choice.message.content!r} ({choice.finish_reason})")
    text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**ask, stream=True))
    bench.check(second.choices[0].message.content == text == choice.message.content, "three times the same")


# --------------------------------------------------------------------------------- the page

class Page:
    """The server's page in headless Chromium."""

    def __init__(self, url):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                         "--window-size=1280,900"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        self.driver.get(url)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.driver.quit()

    def run(self, script, *arguments):
        return self.driver.execute_script("return " + script, *arguments)

    def at(self, name):
        return self.driver.find_element("id", name)

    def set(self, name, value):
        self.at(name).clear()
        self.at(name).send_keys(value)

    def turns(self, kind):
        return self.run(f"[...document.querySelectorAll('.turn.{kind}')].map(e => e.firstChild?.textContent ?? '')")

    def until(self, wanted, seconds=120):
        """Waits until wanted() is true; returns what it was last."""
        end = time.monotonic() + seconds
        while not (found := wanted()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    def idle(self):
        return self.run("!document.getElementById('send').disabled")

    def complaints(self):
        """What the browser has to complain of, but for refused requests."""
        return [row["message"] for row in self.driver.get_log("browser")
                if row["level"] == "SEVERE" and "status of" not in row["message"]]


def test_page(bench, server):
    """The page answers in Chromium: one message, two answers to another, a stop, an error; the map is drawn."""
    with Page(server.url) as page:
        drawn = page.until(lambda: page.run("document.getElementById('map').naturalWidth > 100"))
        blocks = page.run("document.getElementById('count-total')?.textContent")
        bench.check(drawn and int(blocks or 0) == server.stats()["total"], f"the map of {blocks} blocks is drawn")
        bench.check(page.at("model").text == server.model, f"the model is named: {page.at('model').text}")
        old = page.run("document.getElementById('map').src")

        page.set("temperature", "0")
        page.set("limit", "16")
        page.at("text").send_keys("Name three colours.\n")
        growing = page.until(lambda: page.turns("assistant") and page.turns("assistant")[0])
        page.until(page.idle)
        answer = page.turns("assistant")[0]
        bench.check(answer.startswith(growing) and len(answer) > len(growing),
                    f"the answer grows, from {growing!r} to {answer!r}")
        want = server.client().chat.completions.create(
            model=server.model, temperature=0, max_tokens=16,
            messages=[{"role": "user", "content": "Name three colours."}]).choices[0].message.content
        bench.check(answer == want, "and is the one that the API gives")
        usage = page.run("document.querySelector('.usage')?.textContent")
        bench.check("prompt tokens" in (usage or ""), f"its usage is told: {usage}")
        new = page.until(lambda: page.run("document.getElementById('map').src") != old)
        bench.check(new, "the map is drawn anew")

        page.set("n", "2")
        page.set("temperature", "1")
        page.at("text").send_keys("Which one is the best?\n")
        page.until(lambda: len(page.turns("assistant")) == 3)
        if bench.picture:
            page.until(lambda: page.run("document.getElementById('count-sequences').textContent") == "2", 10)
            page.driver.save_screenshot(str(bench.picture))
        page.until(page.idle)
        bench.check(len(page.turns("assistant")) == 3 and "shared" in page.run(
            "[...document.querySelectorAll('.usage')].at(-1).textContent"), "two answers at once, side by side")

        page.set("n", "1")
        page.set("limit", "2000")
        page.at("text").send_keys("Tell me a very long story about a river.\n")
        page.until(lambda: len(page.turns("assistant")) == 4)
        page.at("stop").click()
        stats = server.until(lambda s: s["used"] == 0)
        bench.check(page.until(page.idle, 10) and stats["used"] == 0, "Stop ends an answer, its blocks are free")

        page.set("limit", "1000000")
        page.at("text").send_keys("More than there is\n")
        page.until(lambda: page.turns("error"))
        bench.check("1000000" in "".join(page.turns("error")), f"an error is shown: {page.turns('error')}")
        page.at("clear").click()
        bench.check(page.run("document.querySelectorAll('.turn').length") == 0, "a new conversation is empty")
        bench.check(page.complaints() == [], f"the browser has nothing to complain of {page.complaints()}")


def test_page_key(bench):
    """Where a key is needed the page asks for it."""
    with tempfile.TemporaryDirectory(prefix="kvleaf-serve-") as folder, \
            Server(bench.program, make_model(Path(folder) / "noise"), "--api-key", "the-key",
                   device=bench.device) as server, Page(server.url) as page:
        asked = page.until(lambda: page.at("key").is_displayed(), 20)
        page.at("key").send_keys("the-key")
        drawn = page.until(lambda: page.run("document.getElementById('map').naturalWidth > 100"), 20)
        bench.check(asked and drawn and page.at("state").text == "", "the field appears, with the key the map does")


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="a screenshot of the page as it answers")
    args = parse(parser)
    if not (args.model / "model.safetensors").exists():
        print(f"skipped: {args.model} is missing")
        return SKIPPED
    bench = Bench(args)
    bench.picture = args.picture
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    tests = [test_samples, test_end] + ([] if missing else [test_page])
    with Server(args.program, args.model, "--max-batch", 8, device=args.device) as server:
        for test in tests:
            bench.test(test.__name__, test, server)
    if not missing:
        test_page_key(bench)
    else:
        print(f"skipped: the page, {' and '.join(missing)} not installed")
    return bench.result(1 if missing else 0)


if __name__ == "__main__":
    sys.exit(main())

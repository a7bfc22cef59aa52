"""What an operator sees: /debug/scheduler with its reasons, `lawful top`, and the page /ui in a real browser."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.top import render, top
from engine.why import MOVING, reasons
from tests.server import chromium
from tests.server.servers import Server, running, wait_for
from tests.server.test_server_cases import Client

pytestmark = pytest.mark.timeout(120)

# reasons


def scheduler(**more: Any) -> Scheduler:
    values = {"num_gpu_blocks": 8, "num_cpu_blocks": 8, "block_size": 4, "max_model_len": 32, **more}
    return Scheduler(SchedulerConfig(**values))


def add(s: Scheduler, name: str, p: int = 4, n: int = 1, m: int = 4) -> None:
    s.add(SequenceGroup(name, p, n=n, max_tokens=m))


def step(s: Scheduler) -> None:
    s.update(s.schedule())


def test_a_waiting_head_lacks_blocks() -> None:
    s = scheduler(watermark_blocks=2)
    add(s, "A", p=12, m=8)
    step(s)
    add(s, "B", p=13, m=4)
    assert reasons(s)["running"] == MOVING
    why = reasons(s)["waiting"]
    assert why == (
        "it needs 4 GPU blocks and 5 of 8 are free, of which 1 go to decodes first, and 2 must stay free (watermark)"
    )
    step(s)
    assert [group.request_id for group in s.waiting] == ["B"]


def test_a_waiting_head_lacks_sequences_or_tokens() -> None:
    s = scheduler(num_gpu_blocks=40, max_num_seqs=4)
    add(s, "A", n=3)
    step(s)
    add(s, "B", n=2)
    assert reasons(s)["waiting"] == "3 sequences run, it brings 2, and max_num_seqs is 4"
    s = scheduler(num_gpu_blocks=40, max_num_seqs=4, max_num_batched_tokens=4)
    add(s, "A", p=16)
    step(s)
    add(s, "B")
    assert reasons(s)["waiting"] == "the step's 4 tokens are used up by 0 decoding sequences and the prefill of 'A'"


def test_a_head_that_would_be_taken_has_no_reason_and_is_taken() -> None:
    s = scheduler()
    add(s, "A")
    assert str(reasons(s)["waiting"]).startswith("nothing: the next step takes it")
    step(s)
    assert not s.waiting


def test_swapped_groups_come_first_and_say_what_they_lack() -> None:
    s = scheduler()
    add(s, "A", n=2, m=12)
    add(s, "B", n=2, m=12)
    while not s.swapped:
        step(s)
    add(s, "C")
    why = reasons(s)
    assert why["waiting"] == "1 swapped out (first 'B') come back before anyone is admitted (law S1)"
    assert "GPU blocks" in str(why["swapped"])
    while s.swapped:
        before = reasons(s)["swapped"]
        step(s)
    assert before is not None


def test_the_reasons_agree_with_what_the_next_step_does() -> None:
    """Over a whole run: a head with a reason stays, a head without one moves, unless a decode preempts in that step."""
    checked = 0
    for mode in ("swap", "recompute"):
        s = scheduler(
            num_gpu_blocks=12, num_cpu_blocks=5, max_num_seqs=6, max_num_batched_tokens=10, preemption_mode=mode
        )
        for i in range(12):
            add(s, str(i), p=3 + i % 6, n=1 + i % 3, m=3 + i % 5)
        while s.has_unfinished():
            told = reasons(s)
            heads = {name: next(iter(getattr(s, name)), None) for name in ("swapped", "waiting")}
            plan = s.schedule()
            for name, head in heads.items():
                if head is not None and not plan.preempted and not (name == "waiting" and heads["swapped"]):
                    moved = head in s.running
                    assert moved == str(told[name]).startswith("nothing"), (name, told[name], plan.log)
                    checked += 1
            s.update(plan)
    assert checked > 20


# the endpoint and top


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    """A server whose three queues are all filled for the time of this module."""
    flags = ["--block-size", "4", "--num-gpu-blocks-override", "90", "--num-cpu-blocks-override", "300"]
    flags += [
        "--max-num-seqs",
        "8",
        "--max-model-len",
        "1024",
        "--enable-ui",
        "--preemption-mode",
        "swap",
        "--drain-timeout",
        "0.5",
    ]
    with running(*flags, delay=0.25) as server:
        long: dict[str, Any] = {"stream": True, "n": 2, "max_tokens": 120}
        clients = [Client(server, prompt=[65 + i] * 100, request_id=f"client-{i}", **long) for i in range(4)]
        wait_for(lambda: server.queues()[1] >= 1, 60)
        clients += [Client(server, stream=True, prompt="late", max_tokens=10, request_id=f"late-{i}") for i in range(3)]
        wait_for(lambda: server.queues()[2] >= 3)
        yield server
        server.signal()
        for client in clients:
            client.wait(30)


def test_the_state_lists_the_queues_in_order_with_the_reason_of_each_head(busy: Server) -> None:
    status, state = busy.get("/debug/scheduler?blocks=true")
    assert status == 200
    arrivals = [
        group["arrival"] for name in ("running", "swapped", "waiting") for group in state["queues"][name]["groups"]
    ]
    assert arrivals == sorted(arrivals)
    homes = {name: {group["home"] for group in state["queues"][name]["groups"]} for name in state["queues"]}
    assert homes == {"running": {"gpu"}, "swapped": {"cpu"}, "waiting": {"none"}}
    for name, queue in state["queues"].items():
        assert queue["length"] == len(queue["groups"]) > 0
        assert queue["head_waits_for"], name
    assert "come back before anyone is admitted" in state["queues"]["waiting"]["head_waits_for"]
    for device, queue in (("gpu", "running"), ("cpu", "swapped")):
        owners = state[device]["owners"]
        assert len(owners) == state[device]["blocks"]
        assert sum(owner >= 0 for owner in owners) == state[device]["referenced"]
        for place, group in enumerate(state["queues"][queue]["groups"]):
            assert owners.count(place) == group["blocks"]
    assert state["at_boundary"]
    assert state["laws"] == {"contracts": "on", "checked": True}


@pytest.mark.parametrize("width", [80, 120])
def test_top_shows_it(busy: Server, width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width)
    assert top(busy.url, None, 0.5, True, console) == 0
    text = out.getvalue()
    for expected in (
        "running",
        "swapped",
        "waiting",
        "client-",
        "cmpl-late-0",
        "head:",
        "blocks",
        "laws on",
        "preempted",
        "refused",
    ):
        assert expected in text, text
    before, after = (busy.get("/debug/scheduler")[1] for _ in range(2))
    console.print(render(after, before, 1.0, busy.url))
    assert "tokens/s" in out.getvalue()


def test_top_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="does not answer"):
        top("http://127.0.0.1:9", None, 0.5, True)
    with running() as server, pytest.raises(ValueError, match="start it with --enable-debug"):
        top(server.url, None, 0.5, True)


# the page


def page_of(server: Server, dark: bool = False) -> chromium.Page:
    path = chromium.find()
    if path is None:
        pytest.skip("no Chromium is installed: the page is not tested (Debian: apt-get install chromium)")
    return chromium.Page(path, f"{server.url}/ui", dark)


def test_the_page_needs_nothing_from_elsewhere(busy: Server) -> None:
    status, page = busy.get("/ui")
    assert status == 200
    assert "http://" not in page
    assert "https://" not in page


def test_the_page_shows_the_queues_the_blocks_and_the_laws(busy: Server) -> None:
    page = page_of(busy)
    try:
        page.wait("document.querySelector('[data-queue=running] li') !== null")
        page.wait("document.querySelectorAll('#chart polyline').length === 2")
        assert page.value("document.getElementById('health').textContent") == "healthy"
        assert "laws hold, checked in every step (on)" in page.value("document.getElementById('laws').textContent")
        for queue in ("running", "swapped", "waiting"):
            lane = f"document.querySelector('[data-queue={queue}]')"
            assert page.value(f"{lane}.querySelectorAll('li').length > 0"), queue
            assert int(page.value(f"{lane}.querySelector('b').textContent")) > 0
            assert page.value(f"{lane}.querySelector('.why').textContent").startswith("head: ")
        for device in ("gpu", "cpu"):
            drawn = (
                f"(() => {{ const c = document.getElementById('{device}');"
                "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();"
                "for (let i = 0; i < d.length; i += 4) s.add(d[i] + ',' + d[i+1] + ',' + d[i+2]); return s.size; })()"
            )
            assert page.value(drawn) >= 3, "background, free blocks and at least one owner"
        assert page.value("document.querySelectorAll('#totals dt').length") > 10
        if picture := os.environ.get("LAWFUL_UI_PICTURE"):
            page.picture(picture)
        assert page.problems() == []
    finally:
        page.close()


def test_the_page_obeys_keys(busy: Server) -> None:
    page = page_of(busy)
    try:
        page.wait("document.querySelector('[data-queue=running] li') !== null")
        page.press("1")
        assert page.value("document.activeElement.closest('.lane').dataset.queue") == "running"
        page.press("3")
        assert page.value("document.activeElement.closest('.lane').dataset.queue") == "waiting"
        first = page.value("document.activeElement.dataset.id")
        page.press("ArrowDown")
        assert page.value("document.activeElement.dataset.id") != first
        page.press("ArrowUp")
        page.press("Enter")
        page.wait(f"document.querySelector('li[aria-selected=true]')?.dataset.id === '{first}'")
        page.press("Escape")
        page.wait("document.querySelector('li[aria-selected=true]') === null")
        page.press("2")
        assert page.value("document.activeElement.closest('.lane').dataset.queue") == "swapped"
        page.press("p")
        assert page.value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        page.press("p")
        page.press("?")
        assert page.value("document.getElementById('keys').open")
        assert page.problems() == []
    finally:
        page.close()


def test_the_page_is_dark_when_the_system_is_and_when_told_to(busy: Server) -> None:
    page = page_of(busy, dark=True)
    try:
        page.wait("document.querySelector('li') !== null")
        dark = page.value("getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(15, 18, 22)"
        page.press("d")
        assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
        page.press("d")
        assert page.value("getComputedStyle(document.body).backgroundColor") == dark
    finally:
        page.close()

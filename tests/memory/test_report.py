"""The report: one page that fetches nothing, with every stage, part and module in it, and its numbers right."""

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leantune.memory import MemoryTracker
from leantune.memory.measured import machine as machine_module
from leantune.memory.measured.cuda_allocator import CudaAllocator
from leantune.memory.measured.machine import ProcessUse, describe_machine, other_processes, versions
from leantune.memory.reports.profile import MemoryProfile
from leantune.memory.reports.report import render_report, write_report
from leantune.memory.reports.shortage import MemoryShortage
from leantune.memory.reports.stages import FORWARD_STAGE, STEP, StageMeasurement, stage_rows

VOID = {"meta", "br", "rect", "line", "path", "use", "img"}


@pytest.fixture(scope="module")
def tracked():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        tracker = MemoryTracker(model, optimizer)
        with tracker:
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


def profile(tracked, shortage=None, model="a <b>model</b>", budget=None):
    timeline = tracked.timeline()
    stages = (
        StageMeasurement(FORWARD_STAGE, timeline.saved_at_forward_end()),
        StageMeasurement(STEP, timeline.at_peak(), outside_bytes=300 << 20, part_peaks=timeline.part_peaks()),
    )
    planned = {STEP: {**timeline.part_peaks(), "total": 2 * timeline.peak_bytes}}
    return MemoryProfile(
        run={"model": model, "where": "32 x 1 tokens"},
        machine=describe_machine(),
        versions=versions(),
        budget=budget,
        stages=stages,
        rows=tuple(stage_rows(planned, stages)),
        timeline=timeline,
        modules=tuple(tracked.modules(timeline)),
        advice=("write less",),
        notes=("a note",),
        tokens_per_second=1234.0,
        shortage=shortage,
    )


class Checker(HTMLParser):
    """Collects text, and fails on tags that do not close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
            self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def text_of(page):
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return " ".join(" ".join(checker.text).split())


def test_the_page_is_whole_and_fetches_nothing(tracked):
    page = render_report(profile(tracked))
    assert not re.search(r"<script|<link|<img|@import|<iframe|src=|url\((?!#)", page)
    # Names of XML vocabularies and clip paths inside the page are no addresses to fetch.
    assert not [href for href in re.findall(r'href="([^"]*)"', page) if not href.startswith("#")]
    text = text_of(page)
    assert "-50.0 %" in text  # measured half of what was planned
    assert "1,234 tokens/s" in text and "300.0 MiB" in text
    assert "a <b>model</b>" in text  # escaped, so it is text and no tag
    for expected in ("steady step", "forward", "write less", "a note", "optimizer states"):
        assert expected in text


def test_bars_are_to_scale(tracked):
    found = profile(tracked)
    page = render_report(found)
    bar = page[page.index('aria-label="steady step') :]
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%"', bar[: bar.index("</svg>")])]
    # The plan is twice the measurement, and the widest.
    assert sum(widths) == pytest.approx(50, abs=0.02)
    assert re.search(r'x1="100\.000%"', bar)


def test_p10_a_shortage_names_where_what_and_who(tracked):
    shortage = MemoryShortage(
        stage=STEP,
        message="out of memory: here",
        simulated=False,
        live=tracked.timeline().at_peak(),
        part="activations",
        phase="forward",
        module="layers.7.mlp",
        operator="aten.mm.default",
        asked=100,
        others=(ProcessUse(4242, "other-training", 3 << 30),),
    )
    text = text_of(render_report(profile(tracked, shortage)))
    for expected in ("layers.7.mlp", "aten.mm.default", "other-training", "4242", "3.00 GiB", "What would make room"):
        assert expected in text
    assert "Out of memory in: steady step" in text
    over = text_of(render_report(profile(tracked, dataclasses.replace(shortage, simulated=True))))
    assert "Over the memory budget in: steady step" in over


def test_p10_other_processes_are_read_from_nvidia_smi(monkeypatch):
    listed = "77, 1024, /usr/bin/python3\n78, 4096, some/trainer, with comma\n[N/A], [N/A], x\n"
    asked = []

    def run(command, **_):
        asked.append(command)
        return SimpleNamespace(stdout=listed)

    monkeypatch.setattr(machine_module.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="H", uuid="12-34"))
    found = other_processes("cuda:0")
    assert [(use.pid, use.bytes) for use in found] == [(78, 4 << 30), (77, 1 << 30)]
    assert "--id=GPU-12-34" in asked[0]

    def missing(command, **_):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(machine_module.subprocess, "run", missing)
    assert other_processes("cuda:0") == []


def test_p10_the_cpu_names_other_processes():
    with subprocess.Popen(["sleep", "20"]) as other:
        found = other_processes("cpu", limit=10_000)
        other.terminate()
    assert other.pid in [use.pid for use in found]
    assert found == sorted(found, key=lambda use: -use.bytes)


def test_the_cuda_allocator_is_asked_by_its_own_names(monkeypatch, tmp_path):
    calls = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda *a, **k: calls.append(k))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: calls.append(path))
    stats = {
        "allocated_bytes.all.peak": 5,
        "reserved_bytes.all.peak": 8,
        "inactive_split_bytes.all.current": 1,
        "num_alloc_retries": 0,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    allocator = CudaAllocator(torch.device("cuda"))
    allocator.start()
    assert allocator.figures() == {"allocated_peak": 5, "reserved_peak": 8, "inactive_split": 1, "retries": 0}
    allocator.write_snapshot(tmp_path / "s.pickle")
    allocator.stop()
    assert calls[0]["max_entries"] > 0 and calls[1] == str(tmp_path / "s.pickle") and calls[2] == {"enabled": None}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_lays_the_page_out_without_overflow(tracked, tmp_path, width):
    page = write_report(profile(tracked, model="a-long-name/" * 12), tmp_path / "report.html")
    probe = "<script>addEventListener('load',()=>document.title=document.documentElement.scrollWidth+' '+innerWidth)"
    page.write_text(page.read_text().replace("</body>", probe + "</script></body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--dump-dom"]
    dom = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120).stdout
    content, window = map(int, re.search(r"<title>(\d+) (\d+)</title>", dom).groups())
    assert content <= window

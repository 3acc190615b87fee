"""A farm with builds worth looking at, and a real browser to look at them. Skipped if there is no Chromium here."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from farm.app import Farm
from farm.builds.known_failures import today
from farm.jobs.state import FailureKind, Outcome
from tests.support.shown import GPU, Cell, accept, automate, backdate, claim, failed, matrix_of, passed, play, register

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

PATIENCE = 120_000
"""Milliseconds: a busy machine takes its time, and no test is about that."""

DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
TABLET = {"width": 820, "height": 1180}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a browser if there is none."""
    if CHROMIUM is None:
        for item in items:
            if "tests/pages/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs Chromium: `apt-get install chromium`, or set CHROMIUM"))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        # Where tests run as root, Chromium's own sandbox does not start; it opens nothing but the farm's pages.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=PATIENCE
        )
        yield browser
        browser.close()


NewPage = Callable[..., Page]


@pytest.fixture
def new_page(chromium: Browser, farm: Farm, url: str) -> Iterator[NewPage]:
    """Open a page as somebody who has signed in; what goes wrong in it fails the test."""
    contexts: list[BrowserContext] = []
    wrong: list[str] = []

    def make(path: str = "", **options: Any) -> Page:
        context = chromium.new_context(**{"base_url": url, "viewport": DESKTOP, **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        token, where = farm.settings.api_token.get_secret_value(), options.get("base_url", url)
        context.add_cookies([{"name": "farm", "value": token, "url": where, "httpOnly": True, "sameSite": "Lax"}])
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        if path:
            page.goto(path)
        return page

    yield make
    for context in contexts:
        context.close()
    assert wrong == []


@dataclass(frozen=True)
class Shown:
    """What is there to be looked at."""

    before: str
    build: str
    open: str
    job: str
    """One that failed after a crash."""
    key: str
    """Of a program for a GPU."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Every page by its name."""
        home = "/ui/ns/main"
        return {
            "now": home,
            "history": f"{home}/history/{YEAR}",
            "across": f"{home}/across?name=vision-nightly",
            "known": f"{home}/known",
            "automation": f"{home}/automation",
            "builds": f"{home}/builds",
            "build": f"{home}/builds/{self.build}",
            "cells": f"{home}/builds/{self.build}?by=list&sort.cells=-Median",
            "timeline": f"{home}/builds/{self.build}/timeline",
            "open": f"{home}/builds/{self.open}",
            "compare": f"{home}/compare/{self.before}/{self.build}",
            "failed-cell": f"{home}/builds/{self.build}/cells/whisper-tiny/migraphx-gfx942/int8/b8",
            "cell": f"{home}/builds/{self.build}/cells/resnet50/migraphx-gfx942/fp16/b8",
            "job": f"{home}/jobs/{self.job}",
            "log": f"{home}/jobs/{self.job}/log",
            "log-search": f"{home}/builds/{self.build}/log?q=fuse_mlir",
            "artifact": f"{home}/artifacts/{self.key}",
            "workers": f"{home}/workers",
            "models": f"{home}/models",
            "model": f"{home}/models/resnet50",
            "storage": f"{home}/storage",
        }


SPEEDS = {"resnet50": 0.0042, "bert-base": 0.0113, "whisper-tiny": 0.0361, "magika": 0.00082, "yolo11n": 0.0068}


ERRORS = {"fp32": 2.4e-7, "fp16": 3.1e-4, "int8": 0.021}


def speed_of(order: Mapping[str, Any]) -> float:
    """A latency that fits model, device, precision and batch."""
    model, target, precision, shape = order["identifier"].split("/")
    device = 0.11 if "gfx942" in target else 1.0
    batch = int(shape.removeprefix("b"))
    return SPEEDS[model] * device * {"fp32": 1.0, "fp16": 0.58, "int8": 0.41}[precision] * (0.4 + 0.6 * batch)


YEAR = "resnet50/migraphx-gfx942/fp16/b8"
"""A cell that was built every third day for a year."""


def a_year(farm: Farm) -> None:
    """Fill the history of one cell: noise, a new toolchain, a new driver, one failure, one regression."""
    noise = random.Random(7)
    for number in range(120):
        ended = time.time() - (120 - number) * 3 * 86_400
        made = number != 70
        latency = 0.00134 * (0.93 if number >= 40 else 1.0) * (1.11 if number >= 100 else 1.0) * noise.gauss(1.0, 0.008)
        facts = {
            "key": f"{number:064x}", "toolchain": "rocm7.2-5f3a9c01" if number >= 40 else "rocm7.1-77aa01be",
            "driver": "6.14.0" if number >= 85 else "6.12.12", "device": "gfx942", "node": f"gpu-{number % 2 + 1}",
            "latency": latency, "errors": {"logits": 3e-4}, "program": {"size": 1}, "shared": number % 29 == 28,
        }  # fmt: skip
        cell = {
            "identifier": YEAR, "state": "succeeded" if made else "failed", "kind": "" if made else "compiler_crash",
            "hit": number % 17 == 16, "key": facts["key"], "facts": facts if made else None,
            "model": "resnet50", "target": "migraphx/gfx942", "precision": "fp16", "shape": "b8", "message": "",
            "detail": "", "advice": "", "phase": None, "worker": None, "elapsed": 1.0, "waiting": "", "warning": "",
            "job": None, "fault": None, "as_expected": False,
            "gate": {"tolerance": {}, "weak": "warn", "on_fail": "warn", "unverifiable": "publish"},
        }  # fmt: skip
        counts = {"queued": 0, "running": 0, "succeeded": int(made), "failed": int(not made), "cancelled": 0, "hits": 0}
        verdict = {"exit_code": int(not made), "text": f"{int(made)} of 1 cells succeeded", "counts": counts}
        build = {
            "id": f"b-{random.Random(number).getrandbits(64):016x}", "namespace": "main", "name": "vision-nightly",
            "labels": {}, "state": "reported", "paused": False, "created_by": "ci",
            "created_at": ended - 600, "ended_at": ended, "verdict": verdict,
            "follows": None, "followed_by": None, "retries": None, "counts": counts, "warnings": [],
        }  # fmt: skip
        farm.build_index.add({"build": build, "cells": [cell]})


@pytest.fixture
def shown(farm: Farm, redis_url: str) -> Shown:
    """A build before, one that got worse, and one that runs."""
    register(farm)
    cells = matrix_of(SPEEDS)
    before = accept(farm, "vision-nightly", cells, labels={"branch": "main"})

    def first(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        if order["identifier"] == "magika/migraphx-gfx942/int8/b1":
            return failed(farm, order)
        return passed(farm, order, key, job=job, latency=speed_of(order), error=ERRORS[order["spec"]["precision"]])

    play(farm, first)
    farm.build_finisher.finish(before)
    changed = [cell for cell in cells if cell.target.startswith("migraphx")]
    reason = "options.level: standard -> tuned"
    after = [cell._replace(salt="tuned", reason=reason) if cell in changed else cell for cell in cells]
    build = accept(farm, "vision-nightly", after, labels={"branch": "main", "commit": "4c1d0e7"})

    def second(job: str, order: Mapping[str, Any], key: str, number: int) -> Outcome:
        identifier = order["identifier"]
        if identifier == "whisper-tiny/migraphx-gfx942/int8/b8":
            kind, message = FailureKind.COMPILER_CRASH, "the compiler died of signal 11 (SIGSEGV) in pass fuse_mlir"
            detail = "error: unsupported layout for convolution node_38\nSegmentation fault (core dumped)"
            return failed(farm, order, number=number, kind=kind, message=message, detail=detail)
        if identifier == "yolo11n/migraphx-gfx942/int8/b1":
            return passed(farm, order, key, job=job, latency=speed_of(order), error=0.31)
        factor = 1.34 if identifier.startswith("bert-base/") and "/b8" in identifier else 0.97
        error = ERRORS[order["spec"]["precision"]]
        return passed(farm, order, key, job=job, latency=speed_of(order) * factor, error=error)

    play(farm, second)
    farm.build_finisher.finish(build)
    rows = {cell["identifier"]: cell for cell in farm.build_reader.cells("main", build)}
    opened = accept(farm, "release-candidate", [cell._replace(salt="rc") for cell in cells], created_by="ann")
    for number, (job, claimed) in enumerate(claim(farm, GPU, 12)):
        if number < 7:
            made = passed(farm, claimed.order, claimed.key, job=job, latency=speed_of(claimed.order))
            farm.store.jobs.finish(job, claimed.token, made)
        else:
            farm.store.jobs.renew(claimed.token, job, phase="compiling" if number % 2 else "measuring")
    a_year(farm)
    failed_cell = "whisper-tiny/migraphx-gfx942/int8/b8"
    link, reason = "https://github.com/ROCm/AMDMIGraphX/issues/4711", "fuse_mlir crashes on this layout, bug 4711"
    known = {"cell": failed_cell, "kind": "compiler_crash", "reason": reason, "link": link, "by": "ann"}
    farm.failures.acknowledge("main", {**known, "until": str(today() + timedelta(days=2)), "at": time.time()})
    automate(farm, "vision-nightly", build)
    accept(farm, "audio-weekly", [Cell("denoise", precision="fp32")], created_by="ci")
    backdate(farm, redis_url)
    crashed = rows["whisper-tiny/migraphx-gfx942/int8/b8"]["job"]
    return Shown(before, build, opened, crashed, rows["resnet50/migraphx-gfx942/fp16/b8"]["facts"]["key"])

"""Faults of callers: every route asked at random in every role, and secrets looked for wherever text goes."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import junitparser
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from farm.app import Farm
from farm.cli import main
from farm.client.client import FarmClient
from farm.client.freezing import Frozen
from tests.chaos.report import Fault
from tests.chaos.rig import Rig
from tests.support.api_farm import ADMINS_ONLY, OPEN_TO_ALL, finished

RANKS = ("none", "monitor", "reader", "submitter", "admin")
"""The roles; a monitor reads the metrics, which are no route of the document, and nothing else."""


def needed(method: str, path: str) -> str:
    """The lowest role that a route is for."""
    if path in OPEN_TO_ALL:
        return "none"
    return "admin" if path in ADMINS_ONLY else "reader" if method.lower() == "get" else "submitter"


@schemathesis.serializer("application/gzip")
def any_bytes(_: Any, value: Any) -> bytes:
    """A body that claims to be an archive."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.mark.fault("25")
def test_every_route_in_every_role(fault: Fault, farm: Farm, url: str, client: FarmClient, frozen: Frozen) -> None:
    """Requests that fit the published document, and ones that do not, as Schemathesis makes them; always the same."""
    finished(farm, client, frozen)
    tokens = {role: client.tokens.create(f"a-{role}", role, "main") for role in RANKS[1:]}
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{url}/v1/openapi.json").get_all_operations()]
    answers: Counter[str] = Counter()
    for role in RANKS:
        headers = {"Authorization": f"Bearer {tokens[role]}"} if role in tokens else {}
        for operation in operations:
            enough = RANKS.index(role) >= RANKS.index(needed(operation.method, operation.path))
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                ask(operation, mode, fault.count.examples, headers, answers, enough=enough)
    fault.measured(routes=len(operations), roles=len(RANKS), requests=answers.total(), **dict(answers))
    assert not [status for status in answers if status.startswith("5")]


def ask(
    operation: Any, mode: Any, examples: int, headers: dict[str, str], answers: Counter[str], *, enough: bool
) -> None:
    try:
        strategy = operation.as_strategy(generation_mode=mode)
    except schemathesis.errors.InvalidSchema:
        return

    @given(case=strategy)
    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        case.headers = {name: value for name, value in (case.headers or {}).items() if name != "Authorization"}
        answer = case.call(headers=headers, timeout=30, allow_redirects=False)
        answers[f"{answer.status_code // 100}xx"] += 1
        said = f"{operation.method} {operation.path}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code < 500, said
        assert enough or answer.status_code >= 400, said

    # A route without parameters has nothing that could be wrong.
    with suppress(Unsatisfiable):
        send()


@pytest.mark.fault("25-secrets")
def test_no_secret_is_in_any_log_or_error(
    fault: Fault, rig: Callable[..., Rig], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At level debug, through a whole run in which a compiler dies, Redis dies, and addresses and keys are wrong."""
    # The commands below run in this process, and set up its log.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "level", root.level)
    farm = rig(log_level="debug")
    own = farm.settings
    secrets = {
        "the administrator's token": own.api_token.get_secret_value(),
        "the key of object storage": own.s3_secret_key.get_secret_value(),
        "the password of Redis": str(urlsplit(own.redis_url.get_secret_value()).password),
    }
    client = farm.serve()
    secrets["a token"] = client.tokens.create("ci", "submitter", "main")
    farm.script({"": [{"die": "SIGSEGV"}], "1": [{}], "2": [{"exit": 42}]})
    farm.workers("n0")
    cells = farm.wait(farm.submit(client, fault.count.jobs), timeout=120)
    texts = [str(cells)]
    texts += [client.jobs.log(cell["job"]).decode(errors="replace") for cell in cells if cell["job"]]
    for name, value in own.environment().items():
        monkeypatch.setenv(name, value)
    wrong = {
        "FARM_S3_ENDPOINT": "http://127.0.0.1:9",
        "FARM_S3_SECRET_KEY": secrets["the key of object storage"] + "x",
        "FARM_REDIS_URL": own.redis_url.get_secret_value().replace("127.0.0.1", "127.0.0.2"),
        "FARM_API_TOKEN": secrets["the administrator's token"] + "x",
    }
    for name, value in wrong.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            for command in (["doctor"], ["status"], ["worker"], ["audit", "--json"]):
                if command != ["worker"] or name == "FARM_REDIS_URL":
                    main(command)
    farm.valkey.stop()
    headers = {"Authorization": f"Bearer {secrets['a token']}"}
    for path in ("/v1/builds", "/v1/health", "/v1/tokens", "/v1/workers"):
        texts.append(httpx.get(client.url + path, headers=headers, timeout=30).text)
    farm.start_valkey()
    farm.stop_workers()
    printed = capfd.readouterr()
    texts += [printed.out, printed.err, *(path.read_text(errors="replace") for path in farm.folder.glob("*.log"))]
    fault.measured(texts=len(texts), kilobytes=sum(map(len, texts)) // 1000, secrets=len(secrets))
    assert len(printed.err) > 1000, "the worker wrote its log there"
    found = {name: text[max(0, text.index(secret) - 300) : text.index(secret)]
             for name, secret in secrets.items() for text in texts if secret in text}  # fmt: skip
    assert found == {}


PRINTED = (
    "\x1b[31mred", "\x1b[2J\x1b[Hcleared", "\x1b]0;a title\x07named", "\x1b]52;c;cm0gLXJmIC8=\x07clipboard",
    "\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "\x1bPq#0;2;0;0;0\x1b\\sixel", "\x1b]0;without an end",
    "\x1bcreset", "\x1b(0lqk", "\x9b31mof one byte", "over\rwritten", "back\b\b\bspace", "bell\x07 nul\x00",
    "re\u202eversed", "::set-output name=a::b", "::stop-commands::x", "##vso[task.setvariable variable=a]b",
    "##teamcity[buildStatus text='a']", '"><img src=x onerror=alert(1)>',
    "]]></failure><testcase name='a'/>", "&lt;!ENTITY % a&gt;", "<script>alert(1)</script>",
)  # fmt: skip
"""What a hostile model may make a compiler print. A smaller sample has the last of them."""

DRIVES = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|^\s*::\w|##(vso|teamcity)?\[", re.MULTILINE
)
"""What drives a terminal or a CI server."""


@pytest.mark.fault("25-logs")
def test_what_compilers_print_is_inert(
    fault: Fault,
    rig: Callable[..., Rig],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    farm = rig()
    client = farm.serve()
    texts = PRINTED[-fault.count.texts :]
    farm.script({str(batch): [{"say": text, "exit": 42}] for batch, text in enumerate(texts, 1)})
    farm.workers("n0")
    build_id = farm.submit(client, len(texts))
    cells = farm.wait(build_id, timeout=300)
    for name, value in {**farm.settings.environment(), "FARM_API_URL": client.url}.items():
        monkeypatch.setenv(name, value)
    junit = tmp_path / "junit.xml"
    commands = [["logs", build_id, cell["identifier"]] for cell in cells]
    commands += [["status", build_id], ["watch", build_id, "--junit", str(junit)]]
    shown = ""
    for command in commands:
        main(command)
        shown += "".join(capsys.readouterr())
    headers = {"Authorization": f"Bearer {farm.settings.api_token.get_secret_value()}"}
    raw = [httpx.get(f"{client.url}/v1/jobs/{cell['job']}/log", headers=headers, timeout=60) for cell in cells]
    drives = [shown[max(0, found.start() - 50) : found.end() + 50] for found in DRIVES.finditer(shown)]
    (suite,) = junitparser.JUnitXml.fromfile(str(junit))
    fault.measured(texts=len(texts), commands=len(commands), kilobytes=len(shown) // 1000, active=len(drives))
    assert all(text.encode() in log.content for text, log in zip(texts, raw, strict=True)), "they did print it"
    assert "<script>" in shown, "a sample of any size has it"
    assert drives == []
    assert (suite.tests, suite.failures + suite.errors) == (len(cells), len(cells))
    for log in raw:
        kind = log.headers["Content-Type"].partition(";")[0]
        assert (kind, log.headers["X-Content-Type-Options"]) == ("text/plain", "nosniff")

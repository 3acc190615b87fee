"""`farm serve` without a token: it says who else is the administrator then."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from farm.cli import main
from farm.cli.operator_commands import other_users
from farm.serving import server


def user(name: str, uid: int, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", uid, uid, "", f"/home/{name}", shell))


USERS = [
    user("root", 0),
    user("daemon", 1, "/usr/sbin/nologin"),
    user("nobody", 65534, "/usr/sbin/nologin"),
    user("bob", 1001),
    user("alice", 1002, "/usr/bin/zsh"),
    user("backup", 1003, "/bin/false"),
]


def test_other_users_are_those_who_can_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_users(USERS) == ["alice", "bob"]
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    assert other_users(USERS) == ["alice"]


@pytest.mark.parametrize(("token", "users", "warned"), [("", USERS, True), ("secret", USERS, False), ("", [], False)])
def test_it_says_who_needs_no_token(
    token: str,
    users: list[pwd.struct_passwd],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(server, "serve", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_REDIS_URL", "redis://127.0.0.1:9/0")
    monkeypatch.setenv("FARM_S3_BUCKET", "farm")
    monkeypatch.setenv("FARM_API_TOKEN", token)
    assert main(["serve"]) == 0
    assert ("administrator (alice, bob)" in capsys.readouterr().err) is warned

"""Settings: who wins, and what a wrong one says."""

from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.settings import Settings, load_settings, worker_environment


def test_every_setting_has_its_default_in_the_shipped_file() -> None:
    settings = load_settings({})
    assert settings.lease_seconds == 20.0
    assert settings.slots >= 1


def test_the_users_own_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm" / "farm.toml").write_text("lease_seconds = 7\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings({}).lease_seconds == 7.0


def test_a_home_where_this_user_may_not_look_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a name that no file system has, since root may look everywhere."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ("x" * 300)))
    with pytest.raises(UsageError, match="cannot look for settings") as caught:
        load_settings({})
    assert "set HOME" in caught.value.hint


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "farm.toml"
    file.write_text("lease_seconds = 7\nrenew_seconds = 2\n")
    settings = load_settings({"FARM_CONFIG": str(file), "FARM_LEASE_SECONDS": "9"})
    assert (settings.lease_seconds, settings.renew_seconds) == (9.0, 2.0)


@pytest.mark.parametrize(
    ("environ", "named"),
    [({"FARM_LEASE_SECONDS": "soon"}, "FARM_LEASE_SECONDS"), ({"FARM_LOG_FORMAT": "xml"}, "FARM_LOG_FORMAT")],
)
def test_a_wrong_value_names_its_variable(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        load_settings(environ)


def test_an_unknown_field_in_the_file_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "farm.toml"
    file.write_text("leese_seconds = 7\n")
    with pytest.raises(UsageError, match=r"farm\.toml.*leese_seconds"):
        load_settings({"FARM_CONFIG": str(file)})
    file.write_text(f"pool = {'[' * 5000}")
    with pytest.raises(UsageError, match=r"farm\.toml: maximum recursion depth"):
        load_settings({"FARM_CONFIG": str(file)})


def test_another_process_gets_the_same_settings_through_its_environment() -> None:
    settings = load_settings({"FARM_S3_SECRET_KEY": "s3cret", "FARM_S3_SOURCES": "a,b", "FARM_DATA_DIR": "/data"})
    assert load_settings(settings.environment()) == settings


def test_secrets_do_not_show_in_text() -> None:
    settings: Settings = load_settings({"FARM_S3_SECRET_KEY": "s3cret", "FARM_API_TOKEN": "t0ken"})
    assert "s3cret" not in repr(settings)
    assert "t0ken" not in str(settings)


# --- a file that lies in the folder: who made the folder wrote it ---------------------------------------------------


@pytest.fixture
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that somebody else made, with us in it, and the user's own (empty) configuration, too."""
    (tmp_path / "home" / "farm").mkdir(parents=True)
    (tmp_path / "clone").mkdir()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "clone")
    return tmp_path / "clone"


def own(cloned: Path, text: str) -> None:
    (cloned.parent / "home" / "farm" / "farm.toml").write_text(text)


FOR_A_FOLDER = {"lease_seconds": "7.0", "namespace": '"team"', "threads": "2", "log_level": '"debug"'}


def test_a_folders_file_sets_how_builds_are_made(cloned: Path) -> None:
    (cloned / "farm.toml").write_text("".join(f"{name} = {value}\n" for name, value in FOR_A_FOLDER.items()))
    settings = load_settings({})
    assert (settings.lease_seconds, settings.namespace, settings.threads) == (7.0, "team", 2)


DANGEROUS = {
    "lock_dir": '"/home/user"',
    "api_token": '"t"',
    "proxy_secret": '"p"',
    "migraphx_python": '"./evil"',
    "migraphx_path": '"."',
    "other_toolchains": '["./evil"]',
    "torch_python": '"./evil"',
    "tensorflow_python": '"./evil"',
    "data_dir": '"/home/user"',
    "redis_url": '"redis://evil.example"',
    "s3_endpoint": '"https://evil.example"',
    "s3_public_endpoint": '"https://evil.example"',
    "s3_region": '"evil.example"',
    "s3_bucket": '"evil"',
    "s3_access_key": '"k"',
    "s3_secret_key": '"k"',
    "s3_sources": '["private"]',
    "api_hosts": '["evil.example"]',
    "webhook_networks": '["0.0.0.0/0"]',
    "gc": "true",
    "keep_days": "0.1",
    "changes_days": "0.1",
    "health_port": "8081",
    "trusted_folders": '["/"]',
    "signing_key": '"./evil.key"',
    "timestamp_key": '"./evil.key"',
    "builder_id": '"urn:example:evil"',
    "trust_policy": '"./evil.toml"',
    "cold_children": '["main"]',
}


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_folders_file_sets_nothing_that_runs_or_gets_secrets(cloned: Path, name: str) -> None:
    """Unless the user's own configuration trusts the folder, or names the file."""
    text = f"# Ours.\n\n{name} = {DANGEROUS[name]}\n"
    (cloned / "farm.toml").write_text(text)
    with pytest.raises(UsageError, match=rf"farm\.toml, line 3: `{name}`") as error:
        load_settings({})
    assert "trusted_folders" in error.value.hint and "FARM_CONFIG" in error.value.hint
    assert load_settings({"FARM_CONFIG": "farm.toml"})
    if name != "trusted_folders":
        own(cloned, f'trusted_folders = ["{cloned}"]\n')
        assert load_settings({})


def test_every_setting_is_for_a_folders_file_or_is_not(cloned: Path) -> None:
    """A new setting is refused in a folder's file until somebody has thought about it."""
    from farm.settings import FOR_FOLDERS

    assert set(DANGEROUS).isdisjoint(FOR_FOLDERS)
    of_a_node = {"cache_bytes", "min_free_bytes", "outbox_bytes", "outbox_hours", "disk_limit", "process_limit"}
    assert set(Settings.model_fields) == set(DANGEROUS) | FOR_FOLDERS | of_a_node
    bounds_of_nodes = {"cache_bytes", "min_free_bytes", "outbox_bytes", "outbox_hours", "disk_limit", "process_limit"}
    assert set(Settings.model_fields) == set(DANGEROUS) | FOR_FOLDERS | bounds_of_nodes


def test_a_folder_is_trusted_by_its_real_place(cloned: Path) -> None:
    (cloned / "farm.toml").write_text('data_dir = "/data"\n')
    (cloned.parent / "trusted").symlink_to(cloned)
    own(cloned, f'trusted_folders = ["{cloned.parent}/trusted", "~/work"]\n')
    assert load_settings({}).data_dir == Path("/data")
    own(cloned, f'trusted_folders = ["{cloned}/below"]\n')
    with pytest.raises(UsageError, match="data_dir"):
        load_settings({})
    assert load_settings({"FARM_TRUSTED_FOLDERS": f"/elsewhere,{cloned}"}).data_dir == Path("/data")


TOKEN = {"FARM_API_TOKEN": "secret"}
SAVED = 'api_url = "https://farm.example"\napi_token = "secret"\n'


@pytest.mark.parametrize(
    ("saved", "environ", "url"),
    [
        (SAVED, {}, "https://evil.example"),
        (SAVED, {}, "http://farm.example"),
        (SAVED, {}, "https://farm.example:8443"),
        (SAVED, {}, "https://farm.example@evil.example"),
        (SAVED, {}, "https://farm.example.evil.example"),
        (SAVED, {}, "https://["),
        ('api_token = "secret"\n', {}, "https://farm.example"),
        ("", TOKEN, "https://evil.example"),
        ('api_url = "https://farm.example"\n', TOKEN, "https://evil.example"),
    ],
)
def test_a_token_is_not_sent_where_a_folders_file_says(
    cloned: Path, saved: str, environ: dict[str, str], url: str
) -> None:
    own(cloned, saved)
    (cloned / "farm.toml").write_text(f'api_url = "{url}"\n')
    with pytest.raises(UsageError, match=r"farm\.toml, line 1: `api_url`") as error:
        load_settings(environ)
    assert "secret" not in f"{error.value.message} {error.value.hint}"
    assert url in error.value.message and "FARM_API_URL" in error.value.hint
    assert load_settings({**environ, "FARM_API_URL": url, "FARM_API_TOKEN": "another"}).api_url == url


@pytest.mark.parametrize("url", ["https://farm.example", "https://FARM.example:443/", "https://farm.example/v1"])
def test_a_token_is_sent_to_the_origin_that_it_was_saved_for(cloned: Path, url: str) -> None:
    own(cloned, SAVED)
    (cloned / "farm.toml").write_text(f'api_url = "{url}"\n')
    settings = load_settings({})
    assert (settings.api_url, settings.api_token.get_secret_value()) == (url, "secret")


def test_a_folders_file_names_a_farm_that_needs_no_token(cloned: Path) -> None:
    (cloned / "farm.toml").write_text('api_url = "http://127.0.0.1:8000"\n')
    assert load_settings({}).api_url == "http://127.0.0.1:8000"
    own(cloned, SAVED)
    assert load_settings({"FARM_API_TOKEN": ""}).api_url == "http://127.0.0.1:8000"


def test_a_saved_token_stays_with_its_farm_when_the_environment_names_another(cloned: Path) -> None:
    own(cloned, SAVED)
    with pytest.raises(UsageError, match=r"`api_token` of .*farm\.toml, line 2 belongs to https://farm\.example"):
        load_settings({"FARM_API_URL": "https://other.example"})
    settings = load_settings({"FARM_API_URL": "https://other.example", "FARM_API_TOKEN": "theirs"})
    assert settings.api_token.get_secret_value() == "theirs"
    assert load_settings({"FARM_API_URL": "https://farm.example:443"}).api_token.get_secret_value() == "secret"


def test_a_worker_gets_no_token_and_no_keys_that_it_does_not_need(tmp_path: Path) -> None:
    """Whatever gives them: the environment, or a file that the worker reads too."""
    config = tmp_path / "farm.toml"
    config.write_text('api_token = "administrator"\ns3_access_key = "own"\n')
    outside = {"FARM_CONFIG": str(config), "AWS_SECRET_ACCESS_KEY": "user", "PATH": "/bin"}
    given = worker_environment(load_settings(outside), outside)
    assert not {"administrator", "user"} & set(given.values())
    assert (given["PATH"], given["FARM_S3_ACCESS_KEY"]) == ("/bin", "own")
    assert load_settings(given).api_token.get_secret_value() == ""
    config.write_text("")
    assert worker_environment(load_settings(outside), outside)["AWS_SECRET_ACCESS_KEY"] == "user"

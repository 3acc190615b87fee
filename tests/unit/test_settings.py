"""Settings: who wins, and what a wrong one says."""

from pathlib import Path

import pytest

from farm.errors import UsageError
from farm.settings import Settings, load_settings


def test_every_setting_has_its_default_in_the_shipped_file() -> None:
    settings = load_settings({})
    assert settings.lease_seconds == 20.0
    assert settings.slots >= 1


def test_the_users_own_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm" / "farm.toml").write_text("lease_seconds = 7\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings({}).lease_seconds == 7.0


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


def test_another_process_gets_the_same_settings_through_its_environment() -> None:
    settings = load_settings({"FARM_S3_SECRET_KEY": "s3cret", "FARM_S3_SOURCES": "a,b", "FARM_DATA_DIR": "/data"})
    assert load_settings(settings.environment()) == settings


def test_secrets_do_not_show_in_text() -> None:
    settings: Settings = load_settings({"FARM_S3_SECRET_KEY": "s3cret", "FARM_API_TOKEN": "t0ken"})
    assert "s3cret" not in repr(settings)
    assert "t0ken" not in str(settings)

"""Settings: the only reader of the environment (`FARM_…`) and of the configuration file.

Who wins: the environment, then `./farm.toml` (or the file that `FARM_CONFIG` names), then
`~/.config/farm/farm.toml` (or below `$XDG_CONFIG_HOME`), then the defaults in `configs/farm.toml`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_config_path
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from farm.errors import UsageError

_LISTS = ("cross_targets", "s3_sources", "toolchains")
"""Settings that are lists; in the environment their items are separated by commas."""


def configs_folder() -> Path:
    """Return the folder of the shipped configuration: inside the package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


NAMESPACE = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""A namespace is a folder in object storage: no name may lead out of it."""


class Settings(BaseModel):
    """All settings, frozen; `configs/farm.toml` explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path
    namespace: str = Field(pattern=rf"^$|{NAMESPACE}")
    api_url: str
    api_token: SecretStr
    redis_url: SecretStr
    s3_endpoint: str
    s3_public_endpoint: str
    s3_region: str
    s3_bucket: str
    s3_access_key: SecretStr
    s3_secret_key: SecretStr
    s3_sources: tuple[str, ...]
    lease_seconds: float = Field(gt=0)
    renew_seconds: float = Field(gt=0)
    retry_delay: float = Field(ge=0)
    time_limit: float = Field(gt=0)
    memory_limit: int = Field(ge=0)
    hang_seconds: float = Field(gt=0)
    disk_limit: int = Field(ge=0)
    process_limit: int = Field(ge=0)
    toolchains: tuple[str, ...]
    pool_timeout: float = Field(gt=0)
    namespace_cells: int = Field(ge=0)
    keep_days: float = Field(gt=0)
    gc: bool
    cpu_slots: int = Field(ge=0)
    threads: int = Field(ge=0)
    grace_seconds: float = Field(ge=0)
    migraphx_python: str
    migraphx_path: str
    cross_targets: tuple[str, ...]
    torch_python: str
    tensorflow_python: str
    measure_seconds: float = Field(gt=0)
    cache_bytes: int = Field(gt=0)
    min_free_bytes: int = Field(ge=0)
    outbox_bytes: int = Field(gt=0)
    outbox_hours: float = Field(gt=0)
    probe_pause: float = Field(gt=0)
    health_port: int = Field(ge=0, le=65535)
    log_level: str = Field(pattern="^(debug|info|warning|error)$")
    log_format: str = Field(pattern="^(json|console)$")

    @property
    def slots(self) -> int:
        """How many attempts run at once on this node's CPU targets."""
        return self.cpu_slots or os.cpu_count() or 1

    @property
    def threads_per_slot(self) -> int:
        """How many threads the compiler of one attempt uses."""
        return self.threads or max(1, (os.cpu_count() or 1) // self.slots)

    @property
    def converters(self) -> dict[str, str]:
        """The interpreters that convert models, by the extra that installs what they need."""
        return {"torch": self.torch_python, "tensorflow": self.tensorflow_python}

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give another process of the farm these same settings."""
        return {f"FARM_{name.upper()}": _as_text(getattr(self, name)) for name in type(self).model_fields}


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings; `overrides` (from the command line) win over everything.

    Raises UsageError that names the variable or the file and field that is wrong.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for path in _files(environ):
        for name, value in _read(path).items():
            values[name], origin[name] = value, str(path)
    for name in list(Settings.model_fields):
        variable = f"FARM_{name.upper()}"
        if variable in environ:
            text = environ[variable]
            values[name] = [part for part in text.split(",") if part] if name in _LISTS else text
            origin[name] = variable
    values.update(overrides)
    try:
        return Settings(**values)
    except ValidationError as error:
        lines = [f"{origin.get(str(e['loc'][0]), '')}: {e['loc'][0]}: {e['msg']}" for e in error.errors()]
        raise UsageError("\n".join(lines), hint="configs/farm.toml lists every setting with its default") from None


def _files(environ: Mapping[str, str]) -> list[Path]:
    named = environ.get("FARM_CONFIG")
    local = Path(named) if named else Path("farm.toml")
    if named and not local.is_file():
        raise UsageError(f"FARM_CONFIG: no file {named}")
    home = user_config_path("farm") / "farm.toml"
    return [configs_folder() / "farm.toml", *(path for path in (home, local) if path.is_file())]


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None


def _as_text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)

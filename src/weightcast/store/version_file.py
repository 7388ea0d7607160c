"""version.yaml: which version is the newest. One schema, `step` and `version`; version.txt is the legacy form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weightcast import logs
from weightcast.errors import AnyPath, VersionFileInvalid, VersionNotSet
from weightcast.store.files import put_back, read_small, remove_file, replace_synced
from weightcast.wire.decoding import is_count

log = logs.get(__name__)

YAML_NAME = "version.yaml"
TXT_NAME = "version.txt"
LIMIT_NBYTES = 4096
_MAX_VERSION = 128
_MAX_BRACKETS = 16


@dataclass(frozen=True)
class VersionFile:
    """What a version file says. `version` is the id; a legacy file that has only a step gives the step as the id."""

    version: str
    step: int | None
    path: AnyPath

    def names(self, text: str) -> bool:
        """Whether this text means the same version."""
        return text in (self.version, str(self.step))


def read_version_file(directory: Path) -> VersionFile:
    """The newest version of a store or checkpoint directory.

    version.yaml counts; a version.txt alone is read with a warning; both with different contents are an error.
    """
    yaml_path, txt_path = directory / YAML_NAME, directory / TXT_NAME
    from_yaml, from_txt = _read_yaml(yaml_path), _read_txt(txt_path)
    if from_yaml and from_txt and not from_yaml.names(from_txt.version):
        raise VersionFileInvalid(
            f"{yaml_path} says {from_yaml.version} and {txt_path} says {from_txt.version}. Remove the one that is wrong."
        )
    if from_yaml:
        return from_yaml
    if from_txt:
        log.warning("deprecated file read", path=txt_path, why=f"convert it with: weightcast store migrate {directory}")
        return from_txt
    raise VersionNotSet(
        f"no version was asked for, and neither {yaml_path} nor {txt_path} exists. Pass a version, or publish one."
    )


def write_version_file(directory: Path, *, version: str, step: int) -> Path:
    """Name the newest version, in one step."""
    path = directory / YAML_NAME
    replace_synced(path, version_yaml(version=version, step=step))
    return path


def version_yaml(*, version: str, step: int) -> bytes:
    """What version.yaml says of a version."""
    return yaml.safe_dump({"step": step, "version": version}).encode()


def raw_version_file(directory: Path) -> bytes | None:
    """The bytes of version.yaml as they are, for `put_back_version_file`; None if there is none."""
    try:
        return read_small(directory / YAML_NAME, LIMIT_NBYTES)
    except FileNotFoundError:
        return None


def put_back_version_file(directory: Path, before: bytes | None) -> bool:
    """Undo a replacement of version.yaml that failed. False if the file still says what it should not."""
    return put_back(directory / YAML_NAME, before)


def migrate_version_file(directory: Path) -> VersionFile | None:
    """Turn a version.txt into a version.yaml and remove it. None if there is no version.txt to convert."""
    txt_path = directory / TXT_NAME
    if _read_txt(txt_path) is None:
        return None
    found = read_version_file(directory)
    write_version_file(directory, version=found.version, step=step_of(found.version) if found.step is None else found.step)
    remove_file(txt_path)
    return read_version_file(directory)


def step_of(version: str, default: int = 0) -> int:
    """The number at the end of a version id (`step_100` is step 100), or `default` if there is none of a usable size."""
    digits = version[len(version.rstrip("0123456789")) :]
    return int(digits) if is_count(digits) else default


def _read(path: Path) -> bytes | None:
    try:
        return read_small(path, LIMIT_NBYTES)
    except FileNotFoundError:
        return None


def _text(data: bytes, path: AnyPath) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise VersionFileInvalid(f"{path} is not text: {error}.") from error


def _read_txt(path: Path) -> VersionFile | None:
    data = _read(path)
    if data is None:
        return None
    version = _text(data, path).strip()
    if not version or len(version) > _MAX_VERSION:
        problem = f"has {len(version)} characters" if version else "is empty"
        raise VersionFileInvalid(f"{path} {problem}: write the version id into it, or remove it.")
    return VersionFile(version=version, step=_number(version), path=path)


def _read_yaml(path: Path) -> VersionFile | None:
    data = _read(path)
    return None if data is None else parse_version_yaml(data, path)


def parse_version_yaml(data: bytes, path: AnyPath) -> VersionFile:
    """Read what `version_yaml` writes, or what legacy trainers do. `path` is only for messages."""
    try:
        fields = _flat_mapping(_text(data, path))
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the parser gives chr() what a text escapes
        raise VersionFileInvalid(f"{path} is not a mapping with the keys step and version: {error}.") from error
    step, version = fields.get("step"), fields.get("version")
    if step is None and version is None:
        raise VersionFileInvalid(f"{path} has neither of the keys step and version.")
    return VersionFile(version=str(step if version is None else version), step=_number(step or ""), path=path)


def _number(text: str) -> int | None:
    return int(text) if is_count(text) else None


def _flat_mapping(text: str) -> dict[str, str | None]:
    """The keys and values of a YAML mapping of texts and numbers. Raises `ValueError` for anything else.

    Only the events of the parser are looked at. So nothing is nested, no alias multiplies anything, and no number is
    converted before its length is known. The parser takes seconds for some thousand brackets: those are refused before.
    """
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ValueError("it is nested")
    loader: Any = yaml.SafeLoader(text)
    try:
        events = []
        while loader.check_event():
            events.append(loader.get_event())
        _, start, mapping, *inner, _, stop, _ = events
        kinds = (yaml.DocumentStartEvent, yaml.MappingStartEvent, yaml.DocumentEndEvent)
        if not all(map(isinstance, (start, mapping, stop), kinds)) or not all(map(_is_plain, inner)) or len(inner) % 2:
            raise ValueError("it is nested, or not one mapping")
        keys = [event.value for event in inner[::2]]
        if len(set(keys)) < len(keys):
            raise ValueError("a key stands there twice")
        wanted = {key: event for key, event in zip(keys, inner[1::2], strict=True) if key in ("step", "version")}
        return {key: _value(key, event, loader) for key, event in wanted.items()}
    finally:
        loader.dispose()


def _is_plain(event: yaml.Event) -> bool:
    return isinstance(event, yaml.ScalarEvent) and event.anchor is None and event.tag is None


def _value(key: str, event: yaml.ScalarEvent, loader: Any) -> str | None:
    """A number as digits, a text, or None."""
    kind = loader.resolve(yaml.ScalarNode, event.value, event.implicit).rpartition(":")[2]
    if kind == "null":
        return None
    if kind not in ("int", "str") or (kind == "int" and _number(event.value) is None) or len(event.value) > _MAX_VERSION:
        raise ValueError(f"{key} must be a number or a text of up to {_MAX_VERSION} characters, not {event.value[:40]!r}")
    return str(event.value)

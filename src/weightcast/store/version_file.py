"""version.yaml: which version is the newest. One schema, `step` and `version`; version.txt is the legacy form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from weightcast import logs
from weightcast.errors import VersionFileInvalid, VersionNotSet
from weightcast.store.files import put_back, read_small, remove_file, replace_synced

log = logs.get(__name__)

YAML_NAME = "version.yaml"
TXT_NAME = "version.txt"
_LIMIT_NBYTES = 65_536


@dataclass(frozen=True)
class VersionFile:
    """What a version file says. `version` is the id; a legacy file that has only a step gives the step as the id."""

    version: str
    step: int | None
    path: Path

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
    replace_synced(path, yaml.safe_dump({"step": step, "version": version}).encode())
    return path


def raw_version_file(directory: Path) -> bytes | None:
    """The bytes of version.yaml as they are, for `put_back_version_file`; None if there is none."""
    try:
        return read_small(directory / YAML_NAME, _LIMIT_NBYTES)
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
    """The number at the end of a version id (`step_100` is step 100), or `default` if there is none."""
    digits = version[len(version.rstrip("0123456789")) :]
    return int(digits) if digits else default


def _read_text(path: Path) -> str | None:
    try:
        data = read_small(path, _LIMIT_NBYTES)
    except FileNotFoundError:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise VersionFileInvalid(f"{path} is not text: {error}.") from error


def _read_txt(path: Path) -> VersionFile | None:
    text = _read_text(path)
    if text is None:
        return None
    version = text.strip()
    if not version:
        raise VersionFileInvalid(f"{path} is empty: write the version id into it, or remove it.")
    return VersionFile(version=version, step=int(version) if version.isascii() and version.isdigit() else None, path=path)


def _read_yaml(path: Path) -> VersionFile | None:
    text = _read_text(path)
    if text is None:
        return None
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise VersionFileInvalid(f"{path} is not YAML: {error}.") from error
    if not isinstance(fields, dict):
        raise VersionFileInvalid(f"{path} must be a mapping with the keys step and version, not {type(fields).__name__}.")
    step, version = fields.get("step"), fields.get("version")
    if isinstance(step, bool) or not isinstance(step, int | str | None) or not isinstance(version, int | str | None):
        raise VersionFileInvalid(f"{path}: step must be a number and version a text, not {step!r} and {version!r}.")
    if step is None and version is None:
        raise VersionFileInvalid(f"{path} has neither of the keys step and version.")
    number = int(step) if step is not None and str(step).isascii() and str(step).isdigit() else None
    return VersionFile(version=str(step if version is None else version), step=number, path=path)

"""The private directory of one publisher: its sockets and its token. Whoever holds its lock is alive."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from weightcast import logs
from weightcast.clock import Deadline
from weightcast.errors import Conflict, InvalidInput, SourceFailed, StorageFailed

log = logs.get(__name__)

_SOCKET_PATH_NBYTES = 107
_CLAIM_S = 2.0  # for those who only look whether somebody holds the lock, or clear up
_RETRY_S = 0.02
_MAX_TOKEN_NBYTES = 4096
_OWNS_ROOT = "owns-root"  # in a place: the directory around it was made by a publisher, and goes with the last one


@dataclass(frozen=True)
class Place:
    """`<root>/rank-<n>`: where the publisher of one trainer rank is met.

    The publisher must be a process of this user, or of the user `uid`, if one is named.
    """

    path: Path
    uid: int | None = None

    @classmethod
    def of_rank(cls, root: Path, rank: int, uid: int | None = None) -> Place:
        """That of a trainer rank."""
        return cls(root.absolute() / f"rank-{rank}", uid)

    @property
    def control(self) -> str:
        """The address of the ZeroMQ socket."""
        return f"ipc://{self.path / 'control.sock'}"

    @property
    def lifeline(self) -> Path:
        """The socket that passes file descriptors, and that hangs up when a side dies."""
        return self.path / "lifeline.sock"

    @property
    def token_file(self) -> Path:
        """The secret that a receiver must know."""
        return self.path / "token"

    def read_token(self) -> str:
        """The token. Raises `SourceFailed` if there is no publisher, or if it is somebody else's."""
        return read_token(self.token_file)

    def stamp(self) -> tuple[int, int] | None:
        """Tells one publisher of this place from the next. None while there is none that can be spoken to."""
        try:
            found = self.token_file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def check_user(self, uid: int) -> None:
        """Raise `SourceFailed` for a user whose weights are not taken here."""
        if uid not in (os.geteuid(), self.uid):
            raise SourceFailed(
                f"{self.path} belongs to user {uid}: only weights of user {os.geteuid()} are taken. To trust user {uid}, "
                f"say so in the source: ipc://{self.path.parent}?uid={uid}."
            )

    def deserted(self) -> bool:
        """Whether the publisher died, or there is none."""
        with self._try_lock(fcntl.LOCK_SH) as free:
            return free

    def clear(self) -> bool:
        """Remove what a publisher that died left behind. False if one lives here, or has not quite died."""
        with self._try_lock(fcntl.LOCK_EX) as free:
            if free and self.path.exists():
                _remove(self.path)
                log.info("place cleared", path=self.path, why="left by a publisher that was killed")
            return free

    @contextmanager
    def _try_lock(self, kind: int) -> Iterator[bool]:
        try:
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            yield True
            return
        except OSError as error:
            raise SourceFailed(f"{self.path} cannot be looked into: {error.strerror}.") from error
        try:
            self.check_user(os.fstat(lock).st_uid)
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
                free = _same(self.path, lock)  # otherwise it was made anew meanwhile
            except BlockingIOError:
                free = False
            yield free
        finally:
            os.close(lock)


def read_token(path: Path) -> str:
    """The token in a file. Raises `SourceFailed` if it is not there or not ours to read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TOKEN_NBYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceFailed(
            f"the token of a publisher cannot be read from {path}: {error}. Start the trainer's Publisher first, and run "
            "trainer and engine as one user."
        ) from error


class Claim:
    """A place that belongs to this process until `leave`, or until it dies. It is made anew, mode 0700."""

    def __init__(self, place: Place, *, token: str | None) -> None:
        self.place = place
        self.token = secrets.token_hex(32) if token is None else token
        if not self.token.isascii() or not 16 <= len(self.token) < _MAX_TOKEN_NBYTES:
            raise InvalidInput("a token must have 16 to 4095 ASCII characters.")
        longest = os.fsencode(place.lifeline)
        if len(longest) > _SOCKET_PATH_NBYTES:
            raise InvalidInput(
                f"the path of a socket may have {_SOCKET_PATH_NBYTES} bytes, and {place.lifeline} has {len(longest)}: use a "
                "shorter directory, such as ipc:///dev/shm/run."
            )
        self.lock: int = -1
        try:
            root = place.path.parent
            ours = not root.exists() or any(root.glob(f"rank-*/{_OWNS_ROOT}"))
            self.lock = _locked(place)
            self._empty()
            if ours:
                (place.path / _OWNS_ROOT).touch(mode=0o600)
        except OSError as error:
            self.leave()
            raise StorageFailed("make the directory of a publisher at", place.path, error) from error

    def open(self) -> None:
        """Let receivers know the token, now that somebody listens. There is none in the directory before."""
        try:
            aside = self.place.path / "token.new"
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self.token)
            aside.rename(self.place.token_file)
        except OSError as error:
            raise StorageFailed("write", self.place.token_file, error) from error

    def leave(self) -> None:
        """Remove the directory with all that is in it. Safe twice."""
        if self.lock < 0:
            return
        _remove(self.place.path)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor and nothing else: a child of a fork does, so that only its parent keeps the place."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def _empty(self) -> None:
        """Remove what an earlier publisher left."""
        for entry in self.place.path.iterdir():
            entry.unlink()


def _locked(place: Place) -> int:
    """The descriptor of the directory, locked. Others hold the lock for moments only, unless they live here."""
    deadline = Deadline.after(_CLAIM_S)
    place.path.parent.parent.mkdir(parents=True, exist_ok=True)
    while True:
        place.path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            place.path.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(place.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # somebody clears up
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(place.path, lock):
                _check_private(place.path, os.fstat(lock))
                return lock
            os.close(lock)
        except BlockingIOError:
            os.close(lock)
            if deadline.remaining() == 0:
                raise Conflict(
                    f"another publisher lives at {place.path}. Close it, or give this one another directory or rank."
                ) from None
            sleep(_RETRY_S)
        except BaseException:
            os.close(lock)
            raise


def _same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """Remove a place, and the directory around it if publishers made that and this was the last one."""
    owns_root = (path / _OWNS_ROOT).exists()
    shutil.rmtree(path, onerror=lambda _, entry, error: log.warning("directory left", path=entry, error=error[1]))
    if owns_root:
        try:
            path.parent.rmdir()
        except OSError as error:  # others are still there
            log.debug("directory left", path=path.parent, error=error)


def _check_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InvalidInput(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o}, user {found.st_uid}): remove it, or choose "
            "another directory. Weights are nobody else's business."
        )

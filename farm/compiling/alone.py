"""Alone: on a host, one program is measured at a time, and no other child of the farm runs meanwhile.

Lock files do it, in a folder that all workers of the host use. Whoever wants to measure locks `TURN`. Each process
sees that, pauses its children, and then lets go of its share of `RUNNING`. Who has the turn measures once nobody has a
share any more. The kernel lets go of the locks of a process that ends, in any way, and the others continue. Nobody
takes the turn while `DUE` is locked, by processes that have paused for long.

What measures on a GPU is not paused and takes no turn, since GPUs do not disturb each other. It keeps its share.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from farm.jobs.state import PAUSED, WAITS_FOR_TURN
from farm.runner.protocol import CONTINUE, GO, PAUSE

TURN, RUNNING, DUE = "farm-turn.lock", "farm-running.lock", "farm-due.lock"

LOOK_SECONDS = 0.05  # Between two looks at the locks.
PATIENCE = 15.0
"""Seconds that who has the turn waits for the others to pause; then it measures, and says that it was not alone."""
STRETCH, REST = 10.0, 0.5
"""Children that were paused for so many seconds continue before the next measurement, for this share of the pause."""
SHORT = 1.0  # Seconds for which a child stands still before anybody hears of it.
LONGEST = 600.0
"""Seconds of the longest measurement, or queue, that children wait for: who has the turn may be stuck, or hostile."""


def open_lock(path: Path) -> int:
    """Return a descriptor of a lock file, which is made if it is missing; users share it. Raises OSError.

    A file of another user in a shared folder may be opened but not created. No link is followed, and a pipe does not
    make the caller wait.
    """
    plain = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(path, plain | (0 if os.path.lexists(path) else os.O_CREAT), 0o644)
    with suppress(PermissionError):
        os.fchmod(lock, 0o644)  # Whatever the umask is.
    return lock


def lock_folder(folder: str) -> Path:
    """Return the folder of the lock files: the one that the settings name, else the system's for temporary files."""
    return Path(folder or tempfile.gettempdir())


def lock_place(folder: str) -> str:
    """Return what tells apart workers that do not share their lock files: the running kernel, and the folder there."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    with suppress(OSError):
        found = lock_folder(folder).stat()
        return f"{kernel} {found.st_dev}:{found.st_ino}"
    return f"{kernel} none"


class Clock:
    """Seconds in which the children of an attempt, one after the other, were not paused."""

    def __init__(self, lost: float = 0.0) -> None:
        self.began = time.monotonic()
        self._lost: tuple[float, float | None] = lost, None
        """Seconds lost before, and since when it stands still; one value, because several threads use it."""

    @property
    def lost(self) -> float:
        """Seconds for which it has stood still: the attempt was paused."""
        before, since = self._lost
        return before if since is None else before + time.monotonic() - since

    @property
    def standstill(self) -> float:
        """Seconds since it has stood still; 0 if it runs."""
        since = self._lost[1]
        return 0.0 if since is None else time.monotonic() - since

    def __call__(self) -> float:
        """Return the seconds."""
        return time.monotonic() - self.began - self.lost

    def run(self, *, runs: bool) -> None:
        """Go on, or stand still."""
        stands = self._lost[1] is not None
        if runs == stands:
            self._lost = self.lost, None if runs else time.monotonic()


class HostChild:
    """A child among those of its process, which pause together. Thread-safe."""

    def __init__(self, host: Host, clock: Clock, *, gpu: bool) -> None:
        self.clock = clock
        clock.run(runs=False)  # Until it may start.
        self.shared = False
        """Whether it has measured while others ran, or may have."""
        self._host = host
        self._gpu = gpu
        self._say: Callable[[bytes], None] = lambda words: None
        self._asked: float | None = None
        """Since when it waits to measure; None if it does not."""
        self._measures = False
        self._told = False
        self._still = False

    @property
    def asks(self) -> bool:
        """Whether it waits for its turn to measure."""
        return self._asked is not None

    @property
    def runs(self) -> bool:
        """Whether it may disturb another's measurement."""
        return not self._still and self._host.measurer is not self

    def started(self, say: Callable[[bytes], None]) -> None:
        """Note that it has been started; `say` sends words to its guard."""
        with self._host.change:
            self._say = say
            if self._told:
                say(PAUSE)

    def stands_still(self) -> None:
        """Note that its guard has paused all its processes."""
        with self._host.change:
            self._still = self._told
            self._host.step()

    def wish(self, *, alone: bool) -> None:
        """Note that it waits to measure alone, or that it has measured."""
        with self._host.change:
            if alone:
                self._asked = time.monotonic()
                self.look()
            else:
                self._end()
            self._host.step()

    def look(self) -> str:
        """Let it measure if its turn has come. To be called every `LOOK_SECONDS` while it asks.

        Returns why it stands still, in words for a user; empty if it does not, or not for long.
        """
        if self._asked is not None:
            with self._host.change:
                alone = self._host.admits(self, self._asked, gpu=self._gpu)
                if alone is not None and self._asked is not None:  # A step within may have let it.
                    self.shared = self.shared or not alone
                    self._asked, self._measures = None, True
                    self.obey(paused=False)
                    self._say(GO)
        if self.clock.standstill < SHORT:
            return ""
        return WAITS_FOR_TURN if self.asks else PAUSED

    def leave(self) -> None:
        """Be paused no more: it is about to be ended. Repeatable."""
        with self._host.change:
            self._end()
            self._still = False
            self.clock.run(runs=True)
            self._host.leave(self)

    def obey(self, *, paused: bool) -> None:
        """Let it pause or continue, as its process does; who waits to measure stands still anyway."""
        told = (paused or (self.asks and not self._gpu)) and not self._measures
        if told != self._told:
            self._told, self._still = told, False
            self._say(PAUSE if told else CONTINUE)
        self.clock.run(runs=not self._still and not self.asks)

    def lose_turn(self) -> None:
        """Be paused as the others: it has measured for too long, and they continue."""
        self.shared = True
        self._end()

    def _end(self) -> None:
        self._asked, self._measures = None, False
        self._host.end_turn(self)


class Host:
    """The children of this process, and the locks that it shares with the others of its host."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is that of the lock files. Without one, whoever asks measures at once."""
        self.change = threading.Condition(threading.RLock())
        self.is_split = False
        """Whether workers of this host are known that use other lock files."""
        self._folder = folder
        self._children: set[HostChild] = set()
        self._is_watched = False
        self._locks: _Locks | None = None
        self.measurer: HostChild | None = None
        """Who has the turn, if it is one of this process."""
        self._turn_began = 0.0
        self._has_share = False
        self._paused: float | None = None
        """Since when its children pause; None if they do not."""
        self._rests_until = 0.0

    @contextmanager
    def child(self, clock: Clock, *, gpu: bool, cancelled: threading.Event | None = None) -> Iterator[HostChild]:
        """Wait until children may run, or `cancelled` is set; then hold a place for one until the block ends."""
        child = HostChild(self, clock, gpu=gpu)
        with self.change:
            self._open()
            self.step()
            while self._locks and not (cancelled and cancelled.is_set()):
                if self._paused is None and self._takes_share():
                    break
                self.change.wait(LOOK_SECONDS)
                self.step()
            if self._locks and not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="alone", daemon=True).start()
            self._children.add(child)
            child.obey(paused=self._paused is not None)
        try:
            yield child
        finally:
            child.leave()

    def leave(self, child: HostChild) -> None:
        """Count a child no more."""
        self._children.discard(child)
        if self._locks and not self._children:
            self._paused = None
            fcntl.flock(self._locks.due, fcntl.LOCK_UN)
        self.step()

    def admits(self, child: HostChild, asked: float, *, gpu: bool) -> bool | None:
        """Return whether a child that has asked may measure: alone (True), or with others (False); None: not yet."""
        now, locks = time.monotonic(), self._locks
        if locks is None:
            return self._folder is None
        if gpu:
            return True if self._paused is None and self._takes_share() else None
        if self.measurer is None and locks.none_is_due() and _takes(locks.turn, fcntl.LOCK_EX):
            self.measurer, self._turn_began = child, now
            self.step()
        if self.measurer is child:
            if _takes(locks.whole, fcntl.LOCK_EX):
                return not self.is_split
            return False if now - self._turn_began > PATIENCE else None
        return False if now - asked > LONGEST and self._takes_share() else None

    def end_turn(self, child: HostChild) -> None:
        """Let go of the locks if a child holds them; it keeps the process's share, since it runs on."""
        locks = self._locks
        if self.measurer is not child or locks is None:
            return
        # Nobody takes the whole before the turn is free.
        if _takes(locks.whole, fcntl.LOCK_SH):
            locks.share, locks.whole = locks.whole, locks.share
            self._has_share = True
            fcntl.flock(locks.whole, fcntl.LOCK_UN)
        fcntl.flock(locks.turn, fcntl.LOCK_UN)
        self.measurer = None

    def step(self) -> None:
        """Let the children pause or continue, as the locks say now. Whoever waits here hears at once of a change."""
        locks, now, before = self._locks, time.monotonic(), (self._paused, self._has_share)
        if locks is None:
            return
        if self.measurer and now - self._turn_began > LONGEST:
            self.measurer.lose_turn()
        wanted = self.measurer is not None or not _takes(locks.look, fcntl.LOCK_SH)
        fcntl.flock(locks.look, fcntl.LOCK_UN)
        if self._paused is None:
            if now >= self._rests_until:
                fcntl.flock(locks.due, fcntl.LOCK_UN)
                self._paused = now if wanted else None
        else:
            lasts = now - self._paused
            is_due = lasts > STRETCH and _takes(locks.due, fcntl.LOCK_SH)
            if ((is_due or not wanted) and self._takes_share()) or lasts > LONGEST:
                self._rests_until = now + lasts * REST if is_due else now
                self._paused = None
        for child in self._children:
            child.obey(paused=self._paused is not None)
        if self._has_share and not any(child.runs for child in self._children):
            fcntl.flock(locks.share, fcntl.LOCK_UN)
            self._has_share = False
        if (self._paused, self._has_share) != before:
            self.change.notify_all()
            for child in list(self._children):
                child.look()

    def _takes_share(self) -> bool:
        self._has_share = self._has_share or (self._locks is not None and _takes(self._locks.share, fcntl.LOCK_SH))
        return self._has_share

    def _watch(self) -> None:
        with self.change:
            while self._children:
                self.step()
                self.change.wait(LOOK_SECONDS)
            self._is_watched = False

    def _open(self) -> None:
        """Open the lock files; again if somebody has cleared the folder."""
        if self._folder is None or self._children or (self._locks and self._locks.are_in(self._folder)):
            return
        if self._locks:
            self._locks.close()
        self._locks, self._has_share = None, False
        with suppress(OSError):  # Not this user's to open: nobody here knows what others do.
            self._locks = _Locks(self._folder)


class _Locks:
    """Descriptors of the lock files; each has locks of its own."""

    def __init__(self, folder: Path) -> None:
        self.look, self.turn = open_lock(folder / TURN), open_lock(folder / TURN)
        self.share, self.whole = open_lock(folder / RUNNING), open_lock(folder / RUNNING)
        self.due, self.others_due = open_lock(folder / DUE), open_lock(folder / DUE)

    def are_in(self, folder: Path) -> bool:
        """Whether the files are still those that have the names."""
        opened = map(os.fstat, (self.turn, self.whole, self.due))
        with suppress(OSError):
            return all(map(os.path.samestat, opened, ((folder / name).stat() for name in (TURN, RUNNING, DUE))))
        return False

    def none_is_due(self) -> bool:
        """Whether no process has paused for so long that it comes before the next measurement."""
        found = _takes(self.others_due, fcntl.LOCK_EX)
        fcntl.flock(self.others_due, fcntl.LOCK_UN)
        return found

    def close(self) -> None:
        """Close them."""
        for descriptor in (self.look, self.turn, self.share, self.whole, self.due, self.others_due):
            os.close(descriptor)


def _takes(descriptor: int, how: int) -> bool:
    """Take a lock, or change the one that is held, if that is possible now."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@cache
def host_at(folder: str) -> Host:
    """Return this process's host, whose lock files lie in the folder that the settings name."""
    return Host(lock_folder(folder))

"""Who may measure, and who pauses: two processes of one host, each with its own descriptors of the lock files."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farm.compiling import alone
from farm.compiling.alone import Clock, Host, HostChild
from farm.runner.protocol import CONTINUE, GO, PAUSE
from tests.support.helpers import in_a_thread, wait_until


class Played:
    """A child that obeys at once, unless it is `stubborn`."""

    def __init__(self, host: Host, *, gpu: bool = False, stubborn: bool = False) -> None:
        self.heard: list[bytes] = []
        self._stubborn = stubborn
        self._place = host.child(Clock(), gpu=gpu)
        self.child: HostChild = self._place.__enter__()
        self.child.started(self._hear)

    def _hear(self, word: bytes) -> None:
        self.heard.append(word)
        if word == PAUSE and not self._stubborn:
            threading.Thread(target=self.child.stands_still).start()

    @property
    def runs(self) -> bool:
        return [PAUSE, *(word for word in self.heard if word != GO)][-1] == CONTINUE or PAUSE not in self.heard

    @property
    def measures(self) -> bool:
        self.child.look()
        return GO in self.heard


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Host, Host]:
    return Host(tmp_path), Host(tmp_path)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "LOOK_SECONDS", 0.005)


Start = Callable[..., Played]


@pytest.fixture
def start() -> Iterator[Start]:
    children = []

    def make(host: Host, **options: bool) -> Played:
        children.append(Played(host, **options))
        return children[-1]

    yield make
    for child in children:
        child.child.leave()


def test_one_measures_at_a_time_while_all_others_pause(hosts: tuple[Host, Host], start: Start) -> None:
    ours, theirs = hosts
    compiling = [start(ours), start(theirs)]
    first, second = start(ours), start(theirs)
    first.child.wish(alone=True)
    wait_until(lambda: first.measures)
    wait_until(lambda: not any(child.runs for child in compiling))
    second.child.wish(alone=True)
    wait_until(lambda: second.heard == [PAUSE], message="it stands still while it waits")
    assert not second.measures
    assert first.runs, "who measures is not paused by who waits"
    first.child.wish(alone=False)
    wait_until(lambda: second.measures)
    second.child.wish(alone=False)
    wait_until(lambda: all(child.runs for child in (*compiling, first, second)))
    assert not any(child.child.shared for child in (*compiling, first, second))


def test_children_of_one_process_hear_at_once_that_it_is_their_turn(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not wait until one of them looks again, which those of another process do."""
    monkeypatch.setattr(alone, "LOOK_SECONDS", 60.0)
    ours, _ = hosts
    first, second, stubborn = start(ours), start(ours), start(ours, stubborn=True)
    first.child.wish(alone=True)
    second.child.wish(alone=True)
    assert GO not in first.heard
    stubborn.child.stands_still()
    wait_until(lambda: GO in first.heard)
    late: list[Played] = []
    with in_a_thread(lambda _: late.append(start(ours))):
        assert GO not in second.heard
        first.child.wish(alone=False)
        stubborn.child.stands_still()
        wait_until(lambda: GO in second.heard)
        second.child.wish(alone=False)
        wait_until(lambda: late)


def test_a_child_that_measured_pauses_for_the_next(hosts: tuple[Host, Host], start: Start) -> None:
    ours, theirs = hosts
    first, second = start(ours), start(theirs)
    first.child.wish(alone=True)
    wait_until(lambda: first.measures)
    first.child.wish(alone=False)
    second.child.wish(alone=True)
    wait_until(lambda: second.measures)
    assert not first.runs


def test_a_child_that_is_paused_loses_no_time(hosts: tuple[Host, Host], start: Start) -> None:
    ours, theirs = hosts
    child, measuring = start(ours), start(theirs)
    measuring.child.wish(alone=True)
    wait_until(lambda: measuring.measures)
    stood = child.child.clock()
    lost = child.child.clock.lost
    wait_until(lambda: child.child.clock.lost > lost + 0.1)
    assert child.child.clock() == pytest.approx(stood, abs=1e-3)
    measuring.child.wish(alone=False)
    wait_until(lambda: child.child.clock() > stood + 0.05)


def test_a_child_waits_for_the_end_of_a_measurement_before_it_starts(
    hosts: tuple[Host, Host], start: Start, tmp_path: Path
) -> None:
    ours, theirs = hosts
    measuring = start(ours)
    measuring.child.wish(alone=True)
    wait_until(lambda: measuring.measures)
    late: list[Played] = []
    with in_a_thread(lambda _: late.append(start(theirs))):
        cancelled = threading.Event()
        cancelled.set()
        with theirs.child(Clock(), gpu=False, cancelled=cancelled):
            assert not late
        measuring.child.wish(alone=False)
        wait_until(lambda: late)
    assert late[0].child.clock.lost > 0


def test_who_measures_with_one_that_does_not_pause_says_so(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example because it holds a file lock."""
    monkeypatch.setattr(alone, "PATIENCE", 0.1)
    ours, theirs = hosts
    start(ours, stubborn=True)
    measuring = start(theirs)
    measuring.child.wish(alone=True)
    wait_until(lambda: measuring.measures)
    assert measuring.child.shared


def test_what_measures_on_a_gpu_waits_for_nobody_and_is_not_paused(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = hosts
    cards = [start(ours, gpu=True), start(theirs, gpu=True)]
    for card in cards:
        card.child.wish(alone=True)
    wait_until(lambda: all(card.measures for card in cards))
    on_cpu = start(ours)
    on_cpu.child.wish(alone=True)
    wait_until(lambda: PAUSE in on_cpu.heard)
    assert not on_cpu.measures
    monkeypatch.setattr(alone, "PATIENCE", 0.0)
    wait_until(lambda: on_cpu.measures)
    assert on_cpu.child.shared
    assert [card.heard for card in cards] == [[GO], [GO]]
    assert not any(card.child.shared for card in cards)


def test_who_compiles_gets_on_though_the_queue_of_measurements_never_ends(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "STRETCH", 0.05)
    monkeypatch.setattr(alone, "REST", 4.0)
    ours, theirs = hosts
    compiling = start(ours)

    @contextmanager
    def queue() -> Iterator[list[int]]:
        counts = [0, 0]

        def measure_on(place: int, over: threading.Event) -> None:
            child = start(theirs)
            while not over.is_set():
                child.child.wish(alone=True)
                while GO not in child.heard and not over.wait(0.001):
                    child.child.look()
                counts[place] += 1
                over.wait(0.01)
                child.heard.clear()
                child.child.wish(alone=False)

        with in_a_thread(lambda over: measure_on(0, over)), in_a_thread(lambda over: measure_on(1, over)):
            yield counts

    with queue() as counts:
        before = compiling.child.clock()
        wait_until(lambda: compiling.child.clock() > before + 0.5)
        wait_until(lambda: min(counts) > 3)


def test_children_that_ended_keep_nobody_from_measuring(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = hosts
    compiling, measuring = Played(ours), start(theirs)
    measuring.child.wish(alone=True)
    wait_until(lambda: measuring.measures)
    monkeypatch.setattr(alone, "STRETCH", 0.0)
    wait_until(lambda: not _is_free(ours), message="it comes before the next measurement")
    compiling.child.leave()
    measuring.child.wish(alone=False)
    measuring.heard.clear()
    measuring.child.wish(alone=True)
    wait_until(lambda: measuring.measures)


def _is_free(host: Host) -> bool:
    assert host._locks
    return host._locks.none_is_due()


def test_without_lock_files_nothing_is_known_to_be_alone(tmp_path: Path, start: Start) -> None:
    child = start(Host(tmp_path / "missing"))
    child.child.wish(alone=True)
    assert child.measures
    assert child.child.shared
    wanted = start(Host())
    wanted.child.wish(alone=True)
    assert wanted.measures
    assert not wanted.child.shared, "nobody else is there who could disturb it"


def test_who_knows_of_workers_with_other_lock_files_says_so(start: Start, tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.is_split = True
    child = start(host)
    child.child.wish(alone=True)
    wait_until(lambda: child.measures)
    assert child.child.shared
    here = alone.lock_place(str(tmp_path))
    assert here == alone.lock_place(str(tmp_path / "."))
    assert alone.lock_place("/").split()[0] == here.split()[0]
    assert len({here, alone.lock_place("/"), alone.lock_place(str(tmp_path / "missing"))}) == 3


def test_lock_files_that_were_cleared_away_are_made_again(
    hosts: tuple[Host, Host], start: Start, tmp_path: Path
) -> None:
    ours, theirs = hosts
    Played(ours).child.leave()
    for file in tmp_path.iterdir():
        file.unlink()
    compiling, measuring = start(theirs), start(ours)
    measuring.child.wish(alone=True)
    wait_until(lambda: measuring.measures)
    assert not compiling.runs


def test_who_measures_without_end_loses_its_turn(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile child does: else all others of the host would stand still."""
    ours, theirs = hosts
    compiling, hog, next_one = start(theirs), start(ours), start(theirs)
    hog.child.wish(alone=True)
    wait_until(lambda: hog.measures)
    wait_until(lambda: not compiling.runs)
    monkeypatch.setattr(alone, "LONGEST", 0.0)
    wait_until(lambda: compiling.heard[-1:] == [CONTINUE])
    wait_until(lambda: hog.child.shared)
    monkeypatch.setattr(alone, "LONGEST", 600.0)
    next_one.child.wish(alone=True)
    wait_until(lambda: next_one.measures)
    assert not hog.runs
    assert not next_one.child.shared


def test_who_was_paused_for_long_continues_for_long(
    hosts: tuple[Host, Host], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the measurement was, and though the next one waits."""
    monkeypatch.setattr(alone, "STRETCH", 0.02)
    ours, theirs = hosts
    compiling, hog = start(ours), start(theirs)
    hog.child.wish(alone=True)
    wait_until(lambda: hog.measures)
    wait_until(lambda: compiling.child.clock.standstill > 0.6)
    before = compiling.child.clock()
    hog.child.wish(alone=False)
    hog.heard.clear()
    hog.child.wish(alone=True)
    wait_until(lambda: hog.measures)
    assert compiling.child.clock() - before > 0.2

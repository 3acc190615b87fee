"""Work folders: in use as long as their process lives, whatever its id and host are, and cleared away after."""

import os
import socket
from pathlib import Path

from farm.files import remove_tree
from farm.node.disk import WorkFolder
from tests.support.helpers import folders_without_end
from tests.support.working import at_work_in


def attempts_in(work: Path) -> list[Path]:
    return list(work.glob("*/*/*"))


def test_the_folder_of_a_killed_process_goes_though_its_id_is_taken(tmp_path: Path) -> None:
    """Nobody has waited for it, so its id is still there; in a container the next worker has the same one."""
    killed = at_work_in(tmp_path)
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert len(attempts_in(tmp_path)) == 1
    assert WorkFolder(tmp_path).at_work() == {}
    assert [path for host in tmp_path.iterdir() for path in host.iterdir()] == []
    killed.wait()


def test_what_a_container_left_goes_though_its_host_name_never_comes_back(tmp_path: Path) -> None:
    killed = at_work_in(tmp_path)
    killed.kill()
    killed.wait()
    (tmp_path / socket.gethostname()).rename(tmp_path / "4f1c09d1e0ab")
    WorkFolder(tmp_path)
    assert attempts_in(tmp_path) == []


def test_a_folder_in_use_stays_and_counts(tmp_path: Path) -> None:
    other = at_work_in(tmp_path)
    try:
        work = WorkFolder(tmp_path)
        assert [count for count, _ in work.at_work().values()] == [1]
        with work.place("j-2-1-"):
            assert sorted(count for count, _ in work.at_work().values()) == [1, 1]
            assert len(attempts_in(tmp_path)) == 2
        assert sorted(count for count, _ in work.at_work().values()) == [0, 1]
        work.close()
        assert len(work.at_work()) == len(list(tmp_path.glob("*/*.lock"))) == len(list(tmp_path.glob("*/*/"))) == 1
    finally:
        other.kill()
        other.wait()
    assert work.at_work() == {}, "what a killed process left is not at work, though nobody has cleared it away yet"
    assert len(attempts_in(tmp_path)) == 1


def test_a_folder_that_someone_removed_is_made_again(tmp_path: Path) -> None:
    """Else the process would fail every attempt until its end, while probes, which have folders of their own, pass."""
    work = WorkFolder(tmp_path / "work")
    with work.place("j-1-1-"):
        remove_tree(tmp_path / "work")
    with work.place("j-2-1-") as folder:
        assert folder.is_dir()
        assert [count for count, _ in WorkFolder(tmp_path / "work").at_work().values()] == [1]
    work.close()
    assert [path for host in (tmp_path / "work").iterdir() for path in host.iterdir()] == []


def test_folders_without_end_of_a_killed_attempt_end_no_worker_at_its_start(tmp_path: Path) -> None:
    """A clean-up that calls itself for each level would die of them, at each start."""
    left = tmp_path / "host" / "7-0"
    (left / "j-1" / "program").mkdir(parents=True)
    left.with_suffix(".lock").touch()
    folders_without_end(left / "j-1" / "program")
    (left / "j-1" / "everything").symlink_to("/")
    os.mkfifo(left / "j-1" / "pipe")
    WorkFolder(tmp_path)
    assert list((tmp_path / "host").iterdir()) == []

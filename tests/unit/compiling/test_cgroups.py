"""Where control groups can be made: as machines and containers show it in their files."""

import os
from pathlib import Path

import pytest

from farm.compiling.cgroups import LEAF, Groups, find, hand_on, limited

V1 = "36 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "22 1 8:1 / / rw,relatime - ext4 /dev/vda rw\n"


def machine(root: Path, mounts: str, groups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(OTHER + mounts)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", ".").replace("_S_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def handed_over(root: Path, processes: str) -> Path:
    machine(
        root,
        V2,
        "0::/farm.service\n",
        farm__service_S_cgroup__controllers="cpu memory pids\n",
        farm__service_S_cgroup__subtree_control="",
        farm__service_S_cgroup__procs=processes,
    )
    return root / "sys/fs/cgroup/farm.service"


def test_version_2_that_was_handed_over_moves_the_worker_to_a_leaf(tmp_path: Path) -> None:
    group = handed_over(tmp_path, f"{os.getpid()}\n")
    assert "does not hand its memory controller on" in find(tmp_path).why
    hand_on(tmp_path)
    assert (group / LEAF / "cgroup.procs").read_text() == str(os.getpid())
    assert (group / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_a_group_that_others_share_is_left_alone(tmp_path: Path) -> None:
    """A root user's worker, started by hand, is in a group with half the machine."""
    group = handed_over(tmp_path, f"{os.getpid()}\n4242\n")
    hand_on(tmp_path)
    assert not (group / LEAF).exists()
    assert (group / "cgroup.subtree_control").read_text() == ""


def test_in_the_leaf_its_parent_is_the_place(tmp_path: Path) -> None:
    """A Celery process starts where its supervisor has moved to."""
    root = machine(
        tmp_path,
        V2,
        f"0::/farm.service/{LEAF}\n",
        **{
            f"farm__service_S_{LEAF}_S_cgroup__controllers": "memory\n",
            "farm__service_S_cgroup__subtree_control": "memory\n",
        },
    )
    assert find(root) == Groups(root / "sys/fs/cgroup/farm.service")


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    mounts = V2.replace("0:26 / /sys", "0:26 /docker/abc /sys")
    root = machine(
        tmp_path, mounts, "0::/docker/abc\n", cgroup__controllers="memory\n", cgroup__subtree_control="memory\n"
    )
    assert find(root) == Groups(root / "sys/fs/cgroup")


@pytest.mark.parametrize(
    ("mounts", "files", "why"),
    [
        ("", {}, "no cgroup v2 with a memory controller is mounted"),
        (V1, {"memory_S_cgroup__procs": ""}, "no cgroup v2 with a memory controller is mounted"),
        (V2, {"cgroup__controllers": "hugetlb\n"}, "no cgroup v2 with a memory controller is mounted"),
    ],
)
def test_where_there_is_none_it_says_why(tmp_path: Path, mounts: str, files: dict[str, str], why: str) -> None:
    found = find(machine(tmp_path, mounts, "4:memory:/\n0::/\n", **files))
    assert (found.memory, found.why, str(found)) == (False, why, f"by polling: {why}")
    assert (found.folder is None) == (mounts != V2), "any group of version 2 stops and kills"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_group_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    root = machine(tmp_path, V2, "0::/\n", cgroup__controllers="memory\n")
    (root / "sys/fs/cgroup").chmod(0o555)
    assert "is not this user's to write" in find(root).why


def test_a_child_gets_a_group_that_may_not_swap_nor_fork_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.compiling.cgroups.find", lambda: Groups(tmp_path, processes=True))
    monkeypatch.setattr("farm.compiling.cgroups.END_SECONDS", 0)  # No kernel takes the files away.
    with limited(64 << 20, 100) as group:
        folder = Path(group["folder"])
        assert folder.parent == tmp_path
        assert ((folder / "memory.max").read_text(), (folder / "memory.swap.max").read_text()) == (str(64 << 20), "0")
        assert (folder / "pids.max").read_text() == "100"
        assert group["memory"] and group["processes"]


def test_a_group_holds_its_limit_and_is_removed() -> None:
    groups = find()
    if not groups.memory:
        pytest.skip(f"no control group holds memory here, {groups}")
    with limited(64 << 20) as group:
        folder = Path(group["folder"])
        assert int((folder / "memory.max").read_text()) == 64 << 20
        assert "oom_kill 0" in (folder / "memory.events").read_text()
    assert not folder.exists()
    with limited(0) as group:
        folder = Path(group["folder"])
        assert "oom_kill 0" in (folder / "memory.events").read_text(), "without a limit, too"
    assert not folder.exists()

"""How much memory is free on a device, or on this machine within the limits set for this process."""

import gc
import os
from pathlib import Path

import torch


def free_bytes(device: torch.device | str) -> int:
    """What can still be allocated on a device, once everything that nobody uses any more is let go."""
    gc.collect()  # sequences and their graphs refer to each other
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes(Path("/"))


def free_host_bytes(root: Path) -> int:
    """Available memory of this machine, within the limits of the control groups this process is in.

    root: where proc and sys lie. Off Linux, all the memory there is.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *_group_rooms(root)])


def _group_rooms(root: Path) -> list[int]:
    """Room left in every control group that limits this process: its own and those above it, version 1 or 2."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rooms = []
    for membership in memberships:
        _, controllers, name = membership.split(":", 2)
        version = ("memory.max", "memory.current", "inactive_file")
        mount = root / "sys/fs/cgroup"
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:
            version = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = mount / "memory"
        group = mount / name.lstrip("/")
        for folder in (group, *group.parents):
            if folder == mount.parent:
                break
            rooms += _group_room(folder, *version)
    return rooms


def _group_room(folder: Path, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Limit less usage of one control group, pages of files that can be dropped not counted; [] without a limit."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # not in this group's namespace, or the root group, which has no limit
        return []
    return [] if most == "max" else [int(most) - used + int(stat.get(reclaimable, 0))]

"""Memory and cores are what this process can have, by folders as Docker, Kubernetes and Slurm make them."""

from pathlib import Path

import psutil
import pytest

from recipes.hardware import host_memory, usable_cores

GIB = 1 << 30


def cgroups(folder: Path, own: str, **files: str) -> tuple[Path, Path]:
    """Write cgroup files, path with `__` for `/` and `.` as it is -> text; return the mount and the list."""
    mount = folder / "cgroup"
    for name, text in files.items():
        path = mount / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    (folder / "own").write_text(own)
    return mount, folder / "own"


def test_a_limit_of_version_2_holds_and_the_file_cache_counts_as_free(tmp_path: Path) -> None:
    where = cgroups(
        tmp_path, "0::/\n", memory_DOT_max=str(GIB), memory_DOT_current=str(GIB // 2),
        memory_DOT_stat=f"anon 5\ninactive_file {GIB // 4}",
    )  # fmt: skip

    found = host_memory(*where)

    assert (found.total, found.free) == (GIB, 3 * GIB // 4)


def test_the_lowest_limit_from_the_own_group_up_to_the_root_holds(tmp_path: Path) -> None:
    where = cgroups(
        tmp_path, "0::/slurm/job/step\n", slurm__job__step__memory_DOT_max="max",
        slurm__job__memory_DOT_max=str(GIB), slurm__job__memory_DOT_current=str(2 * GIB),
        slurm__memory_DOT_max=str(3 * GIB), slurm__job__cpu_DOT_max="50000 100000", cpu_DOT_max="max 100000",
    )  # fmt: skip

    assert (host_memory(*where).total, host_memory(*where).free) == (GIB, 0)
    assert usable_cores(*where) == 1


def test_limits_of_version_1_hold_also_where_the_path_is_that_of_the_host(tmp_path: Path) -> None:
    where = cgroups(
        tmp_path, "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n",
        memory__memory_DOT_limit_in_bytes=str(GIB), memory__memory_DOT_usage_in_bytes=str(GIB // 2),
        memory__memory_DOT_stat="total_inactive_file 0",
        cpu__cpu_DOT_cfs_quota_us="100000", cpu__cpu_DOT_cfs_period_us="100000",
    )  # fmt: skip

    assert (host_memory(*where).total, host_memory(*where).free) == (GIB, GIB // 2)
    assert usable_cores(*where) == 1


@pytest.mark.parametrize("own", ["", "4:memory:/\n2:cpu:/\n0::/../..\n"], ids=["no cgroups", "no limits"])
def test_without_a_limit_all_that_the_machine_has_can_be_had(tmp_path: Path, own: str) -> None:
    unlimited = {
        "memory__memory_DOT_limit_in_bytes": "9223372036854771712",
        "cpu__cpu_DOT_cfs_quota_us": "-1",
    }
    where = cgroups(tmp_path, own, cpu__cpu_DOT_cfs_period_us="100000", **unlimited)

    found = host_memory(*where)

    assert found.total == psutil.virtual_memory().total
    assert 0 < found.free <= found.total
    assert usable_cores(*where) >= 1

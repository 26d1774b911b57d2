//! How much memory the system would give to this process.

use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};

/// Bytes of memory that this process could take: what the machine has available, and no more than
/// what the limits of its control groups (containers, services) leave. `None` where nothing tells.
pub fn available_memory() -> Option<u64> {
    available_under(Path::new("/"))
}

/// The same of the system whose `/proc` and `/sys` lie under `root`.
fn available_under(root: &Path) -> Option<u64> {
    let machine = read_to_string(root.join("proc/meminfo")).ok();
    let machine = machine.and_then(|info| {
        let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
        kilobytes.checked_mul(1024)
    });
    machine.into_iter().chain(left_in_groups(root)).min()
}

/// Names of a control group's files.
struct Files {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` with what was read from files and is given back when it is wanted:
    /// what was used once, and what was used again. `MemAvailable` counts both as well.
    reclaimable: [&'static str; 2],
}

const UNIFIED: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    reclaimable: ["inactive_file", "active_file"],
};
const LEGACY: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file"],
};

/// What each limit leaves of the groups that this process is in, and of those around them. A
/// container may see its own group as the root, or at the place that it has outside: what is not
/// there sets no limit.
fn left_in_groups(root: &Path) -> Vec<u64> {
    let groups = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut left = Vec::new();
    for line in groups.lines() {
        // NUMBER:CONTROLLERS:PATH
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, files) = match controllers {
            "" => ("sys/fs/cgroup", &UNIFIED),
            some if some.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", &LEGACY)
            }
            _ => continue,
        };
        let names = Path::new(path).components().filter_map(|part| match part {
            Component::Normal(name) => Some(name),
            _ => None,
        });
        let mut folder: PathBuf = root.join(mount);
        left.extend(left_in(&folder, files));
        for name in names {
            folder.push(name);
            left.extend(left_in(&folder, files));
        }
    }
    left
}

/// What a group's limit leaves; `None` if it has no limit.
fn left_in(folder: &Path, files: &Files) -> Option<u64> {
    let number = |name| read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" is no number.
    let limit = number(files.limit)?;
    let used = number(files.used)?;
    let stat = read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().filter_map(|line| {
        let (name, value) = line.split_once(' ')?;
        files.reclaimable.contains(&name).then(|| value.trim().parse::<u64>().ok())?
    });
    let reclaimable = reclaimable.fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A made-up system with 256 GB available, in the control group `group`.
    fn system(group: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let info = "MemTotal: 300000000 kB\nMemAvailable:   250000000 kB\n";
        write(root.path(), "proc/meminfo", info);
        write(root.path(), "proc/self/cgroup", group);
        root
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("has one")).expect("can be made");
        fs::write(path, text).expect("can be written");
    }

    fn unified(root: &Path, group: &str, limit: &str, used: u64, inactive: u64) {
        let folder = format!("sys/fs/cgroup/{group}");
        write(root, &format!("{folder}/memory.max"), &format!("{limit}\n"));
        write(root, &format!("{folder}/memory.current"), &format!("{used}\n"));
        let stat = format!("anon 5\ninactive_anon 7\ninactive_file {inactive}\nactive_file 9\n");
        write(root, &format!("{folder}/memory.stat"), &stat);
    }

    #[test]
    fn what_the_machine_has_counts_without_limits() {
        let root = system("0::/\n");
        assert_eq!(available_under(root.path()), Some(256_000_000_000));
        fs::remove_file(root.path().join("proc/self/cgroup")).expect("is there");
        assert_eq!(available_under(root.path()), Some(256_000_000_000));
        fs::remove_file(root.path().join("proc/meminfo")).expect("is there");
        assert_eq!(available_under(root.path()), None);
    }

    /// A container sees its group as the root.
    #[test]
    fn a_container_has_what_its_limit_leaves() {
        let root = system("0::/\n");
        unified(root.path(), "", "8000000000", 3_000_000_000, 1_000_000_000);
        assert_eq!(available_under(root.path()), Some(6_000_000_009));
        unified(root.path(), "", "max", 3_000_000_000, 1_000_000_000);
        assert_eq!(available_under(root.path()), Some(256_000_000_000));
        unified(root.path(), "", "8000000000", 9_000_000_000, 0);
        assert_eq!(available_under(root.path()), Some(0), "the limit was lowered");
        unified(root.path(), "", "8000000000", 1_000, 5_000);
        assert_eq!(available_under(root.path()), Some(8_000_000_000));
        fs::remove_file(root.path().join("proc/meminfo")).expect("is there");
        assert_eq!(available_under(root.path()), Some(8_000_000_000));
    }

    #[test]
    fn the_tightest_group_around_counts() {
        let root = system("0::/user.slice/run.scope\n");
        unified(root.path(), "user.slice/run.scope", "max", 10, 0);
        unified(root.path(), "user.slice", "5000", 2000, 500);
        unified(root.path(), "other.slice", "1", 0, 0);
        assert_eq!(available_under(root.path()), Some(3509));
        unified(root.path(), "user.slice/run.scope", "1000", 10, 0);
        assert_eq!(available_under(root.path()), Some(999));
    }

    #[test]
    fn groups_of_the_first_version_count() {
        let root = system("12:cpu,cpuacct:/box\n9:memory:/docker/box\n0::/docker/box\n");
        let group = |folder: &str, limit: &str| {
            let folder = format!("sys/fs/cgroup/memory{folder}");
            write(root.path(), &format!("{folder}/memory.limit_in_bytes"), limit);
            write(root.path(), &format!("{folder}/memory.usage_in_bytes"), "3000\n");
            let stat = "inactive_file 5\ntotal_inactive_file 700\ntotal_active_file 300\n";
            write(root.path(), &format!("{folder}/memory.stat"), stat);
        };
        group("", "9223372036854771712\n");
        assert_eq!(available_under(root.path()), Some(256_000_000_000));
        group("/docker/box", "8000\n");
        assert_eq!(available_under(root.path()), Some(6000));
        // The group is mounted as the root, though its path is told as from outside.
        fs::remove_dir_all(root.path().join("sys/fs/cgroup/memory")).expect("is there");
        group("", "7000\n");
        assert_eq!(available_under(root.path()), Some(5000));
    }

    #[test]
    fn odd_files_set_no_limit() {
        for group in ["", "junk", "0::", "0::/../../x\n", "1:memory\n", ":::\n"] {
            let root = system(group);
            unified(root.path(), "x", "lots", 1, 1);
            assert_eq!(available_under(root.path()), Some(256_000_000_000), "{group:?}");
        }
    }
}

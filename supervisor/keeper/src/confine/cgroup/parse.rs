//! Parses the kernel's control group files strictly. Each parser returns `None` if the text has an unexpected format.
//! `folder` and its callers read the files, and decide what follows from the values.

use std::path::{Component, Path, PathBuf};

/// Returns true if `cgroup.events` says that the group, or a group below it, contains a live process.
pub(super) fn is_populated(text: &str) -> Option<bool> {
    number(text, "populated").filter(|number| *number <= 1).map(|number| number == 1)
}

/// Returns the number of processes killed because memory ran out, from the text of `memory.events`. If the kernel
/// kills a whole group, each process in the group is counted.
pub(super) fn oom_kills(text: &str) -> Option<u64> {
    number(text, "oom_kill")
}

/// Returns the number that follows `key` in text with one key and one number per line. Returns `None` if the format is
/// wrong, or if the key does not occur exactly once.
fn number(text: &str, key: &str) -> Option<u64> {
    let mut found = None;
    for line in text.lines() {
        let (name, value) = line.split_once(' ')?;
        let value = parse_digits(value)?;
        if name == key && found.replace(value).is_some() {
            return None;
        }
    }
    found
}

/// Parses a number that consists only of digits. Rejects a sign, unlike the standard `parse` method.
fn parse_digits<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Parses the list of PIDs in `cgroup.procs`.
pub(super) fn processes(text: &str) -> Option<Vec<u32>> {
    text.lines().map(parse_digits).collect()
}

/// Parses the names of controllers in `cgroup.controllers` or `cgroup.subtree_control`.
pub(super) fn words(text: &str) -> Option<Vec<String>> {
    let is_name = |word: &str| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let words = text.strip_suffix('\n').unwrap_or(text).split(' ').filter(|word| !word.is_empty());
    words.map(|word| is_name(word).then(|| word.to_owned())).collect()
}

/// Returns the paths of this process's control group in all mounts of the hierarchy, from the text of
/// `/proc/self/mountinfo` and of `/proc/self/cgroup`. The result is empty if no mount contains the group.
pub(super) fn own_group_paths(mounts: &str, cgroups: &str) -> Vec<PathBuf> {
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    let own = own.map(Path::new).filter(|own| is_below(own));
    own.map_or(Vec::new(), |own| mounts.lines().filter_map(|line| group_path_in_mount(line, own)).collect())
}

/// Returns the path at which the control group `cgroup` is visible in the file system. `line` describes a cgroup mount.
fn group_path_in_mount(line: &str, cgroup: &Path) -> Option<PathBuf> {
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ').skip(3);
    let (root, place) = (unescape(fields.next()?)?, unescape(fields.next()?)?);
    if after.split(' ').next() != Some("cgroup2") || !is_below(Path::new(&root)) {
        return None;
    }
    let below = cgroup.strip_prefix(root).ok()?;
    // Joins component by component, because joining an empty path would append a slash.
    Some(Path::new(&place).components().chain(below.components()).collect())
}

/// Returns true if a path does not lead out of the root folder. The paths of groups outside this process's cgroup
/// namespace start with `/..`.
fn is_below(path: &Path) -> bool {
    path.is_absolute() && path.components().all(|part| part != Component::ParentDir)
}

/// Decodes the kernel's escape sequences for spaces, tabs, line ends and backslashes in `mountinfo`.
fn unescape(field: &str) -> Option<String> {
    let mut parts = field.split('\\');
    let mut text = parts.next()?.to_owned();
    for part in parts {
        let (digits, rest) = part.split_at_checked(3)?;
        text.push(char::from(u8::from_str_radix(digits, 8).ok().filter(u8::is_ascii)?));
        text.push_str(rest);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup_events_show_whether_group_is_populated() {
        assert_eq!(is_populated("populated 1\nfrozen 0\n"), Some(true));
        assert_eq!(is_populated("populated 0\nfrozen 1\n"), Some(false));
        assert_eq!(is_populated("populated 0\n"), Some(false));
        assert_eq!(is_populated("populated 0\nfrozen 0\nto_come 17\n"), Some(false));
        for invalid in ["", "frozen 0\n", "populated\n", "populated x\n", "populated 2\n", "populated +1\n"] {
            assert_eq!(is_populated(invalid), None, "{invalid:?}");
        }
        assert_eq!(is_populated("populated 1\npopulated 0\n"), None);
    }

    #[test]
    fn oom_kills_are_parsed_from_memory_events() {
        let old = "low 0\nhigh 0\nmax 41\noom 2\noom_kill 1\n";
        assert_eq!(oom_kills(old), Some(1));
        assert_eq!(oom_kills(&format!("{old}oom_group_kill 1\n")), Some(1));
        assert_eq!(oom_kills("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n"), Some(0));
        assert_eq!(oom_kills("oom 3\n"), None);
        assert_eq!(oom_kills("oom_kill -1\n"), None);
        assert_eq!(oom_kills("oom_kill 99999999999999999999\n"), None);
    }

    #[test]
    fn process_and_controller_lists_are_parsed() {
        assert_eq!(processes(""), Some(vec![]));
        assert_eq!(processes("12\n0\n7\n"), Some(vec![12, 0, 7]));
        assert_eq!(processes("12\nx\n"), None);
        assert_eq!(processes("12\n\n"), None);
        assert_eq!(words(""), Some(vec![]));
        assert_eq!(words("\n"), Some(vec![]));
        let all = "cpuset cpu io memory hugetlb pids rdma misc dmem\n";
        assert_eq!(words(all).unwrap().len(), 9);
        assert_eq!(words("memory pids\ncpu\n"), None);
        assert_eq!(words("-memory\n"), None);
    }

    #[test]
    fn own_cgroup_is_found_below_mount_points() {
        let mounts = "24 1 0:22 / /proc rw - proc proc rw\n\
            30 23 0:26 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
            31 23 0:27 /a /sys/fs/cgroup rw,nosuid shared:10 - cgroup2 cgroup2 rw\n";
        let find = |own: &str| own_group_paths(mounts, &format!("4:memory:/x\n0::{own}\n"));
        assert_eq!(find("/a/b"), [Path::new("/sys/fs/cgroup/b")]);
        assert_eq!(find("/a")[0].as_os_str(), "/sys/fs/cgroup");
        assert!(find("/c").is_empty());
        assert!(find("/ab").is_empty());
        assert!(own_group_paths(mounts, "4:memory:/x\n").is_empty(), "there is only cgroup version 1");
        assert!(own_group_paths("", "0::/a\n").is_empty());
    }

    #[test]
    fn all_mounts_of_own_cgroup_are_listed_in_order() {
        let mounts = "31 23 0:27 / /one rw - cgroup2 none rw\n32 23 0:27 /a /two rw - cgroup2 none rw\n";
        assert_eq!(own_group_paths(mounts, "0::/a/b\n"), [Path::new("/one/a/b"), Path::new("/two/b")]);
    }

    #[test]
    fn cgroups_outside_the_namespace_are_ignored() {
        let mount = |root: &str| format!("31 23 0:27 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        assert!(own_group_paths(&mount("/"), "0::/../other\n").is_empty());
        assert!(own_group_paths(&mount("/.."), "0::/\n").is_empty());
        assert_eq!(own_group_paths(&mount("/"), "0::/\n")[0].as_os_str(), "/sys/fs/cgroup");
    }

    #[test]
    fn escaped_mount_paths_are_unescaped() {
        let mounts = r"31 23 0:27 /a\134x2db.slice /sys/fs/my\040cgroup rw - cgroup2 cgroup2 rw";
        assert_eq!(own_group_paths(mounts, "0::/a\\x2db.slice/c\n"), [Path::new("/sys/fs/my cgroup/c")]);
        for invalid in [r"/a\", r"/a\13", r"/a\999", r"/a\x2d"] {
            assert_eq!(unescape(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn malformed_mount_lines_are_skipped() {
        let mounts = "x\n - \n1 2 3 - cgroup2\n1 2 3 /\n\n31 23 0:27 / /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(own_group_paths(mounts, "nonsense\n0::/\n"), [Path::new("/cg")]);
    }
}

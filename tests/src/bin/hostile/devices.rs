//! Attempts to use devices, and kernel interfaces in `/proc` and `/sys`.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::Attempt;
use crate::calls::{At, Refused, Tried, address, call, close};
use crate::files::{list, open_for_writing, read};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("open-physical-memory", |_| open("/dev/mem")),
    ("open-kernel-log", |_| open("/dev/kmsg")),
    ("open-kernel-core", |_| open("/proc/kcore")),
    ("open-a-disk", |_| open(first(&["/dev/vda", "/dev/sda", "/dev/nvme0n1", "/dev/xvda", "/dev/loop0"]))),
    ("write-to-random-pool", |_| open_for_writing("/dev/urandom")),
    ("type-into-a-terminal", |_| type_into_a_terminal()),
    ("list-devices-of-the-machine", |_| list("/sys/class")),
    ("write-to-sys", |_| {
        open_for_writing(first(&["/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/uevent_helper"]))
    }),
    ("write-core-pattern", |_| open_for_writing("/proc/sys/kernel/core_pattern")),
    ("write-magic-key", |_| open_for_writing("/proc/sysrq-trigger")),
    ("write-own-oom-score", |_| open_for_writing("/proc/self/oom_score_adj")),
    ("leave-the-cgroup", |_| {
        open_for_writing(first(&["/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/unified/cgroup.procs"]))
    }),
    ("read-boot-parameters", |_| read("/proc/cmdline")),
    ("list-devices-in-proc", |_| list("/proc/bus")),
    ("find-its-cgroup", |_| find_its_cgroup()),
    ("read-kernel-addresses", |_| read_kernel_addresses()),
];

/// Returns the path of this process's cgroup, read from lines of the form `NUMBER:CONTROLLERS:PATH`. Ignores the path
/// `/`, because the root cgroup reveals nothing.
fn find_its_cgroup() -> Tried {
    let what = "find its own control group";
    let text = fs::read_to_string("/proc/self/cgroup").at(what)?;
    let path = text.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find(|path| *path != "/");
    path.map(str::to_owned).ok_or_else(|| Refused::nothing(what))
}

/// Returns the first path that exists, or the first path in the list if none exists.
fn first<'p>(paths: &[&'p str]) -> &'p str {
    paths.iter().find(|path| Path::new(path).exists()).or(paths.first()).copied().unwrap_or_default()
}

/// Opens a file for reading without reading from it.
fn open(path: &str) -> Tried {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    opened.at(&format!("open {path}"))?;
    Ok(format!("opened {path}"))
}

/// Inserts a character into the input of a new terminal from which no other process reads.
fn type_into_a_terminal() -> Tried {
    let flags = libc::O_NOCTTY;
    let master = OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/ptmx");
    let master = master.at("open /dev/ptmx")?;
    let (descriptor, unlocked, typed) = (master.as_raw_fd() as usize, 0_i32, b'x');
    call(libc::SYS_ioctl, [descriptor, libc::TIOCSPTLCK as usize, address(&unlocked)])
        .at("unlock a terminal")?;
    let open = (libc::O_RDWR | libc::O_NOCTTY) as usize;
    let terminal =
        call(libc::SYS_ioctl, [descriptor, libc::TIOCGPTPEER as usize, open]).at("open a terminal")?;
    let result = call(libc::SYS_ioctl, [terminal, libc::TIOCSTI as usize, address(&typed)]);
    close(terminal);
    result.at("type into a terminal")?;
    Ok("typed".into())
}

/// Tries to read kernel addresses. For an unprivileged process, the kernel replaces the addresses with zeros.
fn read_kernel_addresses() -> Tried {
    const ENOUGH: u64 = 4096;
    let what = "read kernel addresses";
    let mut text = String::new();
    File::open("/proc/kallsyms").and_then(|file| file.take(ENOUGH).read_to_string(&mut text)).at(what)?;
    let is_address =
        |line: &str| line.split(' ').next().is_some_and(|a| a.bytes().any(|digit| digit != b'0'));
    match text.lines().filter(|line| is_address(line)).count() {
        0 => Err(Refused::nothing(what)),
        count => {
            Ok(format!("{count} addresses, of {}", fs::read_to_string("/proc/version").unwrap_or_default()))
        }
    }
}

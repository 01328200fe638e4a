//! Attempts to gain privileges by changing users, capabilities, priorities, limits or process attributes.

use std::process::Command;

use crate::calls::{At, Refused, Tried, address, address_mut, call, thread};
use crate::{Attempt, Targets};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("become-another-user", |_| become_another_user()),
    ("change-groups", |_| {
        thread(|| call(libc::SYS_setgroups, [0, 0])).at("give up groups")?;
        Ok("changed".into())
    }),
    ("regain-capabilities", |_| regain_capabilities()),
    ("run-set-user-id-program", run_set_user_id_program),
    ("become-dumpable", |_| option(libc::PR_SET_DUMPABLE, 1, "become dumpable")),
    ("let-anybody-trace", |_| option(libc::PR_SET_PTRACER, usize::MAX, "let anybody trace this process")),
    ("outlive-the-parent", |_| option(libc::PR_SET_PDEATHSIG, 0, "outlive the parent")),
    ("real-time-scheduling", |_| real_time_scheduling()),
    ("higher-priority", |_| higher_priority()),
    ("real-time-disk", |_| real_time_disk()),
    ("weaken-memory", |_| weaken_memory()),
    ("raise-a-limit", |_| raise_a_limit()),
    ("lower-and-raise-a-limit", |_| lower_and_raise_a_limit()),
];

/// Tries to change the user of a temporary thread.
fn become_another_user() -> Tried {
    const NOBODY: usize = 65534;
    let other = if nix::unistd::geteuid().is_root() { NOBODY } else { 0 };
    thread(|| call(libc::SYS_setresuid, [other; 3])).at(&format!("become user {other}"))?;
    Ok(format!("became user {other}"))
}

/// Tries to regain some useful capabilities on a temporary thread.
fn regain_capabilities() -> Tried {
    const VERSION_3: u32 = 0x2008_0522;
    const DAC_OVERRIDE: u32 = 1 << 1;
    const SETUID: u32 = 1 << 7;
    const SYS_ADMIN: u32 = 1 << 21;
    let wanted = DAC_OVERRIDE | SETUID | SYS_ADMIN;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable sets: lower halves, then upper halves.
    let sets = [wanted, wanted, 0, 0, 0, 0_u32];
    thread(|| call(libc::SYS_capset, [address(&header), address(&sets)])).at("regain capabilities")?;
    Ok("regained".into())
}

/// Runs a copy of this program that is owned by root and has the set-user-id bit.
fn run_set_user_id_program(to: &Targets) -> Tried {
    let what = "become root with a set-user-id program";
    let own = nix::unistd::geteuid().to_string();
    let output = Command::new(to.text("set_user_id")?).arg("whoami").output().at(what)?;
    let became = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if became == own || became.is_empty() {
        Err(Refused::nothing(what))
    } else {
        Ok(format!("became {became}"))
    }
}

fn option(option: i32, value: usize, what: &str) -> Tried {
    call(libc::SYS_prctl, [option as usize, value, 0, 0, 0]).at(what)?;
    Ok(format!("{what}: done"))
}

fn real_time_scheduling() -> Tried {
    let lowest = 1_i32;
    let policy = libc::SCHED_FIFO as usize;
    thread(|| call(libc::SYS_sched_setscheduler, [0, policy, address(&lowest)])).at("run in real time")?;
    Ok("runs in real time".into())
}

fn higher_priority() -> Tried {
    let nice = -5_isize;
    let which = libc::PRIO_PROCESS as usize;
    thread(|| call(libc::SYS_setpriority, [which, 0, nice as usize])).at("raise its own priority")?;
    Ok("raised".into())
}

fn real_time_disk() -> Tried {
    const WHO_PROCESS: usize = 1;
    const REAL_TIME: usize = 1 << 13;
    thread(|| call(libc::SYS_ioprio_set, [WHO_PROCESS, 0, REAL_TIME])).at("get real-time disk priority")?;
    Ok("has real-time disk priority".into())
}

/// Sets a personality under which all readable memory is executable.
fn weaken_memory() -> Tried {
    const READ_IMPLIES_EXEC: usize = 0x0040_0000;
    thread(|| call(libc::SYS_personality, [READ_IMPLIES_EXEC])).at("make all memory executable")?;
    Ok("weakened".into())
}

const OPEN_FILES: usize = libc::RLIMIT_NOFILE as usize;

fn limits() -> Result<[u64; 2], Refused> {
    let mut limits = [0_u64; 2];
    call(libc::SYS_prlimit64, [0, OPEN_FILES, 0, address_mut(&mut limits)]).at("read its own limits")?;
    Ok(limits)
}

fn set_limits(limits: [u64; 2], what: &str) -> Tried {
    call(libc::SYS_prlimit64, [0, OPEN_FILES, address(&limits), 0]).at(what)?;
    Ok(format!("{what}: done"))
}

fn raise_a_limit() -> Tried {
    let [soft, hard] = limits()?;
    set_limits([soft, hard + 1], "raise a hard limit")
}

fn lower_and_raise_a_limit() -> Tried {
    let [_, hard] = limits()?;
    set_limits([hard - 1; 2], "lower a hard limit")?;
    set_limits([hard; 2], "raise a hard limit that was lowered")
}

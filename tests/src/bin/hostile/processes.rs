//! Attempts against other processes: the supervisor, the keeper, a worker of another bulkhead, or all processes.

use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::unistd::getppid;

use crate::calls::{
    At, MINUS_ONE, Refused, Tried, address, address_mut, call, child, close, ended, reached, thread,
};
use crate::files::read;
use crate::{Attempt, Targets};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("list-processes", |_| list_processes()),
    ("read-arguments-of-supervisor", |to| read(&format!("/proc/{}/cmdline", to.pid("supervisor")?))),
    ("read-environment-of-supervisor", |to| read(&format!("/proc/{}/environ", to.pid("supervisor")?))),
    ("read-environment-of-sibling", |to| read(&format!("/proc/{}/environ", to.pid("sibling")?))),
    ("read-maps-of-keeper", |to| read(&format!("/proc/{}/maps", to.pid("keeper")?))),
    ("open-memory-of-supervisor", |to| open_memory(to.pid("supervisor")?)),
    ("open-memory-of-sibling", |to| open_memory(to.pid("sibling")?)),
    ("look-at-descriptors-of-supervisor", |to| look_at_descriptor(to.pid("supervisor")?)),
    ("look-at-descriptors-of-sibling", |to| look_at_descriptor(to.pid("sibling")?)),
    ("read-environment-of-host", |_| read(&format!("/proc/{}/environ", getppid().as_raw()))),
    ("open-memory-of-host", |_| open_memory(getppid().as_raw())),
    ("write-result-of-sibling", write_result_of_sibling),
    ("trace-sibling", trace_sibling),
    ("ask-to-be-traced", |_| ask_to_be_traced()),
    ("read-sibling-directly", |to| between_memories(libc::SYS_process_vm_readv, to.pid("sibling")?)),
    ("write-sibling-directly", |to| between_memories(libc::SYS_process_vm_writev, to.pid("sibling")?)),
    ("compare-with-sibling", compare_with_sibling),
    ("take-descriptor-of-sibling", take_descriptor_of_sibling),
    ("signal-supervisor", |to| signal_nothing(to.pid("supervisor")?)),
    ("signal-keeper", |to| signal_nothing(to.pid("keeper")?)),
    ("signal-sibling", |to| signal_nothing(to.pid("sibling")?)),
    ("signal-sibling-by-descriptor", signal_sibling_by_descriptor),
    ("kill-sibling-by-input", kill_sibling_by_input),
    ("signal-template", |to| signal_nothing(to.pid("template")?)),
    ("open-memory-of-template", |to| open_memory(to.pid("template")?)),
    ("limit-sibling", |to| limit(to.pid("sibling")?)),
    ("renice-sibling", |to| renice(to.pid("sibling")?)),
    ("pin-sibling", |to| pin(to.pid("sibling")?)),
    ("pin-template", |to| pin(to.pid("template")?)),
    ("limit-template", |to| limit(to.pid("template")?)),
    ("renice-template", |to| renice(to.pid("template")?)),
    ("serve-template-last", |to| serve_as_before(to.pid("template")?)),
    ("score-template", |to| write_as_it_is(to.pid("template")?, "oom_score_adj")),
    ("slacken-template", |to| write_as_it_is(to.pid("template")?, "timerslack_ns")),
    ("kill-parent", kill_parent),
    ("kill-everything", kill_everything),
    ("limit-supervisor", |to| limit(to.pid("supervisor")?)),
    ("renice-supervisor", |to| renice(to.pid("supervisor")?)),
    ("reschedule-supervisor", reschedule_supervisor),
    ("pin-supervisor", |to| pin(to.pid("supervisor")?)),
    ("become-child-of-keeper", |_| become_child_of_keeper()),
    ("leave-the-session", |_| leave_the_session()),
];

fn list_processes() -> Tried {
    let what = "find the supervisor among the processes";
    let numbers = fs::read_dir("/proc").at(what)?.filter_map(|entry| {
        entry
            .ok()?
            .file_name()
            .to_str()
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
            .map(str::to_owned)
    });
    let name = |number: &String| fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
    match numbers.filter(|number| name(number).starts_with("bulkhead-superv")).count() {
        0 => Err(Refused::nothing(what)),
        count => Ok(format!("{count} supervisors")),
    }
}

fn open_memory(pid: i32) -> Tried {
    let path = format!("/proc/{pid}/mem");
    fs::File::open(&path).at(&format!("open {path}"))?;
    Ok(format!("opened {path}"))
}

fn look_at_descriptor(pid: i32) -> Tried {
    let path = format!("/proc/{pid}/fd/0");
    let target = fs::read_link(&path).at(&format!("look at {path}"))?;
    Ok(format!("{path} is {}", target.display()))
}

/// Opens a sibling's standard output without writing to it.
fn write_result_of_sibling(to: &Targets) -> Tried {
    let path = format!("/proc/{}/fd/1", to.pid("sibling")?);
    fs::OpenOptions::new().write(true).open(path).at("write to a sibling's standard output")?;
    Ok("could be written to".into())
}

fn trace_sibling(to: &Targets) -> Tried {
    let pid = to.pid("sibling")? as usize;
    thread(|| call(libc::SYS_ptrace, [libc::PTRACE_SEIZE as usize, pid, 0, 0])).at("trace a sibling")?;
    Ok("traced".into())
}

/// Starts a child that asks to be traced by its parent.
fn ask_to_be_traced() -> Tried {
    let what = "be traced by the parent";
    let ask = || call(libc::SYS_ptrace, [libc::PTRACE_TRACEME as usize, 0, 0, 0]).map(drop);
    ended(child(0, ask).at(what)?, what)
}

/// Tries to copy a byte from or to an unmapped address of another process. An error about the address proves that the
/// permission check has been passed.
fn between_memories(number: libc::c_long, pid: i32) -> Tried {
    let mut byte = 0_u8;
    let here = [address_mut(&mut byte), 1];
    let there = [0_usize, 1];
    let result = call(number, [pid as usize, address(&here), 1, address(&there), 1, 0]);
    reached(result, &[Errno::EFAULT], "access a sibling's memory")
}

fn compare_with_sibling(to: &Targets) -> Tried {
    const KCMP_VM: usize = 1;
    let own = std::process::id() as usize;
    let result = call(libc::SYS_kcmp, [own, to.pid("sibling")? as usize, KCMP_VM, 0, 0]);
    result.at("compare the addresses of kernel objects with a sibling's")?;
    Ok("compared".into())
}

fn pidfd(pid: i32) -> Result<usize, Refused> {
    call(libc::SYS_pidfd_open, [pid as usize, 0]).at("open a pidfd of a sibling")
}

fn take_descriptor_of_sibling(to: &Targets) -> Tried {
    let pidfd = pidfd(to.pid("sibling")?)?;
    let taken = call(libc::SYS_pidfd_getfd, [pidfd, 0, 0]);
    close(pidfd);
    close(taken.at("copy a descriptor from a sibling")?);
    Ok("taken".into())
}

/// Sends signal 0, for which the kernel only checks the permission.
fn signal_nothing(pid: i32) -> Tried {
    call(libc::SYS_kill, [pid as usize, 0]).at("send a signal to another process")?;
    Ok("could be signalled".into())
}

fn signal_sibling_by_descriptor(to: &Targets) -> Tried {
    let pidfd = pidfd(to.pid("sibling")?)?;
    let sent = call(libc::SYS_pidfd_send_signal, [pidfd, 0, 0, 0]);
    close(pidfd);
    sent.at("signal a sibling through a pidfd")?;
    Ok("could be signalled".into())
}

/// Tries to make the kernel send SIGIO to a sibling when input arrives. This signal kills a process without a handler,
/// so only the sibling's fate shows whether the attempt succeeded.
fn kill_sibling_by_input(to: &Targets) -> Tried {
    let what = "make the kernel signal a sibling on input";
    let (reader, writer) = rustix::pipe::pipe().at(what)?;
    let descriptor = reader.as_raw_fd() as usize;
    let (own, flags) = (libc::F_SETOWN as usize, libc::F_SETFL as usize);
    call(libc::SYS_fcntl, [descriptor, own, to.pid("sibling")? as usize]).at(what)?;
    call(libc::SYS_fcntl, [descriptor, flags, libc::O_ASYNC as usize]).at(what)?;
    rustix::io::write(&writer, b"x").at(what)?;
    Ok("told".into())
}

fn all_processes() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Returns true if this process appears to be in a small PID namespace.
fn is_in_own_pid_namespace() -> bool {
    const FEW: usize = 10;
    getppid().as_raw() == 1 && (1..FEW).contains(&all_processes().len()) && std::process::id() < 100
}

/// Kills the parent if it is the first process of a PID namespace, because such a process survives all signals from its
/// children. If it is not, only checks that sending a signal would be permitted.
fn kill_parent(_: &Targets) -> Tried {
    let what = "kill the parent process";
    let signal = if is_in_own_pid_namespace() { libc::SIGKILL } else { 0 };
    call(libc::SYS_kill, [getppid().as_raw() as usize, signal as usize]).at(what)?;
    if signal == 0 { Ok("could be killed".into()) } else { Err(Refused::nothing(what)) }
}

/// Tries to kill all processes. To protect the machine, sends the signal only if no visible process can be signalled.
fn kill_everything(_: &Targets) -> Tried {
    let what = "kill every process";
    let own = std::process::id() as i32;
    let is_other = |pid: &i32| *pid != own;
    let can_signal = |pid: &i32| call(libc::SYS_kill, [*pid as usize, 0]).is_ok();
    let others = if is_in_own_pid_namespace() { Vec::new() } else { all_processes() };
    match others.into_iter().filter(is_other).filter(can_signal).count() {
        0 => {}
        count => return Ok(format!("{count} other processes could be killed")),
    }
    if !fs::read_to_string("/proc/self/status").unwrap_or_default().contains("\nSeccomp:\t2") {
        return Ok("not tried: this process does not look confined".into());
    }
    call(libc::SYS_kill, [MINUS_ONE, libc::SIGKILL as usize]).at(what)?;
    Err(Refused::nothing(what))
}

/// Sets another process's CPU time limit to its current value, because a lower limit could kill the supervisor.
fn limit(pid: i32) -> Tried {
    let pid = pid as usize;
    let resource = libc::RLIMIT_CPU as usize;
    let mut limit = [0_u64; 2];
    let what = "limit another process's CPU time";
    call(libc::SYS_prlimit64, [pid, resource, 0, address_mut(&mut limit)]).at(what)?;
    call(libc::SYS_prlimit64, [pid, resource, address(&limit), 0]).at(what)?;
    Ok("limited".into())
}

/// Tries to set a process's priority to its current value.
fn renice(pid: i32) -> Tried {
    let pid = pid as usize;
    let what = "change another process's priority";
    // The raw system call returns 20 minus the nice value.
    let nice = call(libc::SYS_getpriority, [libc::PRIO_PROCESS as usize, pid]).at(what)?;
    let nice = 20_isize.wrapping_sub_unsigned(nice);
    call(libc::SYS_setpriority, [libc::PRIO_PROCESS as usize, pid, nice as usize]).at(what)?;
    Ok("changed".into())
}

/// Tries to set a process's I/O priority to its current value.
fn serve_as_before(pid: i32) -> Tried {
    const OF_A_PROCESS: usize = 1;
    let what = "change another process's disk priority";
    let priority = call(libc::SYS_ioprio_get, [OF_A_PROCESS, pid as usize]).at(what)?;
    call(libc::SYS_ioprio_set, [OF_A_PROCESS, pid as usize, priority]).at(what)?;
    Ok("changed".into())
}

/// Writes the current contents of a file in `/proc` back to that file.
fn write_as_it_is(pid: i32, file: &str) -> Tried {
    let what = "write to another process's file in /proc";
    let path = format!("/proc/{pid}/{file}");
    let opened = fs::OpenOptions::new().write(true).open(&path).at(what)?;
    let text = fs::read(&path).at(what)?;
    (&opened).write_all(&text).at(what)?;
    Ok("written".into())
}

/// Sets the supervisor's scheduling policy to its current value, which needs the same permission as a change.
fn reschedule_supervisor(to: &Targets) -> Tried {
    let pid = to.pid("supervisor")? as usize;
    let what = "change the supervisor's scheduling";
    let policy = call(libc::SYS_sched_getscheduler, [pid]).at(what)?;
    call(libc::SYS_sched_setscheduler, [pid, policy, address(&0_i32)]).at(what)?;
    Ok("changed".into())
}

/// Attempts to set the CPU affinity mask of a process, to the current mask.
fn pin(pid: i32) -> Tried {
    const MASK_BYTES: usize = 128;
    let pid = pid as usize;
    let what = "change another process's CPU affinity";
    let mut mask = [0_u8; MASK_BYTES];
    call(libc::SYS_sched_getaffinity, [pid, MASK_BYTES, address_mut(&mut mask)]).at(what)?;
    call(libc::SYS_sched_setaffinity, [pid, MASK_BYTES, address(&mask)]).at(what)?;
    Ok("changed".into())
}

/// Creates a process as a child of this process's parent. The parent would have to reap the new process.
fn become_child_of_keeper() -> Tried {
    let flags = (libc::CLONE_PARENT | libc::SIGCHLD) as usize;
    let pid = call(libc::SYS_clone, [flags, 0, 0, 0, 0]).at("create a child of its own parent")?;
    if pid == 0 {
        let _ = call(libc::SYS_exit_group, [0]);
    }
    Ok("made".into())
}

fn leave_the_session() -> Tried {
    let what = "leave the session";
    ended(child(0, || call(libc::SYS_setsid, []).map(drop)).at(what)?, what)
}

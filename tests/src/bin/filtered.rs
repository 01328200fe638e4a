//! Runs a program under a seccomp filter that makes system calls fail, or succeed without effect. Simulates a kernel
//! that lacks these calls, or the sandbox of a container or of another supervisor.
//!
//! Usage: `filtered CALL=ERRNO… -- PROGRAM ARGUMENT…`. Error 0 means success without effect. If the only rule is
//! `@FILE`, the filter is the container engine's seccomp profile in that file, without the conditions on arguments.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use bulkhead_supervisor::keeper::syscall_name;
use libc::{c_long, sock_filter};
use serde_json::Value;

/// Upper bound on system call numbers.
const NUMBER_MAX: u32 = 1024;

/// Supported system calls.
const CALLS: [(&str, c_long); 4] = [
    ("landlock_create_ruleset", libc::SYS_landlock_create_ruleset),
    ("landlock_restrict_self", libc::SYS_landlock_restrict_self),
    ("mount_setattr", libc::SYS_mount_setattr),
    ("seccomp", libc::SYS_seccomp),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut parts = arguments.splitn(2, |argument| argument == "--");
    let (rules, program) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let Some((program, arguments)) = program.split_first() else { return ExitCode::from(2) };
    let filter = match rules {
        [rule] if rule.starts_with('@') => profile(&rule[1..]),
        rules => {
            let Some(rules) = rules.iter().map(|rule| parse(rule)).collect::<Option<Vec<_>>>() else {
                eprintln!("filtered: CALL=ERRNO, where CALL is one of {CALLS:?}");
                return ExitCode::from(2);
            };
            filter(&rules, libc::SECCOMP_RET_ALLOW)
        }
    };
    if let Err(error) = install(&filter) {
        eprintln!("filtered: failed to install the filter: {error}");
        return ExitCode::FAILURE;
    }
    let error = Command::new(program).args(arguments).exec();
    eprintln!("filtered: failed to run {program}: {error}");
    ExitCode::FAILURE
}

fn parse(rule: &str) -> Option<(c_long, u32)> {
    let (name, errno) = rule.split_once('=')?;
    let (_, number) = CALLS.iter().find(|(known, _)| *known == name)?;
    Some((*number, libc::SECCOMP_RET_ERRNO | u32::from(errno.parse::<u16>().ok()?)))
}

/// Returns the filter described by the seccomp profile of a container engine. Panics if the file is not such a profile.
fn profile(file: &str) -> Vec<sock_filter> {
    let text = std::fs::read_to_string(file).expect("the profile can be read");
    let profile: Value = serde_json::from_str(&text).expect("the profile is JSON");
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let default =
        libc::SECCOMP_RET_ERRNO | profile["defaultErrnoRet"].as_u64().expect("an error number") as u32;
    let mut rules = Vec::new();
    for group in profile["syscalls"].as_array().expect("groups of system calls") {
        assert_eq!(group["action"], "SCMP_ACT_ALLOW");
        for name in group["names"].as_array().expect("names").iter().filter_map(Value::as_str) {
            // Skips calls that exist only on other architectures.
            let number = (0..NUMBER_MAX).find(|number| syscall_name(*number) == name);
            rules.extend(number.map(|number| (number.into(), libc::SECCOMP_RET_ALLOW)));
        }
    }
    filter(&rules, default)
}

/// Returns a BPF filter. Each entry of `rules` assigns an action to a system call. The action for all other system
/// calls is `default`.
fn filter(rules: &[(c_long, u32)], default: u32) -> Vec<sock_filter> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let instruction = |code, jf, k| sock_filter { code, jt: 0, jf, k };
    let mut program = vec![instruction(LOAD, 0, std::mem::offset_of!(libc::seccomp_data, nr) as u32)];
    for (number, action) in rules {
        program.push(instruction(JUMP_IF_IS, 1, *number as u32));
        program.push(instruction(RETURN, 0, *action));
    }
    program.push(instruction(RETURN, 0, default));
    program
}

fn install(program: &[sock_filter]) -> std::io::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        rustix::thread::set_no_new_privs(true)?;
    }
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    #[expect(unsafe_code, reason = "no library installs such a filter")]
    // SAFETY: the pointer is to a local variable, which holds a pointer to an array of the given length.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

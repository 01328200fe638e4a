//! Attempts to make system calls that have been used in kernel exploits, that administer the machine, or that
//! start programs.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use nix::errno::Errno;

use crate::Attempt;
use crate::calls::{
    At, MINUS_ONE, Refused, Tried, address, address_mut, call, child, close, ended, reached, thread,
};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("io-uring", |_| io_uring()),
    ("load-bpf", |_| load_bpf()),
    ("load-bpf-in-a-thread", |_| thread(load_bpf)),
    ("load-bpf-in-a-child", |_| load_bpf_in_a_child()),
    ("handle-page-faults", |_| {
        close(call(libc::SYS_userfaultfd, [libc::O_CLOEXEC as usize]).at("handle page faults")?);
        Ok("made".into())
    }),
    ("handle-page-faults-by-device", |_| {
        fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").at("open /dev/userfaultfd")?;
        Ok("opened".into())
    }),
    ("keyring", |_| {
        const GET_KEYRING_ID: usize = 0;
        const OF_THE_SESSION: isize = -3;
        call(libc::SYS_keyctl, [GET_KEYRING_ID, OF_THE_SESSION as usize, 0]).at("find the session's keys")?;
        Ok("found".into())
    }),
    ("add-a-key", |_| add_a_key()),
    ("performance-events", |_| {
        let result = call(libc::SYS_perf_event_open, [0, 0, MINUS_ONE, MINUS_ONE, 0]);
        reached(result, &[Errno::EFAULT], "monitor performance events")
    }),
    ("load-another-kernel", |_| {
        let result = call(libc::SYS_kexec_load, [0, 0, 0, 0xffff_ffff]);
        reached(result, &[Errno::EINVAL], "load another kernel")
    }),
    ("load-a-module", |_| {
        reached(call(libc::SYS_init_module, [0, 0, 0]), &[Errno::EFAULT, Errno::ENOEXEC], "load a module")
    }),
    ("load-a-module-by-descriptor", |_| {
        reached(
            call(libc::SYS_finit_module, [MINUS_ONE, 0, 0]),
            &[Errno::EBADF],
            "load a module by descriptor",
        )
    }),
    ("remove-a-module", |_| {
        let name = c"bulkhead_no_such_module".as_ptr() as usize;
        let result = call(libc::SYS_delete_module, [name, libc::O_NONBLOCK as usize]);
        reached(result, &[Errno::ENOENT], "remove a module")
    }),
    #[cfg(target_arch = "x86_64")]
    ("x32-call", |_| x32_call()),
    #[cfg(target_arch = "x86_64")]
    ("32-bit-call", |_| legacy_call()),
    // The second magic number is wrong, so that the machine does not reboot.
    ("reboot", |_| {
        reached(call(libc::SYS_reboot, [0xfee1_dead, 0, 0, 0]), &[Errno::EINVAL], "reboot the machine")
    }),
    // Passes no time, so that the clock does not change.
    ("set-the-time", |_| {
        call(libc::SYS_settimeofday, [0, 0]).at("set the time")?;
        Ok("permitted".into())
    }),
    ("set-the-host-name", |_| set_the_host_name()),
    ("read-kernel-log", |_| {
        const SIZE_OF_BUFFER: usize = 10;
        call(libc::SYS_syslog, [SIZE_OF_BUFFER, 0, 0]).at("read the kernel's log")?;
        Ok("permitted".into())
    }),
    ("disk-quotas", |_| {
        const SYNC: usize = 0x80_0001 << 8;
        call(libc::SYS_quotactl, [SYNC, 0, 0, 0]).at("manage quotas")?;
        Ok("permitted".into())
    }),
    ("swap", |_| {
        let path = c"/bulkhead/no/such/file".as_ptr() as usize;
        reached(call(libc::SYS_swapon, [path, 0]), &[Errno::ENOENT], "add swap")
    }),
    ("accounting", |_| {
        let path = c"/bulkhead/no/such/file".as_ptr() as usize;
        reached(call(libc::SYS_acct, [path]), &[Errno::ENOENT], "enable process accounting")
    }),
    #[cfg(target_arch = "x86_64")]
    ("ports-of-devices", |_| {
        const LEVEL: usize = 0;
        call(libc::SYS_iopl, [LEVEL]).at("access I/O ports")?;
        Ok("permitted".into())
    }),
    #[cfg(target_arch = "x86_64")]
    ("segment-descriptors", |_| {
        const READ: usize = 0;
        let mut table = [0_u8; 16];
        call(libc::SYS_modify_ldt, [READ, address_mut(&mut table), table.len()]).at("read segments")?;
        Ok("read".into())
    }),
    ("watch-all-files", |_| {
        close(call(libc::SYS_fanotify_init, [0, libc::O_RDONLY as usize]).at("watch all files")?);
        Ok("made".into())
    }),
    ("shared-memory-by-number", |_| shared_memory_by_number()),
    ("message-queue", |_| message_queue()),
    ("run-a-program", |_| {
        let status = Command::new("/bin/true").status().at("run a program")?;
        if status.success() { Ok("ran".into()) } else { Err(Refused::because("OTHER", status.to_string())) }
    }),
    ("run-from-temporary-folder", |_| run_from_temporary_folder()),
    ("run-from-memory", |_| run_from_memory()),
];

fn io_uring() -> Tried {
    const PARAMETER_BYTES: usize = 120;
    let mut parameters = [0_u8; PARAMETER_BYTES];
    close(call(libc::SYS_io_uring_setup, [1, address_mut(&mut parameters)]).at("create an io_uring")?);
    Ok("made".into())
}

/// Calls `bpf` with an unknown command.
fn load_bpf() -> Tried {
    reached(call(libc::SYS_bpf, [0xffff, 0, 0]), &[Errno::EINVAL, Errno::EFAULT], "load a BPF program")
}

/// Calls `bpf` in a child process. An error counts as success if it shows that the call passed the filter.
fn load_bpf_in_a_child() -> Tried {
    let what = "load a BPF program in a child";
    let load = || match call(libc::SYS_bpf, [0xffff, 0, 0]) {
        Err(Errno::EINVAL | Errno::EFAULT) => Ok(()),
        other => other.map(drop),
    };
    ended(child(0, load).at(what)?, what)
}

/// Adds a key to the keyring of a temporary thread.
fn add_a_key() -> Tried {
    const OF_THE_THREAD: isize = -1;
    let (kind, name) = (c"user".as_ptr() as usize, c"bulkhead".as_ptr() as usize);
    let payload = b'x';
    thread(|| call(libc::SYS_add_key, [kind, name, address(&payload), 1, OF_THE_THREAD as usize]))
        .at("store a key in the kernel keyring")?;
    Ok("kept".into())
}

/// Makes an x32 system call. Few kernels still support such calls, but a filter has to reject them anyway.
#[cfg(target_arch = "x86_64")]
fn x32_call() -> Tried {
    const X32: libc::c_long = 0x4000_0000;
    reached(call(X32 | libc::SYS_getpid, []), &[Errno::ENOSYS], "make an x32 system call")
}

/// Makes a `getpid` call through the 32-bit system call interface.
#[cfg(target_arch = "x86_64")]
fn legacy_call() -> Tried {
    const GETPID: u32 = 20;
    let result: u32;
    #[expect(unsafe_code, reason = "no library makes calls for another architecture")]
    // SAFETY: the call takes no arguments and touches no memory; the kernel may overwrite these registers.
    unsafe {
        std::arch::asm!(
            "int 0x80",
            inlateout("eax") GETPID => result,
            lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _,
        );
    }
    if result == std::process::id() {
        Ok("made".into())
    } else {
        Err(Refused::nothing("make a 32-bit system call"))
    }
}

/// Sets the host name to its current value.
fn set_the_host_name() -> Tried {
    let name = nix::sys::utsname::uname().at("read the host's name")?.nodename().to_owned();
    let text = CString::new(name.as_encoded_bytes()).map_err(|_| Refused::nothing("a name"))?;
    call(libc::SYS_sethostname, [text.as_ptr() as usize, name.len()]).at("set the host's name")?;
    Ok("set".into())
}

fn shared_memory_by_number() -> Tried {
    const PRIVATE: usize = 0;
    const BYTES: usize = 4096;
    let made = call(libc::SYS_shmget, [PRIVATE, BYTES, 0o600]).at("create System V shared memory")?;
    call(libc::SYS_shmctl, [made, libc::IPC_RMID as usize, 0]).at("remove it")?;
    Ok("made and removed".into())
}

fn message_queue() -> Tried {
    let name = CString::new(format!("bulkhead-hostile-{}", std::process::id()))
        .map_err(|_| Refused::nothing("a name"))?;
    let flags = (libc::O_CREAT | libc::O_RDWR | libc::O_CLOEXEC) as usize;
    let made =
        call(libc::SYS_mq_open, [name.as_ptr() as usize, flags, 0o600, 0]).at("make a message queue")?;
    close(made);
    call(libc::SYS_mq_unlink, [name.as_ptr() as usize]).at("remove a message queue")?;
    Ok("made and removed".into())
}

fn run_from_temporary_folder() -> Tried {
    let path = std::env::temp_dir().join(format!("hostile-program-{}", std::process::id()));
    let what = "run a program that this worker has written";
    let copied = fs::copy("/bin/true", &path).at("write a program")?;
    let permitted = fs::set_permissions(&path, fs::Permissions::from_mode(0o700));
    let status = permitted.and_then(|()| Command::new(&path).status());
    let _ = fs::remove_file(&path);
    if status.at(what)?.success() {
        Ok(format!("ran {copied} bytes"))
    } else {
        Err(Refused::because("OTHER", what))
    }
}

fn run_from_memory() -> Tried {
    let what = "run a program from memory";
    let program = fs::read("/bin/true").at("read a program")?;
    let memory = call(libc::SYS_memfd_create, [c"hostile".as_ptr() as usize, 0]).at("make a memory file")?;
    let written = call(libc::SYS_write, [memory, program.as_ptr() as usize, program.len()]);
    let arguments = [c"true".as_ptr() as usize, 0];
    let nothing = [0_usize];
    let run = || {
        let (empty, flags) = (c"".as_ptr() as usize, libc::AT_EMPTY_PATH as usize);
        call(libc::SYS_execveat, [memory, empty, address(&arguments), address(&nothing), flags]).map(drop)
    };
    let status = written.and_then(|_| child(0, run));
    close(memory);
    ended(status.at(what)?, what)
}

//! Attempts to use more than a fair share of resources. Every loop is bounded, because some configurations
//! have no limits.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};

use crate::Attempt;
use crate::calls::{At, Refused, Tried, address, address_mut, call, child, close, thread, wait};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("open-many-descriptors", |_| open_many_descriptors()),
    ("reserve-much-memory", |_| reserve_much_memory()),
    ("touch-much-memory", |_| touch_much_memory()),
    ("grow-a-file", |_| grow_a_file()),
    ("fill-temporary-folder", |_| fill_temporary_folder()),
    ("make-many-processes", |_| make_many_processes()),
    ("leave-processes-behind", |_| leave_processes_behind()),
    ("lower-the-dump-limit", |_| lower_the_dump_limit()),
];

const DESCRIPTORS: usize = 1000;
const PROCESSES: usize = 100;
const RESERVED: usize = 64;
const RESERVED_BYTES: usize = 1 << 30;
const TOUCHED: usize = 256;
const TOUCHED_BYTES: usize = 1 << 20;
const FAR_BYTES: u64 = 1 << 40;
const FILLED_BYTES: usize = 8 << 20;

/// Time after which a process exits on its own, in seconds.
const LIFETIME_S: u64 = 60;

fn open_many_descriptors() -> Tried {
    let mut kept = Vec::with_capacity(DESCRIPTORS);
    while kept.len() < DESCRIPTORS {
        kept.push(File::open("/dev/null").at("open many descriptors")?);
    }
    Ok(format!("opened {DESCRIPTORS}"))
}

fn map(bytes: usize, protection: i32) -> Result<usize, Errno> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
    call(libc::SYS_mmap, [0, bytes, protection as usize, flags, usize::MAX, 0])
}

/// Reserves address space without using memory.
fn reserve_much_memory() -> Tried {
    let (mut mapped, mut end) = (Vec::new(), Ok(()));
    while mapped.len() < RESERVED && end.is_ok() {
        end = map(RESERVED_BYTES, libc::PROT_NONE).map(|at| mapped.push(at));
    }
    for at in &mapped {
        let _ = call(libc::SYS_munmap, [*at, RESERVED_BYTES]);
    }
    end.at("reserve much memory")?;
    Ok(format!("reserved {RESERVED} GiB"))
}

fn touch_much_memory() -> Tried {
    let kept: Vec<Vec<u8>> = (0..TOUCHED).map(|number| vec![number as u8 | 1; TOUCHED_BYTES]).collect();
    Ok(format!(
        "uses {} MiB",
        kept.iter().map(|part| usize::from(part[TOUCHED_BYTES - 1] != 0)).sum::<usize>()
    ))
}

/// Writes one byte far beyond the end of a file, so that the file occupies only a single block. Does so on a thread
/// that blocks SIGXFSZ, because this signal would otherwise kill the process at the limit.
fn grow_a_file() -> Tried {
    let path = std::env::temp_dir().join(format!("hostile-large-{}", std::process::id()));
    let file = File::create(&path).at("create a file in its own temporary folder")?;
    let _ = fs::remove_file(&path);
    thread(|| {
        let _ = SigSet::from(Signal::SIGXFSZ).thread_block();
        file.write_at(b"x", FAR_BYTES)
    })
    .at("make a file of 1 TiB")?;
    Ok("grown".into())
}

/// Fills the temporary folder and keeps it full for a while, because the size of a folder on disk is checked only
/// periodically.
fn fill_temporary_folder() -> Tried {
    let path = std::env::temp_dir().join(format!("hostile-full-{}", std::process::id()));
    let file = File::create(&path);
    let written = file.and_then(|mut file| file.write_all(&vec![1; FILLED_BYTES]));
    if written.is_ok() && std::env::var_os("TMPDIR").is_some() {
        let _ = sleep();
    }
    let _ = fs::remove_file(&path);
    written.at("fill its own temporary folder")?;
    Ok(format!("written {FILLED_BYTES} bytes"))
}

fn sleep() -> Result<(), Errno> {
    let time = [LIFETIME_S, 0];
    call(libc::SYS_nanosleep, [address(&time), 0]).map(drop)
}

/// Creates processes until the kernel refuses or [`PROCESSES`] processes exist. Then kills all of these processes.
fn make_many_processes() -> Tried {
    let (mut made, mut end) = (Vec::new(), Ok(()));
    while made.len() < PROCESSES && end.is_ok() {
        end = call(libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0]).map(|pid| {
            if pid == 0 {
                let _ = sleep();
                let _ = call(libc::SYS_exit_group, [0]);
            }
            made.push(pid);
        });
    }
    for pid in &made {
        let _ = call(libc::SYS_kill, [*pid, libc::SIGKILL as usize]);
        let _ = wait(*pid);
    }
    end.at(&format!("make more than {} processes", made.len()))?;
    Ok(format!("made {PROCESSES}"))
}

/// Leaves orphaned processes behind, each in a separate session.
fn leave_processes_behind() -> Tried {
    const LEFT: usize = 5;
    for _ in 0..LEFT {
        let leave = || {
            call(libc::SYS_setsid, [])?;
            if call(libc::SYS_clone, [libc::SIGCHLD as usize, 0, 0, 0, 0])? == 0 {
                (1..=libc::SIGRTMAX()).for_each(|number| ignore(number as usize));
                (0..3).for_each(close);
                let _ = sleep();
                let _ = call(libc::SYS_exit_group, [0]);
            }
            Ok(())
        };
        child(0, leave).at("leave a process behind")?;
    }
    Ok(format!("left {LEFT}"))
}

/// Sets the limit on core dumps to 0. Unlike a limit of 1, this does not prevent the kernel from passing dumps to a
/// program in `core_pattern`.
fn lower_the_dump_limit() -> Tried {
    let what = "set the limit of core dumps to 0";
    let mut before = [0_u64; 2];
    let core = libc::RLIMIT_CORE as usize;
    call(libc::SYS_prlimit64, [0, core, 0, address_mut(&mut before)]).at(what)?;
    let [_, hard] = before;
    call(libc::SYS_prlimit64, [0, core, address(&[0, hard]), 0]).at(what)?;
    let mut after = [0_u64; 2];
    call(libc::SYS_prlimit64, [0, core, 0, address_mut(&mut after)]).at(what)?;
    let _ = call(libc::SYS_prlimit64, [0, core, address(&before), 0]);
    if after[0] == 0 { Ok("it is 0".into()) } else { Err(Refused::nothing(what)) }
}

fn ignore(signal: usize) {
    const IGNORE: usize = 1;
    let action = [IGNORE, 0, 0, 0];
    let _ = call(libc::SYS_rt_sigaction, [signal, address(&action), 0, size_of::<u64>()]);
}

pub(crate) fn sleep_bounded() -> ExitCode {
    std::thread::sleep(std::time::Duration::from_secs(LIFETIME_S));
    ExitCode::SUCCESS
}

/// Leaves a chain of processes behind for up to 20 s. Each process in the chain forks a successor and exits, so that a
/// process found by a search has already exited before it can be signalled. Returns the worker's PID.
pub(crate) fn leave_a_runner() -> Result<Vec<u8>, bulkhead_worker::HandlerError> {
    const LIFETIME: std::time::Duration = std::time::Duration::from_secs(20);
    let began = std::time::Instant::now();
    // SAFETY: the child makes only system calls and never returns.
    #[expect(unsafe_code, reason = "forks without allocating memory in the child")]
    unsafe {
        if libc::fork() == 0 {
            libc::setsid();
            while began.elapsed() < LIFETIME {
                if libc::fork() != 0 {
                    libc::_exit(0);
                }
            }
            libc::_exit(0);
        }
    }
    Ok(std::process::id().to_string().into_bytes())
}

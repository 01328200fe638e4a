//! Samples the stacks of a worker's processes, and writes them to a file. `process/samples.rs` runs the sampling on a
//! separate thread when the supervisor orders it. The data plane decides which workers are sampled. Only the stacks as
//! text need the cooperation of the worker.
//!
//! Each thread is stopped briefly with `ptrace(2)`. The records have the format of [`bulkhead_shared::crash_record`].
//! The processes can be hostile, so every step has a limit.

use std::fs::File;
use std::io::{self, IoSliceMut, Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use bulkhead_linux::process_tree::{descendants_of, read_proc_file, start_time};
use bulkhead_shared::crash_record::{
    HEADER_BYTES, Header, MACHINE, MAPS_BYTES_MAX, NAME_BYTES_MAX, RECORDS_BYTES_MAX, REGISTERS_MAX,
};
use bulkhead_shared::worker_protocol::STACK_SIGNAL;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

/// Maximum time that sampling one worker may take.
pub(crate) const SAMPLE_TIMEOUT: Duration = Duration::from_millis(15);

/// Maximum number of threads to sample, and maximum number of processes to which these threads belong.
const THREADS_MAX: usize = 64;
const PROCESSES_MAX: usize = 16;

/// Number of descendants after which the search for descendants stops.
const DESCENDANTS_MAX: usize = 256;

/// Maximum number of bytes to record per stack.
const STACK_BYTES_MAX: usize = 64 * 1024;

/// Maximum size in bytes of `/proc/PID/maps` and `/proc/PID/environ`.
const PROC_FILE_BYTES_MAX: u64 = 1 << 20;

/// Size of the red zone below the stack pointer, in bytes. On x86-64, functions without a stack frame can use this
/// zone.
const RED_ZONE_BYTES: u64 = 128;

/// Interval between checks of whether a thread has stopped.
const STOP_INTERVAL: Duration = Duration::from_micros(50);

/// Interval between checks of whether the worker has finished writing its stacks as text.
const TEXT_INTERVAL: Duration = Duration::from_millis(1);

/// Offset of the first record in the file. The file begins with the total size of the records.
const RECORDS_OFFSET: usize = size_of::<u64>();

/// A worker to sample, and the files to which its stacks are written.
pub(crate) struct SampleRequest {
    pub(crate) process: ProcessStart,
    /// If set, samples only the programs of this job, which are the worker's descendants whose `BULKHEAD_JOB` variable
    /// has this value. If there are none, samples all descendants.
    pub(crate) job: Option<String>,
    /// File for the records.
    pub(crate) file: OwnedFd,
    /// File for the stacks as text. The worker writes the stacks of its threads to this file when it receives the
    /// [`STACK_SIGNAL`].
    pub(crate) text: Option<OwnedFd>,
}

/// Process ID and start time of a process. Later processes with the same ID have a different start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessStart {
    id: u32,
    started: u64,
}

impl ProcessStart {
    /// Looks up the start time of a process. Returns `None` if no process with this ID exists.
    pub(crate) fn of(id: u32) -> Option<Self> {
        Some(Self { id, started: start_time(id)? })
    }

    /// Returns true if the ID still belongs to the same process.
    fn is_current(self) -> bool {
        Self::of(self.id) == Some(self)
    }
}

impl SampleRequest {
    /// Samples the worker. Fails if no thread can be stopped, for example with `EPERM`.
    pub(crate) fn take(self) -> Result<(), Errno> {
        let until = Instant::now() + SAMPLE_TIMEOUT;
        let processes = self.processes();
        let mut sample = Sample { file: self.file.into(), bytes: RECORDS_OFFSET };
        let mut result = Err(Errno::ESRCH);
        let mut threads_left = THREADS_MAX;
        for process in processes.into_iter().take(PROCESSES_MAX) {
            let taken = sample.take_process(process, &mut threads_left, until);
            result = if result.is_ok() { result } else { taken };
        }
        if let Some(text) = self.text {
            // All threads are running again, so that the worker can handle the signal.
            request_text(self.process, &File::from(text), until);
        }
        result
    }

    /// Returns the processes to sample, starting with the most important one.
    fn processes(&self) -> Vec<ProcessStart> {
        let descendants = descendants(self.process.id);
        let descendants: Vec<_> = descendants.into_iter().filter_map(ProcessStart::of).collect();
        let Some(job) = &self.job else { return [vec![self.process], descendants].concat() };
        let variable = format!("BULKHEAD_JOB={job}");
        let is_of_job = |process: &ProcessStart| {
            let environment = read_limited(&format!("/proc/{}/environ", process.id)).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
        };
        let of_job: Vec<_> = descendants.iter().copied().filter(is_of_job).collect();
        if of_job.is_empty() { descendants } else { of_job }
    }
}

/// Returns the descendants of a process, parents before children. Faster than [`descendants_of`], which examines all
/// processes on the machine.
pub(crate) fn descendants(root: u32) -> Vec<u32> {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() && found.len() < DESCENDANTS_MAX {
        for thread in threads_of(found[next]) {
            let Ok(children) = read_limited(&format!("/proc/{}/task/{thread}/children", found[next])) else {
                if next == 0 && thread == root {
                    // Falls back to examining all processes, because this kernel was built without the file.
                    return descendants_of(root).unwrap_or_default();
                }
                continue;
            };
            let children = String::from_utf8_lossy(&children);
            found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        }
        next += 1;
    }
    found.split_off(1)
}

/// Makes the worker write the stacks of its threads as text, and waits until the text is complete. The file offset is
/// shared with the worker and shows the worker's progress.
///
/// Does nothing if the process does not handle the signal, which would then kill the process. For example, the process
/// can be a shell that has started the worker as its child, or the worker's code can have removed the handler.
fn request_text(process: ProcessStart, mut text: &File, until: Instant) {
    let start = text.stream_position().unwrap_or(0);
    if !handles_stack_signal(process.id) || send_stack_signal(process).is_err() {
        return;
    }
    let mut last = start;
    while Instant::now() < until {
        std::thread::sleep(TEXT_INTERVAL);
        let now = text.stream_position().unwrap_or(start);
        if now > start && now == last {
            return;
        }
        last = now;
    }
}

/// Returns true if the process has a handler for the [`STACK_SIGNAL`].
fn handles_stack_signal(id: u32) -> bool {
    let status = read_limited(&format!("/proc/{id}/status")).unwrap_or_default();
    let mask = status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"SigCgt:"));
    let mask = mask.and_then(|mask| std::str::from_utf8(mask.trim_ascii()).ok());
    let mask = mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    mask >> (STACK_SIGNAL - 1) & 1 == 1
}

/// Sends the [`STACK_SIGNAL`], unless the process has exited and its ID was reused.
fn send_stack_signal(process: ProcessStart) -> io::Result<()> {
    let number = rustix::process::Pid::from_raw(process.id.cast_signed()).ok_or(io::ErrorKind::NotFound)?;
    let pidfd = rustix::process::pidfd_open(number, rustix::process::PidfdFlags::empty())?;
    if !process.is_current() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let (pidfd, info) = (pidfd.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
    // SAFETY: the call reads no memory of this process.
    #[expect(unsafe_code, reason = "no safe wrapper sends real-time signals")]
    let sent = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd, STACK_SIGNAL, info, 0) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The file to which the records are written.
struct Sample {
    file: File,
    /// Number of bytes written so far.
    bytes: usize,
}

/// A thread that is stopped or about to stop.
struct Tracee {
    id: u32,
}

impl Drop for Tracee {
    fn drop(&mut self) {
        let (thread, signal) = (self.id as libc::pid_t, libc::c_long::from(intercepted_signal(self.id)));
        let no_address = std::ptr::null::<libc::c_void>();
        // Fails if the thread has not stopped. The kernel then detaches the thread when the calling thread
        // exits. SAFETY: the call accesses no memory of this process.
        #[expect(unsafe_code, reason = "no safe wrapper delivers real-time signals")]
        let _ = unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, no_address, signal) };
    }
}

/// Returns the signal whose delivery stopped an attached thread. The signal is lost unless it is passed on when the
/// thread is detached. Returns 0 if the thread stopped for another reason or has not stopped.
fn intercepted_signal(id: u32) -> i32 {
    let is_delivery = |found: &libc::siginfo_t| found.si_code >> 8 != libc::PTRACE_EVENT_STOP;
    ptrace::getsiginfo(pid(id)).ok().filter(is_delivery).map_or(0, |found| found.si_signo)
}

impl Sample {
    /// Samples the threads of a process.
    fn take_process(
        &mut self,
        process: ProcessStart,
        threads_left: &mut usize,
        until: Instant,
    ) -> Result<(), Errno> {
        let mut threads = threads_of(process.id);
        threads.truncate(*threads_left);
        *threads_left -= threads.len();
        let maps = read_limited(&format!("/proc/{}/maps", process.id)).unwrap_or_default();
        let mut mappings = executable_mappings(&maps);
        let mut result = Err(Errno::ESRCH);
        let (mut tracees, mut others) = (Vec::new(), Vec::new());
        for id in threads {
            let header = describe(process.id, id);
            if is_dead(&header) {
                continue;
            }
            match seize(process, id) {
                Ok(tracee) => {
                    result = Ok(());
                    tracees.push((tracee, header));
                }
                Err(errno) => {
                    result = result.or(Err(errno));
                    others.push(header);
                }
            }
        }
        while !tracees.is_empty() && Instant::now() < until {
            tracees.retain_mut(|(tracee, header)| {
                let Some(registers) = registers(tracee.id) else {
                    return !is_dead(&describe(header.process, header.thread));
                };
                let stack = read_stack(tracee.id, registers.stack_pointer, &maps, header);
                header.registers = registers.all;
                self.write(*header, &mut mappings, &stack);
                false
            });
            std::thread::sleep(STOP_INTERVAL);
        }
        if result.is_ok() {
            // For threads that could not be stopped, only the headers are recorded. Such a thread can be in an
            // uninterruptible sleep.
            others.extend(tracees.iter().map(|(_, header)| *header));
            others.into_iter().for_each(|header| self.write(header, &mut mappings, &[]));
        }
        result
    }

    /// Appends a record if there is room. The first record of each process also contains the process's mappings.
    fn write(&mut self, mut header: Header, mappings: &mut Vec<u8>, stack: &[u8]) {
        (header.maps_bytes, header.stack_bytes) = (mappings.len() as u32, stack.len() as u32);
        let mut bytes = [0; HEADER_BYTES];
        header.encode(&mut bytes);
        let record = [&bytes[..], mappings, stack].concat();
        let end = self.bytes + record.len();
        if end <= RECORDS_OFFSET + RECORDS_BYTES_MAX
            && self.file.write_all_at(&record, self.bytes as u64).is_ok()
            && self.file.write_all_at(&((end - RECORDS_OFFSET) as u64).to_le_bytes(), 0).is_ok()
        {
            self.bytes = end;
            mappings.clear();
        }
    }
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(id.cast_signed())
}

/// Attaches to a thread and asks it to stop.
fn seize(process: ProcessStart, id: u32) -> Result<Tracee, Errno> {
    ptrace::seize(pid(id), ptrace::Options::empty())?;
    let tracee = Tracee { id };
    // The ID of an attached thread cannot be reused.
    let is_thread = std::fs::exists(format!("/proc/{}/task/{id}", process.id)).unwrap_or(false);
    if !is_thread || !process.is_current() {
        return Err(Errno::ESRCH);
    }
    ptrace::interrupt(pid(id))?;
    Ok(tracee)
}

/// Returns true if the thread has exited.
fn is_dead(header: &Header) -> bool {
    matches!(header.state, 0 | b'Z' | b'X')
}

struct Registers {
    /// Values of registers, in the order of [`Header::registers`].
    all: [u64; REGISTERS_MAX],
    stack_pointer: u64,
}

/// Returns the registers of a thread, or `None` if the thread has not stopped yet.
#[cfg(target_arch = "x86_64")]
fn registers(id: u32) -> Option<Registers> {
    let found = ptrace::getregset::<ptrace::regset::NT_PRSTATUS>(pid(id)).ok()?;
    let mut all = [0; REGISTERS_MAX];
    all[..17].copy_from_slice(&[
        found.r8, found.r9, found.r10, found.r11, found.r12, found.r13, found.r14, found.r15, found.rdi,
        found.rsi, found.rbp, found.rbx, found.rdx, found.rax, found.rcx, found.rsp, found.rip,
    ]);
    Some(Registers { all, stack_pointer: found.rsp })
}

/// Returns the registers of a thread, or `None` if the thread has not stopped yet.
#[cfg(target_arch = "aarch64")]
fn registers(id: u32) -> Option<Registers> {
    let found = ptrace::getregset::<ptrace::regset::NT_PRSTATUS>(pid(id)).ok()?;
    let mut all = [0; REGISTERS_MAX];
    all[..31].copy_from_slice(&found.regs);
    (all[31], all[32]) = (found.sp, found.pc);
    Some(Registers { all, stack_pointer: found.sp })
}

/// Returns a thread's stack, from the red zone to the end of the stack's mapping. Stores the start address in the
/// header.
fn read_stack(id: u32, stack_pointer: u64, maps: &[u8], header: &mut Header) -> Vec<u8> {
    let start = stack_pointer.saturating_sub(RED_ZONE_BYTES);
    let Some(end) = mapping_end(maps, stack_pointer) else { return Vec::new() };
    let mut stack = vec![0; usize::try_from(end - start).map_or(0, |bytes| bytes.min(STACK_BYTES_MAX))];
    let remote = [RemoteIoVec { base: start as usize, len: stack.len() }];
    let read = process_vm_readv(pid(id), &mut [IoSliceMut::new(&mut stack)], &remote).unwrap_or(0);
    stack.truncate(read);
    header.stack_start = start;
    stack
}

/// Returns the end of the mapping that contains an address.
fn mapping_end(maps: &[u8], address: u64) -> Option<u64> {
    // The lines are sorted by address. If the stack has grown since the lines were read, its mapping now begins at a
    // lower address.
    maps.split(|byte| *byte == b'\n').find_map(|line| {
        let range = std::str::from_utf8(line.split(|byte| *byte == b' ').next()?).ok()?;
        let end = u64::from_str_radix(range.split_once('-')?.1, 16).ok()?;
        (address < end).then_some(end)
    })
}

/// Returns the lines of `/proc/PID/maps` that describe executable mappings. The result is never empty, because a record
/// without mappings would be attributed to the previous process.
fn executable_mappings(maps: &[u8]) -> Vec<u8> {
    let mut lines = Vec::new();
    for line in maps.split_inclusive(|byte| *byte == b'\n') {
        let mode = line.split(|byte| *byte == b' ').nth(1);
        let is_executable = mode.is_some_and(|mode| mode.get(2) == Some(&b'x'));
        if is_executable && lines.len() + line.len() <= MAPS_BYTES_MAX {
            lines.extend_from_slice(line);
        }
    }
    if lines.is_empty() {
        lines.push(b'\n');
    }
    lines
}

/// Returns the IDs of a process's threads, starting with the first thread.
fn threads_of(process: u32) -> Vec<u32> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let mut threads: Vec<u32> =
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).take(THREADS_MAX).collect();
    threads.sort_unstable_by_key(|id| (*id != process, *id));
    threads
}

/// Returns a header with the information about a thread from `/proc`.
fn describe(process: u32, id: u32) -> Header {
    let folder = format!("/proc/{process}/task/{id}");
    let read = |name: &str| read_limited(&format!("{folder}/{name}")).unwrap_or_default();
    let stat = read_proc_file(&format!("{folder}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.bytes().next()).unwrap_or(0);
    let wait_channel = read("wchan");
    let is_waiting = wait_channel != b"0";
    Header {
        machine: MACHINE,
        thread: id,
        process,
        state,
        thread_name: padded(read("comm").trim_ascii_end()),
        process_name: name_of(process),
        wait_channel: padded(if is_waiting { &wait_channel } else { &[] }),
        ..Header::EMPTY
    }
}

fn name_of(process: u32) -> [u8; NAME_BYTES_MAX] {
    padded(read_limited(&format!("/proc/{process}/comm")).unwrap_or_default().trim_ascii_end())
}

/// Copies as much of `text` as fits into an array. Fills the rest of the array with zeros.
fn padded<const BYTES: usize>(text: &[u8]) -> [u8; BYTES] {
    std::array::from_fn(|index| text.get(index).copied().unwrap_or(0))
}

fn read_limited(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(PROC_FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(120);

    /// Sends a signal to an attached thread, detaches the thread once the signal has stopped it, and checks that the
    /// signal then kills the process.
    fn check_that_signal_is_delivered(send: impl FnOnce(ProcessStart)) {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessStart::of(child.id()).unwrap();
        ptrace::seize(pid(process.id), ptrace::Options::empty()).unwrap();
        let tracee = Tracee { id: process.id };
        send(process);
        let until = Instant::now() + TIMEOUT;
        while describe(process.id, process.id).state != b't' {
            assert!(Instant::now() < until, "the signal did not stop the thread");
            std::thread::sleep(STOP_INTERVAL);
        }
        drop(tracee);
        let has_exited = crate::wait::exits_within(&child, TIMEOUT).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_exited, "the signal was lost");
    }

    #[test]
    fn signal_during_a_sample_is_delivered() {
        check_that_signal_is_delivered(|process| {
            nix::sys::signal::kill(pid(process.id), nix::sys::signal::Signal::SIGTERM).unwrap();
        });
    }

    #[test]
    fn real_time_signal_during_a_sample_is_delivered() {
        check_that_signal_is_delivered(|process| send_stack_signal(process).unwrap());
    }

    /// Starts a shell that runs `script`. Requests the shell's stacks as text after the first line of output. Returns
    /// the remaining output.
    fn output_after_request(script: &str) -> String {
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = shell.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut String::new()).unwrap();
        let text = File::options().read(true).write(true).open("/dev/null").unwrap();
        request_text(ProcessStart::of(child.id()).unwrap(), &text, Instant::now());
        drop(child.stdin.take());
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        child.wait().unwrap();
        rest
    }

    /// Each shell reads its standard input to the end before it continues.
    #[test]
    fn stack_signal_is_sent_only_to_processes_that_handle_it() {
        assert_eq!(output_after_request("echo; read line; echo alive"), "alive\n");
        let handles = format!("trap 'echo handled' {STACK_SIGNAL}; echo; read line; echo alive");
        assert_eq!(output_after_request(&handles), "handled\nalive\n");
    }

    #[test]
    fn sampled_thread_continues() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessStart::of(child.id()).unwrap();
        let tracee = seize(process, process.id).unwrap();
        let until = Instant::now() + TIMEOUT;
        let wait_for = |is_wanted: fn(u8) -> bool| {
            while !is_wanted(describe(process.id, process.id).state) {
                assert!(Instant::now() < until, "the thread did not stop or continue");
                std::thread::sleep(STOP_INTERVAL);
            }
        };
        wait_for(|state| state == b't');
        drop(tracee);
        wait_for(|state| state == b'S');
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

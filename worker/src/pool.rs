//! Manages a worker's threads, which read jobs from the link, call the handlers and send the replies. Where possible, a
//! job runs on the thread that has read the job, so that no other thread has to be woken. `server` collects the
//! handlers, and `link` reads and writes frames.
//!
//! Waking a thread takes longer than most jobs, so the pool works in two modes, depending on how long
//! handlers take.
//!
//! **Slow handlers** run in parallel. Handlers count as slow until measurements show that they are quick.
//! Idle handler threads wait for the link themselves, all in the same epoll instance. When jobs arrive, the
//! kernel wakes one of these threads, which reads the jobs, runs the first, and wakes other threads for the
//! rest. The *dispatch thread* also waits for the link, in a separate epoll instance. The link is registered
//! with `EPOLLEXCLUSIVE`, first in the instance of the handler threads, then in that of the dispatch thread.
//! The kernel wakes the first instance that has a waiting thread, so the dispatch thread reads the link only
//! while all handlers are busy, mainly to receive cancellations. The dispatch thread also sends the
//! heartbeats.
//!
//! **Quick handlers** take a few microseconds and return before another thread could wake up. Several threads would
//! only contend for locks. Therefore a single thread waits for the link, runs the jobs that it has read one after
//! another, and sends the replies together. The other threads are parked until the backlog is long enough to justify
//! waking them. The *watchdog*, a timer of the dispatch thread, detects a job that takes unexpectedly long. Handlers
//! then count as slow again.
//!
//! **The number of threads** is limited by the welcome, and later by LIMITS frames. Threads are started when
//! jobs need them. While there are more threads than allowed, a thread that finishes a job exits instead of
//! taking another job. Only the first thread, which ran `init`, is permanent. If there are more jobs than
//! threads, jobs wait in order of arrival.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bulkhead_shared::codec::{self, tag};
use bulkhead_shared::connection::{Item, Payload, Received};
use bulkhead_shared::frame::{Header, kind};
use bulkhead_shared::limits::{CODE_BYTES_MAX, INLINE_PAYLOAD_BYTES_MAX, MESSAGE_BYTES_MAX, truncate};
use bulkhead_shared::memory_files::{LeaseRef, receive_with_files};
use bulkhead_shared::outcome::RESULT_TOO_LARGE;
use bulkhead_shared::worker_protocol::{Empty, Failed, Limits, ProgramCrashed, Status};
use bulkhead_shared::{Fault, worker_protocol};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::thread::set_current_timer_slack;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use crate::context::{Ctx, Handle, Job, JobMetadata, StartCtx, StatusReceiver};
use crate::files::{Loan, Loans};
use crate::journal::Claims;
use crate::link::{self, Reader, Welcome, Writer, threads_max};
use crate::log;
use crate::ownership::{self, kill_self};
use crate::reply::{HandlerError, Reply};

#[cfg(test)]
mod tests;

const LINK: u64 = 0;
const WAKE: u64 = 1;
const SIGNAL: u64 = 2;
const WATCHDOG: u64 = 3;

/// Average handler duration above which handlers count as slow, in nanoseconds. Handlers count as quick again below
/// half of this value.
const SLOW_HANDLER_NS: u64 = 20_000;

/// Estimated total run time of the pending quick jobs, in nanoseconds, above which another thread is woken to help. If
/// handlers take at most `TINY_HANDLER_NS`, no thread is woken, because lock contention would cost more than the second
/// thread saves.
const BACKLOG_NS_MAX: u64 = 100_000;
const TINY_HANDLER_NS: u64 = 3_000;

/// Handler duration in nanoseconds to assume before the first measurement, and after the watchdog has found a slow job.
const ASSUMED_HANDLER_NS: u64 = 1_000_000;

/// Interval between the watchdog's checks while quick jobs run.
const WATCHDOG_INTERVAL: Duration = Duration::from_millis(2);

/// Approximate maximum time that a reply waits to be sent together with later replies.
const REPLY_DELAY_MAX: Duration = Duration::from_micros(100);

/// Interval between attempts to send STOPPING while the link is busy.
const STOPPING_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum remaining time of a job. Longer times are shortened to this value, so that adding them to the current time
/// cannot overflow.
const REMAINING_MAX: Duration = Duration::from_secs(86_400 * 365);

/// The function that runs a job.
pub(crate) type Handler<S> = dyn Fn(&Job, &Ctx<S>) -> Reply + Send + Sync;

struct Pending {
    /// Position of the job among all jobs received on the link, starting at 1.
    arrival: u64,
    metadata: JobMetadata,
    payload: Vec<u8>,
    loan: Option<Box<Loan>>,
}

/// Classification of handlers by their measured duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Pace {
    /// Handlers are slow. Each job runs on a separate thread, and the dispatch thread waits for incoming frames.
    #[default]
    Slow,
    /// Handlers return so quickly that waking a thread for each job is not worthwhile. The watchdog checks for slow
    /// jobs unless no job has run recently.
    Quick {
        /// Number of begun jobs at the watchdog's last check. `None` while the watchdog is inactive.
        watched: Option<u64>,
    },
}

#[derive(Default)]
struct State {
    pending: VecDeque<Pending>,
    /// Number of jobs received.
    arrived: u64,
    /// True if recalled jobs have been dropped and the supervisor has not been notified.
    has_dropped: bool,
    loans: Loans,
    /// Handles to all jobs that have been received but not answered, by job ID.
    live: HashMap<u64, Arc<Handle>, BuildHasherDefault<NumberHasher>>,
    /// Number of jobs that have begun.
    begun: u64,
    pace: Pace,
    /// Number of handler threads that are waiting for work.
    idle: usize,
    /// Number of idle threads that wait both for the link and for wake requests. The other idle threads wait only
    /// for wake requests.
    on_link: usize,
    threads: usize,
    /// Maximum number of handler threads; at least one.
    threads_max: usize,
    /// True while a wake request is pending. The `wake` descriptor is then readable and at least one thread is idle.
    is_wake_pending: bool,
    /// True if READY has been queued. READY allows the supervisor to send jobs.
    is_ready: bool,
    /// True if the supervisor has announced that it will send no more jobs.
    is_draining: bool,
}

/// State of the STOPPING message, which tells the supervisor that this worker accepts no more jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shutdown {
    No,
    Requested,
    /// STOPPING has been queued but not sent.
    Queued,
    Sent,
}

/// Lifetime of a handler thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    /// The thread never exits, because resources created by `init` may depend on it.
    Permanent,
    /// The thread exits when it has no job and the number of threads exceeds the limit.
    WhileNeeded,
}

/// Hasher for job IDs. The supervisor chooses the IDs, so the hash need not resist collision attacks.
#[derive(Default)]
struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

pub(crate) struct Pool<S> {
    link: OwnedFd,
    welcome: Welcome,
    reader: Mutex<Reader>,
    writer: Arc<Writer>,
    state: Mutex<State>,
    wake: OwnedFd,
    /// Notified whenever `is_wake_pending` becomes false.
    wake_handled: Condvar,
    handlers: OwnedFd,
    parked: OwnedFd,
    dispatch: OwnedFd,
    watchdog: OwnedFd,
    /// Counters of begun and recalled jobs. `None` if the supervisor does not prefetch jobs.
    claims: Option<Claims>,
    /// Moving average of the handler duration, in nanoseconds.
    typical_ns: AtomicU64,
    handler: Box<Handler<S>>,
    /// Stack size of handler threads in bytes, or `None` for the default of the standard library.
    stack_bytes: Option<usize>,
    shared: std::sync::OnceLock<Arc<S>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Send + Sync + 'static> Pool<S> {
    pub(crate) fn new(
        link: OwnedFd,
        welcome: Welcome,
        reader: Reader,
        writer: Arc<Writer>,
        handler: Box<Handler<S>>,
        stack_bytes: Option<usize>,
    ) -> std::io::Result<Arc<Self>> {
        let claims = writer.claims();
        let create = || epoll::create(CreateFlags::CLOEXEC);
        let (handlers, parked, dispatch) = (create()?, create()?, create()?);
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let timer_flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let watchdog = rustix::time::timerfd_create(TimerfdClockId::Monotonic, timer_flags)?;
        // The handlers' instance must be registered for the link before the dispatch thread's instance; see
        // the module documentation.
        let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
        epoll::add(&handlers, &link, EventData::new_u64(LINK), flags)?;
        epoll::add(&handlers, &wake, EventData::new_u64(WAKE), flags)?;
        epoll::add(&parked, &wake, EventData::new_u64(WAKE), flags)?;
        epoll::add(&dispatch, &link, EventData::new_u64(LINK), flags)?;
        epoll::add(&dispatch, &watchdog, EventData::new_u64(WATCHDOG), EventFlags::IN)?;
        let state = State { threads_max: welcome.threads_max, ..State::default() };
        Ok(Arc::new(Self {
            link,
            welcome,
            reader: Mutex::new(reader),
            writer,
            state: Mutex::new(state),
            wake,
            wake_handled: Condvar::new(),
            handlers,
            parked,
            dispatch,
            watchdog,
            claims,
            typical_ns: AtomicU64::new(ASSUMED_HANDLER_NS),
            handler,
            stack_bytes,
            shared: std::sync::OnceLock::new(),
        }))
    }

    fn handler_thread(stack_bytes: Option<usize>) -> std::thread::Builder {
        let thread = std::thread::Builder::new().name("handler".into());
        match stack_bytes {
            Some(bytes) => thread.stack_size(bytes),
            None => thread,
        }
    }

    /// Runs `init` on the first handler thread, then runs jobs until the supervisor stops the worker.
    pub(crate) fn run<I>(self: &Arc<Self>, signals: &OwnedFd, init: I) -> ExitCode
    where
        I: FnOnce(&StartCtx) -> Result<S, HandlerError> + Send + 'static,
    {
        if let Err(error) = epoll::add(&self.dispatch, signals, EventData::new_u64(SIGNAL), EventFlags::IN) {
            log::line(format_args!("failed to watch for signals: {error}"));
            return ExitCode::FAILURE;
        }
        lock(&self.state).threads = 1;
        let pool = self.clone();
        let first = Self::handler_thread(self.stack_bytes).spawn(move || {
            pool.start(init);
            pool.handle_jobs(Lifetime::Permanent);
        });
        if let Err(error) = first {
            log::line(format_args!("failed to start a handler thread: {error}"));
            return ExitCode::FAILURE;
        }
        // Reads frames that arrived together with the welcome. They are already in the inbox, so the link
        // does not become readable because of them.
        self.serve_link();
        self.dispatch_loop(signals)
    }

    fn start<I>(&self, init: I)
    where
        I: FnOnce(&StartCtx) -> Result<S, HandlerError>,
    {
        let context = StartCtx { to: StatusReceiver::Supervisor(self.writer.clone()) };
        match run_user_code(|| init(&context)).and_then(|made| made) {
            Ok(state) => {
                let _ = self.shared.set(Arc::new(state));
                if let Some(seal) = &self.welcome.seal
                    && let Err(error) = seal.install()
                {
                    self.fail_start(&format!("failed to seal the worker: seccomp: {error}"));
                }
                // READY is queued while the lock that guards `is_ready` is held. A thread that sees
                // `is_ready` therefore sends its frames after READY.
                let mut state = lock(&self.state);
                self.writer.push(kind::READY, 0, &Empty, Payload::NONE);
                state.is_ready = true;
                drop(state);
                self.writer.flush();
            }
            Err(error) => {
                self.fail_start(&format!("initialisation failed: {}: {}", error.code, error.message));
            }
        }
    }

    /// Tells the supervisor why the worker cannot start. Then exits.
    fn fail_start(&self, text: &str) -> ! {
        log::line(text);
        self.writer.send(kind::STATUS, 0, &Status { text: truncate(text, MESSAGE_BYTES_MAX) });
        std::process::exit(1);
    }

    // Handler threads.

    fn handle_jobs(self: &Arc<Self>, lifetime: Lifetime) {
        let mut ctx: Option<Ctx<S>> = None;
        // Time at which the previous job ended, if the next job follows without a pause.
        let mut ended = None;
        // Time of the oldest unsent reply.
        let mut unwritten_since = None;
        // True if every reply was sent or is in the journal, so the next job cannot lose a reply by killing this
        // process.
        let mut is_safe = true;
        loop {
            let now = ended.unwrap_or_else(Instant::now);
            let Some((job, pace)) = self.next_job(ctx.as_ref().map(|ctx| &ctx.metadata), lifetime) else {
                self.writer.flush();
                (ended, unwritten_since) = (None, None);
                self.end_if_drained();
                match lifetime {
                    Lifetime::Permanent => self.end_surplus_threads(),
                    Lifetime::WhileNeeded if self.leave_if_surplus() => return,
                    Lifetime::WhileNeeded => {}
                }
                self.wait_for_work();
                continue;
            };
            let mut began = now;
            // Limits how long a reply stays unsent if the next handlers are slow or if many jobs follow.
            let is_late = unwritten_since.is_some_and(|since| began - since > REPLY_DELAY_MAX);
            let is_due = pace == Pace::Slow || is_late || !is_safe;
            if is_due && unwritten_since.take().is_some() {
                self.writer.flush();
                began = Instant::now();
            }
            is_safe = self.run_job(job, &mut ctx);
            let now = Instant::now();
            ended = Some(now);
            unwritten_since.get_or_insert(now);
            self.update_typical_duration(now - began);
        }
    }

    /// Removes `done`, the last job of the calling thread, from `live`. Returns the next job and the current pace. If
    /// necessary, wakes another thread for the remaining jobs and starts the watchdog.
    fn next_job(self: &Arc<Self>, done: Option<&JobMetadata>, lifetime: Lifetime) -> Option<(Pending, Pace)> {
        let mut state = lock(&self.state);
        if let Some(job) = done {
            state.remove_live(job);
        }
        if lifetime == Lifetime::WhileNeeded && state.has_surplus() || !state.can_begin() {
            return None;
        }
        self.drop_recalled(&mut state);
        self.report_dropped(&mut state);
        let job = state.pending.pop_front()?;
        if self.claims.is_some_and(|claims| !claims.begin(job.arrival)) {
            self.return_job(&mut state, &job);
            // Jobs that arrived after this one may have been recalled as well.
            self.drop_recalled(&mut state);
            return None;
        }
        state.begun += 1;
        self.change_pace(&mut state, self.typical_ns.load(Ordering::Relaxed));
        let pace = state.pace;
        if self.needs_another_thread(&state) {
            self.wake_or_start_thread(&mut state);
        }
        if pace == (Pace::Quick { watched: None }) {
            state.pace = Pace::Quick { watched: Some(state.begun) };
            self.set_watchdog(WATCHDOG_INTERVAL);
        }
        Some((job, pace))
    }

    fn needs_another_thread(&self, state: &State) -> bool {
        let typical_ns = self.typical_ns.load(Ordering::Relaxed);
        let backlog_ns = typical_ns.saturating_mul(state.pending.len() as u64);
        match state.pace {
            Pace::Slow => !state.pending.is_empty(),
            Pace::Quick { .. } => typical_ns > TINY_HANDLER_NS && backlog_ns > BACKLOG_NS_MAX,
        }
    }

    /// Includes the duration of one job in the average handler duration.
    fn update_typical_duration(&self, took: Duration) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).min(100 * ASSUMED_HANDLER_NS);
        let typical = self.typical_ns.load(Ordering::Relaxed);
        // Concurrent updates can be lost, which does not matter for an estimate.
        self.typical_ns.store(typical - typical / 8 + took / 8, Ordering::Relaxed);
    }

    /// Classifies handlers as slow or quick. The dispatch thread waits for incoming frames only while handlers are
    /// slow.
    fn change_pace(&self, state: &mut State, typical_ns: u64) {
        match state.pace {
            Pace::Slow if typical_ns < SLOW_HANDLER_NS / 2 => {
                state.pace = Pace::Quick { watched: None };
                let _ = epoll::delete(&self.dispatch, &self.link);
            }
            Pace::Quick { .. } if typical_ns > SLOW_HANDLER_NS => {
                state.pace = Pace::Slow;
                let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
                let _ = epoll::add(&self.dispatch, &self.link, EventData::new_u64(LINK), flags);
                self.set_watchdog(Duration::ZERO);
            }
            _ => {}
        }
    }

    fn set_watchdog(&self, interval: Duration) {
        let interval = Timespec { tv_sec: 0, tv_nsec: interval.subsec_nanos().into() };
        let timer = Itimerspec { it_interval: interval, it_value: interval };
        // The call fails only for invalid times, so the result is ignored.
        let _ = rustix::time::timerfd_settime(&self.watchdog, TimerfdTimerFlags::empty(), &timer);
    }

    /// Handles a watchdog tick. Classifies handlers as slow if a supposedly quick job is still running.
    fn check_quick_handlers(self: &Arc<Self>) {
        let _ = rustix::io::read(&self.watchdog, &mut [0; 8]);
        let mut state = lock(&self.state);
        let Pace::Quick { watched: Some(before) } = state.pace else { return };
        if state.begun != before {
            state.pace = Pace::Quick { watched: Some(state.begun) };
        } else if state.live.is_empty() {
            state.pace = Pace::Quick { watched: None };
            self.set_watchdog(Duration::ZERO);
        } else {
            self.typical_ns.store(ASSUMED_HANDLER_NS, Ordering::Relaxed);
            self.change_pace(&mut state, ASSUMED_HANDLER_NS);
            if !state.pending.is_empty() {
                self.wake_or_start_thread(&mut state);
            }
            drop(state);
            self.writer.flush();
        }
    }

    /// Wakes an idle handler thread to look for jobs. If no thread is idle, starts a thread unless the maximum
    /// number is reached.
    fn wake_or_start_thread(self: &Arc<Self>, state: &mut State) {
        if state.idle > 0 {
            self.wake_idle_thread(state);
        } else if state.threads < state.threads_max {
            let run = || {
                let pool = self.clone();
                move || pool.handle_jobs(Lifetime::WhileNeeded)
            };
            // The limit on the address space can be too low for large stacks.
            let spawned = Self::handler_thread(self.stack_bytes).spawn(run());
            let spawned = spawned.or_else(|_| Self::handler_thread(None).spawn(run()));
            // Without another thread, the existing threads run the jobs one after another. The supervisor still
            // enforces deadlines.
            state.threads += usize::from(spawned.is_ok());
        }
    }

    /// Wakes an idle thread to look for jobs. Must be called only if a thread is idle.
    fn wake_idle_thread(&self, state: &mut State) {
        if !state.is_wake_pending {
            state.is_wake_pending = true;
            if let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
                link::end_without_link(error);
            }
        }
    }

    /// Removes the calling thread from the thread count if there are more threads than allowed. If this returns true,
    /// the thread must exit. Must not be called while the thread is running a job.
    fn leave_if_surplus(&self) -> bool {
        let mut state = lock(&self.state);
        if !state.has_surplus() {
            return false;
        }
        state.threads -= 1;
        // Another idle thread must be woken if it may be surplus too, or if it has to take over this thread's work.
        let is_needed = state.has_surplus() || !state.pending.is_empty() || state.on_link == 0;
        if is_needed && state.idle > 0 {
            self.wake_idle_thread(&mut state);
        }
        true
    }

    /// Makes surplus idle threads exit before the permanent thread starts to wait in the same epoll instance. Otherwise
    /// the kernel might wake the permanent thread for every wake request, and the surplus threads would never exit.
    fn end_surplus_threads(&self) {
        let mut state = lock(&self.state);
        while state.has_surplus() && state.idle > 0 && state.pending.is_empty() {
            self.wake_idle_thread(&mut state);
            let wake_handled = self.wake_handled.wait_while(state, |state| state.is_wake_pending);
            state = wake_handled.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wait_for_work(&self) {
        let is_on_link = {
            let mut state = lock(&self.state);
            if state.can_begin() {
                return;
            }
            let is_on_link = state.pace == Pace::Slow || state.on_link == 0;
            state.idle += 1;
            state.on_link += usize::from(is_on_link);
            is_on_link
        };
        let token = wait_one(if is_on_link { &self.handlers } else { &self.parked }, None);
        if self.stop_waiting(is_on_link) {
            self.writer.flush();
        }
        if token == Some(LINK) {
            self.read_link();
        }
    }

    /// Marks the calling thread as no longer idle. If a wake request is pending, this thread takes it over and looks
    /// for jobs, so that no wake request stays pending without an idle thread. Returns true if a wake request was taken
    /// over. The caller must then flush, so that no client waits for an unsent reply.
    fn stop_waiting(&self, is_on_link: bool) -> bool {
        let mut state = lock(&self.state);
        state.idle -= 1;
        state.on_link -= usize::from(is_on_link);
        let is_wake_pending = state.is_wake_pending;
        if is_wake_pending {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            state.is_wake_pending = false;
            self.wake_handled.notify_all();
        }
        is_wake_pending
    }

    /// Runs a job and queues the reply. `context` is the calling thread's context, which is reused for later jobs.
    /// Returns true if the next job can begin before the reply is sent.
    fn run_job(&self, pending: Pending, context: &mut Option<Ctx<S>>) -> bool {
        let Pending { metadata, payload, loan, .. } = pending;
        let (number, job) = (metadata.number, Job { payload, loan });
        if let Some(loan) = &job.loan {
            *lock(&loan.copy_buffer) = lock(&self.reader).pool.take(loan.bytes());
        }
        let ctx = match context {
            Some(ctx) => {
                ctx.metadata = metadata;
                ctx
            }
            None => {
                let Some(state) = self.shared.get().cloned() else { return true };
                let (writer, result_bytes_max) = (self.writer.clone(), self.welcome.result_bytes_max);
                context.insert(Ctx { metadata, result_bytes_max, writer, state })
            }
        };
        let reply = run_user_code(|| (self.handler)(&job, ctx)).unwrap_or_else(Reply::Failed);
        if let Some(progress) = ctx.metadata.handle.progress.get() {
            progress.send_delayed(&self.writer, number);
        }
        let is_safe = self.send_reply(number, reply, job.loan.as_deref());
        if let Some(loan) = job.loan {
            loan.into_buffers().into_iter().for_each(|buffer| lock(&self.reader).pool.put(buffer));
        }
        if job.payload.capacity() > INLINE_PAYLOAD_BYTES_MAX {
            lock(&self.reader).pool.put(job.payload);
        }
        is_safe
    }

    fn send_reply(&self, number: u64, reply: Reply, loan: Option<&Loan>) -> bool {
        match reply {
            Reply::Result(result) => self.succeed(number, result, None, loan),
            Reply::Exited { status, error: None, output } => self.succeed(number, output, Some(status), loan),
            Reply::Failed(error) => self.fail(number, &error, Vec::new(), None),
            Reply::Exited { status, error: Some(error), output } => {
                self.fail(number, &error, output, Some(status))
            }
            Reply::ProgramCrashed { process, signal, message } => {
                let crashed = ProgramCrashed { signal, message: truncate(&message, MESSAGE_BYTES_MAX) };
                let process = process.to_le_bytes();
                let extensions = [(tag::PROCESS, &process[..])];
                self.writer.push_reply(kind::PROGRAM_CRASHED, number, &crashed, &extensions, Payload::NONE)
            }
        }
    }

    /// Queues a result. `status` is the exit status of the program that ran the job, or `None` if the job ran no
    /// program.
    fn succeed(&self, number: u64, result: Vec<u8>, status: Option<i32>, loan: Option<&Loan>) -> bool {
        let most = self.welcome.result_bytes_max;
        if result.len() as u64 > most {
            let message = format!("the result has {} bytes; max_result is {most}", result.len());
            return self.fail(number, &HandlerError::new(RESULT_TOO_LARGE, message), Vec::new(), status);
        }
        let is_large = result.len() > INLINE_PAYLOAD_BYTES_MAX || result.is_empty();
        let loan = loan.filter(|loan| is_large || loan.is_in_place());
        let lease_ref = loan.and_then(|loan| loan.result(&result)).filter(|lease_ref| lease_ref.bytes > 0);
        let payload = if lease_ref.is_some() { Payload::NONE } else { Payload::Owned(result) };
        let (lease_ref, status) = (lease_ref.map(LeaseRef::to_bytes), status.map(i32::to_le_bytes));
        let lease_ref = lease_ref.as_ref().map(|lease_ref| (tag::LEASE, &lease_ref[..]));
        let status = status.as_ref().map(|status| (tag::STATUS, &status[..]));
        // Usually, there are no extensions, and an empty vector needs no allocation.
        let extensions: Vec<_> = lease_ref.into_iter().chain(status).collect();
        self.writer.push_reply(kind::RESULT, number, &Empty, &extensions, payload)
    }

    /// Queues an error. `output` and `status` are the program's output and exit status, if a program ran the job.
    fn fail(&self, number: u64, error: &HandlerError, mut output: Vec<u8>, status: Option<i32>) -> bool {
        output.truncate(INLINE_PAYLOAD_BYTES_MAX);
        let status = status.map(i32::to_le_bytes);
        let status = status.as_ref().map(|status| (tag::STATUS, &status[..]));
        let failed = Failed {
            code: truncate(&error.code, CODE_BYTES_MAX),
            message: truncate(&error.message, MESSAGE_BYTES_MAX),
            retryable: error.retryable.into(),
            fault: match error.fault {
                Fault::Caller => 1,
                Fault::Dependency => 2,
            },
        };
        self.writer.push_reply(kind::FAILED, number, &failed, status.as_slice(), Payload::Owned(output))
    }

    // The link.

    /// Reads all available bytes from the link, and queues the received jobs.
    fn read_link(&self) {
        let mut reader = lock(&self.reader);
        let Reader { inbox, scratch, pool } = &mut *reader;
        let mut files = Vec::new();
        loop {
            let read = inbox.receive_by(scratch, |buffer| receive_with_files(&self.link, buffer, &mut files));
            let (received, mut batch) = match read {
                Ok(read) => read,
                Err(error) => {
                    link::end_without_link(Errno::from_io_error(&error).unwrap_or(Errno::CONNRESET))
                }
            };
            let now = Instant::now();
            let mut state = lock(&self.state);
            // Drops recalled jobs first, because a recalled job can arrive again with the same number.
            self.drop_recalled(&mut state);
            if !files.is_empty() {
                state.loans.received_files = std::mem::take(&mut files);
            }
            loop {
                match batch.next() {
                    Ok(Some(Item::Frame { header, metadata, payload })) => {
                        state.receive(header, metadata, || payload.to_vec(), now);
                    }
                    Ok(Some(Item::Large { header, metadata, payload })) => {
                        state.receive(header, &metadata, || payload, now);
                    }
                    Ok(Some(Item::Announced { header, .. })) => {
                        batch.accept(pool.take(header.payload_length()));
                    }
                    Ok(None) => break,
                    Err(_) => kill_self(),
                }
            }
            if state.has_surplus() && state.idle > 0 {
                self.wake_idle_thread(&mut state);
            }
            self.report_dropped(&mut state);
            self.confirm_files(&mut state);
            drop(state);
            match received {
                Received::More => {}
                Received::Drained => return,
                Received::Closed => kill_self(),
            }
        }
    }

    /// Drops pending jobs that the supervisor has recalled.
    fn drop_recalled(&self, state: &mut State) {
        let Some(claims) = self.claims else { return };
        while state.pending.front().is_some_and(|job| claims.is_recalled(job.arrival))
            && let Some(job) = state.pending.pop_front()
        {
            state.remove_live(&job.metadata);
            state.has_dropped = true;
        }
    }

    /// Returns a job to the supervisor because it was recalled just before it began. Sends the frame before any later
    /// job begins, because a later job could kill the process.
    fn return_job(&self, state: &mut State, job: &Pending) {
        state.remove_live(&job.metadata);
        let arrival = (tag::ARRIVAL, &job.arrival.to_le_bytes()[..]);
        self.writer.push_reply(kind::RETURNED, job.metadata.number, &Empty, &[arrival], Payload::NONE);
        self.writer.flush();
    }

    /// Sends a heartbeat if recalled jobs were dropped. The heartbeat tells the supervisor that this process can
    /// begin other jobs.
    fn report_dropped(&self, state: &mut State) {
        if std::mem::take(&mut state.has_dropped) {
            self.writer.push(kind::HEARTBEAT, 0, &Empty, Payload::NONE);
            self.writer.flush();
        }
    }

    /// Confirms received memory files. The supervisor can then send jobs that use these files.
    fn confirm_files(&self, state: &mut State) {
        if state.loans.unconfirmed.is_empty() {
            return;
        }
        for lease in state.loans.unconfirmed.drain(..) {
            self.writer.push(kind::FILES_TAKEN, lease, &Empty, Payload::NONE);
        }
        self.writer.flush();
    }

    // The dispatch thread.

    fn dispatch_loop(self: &Arc<Self>, signals: &OwnedFd) -> ExitCode {
        let interval = Duration::from_millis(self.welcome.heartbeat_ms.into());
        let mut next_heartbeat = Instant::now() + interval;
        let mut stopping = Shutdown::No;
        loop {
            let mut timeout =
                (!interval.is_zero()).then(|| next_heartbeat.saturating_duration_since(Instant::now()));
            if matches!(stopping, Shutdown::Requested | Shutdown::Queued) {
                timeout = Some(timeout.unwrap_or(STOPPING_RETRY_INTERVAL).min(STOPPING_RETRY_INTERVAL));
            }
            let slack = if stopping == Shutdown::No { interval / 8 } else { Duration::ZERO };
            match wait_with_slack(&self.dispatch, timeout, slack) {
                Some(LINK) => self.serve_link(),
                Some(WATCHDOG) => self.check_quick_handlers(),
                Some(_) => {
                    let mut byte = [0; 64];
                    let _ = rustix::io::read(signals, &mut byte);
                    if stopping == Shutdown::No {
                        stopping = self.begin_shutdown();
                    }
                }
                None => {}
            }
            if stopping == Shutdown::Requested && self.writer.try_send(kind::STOPPING, &Empty) {
                stopping = Shutdown::Queued;
            }
            if stopping == Shutdown::Queued && self.writer.try_flush() {
                stopping = Shutdown::Sent;
            }
            if !interval.is_zero() && Instant::now() >= next_heartbeat {
                // A heartbeat tells the supervisor that the link works, so the link is checked first.
                self.writer.check_link(&self.link);
                match self.welcome.heartbeat_time {
                    Some(time) => time.store(monotonic_ns().to_le(), Ordering::Release),
                    None => drop(self.writer.try_send(kind::HEARTBEAT, &Empty)),
                }
                self.send_delayed_progress();
                next_heartbeat = Instant::now() + interval;
            }
        }
    }

    /// Sends progress reports that were delayed by the rate limit.
    fn send_delayed_progress(&self) {
        let live: Vec<(u64, Arc<Handle>)> = {
            let state = lock(&self.state);
            let telling = state.live.iter().filter(|(_, handle)| handle.progress.get().is_some());
            telling.map(|(number, handle)| (*number, handle.clone())).collect()
        };
        let send = |(number, handle): &(u64, Arc<Handle>)| {
            handle.progress.get().is_some_and(|progress| progress.send_delayed(&self.writer, *number))
        };
        // Sends all reports in one write. Uses `count`, because `any` would stop at the first report.
        if live.iter().filter(|job| send(job)).count() > 0 {
            self.writer.flush();
        }
    }

    /// Handles SIGTERM. The supervisor can send jobs until it has processed STOPPING and replied with DRAIN,
    /// so the worker continues to run until it receives DRAIN. Before READY, no job can arrive, so the worker
    /// exits immediately.
    fn begin_shutdown(&self) -> Shutdown {
        if !lock(&self.state).is_ready {
            std::process::exit(0);
        }
        Shutdown::Requested
    }

    /// Reads the link on behalf of the handler threads. Wakes one of the threads if jobs are pending.
    fn serve_link(self: &Arc<Self>) {
        self.read_link();
        let mut state = lock(&self.state);
        if !state.pending.is_empty() {
            self.wake_or_start_thread(&mut state);
        }
        drop(state);
        self.end_if_drained();
    }

    fn end_if_drained(&self) {
        let state = lock(&self.state);
        if state.is_draining && state.live.is_empty() {
            drop(state);
            self.writer.flush();
            std::process::exit(0);
        }
    }
}

impl State {
    /// Removes a job from `live`, unless another job has reused its number.
    fn remove_live(&mut self, job: &JobMetadata) {
        if self.live.get(&job.number).is_some_and(|handle| Arc::ptr_eq(handle, &job.handle)) {
            self.live.remove(&job.number);
        }
    }

    /// Returns true if the number of threads exceeds the limit. Surplus threads exit instead of running another
    /// job. The permanent thread never exits.
    fn has_surplus(&self) -> bool {
        self.threads > self.threads_max
    }

    /// Returns true if a job is pending and fewer than `threads_max` jobs are running. Prefetched jobs count
    /// as pending.
    fn can_begin(&self) -> bool {
        let running = self.live.len().saturating_sub(self.pending.len());
        !self.pending.is_empty() && running < self.threads_max
    }

    /// Handles a frame that was received at the time `now`.
    fn receive(&mut self, header: Header, metadata: &[u8], payload: impl FnOnce() -> Vec<u8>, now: Instant) {
        match header.kind {
            kind::JOB => {
                let Ok((job, extensions)) =
                    codec::decode::<worker_protocol::Job<'_>>(metadata, &[tag::LEASE])
                else {
                    log::line("the supervisor sent a job that cannot be read");
                    kill_self();
                };
                let loan = extensions.get(tag::LEASE).map(|bytes| {
                    let lease_ref = LeaseRef::from_bytes(bytes);
                    lease_ref.and_then(|lease_ref| self.loans.payload(lease_ref)).unwrap_or_else(|| {
                        log::line("the supervisor sent a job in a file that this worker does not have");
                        kill_self();
                    })
                });
                let text = |bytes| std::str::from_utf8(bytes).ok().map(Box::from);
                let job = JobMetadata {
                    number: header.number,
                    operation: job.operation.into(),
                    tenant: job.tenant.into(),
                    traceparent: extensions.get(tag::TRACEPARENT).and_then(text),
                    deadline: now + Duration::from_micros(job.remaining_us).min(REMAINING_MAX),
                    handle: Arc::default(),
                };
                self.live.insert(job.number, job.handle.clone());
                self.arrived += 1;
                let payload = payload();
                self.pending.push_back(Pending { arrival: self.arrived, metadata: job, payload, loan });
            }
            kind::CANCEL_JOB => {
                if let Some(handle) = self.live.get(&header.number) {
                    handle.cancel();
                }
            }
            kind::FILES => self.loans.receive(metadata),
            kind::FILES_ENDED => self.loans.end(header.number),
            kind::DRAIN => self.is_draining = true,
            kind::LIMITS => {
                let Ok((limits, _)) = codec::decode::<Limits>(metadata, &[]) else {
                    log::line("the supervisor sent limits that cannot be read");
                    kill_self();
                };
                self.threads_max = threads_max(limits.max_in_flight);
            }
            _ => {}
        }
    }
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Waits like [`wait_one`], but a timeout can expire up to `slack_max` late. This lets the kernel combine the
/// wake-ups of many idle workers. Threads that are started by this thread do not inherit the timer slack.
fn wait_with_slack(epoll: &impl AsFd, timeout: Option<Duration>, slack_max: Duration) -> Option<u64> {
    let slack = timeout.and(NonZeroU64::new(u64::try_from(slack_max.as_nanos()).unwrap_or(u64::MAX)));
    // If the timer slack cannot be set, the thread wakes on time, which is harmless.
    let _ = slack.map(|slack| set_current_timer_slack(Some(slack)));
    let woken_by = wait_one(epoll, timeout);
    let _ = slack.map(|_| set_current_timer_slack(None));
    woken_by
}

/// Waits for one event of an epoll instance. Returns `None` on a timeout.
fn wait_one(epoll: &impl AsFd, timeout: Option<Duration>) -> Option<u64> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut event = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }];
    match epoll::wait(epoll, &mut event, timeout.as_ref()) {
        Ok(1) => Some(event[0].data.u64()),
        Ok(_) | Err(Errno::INTR) => None,
        Err(error) => link::end_without_link(error),
    }
}

/// Runs user code and converts a panic to an error. If the code has forked, the forked process exits here and does not
/// return.
pub(crate) fn run_user_code<T>(code: impl FnOnce() -> T) -> Result<T, HandlerError> {
    let done = catch_unwind(AssertUnwindSafe(code)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        HandlerError::new("panic", text.unwrap_or_else(|| "a handler panicked".into()))
    });
    ownership::end_forked_process();
    done
}

//! Tests of the pool with real threads and a real link. The tests act as the supervisor.

use std::mem::ManuallyDrop;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::ThreadId;

use bulkhead_shared::connection::{BufferPool, Outbox};
use bulkhead_shared::limits::IN_FLIGHT_CEILING;
use rustix::event::{PollFd, PollFlags, poll};

use super::*;
use crate::journal::Journal;

/// Maximum time to wait for a condition, which on an idle machine becomes true almost immediately.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Number of a job whose handler returns immediately. Handlers of other jobs with numbers below `RETURNS` wait for
/// cancellation.
const QUICK: u64 = 0;

/// Lowest job number, apart from `QUICK`, for which handlers return immediately.
const RETURNS: u64 = 1 << 32;

/// A running pool, and the supervisor's end of its link.
struct Fixture {
    pool: Arc<Pool<()>>,
    /// Never closed, because the pool would then kill the test program.
    link: ManuallyDrop<UnixStream>,
    begun: Receiver<(u64, ThreadId)>,
    answered: Receiver<u64>,
    /// Kind and number of each frame with a result, a returned job or a heartbeat. Used instead of `answered` if the
    /// pool has a journal.
    frames: Receiver<(u8, u64)>,
    init_thread: ThreadId,
}

impl Fixture {
    fn new(max_in_flight: u32) -> Self {
        let (fixture, init) = Self::before_ready(max_in_flight, None);
        init.send(()).unwrap();
        fixture.wait_idle(1);
        fixture
    }

    fn with_journal(max_in_flight: u32, journal: Journal) -> Self {
        let (fixture, init) = Self::before_ready(max_in_flight, Some(journal));
        init.send(()).unwrap();
        fixture.wait_idle(1);
        fixture
    }

    /// Starts a pool whose `init` waits until the test sends a message over the returned channel.
    fn before_ready(max_in_flight: u32, journal: Option<Journal>) -> (Self, Sender<()>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let link = OwnedFd::from(theirs);
        let writer = Arc::new(Writer::new(&link).unwrap());
        let has_journal = journal.is_some();
        journal.into_iter().for_each(|journal| writer.set_journal(journal));
        let (tell, begun) = channel();
        let handler = move |_: &Job, ctx: &Ctx<()>| {
            // Fails once the test has ended.
            let _ = tell.send((ctx.number(), std::thread::current().id()));
            if ctx.number() != QUICK && ctx.number() < RETURNS {
                let event = ctx.cancellation().unwrap();
                poll(&mut [PollFd::new(&event, PollFlags::IN)], None).unwrap();
            }
            Reply::Result(Vec::new())
        };
        let welcome = Welcome {
            seal: None,
            threads_max: threads_max(max_in_flight),
            heartbeat_ms: 0,
            heartbeat_time: None,
            journal_file: None,
            result_bytes_max: 100,
        };
        let pool = Pool::new(link, welcome, Reader::new(), writer, Box::new(handler), None).unwrap();
        let (init, go) = channel();
        let (tell_thread, init_thread) = channel();
        let running = pool.clone();
        std::thread::spawn(move || {
            let (_open, signals) = UnixStream::pair().unwrap();
            running.run(&signals.into(), move |_| {
                tell_thread.send(std::thread::current().id()).unwrap();
                let _ = go.recv();
                Ok(())
            })
        });
        let init_thread = init_thread.recv_timeout(TIMEOUT).unwrap();
        let (answered, frames) = listen(&ours, has_journal);
        (Self { pool, link: ManuallyDrop::new(ours), begun, answered, frames, init_thread }, init)
    }

    /// Sends several frames in one write.
    fn send(&self, fill: impl FnOnce(&mut Outbox)) {
        let mut outbox = Outbox::default();
        fill(&mut outbox);
        while !outbox.flush(&*self.link, &mut BufferPool::default()).unwrap() {
            let limit = Timespec::try_from(TIMEOUT).unwrap();
            let count = poll(&mut [PollFd::new(&*self.link, PollFlags::OUT)], Some(&limit)).unwrap();
            assert_eq!(count, 1, "the pool does not read the link");
        }
    }

    fn send_jobs(&self, numbers: impl IntoIterator<Item = u64>) {
        self.send(|outbox| numbers.into_iter().for_each(|number| push_job(outbox, number)));
    }

    fn release(&self, numbers: impl IntoIterator<Item = u64>) {
        self.send(|outbox| {
            for number in numbers {
                outbox.push(kind::CANCEL_JOB, number, &Empty, &[], Payload::NONE).unwrap();
            }
        });
    }

    fn limit(&self, max_in_flight: u32) {
        self.send(|outbox| push_limits(outbox, max_in_flight));
    }

    /// Returns the sorted numbers of the next `count` jobs that begin.
    fn next_begun(&self, count: usize) -> Vec<u64> {
        let mut numbers: Vec<u64> =
            (0..count).map(|_| self.begun.recv_timeout(TIMEOUT).expect("a job begins").0).collect();
        numbers.sort_unstable();
        numbers
    }

    fn wait_for(&self, condition_text: &str, condition: impl Fn(&State) -> bool) {
        let began = Instant::now();
        while !condition(&lock(&self.pool.state)) {
            assert!(began.elapsed() < TIMEOUT, "waited {TIMEOUT:?}: {condition_text}");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    fn wait_idle(&self, threads: usize) {
        self.wait_for("all threads are idle", |state| {
            (state.threads, state.idle, state.live.len()) == (threads, threads, 0)
        });
    }
}

/// Receives frames on a separate thread. The first channel gets the number of each result. If `with_kinds` is true,
/// only the second channel is used, and it gets the kind and number of each result, returned job and heartbeat.
fn listen(link: &UnixStream, with_kinds: bool) -> (Receiver<u64>, Receiver<(u8, u64)>) {
    let link = link.try_clone().unwrap();
    let (tell, answered) = channel();
    let (tell_kinds, frames) = channel();
    std::thread::spawn(move || {
        let Reader { mut inbox, mut scratch, .. } = Reader::new();
        loop {
            poll(&mut [PollFd::new(&link, PollFlags::IN)], None).unwrap();
            let (_, mut batch) = inbox.receive(&link, &mut scratch).unwrap();
            while let Some(Item::Frame { header, .. }) = batch.next().unwrap() {
                // Fails once the test has ended.
                let _ = match header.kind {
                    kind::RESULT | kind::RETURNED | kind::HEARTBEAT if with_kinds => {
                        tell_kinds.send((header.kind, header.number)).is_ok()
                    }
                    kind::RESULT => tell.send(header.number).is_ok(),
                    _ => false,
                };
            }
        }
    });
    (answered, frames)
}

fn push_job(outbox: &mut Outbox, number: u64) {
    let job = worker_protocol::Job { operation: "", tenant: "", remaining_us: 60_000_000 };
    outbox.push(kind::JOB, number, &job, &[], Payload::NONE).unwrap();
}

fn push_limits(outbox: &mut Outbox, max_in_flight: u32) {
    outbox.push(kind::LIMITS, 0, &Limits { max_in_flight }, &[], Payload::NONE).unwrap();
}

#[test]
fn surplus_jobs_wait_in_order_of_arrival() {
    let fixture = Fixture::new(1);
    fixture.send_jobs(1..=4);
    for number in 1..=4 {
        assert_eq!(fixture.next_begun(1), [number]);
        fixture.wait_for("the other jobs wait", |state| state.pending.len() as u64 == 4 - number);
        assert!(fixture.begun.try_recv().is_err());
        fixture.release([number]);
    }
    fixture.wait_idle(1);
}

#[test]
fn higher_limit_runs_more_jobs_at_once() {
    let fixture = Fixture::new(1);
    fixture.send_jobs(1..=2);
    assert_eq!(fixture.next_begun(1), [1]);
    // The second job begins as soon as the limit is raised.
    fixture.limit(3);
    assert_eq!(fixture.next_begun(1), [2]);
    fixture.send_jobs([3]);
    assert_eq!(fixture.next_begun(1), [3]);
    // A higher limit starts no thread until the next job arrives.
    fixture.send(|outbox| {
        push_limits(outbox, 8);
        push_job(outbox, 4);
    });
    assert_eq!(fixture.next_begun(1), [4]);
    assert_eq!(lock(&fixture.pool.state).threads, 4);
    fixture.release(1..=4);
    fixture.wait_idle(4);
}

#[test]
fn lower_limit_stops_threads_after_their_jobs() {
    let fixture = Fixture::new(4);
    fixture.send_jobs(1..=4);
    let begun: Vec<_> = (0..4).map(|_| fixture.begun.recv_timeout(TIMEOUT).expect("a job begins")).collect();
    fixture.limit(1);
    fixture.wait_for("the limit is known", |state| state.threads_max == 1);
    let (stays, others): (Vec<_>, Vec<_>) =
        begun.into_iter().partition(|&(_, thread)| thread == fixture.init_thread);
    fixture.send_jobs([5]);
    for ((number, _), left) in others.into_iter().zip([3, 2, 1]) {
        fixture.release([number]);
        // The thread exits instead of running the pending job.
        fixture.wait_for("the thread exits after the job", |state| {
            (state.threads, state.live.len()) == (left, left + 1)
        });
    }
    fixture.release([stays[0].0]);
    assert_eq!(fixture.begun.recv_timeout(TIMEOUT).unwrap(), (5, fixture.init_thread));
    fixture.limit(2);
    fixture.send_jobs([6]);
    assert_eq!(fixture.next_begun(1), [6], "the job runs concurrently with the other job");
}

#[test]
fn lower_limit_stops_idle_threads_but_not_init_thread() {
    for round in 0..20 {
        let fixture = Fixture::new(6);
        fixture.send_jobs(1..=6);
        fixture.next_begun(6);
        fixture.release(1..=6);
        fixture.wait_idle(6);
        if round % 2 == 1 {
            // With quick handlers, one thread waits for the link and the others are parked.
            fixture.pool.typical_ns.store(0, Ordering::Relaxed);
            fixture.send_jobs([QUICK]);
            fixture.next_begun(1);
            fixture.wait_idle(6);
        }
        fixture.limit(3);
        fixture.wait_idle(3);
        fixture.limit(1);
        fixture.wait_idle(1);
        fixture.send_jobs([7]);
        assert_eq!(fixture.begun.recv_timeout(TIMEOUT).unwrap(), (7, fixture.init_thread));
        fixture.release([7]);
        fixture.wait_idle(1);
    }
}

#[test]
fn limits_received_before_ready_take_effect() {
    let (fixture, init) = Fixture::before_ready(1, None);
    for limit in [9, 0, 3] {
        fixture.limit(limit);
    }
    fixture.wait_for("the limits are known", |state| state.threads_max == 3);
    init.send(()).unwrap();
    fixture.wait_idle(1);
    fixture.send_jobs(1..=3);
    assert_eq!(fixture.next_begun(3), [1, 2, 3]);
}

#[test]
fn thread_count_is_clamped() {
    let fixture = Fixture::new(u32::MAX);
    assert_eq!(lock(&fixture.pool.state).threads_max, IN_FLIGHT_CEILING as usize);
    fixture.limit(0);
    fixture.wait_for("a single thread is left", |state| state.threads_max == 1);
    fixture.send_jobs([1]);
    assert_eq!(fixture.next_begun(1), [1]);
    fixture.limit(u32::MAX);
    fixture.wait_for("the maximum", |state| state.threads_max == IN_FLIGHT_CEILING as usize);
    let repeated = [5; 100];
    fixture.send(|outbox| repeated.into_iter().for_each(|limit| push_limits(outbox, limit)));
    fixture.wait_for("the last limit applies", |state| state.threads_max == 5);
    fixture.release([1]);
    fixture.wait_idle(1);
}

/// Makes a wake request just after the link has woken the only idle thread. That thread handles the request
/// and starts other threads for the remaining jobs.
#[test]
fn thread_woken_by_link_handles_wake_request() {
    let fixture = Fixture::new(3);
    let mut state = lock(&fixture.pool.state);
    // The arriving jobs wake the idle thread, which then waits for the lock.
    fixture.send_jobs(1..=3);
    fixture.pool.wake_or_start_thread(&mut state);
    assert!(state.is_wake_pending);
    drop(state);
    assert_eq!(fixture.next_begun(3), [1, 2, 3]);
    let state = lock(&fixture.pool.state);
    assert_eq!((state.idle, state.is_wake_pending), (0, false));
}

/// Changes the limit at random while jobs arrive and end. The random number generator has a fixed seed.
#[test]
fn jobs_run_once_despite_changing_limits() {
    const LIMITS: [u32; 8] = [0, 1, 1, 2, 3, 5, 16, u32::MAX];
    const AT_ONCE_MAX: usize = 24;
    let fixture = Fixture::new(2);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    let (mut job_count, mut held) = (0, Vec::new());
    for _ in 0..3000 {
        match next(4) {
            0 => fixture.limit(LIMITS[next(LIMITS.len())]),
            1 if held.len() < AT_ONCE_MAX => {
                job_count += 1;
                held.push(job_count);
                fixture.send_jobs([job_count]);
            }
            2 => fixture.send(|outbox| {
                push_limits(outbox, LIMITS[next(LIMITS.len())]);
                job_count += 1;
                held.push(job_count);
                push_job(outbox, job_count);
            }),
            _ if !held.is_empty() => fixture.release([held.swap_remove(next(held.len()))]),
            _ => {}
        }
        // Ends the oldest job, which is certain to be running because jobs begin in order.
        while held.len() > AT_ONCE_MAX {
            fixture.release([held.remove(0)]);
        }
    }
    fixture.release(held);
    let everything: Vec<u64> = (1..=job_count).collect();
    assert_eq!(fixture.next_begun(everything.len()), everything);
    let mut answered: Vec<u64> =
        everything.iter().map(|_| fixture.answered.recv_timeout(TIMEOUT).expect("a reply")).collect();
    answered.sort_unstable();
    assert_eq!(answered, everything);
    fixture.limit(1);
    fixture.wait_idle(1);
    fixture.wait_for("no wake-up is pending", |state| !state.is_wake_pending);
    let state = lock(&fixture.pool.state);
    assert_eq!((state.begun, state.pending.len()), (job_count, 0));
}

#[test]
fn init_thread_does_not_begin_jobs_above_the_limit() {
    let fixture = Fixture::new(2);
    fixture.send_jobs(1..=2);
    let begun: Vec<_> = (0..2).map(|_| fixture.begun.recv_timeout(TIMEOUT).expect("a job begins")).collect();
    let of_first = |(_, thread): &&(u64, ThreadId)| *thread == fixture.init_thread;
    let (first, _) = *begun.iter().find(of_first).expect("the first thread runs a job");
    let other = 3 - first;
    fixture.limit(1);
    fixture.wait_for("the limit is known", |state| state.threads_max == 1);
    fixture.release([first]);
    assert_eq!(fixture.answered.recv_timeout(TIMEOUT), Ok(first));
    // The first thread waits for the link. The other thread uses up the limit of one job, so the new job stays pending.
    fixture.send_jobs([QUICK]);
    fixture.wait_for("the job has arrived but not begun", |state| state.arrived == 3 && state.idle == 1);
    assert_eq!(lock(&fixture.pool.state).pending.len(), 1);
    fixture.release([other]);
    assert_eq!(fixture.next_begun(1), [QUICK]);
    assert_eq!([(); 2].map(|()| fixture.answered.recv_timeout(TIMEOUT).expect("a reply")), [other, QUICK]);
}

/// Creates a journal. Returns the worker's mapping of the journal, and the counters in the supervisor's mapping.
fn journal() -> (Journal, Claims) {
    let file = rustix::fs::memfd_create("journal", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bulkhead_shared::journal::JOURNAL_BYTES as u64).unwrap();
    let theirs = Journal::map(&file).unwrap();
    (Journal::map(&file).unwrap(), theirs.claims())
}

/// Jobs arrive and are recalled at random. Each job either runs once or is returned to the supervisor.
#[test]
fn each_job_runs_once_or_is_recalled() {
    for max_in_flight in [1, 3] {
        let (journal, claims) = journal();
        let fixture = Fixture::with_journal(max_in_flight, journal);
        // Apart from the offset `RETURNS`, the number of each job equals its arrival number.
        let (mut sent, mut recalled) = (0, 0);
        let (mut ran, mut returned) = (Vec::new(), Vec::new());
        for round in 0..3000 {
            let count = 1 + round % 40;
            fixture.send_jobs((sent + 1..=sent + count).map(|number| number + RETURNS));
            sent += count;
            (0..round % 700).for_each(|_| std::hint::spin_loop());
            let begun = claims.recall(sent);
            let runs: Vec<u64> = (recalled + 1..=begun).collect();
            while ran.len() + returned.iter().filter(|number| runs.contains(number)).count() < runs.len() {
                match fixture.frames.recv_timeout(TIMEOUT).expect("the job runs or is returned") {
                    (kind::RESULT, number) => ran.push(number - RETURNS),
                    (kind::RETURNED, number) => returned.push(number - RETURNS),
                    _ => {}
                }
            }
            ran.sort_unstable();
            let last = returned.iter().copied().find(|number| runs.contains(number));
            let expected: Vec<u64> = runs.iter().copied().filter(|number| Some(*number) != last).collect();
            assert_eq!(ran, expected, "of {runs:?}; returned: {returned:?}");
            assert!(last.is_none_or(|last| last == begun), "only the last job can be returned");
            // After a recall, only the job that follows the last job to begin can be returned.
            assert!(returned.iter().all(|number| *number <= begun + 1));
            (ran, returned) = (Vec::new(), Vec::new());
            recalled = sent;
        }
        fixture.wait_for("recalled jobs are dropped", |state| state.live.is_empty());
    }
}

#[test]
fn recalled_jobs_are_dropped_and_reported_in_one_heartbeat() {
    let (journal, claims) = journal();
    let fixture = Fixture::with_journal(1, journal);
    fixture.send_jobs([1, 2, 3, RETURNS]);
    assert_eq!(fixture.next_begun(1), [1]);
    fixture.wait_for("all jobs have arrived", |state| state.arrived == 4);
    assert_eq!(claims.recall(4), 1);
    // Sends another job with the number of a recalled job.
    fixture.send_jobs([3]);
    fixture.wait_for("only the new job is left", |state| state.pending.len() == 1 && state.live.len() == 2);
    fixture.release([3, 1]);
    assert_eq!(fixture.next_begun(1), [3]);
    let frames = [(); 3].map(|()| fixture.frames.recv_timeout(TIMEOUT).expect("a frame"));
    assert_eq!(frames, [(kind::HEARTBEAT, 0), (kind::RESULT, 1), (kind::RESULT, 3)]);
}

/// A supervisor can send a job again, with the same number, as soon as it has read the reply.
#[test]
fn resent_job_can_be_cancelled() {
    let fixture = Fixture::new(1);
    fixture.send_jobs([1]);
    assert_eq!(fixture.next_begun(1), [1]);
    let first = lock(&fixture.pool.state).live[&1].clone();
    fixture.send_jobs([1]);
    fixture.wait_for("the job has arrived again", |state| state.arrived == 2);
    first.cancel();
    assert_eq!(fixture.next_begun(1), [1]);
    assert!(lock(&fixture.pool.state).live.contains_key(&1), "the second attempt keeps its handle");
    fixture.release([1]);
    assert_eq!([(); 2].map(|()| fixture.answered.recv_timeout(TIMEOUT).expect("a reply")), [1, 1]);
    fixture.wait_idle(1);
}

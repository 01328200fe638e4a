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

/// Maximum time for conditions that become true immediately on a healthy, idle machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Number of the job whose handler returns immediately. Other handlers wait until they are cancelled.
const QUICK: u64 = 0;

/// Handlers of jobs with this number or higher return immediately, too.
const RETURNS: u64 = 1 << 32;

/// A running pool, and the supervisor's end of its link.
struct Stage {
    pool: Arc<Pool<()>>,
    /// Never closed: a worker that loses its supervisor kills its process, which is the test's process.
    link: ManuallyDrop<UnixStream>,
    begun: Receiver<(u64, ThreadId)>,
    answered: Receiver<u64>,
    /// Kind and number of each frame that is not in `answered`, heartbeats included.
    told: Receiver<(u8, u64)>,
    init_thread: ThreadId,
}

impl Stage {
    fn new(max_in_flight: u32) -> Self {
        let (stage, init) = Self::before_ready(max_in_flight, None);
        init.send(()).unwrap();
        stage.wait_idle(1);
        stage
    }

    fn with_journal(max_in_flight: u32, journal: Journal) -> Self {
        let (stage, init) = Self::before_ready(max_in_flight, Some(journal));
        init.send(()).unwrap();
        stage.wait_idle(1);
        stage
    }

    /// Starts a pool whose `init` ends when the caller sends a message.
    fn before_ready(max_in_flight: u32, journal: Option<Journal>) -> (Self, Sender<()>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let link = OwnedFd::from(theirs);
        let writer = Arc::new(Writer::new(&link).unwrap());
        let has_journal = journal.is_some();
        journal.into_iter().for_each(|journal| writer.set_journal(journal));
        let (tell, begun) = channel();
        let handler = move |_: &Job, ctx: &Ctx<()>| {
            // The test may have ended already.
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
            result_bytes_max: 100,
        };
        let pool = Pool::new(link, welcome, Reader::new(), writer, Box::new(handler)).unwrap();
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
        let (answered, told) = listen(&ours, has_journal);
        (Self { pool, link: ManuallyDrop::new(ours), begun, answered, told, init_thread }, init)
    }

    /// Sends frames in one write.
    fn send(&self, fill: impl FnOnce(&mut Outbox)) {
        let mut outbox = Outbox::default();
        fill(&mut outbox);
        while !outbox.flush(&*self.link, &mut BufferPool::default()).unwrap() {
            poll(&mut [PollFd::new(&*self.link, PollFlags::OUT)], None).unwrap();
        }
    }

    fn give(&self, numbers: impl IntoIterator<Item = u64>) {
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

    /// Returns the numbers of the next `count` jobs that begin, sorted.
    fn next_begun(&self, count: usize) -> Vec<u64> {
        let mut numbers: Vec<u64> =
            (0..count).map(|_| self.begun.recv_timeout(TIMEOUT).expect("a job begins").0).collect();
        numbers.sort_unstable();
        numbers
    }

    fn wait_for(&self, what: &str, condition: impl Fn(&State) -> bool) {
        let began = Instant::now();
        while !condition(&lock(&self.pool.state)) {
            assert!(began.elapsed() < TIMEOUT, "waited {TIMEOUT:?} in vain: {what}");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    fn wait_idle(&self, threads: usize) {
        self.wait_for("as many threads, all of them idle", |state| {
            (state.threads, state.idle, state.live.len()) == (threads, threads, 0)
        });
    }
}

/// Receives the numbers of answered and returned jobs; with `with_kinds`, kinds and heartbeats too.
fn listen(link: &UnixStream, with_kinds: bool) -> (Receiver<u64>, Receiver<(u8, u64)>) {
    let link = link.try_clone().unwrap();
    let (tell, answered) = channel();
    let (tell_kinds, told) = channel();
    std::thread::spawn(move || {
        let Reader { mut inbox, mut scratch, .. } = Reader::new();
        loop {
            poll(&mut [PollFd::new(&link, PollFlags::IN)], None).unwrap();
            let (_, mut batch) = inbox.receive(&link, &mut scratch).unwrap();
            while let Some(Item::Frame { header, .. }) = batch.next().unwrap() {
                // The test may have ended already.
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
    (answered, told)
}

fn push_job(outbox: &mut Outbox, number: u64) {
    let job = worker_protocol::Job { operation: "", tenant: "", remaining_us: 60_000_000 };
    outbox.push(kind::JOB, number, &job, &[], Payload::NONE).unwrap();
}

fn push_limits(outbox: &mut Outbox, max_in_flight: u32) {
    outbox.push(kind::LIMITS, 0, &Limits { max_in_flight }, &[], Payload::NONE).unwrap();
}

#[test]
fn more_jobs_than_told_wait_for_a_thread_in_their_order() {
    let stage = Stage::new(1);
    stage.give(1..=4);
    for number in 1..=4 {
        assert_eq!(stage.next_begun(1), [number]);
        stage.wait_for("the rest waits", |state| state.pending.len() as u64 == 4 - number);
        assert!(stage.begun.try_recv().is_err());
        stage.release([number]);
    }
    stage.wait_idle(1);
}

#[test]
fn a_higher_limit_has_more_jobs_run_at_once() {
    let stage = Stage::new(1);
    stage.give(1..=2);
    assert_eq!(stage.next_begun(1), [1]);
    // A job above the limit runs when the limit allows.
    stage.limit(3);
    assert_eq!(stage.next_begun(1), [2]);
    stage.give([3]);
    assert_eq!(stage.next_begun(1), [3]);
    // Threads are started for jobs, not for limits.
    stage.send(|outbox| {
        push_limits(outbox, 8);
        push_job(outbox, 4);
    });
    assert_eq!(stage.next_begun(1), [4]);
    assert_eq!(lock(&stage.pool.state).threads, 4);
    stage.release(1..=4);
    stage.wait_idle(4);
}

#[test]
fn a_lower_limit_lets_jobs_end_and_then_threads() {
    let stage = Stage::new(4);
    stage.give(1..=4);
    let begun: Vec<_> = (0..4).map(|_| stage.begun.recv_timeout(TIMEOUT).expect("a job begins")).collect();
    stage.limit(1);
    stage.wait_for("it is heard", |state| state.threads_max == 1);
    let (stays, others): (Vec<_>, Vec<_>) =
        begun.into_iter().partition(|&(_, thread)| thread == stage.init_thread);
    stage.give([5]);
    for ((number, _), left) in others.into_iter().zip([3, 2, 1]) {
        stage.release([number]);
        // The thread takes no other job.
        stage.wait_for("each ends with its job", |state| {
            (state.threads, state.live.len()) == (left, left + 1)
        });
    }
    stage.release([stays[0].0]);
    assert_eq!(stage.begun.recv_timeout(TIMEOUT).unwrap(), (5, stage.init_thread));
    stage.limit(2);
    stage.give([6]);
    assert_eq!(stage.next_begun(1), [6], "beside the other");
}

#[test]
fn idle_threads_end_but_for_the_one_that_init_ran_on() {
    for round in 0..20 {
        let stage = Stage::new(6);
        stage.give(1..=6);
        stage.next_begun(6);
        stage.release(1..=6);
        stage.wait_idle(6);
        if round % 2 == 1 {
            // Quick handlers: one thread waits for the link, the others are parked.
            stage.pool.typical_ns.store(0, Ordering::Relaxed);
            stage.give([QUICK]);
            stage.next_begun(1);
            stage.wait_idle(6);
        }
        stage.limit(3);
        stage.wait_idle(3);
        stage.limit(1);
        stage.wait_idle(1);
        stage.give([7]);
        assert_eq!(stage.begun.recv_timeout(TIMEOUT).unwrap(), (7, stage.init_thread));
        stage.release([7]);
        stage.wait_idle(1);
    }
}

#[test]
fn limits_may_come_before_the_worker_is_ready() {
    let (stage, init) = Stage::before_ready(1, None);
    for limit in [9, 0, 3] {
        stage.limit(limit);
    }
    stage.wait_for("they are heard", |state| state.threads_max == 3);
    init.send(()).unwrap();
    stage.wait_idle(1);
    stage.give(1..=3);
    assert_eq!(stage.next_begun(3), [1, 2, 3]);
}

#[test]
fn there_is_at_least_one_thread_and_an_end_to_them() {
    let stage = Stage::new(u32::MAX);
    assert_eq!(lock(&stage.pool.state).threads_max, IN_FLIGHT_CEILING as usize);
    stage.limit(0);
    stage.wait_for("one is left", |state| state.threads_max == 1);
    stage.give([1]);
    assert_eq!(stage.next_begun(1), [1]);
    stage.limit(u32::MAX);
    stage.wait_for("the most", |state| state.threads_max == IN_FLIGHT_CEILING as usize);
    let repeated = [5; 100];
    stage.send(|outbox| repeated.into_iter().for_each(|limit| push_limits(outbox, limit)));
    stage.wait_for("the last one counts", |state| state.threads_max == 5);
    stage.release([1]);
    stage.wait_idle(1);
}

/// A call for help arrives when the link has just woken the only idle thread. The thread answers the call,
/// and calls others for the jobs behind its own.
#[test]
fn a_thread_that_the_link_has_woken_answers_the_call() {
    let stage = Stage::new(3);
    let mut state = lock(&stage.pool.state);
    // The thread is woken by the link first, and waits for the lock.
    stage.give(1..=3);
    stage.pool.wake_or_start_thread(&mut state);
    assert!(state.is_wake_pending);
    drop(state);
    assert_eq!(stage.next_begun(3), [1, 2, 3]);
    let state = lock(&stage.pool.state);
    assert_eq!((state.idle, state.is_wake_pending), (0, false));
}

/// Raises and lowers the limit while jobs come and go, from a seeded generator.
#[test]
fn jobs_are_all_run_once_whatever_the_limits_do() {
    const LIMITS: [u32; 8] = [0, 1, 1, 2, 3, 5, 16, u32::MAX];
    const AT_ONCE_MAX: usize = 24;
    let stage = Stage::new(2);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    let (mut given, mut held) = (0, Vec::new());
    for _ in 0..3000 {
        match next(4) {
            0 => stage.limit(LIMITS[next(LIMITS.len())]),
            1 if held.len() < AT_ONCE_MAX => {
                given += 1;
                held.push(given);
                stage.give([given]);
            }
            2 => stage.send(|outbox| {
                push_limits(outbox, LIMITS[next(LIMITS.len())]);
                given += 1;
                held.push(given);
                push_job(outbox, given);
            }),
            _ if !held.is_empty() => stage.release([held.swap_remove(next(held.len()))]),
            _ => {}
        }
        // The oldest jobs run first, so released jobs end.
        while held.len() > AT_ONCE_MAX {
            stage.release([held.remove(0)]);
        }
    }
    stage.release(held);
    let everything: Vec<u64> = (1..=given).collect();
    assert_eq!(stage.next_begun(everything.len()), everything);
    let mut answered: Vec<u64> =
        everything.iter().map(|_| stage.answered.recv_timeout(TIMEOUT).expect("an answer")).collect();
    answered.sort_unstable();
    assert_eq!(answered, everything);
    stage.limit(1);
    stage.wait_idle(1);
    stage.wait_for("every call is answered", |state| !state.is_wake_pending);
    let state = lock(&stage.pool.state);
    assert_eq!((state.begun, state.pending.len()), (given, 0));
}

#[test]
fn the_first_thread_begins_no_job_beside_as_many_as_may_run() {
    let stage = Stage::new(2);
    stage.give(1..=2);
    let begun: Vec<_> = (0..2).map(|_| stage.begun.recv_timeout(TIMEOUT).expect("a job begins")).collect();
    let of_first = |(_, thread): &&(u64, ThreadId)| *thread == stage.init_thread;
    let (first, _) = *begun.iter().find(of_first).expect("the first thread runs one of them");
    let other = 3 - first;
    stage.limit(1);
    stage.wait_for("the limit is known", |state| state.threads_max == 1);
    stage.release([first]);
    assert_eq!(stage.answered.recv_timeout(TIMEOUT), Ok(first));
    // The thread waits for the link, with a pending job behind the running one.
    stage.give([QUICK]);
    stage.wait_for("it is seen and not begun", |state| state.arrived == 3 && state.idle == 1);
    assert_eq!(lock(&stage.pool.state).pending.len(), 1);
    stage.release([other]);
    assert_eq!(stage.next_begun(1), [QUICK]);
    assert_eq!(stage.answered.iter().take(2).collect::<Vec<_>>(), [other, QUICK]);
}

/// Creates a journal, and the supervisor's view of its counters.
fn journal() -> (Journal, Claims) {
    let file = rustix::fs::memfd_create("journal", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bulkhead_shared::journal::JOURNAL_BYTES as u64).unwrap();
    let theirs = Journal::map(file.try_clone().unwrap()).unwrap();
    (Journal::map(file).unwrap(), theirs.claims())
}

/// Jobs arrive and are recalled at random. Each job either runs once or is returned to the supervisor.
#[test]
fn each_job_runs_or_is_taken_back() {
    for max_in_flight in [1, 3] {
        let (journal, numbers) = journal();
        let stage = Stage::with_journal(max_in_flight, journal);
        // Job number and arrival number are equal here.
        let (mut sent, mut taken) = (0, 0);
        let (mut ran, mut returned) = (Vec::new(), Vec::new());
        for round in 0..3000 {
            let count = 1 + round % 40;
            stage.give((sent + 1..=sent + count).map(|number| number + RETURNS));
            sent += count;
            (0..round % 700).for_each(|_| std::hint::spin_loop());
            let begun = numbers.recall(sent);
            let runs: Vec<u64> = (taken + 1..=begun).collect();
            while ran.len() + returned.iter().filter(|number| runs.contains(number)).count() < runs.len() {
                match stage.told.recv_timeout(TIMEOUT).expect("it runs or comes back") {
                    (kind::RESULT, number) => ran.push(number - RETURNS),
                    (kind::RETURNED, number) => returned.push(number - RETURNS),
                    _ => {}
                }
            }
            ran.sort_unstable();
            let last = returned.iter().copied().find(|number| runs.contains(number));
            let expected: Vec<u64> = runs.iter().copied().filter(|number| Some(*number) != last).collect();
            assert_eq!(ran, expected, "of {runs:?}; given back: {returned:?}");
            assert!(last.is_none_or(|last| last == begun), "only the last can come back");
            // A job returned after its recall is the one after the last begun.
            assert!(returned.iter().all(|number| *number <= begun + 1));
            (ran, returned) = (Vec::new(), Vec::new());
            taken = sent;
        }
        stage.wait_for("what was taken back is forgotten", |state| state.live.is_empty());
    }
}

#[test]
fn what_was_taken_back_is_forgotten_with_one_word() {
    let (journal, numbers) = journal();
    let stage = Stage::with_journal(1, journal);
    stage.give([1, 2, 3, RETURNS]);
    assert_eq!(stage.next_begun(1), [1]);
    stage.wait_for("all jobs are there", |state| state.arrived == 4);
    assert_eq!(numbers.recall(4), 1);
    // Reuses the number for another job.
    stage.give([3]);
    stage.wait_for("only that is left", |state| state.pending.len() == 1 && state.live.len() == 2);
    stage.release([3, 1]);
    assert_eq!(stage.next_begun(1), [3]);
    let told: Vec<_> = stage.told.iter().take(3).collect();
    assert_eq!(told, [(kind::HEARTBEAT, 0), (kind::RESULT, 1), (kind::RESULT, 3)]);
}

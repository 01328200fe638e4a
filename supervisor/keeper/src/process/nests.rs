//! Nests: pid namespaces, each with one template and the workers that the template forks.
//!
//! The processes are children of the namespace's first process (`spawn/nest.rs`), which reports each exit and
//! the remaining children. All children except the template, the workers and possible workers being forked
//! were left behind by a worker. The keeper orders the first process to kill these. Children that survive
//! this are killed while the whole namespace is stopped. If some survive this as well, the keeper retries at
//! longer intervals and the worker counts as swept. So the keeper never searches `/proc`, and nests do not
//! affect each other.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::{Child, NEST, Process, Stage, register_again};
use crate::confine::cgroup::Leaf;
use crate::socket::{self, Outbox, Received};
use crate::spawn::{END_BYTES_MAX, End, NAMED_MAX, NestOrder};
use crate::{Exit, ReportMessage, Usage, wait};

/// Maximum number of exits read at a time.
const ENDS_MAX: usize = 64;

/// Maximum number of remembered exits of unknown processes. The template may be about to name some of these
/// processes.
const DEAD_MAX: usize = 64;

/// Pause between two orders to kill.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(64);

/// Time after which processes that could not be killed one by one are killed while the whole namespace is
/// stopped.
const STUBBORN: Duration = Duration::from_millis(200);

/// Time after which a worker is reported as swept even if processes are left, and interval between later
/// attempts to kill these.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE_AFTERWARDS: Duration = Duration::from_secs(1);

/// State of a template's pid namespace.
pub(super) struct Nest {
    socket: OwnedFd,
    outbox: Outbox,
    /// The template's pid in the namespace, once it is known.
    pub(super) template: Option<u32>,
    /// Workers: the pid in the namespace, and the pid outside.
    workers: HashMap<u32, u32>,
    /// Other children of the first process, each with the time of its discovery.
    unknown: Vec<(u32, Instant)>,
    /// True if there may be more unknown children than listed.
    has_more: bool,
    /// Unknown processes that have ended.
    dead: VecDeque<u32>,
    /// Workers that have ended. All are reported as swept when no unknown process is left.
    leaving: Vec<Leaving>,
    /// Set while there are processes to kill: start, time of the next order, and pause after that order.
    hunt: Option<(Instant, Instant, Duration)>,
}

struct Leaving {
    worker: u64,
    since: Instant,
    folder: Option<PathBuf>,
    secret: Option<u128>,
    leaf: Option<Leaf>,
}

/// A worker's place in a nest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Home {
    /// The first process of the nest.
    pub(super) nest: u32,
    /// The worker's pid in the namespace.
    pub(super) inner: u32,
    /// Part of the name of the worker's temporary folder, if the folder is in the namespace too.
    pub(super) secret: Option<u128>,
}

impl Nest {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            outbox: Outbox::default(),
            template: None,
            workers: HashMap::new(),
            unknown: Vec::new(),
            has_more: false,
            dead: VecDeque::new(),
            leaving: Vec::new(),
            hunt: None,
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// True if the template or a worker has this pid in the namespace.
    pub(super) fn has(&self, inner: u32) -> bool {
        self.template == Some(inner) || self.workers.contains_key(&inner)
    }

    /// True if an unknown process with this pid has ended.
    pub(super) fn has_ended(&self, inner: u32) -> bool {
        self.dead.contains(&inner)
    }

    pub(super) fn born(&mut self, inner: u32, pid: u32) {
        self.workers.insert(inner, pid);
        self.unknown.retain(|(unknown, _)| *unknown != inner);
    }

    /// Records the current children.
    fn look(&mut self, children: &[u32], has_more: bool, now: Instant) {
        let before: HashMap<u32, Instant> = self.unknown.drain(..).collect();
        let since = |pid: u32| before.get(&pid).copied().unwrap_or(now);
        self.unknown = children.iter().filter(|pid| !self.has(**pid)).map(|&pid| (pid, since(pid))).collect();
        self.has_more = has_more;
    }
}

impl Process {
    fn nest_mut(&mut self, pid: u32) -> Option<&mut Nest> {
        self.children.get_mut(&pid)?.nest.as_mut()
    }

    /// Handles messages of a nest's first process.
    pub(super) fn hear_nest(&mut self, pid: u32) {
        let has_more = self.hear_ends(pid);
        self.order_nest(pid, has_more);
    }

    /// Sends waiting orders. `has_more` means that messages may be waiting for which there is no new event.
    fn order_nest(&mut self, pid: u32, has_more: bool) {
        let Some(nest) = self.nest_mut(pid) else { return };
        // If the first process has ended, it is reaped next.
        let is_blocked = !nest.outbox.flush(&nest.socket).unwrap_or(true);
        if !has_more && !is_blocked {
            return;
        }
        let socket = nest.socket.as_raw_fd();
        let _ = register_again(&self.poll, &socket, pid as usize | NEST, is_blocked);
    }

    /// Handles some exits. Returns true if there may be more.
    pub(super) fn hear_ends(&mut self, pid: u32) -> bool {
        let (ends, has_more) = self.ends(pid);
        let child = self.children.get(&pid);
        if child.is_some_and(|child| child.template.as_ref().is_some_and(|it| it.has_forks())) {
            // A process can have identified itself before it ended.
            self.hear_what_waits(pid);
        }
        ends.into_iter().for_each(|end| self.ended_in_nest(pid, end));
        has_more
    }

    /// Reads some exits. Returns true if there may be more.
    fn ends(&mut self, pid: u32) -> (Vec<End>, bool) {
        let mut ends = Vec::new();
        let Some(nest) = self.nest_mut(pid) else { return (ends, false) };
        let mut buffer = vec![0; END_BYTES_MAX];
        while ends.len() < ENDS_MAX {
            match socket::receive(&nest.socket, &mut buffer) {
                Ok(Received::Message(length, _)) => match End::decode(&buffer[..length]) {
                    Some(end) => ends.push(end),
                    None => return (ends, false),
                },
                // If the socket is closed, the first process has ended, and is reaped.
                Ok(Received::Nothing | Received::Closed) | Err(_) => return (ends, false),
            }
        }
        (ends, true)
    }

    fn ended_in_nest(&mut self, pid: u32, end: End) {
        let now = Instant::now();
        let Some(nest) = self.nest_mut(pid) else { return };
        if nest.template == Some(end.pid) {
            self.template_left(pid, &end);
        } else if let Some(worker) = nest.workers.remove(&end.pid) {
            self.left_nest(pid, worker, end.exit, end.usage);
        } else {
            nest.dead.push_back(end.pid);
            if nest.dead.len() > DEAD_MAX {
                nest.dead.pop_front();
            }
            self.fork_ended(pid, end.pid);
        }
        let Some(nest) = self.nest_mut(pid) else { return };
        match end.children {
            Some(children) => {
                nest.look(&children, end.has_more, now);
                self.tidy_nest(pid, now);
            }
            // A later exit of the same iteration lists the children.
            None => nest.has_more = true,
        }
    }

    /// Handles the template's end. Its workers continue.
    fn template_left(&mut self, pid: u32, end: &End) {
        self.look_at_start(pid);
        // Includes the reason for the end.
        self.hear_what_waits(pid);
        let Some(child) = self.children.get_mut(&pid) else { return };
        if !matches!(child.stage, Stage::Running) {
            // The first process ends with the template.
            return;
        }
        child.stage = Stage::Ended;
        let (worker, exit, template) = (child.worker, child.cause(end.exit), child.template.take());
        self.report(&ReportMessage::Exited { worker, exit, usage: end.usage }, None);
        template.into_iter().for_each(|template| self.template_ended(template));
    }

    /// Handles the end of a worker in this nest.
    fn left_nest(&mut self, nest: u32, pid: u32, exit: Exit, usage: Usage) {
        let Some(child) = self.remove(pid) else { return };
        let (worker, exit) = (child.worker, child.cause(exit));
        child.leaf.iter().for_each(|leaf| _ = leaf.kill());
        self.report(&ReportMessage::Exited { worker, exit, usage }, None);
        let Child { folder, leaf, home, .. } = child;
        let secret = home.and_then(|home| home.secret);
        if let Some(nest) = self.nest_mut(nest) {
            nest.leaving.push(Leaving { worker, since: Instant::now(), folder, secret, leaf });
        }
    }

    /// Reports workers of which nothing is left, and orders the remaining processes to be killed.
    pub(super) fn tidy_nest(&mut self, pid: u32, now: Instant) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let Some(nest) = &mut child.nest else { return };
        // A child that was discovered before the oldest fork in progress cannot be its result.
        let forks_since = child.template.as_ref().and_then(|template| template.forks_since());
        let is_left = |since: Instant| forks_since.is_none_or(|forks| since < forks);
        if nest.unknown.is_empty() && !nest.has_more {
            nest.hunt = None;
            return self.nest_is_swept(pid, |_| true);
        }
        let left: Vec<u32> =
            nest.unknown.iter().filter(|(_, since)| is_left(*since)).map(|(it, _)| *it).collect();
        if left.is_empty() {
            if let Some((since, due, pause)) = nest.hunt {
                // Waits for the forks in progress. The due time moves, so that the loop does not spin
                // meanwhile.
                nest.hunt = Some((since, due.max(now + PAUSE_MIN), pause));
            }
            return;
        }
        let (since, due, pause) = *nest.hunt.get_or_insert((now, now, PAUSE_MIN));
        if now < due {
            return;
        }
        let age = now.saturating_duration_since(since);
        let next = if age < PATIENCE { (pause * 2).min(PAUSE_MAX) } else { PAUSE_AFTERWARDS };
        nest.hunt = Some((since, now + pause, next));
        let workers: Vec<u32> = nest.workers.keys().copied().collect();
        let order = match age < STUBBORN || workers.len() > NAMED_MAX {
            true => NestOrder::Kill(&left),
            false => NestOrder::KillAllBut(&workers),
        };
        nest.outbox.push(order.encode(), Vec::new());
        let is_overdue = |leaving: &Leaving| now >= leaving.since + PATIENCE;
        if nest.leaving.iter().any(is_overdue) {
            self.report(&ReportMessage::Unkillable { count: left.len() as u64 }, None);
            self.nest_is_swept(pid, is_overdue);
        }
        self.order_nest(pid, false);
    }

    /// Returns the next time at which an order to kill is due.
    pub(super) fn nests_due(&self) -> Option<Instant> {
        let nests = self.templates.iter().filter_map(|pid| self.children.get(pid)?.nest.as_ref());
        nests.filter_map(|nest| nest.hunt.map(|(_, due, _)| due)).min()
    }

    pub(super) fn tidy_nests(&mut self, now: Instant) {
        let is_due = |pid: &&u32| {
            let nest = self.children.get(pid).and_then(|child| child.nest.as_ref());
            nest.and_then(|nest| nest.hunt).is_some_and(|(_, due, _)| due <= now)
        };
        let due: Vec<u32> = self.templates.iter().filter(is_due).copied().collect();
        due.into_iter().for_each(|pid| self.tidy_nest(pid, now));
    }

    /// Reports workers of which nothing is left, or whose time limit has passed.
    fn nest_is_swept(&mut self, pid: u32, is_swept: impl Fn(&Leaving) -> bool) {
        let Some(nest) = self.nest_mut(pid) else { return };
        let swept: Vec<Leaving> = nest.leaving.extract_if(.., |leaving| is_swept(leaving)).collect();
        for Leaving { worker, folder, secret, leaf, .. } in swept {
            self.clear(folder, leaf);
            if let Some(secret) = secret {
                self.remove_folder(pid, worker, secret);
            }
            self.report(&ReportMessage::Reaped { worker }, None);
        }
    }

    /// Orders a worker in a nest to be killed, with its process group.
    pub(super) fn kill_in_nest(&mut self, Home { nest, inner, .. }: Home) {
        if let Some(found) = self.nest_mut(nest) {
            found.outbox.push(NestOrder::Kill(&[inner]).encode(), Vec::new());
            self.order_nest(nest, false);
        }
    }

    /// Orders a template to be killed. Its workers continue.
    pub(super) fn kill_template(&mut self, pid: u32) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        match (&child.stage, &mut child.nest) {
            (Stage::Running, Some(nest)) => {
                nest.outbox.push(NestOrder::KillTemplate.encode(), Vec::new());
                self.order_nest(pid, false);
            }
            // The template has ended already.
            (Stage::Ended, Some(_)) => {}
            (Stage::Starting(_) | Stage::Running | Stage::Failed | Stage::Ended, _) => wait::kill_group(pid),
        }
    }

    /// Handles the end of a nest's first process. All processes in the nest have ended with it.
    pub(super) fn nest_ended(&mut self, pid: u32, nest: Nest) {
        const KILLED: Exit = Exit::Signal { number: libc::SIGKILL, core_dumped: false };
        let Nest { workers, mut leaving, .. } = nest;
        for here in workers.into_values() {
            let Some(child) = self.remove(here) else { continue };
            let (worker, exit) = (child.worker, child.cause(KILLED));
            self.report(&ReportMessage::Exited { worker, exit, usage: Usage::default() }, None);
            let since = Instant::now();
            leaving.push(Leaving { worker, since, folder: child.folder, secret: None, leaf: child.leaf });
        }
        debug_assert!(!self.children.contains_key(&pid));
        for Leaving { worker, folder, leaf, .. } in leaving {
            self.clear(folder, leaf);
            self.report(&ReportMessage::Reaped { worker }, None);
        }
    }
}

//! PID namespaces of templates, each with one template and the workers that the template forks.
//!
//! The first process of a namespace (`spawn/init/template.rs`) is the parent of the template and the workers,
//! and adopts all orphans. It reports each exit and the remaining children to the keeper. A child that is not
//! the template, a worker, or a process being forked to become a worker is a leftover of a dead worker. The
//! keeper orders the first process to kill leftovers. Those that survive are killed while the whole namespace
//! is stopped. If some still survive, the keeper retries at longer intervals, and the worker counts as
//! reaped. So the keeper searches `/proc` for none of these processes, and namespaces do not affect each other. Workers
//! outside such a namespace are handled in `reaping.rs`, and messages from templates in `templates.rs`.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::super::{Child, EventLoop, NAMESPACE, Stage, register_again};
use crate::confine::cgroup::Leaf;
use crate::protocol::socket::{self, Outbox, Received};
use crate::protocol::{Exit, ReportMessage, Usage};
use crate::spawn::{ChildExit, EXIT_BYTES_MAX, InitOrder, NAMED_CHILDREN_MAX};
use crate::wait;

/// Maximum number of exit reports that are read from a namespace's first process at once.
const EXITS_MAX: usize = 64;

/// Maximum number of exits of unidentified processes to remember per namespace. A later message from the template can
/// show that such a process was forked as a worker.
const REMEMBERED_EXITS_MAX: usize = 64;

/// Minimum and maximum pause between two orders to kill leftover processes.
const KILL_INTERVAL_MIN: Duration = Duration::from_millis(2);
const KILL_INTERVAL_MAX: Duration = Duration::from_millis(64);

/// Time after which all processes in the namespace are stopped with SIGSTOP, so that leftover processes that have
/// survived so far can be killed.
const STOP_ALL_AFTER: Duration = Duration::from_millis(200);

/// Time after which a worker is reported as reaped even if leftover processes are still running, and the interval
/// between later attempts to kill these processes.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
const LATE_KILL_INTERVAL: Duration = Duration::from_secs(1);

/// State of a template's PID namespace.
pub(crate) struct TemplateNamespace {
    socket: OwnedFd,
    /// Orders that have not been sent to the namespace's first process: at most one kill per worker, one kill of the
    /// template, and one order to kill leftover processes.
    outbox: Outbox,
    /// The template's PID in the namespace. `None` until the PID is known.
    pub(crate) template: Option<u32>,
    /// Workers in the namespace. Maps each worker's PID inside the namespace to its PID outside.
    workers: HashMap<u32, u32>,
    /// Children of the namespace's first process that are neither the template nor a known worker. Each entry
    /// contains the time at which the child was discovered.
    unidentified: Vec<(u32, Instant)>,
    /// True if the namespace might contain more unidentified children than are listed.
    has_more: bool,
    /// PIDs of unidentified processes that have exited recently, each with the time of the exit.
    recent_exits: VecDeque<(u32, Instant)>,
    /// Exited workers, which are reported as reaped once no unidentified process is left.
    exited: Vec<ExitedWorker>,
    /// Progress of killing leftover processes. Contains the start time, the time of the next order, and the pause after
    /// that order. `None` if no processes have to be killed.
    kills: Option<(Instant, Instant, Duration)>,
}

struct ExitedWorker {
    worker: u64,
    since: Instant,
    folder: Option<PathBuf>,
    secret: Option<u128>,
    leaf: Option<Leaf>,
}

/// The namespace of a worker, and the worker's PID in this namespace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NamespaceMember {
    /// PID of the namespace's first process.
    pub(crate) namespace: u32,
    /// The worker's PID in the namespace.
    pub(crate) inner: u32,
    /// Secret part of the name of the worker's temporary folder. Set only if the folder is on a file system inside the
    /// namespace.
    pub(crate) secret: Option<u128>,
}

impl TemplateNamespace {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            outbox: Outbox::default(),
            template: None,
            workers: HashMap::new(),
            unidentified: Vec::new(),
            has_more: false,
            recent_exits: VecDeque::new(),
            exited: Vec::new(),
            kills: None,
        }
    }

    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Returns true if the template or a worker has this PID in the namespace.
    pub(crate) fn contains(&self, inner: u32) -> bool {
        self.template == Some(inner) || self.workers.contains_key(&inner)
    }

    /// Returns true if an unidentified process with this PID has exited since the given time. Earlier exits do not
    /// count, because the kernel reuses PIDs.
    pub(crate) fn has_ended(&self, inner: u32, since: Instant) -> bool {
        self.recent_exits.iter().any(|&(pid, at)| pid == inner && at >= since)
    }

    pub(crate) fn add_worker(&mut self, inner: u32, pid: u32) {
        self.workers.insert(inner, pid);
        self.unidentified.retain(|(pid, _)| *pid != inner);
    }

    /// Queues an order to kill leftover processes, unless one is already pending. The keeper repeats such orders, so
    /// they would otherwise accumulate while the namespace's first process is stopped.
    fn order_unless_pending(&mut self, order: InitOrder<'_>) {
        if self.outbox.is_empty() {
            self.outbox.push(order.encode(), Vec::new());
        }
    }

    /// Updates the list of the first process's children that have not been identified.
    fn update_children(&mut self, children: &[u32], has_more: bool, now: Instant) {
        let before: HashMap<u32, Instant> = self.unidentified.drain(..).collect();
        let since = |pid: u32| before.get(&pid).copied().unwrap_or(now);
        self.unidentified =
            children.iter().filter(|pid| !self.contains(**pid)).map(|&pid| (pid, since(pid))).collect();
        self.has_more = has_more;
    }
}

impl EventLoop {
    fn namespace_mut(&mut self, pid: u32) -> Option<&mut TemplateNamespace> {
        self.children.get_mut(&pid)?.namespace.as_mut()
    }

    /// Handles messages from a namespace's first process.
    pub(crate) fn handle_namespace_messages(&mut self, pid: u32) {
        let has_more = self.handle_exits(pid);
        self.send_namespace_orders(pid, has_more);
    }

    /// Sends pending orders. If `has_more` is true, also registers the socket again, because polling would not report
    /// messages that have already arrived.
    fn send_namespace_orders(&mut self, pid: u32, has_more: bool) {
        let Some(namespace) = self.namespace_mut(pid) else { return };
        // A failure to send means that the first process has exited, and will be reaped next.
        let is_blocked = !namespace.outbox.flush(&namespace.socket).unwrap_or(true);
        if !has_more && !is_blocked {
            return;
        }
        let socket = namespace.socket.as_raw_fd();
        let _ = register_again(&self.poll, &socket, pid as usize | NAMESPACE, is_blocked);
    }

    /// Reads and handles a limited number of exit reports. Returns true if there might be more reports.
    pub(crate) fn handle_exits(&mut self, pid: u32) -> bool {
        let (exits, has_more) = self.read_exits(pid);
        let child = self.children.get(&pid);
        if child.is_some_and(|child| child.template.as_ref().is_some_and(|it| it.has_forks())) {
            // A process may have sent the message that identifies it before it exited.
            self.read_pending_messages(pid);
        }
        exits.into_iter().for_each(|exit_report| self.handle_exit(pid, exit_report));
        has_more
    }

    /// Reads a limited number of exit reports. The returned boolean is true if there might be more reports.
    fn read_exits(&mut self, pid: u32) -> (Vec<ChildExit>, bool) {
        let mut exits = Vec::new();
        let Some(namespace) = self.namespace_mut(pid) else { return (exits, false) };
        let mut buffer = vec![0; EXIT_BYTES_MAX];
        while exits.len() < EXITS_MAX {
            match socket::receive(&namespace.socket, &mut buffer) {
                Ok(Received::Message(length, _)) => match ChildExit::decode(&buffer[..length]) {
                    Some(exit_report) => exits.push(exit_report),
                    None => return (exits, false),
                },
                // A closed socket means that the first process has exited, and will be reaped next.
                Ok(Received::Nothing | Received::Closed) | Err(_) => return (exits, false),
            }
        }
        (exits, true)
    }

    fn handle_exit(&mut self, pid: u32, exit_report: ChildExit) {
        let now = Instant::now();
        let Some(namespace) = self.namespace_mut(pid) else { return };
        if namespace.template == Some(exit_report.pid) {
            self.template_exited(pid, &exit_report);
        } else if let Some(worker) = namespace.workers.remove(&exit_report.pid) {
            self.worker_exited(pid, worker, exit_report.exit, exit_report.usage);
        } else {
            namespace.recent_exits.push_back((exit_report.pid, now));
            if namespace.recent_exits.len() > REMEMBERED_EXITS_MAX {
                namespace.recent_exits.pop_front();
            }
            self.fork_ended(pid, exit_report.pid);
        }
        let Some(namespace) = self.namespace_mut(pid) else { return };
        match exit_report.children {
            Some(children) => {
                namespace.update_children(&children, exit_report.has_more, now);
                self.clean_namespace(pid, now);
            }
            // A later exit report from this iteration lists the remaining children.
            None => namespace.has_more = true,
        }
    }

    /// Handles the exit of a template. The template's workers continue to run.
    fn template_exited(&mut self, pid: u32, exit_report: &ChildExit) {
        self.advance_start(pid);
        // Reads the pending messages, because one of them can contain the reason for the exit.
        self.read_pending_messages(pid);
        let Some(child) = self.children.get_mut(&pid) else { return };
        if !matches!(child.stage, Stage::Running) {
            // The first process exits as well, and the keeper handles that exit instead.
            return;
        }
        child.stage = Stage::Ended;
        let (worker, exit, template) =
            (child.worker, child.exit_cause(exit_report.exit), child.template.take());
        self.report(&ReportMessage::Exited { worker, exit, usage: exit_report.usage }, None);
        template.into_iter().for_each(|template| self.template_ended(template));
    }

    /// Handles the exit of a worker in this namespace.
    fn worker_exited(&mut self, namespace: u32, pid: u32, exit: Exit, usage: Usage) {
        let Some(child) = self.remove(pid) else { return };
        let (worker, exit) = (child.worker, child.exit_cause(exit));
        child.leaf.iter().for_each(|leaf| _ = leaf.kill());
        self.report(&ReportMessage::Exited { worker, exit, usage }, None);
        let Child { folder, leaf, member, .. } = child;
        let secret = member.and_then(|member| member.secret);
        if let Some(namespace) = self.namespace_mut(namespace) {
            namespace.exited.push(ExitedWorker { worker, since: Instant::now(), folder, secret, leaf });
        }
    }

    /// Reports the exited workers as reaped if no leftover process remains. Otherwise orders the namespace's first
    /// process to kill the leftover processes.
    pub(crate) fn clean_namespace(&mut self, pid: u32, now: Instant) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        let Some(namespace) = &mut child.namespace else { return };
        // Start time of the oldest fork in progress. A child that was discovered before this time cannot be the result
        // of a fork in progress.
        let forks_since = child.template.as_ref().and_then(|template| template.forks_since());
        let is_left = |since: Instant| forks_since.is_none_or(|forks| since < forks);
        if namespace.unidentified.is_empty() && !namespace.has_more {
            namespace.kills = None;
            return self.report_reaped_in(pid, |_| true);
        }
        let left: Vec<u32> =
            namespace.unidentified.iter().filter(|(_, since)| is_left(*since)).map(|(it, _)| *it).collect();
        if left.is_empty() {
            if let Some((since, due, pause)) = namespace.kills {
                // Waits until the forks in progress have ended. The time of the next order is postponed, so that the
                // loop does not spin.
                namespace.kills = Some((since, due.max(now + KILL_INTERVAL_MIN), pause));
            }
            return;
        }
        let (since, due, pause) = *namespace.kills.get_or_insert((now, now, KILL_INTERVAL_MIN));
        if now < due {
            return;
        }
        let age = now.saturating_duration_since(since);
        let next = if age < KILL_TIMEOUT { (pause * 2).min(KILL_INTERVAL_MAX) } else { LATE_KILL_INTERVAL };
        namespace.kills = Some((since, now + pause, next));
        let workers: Vec<u32> = namespace.workers.keys().copied().collect();
        let order = match age < STOP_ALL_AFTER || workers.len() > NAMED_CHILDREN_MAX {
            true => InitOrder::Kill(&left),
            false => InitOrder::KillAllExcept(&workers),
        };
        namespace.order_unless_pending(order);
        let is_overdue = |exited: &ExitedWorker| now >= exited.since + KILL_TIMEOUT;
        if namespace.exited.iter().any(is_overdue) {
            self.report(&ReportMessage::Unkillable { count: left.len() as u64 }, None);
            self.report_reaped_in(pid, is_overdue);
        }
        self.send_namespace_orders(pid, false);
    }

    /// Returns the next time at which an order to kill leftover processes is due.
    pub(crate) fn next_namespace_kill(&self) -> Option<Instant> {
        let namespaces = self.templates.iter().filter_map(|pid| self.children.get(pid)?.namespace.as_ref());
        namespaces.filter_map(|namespace| namespace.kills.map(|(_, due, _)| due)).min()
    }

    pub(crate) fn clean_namespaces(&mut self, now: Instant) {
        let is_due = |pid: &&u32| {
            let namespace = self.children.get(pid).and_then(|child| child.namespace.as_ref());
            namespace.and_then(|namespace| namespace.kills).is_some_and(|(_, due, _)| due <= now)
        };
        let due: Vec<u32> = self.templates.iter().filter(is_due).copied().collect();
        due.into_iter().for_each(|pid| self.clean_namespace(pid, now));
    }

    /// Removes the folders and groups of all exited workers for which `is_reaped` returns true, and reports these
    /// workers as reaped.
    fn report_reaped_in(&mut self, pid: u32, is_reaped: impl Fn(&ExitedWorker) -> bool) {
        let Some(namespace) = self.namespace_mut(pid) else { return };
        let reaped: Vec<ExitedWorker> = namespace.exited.extract_if(.., |exited| is_reaped(exited)).collect();
        for ExitedWorker { worker, folder, secret, leaf, .. } in reaped {
            self.remove_resources(folder, leaf);
            if let Some(secret) = secret {
                self.remove_folder(pid, worker, secret);
            }
            self.report(&ReportMessage::Reaped { worker }, None);
        }
    }

    /// Orders the first process of a namespace to kill a worker together with the worker's process group.
    pub(crate) fn kill_in_namespace(&mut self, NamespaceMember { namespace, inner, .. }: NamespaceMember) {
        if let Some(found) = self.namespace_mut(namespace) {
            found.outbox.push(InitOrder::Kill(&[inner]).encode(), Vec::new());
            self.send_namespace_orders(namespace, false);
        }
    }

    /// Kills a template. The template's workers continue to run.
    pub(crate) fn kill_template(&mut self, pid: u32) {
        let Some(child) = self.children.get_mut(&pid) else { return };
        match (&child.stage, &mut child.namespace) {
            (Stage::Running, Some(namespace)) => {
                namespace.outbox.push(InitOrder::KillTemplate.encode(), Vec::new());
                self.send_namespace_orders(pid, false);
            }
            // The template has already exited.
            (Stage::Ended, Some(_)) => {}
            (_, None) | (Stage::Starting(_) | Stage::Failed | Stage::Abandoned, _) => wait::kill_group(pid),
        }
    }

    /// Handles the exit of a namespace's first process. The kernel has killed all other processes in the
    /// namespace.
    pub(crate) fn namespace_ended(&mut self, pid: u32, namespace: TemplateNamespace) {
        const KILLED: Exit = Exit::Signal { number: libc::SIGKILL, core_dumped: false };
        let TemplateNamespace { workers, mut exited, .. } = namespace;
        for here in workers.into_values() {
            let Some(child) = self.remove(here) else { continue };
            let (worker, exit) = (child.worker, child.exit_cause(KILLED));
            self.report(&ReportMessage::Exited { worker, exit, usage: Usage::default() }, None);
            let since = Instant::now();
            exited.push(ExitedWorker { worker, since, folder: child.folder, secret: None, leaf: child.leaf });
        }
        debug_assert!(!self.children.contains_key(&pid));
        for ExitedWorker { worker, folder, leaf, .. } in exited {
            self.remove_resources(folder, leaf);
            self.report(&ReportMessage::Reaped { worker }, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_before_the_fork_order_does_not_count() {
        let (ours, _theirs) = socket::pair().unwrap();
        let mut namespace = TemplateNamespace::new(ours);
        let before = Instant::now();
        namespace.recent_exits.push_back((7, before));
        let after = before + Duration::from_secs(1);
        assert_eq!([before, after].map(|since| namespace.has_ended(7, since)), [true, false]);
        assert!(!namespace.has_ended(8, before));
    }

    #[test]
    fn repeated_kill_order_is_queued_once() {
        let (ours, _theirs) = socket::pair().unwrap();
        let mut namespace = TemplateNamespace::new(ours);
        namespace.order_unless_pending(InitOrder::Kill(&[2]));
        namespace.order_unless_pending(InitOrder::Kill(&[2]));
        assert_eq!(namespace.outbox.len(), 1);
        assert!(namespace.outbox.flush(&namespace.socket).unwrap());
        namespace.order_unless_pending(InitOrder::Kill(&[2]));
        assert_eq!(namespace.outbox.len(), 1);
    }
}

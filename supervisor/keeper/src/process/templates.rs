//! Orders templates to fork workers, and registers each forked process as a worker. A template is started, confined and
//! watched like any worker, but runs no jobs. `starts` starts the template itself, and `namespaces` cleans up inside
//! its PID namespace. The data plane decides when to fork.

mod attributes;
pub(super) mod namespaces;

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bulkhead_shared::template_protocol::{MESSAGE_BYTES_MAX, TemplateMessage, TemplateOrder, folder_name};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Pid, PidfdFlags};
use rustix::rand::{GetRandomFlags, getrandom};

use self::attributes::RecordedAttributes;
use self::namespaces::NamespaceMember;
use super::{
    Child, EXIT, EventLoop, PENDING_REPORTS_MAX, Stage, TEMPLATE, deregister, observe, register,
    register_again,
};
use crate::protocol::confinement::{Observed, TemporaryFiles};
use crate::protocol::socket::Outbox;
use crate::protocol::{ReportMessage, TemplateReport};
use crate::spawn::SpawnError;
use crate::wait;

/// Maximum time that a template may take to fork a worker before the keeper kills the template.
const FORK_TIMEOUT: Duration = Duration::from_secs(10);

/// Name of the failed step in reports about workers whose template has exceeded [`FORK_TIMEOUT`].
const HUNG_STEP: &str = "fork: the template did not fork within ten seconds and was killed; check whether the template was \
                    stopped, or is waiting in `before_fork`";

/// Name of the failed step in reports about forked workers that exited before they identified themselves.
const EXITED_STEP: &str = "fork: the forked process exited immediately";

/// Maximum time that the killer of leftover processes waits for forks in progress. If a process is forked later, while
/// the killer is running, it is treated as a leftover, and the start of its worker fails.
const FORK_WAIT_MAX: Duration = Duration::from_millis(500);

/// Maximum number of status messages from one template that the keeper forwards per [`STATUS_INTERVAL`].
const STATUS_MESSAGES_MAX: u32 = 64;
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of messages read from a template in one iteration.
const MESSAGES_MAX: usize = 64;

/// State of a template, in addition to the state that the keeper has for every worker.
pub(super) struct Template {
    socket: OwnedFd,
    outbox: Outbox,
    /// Forks in progress, oldest first.
    forks: VecDeque<Fork>,
    /// True if the template was killed because a fork took too long.
    is_hung: bool,
    /// Attributes that forked workers must have. `None` until the template is ready.
    attributes: Option<RecordedAttributes>,
    /// True if the template has sent the reason for its failure.
    has_refused: bool,
    /// Start time of the current interval for status messages, and the number of messages in the interval so far.
    status_rate: Option<(Instant, u32)>,
}

/// A fork in progress. The forked process counts as a worker once it has sent a message, whose sender the kernel
/// identifies. Until then, the keeper cannot distinguish it from a sibling forked by a worker. So the keeper starts no
/// fork while it kills leftover processes, and waits up to [`FORK_WAIT_MAX`] for forks before it begins to kill.
struct Fork {
    worker: u64,
    secret: u128,
    since: Instant,
    /// PID of the forked process. `None` until the template has reported the PID.
    pid: Option<u32>,
    /// True if the worker must be killed as soon as it has been forked.
    is_cancelled: bool,
}

/// A fork order that is deferred until the current search for leftover processes has ended.
pub(super) struct DeferredFork {
    pub(super) worker: u64,
    pub(super) template: u64,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Template {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            outbox: Outbox::default(),
            forks: VecDeque::new(),
            is_hung: false,
            attributes: None,
            has_refused: false,
            status_rate: None,
        }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(super) fn has_forks(&self) -> bool {
        !self.forks.is_empty()
    }

    /// Returns the time at which the oldest fork in progress was started.
    pub(super) fn forks_since(&self) -> Option<Instant> {
        self.forks.front().map(|fork| fork.since)
    }

    /// Counts a status message. Returns false if the template has sent too many status messages in the current
    /// interval.
    fn accepts_status(&mut self, now: Instant) -> bool {
        let (since, count) = self.status_rate.get_or_insert((now, 0));
        if now.saturating_duration_since(*since) >= STATUS_INTERVAL {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        *count <= STATUS_MESSAGES_MAX
    }

    fn take_fork(&mut self, worker: u64) -> Option<Fork> {
        let at = self.forks.iter().position(|fork| fork.worker == worker)?;
        self.forks.remove(at)
    }
}

impl EventLoop {
    fn template_mut(&mut self, pid: u32) -> Option<&mut Template> {
        self.children.get_mut(&pid)?.template.as_mut()
    }

    /// Orders a template to fork a worker.
    pub(super) fn fork(&mut self, deferred: DeferredFork) -> Result<(), SpawnError> {
        let found = self.by_worker.get(&deferred.template).copied();
        let child = found.and_then(|pid| Some((pid, self.children.get(&pid)?)));
        let Some((pid, child)) = child.filter(|(_, child)| matches!(child.stage, Stage::Running)) else {
            return Err(SpawnError::new("fork: the template has exited", Errno::CHILD));
        };
        if self.reaper.blocks_forks() && child.namespace.is_none() {
            self.deferred_forks.push_back(deferred);
            return Ok(());
        }
        let is_template = || match child.namespace {
            Some(_) => observe::namespace_pids(child.process).is_ok_and(|place| place.parent == pid),
            None => bulkhead_linux::wait::is_child(pid),
        };
        let attributes = child.template.as_ref().and_then(|template| template.attributes.as_ref());
        if let Some(Err(name)) = attributes.map(|it| it.restore(child.process, is_template)) {
            // Kills the template, because the workers would inherit the attribute that was changed. A new template does
            // not have the change.
            self.kill(pid);
            return Err(SpawnError::new(&format!("fork: restore the template's {name}"), Errno::PERM));
        }
        let DeferredFork { worker, descriptors, .. } = deferred;
        let mut secret = [0; 16];
        let filled = getrandom(&mut secret, GetRandomFlags::empty());
        if filled != Ok(secret.len()) {
            return Err(SpawnError::new("fork: random numbers", filled.err().unwrap_or(Errno::IO)));
        }
        let secret = u128::from_ne_bytes(secret);
        let Some(template) = self.template_mut(pid) else {
            return Err(SpawnError::new("fork: the worker to fork from is not a template", Errno::INVAL));
        };
        template.outbox.push(TemplateOrder::Fork { worker, secret }.encode().to_vec(), descriptors);
        let fork = Fork { worker, secret, since: Instant::now(), pid: None, is_cancelled: false };
        template.forks.push_back(fork);
        self.send_template_orders(pid);
        Ok(())
    }

    /// Orders a template to remove the temporary folder of a worker whose processes are all gone. Used if the
    /// keeper cannot access the folder.
    pub(super) fn remove_folder(&mut self, pid: u32, worker: u64, secret: u128) {
        if let Some(template) = self.template_mut(pid) {
            template.outbox.push(TemplateOrder::Remove { worker, secret }.encode().to_vec(), Vec::new());
            self.send_template_orders(pid);
        }
    }

    fn send_template_orders(&mut self, pid: u32) {
        let Some(template) = self.template_mut(pid) else { return };
        let (is_sent, socket) = (template.outbox.flush(&template.socket), template.socket.as_raw_fd());
        // A failure to send means that the template is about to exit. Its forks in progress then fail as well.
        let Ok(is_sent) = is_sent else { return self.kill(pid) };
        let _ = register_again(&self.poll, &socket, pid as usize | TEMPLATE, !is_sent);
    }

    /// Cancels the fork of a worker. If the template has already been told to fork, the worker is killed as soon as it
    /// exists.
    pub(super) fn cancel_fork(&mut self, worker: u64) {
        if let Some(at) = self.deferred_forks.iter().position(|deferred| deferred.worker == worker) {
            self.deferred_forks.remove(at);
            self.report_failure(
                worker,
                &SpawnError::new("fork: the worker was killed before the fork", Errno::CANCELED),
            );
        }
        for pid in &self.templates {
            let template = self.children.get_mut(pid).and_then(|child| child.template.as_mut());
            let mut forks = template.into_iter().flat_map(|template| template.forks.iter_mut());
            if let Some(fork) = forks.find(|fork| fork.worker == worker) {
                fork.is_cancelled = true;
            }
        }
    }

    fn forking_templates(&self) -> impl Iterator<Item = (u32, &Child, Instant)> {
        let of = |&pid: &u32| {
            let child = self.children.get(&pid)?;
            Some((pid, child, child.template.as_ref()?.forks_since()?))
        };
        self.templates.iter().filter_map(of)
    }

    /// Returns the PIDs of the templates that have forks in progress and whose workers become children of the keeper.
    fn templates_forking_own_children(&self) -> Vec<u32> {
        self.forking_templates()
            .filter(|(_, child, _)| child.namespace.is_none())
            .map(|(pid, ..)| pid)
            .collect()
    }

    /// Returns true if the killer has to wait for a fork in progress. Forks in PID namespaces do not count,
    /// because the killer does not kill processes in PID namespaces.
    pub(super) fn is_forking(&self) -> bool {
        self.forking_templates()
            .any(|(_, child, since)| child.namespace.is_none() && since.elapsed() < FORK_WAIT_MAX)
    }

    /// Executes fork orders that were deferred during a search for leftover processes.
    pub(super) fn run_deferred_forks(&mut self) {
        while !self.reaper.blocks_forks()
            && let Some(deferred) = self.deferred_forks.pop_front()
        {
            let worker = deferred.worker;
            if let Err(failure) = self.fork(deferred) {
                self.report_failure(worker, &failure);
            }
        }
    }

    /// Returns the earliest time at which a fork in progress will exceed its time limit.
    pub(super) fn next_fork_timeout(&self) -> Option<Instant> {
        let is_awaited = |child: &Child| child.template.as_ref().is_some_and(|template| !template.is_hung);
        let forking = self.forking_templates().filter(|(_, child, _)| is_awaited(child));
        forking.map(|(_, _, since)| since + FORK_TIMEOUT).min()
    }

    pub(super) fn kill_hung_templates(&mut self, now: Instant) {
        let hung =
            self.forking_templates().filter(|(.., since)| now >= *since + FORK_TIMEOUT).map(|(pid, ..)| pid);
        let hung: Vec<u32> = hung.collect();
        for pid in hung {
            if let Some(template) = self.template_mut(pid)
                && !std::mem::replace(&mut template.is_hung, true)
            {
                self.kill(pid);
            }
        }
    }

    /// Reads the messages of all templates with forks in progress. Needed because a process that has exited might have
    /// identified itself as a worker beforehand. Returns the number of bytes read.
    pub(super) fn read_fork_messages(&mut self) -> u64 {
        self.templates_forking_own_children().into_iter().map(|pid| self.read_pending_messages(pid)).sum()
    }

    /// Reads the messages that a template and its workers have already sent. Messages that arrive in the meantime are
    /// left for the next iteration, because they can arrive faster than the keeper reads. Returns the total size of the
    /// messages read, in bytes.
    pub(super) fn read_pending_messages(&mut self, pid: u32) -> u64 {
        let Some(template) = self.template_mut(pid) else { return 0 };
        let waiting = rustix::io::ioctl_fionread(&template.socket).unwrap_or(0);
        let mut left = waiting;
        while left > 0
            && let Some(length) = self.read_message(pid)
        {
            left = left.saturating_sub(length as u64);
        }
        waiting
    }

    /// Handles messages from a template or from processes that were forked by the template.
    pub(super) fn handle_template_messages(&mut self, pid: u32) {
        if (0..MESSAGES_MAX).all(|_| self.read_message(pid).is_some())
            && let Some(template) = self.template_mut(pid)
        {
            // Registers the socket again, because polling would not report messages that have already arrived.
            let socket = template.socket.as_raw_fd();
            let _ = register_again(&self.poll, &socket, pid as usize | TEMPLATE, false);
        }
        if self.template_mut(pid).is_some_and(|template| !template.outbox.is_empty()) {
            self.send_template_orders(pid);
        }
    }

    /// Reads a message and returns its size in bytes. Returns `None` if there is no message, or if the
    /// template was killed because the message was invalid.
    fn read_message(&mut self, pid: u32) -> Option<usize> {
        let template = self.template_mut(pid)?;
        let mut bytes = [0; MESSAGE_BYTES_MAX];
        let (length, sender) = receive(&template.socket, &mut bytes)?;
        let word = bytes.get(..length).and_then(TemplateMessage::decode);
        let is_valid = word.is_some_and(|word| self.handle_message(pid, word, sender));
        if !is_valid {
            self.kill_for_protocol_error(
                pid,
                "the program does not follow the template protocol: see `start.mode`",
            );
            return None;
        }
        Some(length)
    }

    /// Kills a template because of a protocol error. Also kills all other processes in the template's namespace,
    /// because any of them might have caused the error.
    pub(super) fn kill_for_protocol_error(&mut self, pid: u32, text: &str) {
        if let Some(child) = self.children.get(&pid) {
            let worker = child.worker;
            self.report(
                &ReportMessage::Template { worker, message: TemplateReport::Refused(text.to_owned()) },
                None,
            );
            wait::kill_group(pid);
        }
    }

    /// Handles a message from a template or a forked process. Returns false if the message violates the
    /// protocol.
    fn handle_message(&mut self, pid: u32, word: TemplateMessage<'_>, sender: u32) -> bool {
        let Some(child) = self.children.get_mut(&pid) else { return true };
        let (worker, process) = (child.worker, child.process);
        let Some(template) = &mut child.template else { return true };
        let message = match word {
            TemplateMessage::Started { worker } => {
                return sender != process && self.register_worker(pid, worker, sender);
            }
            TemplateMessage::ForkFailed { worker, errno, step } => {
                if let Some(fork) = template.take_fork(worker) {
                    let step = if step.is_empty() { "fork".to_owned() } else { format!("fork: {step}") };
                    let failure = SpawnError::new(&step, Errno::from_raw_os_error(errno));
                    self.fork_failed(pid, &fork, &failure);
                    // The cleanup of the namespace may have been waiting for this fork.
                    self.clean_namespace(pid, Instant::now());
                }
                return true;
            }
            _ if sender != process => return false,
            TemplateMessage::Ready if template.attributes.is_some() => return false,
            TemplateMessage::Ready => {
                template.attributes = Some(RecordedAttributes::record(process));
                TemplateReport::Ready
            }
            TemplateMessage::StartFailed(_) if template.has_refused => return false,
            TemplateMessage::StartFailed(text) => {
                template.has_refused = true;
                TemplateReport::Refused(text.to_owned())
            }
            // Status messages over the limit are not forwarded, because a template can send any number of them.
            TemplateMessage::Status(_) | TemplateMessage::Extend(_)
                if !template.accepts_status(Instant::now()) || self.outbox.len() >= PENDING_REPORTS_MAX =>
            {
                return true;
            }
            TemplateMessage::Status(text) => TemplateReport::Status(text.to_owned()),
            TemplateMessage::Extend(more_ms) => TemplateReport::Extend(Duration::from_millis(more_ms.into())),
            TemplateMessage::Forked { worker, pid: forked } => {
                self.record_fork(pid, worker, forked);
                return true;
            }
        };
        self.report(&ReportMessage::Template { worker, message }, None);
        true
    }

    /// Records the PID of a forked process, which might already have exited.
    fn record_fork(&mut self, template: u32, worker: u64, pid: u32) {
        let Some(child) = self.children.get_mut(&template) else { return };
        // If the worker has already identified itself, the fork is no longer in the list.
        let mut forks = child.template.iter_mut().flat_map(|template| &mut template.forks);
        let Some(fork) = forks.find(|fork| fork.worker == worker) else { return };
        fork.pid = Some(pid);
        let since = fork.since;
        let is_gone = match &child.namespace {
            Some(namespace) => namespace.has_ended(pid, since),
            None => !bulkhead_linux::wait::is_child(pid),
        };
        if is_gone {
            self.fork_ended(template, pid);
            self.clean_namespace(template, Instant::now());
        }
    }

    /// Handles the exit of a reaped process that is not a worker. If the template had forked the process to become a
    /// worker, the start of this worker has failed.
    pub(super) fn fork_ended(&mut self, template: u32, pid: u32) {
        let Some(found) = self.template_mut(template) else { return };
        let Some(at) = found.forks.iter().position(|fork| fork.pid == Some(pid)) else { return };
        if let Some(fork) = found.forks.remove(at) {
            self.fork_failed(template, &fork, &SpawnError::new(EXITED_STEP, Errno::CHILD));
        }
    }

    /// Reports that the process forked for a worker did not become the worker. Removes the temporary folder that the
    /// process might have created.
    fn fork_failed(&mut self, template: u32, fork: &Fork, failure: &SpawnError) {
        let Fork { worker, secret, .. } = *fork;
        if let Some(child) = self.children.get(&template) {
            match (child.layers.temporary, &child.folder) {
                (TemporaryFiles::Folder, Some(folder)) => {
                    self.folders.remove(folder.join(folder_name(worker, secret)));
                }
                (TemporaryFiles::PrivateTmp(_) | TemporaryFiles::MountedTmpfs(_), _) => {
                    self.remove_folder(template, worker, secret);
                }
                (TemporaryFiles::Folder | TemporaryFiles::None, _) => {}
            }
        }
        self.report_failure(worker, failure);
    }

    /// Calls `fork_ended` for each template that is forking and whose workers are children of the keeper.
    pub(super) fn any_fork_ended(&mut self, pid: u32) {
        self.templates_forking_own_children().into_iter().for_each(|template| self.fork_ended(template, pid));
    }

    /// Handles the message with which a forked process identifies itself as a worker. Returns false if the message
    /// violates the protocol.
    fn register_worker(&mut self, template: u32, worker: u64, pid: u32) -> bool {
        if self.children.contains_key(&pid) {
            return false;
        }
        let Some(child) = self.children.get_mut(&template) else { return true };
        if child.namespace.is_none() && !bulkhead_linux::wait::is_child(pid) {
            return false;
        }
        let Some(fork) = child.template.as_mut().and_then(|it| it.take_fork(worker)) else { return false };
        match self.adopt_worker(template, &fork, pid) {
            Ok(is_valid) => is_valid,
            Err(failure) => {
                // A process in a namespace remains unidentified, and is killed as a leftover process.
                if self.children.get(&template).is_some_and(|child| child.namespace.is_none()) {
                    wait::kill_group(pid);
                }
                self.fork_failed(template, &fork, &failure);
                self.clean_namespace(template, Instant::now());
                true
            }
        }
    }

    /// Registers a process as the worker that a template has forked. Returns false if the process violates the
    /// protocol. After an error, the process is not registered.
    fn adopt_worker(&mut self, template: u32, fork: &Fork, pid: u32) -> Result<bool, SpawnError> {
        let Fork { worker, secret, is_cancelled, .. } = *fork;
        let Some(parent) = self.children.get(&template) else { return Ok(true) };
        let (layers, rlimits) = (parent.layers, parent.rlimits.clone());
        // Opens the pidfd before checking the process. If the process exits later, its PID can be reused, but
        // the pidfd still refers to it.
        let pidfd = open_pidfd(pid)?;
        let copy = pidfd.try_clone().map_err(|error| SpawnError::from_io("descriptors", &error))?;
        let is_inside =
            matches!(layers.temporary, TemporaryFiles::PrivateTmp(_) | TemporaryFiles::MountedTmpfs(_));
        let mut member = None;
        if let Some(namespace) = &parent.namespace {
            let pids = namespace_pids_of_live(pid)?;
            if pids.parent != template || namespace.contains(pids.inner) {
                let step = "fork: a process other than the template forked the worker";
                self.report_failure(worker, &SpawnError::new(step, Errno::PERM));
                return Ok(false);
            }
            let secret = is_inside.then_some(secret);
            member = Some(NamespaceMember { namespace: template, inner: pids.inner, secret });
        }
        let folder = parent.folder.as_ref().filter(|_| layers.temporary == TemporaryFiles::Folder);
        let folder = folder.map(|folder| folder.join(folder_name(worker, secret)));
        let observed = Observed { is_inherited: true, cgroup: layers.cgroup.is_some(), ..parent.observed };
        // Registers the pidfd first, because nothing else has to be undone if this fails. Closing the pidfd removes the
        // registration.
        if member.is_none() {
            register(&self.poll, &pidfd, pid as usize | EXIT)
                .map_err(|error| SpawnError::from_io("descriptors", &error))?;
        }
        let leaf = layers.cgroup.map(|limits| self.groups.create_for(worker, &limits, pid)).transpose()?;
        if let Some(member) = &member
            && let Some(parent) = self.children.get_mut(&template)
            && let Some(namespace) = &mut parent.namespace
        {
            namespace.add_worker(member.inner, pid);
        }
        let child = Child {
            folder,
            leaf,
            member,
            ..Child::new(worker, pid, pidfd, Stage::Running, layers, rlimits, observed)
        };
        self.insert(pid, child);
        self.report(&ReportMessage::Spawned { worker, pid, observed }, Some(copy));
        if is_cancelled {
            self.kill(pid);
        }
        self.clean_namespace(template, Instant::now());
        Ok(true)
    }

    /// Handles the exit of a template. Any forks in progress have failed.
    pub(super) fn template_ended(&mut self, template: Template) {
        deregister(&self.poll, &template.socket);
        let failure = match template.is_hung {
            true => SpawnError::new(HUNG_STEP, Errno::TIME),
            false => SpawnError::new("fork: the template has exited", Errno::CHILD),
        };
        for fork in template.forks {
            self.report_failure(fork.worker, &failure);
        }
    }
}

fn open_pidfd(pid: u32) -> Result<OwnedFd, SpawnError> {
    let number = Pid::from_raw(pid as i32).ok_or(Errno::SRCH);
    number.and_then(|number| rustix::process::pidfd_open(number, PidfdFlags::empty())).map_err(|errno| {
        let step = if errno == Errno::SRCH { EXITED_STEP } else { "descriptors" };
        SpawnError::new(step, errno)
    })
}

/// Returns the PIDs of a live process in its namespaces. Fails if the process is reaped in the meantime, because the
/// PIDs that were read might then be incomplete.
fn namespace_pids_of_live(pid: u32) -> Result<observe::NamespacePids, SpawnError> {
    let pids = observe::namespace_pids(pid);
    let number = Pid::from_raw(pid as i32);
    let is_over = number.is_none_or(|it| rustix::process::test_kill_process(it) == Err(Errno::SRCH));
    pids.ok().filter(|_| !is_over).ok_or(SpawnError::new(EXITED_STEP, Errno::CHILD))
}

/// Receives a message. Returns the sender's PID, and the length that the message had before truncation. At end of file,
/// unlike for an empty message, there is no sender.
fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> Option<(usize, u32)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)
    });
    let mut sender = 0;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmCredentials(credentials) = message {
            sender = credentials.pid.as_raw_nonzero().get() as u32;
        }
    }
    received.ok().filter(|message| message.bytes > 0 || sender > 0).map(|message| (message.bytes, sender))
}

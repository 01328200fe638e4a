//! Templates: workers that fork the workers of their bulkhead, as children of this process.
//!
//! A template is ordered, confined and watched like any worker. What it forks is taken for a worker when that process
//! itself has said so: the kernel tells which one it is. Until then a process that a worker makes a sibling of itself
//! looks the same; so nothing is forked while processes are hunted, and nothing is hunted while something is forked.

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bulkhead_shared::template_protocol::{MESSAGE_BYTES_MAX, Order, Word};
use mio::unix::SourceFd;
use mio::{Interest, Token};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Pid, PidfdFlags};

use super::{Child, END, FORKS, Process, Stage};
use crate::confinement::Observed;
use crate::socket::Outbox;
use crate::spawn::Refusal;
use crate::{ReportMessage, TemplateNews, wait};

/// A template that has not forked within this time hangs.
const FORK_PATIENCE: Duration = Duration::from_secs(10);

/// Messages of a template that are read in one go.
const WORDS_MAX: usize = 64;

/// What the keeper knows of a template beside what it knows of each worker.
pub(super) struct Template {
    socket: OwnedFd,
    outbox: Outbox,
    /// What is being forked.
    underway: VecDeque<Fork>,
}

struct Fork {
    worker: u64,
    since: Instant,
    /// Its process, as the template says.
    pid: Option<u32>,
    /// It is to be killed as soon as it is there.
    is_doomed: bool,
}

/// An order that waits for the end of a hunt.
pub(super) struct Held {
    pub(super) worker: u64,
    pub(super) template: u64,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Template {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, outbox: Outbox::default(), underway: VecDeque::new() }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(super) fn has_forks(&self) -> bool {
        !self.underway.is_empty()
    }

    fn take(&mut self, worker: u64) -> Option<Fork> {
        let at = self.underway.iter().position(|fork| fork.worker == worker)?;
        self.underway.remove(at)
    }
}

impl Process {
    fn template_mut(&mut self, pid: u32) -> Option<&mut Template> {
        self.children.get_mut(&pid)?.template.as_mut()
    }

    pub(super) fn register_template(&self, pid: u32, socket: &OwnedFd) -> std::io::Result<()> {
        let mut source = SourceFd(&socket.as_raw_fd());
        self.poll.registry().register(&mut source, Token(pid as usize | FORKS), Interest::READABLE)
    }

    /// Has a template fork a worker.
    pub(super) fn fork(&mut self, held: Held) -> Result<(), Refusal> {
        if self.sweep.wants_quiet() {
            self.held.push_back(held);
            return Ok(());
        }
        let Held { worker, template, descriptors } = held;
        let mut templates = self.children.iter().filter(|(_, child)| child.worker == template);
        let is_running = |child: &Child| matches!(child.stage, Stage::Running);
        let Some(&pid) = templates.next().filter(|(_, child)| is_running(child)).map(|(pid, _)| pid) else {
            return Err(Refusal::new("fork: its template has ended", Errno::CHILD));
        };
        let Some(template) = self.template_mut(pid) else {
            return Err(Refusal::new("fork: not by a template", Errno::INVAL));
        };
        template.outbox.push(Order { worker }.encode().to_vec(), descriptors);
        let fork = Fork { worker, since: Instant::now(), pid: None, is_doomed: false };
        template.underway.push_back(fork);
        self.send_orders(pid);
        Ok(())
    }

    fn send_orders(&mut self, pid: u32) {
        let Some(template) = self.template_mut(pid) else { return };
        let is_sent = template.outbox.flush(&template.socket);
        let interest = match is_sent {
            Ok(true) => Interest::READABLE,
            Ok(false) => Interest::READABLE | Interest::WRITABLE,
            // Its end is near, and fails what it was to fork.
            Err(_) => return wait::kill_group(pid),
        };
        let (token, socket) = (Token(pid as usize | FORKS), template.socket.as_raw_fd());
        let _ = self.poll.registry().reregister(&mut SourceFd(&socket), token, interest);
    }

    /// A worker that is not there yet is to be killed. Returns whether it is being forked.
    pub(super) fn doom(&mut self, worker: u64) -> bool {
        if let Some(at) = self.held.iter().position(|held| held.worker == worker) {
            self.held.remove(at);
            self.report_failure(worker, &Refusal::new("fork: it was ended before", Errno::CANCELED));
            return true;
        }
        let templates = self.children.values_mut().filter_map(|child| child.template.as_mut());
        let mut forks = templates.flat_map(|template| template.underway.iter_mut());
        forks.find(|fork| fork.worker == worker).map(|fork| fork.is_doomed = true).is_some()
    }

    /// Whether something is being forked.
    pub(super) fn is_forking(&self) -> bool {
        self.children.values().filter_map(|child| child.template.as_ref()).any(Template::has_forks)
    }

    /// Orders that waited for the end of a hunt.
    pub(super) fn fork_held(&mut self) {
        while !self.sweep.wants_quiet()
            && let Some(held) = self.held.pop_front()
        {
            let worker = held.worker;
            if let Err(refusal) = self.fork(held) {
                self.report_failure(worker, &refusal);
            }
        }
    }

    /// When a template that forks counts as hung.
    pub(super) fn forks_due(&self) -> Option<Instant> {
        let templates = self.children.values().filter_map(|child| child.template.as_ref());
        templates.filter_map(|template| Some(template.underway.front()?.since + FORK_PATIENCE)).min()
    }

    pub(super) fn end_hung_templates(&mut self, now: Instant) {
        let is_late = |fork: &Fork| now >= fork.since + FORK_PATIENCE;
        for (&pid, child) in &self.children {
            if child.template.as_ref().and_then(|it| it.underway.front()).is_some_and(is_late) {
                wait::kill_group(pid);
            }
        }
    }

    /// Hears all templates that are forking: what a worker said of itself it said before it ended.
    pub(super) fn hear_forks(&mut self) {
        let forking = |child: &Child| child.template.as_ref().is_some_and(Template::has_forks);
        let pids: Vec<u32> =
            self.children.iter().filter(|(_, child)| forking(child)).map(|(&pid, _)| pid).collect();
        pids.into_iter().for_each(|pid| while self.hear_some(pid) {});
    }

    /// A template, or what it has forked, has something to say.
    pub(super) fn hear_template(&mut self, pid: u32) {
        if self.hear_some(pid)
            && let Some(template) = self.template_mut(pid)
        {
            // There is more, of which there is no event.
            let (token, socket) = (Token(pid as usize | FORKS), template.socket.as_raw_fd());
            let _ = self.poll.registry().reregister(&mut SourceFd(&socket), token, Interest::READABLE);
        }
        if self.template_mut(pid).is_some_and(|template| template.outbox.len() > 0) {
            self.send_orders(pid);
        }
    }

    /// Hears some messages. Returns whether there may be more.
    fn hear_some(&mut self, pid: u32) -> bool {
        for _ in 0..WORDS_MAX {
            let Some(template) = self.template_mut(pid) else { return false };
            let mut bytes = [0; MESSAGE_BYTES_MAX];
            let Some((length, sender)) = receive(&template.socket, &mut bytes) else { return false };
            let is_sense = match Word::decode(&bytes[..length]) {
                Some(word) => self.obey_template(pid, word, sender),
                None => false,
            };
            if !is_sense {
                self.end_template(pid, "it does not speak as a template does: see `start.mode`");
                return false;
            }
        }
        true
    }

    fn end_template(&mut self, pid: u32, text: &str) {
        if let Some(child) = self.children.get(&pid) {
            let worker = child.worker;
            self.report(&ReportMessage::Template { worker, news: TemplateNews::Refused(text) }, None);
            wait::kill_group(pid);
        }
    }

    /// Returns whether that makes sense.
    fn obey_template(&mut self, pid: u32, word: Word<'_>, sender: u32) -> bool {
        let Some(child) = self.children.get_mut(&pid) else { return true };
        let (worker, process) = (child.worker, child.process);
        let Some(template) = &mut child.template else { return true };
        let news = match word {
            Word::Born { worker } => return sender != process && self.born(pid, worker, sender),
            _ if sender != process => return false,
            Word::Ready => TemplateNews::Ready,
            Word::Status(text) => TemplateNews::Status(text),
            Word::Refused(text) => TemplateNews::Refused(text),
            Word::Extend(more_ms) => TemplateNews::Extend(more_ms),
            Word::NotForked { worker, errno } => {
                if template.take(worker).is_some() {
                    self.report_failure(worker, &Refusal::new("fork", Errno::from_raw_os_error(errno)));
                }
                return true;
            }
            Word::Forked { worker, pid: forked } => {
                // One that was heard of itself already is none of these.
                let fork = template.underway.iter_mut().find(|fork| fork.worker == worker);
                if let Some(fork) = fork {
                    fork.pid = Some(forked);
                    if !is_child(forked) {
                        self.fork_ended(forked);
                    }
                }
                return true;
            }
        };
        self.report(&ReportMessage::Template { worker, news }, None);
        true
    }

    /// A process that is no worker has been waited for: if it was forked to be one, it has failed.
    pub(super) fn fork_ended(&mut self, pid: u32) {
        let templates = self.children.values_mut().filter_map(|child| child.template.as_mut());
        let found = templates.flat_map(|template| {
            let at = template.underway.iter().position(|fork| fork.pid == Some(pid));
            at.and_then(|at| template.underway.remove(at))
        });
        let failed: Vec<u64> = found.map(|fork| fork.worker).collect();
        for worker in failed {
            self.report_failure(worker, &Refusal::new("fork: it ended at once", Errno::CHILD));
        }
    }

    /// A process says that it is a worker which a template was to fork. Returns whether that makes sense.
    fn born(&mut self, template: u32, worker: u64, pid: u32) -> bool {
        if self.children.contains_key(&pid) || !is_child(pid) {
            return false;
        }
        let Some(child) = self.children.get_mut(&template) else { return true };
        let (terms, rlimits) = (child.terms, child.rlimits.clone());
        let observed = Observed { is_inherited: true, ..child.observed };
        let Some(fork) = child.template.as_mut().and_then(|it| it.take(worker)) else { return false };
        let opened = Pid::from_raw(pid as i32).ok_or(Errno::SRCH).and_then(|number| {
            let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
            Ok((rustix::io::fcntl_dupfd_cloexec(&pidfd, 0)?, pidfd))
        });
        let (copy, pidfd) = match opened {
            Ok(opened) => opened,
            Err(errno) => {
                wait::kill_group(pid);
                self.report_failure(worker, &Refusal::new("descriptors", errno));
                return true;
            }
        };
        let mut source = SourceFd(&pidfd.as_raw_fd());
        let _ = self.poll.registry().register(&mut source, Token(pid as usize | END), Interest::READABLE);
        let child = Child {
            worker,
            pidfd,
            stage: Stage::Running,
            terms,
            rlimits,
            is_confined: true,
            process: pid,
            listener: None,
            violation: None,
            folder: None,
            leaf: None,
            observed,
            status: None,
            template: None,
        };
        self.children.insert(pid, child);
        self.report(&ReportMessage::Spawned { worker, pid, observed }, Some(copy));
        if fork.is_doomed {
            wait::kill_group(pid);
        }
        true
    }

    /// A template has ended: what it was to fork is not coming.
    pub(super) fn template_ended(&mut self, template: Template) {
        for fork in template.underway {
            self.report_failure(fork.worker, &Refusal::new("fork: its template has ended", Errno::CHILD));
        }
    }
}

/// Whether there is such a child that has not been waited for.
fn is_child(pid: u32) -> bool {
    bulkhead_linux::wait::is_child(pid)
}

/// A message, and which process has sent it.
fn receive(socket: &OwnedFd, bytes: &mut [u8]) -> Option<(usize, u32)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)
    });
    let mut sender = 0;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmCredentials(credentials) = message {
            sender = credentials.pid.as_raw_nonzero().get() as u32;
        }
    }
    received.ok().filter(|message| message.bytes > 0).map(|message| (message.bytes, sender))
}

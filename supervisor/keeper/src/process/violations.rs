//! Forbidden system calls: the process that made one is named, and killed.

use bulkhead_linux::process_tree;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::{Child, LISTENER, Process, REPORTS_WAITING_MAX, deregister, register_again};
use crate::confine::seccomp::{self, News};
use crate::{ReportMessage, observe};

impl Process {
    /// The kernel tells of forbidden calls.
    pub(super) fn look_at_violation(&mut self, pid: u32) {
        let Some(Child { listener: Some(listener), .. }) = self.children.get(&pid) else { return };
        let received = match seccomp::news(listener) {
            Ok(News::Call) => seccomp::receive(listener),
            Ok(News::None) => return,
            Ok(News::Over) => return self.drop_listener(pid),
            Err(errno) => Err(errno.into()),
        };
        let Ok(received) = received else { return self.drop_listener(pid) };
        // Others may wait in their calls, and of those that came meanwhile there is no event.
        let _ = register_again(&self.poll, listener, pid as usize | LISTENER, false);
        if let Some(notification) = received {
            self.end_violator(pid, &notification);
        }
    }

    /// The process that made a forbidden call is killed, and the news goes out before that of its death can.
    pub(super) fn end_violator(&mut self, pid: u32, notification: &seccomp::Notification) {
        let call = notification.number;
        let Some(child) = self.children.get(&pid) else { return };
        let Some(listener) = &child.listener else { return };
        let found = observe::process_of(notification.thread).and_then(|(process, inner)| {
            let number = Pid::from_raw(process as i32).ok_or(Errno::SRCH)?;
            let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
            Ok((process, inner, self.worker_of(pid, process), pidfd))
        });
        // Still waiting: then numbers and descriptor are those of the thread that waits, and of its process.
        if seccomp::is_waiting(listener, notification.id).is_err() {
            return;
        }
        // A process that cannot be found is taken for the worker itself: then all of it goes.
        let (process, inner, of, pidfd) = match found {
            Ok((process, inner, of, pidfd)) => (process, inner, of, Some(pidfd)),
            Err(_) => (child.process, child.process, pid, None),
        };
        let Some(child) = self.children.get_mut(&of) else { return };
        let other = pidfd.filter(|_| process != child.process);
        if other.is_none() {
            child.violation.get_or_insert(call);
        }
        let worker = child.worker;
        self.report_violation(worker, inner, call);
        let Some(pidfd) = other else { return self.kill(of) };
        if rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).is_err()
            && let Some(Child { listener: Some(listener), .. }) = self.children.get(&pid)
        {
            let _ = seccomp::refuse(listener, notification.id, Errno::PERM);
        }
    }

    /// Which worker a process under the filter of this one belongs to: that of a template is that of all that it has
    /// forked.
    fn worker_of(&self, pid: u32, process: u32) -> u32 {
        let is_nest = self.children.get(&pid).is_some_and(|child| child.nest.is_some());
        if !is_nest {
            return pid;
        }
        let is_worker = |pid: &u32| self.children.get(pid).is_some_and(|child| child.home.is_some());
        if is_worker(&process) {
            return process;
        }
        let line = process_tree::lineage(process, pid).unwrap_or_default();
        line.into_iter().find(is_worker).unwrap_or(pid)
    }

    /// A worker can have as many processes made and killed as it likes: where the supervisor does not keep up,
    /// their end has to do as news.
    pub(super) fn report_violation(&mut self, worker: u64, process: u32, call: u32) {
        if self.outbox.len() < REPORTS_WAITING_MAX {
            self.report(&ReportMessage::Violation { worker, process, call }, None);
        }
        let _ = self.flush();
    }

    pub(super) fn drop_listener(&mut self, pid: u32) {
        let listener = self.children.get_mut(&pid).and_then(|child| child.listener.take());
        if let Some(listener) = listener {
            deregister(&self.poll, &listener);
        }
    }
}

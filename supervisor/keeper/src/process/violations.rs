//! Handles system calls that a worker's seccomp filter forbids. The keeper's event loop calls this file when the kernel
//! reports such a call. Kills the process that made the call, or the whole worker, and reports the violation to the
//! supervisor. `confine::seccomp` determines which calls are forbidden.

use bulkhead_linux::process_tree;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::{Child, EventLoop, LISTENER, PENDING_REPORTS_MAX, deregister, observe, register_again};
use crate::confine::seccomp::{self, ListenerState};
use crate::protocol::ReportMessage;

impl EventLoop {
    /// Handles a notification of a forbidden system call.
    pub(super) fn handle_violation(&mut self, pid: u32) {
        let Some(Child { listener: Some(listener), .. }) = self.children.get(&pid) else { return };
        let received = match seccomp::poll_listener(listener) {
            Ok(ListenerState::Pending) => seccomp::receive(listener),
            Ok(ListenerState::Idle) => return,
            Ok(ListenerState::Closed) => return self.drop_listener(pid),
            Err(errno) => Err(errno.into()),
        };
        let Ok(received) = received else { return self.drop_listener(pid) };
        // Registers the listener again, because other threads may have made forbidden calls in the meantime, which
        // polling would not report.
        let _ = register_again(&self.poll, listener, pid as usize | LISTENER, false);
        if let Some(notification) = received {
            self.kill_violator(pid, &notification);
        }
    }

    /// Kills the process that made a forbidden call. The violation is reported before the kill, so that its report
    /// precedes the exit report.
    pub(super) fn kill_violator(&mut self, pid: u32, notification: &seccomp::Notification) {
        let call = notification.number;
        let Some(child) = self.children.get(&pid) else { return };
        let Some(listener) = &child.listener else { return };
        let found = observe::process_of_thread(notification.thread).and_then(|(process, inner)| {
            let number = Pid::from_raw(process as i32).ok_or(Errno::SRCH)?;
            let pidfd = rustix::process::pidfd_open(number, PidfdFlags::empty())?;
            Ok((process, inner, self.worker_of(pid, process), pidfd))
        });
        // If the thread is still blocked in the call, the PIDs and the pidfd found above are those of its process.
        if seccomp::check_pending(listener, notification.id).is_err() {
            return;
        }
        // If the process that made the call cannot be found, kills all processes of the worker.
        let (process, inner, owner, pidfd) = match found {
            Ok((process, inner, owner, pidfd)) => (process, inner, owner, Some(pidfd)),
            Err(_) => (child.process, child.process, pid, None),
        };
        let Some(child) = self.children.get_mut(&owner) else { return };
        let other = pidfd.filter(|_| process != child.process);
        if other.is_none() {
            child.violation.get_or_insert(call);
        }
        let worker = child.worker;
        self.report_violation(worker, inner, call);
        let Some(pidfd) = other else { return self.kill(owner) };
        if rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).is_err()
            && let Some(Child { listener: Some(listener), .. }) = self.children.get(&pid)
        {
            let _ = seccomp::respond_with_error(listener, notification.id, Errno::PERM);
        }
    }

    /// Returns the PID of the worker to which a process belongs. Needed because a template's filter also applies to all
    /// workers that the template has forked.
    fn worker_of(&self, pid: u32, process: u32) -> u32 {
        let is_namespace = self.children.get(&pid).is_some_and(|child| child.namespace.is_some());
        if !is_namespace {
            return pid;
        }
        let is_worker = |pid: &u32| self.children.get(pid).is_some_and(|child| child.member.is_some());
        if is_worker(&process) {
            return process;
        }
        let line = process_tree::ancestors(process, pid).unwrap_or_default();
        line.into_iter().find(is_worker).unwrap_or(pid)
    }

    /// Reports a violation, unless too many reports are pending. A worker can create any number of processes that
    /// violate its filter. If the supervisor cannot keep up, it receives only the report of the worker's exit.
    pub(super) fn report_violation(&mut self, worker: u64, process: u32, call: u32) {
        if self.outbox.len() < PENDING_REPORTS_MAX {
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

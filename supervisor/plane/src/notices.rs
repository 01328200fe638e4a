//! Bounded channels from the data plane to the control plane. Each kind of notice has a separate channel, so
//! that a flood of events cannot crowd out other notices.
//!
//! If the event channel is full, events are dropped and counted. If the channel for worker output is full, the data
//! plane keeps the output and sends it later. The milestone channel is never full.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::command::DroppableNotice;

/// Maximum number of events and crash reports in the channel. If the channel is full, further events and reports are
/// dropped and counted.
const DROPPABLE_MAX: usize = 16 * 1024;

/// Maximum number of [`WorkerOutput`] values in the channel. Each value accounts for four of the supervisor's
/// open descriptors.
const OUTPUTS_MAX: usize = 256;

/// Number of different milestones, each of which is sent at most once.
const MILESTONES_MAX: usize = 2;

/// Read ends of the pipes for a new worker's standard output and standard error.
#[derive(Debug)]
pub struct WorkerOutput {
    pub bulkhead: Arc<str>,
    pub pid: u32,
    /// True if the process is a template. Forked workers inherit the write ends of the pipes, so output can
    /// arrive after the template has exited.
    pub is_template: bool,
    /// Read end of the pipe for standard output.
    pub stdout: OwnedFd,
    /// Read end of the pipe for standard error.
    pub stderr: OwnedFd,
}

/// An event that happens once in the lifetime of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// All bulkheads have finished starting, successfully or not.
    Started,
    /// The supervisor has begun to stop.
    Stopping,
}

/// A message from the data plane to the control plane.
#[derive(Debug)]
pub enum Notice {
    /// A milestone was reached.
    Milestone(Milestone),
    /// Contains the pipes from which a new worker's output can be read.
    Output(WorkerOutput),
    /// An event or a crash report.
    Droppable(DroppableNotice),
}

/// Senders for all kinds of notices, owned by the data plane.
#[derive(Debug)]
pub struct NoticeSender {
    milestones: Sender<Milestone>,
    outputs: Sender<WorkerOutput>,
    notices: Sender<DroppableNotice>,
}

/// Receivers for all kinds of notices, owned by the control plane.
#[derive(Debug)]
pub struct NoticeReceiver {
    milestones: Receiver<Milestone>,
    outputs: Receiver<WorkerOutput>,
    notices: Receiver<DroppableNotice>,
}

pub fn channels() -> (NoticeSender, NoticeReceiver) {
    let (milestones, from_milestones) = channel(MILESTONES_MAX);
    let (outputs, from_outputs) = channel(OUTPUTS_MAX);
    let (notices, from_notices) = channel(DROPPABLE_MAX);
    let receiver =
        NoticeReceiver { milestones: from_milestones, outputs: from_outputs, notices: from_notices };
    (NoticeSender { milestones, outputs, notices }, receiver)
}

impl NoticeSender {
    /// Sends an event or crash report. Returns false if the channel is full.
    #[inline]
    pub fn send_droppable(&self, notice: DroppableNotice) -> bool {
        self.notices.try_send(notice).is_ok()
    }

    /// Sends a milestone. Must be called at most once per milestone.
    #[inline]
    pub fn send_milestone(&self, milestone: Milestone) {
        let sent = self.milestones.try_send(milestone);
        debug_assert!(!matches!(sent, Err(TrySendError::Full(_))), "{milestone:?} was already sent");
    }

    /// Sends the read ends of a worker's output pipes to the control plane. If the channel is full, returns the pipes
    /// to the caller.
    pub fn send_output(&self, output: WorkerOutput) -> Result<(), WorkerOutput> {
        match self.outputs.try_send(output) {
            Err(TrySendError::Full(output)) => Err(output),
            // If the control plane has exited, nothing needs the output any longer.
            Err(TrySendError::Closed(_)) | Ok(()) => Ok(()),
        }
    }
}

impl NoticeReceiver {
    /// Receives the next notice. Milestones and worker outputs come before events, so that the control plane has a
    /// worker's output before any events about that worker. Returns `None` when the channels are closed.
    pub async fn recv(&mut self) -> Option<Notice> {
        tokio::select! {
            biased;
            Some(milestone) = self.milestones.recv() => Some(Notice::Milestone(milestone)),
            Some(output) = self.outputs.recv() => Some(Notice::Output(output)),
            notice = self.notices.recv() => notice.map(Notice::Droppable),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Event;
    use bulkhead_api::{EventKind, Severity};

    fn event() -> DroppableNotice {
        DroppableNotice::Event(Box::new(Event::new(Severity::Info, None, EventKind::Stopped {})))
    }

    fn output(pid: u32) -> WorkerOutput {
        let (stdout, stderr) = (std::io::stdin(), std::io::stdin());
        let duplicate = |fd: std::io::Stdin| std::os::fd::AsFd::as_fd(&fd).try_clone_to_owned().unwrap();
        let [stdout, stderr] = [duplicate(stdout), duplicate(stderr)];
        WorkerOutput { bulkhead: "b".into(), pid, is_template: false, stdout, stderr }
    }

    #[test]
    fn flood_of_events_does_not_displace_outputs_or_milestones() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (sender, mut receiver) = channels();
        while sender.send_droppable(event()) {}
        for pid in 0..OUTPUTS_MAX as u32 {
            assert!(sender.send_output(output(pid)).is_ok());
        }
        // The channel is full, so `send_output` returns the output.
        assert_eq!(sender.send_output(output(7)).unwrap_err().pid, 7);
        sender.send_milestone(Milestone::Started);
        sender.send_milestone(Milestone::Stopping);
        let received = runtime.block_on(async { [receiver.recv().await, receiver.recv().await] });
        assert!(matches!(received[0], Some(Notice::Milestone(Milestone::Started))), "{received:?}");
        assert!(matches!(received[1], Some(Notice::Milestone(Milestone::Stopping))), "{received:?}");
        for expected in 0..OUTPUTS_MAX as u32 {
            let received = runtime.block_on(receiver.recv());
            assert!(matches!(received, Some(Notice::Output(WorkerOutput { pid, .. })) if pid == expected));
        }
        assert!(sender.send_output(output(7)).is_ok());
        drop(sender);
        let rest = runtime.block_on(async {
            let mut rest = 0;
            while receiver.recv().await.is_some() {
                rest += 1;
            }
            rest
        });
        assert_eq!(rest, DROPPABLE_MAX + 1);
    }
}

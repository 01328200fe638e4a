//! Bounded channels from the data plane to the control plane, one per kind of notice, so that a flood of
//! events cannot crowd out the others.
//!
//! Excess events are dropped and counted. Output descriptors that do not fit stay with the worker's entry and
//! are sent later. Milestones always fit.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::command::Notice;

/// Maximum number of queued events and crash reports. The excess is dropped and counted.
const NOTICES_MAX: usize = 16 * 1024;

/// Maximum number of queued worker outputs. Each accounts for four open descriptors of the supervisor.
const OUTPUTS_MAX: usize = 256;

/// Number of milestones. Each is sent once.
const MILESTONES_MAX: usize = 2;

/// The read ends of a new worker's standard output and standard error.
#[derive(Debug)]
pub struct WorkerOutput {
    /// The worker's bulkhead.
    pub bulkhead: Arc<str>,
    /// Process id of the worker.
    pub pid: u32,
    /// True for a template. Its workers inherit the write ends and can write after the template has ended.
    pub is_template: bool,
    /// Read end of standard output.
    pub stdout: OwnedFd,
    /// Read end of standard error.
    pub stderr: OwnedFd,
}

/// An event that happens once in the lifetime of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// The first start of every bulkhead has finished, successfully or not.
    Started,
    /// The supervisor has begun to stop.
    Stopping,
}

/// A message from the data plane.
#[derive(Debug)]
pub enum Heard {
    /// A milestone was reached.
    Milestone(Milestone),
    /// The output of a new worker can be read.
    Output(WorkerOutput),
    /// An event or a crash report.
    Notice(Notice),
}

/// The sending ends, owned by the data plane.
#[derive(Debug)]
pub struct Speaker {
    milestones: Sender<Milestone>,
    outputs: Sender<WorkerOutput>,
    notices: Sender<Notice>,
}

/// The receiving ends, owned by the control plane.
#[derive(Debug)]
pub struct Listener {
    milestones: Receiver<Milestone>,
    outputs: Receiver<WorkerOutput>,
    notices: Receiver<Notice>,
}

/// Creates the channels.
pub fn ways() -> (Speaker, Listener) {
    let (milestones, milestones_heard) = channel(MILESTONES_MAX);
    let (outputs, outputs_heard) = channel(OUTPUTS_MAX);
    let (notices, notices_heard) = channel(NOTICES_MAX);
    let listener = Listener { milestones: milestones_heard, outputs: outputs_heard, notices: notices_heard };
    (Speaker { milestones, outputs, notices }, listener)
}

impl Speaker {
    /// Sends an event or crash report. Returns false if the channel is full.
    #[inline]
    pub fn notice(&self, notice: Notice) -> bool {
        self.notices.try_send(notice).is_ok()
    }

    /// Sends a milestone. Must be called at most once per milestone.
    #[inline]
    pub fn milestone(&self, milestone: Milestone) {
        let told = self.milestones.try_send(milestone);
        debug_assert!(!matches!(told, Err(TrySendError::Full(_))), "{milestone:?} was already sent");
    }

    /// Sends a worker's output. Returns the output if the channel is full.
    pub fn output(&self, output: WorkerOutput) -> Result<(), WorkerOutput> {
        match self.outputs.try_send(output) {
            Err(TrySendError::Full(output)) => Err(output),
            // Without a control plane, the output is not needed.
            Err(TrySendError::Closed(_)) | Ok(()) => Ok(()),
        }
    }
}

impl Listener {
    /// Receives the next message. Milestones and outputs go before events, so that the output of a worker is
    /// known before its events. Returns `None` when the channels are closed.
    pub async fn hear(&mut self) -> Option<Heard> {
        tokio::select! {
            biased;
            Some(milestone) = self.milestones.recv() => Some(Heard::Milestone(milestone)),
            Some(output) = self.outputs.recv() => Some(Heard::Output(output)),
            notice = self.notices.recv() => notice.map(Heard::Notice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Event;
    use bulkhead_api::{Severity, What};

    fn event() -> Notice {
        Notice::Event(Box::new(Event::new(Severity::Info, None, What::Stopped {})))
    }

    fn output(pid: u32) -> WorkerOutput {
        let (stdout, stderr) = (std::io::stdin(), std::io::stdin());
        let duplicate = |fd: std::io::Stdin| std::os::fd::AsFd::as_fd(&fd).try_clone_to_owned().unwrap();
        let [stdout, stderr] = [duplicate(stdout), duplicate(stderr)];
        WorkerOutput { bulkhead: "b".into(), pid, is_template: false, stdout, stderr }
    }

    #[test]
    fn flood_of_events_drops_no_outputs_and_no_milestones() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (speaker, mut listener) = ways();
        while speaker.notice(event()) {}
        for pid in 0..OUTPUTS_MAX as u32 {
            assert!(speaker.output(output(pid)).is_ok());
        }
        // The channel is full, so the sender gets the output back.
        assert_eq!(speaker.output(output(7)).unwrap_err().pid, 7);
        speaker.milestone(Milestone::Started);
        speaker.milestone(Milestone::Stopping);
        let heard = runtime.block_on(async { [listener.hear().await, listener.hear().await] });
        assert!(matches!(heard[0], Some(Heard::Milestone(Milestone::Started))), "{heard:?}");
        assert!(matches!(heard[1], Some(Heard::Milestone(Milestone::Stopping))), "{heard:?}");
        for expected in 0..OUTPUTS_MAX as u32 {
            let heard = runtime.block_on(listener.hear());
            assert!(matches!(heard, Some(Heard::Output(WorkerOutput { pid, .. })) if pid == expected));
        }
        assert!(speaker.output(output(7)).is_ok());
        drop(speaker);
        let rest = runtime.block_on(async {
            let mut rest = 0;
            while listener.hear().await.is_some() {
                rest += 1;
            }
            rest
        });
        assert_eq!(rest, NOTICES_MAX + 1);
    }
}

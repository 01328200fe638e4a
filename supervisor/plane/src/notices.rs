//! What the data plane tells the control plane, each kind on a way of its own: a storm of events is dropped in part
//! and counted, and takes nothing else along.
//!
//! Descriptors that find no room stay with their worker, which is asked again; milestones always have room.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::command::Notice;

/// Events and crash reports that wait for the control plane at most; what comes beyond is dropped and counted.
const NOTICES_MAX: usize = 16 * 1024;

/// Workers whose output waits to be read by the control plane at most: four descriptors of ours for each.
const OUTPUTS_MAX: usize = 256;

/// Milestones that there are, each once.
const MILESTONES_MAX: usize = 2;

/// A worker was started; these are the reading ends of its standard output and error.
#[derive(Debug)]
pub struct WorkerOutput {
    /// The worker's bulkhead.
    pub bulkhead: Arc<str>,
    /// Its process.
    pub pid: u32,
    /// Whether other workers have what it has open, and may write there when it is gone.
    pub is_template: bool,
    /// Its standard output.
    pub stdout: OwnedFd,
    /// Its standard error.
    pub stderr: OwnedFd,
}

/// What happens once in a supervisor's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// Every bulkhead's first start has ended, ready or failed.
    Started,
    /// The supervisor has begun to stop.
    Stopping,
}

/// What the control plane hears.
#[derive(Debug)]
pub enum Heard {
    /// A milestone.
    Milestone(Milestone),
    /// A new worker's output is to be read.
    Output(WorkerOutput),
    /// An event, or a crash report.
    Notice(Notice),
}

/// The data plane's ends.
#[derive(Debug)]
pub struct Speaker {
    milestones: Sender<Milestone>,
    outputs: Sender<WorkerOutput>,
    notices: Sender<Notice>,
}

/// The control plane's ends.
#[derive(Debug)]
pub struct Listener {
    milestones: Receiver<Milestone>,
    outputs: Receiver<WorkerOutput>,
    notices: Receiver<Notice>,
}

/// Both ends of every way.
pub fn ways() -> (Speaker, Listener) {
    let (milestones, milestones_heard) = channel(MILESTONES_MAX);
    let (outputs, outputs_heard) = channel(OUTPUTS_MAX);
    let (notices, notices_heard) = channel(NOTICES_MAX);
    let listener = Listener { milestones: milestones_heard, outputs: outputs_heard, notices: notices_heard };
    (Speaker { milestones, outputs, notices }, listener)
}

impl Speaker {
    /// Tells of an event or a crash. Returns whether there was room.
    #[inline]
    pub fn notice(&self, notice: Notice) -> bool {
        self.notices.try_send(notice).is_ok()
    }

    /// Tells of a milestone, once.
    #[inline]
    pub fn milestone(&self, milestone: Milestone) {
        let told = self.milestones.try_send(milestone);
        debug_assert!(!matches!(told, Err(TrySendError::Full(_))), "{milestone:?} was told before");
    }

    /// Hands a worker's output over, or back if there is no room now.
    pub fn output(&self, output: WorkerOutput) -> Result<(), WorkerOutput> {
        match self.outputs.try_send(output) {
            Err(TrySendError::Full(output)) => Err(output),
            // Without a control plane nothing is read.
            Err(TrySendError::Closed(_)) | Ok(()) => Ok(()),
        }
    }
}

impl Listener {
    /// The next word: milestones and descriptors before events, so that what is told of a worker comes after its
    /// output. `None` at the end.
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
    fn a_storm_of_events_takes_no_descriptors_and_no_milestones_along() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (speaker, mut listener) = ways();
        while speaker.notice(event()) {}
        for pid in 0..OUTPUTS_MAX as u32 {
            assert!(speaker.output(output(pid)).is_ok());
        }
        // There is no room, and they are still ours.
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

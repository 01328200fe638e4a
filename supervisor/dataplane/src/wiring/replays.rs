//! Performs the steps of replays that `replays` requests. Creates the compartment, submits the job, and stops and
//! removes the compartment afterwards. `replays` decides the steps and sends the result. The control plane chooses the
//! jobs.

use std::time::Duration;

use bulkhead_plane::command::{ReplayError, ReplayRequest, ReplayResult};
use bulkhead_policy::{Event, Submission};
use tokio::sync::oneshot;

use crate::bulkheads::Compartment;
use crate::replays::{Step, limits_for_one};
use crate::slab::CompartmentIndex;
use crate::{DataPlane, HeldPayload, Incoming, JobData};

/// Maximum time that a replay's worker can take to exit after the replayed job ends.
const END_TIMEOUT: Duration = Duration::from_secs(2);

impl DataPlane {
    pub(crate) fn replay(
        &mut self,
        request: ReplayRequest,
        done: oneshot::Sender<ReplayResult>,
    ) -> Result<(), ReplayError> {
        let bulkhead = self.bulkheads.find(&request.bulkhead).ok_or(ReplayError::NotConfigured)?;
        if self.is_stopping {
            return Err(ReplayError::Stopping);
        }
        self.replays.check_room()?;
        let limits = limits_for_one(self.bulkheads[bulkhead].limits(&self.compartments));
        let seed = self.compartments.next_seed(self.now);
        let mut compartment = Compartment::new(bulkhead, None, limits, seed, self.now);
        compartment.is_replay = true;
        let compartment = self.compartments.insert(compartment);
        self.replays.add(compartment, request, done);
        self.apply(compartment, Event::Start, Incoming::None);
        Ok(())
    }

    /// Performs all pending steps of replays.
    pub(crate) fn advance_replays(&mut self) {
        loop {
            let compartments = &self.compartments;
            let step = self.replays.next_step(|index| compartments[index].policy.is_stopped());
            match step {
                Some(Step::Submit(compartment, request)) => self.submit_replay(compartment, request),
                Some(Step::Stop(compartment)) => {
                    let by = self.now + END_TIMEOUT;
                    self.apply(compartment, Event::Stop { by }, Incoming::None);
                }
                Some(Step::Remove(compartment)) => self.compartments.vacate(compartment),
                None => return,
            }
        }
    }

    fn submit_replay(&mut self, compartment: CompartmentIndex, request: ReplayRequest) {
        let ReplayRequest { operation, tenant, payload, .. } = request;
        let record = self.buffers.record(JobData {
            operation: operation.into(),
            tenant: tenant.as_str().into(),
            payload_bytes: payload.len(),
            held: HeldPayload { is_resendable: true, ..HeldPayload::default() },
            ..JobData::default()
        });
        let tenant = self.compartments[compartment].policy.tenant(&tenant);
        let sequence = self.compartments.next_job();
        let submission = Submission { sequence, tenant, ..Submission::new(record) };
        self.apply(compartment, Event::Submit(submission), Incoming::Owned(payload));
    }
}

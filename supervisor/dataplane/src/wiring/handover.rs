//! Performs the steps of an upgrade, in which this supervisor hands over to a successor or takes over from a
//! predecessor.
//!
//! The predecessor finishes the jobs that it has accepted. A connection moves to the successor when it has no jobs,
//! leases or unsent bytes. Until then, only frames about existing jobs are handled. A new request is held back, and
//! moves with the connection. The return of a lease behind such a request cannot be read, so the connection then moves
//! once all leases have been recalled.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use bulkhead_api::{BreakerMode, Change, ChangedPer, ChangedRate, TenantChange, TenantRate};
use bulkhead_config::TenantConfig;
use bulkhead_linux::packets::{self, Outbox, Received};
use bulkhead_plane::access::{Grant, HttpClient};
use bulkhead_plane::command::{SteerAction, SteerError};
use bulkhead_plane::handover::{
    BulkheadState, CompartmentName, Frame, FrameError, HandoverCommand, Held, MESSAGE_BYTES_MAX,
    NUMBERS_PER_ATTEMPT, Numbers, Prepared, Quarantined, SessionClient, SessionState, Switch, SwitchState,
    TenantState, die_on_request, encode, kind,
};
use bulkhead_plane::peer_check;
use bulkhead_policy::{Activity, BulkheadState as State, Event, Limits, RateLimit, RatePer};
use bulkhead_shared::RejectReason;
use mio::Interest;
use mio::unix::SourceFd;

use crate::handover::{Needs, Transfer};
use crate::sessions::endpoint::ClientEndpoint;
use crate::sessions::{Client, Phase};
use crate::shares::Owner;
use crate::slab::{BulkheadIndex, CompartmentIndex, SessionIndex};
use crate::{DataPlane, Incoming, TRANSFER, submissions};

/// Maximum number of connections handed over to the successor per iteration.
const PASSED_ON_PER_ITERATION_MAX: usize = 64;

impl DataPlane {
    pub(crate) fn run_handover_command(&mut self, command: HandoverCommand) {
        // Errors from `send` are ignored. They mean that the control plane no longer waits for the reply, and that it
        // ends the upgrade by itself.
        match command {
            HandoverCommand::Prepare { lifeline, reply } => {
                let prepared = self.prepare_handover(lifeline);
                let _ = reply.send(prepared.map_err(|error| error.to_string()));
            }
            HandoverCommand::Switch { transfer, reply } => {
                self.handover.begin_switch(self.now, transfer, reply);
            }
            HandoverCommand::Release => self.handover.release(),
            HandoverCommand::TakeBack(listener) => self.take_back(listener),
            HandoverCommand::Leave => self.handover.leave(),
            HandoverCommand::Restore { bulkheads, tenants, reply } => {
                let _ = reply.send(self.restore(&bulkheads, &tenants));
            }
            HandoverCommand::TakeOver { held, quarantined, switch, transfer, tokens, reply } => {
                self.handover.tokens = tokens;
                self.take_over(held, quarantined, switch, transfer);
                let _ = reply.send(());
            }
            HandoverCommand::PredecessorEnded => self.predecessor_ended(),
        }
    }

    // The predecessor.

    fn prepare_handover(&mut self, lifeline: Arc<OwnedFd>) -> Result<Prepared, SteerError> {
        if self.is_stopping {
            return Err(SteerError::Stopping);
        }
        if self.handover.is_under_way() {
            return Err(SteerError::Upgrading);
        }
        let conflict = |what: &str, error: &std::io::Error| {
            Err(SteerError::Conflict(format!("{what}: {error}; try again")))
        };
        let listener = match self.acceptor.duplicate() {
            Ok(listener) => listener,
            Err(error) => return conflict("failed to duplicate the jobs socket", &error),
        };
        let sent = self.keeper.serving().and_then(|keeper| keeper.send_lifeline(lifeline));
        if let Err(error) = sent {
            return conflict("failed to reach the keeper", &error);
        }
        self.handover.prepare();
        self.update_leases(|leases, now| leases.stop_lending(now));
        let mut tenants = Vec::new();
        let mut bulkheads = Vec::new();
        for bulkhead in self.bulkheads.configured() {
            let entry = &self.bulkheads[bulkhead];
            let live = numbers_of(entry.limits(&self.compartments));
            bulkheads.push(BulkheadState {
                name: entry.name.to_string(),
                is_ready: self.can_run_jobs(bulkhead),
                closed: self.bulkheads.closed_by_operator(&self.compartments, &entry.name),
                file: live,
                live,
            });
            tenants.extend(entry.tenant_limits().iter().map(|(tenant, own)| TenantState {
                bulkhead: entry.name.to_string(),
                tenant: tenant.clone(),
                file: numbers_of_tenant(own),
                live: numbers_of_tenant(own),
            }));
        }
        Ok((bulkheads, tenants, listener))
    }

    /// Performs the handover steps that are due. Runs before output is written, so that the successor is notified of a
    /// free permit before a client receives the outcome.
    pub(crate) fn advance_handover(&mut self) {
        if !self.handover.is_under_way() {
            return;
        }
        self.update_leases(|leases, now| leases.recall_all_idle(now));
        if let Some(reply) = self.handover.end_wait(self.now, self.leases.has_idle()) {
            let state = self.switch();
            let _ = reply.send(state);
        }
        if self.handover.has_switched() {
            self.report_needed_permits();
        }
    }

    fn switch(&mut self) -> SwitchState {
        self.acceptor.stop_listening(&self.poll);
        let incoming = self.incoming_jobs();
        let mut state = SwitchState::default();
        for index in self.compartments.indices() {
            let Some(name) = self.compartment_name(index) else { continue };
            let policy = &self.compartments[index].policy;
            let needs = policy.needed_permits(incoming_in(&incoming, index));
            let quarantined = policy.quarantined_payloads(self.now);
            state.quarantined.extend(quarantined.into_iter().map(|it| Quarantined::new(name.clone(), it)));
            if needs.0 > 0 {
                self.handover.hold(index, needs);
                state.held.push(Held { compartment: name, permits: needs.0, waiting: needs.1 });
            }
            self.apply(index, Event::CapPermits { most: Some(needs.0) }, Incoming::None);
        }
        let numbers = self.handover.attempts * NUMBERS_PER_ATTEMPT;
        state.switch = Switch {
            jobs_after: self.compartments.last_job() + numbers,
            leases_after: self.leases.last_number() + numbers,
            events_after: numbers,
        };
        if let Some(transfer) = &self.handover.transfer {
            let _ = register(&self.poll, &transfer.socket);
        }
        state
    }

    /// Returns the compartments of jobs whose metadata has arrived but whose payload has not. These jobs are run by the
    /// predecessor, because it has already accepted their metadata.
    fn incoming_jobs(&mut self) -> Vec<CompartmentIndex> {
        let storing = self.sessions.values().filter_map(|session| session.inbox.storing_metadata());
        let named = storing.filter_map(|metadata| {
            let (submit, _) = submissions::decode(metadata).ok()?;
            Some((self.bulkheads.find(submit.bulkhead)?, submit.tenant.to_owned()))
        });
        let named: Vec<(BulkheadIndex, String)> = named.collect();
        named.into_iter().map(|(bulkhead, tenant)| self.compartment_for(bulkhead, &tenant)).collect()
    }

    /// Notifies the successor of permits that this supervisor no longer needs.
    fn report_needed_permits(&mut self) {
        let holders = self.handover.holders();
        if holders.is_empty() {
            return;
        }
        let incoming = self.incoming_jobs();
        for index in holders {
            // A compartment that is not in the table was removed after its last job.
            let needs: Needs = match self.compartments.get(index) {
                Some(compartment) => compartment.policy.needed_permits(incoming_in(&incoming, index)),
                None => (0, 0),
            };
            let Some((permits, waiting)) = self.handover.update(index, needs) else { continue };
            let Some(compartment) = self.compartment_name(index) else { continue };
            die_on_request("send", kind::HELD);
            let held = Held { compartment, permits, waiting };
            if let (Ok(message), Some(transfer)) =
                (encode(kind::HELD, &held, &[]), &mut self.handover.transfer)
            {
                transfer.outbox.push(message, Vec::new());
            }
        }
        self.flush_transfer();
    }

    fn compartment_name(&self, index: CompartmentIndex) -> Option<CompartmentName> {
        let compartment = self.compartments.get(index).filter(|compartment| !compartment.is_replay)?;
        let bulkhead = self.bulkheads.owner(compartment).name.to_string();
        Some(CompartmentName { bulkhead, tenant: compartment.tenant.as_deref().map(str::to_owned) })
    }

    /// Passes idle connections on to the successor. If the upgrade can no longer fail, stops this data plane once the
    /// last job and connection have ended. Runs after output has been written.
    pub(crate) fn pass_on_sessions(&mut self) {
        // If this supervisor is stopping, the successor stops as well and might already have exited. Further requests
        // are therefore rejected here.
        if !self.handover.moves_connections() || self.is_stopping {
            return;
        }
        let mut passed_on = 0;
        for index in self.sessions.indices() {
            if passed_on == PASSED_ON_PER_ITERATION_MAX || !self.handover.has_room() {
                break;
            }
            if self.is_movable(index) {
                self.pass_on(index);
                passed_on += 1;
            } else if self.sessions.get_mut(index).is_some_and(|session| session.is_left_over(self.now)) {
                self.close_session(index);
            } else if self.sessions.can_go_away(index, |client| self.leases.has_any(client)) {
                self.sessions.send_goaway(index);
            }
        }
        // Writes GOAWAY immediately. Otherwise, the client would have to wait before sending its next job.
        self.flush_connections();
        // Earlier messages might not have fit into the transfer socket.
        self.flush_transfer();
        if self.handover.is_leaving() {
            self.end_idle_workers();
        }
    }

    fn is_movable(&self, index: SessionIndex) -> bool {
        self.sessions.get(index).is_some_and(|session| {
            session.phase != Phase::Closing
                && matches!(session.end, ClientEndpoint::Socket(_))
                && !session.is_going_away
                && session.requests.is_empty()
                && session.outbox.is_empty()
                && !session.inbox.is_within_large()
                && self.leases.allow_move(self.sessions.id(index), session.hides_lease_returns())
        })
    }

    fn pass_on(&mut self, index: SessionIndex) {
        let id = self.sessions.id(index);
        self.update_leases(|leases, now| leases.client_gone(now, id));
        let Some((mut session, counted)) = self.sessions.close(index) else { return };
        self.unread_loans.forget(&mut session.unread);
        self.memory.close(session.holder, counted);
        self.publish_clients();
        let state = session.state();
        die_on_request("send", kind::SESSION);
        let message = encode(kind::SESSION, &state, &session.inbox.take_partial());
        let ClientEndpoint::Socket(socket) = session.end else { return };
        // Closing the socket would not end its registration with the event loop, because the successor keeps the open
        // file description open.
        let _ = self.poll.registry().deregister(&mut SourceFd(&socket.as_raw_fd()));
        if let (Ok(message), Some(transfer)) = (message, &mut self.handover.transfer) {
            transfer.outbox.push(message, vec![socket.into()]);
        }
    }

    /// Stops the workers of compartments that have no jobs and await no payload. Stops the data plane once no jobs or
    /// connections are left, and the memory files of the last clients have been freed.
    fn end_idle_workers(&mut self) {
        let (incoming, mut has_jobs) = (self.incoming_jobs(), false);
        for index in self.compartments.indices() {
            let Some(compartment) = self.compartments.get(index) else { continue };
            if !compartment.policy.has_no_jobs() || incoming.contains(&index) {
                has_jobs = true;
            } else if compartment.policy.activity() != Activity::ScaledToZero {
                self.apply(index, Event::ScaleToZero, Incoming::None);
            }
        }
        let is_sent = self.handover.transfer.as_ref().is_none_or(|transfer| transfer.outbox.is_empty());
        if !has_jobs && is_sent && self.sessions.iter().next().is_none() && !self.leases.has_unreturned() {
            self.stop();
        }
    }

    /// Resumes serving clients after the successor has failed.
    fn take_back(&mut self, listener: Option<std::os::unix::net::UnixListener>) {
        let had_switched = self.handover.has_switched();
        self.handover.take_back();
        self.close_transfer();
        self.update_leases(|leases, _| leases.lend_again());
        if had_switched {
            for index in self.compartments.indices() {
                if self.compartments.get(index).is_some() {
                    self.apply(index, Event::CapPermits { most: None }, Incoming::None);
                }
            }
        }
        self.sessions.read_held_back();
        if let Some(listener) = listener
            && let Err(error) = self.acceptor.replace_listener(&self.poll, listener)
        {
            self.reporter.trouble("failed to listen on the jobs socket", &error.to_string());
        }
    }

    /// Ends the handover because this supervisor is stopping. Rejects the requests that were held back for the
    /// successor.
    pub(crate) fn stop_handover(&mut self) {
        if self.handover.has_switched() {
            self.handover.release();
            self.sessions.read_held_back();
        }
    }

    // The successor.

    /// Restores the values that were set at runtime. The values of a bulkhead and of its tenants can depend on each
    /// other. Values that conflict at first are therefore set again after the others.
    fn restore(&mut self, bulkheads: &[BulkheadState], tenants: &[TenantState]) -> Result<(), String> {
        let (mut bulkheads, mut tenants) = (Vec::from_iter(bulkheads), Vec::from_iter(tenants));
        loop {
            let pending = bulkheads.len() + tenants.len();
            let mut conflict = None;
            bulkheads.retain(|state| is_failure(self.restore_bulkhead(state), &mut conflict));
            tenants.retain(|state| is_failure(self.restore_tenant(state), &mut conflict));
            match conflict {
                None => return Ok(()),
                Some(conflict) if bulkheads.len() + tenants.len() == pending => return Err(conflict),
                Some(_) => {}
            }
        }
    }

    fn restore_bulkhead(&mut self, state: &BulkheadState) -> Result<(), String> {
        let Some(bulkhead) = self.bulkheads.find(&state.name) else { return Ok(()) };
        let change = live_change(state, numbers_of(self.bulkheads[bulkhead].limits(&self.compartments)));
        let failed = |error: SteerError| {
            format!(
                "the values set at runtime for bulkhead '{}' conflict with its configuration: {error}",
                state.name
            )
        };
        if change != Change::default() {
            self.change(&state.name, &change).map_err(failed)?;
        }
        if state.closed.is_draining {
            self.steer(&state.name, SteerAction::Drain).map_err(failed)?;
        }
        Ok(())
    }

    fn restore_tenant(&mut self, state: &TenantState) -> Result<(), String> {
        let Some(bulkhead) = self.bulkheads.find(&state.bulkhead) else { return Ok(()) };
        let own = self.bulkheads[bulkhead].tenant_limits().get(&state.tenant).copied();
        let change = live_tenant_change(state, numbers_of_tenant(&own.unwrap_or_default()));
        if change == TenantChange::default() {
            return Ok(());
        }
        self.change_tenant(&state.bulkhead, &state.tenant, &change).map(drop).map_err(|error| {
            let TenantState { bulkhead, tenant, .. } = state;
            format!(
                "the values set at runtime for the tenant '{tenant}' in bulkhead '{bulkhead}' \
                 conflict with its configuration: {error}"
            )
        })
    }

    fn take_over(
        &mut self,
        held: Vec<Held>,
        quarantined: Vec<Quarantined>,
        switch: Switch,
        transfer: OwnedFd,
    ) {
        self.compartments.continue_after(switch.jobs_after);
        self.leases.continue_after(switch.leases_after);
        for held in held {
            self.predecessor_holds(&held);
        }
        for entry in quarantined {
            if let Some(index) = self.compartment_of(&entry.compartment) {
                self.apply(index, Event::Quarantine { digest: entry.digest() }, Incoming::None);
            }
        }
        if let Err(error) = register(&self.poll, &transfer) {
            self.reporter
                .trouble("the connections from the previous supervisor were lost", &error.to_string());
        }
        self.handover.transfer = Some(Transfer { socket: transfer, outbox: Outbox::default() });
    }

    fn compartment_of(&mut self, name: &CompartmentName) -> Option<CompartmentIndex> {
        let bulkhead = self.bulkheads.find(&name.bulkhead)?;
        let is_isolated = self.bulkheads[bulkhead].shared_compartment().is_none();
        // The configuration might have switched between a shared layout and isolated tenants.
        (is_isolated == name.tenant.is_some())
            .then(|| self.compartment_for(bulkhead, name.tenant.as_deref().unwrap_or_default()))
    }

    fn predecessor_holds(&mut self, held: &Held) {
        let Held { compartment, permits, waiting } = held;
        if let Some(index) = self.compartment_of(compartment) {
            self.handover.predecessor_holds(index, *permits);
            let event = Event::PredecessorHolds { permits: *permits, waiting: *waiting };
            self.apply(index, event, Incoming::None);
        }
    }

    fn predecessor_ended(&mut self) {
        self.receive_transfers();
        for index in self.handover.take_predecessor() {
            self.apply(index, Event::PredecessorHolds { permits: 0, waiting: 0 }, Incoming::None);
        }
    }

    fn receive_session(&mut self, frame: &Frame<'_>, descriptors: Vec<OwnedFd>) -> Result<(), FrameError> {
        let state: SessionState = frame.message()?;
        let socket = descriptors.into_iter().next().ok_or(FrameError::NoDescriptor)?;
        if state.capabilities & !crate::CLIENT_CAPABILITIES != 0 {
            return Ok(());
        }
        let socket = std::os::unix::net::UnixStream::from(socket);
        let client = match state.client {
            SessionClient::Peer => {
                let peer = peer_check::peer_of(&socket).ok();
                let grant = peer.and_then(|peer| self.access.grant(peer, &socket).ok());
                let owner = Owner::User(peer.map_or(u32::MAX, |peer| peer.uid));
                Client { peer, grant: grant.unwrap_or_else(Grant::none), owner, permit: None }
            }
            SessionClient::Operator { uid } => Client::passed_on(HttpClient::Operator { uid }),
            SessionClient::Token { id } => {
                let token = self.handover.tokens.iter().find(|token| token.id == id);
                let Some(token) = token else { return Ok(()) };
                Client::passed_on(HttpClient::Token(token.clone()))
            }
        };
        let is_crowded = client.permit.is_none() && self.is_full();
        let room = self.sessions.find_room(client.owner, is_crowded, self.limits.clients_max);
        let phase = if state.is_open { Phase::Open } else { Phase::AwaitingHello { since: self.now } };
        if let Ok(Some(idle)) = room {
            self.close_idle_session(idle);
        }
        let index = self.open_session(ClientEndpoint::Socket(socket), client, phase);
        if let Err(message) = room {
            self.reject_session(index, RejectReason::Overloaded, &message);
            self.flush_session(index);
        } else if let Some(session) = self.sessions.get_mut(index) {
            session.restore(&state, frame.payload);
            self.sessions.schedule_read(index);
        }
        Ok(())
    }

    // The transfer socket.

    /// Receives connections and permits from the predecessor. Called before the data plane reads from clients, so that
    /// waiting clients can get permits that the predecessor has freed.
    pub(crate) fn receive_transfers(&mut self) {
        if self.handover.transfer.is_none() || self.handover.is_under_way() {
            return;
        }
        let mut buffer = std::mem::take(&mut self.buffers.transfer);
        buffer.resize(MESSAGE_BYTES_MAX, 0);
        while let Some(transfer) = &self.handover.transfer {
            let (length, descriptors) = match packets::receive(&transfer.socket, &mut buffer) {
                Ok(Received::Message(length, descriptors)) => (length, descriptors),
                Ok(Received::Nothing) => break,
                Ok(Received::Closed) | Err(_) => {
                    self.close_transfer();
                    break;
                }
            };
            if let Err(error) = self.receive_transfer(&buffer[..length], descriptors) {
                self.reporter
                    .trouble("a message from the previous supervisor is invalid", &error.to_string());
            }
        }
        if self.handover.transfer.is_some() {
            self.buffers.transfer = buffer;
        }
    }

    fn receive_transfer(&mut self, bytes: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), FrameError> {
        let frame = Frame::decode(bytes)?;
        die_on_request("receive", frame.kind);
        match frame.kind {
            kind::SESSION => self.receive_session(&frame, descriptors),
            kind::HELD => {
                let held: Held = frame.message()?;
                self.predecessor_holds(&held);
                Ok(())
            }
            _ => frame.skip(),
        }
    }

    pub(crate) fn flush_transfer(&mut self) {
        let Some(transfer) = &mut self.handover.transfer else { return };
        if transfer.outbox.flush(&transfer.socket).is_err() {
            self.close_transfer();
        }
    }

    /// Closes the transfer socket. Connections still in the outbox are closed as well. If the other supervisor has
    /// exited, it could not have served them anyway.
    pub(crate) fn close_transfer(&mut self) {
        if let Some(transfer) = self.handover.transfer.take() {
            let _ = self.poll.registry().deregister(&mut SourceFd(&transfer.socket.as_raw_fd()));
        }
    }

    fn can_run_jobs(&self, bulkhead: BulkheadIndex) -> bool {
        let entry = &self.bulkheads[bulkhead];
        let mut compartments = entry.compartments().into_iter();
        entry.state(&self.compartments).0 == State::Ready
            || compartments.any(|index| self.compartments[index].policy.limit() > 0)
    }
}

fn register(poll: &mio::Poll, socket: &OwnedFd) -> std::io::Result<()> {
    let interest = Interest::READABLE | Interest::WRITABLE;
    poll.registry().register(&mut SourceFd(&socket.as_raw_fd()), TRANSFER, interest)
}

fn incoming_in(incoming: &[CompartmentIndex], index: CompartmentIndex) -> u32 {
    incoming.iter().filter(|compartment| **compartment == index).count() as u32
}

/// Returns true if the result is an error. Stores the error in `first` unless an earlier error is already stored there.
fn is_failure(attempt: Result<(), String>, first: &mut Option<String>) -> bool {
    attempt.map_err(|error| first.get_or_insert(error)).is_err()
}

/// Returns the change that applies the predecessor's live values to a bulkhead of the successor. `own` contains the
/// values in the successor's configuration file.
fn live_change(state: &BulkheadState, own: Numbers) -> Change {
    let (file, live) = (&state.file, &state.live);
    Change {
        processes: kept(own.processes, file.processes, live.processes),
        max_in_flight: kept(own.max_in_flight, file.max_in_flight, live.max_in_flight),
        max_queue: kept(own.max_queue, file.max_queue, live.max_queue),
        rate_limit: (own.rate_limit == file.rate_limit && live.rate_limit != file.rate_limit)
            .then(|| live.rate_limit.map(changed_rate)),
        breaker: state.closed.is_forced_open.then_some(BreakerMode::ForcedOpen),
    }
}

fn live_tenant_change(state: &TenantState, own: Numbers) -> TenantChange {
    let (file, live) = (&state.file, &state.live);
    let rate = kept(own.rate_limit, file.rate_limit, live.rate_limit);
    TenantChange {
        processes: kept(own.processes, file.processes, live.processes),
        max_in_flight: kept(own.max_in_flight, file.max_in_flight, live.max_in_flight),
        max_queue: kept(own.max_queue, file.max_queue, live.max_queue),
        rate_limit: rate.map(|(per_second, burst, _)| TenantRate { per_second, burst: Some(burst) }),
    }
}

/// Returns the live value that the successor must adopt. Returns `None` if the live value equals the value in the
/// predecessor's file, or if the successor's file has a different value.
fn kept<T: PartialEq>(own: Option<T>, file: Option<T>, live: Option<T>) -> Option<T> {
    live.filter(|live| own == file && file.as_ref() != Some(live))
}

fn changed_rate((per_second, burst, is_per_tenant): (f64, u32, bool)) -> ChangedRate {
    let per = if is_per_tenant { ChangedPer::Tenant } else { ChangedPer::Bulkhead };
    ChangedRate { per_second, burst: Some(burst), per: Some(per) }
}

fn rate_of(limit: RateLimit) -> (f64, u32, bool) {
    (limit.per_second, limit.burst, limit.per == RatePer::Tenant)
}

fn numbers_of(limits: &Limits) -> Numbers {
    Numbers {
        processes: Some(limits.processes),
        max_in_flight: Some(limits.max_in_flight),
        max_queue: Some(limits.max_queue),
        rate_limit: limits.rate_limit.map(rate_of),
    }
}

fn numbers_of_tenant(own: &TenantConfig) -> Numbers {
    Numbers {
        processes: own.processes,
        max_in_flight: own.max_in_flight,
        max_queue: own.max_queue,
        rate_limit: own.rate_limit.map(rate_of),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_live_value_only_if_file_has_not_changed() {
        assert_eq!(kept(Some(2), Some(2), Some(5)), Some(5));
        assert_eq!(kept(Some(2), Some(2), Some(2)), None);
        assert_eq!(kept(Some(3), Some(2), Some(5)), None);
        assert_eq!(kept(None, None, Some(5)), Some(5));
        assert_eq!(kept(None, None, None::<u32>), None);
    }
}

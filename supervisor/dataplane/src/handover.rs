//! State of an upgrade. Records the phase of the handover to a successor, and the compartments in which the predecessor
//! still needs permits.
//!
//! This module neither reads nor writes sockets. `wiring` performs the steps.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::Duration;

use bulkhead_linux::packets::Outbox;
use bulkhead_plane::access::TokenGrant;
use bulkhead_plane::handover::SwitchState;
use bulkhead_policy::Time;
use tokio::sync::oneshot;

use super::slab::CompartmentIndex;

/// Maximum time to wait for clients to return their leases. Longer than the time after which a recalled lease is
/// revoked, so that only leases in use by jobs are left when the wait ends.
const LEASES_TIMEOUT: Duration = Duration::from_secs(6);

/// Maximum number of messages in the transfer socket's outbox. No more connections are passed on while the
/// outbox is full.
const OUTBOX_MAX: usize = 64;

/// Number of permits that a compartment still needs, and number of its jobs that are waiting for one of these permits.
pub(super) type Needs = (u32, u32);

#[derive(Default)]
pub(super) struct Handover {
    phase: Phase,
    /// Number of permits and jobs of each compartment, as last reported to the successor. The numbers can only
    /// decrease.
    held: BTreeMap<CompartmentIndex, Needs>,
    /// Compartments in which the predecessor still needs permits.
    predecessor: BTreeSet<CompartmentIndex>,
    /// Socket connected to the data plane of the predecessor or successor.
    pub(super) transfer: Option<Transfer>,
    /// Permissions of each token. Applied to connections that the predecessor passes on.
    pub(super) tokens: Vec<TokenGrant>,
    /// Number of upgrades that this supervisor has started.
    pub(super) attempts: u64,
}

/// Socket for transferring connections, and the messages that have not been sent yet.
pub(super) struct Transfer {
    pub(super) socket: OwnedFd,
    pub(super) outbox: Outbox,
}

#[derive(Default)]
enum Phase {
    /// No upgrade is under way, or this supervisor is the successor.
    #[default]
    None,
    /// The successor is starting.
    Preparing,
    /// Waits for clients to return their leases.
    Switching { since: Time, transfer: OwnedFd, reply: oneshot::Sender<SwitchState> },
    /// The successor is about to take over. The data plane does not read from clients in this phase.
    Switched,
    /// The successor serves clients. If the successor fails, this supervisor serves clients again.
    Released,
    /// The successor has taken over permanently. This supervisor exits after its last job.
    Leaving,
}

impl Handover {
    /// Returns true while an upgrade is in progress. During an upgrade, operator commands are refused and no memory
    /// files are lent.
    pub(super) fn is_under_way(&self) -> bool {
        !matches!(self.phase, Phase::None)
    }

    /// Returns true if this supervisor no longer accepts jobs.
    pub(super) fn has_switched(&self) -> bool {
        matches!(self.phase, Phase::Switched | Phase::Released | Phase::Leaving)
    }

    /// Returns true if the data plane must not read from clients at the moment.
    pub(super) fn pauses_reading(&self) -> bool {
        matches!(self.phase, Phase::Switched)
    }

    /// Returns true if the successor is responsible for new requests and idle connections.
    pub(super) fn is_released(&self) -> bool {
        matches!(self.phase, Phase::Released | Phase::Leaving)
    }

    pub(super) fn is_leaving(&self) -> bool {
        matches!(self.phase, Phase::Leaving)
    }

    /// Returns true if an upgrade is in a phase that requires periodic checks.
    pub(super) fn needs_checks(&self) -> bool {
        matches!(self.phase, Phase::Switching { .. }) || self.is_released()
    }

    // Steps of the predecessor.

    pub(super) fn prepare(&mut self) {
        self.phase = Phase::Preparing;
        self.attempts += 1;
    }

    pub(super) fn begin_switch(
        &mut self,
        since: Time,
        transfer: OwnedFd,
        reply: oneshot::Sender<SwitchState>,
    ) {
        if matches!(self.phase, Phase::Preparing) {
            self.phase = Phase::Switching { since, transfer, reply };
        }
    }

    /// Stops waiting for leases if no lease is idle or the timeout has expired, and returns the channel for the reply.
    /// `has_idle_leases` is true if at least one lease is not in use by a job.
    pub(super) fn end_wait(
        &mut self,
        now: Time,
        has_idle_leases: bool,
    ) -> Option<oneshot::Sender<SwitchState>> {
        match std::mem::take(&mut self.phase) {
            Phase::Switching { since, transfer, reply }
                if !has_idle_leases || now.since(since) >= LEASES_TIMEOUT =>
            {
                self.phase = Phase::Switched;
                self.transfer = Some(Transfer { socket: transfer, outbox: Outbox::default() });
                Some(reply)
            }
            phase => {
                self.phase = phase;
                None
            }
        }
    }

    pub(super) fn release(&mut self) {
        if matches!(self.phase, Phase::Switched) {
            self.phase = Phase::Released;
        }
    }

    pub(super) fn leave(&mut self) {
        if matches!(self.phase, Phase::Released) {
            self.phase = Phase::Leaving;
        }
    }

    /// Resets the state after a failed upgrade. The caller must then lift the temporary limits on the number of permits
    /// in each compartment.
    pub(super) fn take_back(&mut self) {
        self.phase = Phase::None;
        self.held.clear();
    }

    /// Records the number of permits that a compartment needs when the successor takes over.
    pub(super) fn hold(&mut self, compartment: CompartmentIndex, needs: Needs) {
        self.held.insert(compartment, needs);
    }

    /// Returns the compartments that might still need permits.
    pub(super) fn holders(&self) -> Vec<CompartmentIndex> {
        self.held.keys().copied().collect()
    }

    /// Updates the number of permits and jobs recorded for a compartment. If the numbers have decreased, returns the
    /// new numbers, which must be reported to the successor.
    pub(super) fn update(&mut self, compartment: CompartmentIndex, needs: Needs) -> Option<Needs> {
        let known = self.held.get_mut(&compartment)?;
        let permits = known.0.min(needs.0 + needs.1);
        let after = (permits, known.1.min(needs.0 + needs.1 - permits));
        let before = std::mem::replace(known, after);
        if after.0 == 0 {
            self.held.remove(&compartment);
        }
        (after != before).then_some(after)
    }

    /// Returns true if idle connections must be moved to the successor. If the transfer socket is closed, the successor
    /// has probably failed. This supervisor then keeps its connections until the outcome of the upgrade is known.
    pub(super) fn moves_connections(&self) -> bool {
        self.is_leaving() || self.is_released() && self.transfer.is_some()
    }

    /// Returns true if there is room to pass on another connection. Without a transfer socket, there is always room,
    /// because the connection is then only closed.
    pub(super) fn has_room(&self) -> bool {
        self.transfer.as_ref().is_none_or(|transfer| transfer.outbox.len() < OUTBOX_MAX)
    }

    // The successor.

    /// Records whether the predecessor still needs permits in a compartment. `permits` is the number that it needs.
    pub(super) fn predecessor_holds(&mut self, compartment: CompartmentIndex, permits: u32) {
        let _ = if permits > 0 {
            self.predecessor.insert(compartment)
        } else {
            self.predecessor.remove(&compartment)
        };
    }

    /// Returns the compartments in which the predecessor needed permits, and clears the list. Called once the
    /// predecessor has exited.
    pub(super) fn take_predecessor(&mut self) -> BTreeSet<CompartmentIndex> {
        std::mem::take(&mut self.predecessor)
    }
}

#[cfg(test)]
mod tests {
    use super::super::slab::SlabIndex;
    use super::*;

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    fn switching() -> (Handover, oneshot::Receiver<SwitchState>) {
        let mut handover = Handover::default();
        handover.prepare();
        let (reply, receiver) = oneshot::channel();
        let (here, _there) = bulkhead_linux::packets::pair(1024).unwrap();
        handover.begin_switch(at(0), here, reply);
        (handover, receiver)
    }

    #[test]
    fn switch_waits_for_return_of_idle_leases_until_timeout() {
        let (mut handover, _receiver) = switching();
        assert!(handover.end_wait(at(1), true).is_none() && !handover.has_switched());
        assert!(handover.needs_checks() && !handover.pauses_reading());
        assert!(handover.end_wait(at(2), false).is_some() && handover.pauses_reading());
        handover.release();
        assert!(handover.is_released() && !handover.pauses_reading());
        let (mut handover, _receiver) = switching();
        assert!(handover.end_wait(at(6000), true).is_some());
    }

    #[test]
    fn keeps_connections_after_failure_of_the_successor() {
        let (mut handover, _receiver) = switching();
        handover.end_wait(at(1), false);
        handover.release();
        assert!(handover.moves_connections());
        handover.transfer = None;
        assert!(!handover.moves_connections());
        // This supervisor exits after its last connection, even if it could not pass on the others.
        handover.leave();
        assert!(handover.moves_connections() && handover.has_room());
    }

    #[test]
    fn steps_out_of_order_have_no_effect() {
        let mut handover = Handover::default();
        handover.release();
        handover.leave();
        assert!(!handover.is_under_way() && handover.end_wait(at(0), false).is_none());
        let (mut handover, _receiver) = switching();
        handover.leave();
        handover.take_back();
        assert!(!handover.is_under_way());
    }

    #[test]
    fn number_of_needed_permits_only_decreases() {
        let compartment = CompartmentIndex::from_number(3);
        let mut handover = Handover::default();
        assert_eq!(handover.update(compartment, (1, 0)), None);
        handover.hold(compartment, (4, 2));
        assert_eq!(handover.update(compartment, (4, 2)), None);
        assert_eq!(handover.update(compartment, (4, 1)), Some((4, 1)));
        // Fewer workers are ready, but the waiting jobs will still need permits later.
        assert_eq!(handover.update(compartment, (2, 3)), None);
        assert_eq!(handover.update(compartment, (3, 0)), Some((3, 0)));
        assert_eq!(handover.update(compartment, (0, 0)), Some((0, 0)));
        assert_eq!(handover.update(compartment, (1, 0)), None);
        assert!(handover.holders().is_empty());
    }
}

//! Workers that have more in their temporary folders than they may: the control plane looks, and tells.

use super::Shard;

impl Shard {
    /// Ends a worker whose temporary folder holds so much, if that is too much.
    pub(super) fn temporary(&mut self, spawn: u64, bytes: u64) {
        let Some(&index) = self.links_by_spawn.get(&spawn) else { return };
        let Some(link) = self.links[index].as_mut() else { return };
        let is_too_much = link.program.sandbox().temporary_bytes().is_some_and(|most| bytes > most);
        if is_too_much && !link.is_overfull {
            link.is_overfull = true;
            // An error means that the keeper is gone, which is noticed and dealt with elsewhere.
            let _ = self.keeper.kill(spawn);
            self.ask_keeper();
        }
    }

    /// Whether a worker was ended for that.
    pub(super) fn is_overfull(&self, spawn: u64) -> bool {
        let link = self.links_by_spawn.get(&spawn).and_then(|&index| self.links[index].as_ref());
        link.is_some_and(|link| link.is_overfull)
    }
}

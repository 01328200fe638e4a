//! Workers that have more in their temporary folders than they may: the control plane looks, and tells.

use super::DataPlane;
use super::links::End;

impl DataPlane {
    /// Ends a worker whose temporary folder holds so much, if that is too much; that of a template, without those of
    /// its workers.
    pub(super) fn temporary(&mut self, spawn: u64, (bytes, apart): (u64, u64), of: Option<u64>) {
        let Some(link) = self.links.of_spawn_mut(spawn) else { return self.template_holds(spawn, apart) };
        if link.template != of {
            // Any worker can make a folder that is called like that of another one.
            return;
        }
        let is_too_much = link.program.sandbox().temporary_bytes().is_some_and(|most| bytes > most);
        if is_too_much && matches!(link.end, End::None) {
            link.end = End::Overfull;
            self.keeper.kill(spawn, self.now);
            self.want_housekeeping();
        }
    }

    /// Whether a worker was ended for that.
    pub(super) fn is_overfull(&self, spawn: u64) -> bool {
        self.links.of_spawn(spawn).is_some_and(|link| matches!(link.end, End::Overfull))
    }
}

//! Ends workers whose temporary folders are too large. The control plane measures the folders and sends the sizes.

use super::DataPlane;
use super::links::End;

impl DataPlane {
    /// Ends a worker whose temporary folder is too large. For a template, `apart` is the size without the folders of
    /// workers.
    pub(super) fn check_temporary_folder(&mut self, spawn: u64, (bytes, apart): (u64, u64), of: Option<u64>) {
        let Some(link) = self.links.of_spawn_mut(spawn) else {
            return self.check_template_folder(spawn, apart);
        };
        if link.template != of {
            // Any worker can create a folder with the name of another worker's folder.
            return;
        }
        let is_too_much = link.program.sandbox().temporary_bytes().is_some_and(|most| bytes > most);
        if is_too_much && matches!(link.end, End::None) {
            link.end = End::Overfull;
            self.keeper.kill(spawn, self.now);
            self.schedule_checks();
        }
    }

    /// Returns true if the worker was ended because of a temporary folder that was too large.
    pub(super) fn is_overfull(&self, spawn: u64) -> bool {
        self.links.of_spawn(spawn).is_some_and(|link| matches!(link.end, End::Overfull))
    }
}

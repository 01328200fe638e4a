//! Landlock rules that the next worker can have as well: to look a hundred paths up takes longer than the fork.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::keeper::confine::landlock::{Failure, Rules, Ruleset};

/// How long rules are good for another worker. What is replaced in the system meanwhile is closed to that one,
/// as it is to any that was started a moment before.
const FRESH: Duration = Duration::from_millis(250);

/// Workers that have the same rules one after the other. Each adds one for its temporary folder.
const USES_MAX: u32 = 16;

/// Rules that are kept.
const KEPT_MAX: usize = 64;

/// The rules of workers that were started just now, for those that are started in their place; oldest first.
#[derive(Default)]
pub(in crate::keeper) struct Rulesets(Vec<Kept>);

struct Kept {
    made_of: MadeOf,
    made: Instant,
    uses: u32,
    /// The worker under these rules. What is its own is open to whoever has the same, so nobody has.
    holder: Option<u64>,
    ruleset: Arc<Ruleset>,
}

/// What rules are made of, but for a folder of the worker's own.
#[derive(PartialEq)]
struct MadeOf {
    paths: [Vec<PathBuf>; 4],
    directory: Option<PathBuf>,
    network: bool,
    /// What the paths that somebody named lead to.
    found: Vec<Option<File>>,
}

/// A file, and when the names in it last changed if it is a folder.
#[derive(PartialEq)]
struct File {
    device: u64,
    inode: u64,
    changed: Option<(i64, i64)>,
}

impl Rulesets {
    /// Rules for a worker: those of one of which nothing is left, or new ones.
    pub(super) fn get(&mut self, worker: u64, rules: &Rules<'_>) -> Result<Arc<Ruleset>, Failure> {
        let now = Instant::now();
        self.expire(now);
        self.0.retain(|kept| kept.uses < USES_MAX);
        let made_of = MadeOf::new(rules);
        let kept = self.0.iter_mut().find(|kept| kept.holder.is_none() && kept.made_of == made_of);
        if let Some(kept) = kept {
            if let Some(folder) = rules.temporary {
                kept.ruleset
                    .add_temporary(&CString::new(folder.as_os_str().as_bytes()).unwrap_or_default())?;
            }
            kept.uses += 1;
            kept.holder = Some(worker);
            return Ok(kept.ruleset.clone());
        }
        let ruleset = Arc::new(Ruleset::prepare(rules)?);
        if self.0.len() < KEPT_MAX {
            let ruleset = ruleset.clone();
            self.0.push(Kept { made_of, made: now, uses: 1, holder: Some(worker), ruleset });
        }
        Ok(ruleset)
    }

    /// Drops what is too old for another worker.
    pub(in crate::keeper) fn expire(&mut self, now: Instant) {
        self.0.retain(|kept| now < kept.made + FRESH);
    }

    /// When the next are too old.
    pub(in crate::keeper) fn next_expiry(&self) -> Option<Instant> {
        self.0.first().map(|oldest| oldest.made + FRESH)
    }

    /// Nothing is left of a worker, nor of its temporary folder.
    pub(in crate::keeper) fn release(&mut self, worker: u64) {
        if let Some(kept) = self.0.iter_mut().find(|kept| kept.holder == Some(worker)) {
            kept.holder = None;
        }
    }
}

impl MadeOf {
    fn new(rules: &Rules<'_>) -> Self {
        let folders = rules.programs.iter().filter_map(|program| program.parent()).chain(rules.directory);
        let files = rules.programs.iter().chain(rules.read).chain(rules.write).copied();
        let found =
            folders.map(|path| File::look(path, true)).chain(files.map(|path| File::look(path, false)));
        let owned = |paths: &[&Path]| paths.iter().map(PathBuf::from).collect();
        Self {
            paths: [rules.programs, rules.read, rules.write, rules.withheld].map(owned),
            directory: rules.directory.map(PathBuf::from),
            network: rules.network,
            found: found.collect(),
        }
    }
}

impl File {
    fn look(path: &Path, with_names: bool) -> Option<Self> {
        let found = std::fs::metadata(path).ok()?;
        let changed = with_names.then(|| (found.mtime(), found.mtime_nsec()));
        Some(Self { device: found.dev(), inode: found.ino(), changed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a second worker gets the rules of a first after something has happened.
    fn are_shared(between: impl FnOnce(&mut Rulesets, &Path)) -> bool {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::write(&program, "").unwrap();
        // What happens next is not to happen in the same tick of a coarse clock.
        let before = std::time::SystemTime::now() - Duration::from_secs(1);
        std::fs::File::open(folder.path()).unwrap().set_modified(before).unwrap();
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let programs = [program.as_path()];
        let rules = |own| Rules { programs: &programs, temporary: Some(own), ..Rules::default() };
        let mut rulesets = Rulesets::default();
        let first = rulesets.get(1, &rules(one.path())).unwrap();
        between(&mut rulesets, &program);
        let second = rulesets.get(2, &rules(other.path())).unwrap();
        Arc::ptr_eq(&first, &second)
    }

    #[test]
    fn who_is_started_in_the_place_of_another_has_its_rules() {
        assert!(are_shared(|rulesets, _| rulesets.release(1)));
    }

    #[test]
    fn what_lives_shares_with_nobody() {
        assert!(!are_shared(|_, _| {}));
        assert!(!are_shared(|rulesets, _| rulesets.release(3)));
    }

    #[test]
    fn a_program_that_is_replaced_is_looked_up_again() {
        assert!(!are_shared(|rulesets, program| {
            rulesets.release(1);
            let new = program.with_extension("new");
            std::fs::write(&new, "").unwrap();
            std::fs::rename(&new, program).unwrap();
        }));
    }

    #[test]
    fn what_is_new_beside_the_program_is_looked_up() {
        assert!(!are_shared(|rulesets, program| {
            rulesets.release(1);
            std::fs::write(program.with_extension("data"), "").unwrap();
        }));
    }

    #[test]
    fn rules_are_not_kept_for_ever() {
        let rules = Rules::default();
        let mut rulesets = Rulesets::default();
        let first = rulesets.get(0, &rules).unwrap();
        for worker in 1..u64::from(USES_MAX) {
            rulesets.release(worker - 1);
            assert!(Arc::ptr_eq(&first, &rulesets.get(worker, &rules).unwrap()), "{worker}");
        }
        rulesets.release(u64::from(USES_MAX) - 1);
        assert!(!Arc::ptr_eq(&first, &rulesets.get(100, &rules).unwrap()));
        rulesets.release(100);
        rulesets.0.iter_mut().for_each(|kept| kept.made -= FRESH);
        assert!(rulesets.next_expiry().is_some_and(|at| at <= Instant::now()));
        let second = rulesets.get(101, &rules).unwrap();
        assert_eq!((rulesets.0.len(), Arc::strong_count(&second)), (1, 2));
        for worker in 200..300 {
            rulesets.get(worker, &rules).unwrap();
        }
        assert_eq!(rulesets.0.len(), KEPT_MAX);
        rulesets.expire(Instant::now() + FRESH);
        assert_eq!((rulesets.0.len(), rulesets.next_expiry()), (0, None));
    }
}

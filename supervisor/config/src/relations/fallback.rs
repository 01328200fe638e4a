//! Checks the `fallback` key. Each name must be the name of another bulkhead in the file, and must occur only once.
//! Cycles are not rejected, because the data plane tries each fallback at most once for a job.

use super::Checker;
use crate::diagnostics::shown;
use crate::file::RawBulkhead;
use crate::reader::{Given, Origin};
use crate::values::ValueError;

impl Checker<'_> {
    /// Returns all names in a bulkhead's `fallback` list, and reports the invalid names. `names` contains the names of
    /// all bulkheads in the file.
    pub(super) fn fallback(&mut self, raw: &RawBulkhead, names: &[String]) -> Vec<String> {
        let Some(given) = raw.fallback.given() else { return Vec::new() };
        let mut taken: Vec<String> = Vec::new();
        for name in &given.value {
            if let Some(error) = name_error(name, &raw.name, names, &taken) {
                self.report_error(name.span.clone(), error);
            }
            taken.push(name.value.clone());
        }
        taken
    }
}

/// Returns an error if `name` is not a valid fallback for the bulkhead `own`. `before` contains the names that precede
/// `name` in the list of fallbacks.
fn name_error(name: &Given<String>, own: &str, names: &[String], before: &[String]) -> Option<ValueError> {
    if before.contains(&name.value) {
        return Some(ValueError::new(
            format!("`fallback` contains `{}` twice", shown(&name.value)),
            "remove one of the entries: each bulkhead is tried at most once for a job",
        ));
    }
    if name.value == own {
        return Some(match name.origin {
            Origin::Defaults => ValueError::new(
                format!(
                    "bulkhead `{own}` would be a fallback of itself: `fallback` in [defaults] names this bulkhead"
                ),
                format!("set `fallback` in [bulkhead.{own}], as in `fallback = []` for no fallback"),
            ),
            Origin::Own | Origin::Tenant => ValueError::new(
                format!("bulkhead `{}` is a fallback of itself", shown(own)),
                "write the name of another bulkhead, or remove this name",
            ),
        });
    }
    if !names.contains(&name.value) {
        let message =
            format!("`fallback` contains `{}`, but there is no bulkhead of that name", shown(&name.value));
        return Some(ValueError::new(message, suggest_name(&name.value, own, names)));
    }
    None
}

fn suggest_name(name: &str, own: &str, names: &[String]) -> String {
    let others: Vec<&str> = names.iter().map(String::as_str).filter(|other| *other != own).collect();
    match others.as_slice() {
        [] => "the configuration file has no other bulkhead: add a [bulkhead.NAME] section, or remove this \
               name"
            .to_owned(),
        others => Checker::suggest_name(name, others, "other bulkheads"),
    }
}

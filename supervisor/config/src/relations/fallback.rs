//! Rules for `fallback`: each name is another bulkhead of the file, without duplicates.

use super::Checker;
use crate::diagnostics::shown;
use crate::file::RawBulkhead;
use crate::reader::{Given, Origin};
use crate::values::Complaint;

impl Checker<'_> {
    /// Checks the fallbacks of a bulkhead. `names` contains all bulkhead names in the file.
    pub(super) fn fallback(&mut self, raw: &RawBulkhead, names: &[String]) -> Vec<String> {
        let Some(given) = raw.fallback.given() else { return Vec::new() };
        let mut taken: Vec<String> = Vec::new();
        for name in &given.value {
            if let Some(complaint) = judge(name, &raw.name, names, &taken) {
                self.complain(name.span.clone(), complaint);
            }
            taken.push(name.value.clone());
        }
        taken
    }
}

/// Returns the problem with `name` in the `fallback` of bulkhead `own`, after the names in `before`.
fn judge(name: &Given<String>, own: &str, names: &[String], before: &[String]) -> Option<Complaint> {
    if before.contains(&name.value) {
        return Some(Complaint::new(
            format!("`fallback` names `{}` twice", shown(&name.value)),
            "remove one: a job tries each bulkhead at most once",
        ));
    }
    if name.value == own {
        return Some(match name.origin {
            Origin::Defaults => Complaint::new(
                format!("bulkhead `{own}` would be its own fallback: the `fallback` of [defaults] names it"),
                format!("give [bulkhead.{own}] a `fallback` of its own, as in `fallback = []` for none"),
            ),
            Origin::Own | Origin::Tenant => Complaint::new(
                format!("bulkhead `{}` is its own fallback", shown(own)),
                "name another bulkhead, or remove it",
            ),
        });
    }
    if !names.contains(&name.value) {
        let message = format!("`fallback` names `{}`, and there is no such bulkhead", shown(&name.value));
        return Some(Complaint::new(message, instead(&name.value, own, names)));
    }
    None
}

fn instead(name: &str, own: &str, names: &[String]) -> String {
    let others: Vec<&str> = names.iter().map(String::as_str).filter(|other| *other != own).collect();
    match others.as_slice() {
        [] => "there is no other: add a section [bulkhead.NAME] for it, or remove it".to_owned(),
        others => Checker::instead(name, others, "other bulkheads"),
    }
}

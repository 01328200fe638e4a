//! Rejects `start.mode = "fork"` for bulkheads that cannot fork their workers from a template. These are bulkheads with
//! `exec`, `library` or isolated tenants. The `plane` crate checks whether this machine supports forked workers.

use bulkhead_policy::StartMode;

use super::Checker;
use crate::file::RawBulkhead;
use crate::keys::bulkhead::{BulkheadConfig, Program};
use crate::values::ValueError;

impl Checker<'_> {
    pub(super) fn check_start_mode(&mut self, raw: &RawBulkhead, bulkhead: &BulkheadConfig) {
        if bulkhead.start.mode != StartMode::Fork {
            return;
        }
        let Some(position) = raw.start.mode.given().map(|given| given.span.clone()) else { return };
        let name = &bulkhead.name;
        let error = match &bulkhead.program {
            Program::Exec { .. } => ValueError::new(
                format!(
                    "bulkhead `{name}` cannot fork its workers: with `exec`, each job runs a new program"
                ),
                "remove `mode`: each job already runs in a fresh process",
            ),
            Program::Library { .. } => ValueError::new(
                format!(
                    "bulkhead `{name}` cannot fork its workers: a library cannot report which \
                     state its workers would inherit"
                ),
                "remove `mode`, or write a worker with the SDK and set `command`",
            ),
            Program::Command { .. } if bulkhead.isolation().is_some() => ValueError::new(
                format!("bulkhead `{name}` cannot fork its workers: isolated tenants would share a template"),
                "remove `mode`, or `tenants.isolate`",
            ),
            Program::Command { .. } => return,
        };
        self.report_error(position, error);
    }
}
